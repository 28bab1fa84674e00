//! A session that works on while others do wrong, and checks every result.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use waystation_client::{Client, Error, Request, Response, request};
use waystation_proto::xla::ifrt::proxy::DestructArrayRequest;

/// y = x + x over four f32.
pub const DOUBLE: &[u8] =
    b"module @jit_double { func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %arg0, %arg0 : tensor<4xf32>
  return %0 : tensor<4xf32> } }";

/// Between two rounds. Without it the witness, not what it watches, would have most of the processor.
const PACE: Duration = Duration::from_millis(10);

/// See the module.
#[derive(Debug)]
pub struct Witness {
    rounds: Arc<AtomicU64>,
    stop: CancellationToken,
    task: JoinHandle<Result<(), String>>,
}

impl Witness {
    /// Opens a session and lets it work until [`Self::end`].
    ///
    /// # Errors
    /// When the server does not take it.
    pub async fn start(address: &str) -> Result<Self, Error> {
        let client = Client::connect(address).await?;
        let device = client
            .init()
            .primary_device_ids
            .first()
            .copied()
            .unwrap_or(0);
        let program = match client.call(request::compile(DOUBLE, &[device])).await? {
            Response::CompileResponse(compiled) => compiled.loaded_executable_handle,
            _ => return Err(Error::WrongReply),
        };
        let rounds = Arc::new(AtomicU64::new(0));
        let stop = CancellationToken::new();
        let (count, end) = (Arc::clone(&rounds), stop.clone());
        let task = tokio::spawn(async move {
            while !end.is_cancelled() {
                let round = count.load(Relaxed);
                work(&client, program, device, round)
                    .await
                    .map_err(|e| format!("round {round}: {e}"))?;
                count.fetch_add(1, Relaxed);
                tokio::time::sleep(PACE).await;
            }
            Ok(())
        });
        Ok(Self { rounds, stop, task })
    }

    /// Rounds that came out right so far.
    pub fn rounds(&self) -> u64 {
        self.rounds.load(Relaxed)
    }

    /// Waits until `n` more rounds came out right, or the session has failed.
    pub async fn more(&self, n: u64) {
        let until = self.rounds() + n;
        while self.rounds() < until && !self.task.is_finished() {
            tokio::task::yield_now().await;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Ends the session; gives the number of rounds.
    ///
    /// # Errors
    /// What went wrong in the first round that was not right.
    pub async fn end(self) -> Result<u64, String> {
        self.stop.cancel();
        self.task.await.map_err(|e| e.to_string())??;
        Ok(self.rounds.load(Relaxed))
    }
}

/// Puts, executes, fetches, compares.
async fn work(client: &Client, program: u64, device: i32, round: u64) -> Result<(), String> {
    let say = |what: &'static str| move |e: Error| format!("{what}: {e}");
    let first = (round % 4096) as f32;
    let values: Vec<f32> = (0..4u8).map(|i| first + f32::from(i)).collect();
    let (array, result, buffer) = (client.handle(), client.handle(), client.handle());
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    client
        .store(array, Bytes::from(bytes))
        .await
        .map_err(say("store"))?;
    client
        .call(request::make_array(array, &[4], &[device], None))
        .await
        .map_err(say("make"))?;
    let launch = i32::try_from(round % 1_000_000).unwrap_or(0);
    client
        .call(request::execute(program, &[array], &[result], launch))
        .await
        .map_err(say("execute"))?;
    client
        .call(request::copy_to_host(result, buffer))
        .await
        .map_err(say("copy"))?;
    let fetched = client.lookup(buffer).await.map_err(say("lookup"))?;
    client.delete(buffer).await.map_err(say("delete"))?;
    let expected: Vec<u8> = values.iter().flat_map(|v| (v + v).to_le_bytes()).collect();
    if fetched != expected {
        return Err(format!("{values:?} doubled gave {fetched:?}"));
    }
    client
        .call(Request::DestructArrayRequest(DestructArrayRequest {
            array_handle: vec![array, result],
        }))
        .await
        .map_err(say("destruct"))?;
    Ok(())
}
