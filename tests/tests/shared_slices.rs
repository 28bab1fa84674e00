//! Two proxies that want the same slice, when one of them or the resource manager is away for a while.

use std::time::Duration;

use bytes::Bytes;
use tokio::sync::watch;
use waystation_client::{Client, Error, request};
use waystation_tests::{cluster::Cluster, relay::relay};

const DATA_LOSS: Option<i32> = Some(15);
/// The resource manager's. Long enough that a test does not lose what it is to keep, and waited for where it is to be lost.
const LEASE: Duration = Duration::from_secs(4);

async fn put(client: &Client) -> u64 {
    let handle = client.handle();
    let bytes: Vec<u8> = [1.0_f32; 4].iter().flat_map(|v| v.to_le_bytes()).collect();
    client.store(handle, bytes.into()).await.expect("stored");
    let made = request::make_array(handle, &[4], &[0], None);
    client.call(made).await.expect("made");
    handle
}

async fn fetch(client: &Client, array: u64) -> Result<Bytes, Error> {
    let buffer = client.handle();
    client.call(request::copy_to_host(array, buffer)).await?;
    client.lookup(buffer).await
}

/// Waits for what the resource manager says of its proxies, in order: (slices, how it is).
async fn until(manager: &str, what: &str, met: impl Fn(&[(usize, String)]) -> bool) {
    let all = async {
        loop {
            if let Ok(status) = waystation_scheduler::client::status(manager).await {
                let proxies = status.proxies.into_iter();
                let proxies: Vec<_> = proxies.map(|p| (p.slices.len(), p.progress)).collect();
                if met(&proxies) {
                    return;
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let limit = Duration::from_secs(300);
    let met = tokio::time::timeout(limit, all).await;
    met.unwrap_or_else(|_| panic!("still not: {what}"));
}

/// A cluster of one worker whose proxy can be cut off from its resource manager, and only from it.
async fn start() -> (Cluster, watch::Sender<bool>) {
    let (mut address, mut way) = (String::new(), None);
    let cluster = Cluster::start_leased(
        LEASE,
        1,
        1,
        |_| {},
        |proxy| {
            let (relayed, open) = relay(proxy.resource_manager.clone());
            address.clone_from(&relayed);
            proxy.resource_manager = relayed;
            way = Some(open);
        },
    )
    .await;
    (cluster, way.expect("the proxy is configured"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slices_stay_with_their_proxy_over_a_broken_stream_and_a_restart_and_are_lost_after_a_lease()
 {
    let (mut cluster, way) = start().await;
    let manager = cluster.manager().to_owned();
    let client = cluster.client().await;
    let array = put(&client).await;
    let kept = fetch(&client, array).await.expect("it is there");
    let (other, stop_other) = cluster.another_proxy();
    let first_has_it = |proxies: &[(usize, String)]| matches!(proxies, [(1, _), (0, waits)] if !waits.contains("not heard of"));
    until(&manager, "the second one waits", first_has_it).await;

    way.send_replace(false);
    until(&manager, "the first one is missed", |proxies| {
        matches!(proxies, [(1, _), (0, waits)] if waits.contains("holds 1 and is not heard of"))
    })
    .await;
    way.send_replace(true);
    until(&manager, "it is back", first_has_it).await;
    assert_eq!(fetch(&client, array).await.expect("as before"), kept);

    cluster.restart_manager().await;
    until(&manager, "both are back, in any order", |proxies| {
        let mut slices: Vec<_> = proxies.iter().map(|(slices, _)| *slices).collect();
        slices.sort_unstable();
        slices == [0, 1]
    })
    .await;
    assert_eq!(fetch(&client, array).await.expect("as before"), kept);

    // Away for longer: the other proxy has the slice, and the first one's clients hear why.
    way.send_replace(false);
    let second = Client::connect(&other).await.expect("it gets the slice");
    fetch(&second, put(&second).await)
        .await
        .expect("and uses it");
    let error = fetch(&client, array).await.expect_err("lost");
    assert_eq!(error.code(), DATA_LOSS, "{error}");
    let text = error.to_string();
    assert!(
        text.contains("slice 0") && text.contains("given to another proxy"),
        "{text}"
    );
    // The worker says so long before the resource manager can: who comes now is given no dead links, but waits.
    let given_up = async {
        while cluster.status().await["devices"] != 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let given_up = tokio::time::timeout(Duration::from_secs(60), given_up).await;
    given_up.expect("the proxy has no devices any more");
    // It asks anew, and waits behind the other.
    way.send_replace(true);
    until(
        &manager,
        "the first one waits",
        |proxies| matches!(proxies, [(1, _), (0, waits)] if waits.contains("holds 1, 0 free")),
    )
    .await;
    fetch(&second, put(&second).await)
        .await
        .expect("nobody takes it away");
    drop(second);
    stop_other.cancel();
    until(
        &manager,
        "the first one has it again",
        |proxies| matches!(proxies, [(1, progress)] if progress == "1 of 1 workers"),
    )
    .await;
    let again = cluster.client().await;
    assert_eq!(fetch(&again, put(&again).await).await.expect("works"), kept);
    // The session that was open goes on, without what it had.
    assert_eq!(
        fetch(&client, put(&client).await).await.expect("works"),
        kept
    );
    let error = fetch(&client, array).await.expect_err("lost for good");
    assert_eq!(error.code(), DATA_LOSS, "{error}");
}
