//! Workers that are lost, and workers that only the resource manager takes for lost.

use std::{future::Future, sync::Arc, time::Duration};

use bytes::Bytes;
use waystation_client::{Client, Error, Request, Response, request};
use waystation_proto::xla::ifrt::proxy::{CheckValueReadyRequest, LoadedExecutableDeleteRequest};
use waystation_tests::{
    cluster::{Cluster, mock_plugin},
    relay::{Silence, relay},
    spanning::{self, MEAN_AND_ONE, compile as compile_over},
};

const INVALID_ARGUMENT: Option<i32> = Some(3);
const DATA_LOSS: Option<i32> = Some(15);

/// x + 1 on one device.
const ADD_ONE: &str =
    "module @jit_add_one { func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.constant dense<1.0> : tensor<4xf32>
  %1 = stablehlo.add %arg0, %0 : tensor<4xf32>
  return %1 : tensor<4xf32> } }";

fn floats(values: &[f32]) -> Bytes {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    bytes.into()
}

async fn put(client: &Client, values: [f32; 4], device: i32) -> u64 {
    let handle = client.handle();
    client.store(handle, floats(&values)).await.expect("stored");
    let made = request::make_array(handle, &[4], &[device], None);
    client.call(made).await.expect("made");
    handle
}

async fn fetch(client: &Client, array: u64) -> Result<Bytes, Error> {
    let buffer = client.handle();
    client.call(request::copy_to_host(array, buffer)).await?;
    client.lookup(buffer).await
}

async fn compile(client: &Client, device: i32) -> u64 {
    let request = request::compile(ADD_ONE.as_bytes(), &[device]);
    match client.call(request).await.expect("compiles") {
        Response::CompileResponse(compiled) => compiled.loaded_executable_handle,
        other => panic!("{other:?}"),
    }
}

async fn execute(client: &Client, program: u64, argument: u64) -> Result<u64, Error> {
    let result = client.handle();
    let request = request::execute(program, &[argument], &[result], 1);
    client.call(request).await.map(|_| result)
}

/// Waits until it is so. Stuck is what takes longer than this.
async fn until<F: Future<Output = bool>>(what: &str, condition: impl Fn() -> F) {
    let all = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let limit = Duration::from_secs(300);
    let met = tokio::time::timeout(limit, all).await;
    met.unwrap_or_else(|_| panic!("still not: {what}"));
}

/// Waits until the proxy hears from the resource manager that so many workers are there.
async fn told(cluster: &Cluster, progress: &str) {
    until(progress, async || {
        cluster.status().await["progress"] == progress
    })
    .await;
}

