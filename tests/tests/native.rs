//! Programs that span workers by the plugin's own collectives, with a *mock* of such a plugin (`waystation_pjrt::mock`): its
//! clients find each other through the key-value store that the workers lend it, and it fails launches that come in another order
//! on another worker.

use std::time::Duration;

use waystation_client::Client;
use waystation_tests::{
    cluster::Cluster,
    spanning::{
        ADD_ONE, MEAN_AND_ONE, announce, compile, execute, floats, forget, in_time, put, ready,
        values,
    },
};

const INVALID_ARGUMENT: Option<i32> = Some(3);
const UNIMPLEMENTED: Option<i32> = Some(12);
const DATA_LOSS: Option<i32> = Some(15);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_over_two_workers_is_the_plugins() {
    let cluster = Cluster::start_native(2, 2).await;
    let client = cluster.client().await;
    assert_eq!(client.init().platform_name, "mock");
    for devices in [[0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0]] {
        let program = compile(&client, MEAN_AND_ONE, &devices)
            .await
            .expect("compiles");
        let mut array = put(&client, [1.0, 2.0, 3.0, 6.0], &devices).await;
        for _ in 0..5 {
            array = execute(&client, program, array).await;
        }
        let found = in_time(values(&client, array)).await.expect("there");
        assert_eq!(found, [8.0; 4], "{devices:?}");
    }
    // Compiled by one of them, and loaded by the other.
    let compiled: Vec<u64> = cluster
        .worker_status()
        .await
        .iter()
        .map(|status| status.compiles)
        .collect();
    assert_eq!(compiled.iter().sum::<u64>(), 3, "{compiled:?}");
}

/// One client's launches over both workers, with work of its own on one device in between.
async fn share(client: Client, devices: [i32; 4], busy: i32, rounds: u16) {
    let program = compile(&client, MEAN_AND_ONE, &devices)
        .await
        .expect("compiles");
    let local = compile(&client, ADD_ONE, &[busy]).await.expect("compiles");
    let mut own = client.handle();
    client.store(own, floats(&[0.0; 4])).await.expect("stored");
    let made = waystation_client::request::make_array(own, &[4], &[busy], None);
    client.call(made).await.expect("made");
    let mut array = put(&client, [0.0; 4], &devices).await;
    for round in 1..=rounds {
        let next = execute(&client, program, array).await;
        forget(&client, std::mem::replace(&mut array, next)).await;
        for _ in 0..round % 3 {
            let next = execute(&client, local, own).await;
            forget(&client, std::mem::replace(&mut own, next)).await;
        }
        if round % 20 == 0 {
            in_time(ready(&client, array)).await.expect("ready");
        }
    }
    let found = in_time(values(&client, array)).await.expect("there");
    assert_eq!(found, [f32::from(rounds); 4]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_workers_hand_the_plugin_their_parts_in_one_order() {
    let cluster = Cluster::start_native(2, 2).await;
    let (one, two) = (cluster.client().await, cluster.client().await);
    let one = tokio::spawn(share(one, [0, 1, 2, 3], 0, 60));
    let two = tokio::spawn(share(two, [3, 1, 2, 0], 3, 60));
    one.await.expect("no panic");
    two.await.expect("no panic");
    cluster.wait_until_empty(Duration::from_secs(10)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_input_that_fails_on_one_worker_never_reaches_the_plugin() {
    let cluster = Cluster::start_native(2, 2).await;
    let client = cluster.client().await;
    let all = [0, 1, 2, 3];
    let program = compile(&client, MEAN_AND_ONE, &all)
        .await
        .expect("compiles");
    for broken in [0, 3] {
        let (array, pieces) = announce(&client, &all).await;
        let result = execute(&client, program, array).await;
        let after = execute(&client, program, result).await;
        for (position, piece) in pieces.into_iter().enumerate() {
            // Too many bytes for one of the shards.
            let bytes = vec![1.0; if position == broken { 2 } else { 1 }];
            client.store(piece, floats(&bytes)).await.expect("stored");
        }
        for failed in [result, after] {
            let error = in_time(values(&client, failed)).await.expect_err("failed");
            assert_eq!(error.code(), INVALID_ARGUMENT, "{error}");
            assert!(error.to_string().contains("8 bytes came"), "{error}");
        }
        for forgotten in [array, result, after] {
            forget(&client, forgotten).await;
        }
    }
    // Nor is there anything left of the room that the other worker had for its part.
    cluster.wait_until_empty(Duration::from_secs(60)).await;
    // Nobody waits in the plugin: the workers go on.
    let array = put(&client, [1.0, 2.0, 3.0, 6.0], &all).await;
    let array = execute(&client, program, array).await;
    let found = in_time(values(&client, array)).await.expect("there");
    assert_eq!(found, [4.0; 4]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resource_manager_that_starts_anew_is_told_of_the_group() {
    let mut cluster = Cluster::start_native(2, 2).await;
    let client = cluster.client().await;
    let all = [0, 1, 2, 3];
    let program = compile(&client, MEAN_AND_ONE, &all)
        .await
        .expect("compiles");
    let mut array = put(&client, [0.0; 4], &all).await;
    for round in 1..=3_u8 {
        cluster.restart_manager().await;
        // The plugin needs the store for each launch.
        array = execute(&client, program, array).await;
        let found = in_time(values(&client, array)).await.expect("there");
        assert_eq!(found, [f32::from(round); 4]);
    }
    // Devices that nobody has asked for before are known, too.
    let program = compile(&client, MEAN_AND_ONE, &[3, 2, 1, 0])
        .await
        .expect("compiles");
    let array = put(&client, [1.0, 2.0, 3.0, 6.0], &[3, 2, 1, 0]).await;
    let array = execute(&client, program, array).await;
    let found = in_time(values(&client, array)).await.expect("there");
    assert_eq!(found, [4.0; 4]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_workers_of_a_slice_end_together() {
    let mut cluster = Cluster::start_native(2, 2).await;
    let client = cluster.client().await;
    let all = [0, 1, 2, 3];
    let program = compile(&client, MEAN_AND_ONE, &all)
        .await
        .expect("compiles");
    let array = put(&client, [1.0, 2.0, 3.0, 6.0], &all).await;
    let array = execute(&client, program, array).await;
    in_time(ready(&client, array)).await.expect("ready");
    let other = client.handle();
    client
        .store(other, floats(&[0.0; 4]))
        .await
        .expect("stored");
    let made = waystation_client::request::make_array(other, &[4], &[0], None);
    client.call(made).await.expect("made");
    in_time(ready(&client, other)).await.expect("ready");
    cluster.lose(1);
    // Also what lies on the other worker alone: its client of the plugin has lost a process.
    let lost = async {
        loop {
            if let Err(error) = ready(&client, other).await {
                return error;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    let error = in_time(lost).await;
    assert_eq!(error.code(), DATA_LOSS, "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_flag_the_plugin_is_not_asked() {
    let cluster = Cluster::start_with_workers(2, 2, |config| {
        config.plugin = waystation_tests::cluster::mock_plugin();
    })
    .await;
    let client = cluster.client().await;
    let refused = compile(&client, MEAN_AND_ONE, &[0, 1, 2, 3]).await;
    let refused = refused.expect_err("it has no collectives");
    assert_eq!(refused.code(), UNIMPLEMENTED, "{refused}");
    assert!(
        refused.to_string().contains("--plugin_collectives"),
        "{refused}"
    );
}
