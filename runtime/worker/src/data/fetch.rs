//! The side that wants the bytes.

use std::{
    collections::HashMap,
    io,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    sync::Semaphore,
    task::JoinSet,
};
use waystation_pjrt::AlignedBytes;

use super::{CHUNK_BYTES, GREETING, STALL, Ticket, request};

/// Ranges of one transfer that come at the same time, each over a connection of its own. The bench's raw program does the same.
const SHARES: usize = 2;
/// Smaller ranges are not worth a connection.
const LEAST_SHARE_BYTES: usize = 4 << 20;
/// Connections to one worker at a time. More transfers wait: not for other arrays, but for bytes that are on their way.
const MOST_CONNECTIONS: usize = 8;
/// How long one that is not used is kept.
const KEPT: Duration = Duration::from_secs(60);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Connections to other workers.
#[derive(Debug, Default)]
pub(crate) struct Connections {
    by_address: Mutex<HashMap<String, Arc<Peer>>>,
}

#[derive(Debug)]
struct Peer {
    address: String,
    turns: Semaphore,
    idle: Mutex<Vec<(TcpStream, Instant)>>,
}

impl Connections {
    /// Fills `bytes` with the transfer that is offered under a ticket, all of it.
    ///
    /// # Errors
    /// What the network says; that the connection ended first.
    pub(crate) async fn fetch(
        &self,
        address: &str,
        ticket: Ticket,
        bytes: AlignedBytes,
    ) -> io::Result<AlignedBytes> {
        if bytes.is_empty() {
            return Ok(bytes);
        }
        let peer = self.peer(address);
        let total = bytes.len();
        let mut coming = JoinSet::new();
        for (start, share) in shares(bytes) {
            let peer = Arc::clone(&peer);
            coming.spawn(async move {
                let range = start..start + share.len();
                Ok::<_, io::Error>((start, peer.share(ticket, range, share).await?))
            });
        }
        let mut come = Vec::new();
        while let Some(share) = coming.join_next().await {
            // If one breaks, the others end with the set.
            come.push(share.map_err(io::Error::other)??);
        }
        come.sort_unstable_by_key(|(start, _)| *start);
        let mut shares = come.into_iter().map(|(_, share)| share);
        let mut whole = shares.next().unwrap_or_default();
        for share in shares {
            let joined = whole.join(share);
            joined.map_err(|_| io::Error::other("the shares do not fit together"))?;
        }
        // What is joined has all the memory that it is part of.
        whole.truncate(total);
        Ok(whole)
    }

    /// Connections that wait for the next transfer.
    #[cfg(test)]
    pub(super) fn kept(&self) -> usize {
        let by_address = self
            .by_address
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        by_address.values().map(|peer| peer.sweep()).sum()
    }

    fn peer(&self, address: &str) -> Arc<Peer> {
        let mut by_address = self
            .by_address
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // Those of workers that are gone, too.
        by_address.retain(|_, peer| peer.sweep() > 0 || Arc::strong_count(peer) > 1);
        let peer = by_address
            .entry(address.to_owned())
            .or_insert_with_key(|address| {
                Arc::new(Peer {
                    address: address.clone(),
                    turns: Semaphore::new(MOST_CONNECTIONS),
                    idle: Mutex::default(),
                })
            });
        Arc::clone(peer)
    }
}

impl Peer {
    /// Fetches one range.
    async fn share(
        &self,
        ticket: Ticket,
        range: Range<usize>,
        mut share: AlignedBytes,
    ) -> io::Result<AlignedBytes> {
        let _turn = self.turns.acquire().await.map_err(io::Error::other)?;
        let request = request(&ticket, &range);
        while let Some(mut stream) = self.kept() {
            match ask(&mut stream, &request, &mut share).await {
                Ok(read) => return self.rest(stream, share, read).await,
                Err(error) if error.kind() == io::ErrorKind::TimedOut => return Err(error),
                // It was one to an earlier life of the worker at that address, say.
                Err(_) => {}
            }
        }
        let mut stream = connect(&self.address).await?;
        // At once: a connection that shows no ticket may have to make room for others.
        let first = [&GREETING[..], &request].concat();
        let read = ask(&mut stream, &first, &mut share).await?;
        self.rest(stream, share, read).await
    }

    /// Reads what is missing of a range, and keeps the connection.
    async fn rest(
        &self,
        mut stream: TcpStream,
        mut share: AlignedBytes,
        read: usize,
    ) -> io::Result<AlignedBytes> {
        let mut missing = &mut share[read..];
        while !missing.is_empty() {
            let read = read_some(&mut stream, missing).await?;
            missing = &mut missing[read..];
        }
        self.idle().push((stream, Instant::now()));
        Ok(share)
    }

    /// The one used last.
    fn kept(&self) -> Option<TcpStream> {
        self.sweep();
        Some(self.idle().pop()?.0)
    }

    /// Lets go of what was not used for long, and counts the others.
    fn sweep(&self) -> usize {
        let mut idle = self.idle();
        idle.retain(|(_, since)| since.elapsed() < KEPT);
        idle.len()
    }

    fn idle(&self) -> MutexGuard<'_, Vec<(TcpStream, Instant)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Asks for a range and reads its first bytes.
async fn ask(stream: &mut TcpStream, request: &[u8], share: &mut [u8]) -> io::Result<usize> {
    stream.write_all(request).await?;
    read_some(stream, share).await
}

/// Reads at least a byte into `missing`, which is not empty.
async fn read_some(stream: &mut TcpStream, missing: &mut [u8]) -> io::Result<usize> {
    let chunk = missing.len().min(CHUNK_BYTES);
    let read = tokio::time::timeout(STALL, stream.read(&mut missing[..chunk])).await;
    match read.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        read => Ok(read),
    }
}

async fn connect(address: &str) -> io::Result<TcpStream> {
    let connect = async {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    };
    let connected = tokio::time::timeout(CONNECT_TIMEOUT, connect).await;
    connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Memory in about equal shares, each with where it begins.
fn shares(mut bytes: AlignedBytes) -> Vec<(usize, AlignedBytes)> {
    let count = (bytes.len() / LEAST_SHARE_BYTES).clamp(1, SHARES);
    let each = bytes.len().div_ceil(count);
    let mut shares = Vec::with_capacity(count);
    let (mut start, total) = (0, bytes.len());
    while shares.len() + 1 < count {
        // Only mapped memory can be cut, and at pages.
        let Some(mut rest) = bytes.cut(each) else {
            break;
        };
        rest.truncate(total - start - bytes.len());
        let next = start + bytes.len();
        shares.push((start, bytes));
        (start, bytes) = (next, rest);
    }
    shares.push((start, bytes));
    shares
}
