//! Clusters that get other slices, or other devices, while clients are connected.

use std::{future::Future, time::Duration};

use bytes::Bytes;
use waystation_client::{Client, Error, request};
use waystation_pjrt::OptionValue;
use waystation_tests::cluster::Cluster;

const FAILED_PRECONDITION: Option<i32> = Some(9);
const DATA_LOSS: Option<i32> = Some(15);
/// Short, so that a test can wait for it.
const LEASE: Duration = Duration::from_secs(4);

async fn start() -> Cluster {
    Cluster::start_leased(LEASE, 2, 1, |_| {}, |_| {}).await
}

/// Puts an array on a device and reads it.
async fn round_trip(client: &Client, device: i32) -> Result<Bytes, Error> {
    let array = client.handle();
    client.store(array, vec![7; 16].into()).await?;
    let made = request::make_array(array, &[4], &[device], None);
    client.call(made).await?;
    let buffer = client.handle();
    client.call(request::copy_to_host(array, buffer)).await?;
    client.lookup(buffer).await
}

/// Waits until it is so. Stuck is what takes longer than this.
async fn until<F: Future<Output = bool>>(what: &str, condition: impl Fn() -> F) {
    let all = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let limit = Duration::from_secs(120);
    let met = tokio::time::timeout(limit, all).await;
    met.unwrap_or_else(|_| panic!("still not: {what}"));
}

async fn told(cluster: &Cluster, progress: &str) {
    until(progress, async || {
        cluster.status().await["progress"] == progress
    })
    .await;
}

/// Waits until a device can be used; until then its worker is lost.
async fn serves(client: &Client, device: i32) {
    until("the device can be used", async || {
        let done = round_trip(client, device).await;
        assert!(
            done.as_ref().is_ok_and(|bytes| **bytes == [7; 16])
                || done.as_ref().is_err_and(|e| e.code() == DATA_LOSS),
            "{done:?}"
        );
        done.is_ok()
    })
    .await;
}

/// Ends the worker of a device, and waits until clients hear of it.
async fn lose(cluster: &mut Cluster, client: &Client, task: usize, device: i32) {
    cluster.lose(task);
    until("the worker is lost", async || {
        round_trip(client, device).await.is_err()
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_that_is_to_grow_and_one_that_has_grown_take_lost_workers_back_for_open_clients()
{
    let mut cluster = start().await;
    let client = cluster.client().await;
    serves(&client, 1).await;
    cluster.restart_manager_with_slices(2).await;
    told(&cluster, "1 of 2 slices (2 of 4 workers)").await;
    lose(&mut cluster, &client, 1, 1).await;
    cluster.replace(1);
    serves(&client, 1).await;
    // Who comes meanwhile has what there is.
    serves(&cluster.client().await, 1).await;

    for task in 0..2 {
        cluster.add(|config| (config.slice, config.task) = (1, task));
    }
    told(&cluster, "2 of 2 slices (4 of 4 workers)").await;
    serves(&cluster.client().await, 3).await;
    lose(&mut cluster, &client, 1, 1).await;
    cluster.replace(1);
    serves(&client, 1).await;
    serves(&client, 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_whose_devices_were_replaced_by_others_is_told_so_and_not_that_a_slice_is_lost() {
    let mut cluster = start().await;
    let client = cluster.client().await;
    serves(&client, 1).await;
    for task in 0..2 {
        lose(
            &mut cluster,
            &client,
            task,
            i32::try_from(task).expect("few"),
        )
        .await;
    }
    cluster.restart_manager().await;
    for task in 0..2 {
        cluster.replace_changed(task, |config| {
            config.plugin_options = vec![("cpu_device_count".to_owned(), OptionValue::Int64(2))];
        });
    }
    // Lost until it is known what comes instead; then a client that waits for slices must not wait on.
    until("the client is told", async || {
        let error = round_trip(&client, 0).await.expect_err("it has no worker");
        let told = error.code() == FAILED_PRECONDITION;
        assert!(told || error.code() == DATA_LOSS, "{error}");
        let text = error.to_string();
        told && text.contains("other devices now (4) than when this client connected (2)")
    })
    .await;
    let other = cluster.client().await;
    for device in 0..4 {
        serves(&other, device).await;
    }
}
