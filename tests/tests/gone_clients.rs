//! Clients that go while their programs over several workers run, or wait to: others have the devices.

use std::time::Duration;

use waystation_tests::{
    cluster::Cluster,
    spanning::{ENDLESS, MEAN_AND_ONE, compile, execute, in_time, put, values},
};

const ALL: [i32; 4] = [0, 1, 2, 3];

/// The executions that have begun on each worker, and all calls of collectives.
async fn begun(cluster: &Cluster) -> (Vec<u64>, u64) {
    let workers = cluster.worker_status().await;
    let calls = workers.iter().map(|worker| worker.ffi_calls).sum();
    (
        workers.iter().map(|worker| worker.executes).collect(),
        calls,
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_that_never_ends_ends_with_its_client_and_so_does_what_waits_behind_it() {
    let cluster = Cluster::start(2, 2).await;
    let (client, other) = (cluster.client().await, cluster.client().await);
    let endless = compile(&client, ENDLESS, &ALL).await.expect("compiles");
    let array = put(&client, [1.0, 2.0, 3.0, 6.0], &ALL).await;
    for _ in 0..20 {
        execute(&client, endless, array).await;
    }
    in_time(async {
        while begun(&cluster).await.1 < 100 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    let theirs = compile(&other, MEAN_AND_ONE, &ALL).await.expect("compiles");
    let array = put(&other, [1.0, 2.0, 3.0, 6.0], &ALL).await;
    let waiting = execute(&other, theirs, array).await;
    drop(client);
    let found = in_time(values(&other, waiting)).await.expect("there");
    assert_eq!(found, [4.0; 4]);
    drop(other);
    cluster.wait_until_empty(Duration::from_secs(60)).await;
    for status in cluster.worker_status().await {
        // Of the twenty no more than were under way.
        assert!(status.executes <= 5, "{} executions", status.executes);
    }
    let third = cluster.client().await;
    let program = compile(&third, MEAN_AND_ONE, &ALL).await.expect("compiles");
    let array = put(&third, [1.0, 2.0, 3.0, 6.0], &ALL).await;
    let result = execute(&third, program, array).await;
    let found = in_time(values(&third, result)).await.expect("there");
    assert_eq!(found, [4.0; 4]);
}
