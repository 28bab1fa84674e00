//! Clients that come in too great a number, and clients whose machine is gone.

use std::time::Duration;

use tokio::{
    io,
    net::{TcpListener, TcpStream},
};
use tokio_util::sync::CancellationToken;
use waystation_client::Client;
use waystation_tests::cluster::Cluster;

/// Nothing here takes as long.
const PATIENCE: Duration = Duration::from_secs(120);
const RESOURCE_EXHAUSTED: Option<i32> = Some(8);

async fn sessions_become(cluster: &Cluster, sessions: u64) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while cluster.status().await["sessions"] != sessions {
        assert!(
            tokio::time::Instant::now() < deadline,
            "there are {} sessions, not {sessions}",
            cluster.status().await["sessions"]
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Passes bytes on between clients and the proxy until `cut`: from then on nothing arrives, and nobody hears of it.
async fn network(to: String, cut: CancellationToken) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("bound").to_string();
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            let (to, cut) = (to.clone(), cut.clone());
            tokio::spawn(async move {
                let mut far = TcpStream::connect(to).await.expect("the proxy listens");
                tokio::select! {
                    _ = io::copy_bidirectional(&mut near, &mut far) => {}
                    () = cut.cancelled() => {
                        // Held open, with the sockets in it.
                        std::future::pending::<()>().await;
                    }
                }
            });
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_vanishes_loses_its_session_and_others_do_not() {
    let cluster = Cluster::start_with(1, 1, |proxy| {
        proxy.keepalive_interval = Duration::from_millis(50);
        proxy.keepalive_timeout = Duration::from_secs(2);
    })
    .await;
    let cut = CancellationToken::new();
    let address = network(cluster.proxy.clone(), cut.clone()).await;
    let gone = Client::connect(&address).await.expect("served");
    let here = cluster.client().await;
    sessions_become(&cluster, 2).await;
    cut.cancel();
    sessions_become(&cluster, 1).await;
    assert!(here.is_open(), "it answers pings, and says nothing else");
    drop(gone);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_too_many_is_told_of_the_flag() {
    let cluster = Cluster::start_with(1, 1, |proxy| proxy.max_sessions = 2).await;
    let (first, _second) = (cluster.client().await, cluster.client().await);
    let refused = Client::connect(&cluster.proxy).await.expect_err("full");
    assert_eq!(refused.code(), RESOURCE_EXHAUSTED, "{refused}");
    assert!(refused.to_string().contains("--max_sessions"), "{refused}");
    drop(first);
    sessions_become(&cluster, 1).await;
    Client::connect(&cluster.proxy).await.expect("room again");
}
