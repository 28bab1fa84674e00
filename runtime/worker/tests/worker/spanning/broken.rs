//! Connections between two workers that break while both live.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering::SeqCst},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream, tcp},
};
use waystation_proto::{
    tensorflow::error::Code,
    waystation::worker::{Peers, op},
};

use super::pair::{Pair, launched, sums};

/// What all connections between the two go through, such as a firewall.
struct Between {
    address: String,
    /// Bytes that pass, in either direction, before the connections break.
    left: Arc<AtomicUsize>,
    /// Connections that were made.
    made: Arc<AtomicUsize>,
}

/// As many bytes as there are.
const ALL: usize = usize::MAX;

async fn pass(
    mut from: tcp::OwnedReadHalf,
    mut to: tcp::OwnedWriteHalf,
    left: &AtomicUsize,
) -> std::io::Result<()> {
    let mut bytes = [0; 256];
    loop {
        let read = from.read(&mut bytes).await?;
        let less = |left: usize| match left {
            ALL => Some(ALL),
            left => left.checked_sub(read),
        };
        if read == 0 || left.fetch_update(SeqCst, SeqCst, less).is_err() {
            return Ok(());
        }
        to.write_all(&bytes[..read]).await?;
    }
}

impl Between {
    async fn to(address: String) -> Between {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let between = Between {
            address: listener.local_addr().expect("an address").to_string(),
            left: Arc::new(AtomicUsize::new(ALL)),
            made: Arc::default(),
        };
        let (left, made) = (Arc::clone(&between.left), Arc::clone(&between.made));
        tokio::spawn(async move {
            loop {
                let (near, _) = listener.accept().await.expect("a connection");
                let far = TcpStream::connect(&address).await.expect("it is there");
                made.fetch_add(1, SeqCst);
                let left = Arc::clone(&left);
                tokio::spawn(async move {
                    let ((near, back), (far, forth)) = (near.into_split(), far.into_split());
                    tokio::select! {
                        _ = pass(near, forth, &left) => {}
                        _ = pass(far, back, &left) => {}
                    }
                    left.store(ALL, SeqCst);
                });
            }
        });
        between
    }

    fn breaks_after(&self, bytes: usize) {
        self.left.store(bytes, SeqCst);
    }
}

/// Two workers, the first of which, which dials, is told another way to the second.
async fn apart() -> (Pair, Between) {
    let pair = Pair::unknown().await;
    let between = Between::to(pair.peers[1].address.clone()).await;
    let mut peers = pair.peers.to_vec();
    pair.sessions[1]
        .send(op::Op::Peers(Peers {
            peers: peers.clone(),
        }))
        .await;
    peers[1].address.clone_from(&between.address);
    pair.sessions[0].send(op::Op::Peers(Peers { peers })).await;
    (pair, between)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_breaks_costs_the_launch_that_uses_it_and_nothing_else() {
    let (mut pair, between) = apart().await;
    pair.compile(50, "take_over_both").await;
    pair.compile(51, "sum_over_both").await;
    pair.put(20, 4, &[2, 2]).await;
    for round in 1..=5 {
        pair.put(10, 1024, &[1, 1024]).await;
        // More than all that two workers say to each other before bytes are moved, and less than those.
        between.breaks_after(1000);
        let result = 1000 * round;
        pair.execute(50, 10 * round, 10, result).await;
        // Failed by one of the two, they are told to have failed on both.
        for failed in pair.failures(result).await {
            assert_eq!(failed.code, Code::DataLoss as i32, "{failed:?}");
            assert!(failed.message.contains("has broken"), "{failed:?}");
        }
        // At once, with arrays that were there before.
        pair.execute(51, 10 * round + 1, 20, result + 100).await;
        sums(&pair.read(result + 100).await);
    }
    assert_eq!(between.made.load(SeqCst), 6);
    pair.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_launch_that_has_not_begun_outlives_a_connection() {
    let (mut pair, between) = apart().await;
    pair.compile(51, "sum_over_both").await;
    pair.put(20, 4, &[2, 2]).await;
    for round in 1..=5 {
        let (launch, result) = (10 * round, 1000 * round);
        // The first worker's word that it can start is what breaks it.
        between.breaks_after(1);
        pair.sessions[0]
            .send(launched(51, launch, 20, result))
            .await;
        while between.left.load(SeqCst) != ALL {
            tokio::task::yield_now().await;
        }
        pair.sessions[1]
            .send(launched(51, launch, 24, result))
            .await;
        sums(&pair.read(result).await);
    }
    pair.stop().await;
}
