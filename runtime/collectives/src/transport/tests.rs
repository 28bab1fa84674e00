//! Processes that speak over loopback.

use super::frame::{HEAD, Head};
use super::*;
use crate::call::{Call, Code};
use crate::engine::Engine;
use crate::op::{Kind, Op, Reduction};
use std::task::Poll;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::oneshot;

const SECRET: [u8; 32] = [7; 32];

struct Node {
    tcp: Tcp,
    engine: Engine,
    address: std::net::SocketAddr,
}

async fn node(process: u32, config: Config) -> Node {
    let tcp = Tcp::new(Process(process), Secret::new(SECRET), config);
    let engine = Engine::new(Process(process), Arc::new(tcp.clone()));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    tcp.listen(listener, engine.clone());
    Node {
        tcp,
        engine,
        address,
    }
}

/// Two that are connected, by a Unix socket or by TCP.
async fn pair(local: bool) -> (Node, Node) {
    let config = Config {
        local,
        ..Config::default()
    };
    let (a, b) = (node(0, config.clone()).await, node(1, config).await);
    a.tcp
        .connect(Process(1), b.address, a.engine.clone())
        .await
        .expect("it connects");
    (a, b)
}

#[tokio::test]
async fn quiet_connections_are_probed_within_the_silence_allowed() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let stream = TcpStream::connect(address).await.expect("it connects");
    let socket = socket2::SockRef::from(&stream);
    for (silence, bound) in [(1, 2), (2, 2), (5, 5), (10, 10), (60, 60)] {
        stream::probe(&stream, Duration::from_secs(silence)).expect("a socket");
        assert!(socket.keepalive().expect("a socket"));
        let time = socket.tcp_keepalive_time().expect("a socket");
        let interval = socket.tcp_keepalive_interval().expect("a socket");
        let probes = socket.tcp_keepalive_retries().expect("a socket");
        let noticed = time + interval * probes;
        assert!(
            noticed <= Duration::from_secs(bound) && noticed > Duration::from_secs(bound / 2),
            "{silence} s: {time:?} and {probes} times {interval:?}"
        );
    }
}

fn op(bytes: usize) -> Op {
    Op {
        number: 0,
        kind: Kind::AllReduce,
        groups: vec![vec![0, 1]],
        reduction: Some(Reduction::Add),
        operands: vec![crate::op::Operand {
            bytes: bytes as u64,
            run: 0,
            element: 6,
        }],
        results: vec![bytes as u64],
    }
}

/// Results that are sent away when they are let go of.
struct Sent(Vec<u8>, Option<oneshot::Sender<Vec<u8>>>);

impl crate::call::Outputs for Sent {
    fn count(&self) -> usize {
        1
    }

    fn get(&mut self, _: usize) -> &mut [u8] {
        &mut self.0
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        if let Some(sender) = self.1.take() {
            let _ = sender.send(std::mem::take(&mut self.0));
        }
    }
}

/// The all-reduce of one partition, and its outcome.
fn start(
    launch: &crate::engine::Launch,
    partition: u32,
    input: Vec<u8>,
) -> impl Future<Output = Result<Vec<u8>, Failure>> + use<> {
    let (sender, receiver) = oneshot::channel();
    let (bytes, results) = oneshot::channel();
    let op = op(input.len());
    let call = Call {
        outputs: Box::new(Sent(vec![0; input.len()], Some(bytes))),
        inputs: vec![input.into()],
        done: Box::new(move |outcome| {
            let _ = sender.send(outcome);
        }),
    };
    launch.member(partition).expect("here").start(&op, call);
    async move {
        receiver.await.expect("an outcome")?;
        Ok(results.await.expect("results"))
    }
}

const BOTH: [Process; 2] = [Process(0), Process(1)];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn data_goes_both_ways_and_connections_come_back() {
    for local in [true, false] {
        data_goes_both_ways_and_connections_come_back_by(local).await;
    }
}

