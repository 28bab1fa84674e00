//! The connections that the worker's port takes: other workers' for large arrays (`crate::data`), and all others for gRPC. The
//! first byte tells them apart, so that a worker needs no other port to be reached at than the one it is known by.

use std::{io, net::IpAddr, sync::Arc, time::Duration};

use tokio::{
    net::{TcpListener, TcpStream},
    sync::mpsc,
};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use waystation_collectives::transport::Strangers;

use crate::data::{self, Offers};

/// How long a connection may take to send its first byte.
const FIRST_BYTE: Duration = Duration::from_secs(20);
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
                        strangers.clone(),
                    );
                    let over = over.clone();
                    tokio::spawn(async move { over.run_until_cancelled(sort).await });
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
    strangers: Strangers,
) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "messages may wait for each other");
    }
    let mut first = [0];
    match tokio::time::timeout(FIRST_BYTE, stream.peek(&mut first)).await {
        Ok(Ok(1)) if first[0] == data::GREETING[0] => {
            data::serve(stream, &offers, strangers.admit(address)).await;
        }
        // gRPC says what it thinks of anything else. Without it, the worker is going down.
        Ok(Ok(1)) => drop(calls.send(Ok(stream)).await),
        _ => {}
    }
}
