//! Loads a running server with several clients: how much all get done together, and how long a quiet one waits beside
//! those that send as fast as they can.
//!
//! `waystation up`, then `cargo run --release -p waystation-tests --bin load -- --address 127.0.0.1:PORT`.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use clap::Parser;
use waystation_client::{Client, Error, Request, Response, request};
use waystation_proto::xla::ifrt::proxy::{CheckValueReadyRequest, DestructArrayRequest};

/// Throughput of one client and of several, and the waiting time of a quiet one alone and among others; one JSON line.
#[derive(Debug, Parser)]
struct Options {
    /// The proxy, "host:port".
    #[arg(long)]
    address: String,
    /// Clients of the crowd; the quiet one is one of them.
    #[arg(long, default_value_t = 16)]
    clients: usize,
    /// Of each measurement.
    #[arg(long, default_value_t = 5)]
    seconds: u64,
    /// A program of one `f32[4]` to another, as JAX sends it, in place of x + 1 as text.
    #[arg(long)]
    program: Option<std::path::PathBuf>,
}

/// x + 1 over four f32.
const ADD_ONE: &[u8] =
    b"module @jit_add_one { func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.constant dense<1.0> : tensor<4xf32>
  %1 = stablehlo.add %arg0, %0 : tensor<4xf32>
  return %1 : tensor<4xf32> } }";

/// Executes that a busy client sends before it waits for the last of them.
const BURST: u64 = 1000;

/// What clients connect to, and the program that they run.
#[derive(Debug, Clone)]
struct Target {
    address: String,
    program: Bytes,
}

/// A client with a program and an array to run it on.
struct Party {
    client: Client,
    program: u64,
    array: u64,
}

impl Party {
    async fn join(target: &Target) -> Result<Self, Error> {
        let client = Client::connect(&target.address).await?;
        let compiled = client.call(request::compile(&target.program, &[0])).await?;
        let Response::CompileResponse(compiled) = compiled else {
            return Err(Error::WrongReply);
        };
        let program = compiled.loaded_executable_handle;
        let array = client.handle();
        client.store(array, Bytes::from_static(&[0; 16])).await?;
        client
            .call(request::make_array(array, &[4], &[0], None))
            .await?;
        // The first execution tells what the results are.
        client
            .call(request::execute(program, &[array], &[], 0))
            .await?;
        Ok(Self {
            client,
            program,
            array,
        })
    }

    /// Sends one execute of the chain, and forgets its input.
    async fn step(&mut self) {
        let result = self.client.handle();
        let execute = request::execute(self.program, &[self.array], &[result], 1);
        self.client.send(execute).await;
        let forget = Request::DestructArrayRequest(DestructArrayRequest {
            array_handle: vec![self.array],
        });
        self.client.send(forget).await;
        self.array = result;
    }

    async fn wait(&self) -> Result<(), Error> {
        let ready = Request::CheckValueReadyRequest(CheckValueReadyRequest {
            value_handles: vec![self.array],
        });
        self.client.call(ready).await.map(|_| ())
    }

    /// Sends as fast as it can until told to stop; counts what has been executed.
    async fn flood(mut self, stop: Arc<AtomicBool>, done: Arc<AtomicU64>) -> Result<(), Error> {
        while !stop.load(Relaxed) {
            for _ in 0..BURST {
                self.step().await;
            }
            self.wait().await?;
            done.fetch_add(BURST, Relaxed);
        }
        Ok(())
    }

    /// Executes and waits, again and again: each round's time.
    async fn rounds(&mut self, limit: Duration) -> Result<Vec<Duration>, Error> {
        let begun = Instant::now();
        let mut times = Vec::new();
        while begun.elapsed() < limit {
            let round = Instant::now();
            self.step().await;
            self.wait().await?;
            times.push(round.elapsed());
        }
        times.sort_unstable();
        Ok(times)
    }
}

/// The rounds of a client on a thread of its own: beside the crowd's tasks it would wait for their turns in this process.
async fn quiet(target: &Target, limit: Duration) -> Result<Vec<Duration>, Error> {
    let target = target.clone();
    let rounds = move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|_| Error::SessionEnded)?;
        runtime.block_on(async { Party::join(&target).await?.rounds(limit).await })
    };
    let thread = tokio::task::spawn_blocking(rounds);
    thread.await.map_err(|_| Error::SessionEnded)?
}

/// Floods with so many clients while `meanwhile` runs; gives the executes a second, and its result.
async fn crowd<T>(
    target: &Target,
    clients: usize,
    meanwhile: impl Future<Output = Result<T, Error>>,
) -> Result<(f64, T), Error> {
    let (stop, done) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
    );
    let mut floods = tokio::task::JoinSet::new();
    for _ in 0..clients {
        let party = Party::join(target).await?;
        floods.spawn(party.flood(Arc::clone(&stop), Arc::clone(&done)));
    }
    let begun = Instant::now();
    let result = meanwhile.await?;
    stop.store(true, Relaxed);
    while let Some(flood) = floods.join_next().await {
        flood.map_err(|_| Error::SessionEnded)??;
    }
    Ok((
        done.load(Relaxed) as f64 / begun.elapsed().as_secs_f64(),
        result,
    ))
}

/// The time that so many of a hundred rounds took at most, in microseconds.
fn percentile(sorted: &[Duration], percent: usize) -> u128 {
    let index = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(1));
    sorted.get(index).map_or(0, Duration::as_micros)
}

async fn measure(options: &Options, target: &Target) -> Result<String, Error> {
    let limit = Duration::from_secs(options.seconds);
    let pause = || async {
        tokio::time::sleep(limit).await;
        Ok(())
    };
    let (one, ()) = crowd(target, 1, pause()).await?;
    let (all, ()) = crowd(target, options.clients, pause()).await?;
    let alone = quiet(target, limit).await?;
    let others = options.clients.saturating_sub(1);
    let (_, among) = crowd(target, others, quiet(target, limit)).await?;
    Ok(format!(
        "{{\"clients\": {}, \"one_per_second\": {one:.0}, \"all_per_second\": {all:.0}, \
         \"alone_p50_us\": {}, \"alone_p99_us\": {}, \"among_p50_us\": {}, \"among_p99_us\": {}}}",
        options.clients,
        percentile(&alone, 50),
        percentile(&alone, 99),
        percentile(&among, 50),
        percentile(&among, 99),
    ))
}

#[tokio::main]
async fn main() -> io::Result<()> {
    let options = Options::parse();
    let program = match &options.program {
        Some(path) => std::fs::read(path)?.into(),
        None => Bytes::from_static(ADD_ONE),
    };
    let target = Target {
        address: options.address.clone(),
        program,
    };
    let line = measure(&options, &target).await.map_err(io::Error::other)?;
    use io::Write as _;
    writeln!(io::stdout(), "{line}")
}