async fn data_goes_both_ways_and_connections_come_back_by(local: bool) {
    let (a, b) = pair(local).await;
    for round in 1..=20 {
        let here = a.engine.open(round, BOTH).expect("it opens");
        let bytes = if round % 2 == 0 { 3 } else { 1_000_003 };
        let mine = start(&here, 0, vec![3; bytes]);
        let there = b.engine.open(round, BOTH).expect("it opens");
        let other = start(&there, 1, vec![4; bytes]);
        assert!(mine.await.expect("a sum") == vec![7; bytes]);
        assert!(other.await.expect("a sum") == vec![7; bytes]);
    }
    // A failure is told.
    let here = a.engine.open(50, BOTH).expect("it opens");
    let there = b.engine.open(50, BOTH).expect("it opens");
    let waiting = start(&here, 0, vec![1; 10]);
    there.fail(Failure::new(Code::Cancelled, "enough"));
    assert_eq!(waiting.await, Err(Failure::new(Code::Cancelled, "enough")));
    // A connection that ends takes with it what needs it.
    let here = a.engine.open(51, BOTH).expect("it opens");
    let waiting = start(&here, 0, vec![1; 10]);
    b.tcp.disconnect(Process(0));
    let broken = waiting.await.expect_err("gone");
    assert_eq!(broken.code(), Code::DataLoss);
    for process in ["process 0", "process 1"] {
        assert!(broken.message().contains(process), "{broken:?}");
    }
    let here = a.engine.open(52, BOTH).expect("it opens");
    let waiting = start(&here, 0, vec![1; 10]);
    assert_eq!(waiting.await.expect_err("gone").code(), Code::DataLoss);
    // What has not begun waits for another one.
    let launches = [&a, &b].map(|node| node.engine.open(53, BOTH).expect("it opens"));
    let all_here = [0, 1].map(|each| {
        let (sender, receiver) = oneshot::channel();
        launches[each].when_all_here(move |outcome| {
            let _ = sender.send(outcome);
        });
        launches[each].here();
        receiver
    });
    a.tcp
        .connect(Process(1), b.address, a.engine.clone())
        .await
        .expect("it connects");
    for each in all_here {
        assert_eq!(each.await, Ok(Ok(())));
    }
    let here = a.engine.open(60, BOTH).expect("it opens");
    let mine = start(&here, 0, vec![1; 10]);
    // The other side has taken the connection before it answers.
    let there = b.engine.open(60, BOTH).expect("it opens");
    let other = start(&there, 1, vec![1; 10]);
    assert_eq!(mine.await, Ok(vec![2; 10]));
    assert_eq!(other.await, Ok(vec![2; 10]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_launch_that_fails_while_its_data_comes_holds_up_no_other() {
    for local in [true, false] {
        a_launch_that_fails_while_its_data_comes_holds_up_no_other_by(local).await;
    }
}

async fn a_launch_that_fails_while_its_data_comes_holds_up_no_other_by(local: bool) {
    let (a, b) = pair(local).await;
    for round in 1..=20 {
        let here = a.engine.open(2 * round, BOTH).expect("it opens");
        let there = b.engine.open(2 * round, BOTH).expect("it opens");
        let mine = start(&here, 0, vec![1; 2_000_003]);
        let other = start(&there, 1, vec![1; 2_000_003]);
        if round % 2 == 0 {
            // Some of it is on its way by now, or all.
            tokio::task::yield_now().await;
        }
        there.fail(Failure::new(Code::Cancelled, "enough"));
        for outcome in [mine.await, other.await] {
            match outcome {
                Ok(sum) => assert!(sum == vec![2; 2_000_003]),
                Err(failure) => assert_eq!(failure.code(), Code::Cancelled),
            }
        }
        let here = a.engine.open(2 * round + 1, BOTH).expect("it opens");
        let there = b.engine.open(2 * round + 1, BOTH).expect("it opens");
        let mine = start(&here, 0, vec![1; 50_000]);
        let other = start(&there, 1, vec![2; 50_000]);
        assert!(mine.await.expect("a sum") == vec![3; 50_000]);
        assert!(other.await.expect("a sum") == vec![3; 50_000]);
    }
    b.tcp.shutdown();
    // Opened before it is noticed, or not at all.
    if let Ok(launch) = a.engine.open(100, BOTH) {
        let waiting = start(&launch, 0, vec![1; 10]);
        assert_eq!(waiting.await.expect_err("gone").code(), Code::DataLoss);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_that_comes_back_at_once_is_there() {
    let a = node(0, Config::default()).await;
    for round in 1..=100 {
        let b = node(1, Config::default()).await;
        a.tcp
            .connect(Process(1), b.address, a.engine.clone())
            .await
            .expect("it connects");
        // It is whole.
        let here = a.engine.open(2 * round, BOTH).expect("it opens");
        let there = b.engine.open(2 * round, BOTH).expect("it opens");
        let (mine, other) = (
            start(&here, 0, vec![1; 100]),
            start(&there, 1, vec![1; 100]),
        );
        assert_eq!(mine.await, Ok(vec![2; 100]));
        assert_eq!(other.await, Ok(vec![2; 100]));
        // It goes while it is waited for.
        let here = a.engine.open(2 * round + 1, BOTH).expect("it opens");
        if round % 3 == 0 {
            b.tcp.shutdown();
        }
        let waiting = start(&here, 0, vec![1; 100_000]);
        if round % 3 == 1 {
            b.tcp.shutdown();
        }
        if round % 3 == 2 {
            // Its end is not noticed before another one is there.
            continue;
        }
        assert_eq!(waiting.await.expect_err("gone").code(), Code::DataLoss);
    }
}

#[tokio::test]
async fn strangers_are_turned_away() {
    let config = Config {
        hello: Duration::from_millis(200),
        strangers: 1,
        local: false,
        ..Config::default()
    };
    let a = node(0, config.clone()).await;
    let liar = Tcp::new(Process(1), Secret::new([8; 32]), Config::default());
    let engine = Engine::new(Process(1), Arc::new(liar.clone()));
    assert!(
        liar.connect(Process(0), a.address, engine.clone())
            .await
            .is_err()
    );
    let lost = Tcp::new(Process(1), Secret::new(SECRET), Config::default());
    assert!(
        lost.connect(Process(5), a.address, engine.clone())
            .await
            .is_err()
    );
    // One that says nothing makes room for the next one.
    let silent = TcpStream::connect(a.address).await.expect("it connects");
    let good = Tcp::new(Process(1), Secret::new(SECRET), config);
    good.connect(Process(0), a.address, engine)
        .await
        .expect("it connects");
    drop(silent);
    assert_eq!(
        a.tcp
            .send(
                Process(9),
                Message::Fail(1, Failure::new(Code::Aborted, ""))
            )
            .expect_err("nobody")
            .code(),
        Code::DataLoss
    );
}

/// A connection that says nothing, from an address of this machine.
async fn silent_from(address: [u8; 4], to: &Node) -> TcpStream {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind((address, 0).into()).expect("an address");
    socket.connect(to.address).await.expect("it connects")
}

#[tokio::test]
async fn silent_strangers_make_room_for_each_other_and_hold_up_nobody() {
    let config = Config {
        hello: Duration::from_secs(3600),
        strangers: 4,
        strangers_of_address: 2,
        local: false,
        ..Config::default()
    };
    let a = node(0, config.clone()).await;
    // Connections are taken in the order in which they were made.
    let mut other = silent_from([127, 0, 0, 2], &a).await;
    let mut silent = Vec::new();
    for _ in 0..20 {
        silent.push(silent_from([127, 0, 0, 1], &a).await);
    }
    let good = Tcp::new(Process(1), Secret::new(SECRET), config);
    let engine = Engine::new(Process(1), Arc::new(good.clone()));
    good.connect(Process(0), a.address, engine)
        .await
        .expect("it is heard");
    for stranger in &mut silent[..19] {
        let end = stranger.read(&mut [0]).await;
        assert!(end.map_or(true, |read| read == 0));
    }
    // Those have not cost another address its place.
    let hello = super::hello::hello_for_tests(Process(2), Process(0), SECRET);
    other.write_all(&hello).await.expect("sent");
    let mut answer = vec![0; hello.len()];
    other.read_exact(&mut answer).await.expect("an answer");
    // All together are no more than may be, wherever they come from.
    let mut many = Vec::new();
    for last in 3..12 {
        many.push(silent_from([127, 0, 0, last], &a).await);
    }
    for stranger in &mut many[..5] {
        let end = stranger.read(&mut [0]).await;
        assert!(end.map_or(true, |read| read == 0));
    }
}

trait Connection: AsyncRead + AsyncWrite + Unpin {}
impl<T: AsyncRead + AsyncWrite + Unpin> Connection for T {}

async fn local_to(a: &Node) -> tokio::net::UnixStream {
    let secret = Secret::new(SECRET);
    let connected = local::connect(&secret, Process(0), a.address.port()).await;
    connected.expect("it connects")
}

/// A connection to the process 0 by hand, as process 1.
async fn by_hand(a: &Node, local: bool) -> Box<dyn Connection> {
    let mut stream: Box<dyn Connection> = if local {
        Box::new(local_to(a).await)
    } else {
        Box::new(TcpStream::connect(a.address).await.expect("it connects"))
    };
    let hello = super::hello::hello_for_tests(Process(1), Process(0), SECRET);
    stream.write_all(&hello).await.expect("sent");
    let mut answer = vec![0; hello.len()];
    stream.read_exact(&mut answer).await.expect("an answer");
    stream
}

#[tokio::test]
async fn silent_ones_of_the_same_machine_make_room_too() {
    let config = Config {
        hello: Duration::from_secs(3600),
        strangers_of_address: 2,
        ..Config::default()
    };
    let a = node(0, config).await;
    let mut silent = Vec::new();
    for _ in 0..20 {
        silent.push(local_to(&a).await);
    }
    by_hand(&a, true).await;
    for stranger in &mut silent[..19] {
        let end = stranger.read(&mut [0]).await;
        assert!(end.map_or(true, |read| read == 0));
    }
}

/// By TCP they go where one of them does not do so, where the port is not the other's own, and where one does not know the secret.
#[tokio::test]
async fn processes_of_one_machine_go_by_a_unix_socket() {
    let tcp = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = tcp.local_addr().expect("an address");
    let secret = Secret::new(SECRET);
    let unix = local::listen(&secret, Process(0), address.port()).expect("a name");
    let passed_on = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let elsewhere = passed_on.local_addr().expect("an address");
    let by = async |local, secret, process, address| {
        let config = Config {
            local,
            ..Config::default()
        };
        let dials = Tcp::new(Process(1), Secret::new(secret), config);
        let engine = Engine::new(Process(1), Arc::new(dials.clone()));
        tokio::select! {
            _ = dials.connect(process, address, engine) => panic!("nobody says hello"),
            _ = local::accept(&unix) => "Unix",
            _ = tcp.accept() => "TCP",
            _ = passed_on.accept() => "TCP, elsewhere",
        }
    };
    assert_eq!(by(true, SECRET, Process(0), address).await, "Unix");
    assert_eq!(by(false, SECRET, Process(0), address).await, "TCP");
    assert_eq!(by(true, [8; 32], Process(0), address).await, "TCP");
    assert_eq!(by(true, SECRET, Process(2), address).await, "TCP");
    let other = by(true, SECRET, Process(0), elsewhere).await;
    assert_eq!(other, "TCP, elsewhere");
}

/// Bytes that tell when they are let go of.
struct Operand(Vec<u8>, Option<oneshot::Sender<()>>);
impl AsRef<[u8]> for Operand {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}
impl Drop for Operand {
    fn drop(&mut self) {
        let _ = self.1.take().map(|gone| gone.send(()));
    }
}

/// Execution of what gave the bytes ends only when nobody has them any more.
#[tokio::test]
async fn bytes_for_one_who_reads_no_more_are_let_go_of_with_the_connection() {
    for local in [true, false] {
        let a = node(0, Config::default()).await;
        let stream = by_hand(&a, local).await;
        are_let_go_of_with(stream, a).await;
    }
}

async fn are_let_go_of_with(mut stream: Box<dyn Connection>, a: Node) {
    let (gone, is_gone) = oneshot::channel();
    let key = Key {
        launch: 1,
        execution: 0,
        op: 0,
        lane: 0,
        source: 0,
        target: 1,
    };
    let transfer = Transfer {
        key,
        offset: 0,
        bytes: bytes::Bytes::from_owner(Operand(vec![0; 64 << 20], Some(gone))),
        failed: Arc::default(),
    };
    a.tcp
        .send(Process(1), Message::Data(transfer))
        .expect("queued");
    // It is being written, and is more than the system takes for one who does not read: of the turns of the task that writes (all
    // on this thread), the last ones come to nothing.
    let mut first = vec![0; CHUNK];
    stream.read_exact(&mut first).await.expect("it comes");
    for _ in 0..10_000 {
        tokio::task::yield_now().await;
    }
    a.tcp.disconnect(Process(1));
    let waited = tokio::time::timeout(Duration::from_secs(30), is_gone).await;
    waited.expect("let go of").expect("dropped");
}

/// So that others on its thread have their turn, and the end of the connection is heard of.
#[tokio::test]
async fn the_reader_pauses_though_there_is_more() {
    const FRAMES: usize = 1000;
    let a = node(0, Config::default()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let mut sender = TcpStream::connect(address).await.expect("it connects");
    let (stream, _) = listener.accept().await.expect("a connection");
    // Of a launch that is not open: bytes that nobody wants.
    let key = Key {
        launch: 9,
        execution: 0,
        op: 0,
        lane: 0,
        source: 1,
        target: 0,
    };
    let mut frame = Head::Data(key, 0, 1).write().to_vec();
    frame.push(1);
    sender.write_all(&frame.repeat(FRAMES)).await.expect("sent");
    let mut all = vec![0; FRAMES * frame.len()];
    while stream.peek(&mut all).await.expect("it comes") < all.len() {
        tokio::task::yield_now().await;
    }
    let (stream, _writer) = stream.into_split();
    let mut reading = std::pin::pin!(super::read::read(&stream, Process(1), &a.engine));
    let once = std::future::poll_fn(|context| Poll::Ready(reading.as_mut().poll(context)));
    assert!(once.await.is_pending());
    let left = stream.try_read(&mut all).expect("not all was read at once");
    assert!(left < FRAMES * frame.len(), "nothing was read");
}

#[tokio::test]
async fn what_is_no_message_ends_the_connection() {
    for (bytes, local) in [
        ([0xff; HEAD], false),
        ([0; HEAD], false),
        ([0xff; HEAD], true),
    ] {
        let a = node(0, Config::default()).await;
        let mut stream = by_hand(&a, local).await;
        let launch = a.engine.open(1, BOTH).expect("it opens");
        let waiting = start(&launch, 0, vec![1; 10]);
        let mut asked = [0; HEAD];
        stream.read_exact(&mut asked).await.expect("a message");
        assert!(matches!(Head::read(&asked), Some(Head::Ready(key)) if key.source == 1));
        stream.write_all(&bytes).await.expect("sent");
        assert_eq!(waiting.await.expect_err("gone").code(), Code::DataLoss);
        assert!(
            stream
                .read(&mut [0; 64])
                .await
                .map_or(true, |read| read == 0)
        );
    }
}