/// Waits until things can be put on a device.
async fn serves(client: &Client, device: i32) {
    until("the device can be used", async || {
        let value_handles = vec![put(client, [0.0; 4], device).await];
        let ready = Request::CheckValueReadyRequest(CheckValueReadyRequest { value_handles });
        match client.call(ready).await {
            Ok(_) => true,
            Err(error) => {
                assert_eq!(error.code(), DATA_LOSS, "{error}");
                false
            }
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_only_the_resource_manager_misses_keeps_its_arrays_for_a_lease() {
    let (sender, receiver) = std::sync::mpsc::channel();
    let through_relay = |config: &mut waystation_worker::Config| {
        if config.task == 1 {
            let manager = config.resource_manager.take().expect("there is one");
            let (address, open) = relay(manager);
            config.resource_manager = Some(address);
            sender.send(open).expect("there is room");
        }
    };
    let cluster = Cluster::start_with_workers(2, 1, through_relay).await;
    let way = receiver.recv().expect("a second worker");
    let client = cluster.client().await;
    let array = put(&client, [1.0; 4], 1).await;
    let program = compile(&client, 1).await;
    told(&cluster, "2 of 2 workers").await;
    for _ in 0..2 {
        way.send_replace(false);
        told(&cluster, "2 of 2 workers, 1 of them not heard of").await;
        let kept = fetch(&client, array).await.expect("the proxy is connected");
        assert_eq!(kept, floats(&[1.0; 4]));
        way.send_replace(true);
        told(&cluster, "2 of 2 workers").await;
        let next = execute(&client, program, array).await.expect("as before");
        let next = fetch(&client, next).await.expect("it is no other worker");
        assert_eq!(next, floats(&[2.0; 4]));
    }

    // One that stays away is lost, and taken back when it comes again.
    way.send_replace(false);
    let is_lost = async || match fetch(&client, array).await {
        Ok(_) => false,
        Err(error) => {
            assert_eq!(error.code(), DATA_LOSS, "{error}");
            true
        }
    };
    until("it is lost", is_lost).await;
    way.send_replace(true);
    serves(&client, 1).await;
    assert!(is_lost().await, "what it held then is lost for good");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_program_stays_deleted_when_another_worker_comes() {
    let mut cluster = Cluster::start(2, 1).await;
    let client = cluster.client().await;
    let [deleted, kept] = [compile(&client, 1).await, compile(&client, 1).await];
    let delete = LoadedExecutableDeleteRequest {
        loaded_executable_handle: deleted,
    };
    let delete = Request::LoadedExecutableDeleteRequest(delete);
    client.call(delete).await.expect("deleted");
    cluster.lose(1);
    told(&cluster, "1 of 2 workers").await;
    cluster.replace(1);
    serves(&client, 1).await;
    let array = put(&client, [1.0; 4], 1).await;
    let error = execute(&client, deleted, array).await.expect_err("deleted");
    assert_eq!(error.code(), INVALID_ARGUMENT, "{error}");
    assert!(error.to_string().contains("has been deleted"), "{error}");
    let next = execute(&client, kept, array).await.expect("there again");
    let next = fetch(&client, next).await.expect("it runs");
    assert_eq!(next, floats(&[2.0; 4]));
}

/// pathwaysutils compiles a program for each slice, to see by its execution which ones live.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_for_lost_workers_are_still_told_of() {
    let mut cluster = Cluster::start(3, 2).await;
    let client = cluster.client().await;
    let slice = [2, 3, 4, 5];
    let array = spanning::put(&client, [1.0; 4], &slice).await;
    cluster.lose(1);
    cluster.lose(2);
    told(&cluster, "1 of 3 workers").await;
    // By another worker, that is none of the program's.
    let over_two = compile_over(&client, MEAN_AND_ONE, &slice).await;
    let result = spanning::execute(&client, over_two.expect("told of"), array).await;
    let error = spanning::values(&client, result).await.expect_err("lost");
    assert_eq!(error.code(), DATA_LOSS, "{error}");
    compile(&client, 5).await;

    // Nobody is left: what was compiled before is known.
    cluster.lose(0);
    told(&cluster, "0 of 3 workers").await;
    let again = compile_over(&client, MEAN_AND_ONE, &slice).await;
    let again = again.expect("known");
    let result = spanning::execute(&client, again, array).await;
    let error = spanning::values(&client, result).await.expect_err("lost");
    assert_eq!(error.code(), DATA_LOSS, "{error}");
    compile(&client, 5).await;

    // The programs run once there are workers.
    for task in 0..3 {
        cluster.replace(task);
    }
    told(&cluster, "3 of 3 workers").await;
    serves(&client, 5).await;
    let array = spanning::put(&client, [1.0, 2.0, 3.0, 6.0], &slice).await;
    let result = spanning::execute(&client, again, array).await;
    assert_eq!(
        spanning::values(&client, result).await.expect("it runs"),
        [4.0; 4]
    );
}

/// Workers of a group, since each has a connection more to the resource manager.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_to_a_resource_manager_that_fell_silent_are_ended_within_a_short_lease() {
    let silence = Arc::new(Silence::default());
    let lease = Duration::from_secs(1);
    let cluster = Cluster::start_leased(
        lease,
        2,
        1,
        |worker| {
            worker.plugin = mock_plugin();
            worker.plugin_collectives = true;
            let manager = worker.resource_manager.take().expect("there is one");
            worker.resource_manager = Some(silence.relay(manager));
        },
        |proxy| proxy.resource_manager = silence.relay(proxy.resource_manager.clone()),
    )
    .await;
    let client = cluster.client().await;
    serves(&client, 1).await;
    // By the pings of the usual lease it takes 8 s and more.
    let ended = tokio::time::timeout(lease * 7, silence.fall()).await;
    ended.expect("nobody keeps what is silent");
}
