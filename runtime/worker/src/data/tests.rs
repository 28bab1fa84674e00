use std::{io, net::SocketAddr, ops::Range, sync::Arc};

use bytes::Bytes;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpSocket, TcpStream},
    task::JoinSet,
};
use tokio_stream::StreamExt as _;
use tokio_util::task::AbortOnDropHandle;
use waystation_pjrt::AlignedBytes;

use super::{Connections, GREETING, Offers, Ticket, request};
use crate::incoming;

const MIB: usize = 1 << 20;

/// A port that serves offers, and gives what is left to nobody.
struct Port {
    address: SocketAddr,
    offers: Arc<Offers>,
    calls: tokio_stream::wrappers::ReceiverStream<io::Result<TcpStream>>,
    _accepting: AbortOnDropHandle<()>,
}

impl Port {
    async fn open() -> Port {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let offers = Arc::new(Offers::default());
        let (calls, accepting) = incoming::split(listener, Arc::clone(&offers));
        Port {
            address,
            offers,
            calls,
            _accepting: accepting,
        }
    }

    /// What comes back for these bytes, until the port ends the connection.
    async fn answer(&self, sent: &[&[u8]]) -> Vec<u8> {
        let mut stream = TcpStream::connect(self.address).await.expect("taken");
        let mut answer = Vec::new();
        for bytes in sent {
            if stream.write_all(bytes).await.is_err() {
                break;
            }
        }
        // A reset is an end, too.
        let _ = stream.read_to_end(&mut answer).await;
        answer
    }
}

fn pattern(len: usize) -> Bytes {
    let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + i / 251) as u8).collect();
    bytes.into()
}

