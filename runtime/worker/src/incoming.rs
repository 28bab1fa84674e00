//! The connections that the worker's port takes: other workers' for large arrays (`crate::data`), and all others for gRPC. The
//! first byte tells them apart, so that a worker needs no other port to be reached at than the one it is known by.
//!
//! Connections that say nothing have a bound, in number and time, so that they do not take the files that others need.

use std::{io, net::IpAddr, sync::Arc, time::Duration};

use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use waystation_collectives::transport::{Stranger, Strangers};

use crate::data::{self, Offers};

/// What every HTTP/2 connection begins with.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// How long a connection may take to say what it is.
const FIRST_BYTES: Duration = Duration::from_secs(10);
/// Between two looks at one that has begun to.
const LOOK: Duration = Duration::from_millis(10);
/// Connections that have not, at a time; more take the place of the oldest. Many others may dial at once, and their first
/// bytes take their time on the way.
const SILENT: usize = 512;
/// The same from one address.
const SILENT_OF_ADDRESS: usize = 128;
/// Connections that gRPC has not taken yet.
const WAITING: usize = 64;
/// After a connection could not be taken, such as for too many open files.
const PAUSE: Duration = Duration::from_millis(100);

/// Takes connections, those for arrays until the handle is dropped. What is left are gRPC's.
pub(crate) fn split(
    listener: TcpListener,
    offers: Arc<Offers>,
) -> (ReceiverStream<io::Result<TcpStream>>, AbortOnDropHandle<()>) {
    let (calls, taken) = mpsc::channel(WAITING);
    let accept = async move {
        let silent = Strangers::new(SILENT, SILENT_OF_ADDRESS);
        let strangers = data::strangers();
        let over = CancellationToken::new();
        let _end = over.clone().drop_guard();
        loop {
            match listener.accept().await {
                Ok((stream, address)) => {
                    let sort = sort(
                        stream,
                        address.ip(),
                        calls.clone(),
                        Arc::clone(&offers),
                        silent.admit(address.ip()),
                        strangers.clone(),
                    );
                    let over = over.clone();
                    tokio::spawn(async move { over.run_until_cancelled(sort).await });
                    // So that it is heard before it may have to make room for others.
                    tokio::task::yield_now().await;
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection was not taken");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    };
    let accepting = AbortOnDropHandle::new(tokio::spawn(accept));
    (ReceiverStream::new(taken), accepting)
}

async fn sort(
    stream: TcpStream,
    address: IpAddr,
    calls: mpsc::Sender<io::Result<TcpStream>>,
    offers: Arc<Offers>,
    silent: Stranger,
    strangers: Strangers,
) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "messages may wait for each other");
    }
    let kind = tokio::select! {
        // Who has said it by now is welcome all the same.
        biased;
        kind = kind(&stream) => kind,
        () = tokio::time::sleep(FIRST_BYTES) => None,
        () = silent.displaced() => None,
    };
    drop(silent);
    match kind {
        Some(Kind::Arrays) => data::serve(stream, &offers, strangers.admit(address)).await,
        // Without gRPC, the worker is going down.
        Some(Kind::Calls) => drop(calls.send(Ok(stream)).await),
        None => {}
    }
}

/// What a connection is for.
enum Kind {
    Arrays,
    Calls,
}

/// Waits until a connection says it; none when it ends first.
async fn kind(stream: &TcpStream) -> Option<Kind> {
    let mut first = [0; PREFACE.len()];
    loop {
        let seen = stream.peek(&mut first).await.ok()?;
        let seen = first.get(..seen).filter(|seen| !seen.is_empty())?;
        if seen.first() == data::GREETING.first() {
            return Some(Kind::Arrays);
        }
        // gRPC says what it thinks of anything else; who says half of it is waited for here, for gRPC does so for ever.
        if seen == PREFACE || !PREFACE.starts_with(seen) {
            return Some(Kind::Calls);
        }
        tokio::time::sleep(LOOK).await;
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn connections_that_say_nothing_make_room_for_others() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (mut calls, _accepting) = split(listener, Arc::default());
        let begin = async |said: &[u8]| {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(said).await.unwrap();
            stream
        };
        let mut silent = vec![begin(b"").await, begin(&PREFACE[..5]).await];
        for _ in 0..SILENT_OF_ADDRESS {
            silent.push(begin(b"").await);
        }
        for mut oldest in silent.drain(..2) {
            // Against a hang: it is long before their time is up.
            let ended = tokio::time::timeout(FIRST_BYTES / 2, oldest.read_u8()).await;
            ended.expect("another one has its place").unwrap_err();
        }
        let mut late = begin(&PREFACE[..1]).await;
        let _call = begin(PREFACE).await;
        assert!(calls.next().await.is_some_and(|call| call.is_ok()));
        late.write_all(&PREFACE[1..]).await.unwrap();
        assert!(calls.next().await.is_some_and(|call| call.is_ok()));
        let _other = begin(b"GET / HTTP/1.1\r\n").await;
        assert!(calls.next().await.is_some_and(|call| call.is_ok()));
    }
}
