//! Several clients at once: one that sends as fast as it can is slowed, the others are served meanwhile, and each has its
//! own account.
//!
//! `WAYSTATION_SOAK=1` (set by `make soak`) runs the flood at full length.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use waystation_client::{Client, Request, Response, request};
use waystation_proto::xla::ifrt::proxy::{CheckValueReadyRequest, DestructArrayRequest};
use waystation_tests::cluster::Cluster;

/// x + 1 over four f32.
const ADD_ONE: &[u8] =
    b"module @jit_add_one { func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.constant dense<1.0> : tensor<4xf32>
  %1 = stablehlo.add %arg0, %0 : tensor<4xf32>
  return %1 : tensor<4xf32> } }";

/// Ops that may be queued for one session in the proxy: its lane, and clean-up beside it.
const QUEUED_PER_SESSION: u64 = 2 * 128;
/// What the process may grow by, in bytes: the client's side is in it as well.
const GROWTH_BYTES: u64 = 64 << 20;

fn executes() -> u64 {
    match std::env::var_os("WAYSTATION_SOAK") {
        Some(_) => 100_000,
        None => 5_000,
    }
}

async fn put(client: &Client, values: &[f32]) -> u64 {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let handle = client.handle();
    client
        .store(handle, Bytes::from(bytes))
        .await
        .expect("stored");
    let dims = [i64::try_from(values.len()).expect("small")];
    client
        .call(request::make_array(handle, &dims, &[0], None))
        .await
        .expect("made");
    handle
}

async fn compile(client: &Client) -> u64 {
    match client.call(request::compile(ADD_ONE, &[0])).await {
        Ok(Response::CompileResponse(compiled)) => compiled.loaded_executable_handle,
        other => panic!("{other:?}"),
    }
}

async fn fetch(client: &Client, array: u64) -> Vec<f32> {
    let buffer = client.handle();
    client
        .call(request::copy_to_host(array, buffer))
        .await
        .expect("copied");
    let bytes = client.lookup(buffer).await.expect("there");
    client.delete(buffer).await.expect("known");
    bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect()
}

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages = statm.split_whitespace().nth(1).expect("resident pages");
    pages.parse::<u64>().expect("a number") * 4096
}

/// Sends a chain of executes without waiting for any answer, dropping each input behind it.
async fn flood(client: &Client, program: u64, mut array: u64, count: u64) -> u64 {
    for step in 0..count {
        let result = client.handle();
        client
            .send(request::execute(
                program,
                &[array],
                &[result],
                i32::try_from(step).expect("few"),
            ))
            .await;
        client
            .send(Request::DestructArrayRequest(DestructArrayRequest {
                array_handle: vec![array],
            }))
            .await;
        array = result;
    }
    array
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flooding_client_is_slowed_and_others_are_served() {
    let count = executes();
    let cluster = Cluster::start(1, 1).await;
    let (loud, quiet) = (cluster.client().await, cluster.client().await);
    let (loud_program, quiet_program) = (compile(&loud).await, compile(&quiet).await);
    let (loud_array, quiet_array) = (put(&loud, &[0.0; 4]).await, put(&quiet, &[1.0; 4]).await);
    // The first execution tells the results' types.
    let warm = request::execute(loud_program, &[loud_array], &[], 0);
    loud.call(warm).await.expect("executes");

    let before = resident_bytes();
    let over = Arc::new(AtomicBool::new(false));
    let flooding = tokio::spawn({
        let over = Arc::clone(&over);
        async move {
            let last = flood(&loud, loud_program, loud_array, count).await;
            let values = fetch(&loud, last).await;
            over.store(true, Relaxed);
            (loud, values)
        }
    });
    let mut served = 0u64;
    let (mut queued, mut shards, mut resident) = (0, 0, 0);
    while !over.load(Relaxed) {
        // All that a client does: execute, wait, read.
        let result = quiet.handle();
        quiet
            .send(request::execute(
                quiet_program,
                &[quiet_array],
                &[result],
                1,
            ))
            .await;
        let ready = Request::CheckValueReadyRequest(CheckValueReadyRequest {
            value_handles: vec![result],
        });
        quiet.call(ready).await.expect("ready");
        assert_eq!(fetch(&quiet, result).await, [2.0; 4]);
        quiet
            .send(Request::DestructArrayRequest(DestructArrayRequest {
                array_handle: vec![result],
            }))
            .await;
        served += 1;
        if served % 16 == 1 {
            let status = cluster.status().await;
            queued = queued.max(status["queued_ops"].as_u64().expect("a number"));
            shards = shards.max(status["totals"]["shards"].as_u64().expect("a number"));
            resident = resident.max(resident_bytes());
        }
    }
    let (_loud, values) = flooding.await.expect("no panic");
    assert_eq!(values, [count as f32; 4], "every execute took effect once");
    let growth = resident.saturating_sub(before);
    eprintln!(
        "{count} executes of the one, {served} rounds of the other; at most {queued} ops queued, {shards} shards, {growth} bytes more"
    );
    // Each of a quiet round's three ops waits for a window and a turn, not for the flood: a round comes at least this often.
    assert!(
        served * 2_000 >= count,
        "{served} rounds while the other client had {count} executes"
    );
    assert!(queued <= 2 * QUEUED_PER_SESSION, "{queued} ops queued");
    assert!(shards < 1_000, "{shards} shards");
    assert!(growth < GROWTH_BYTES, "the process grew by {growth} bytes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_session_has_its_own_account_and_takes_it_along() {
    let cluster = Cluster::start(2, 1).await;
    let (one, two) = (cluster.client().await, cluster.client().await);
    put(&one, &[1.0; 1000]).await;
    put(&one, &[1.0; 500]).await;
    let small = put(&two, &[1.0; 4]).await;
    let program = compile(&two).await;
    let result = two
        .call(request::execute(program, &[small], &[], 1))
        .await
        .expect("executes");
    let Response::LoadedExecutableExecuteResponse(result) = result else {
        panic!("another reply");
    };
    fetch(&two, result.outputs[0].array_handle).await;
    let clients = |status: &serde_json::Value| -> Vec<(bool, u64, u64, u64, u64)> {
        let clients = status["clients"].as_array().expect("a list").clone();
        let number = |client: &serde_json::Value, name: &str| client[name].as_u64().expect("count");
        clients
            .iter()
            .map(|client| {
                (
                    client["connected"].as_bool().expect("known"),
                    number(client, "arrays"),
                    number(client, "executables"),
                    number(client, "array_bytes"),
                    number(client, "shards"),
                )
            })
            .collect()
    };
    let status = cluster.status().await;
    assert_eq!(
        clients(&status),
        [(true, 2, 0, 6000, 2), (true, 2, 1, 32, 2)],
        "{status:#}"
    );
    drop(one);
    let deadline = tokio::time::Instant::now() + Duration::from_secs(5);
    loop {
        let status = cluster.status().await;
        if clients(&status) == [(true, 2, 1, 32, 2)] {
            break;
        }
        assert!(tokio::time::Instant::now() < deadline, "{status:#}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