fn room(len: usize) -> AlignedBytes {
    AlignedBytes::mapped(len).expect("memory")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn transfers_come_whole_in_any_size_over_the_same_connections() {
    let port = Port::open().await;
    let connections = Connections::default();
    let address = port.address.to_string();
    for len in [
        0,
        1,
        MIB + 1,
        4 * MIB,
        8 * MIB - 1,
        8 * MIB,
        8 * MIB + 1,
        (21 << 20) + 12_345,
    ] {
        let bytes = pattern(len);
        let offered = port.offers.make(bytes.clone()).expect("a ticket");
        for memory in [room(len), AlignedBytes::zeroed(len).expect("memory")] {
            let fetched = connections.fetch(&address, offered.ticket, memory).await;
            let fetched = fetched.expect("all bytes");
            assert!(fetched[..] == bytes[..], "{len} bytes");
        }
    }
    // No more than one transfer takes at a time.
    assert_eq!(connections.kept(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_transfers_come_at_the_same_time() {
    let port = Port::open().await;
    let connections = Arc::new(Connections::default());
    let mut fetches = JoinSet::new();
    for number in 0..40 {
        let bytes = pattern(2 * MIB + number);
        let offered = port.offers.make(bytes.clone()).expect("a ticket");
        let (connections, address) = (Arc::clone(&connections), port.address.to_string());
        fetches.spawn(async move {
            // All of it, so that it is there until the end.
            let offered = offered;
            let memory = room(bytes.len());
            let fetched = connections.fetch(&address, offered.ticket, memory).await;
            assert!(fetched.expect("all bytes")[..] == bytes[..]);
        });
    }
    while let Some(done) = fetches.join_next().await {
        done.expect("no panic");
    }
    assert!(connections.kept() <= 8);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_sent_to_strangers_or_beyond_the_end() {
    let port = Port::open().await;
    let offered = port.offers.make(pattern(1000)).expect("a ticket");
    let ask = |ticket: &Ticket, range: Range<usize>| request(ticket, &range);
    let mut wrong = offered.ticket;
    wrong[31] ^= 1;
    let good = ask(&offered.ticket, 10..20);
    for (what, sent) in [
        ("a wrong ticket", ask(&wrong, 0..10)),
        ("no ticket", ask(&Ticket::default(), 0..0)),
        ("beyond the end", ask(&offered.ticket, 0..1001)),
        ("behind the end", ask(&offered.ticket, 2000..2000)),
    ] {
        let answer = port.answer(&[GREETING, &sent]).await;
        assert!(answer.is_empty(), "{what}");
        // No more after it, and all before it.
        let answer = port.answer(&[GREETING, &good, &sent, &good]).await;
        assert_eq!(answer, pattern(1000)[10..20], "{what}");
    }
    let mut absurd = good;
    absurd[32..].fill(0xff);
    assert!(port.answer(&[GREETING, &absurd]).await.is_empty());
    absurd[32..40].fill(0);
    assert!(port.answer(&[GREETING, &absurd]).await.is_empty());
    assert!(port.answer(&[b"WSTNDAT9", &good]).await.is_empty());
    // What was offered is not any more.
    let ticket = offered.ticket;
    drop(offered);
    let answer = port.answer(&[GREETING, &ask(&ticket, 0..10)]).await;
    assert!(answer.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_show_no_ticket_hold_up_nobody() {
    let port = Port::open().await;
    let offered = port.offers.make(pattern(1000)).expect("a ticket");
    let other = TcpSocket::new_v4().expect("a socket");
    other
        .bind(([127, 0, 0, 2], 0).into())
        .expect("an address of its own");
    let mut other = other.connect(port.address).await.expect("taken");
    other.write_all(&GREETING[..1]).await.expect("sent");
    let mut silent = JoinSet::new();
    for _ in 0..200 {
        let mut stream = TcpStream::connect(port.address).await.expect("taken");
        stream.write_all(&GREETING[..1]).await.expect("sent");
        silent.spawn(async move {
            // A reset is an end, too.
            let _ = stream.read(&mut [0]).await;
        });
    }
    let request = request(&offered.ticket, &(10..20));
    let mut good = TcpStream::connect(port.address).await.expect("taken");
    good.write_all(&[&GREETING[..], &request].concat())
        .await
        .expect("sent");
    let mut answer = [0; 10];
    good.read_exact(&mut answer).await.expect("the range");
    assert_eq!(answer, pattern(1000)[10..20]);
    // Those who came last have taken the place of the others, and not that of another address.
    for _ in 0..200 - 32 {
        silent.join_next().await.expect("one").expect("no panic");
    }
    let rest = [&GREETING[1..], &request].concat();
    other.write_all(&rest).await.expect("sent");
    other.read_exact(&mut answer).await.expect("the range");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nobody_wants_any_more_is_not_sent_to_its_end() {
    let port = Port::open().await;
    // More than the system keeps of a connection.
    let bytes = pattern(64 * MIB);
    let offered = port.offers.make(bytes.clone()).expect("a ticket");
    let mut stream = TcpStream::connect(port.address).await.expect("taken");
    stream.write_all(GREETING).await.expect("sent");
    let all = request(&offered.ticket, &(0..bytes.len()));
    stream.write_all(&all).await.expect("sent");
    stream.read_exact(&mut [0; 1000]).await.expect("the first");
    drop(offered);
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest).await;
    assert!(rest.len() < bytes.len() - 1000, "{} bytes came", rest.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_goes_in_the_middle_fails_the_transfer() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let half = tokio::spawn(async move {
        let mut streams = Vec::new();
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().await.expect("one");
            let mut asked = [0; GREETING.len() + 48];
            stream.read_exact(&mut asked).await.expect("a request");
            stream.write_all(&[1; 3 * MIB]).await.expect("sent");
            streams.push(stream);
        }
    });
    let connections = Connections::default();
    let fetched = connections.fetch(&address, Ticket::default(), room(16 * MIB));
    let error = fetched.await.expect_err("half of it");
    assert!(
        matches!(
            error.kind(),
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset
        ),
        "{error:?}"
    );
    half.await.expect("no panic");
    assert_eq!(connections.kept(), 0, "what broke is not used again");
    // Nobody is there any more.
    let fetched = connections.fetch(&address, Ticket::default(), room(MIB));
    fetched.await.expect_err("nothing");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_connections_are_left_to_grpc_untouched() {
    let mut port = Port::open().await;
    let mut stream = TcpStream::connect(port.address).await.expect("taken");
    let preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    stream.write_all(preface).await.expect("sent");
    let taken = port.calls.next().await.expect("one");
    let mut taken = taken.expect("a connection");
    let mut first = [0; 3];
    taken.read_exact(&mut first).await.expect("what was sent");
    assert_eq!(&first, b"PRI");
}

/// As when another worker has taken the place, and the address, of the one that the connection was to.
#[tokio::test]
async fn a_connection_that_ended_while_it_was_kept_is_not_missed() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let bytes = pattern(1000);
    let sent = bytes.clone();
    let serving = tokio::spawn(async move {
        for _ in 0..2 {
            let (mut stream, _) = listener.accept().await.expect("a connection");
            let mut asked = vec![0; GREETING.len() + super::REQUEST_BYTES];
            stream.read_exact(&mut asked).await.expect("a request");
            stream.write_all(&sent).await.expect("taken");
        }
    });
    let connections = Connections::default();
    for life in 0..2 {
        let fetched = connections
            .fetch(&address, Ticket::default(), room(bytes.len()))
            .await;
        assert!(
            fetched.expect("all bytes")[..] == bytes[..],
            "in life {life}"
        );
        assert_eq!(connections.kept(), 1);
    }
    serving.await.expect("both lives");
}
