//! Connections of both kinds, and where they come from.

use super::local;
use super::read::Incoming;
use socket2::{SockRef, TcpKeepalive};
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

/// Where connections of one kind come from.
pub(super) trait Listener: Send + 'static {
    /// The next connection, and the address it counts for among those that have not said hello.
    fn next(&self) -> impl Future<Output = io::Result<(impl Stream, IpAddr)>> + Send;
}

impl Listener for TcpListener {
    async fn next(&self) -> io::Result<(impl Stream, IpAddr)> {
        let (stream, address) = self.accept().await?;
        Ok((stream, address.ip()))
    }
}

impl Listener for UnixListener {
    async fn next(&self) -> io::Result<(impl Stream, IpAddr)> {
        // An address that nobody has.
        Ok((local::accept(self).await?, Ipv4Addr::UNSPECIFIED.into()))
    }
}

/// A connection of one kind.
pub(super) trait Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static {
    /// Sets what is to be set before messages go over it.
    fn prepare(&self, silence: Duration);
    /// What is read and what is written.
    fn halves(self) -> (impl Incoming, impl AsyncWrite + Unpin + Send + 'static);
}

impl Stream for TcpStream {
    fn prepare(&self, silence: Duration) {
        if let Err(error) = self.set_nodelay(true) {
            tracing::debug!(%error, "messages may wait for each other");
        }
        if let Err(error) = probe(self, silence) {
            tracing::debug!(%error, "a connection that breaks without a word may not be noticed");
        }
    }

    fn halves(self) -> (impl Incoming, impl AsyncWrite + Unpin + Send + 'static) {
        self.into_split()
    }
}

impl Stream for UnixStream {
    fn prepare(&self, _: Duration) {
        local::widen(self);
    }

    fn halves(self) -> (impl Incoming, impl AsyncWrite + Unpin + Send + 'static) {
        self.into_split()
    }
}

/// Has the system look after a quiet connection: one whose other end is gone without a word, or that a firewall has forgotten,
/// breaks within `silence`, of which the system knows whole seconds. It is the other system that answers, however busy the
/// process is there.
pub(super) fn probe(stream: &TcpStream, silence: Duration) -> io::Result<()> {
    let half = Duration::from_secs((silence / 2).as_secs().max(1));
    let interval = Duration::from_secs((silence / 8).as_secs().max(1));
    let probes = u32::try_from(half.as_secs() / interval.as_secs()).unwrap_or(1);
    let keepalive = TcpKeepalive::new()
        .with_time(half)
        .with_interval(interval)
        .with_retries(probes);
    SockRef::from(stream).set_tcp_keepalive(&keepalive)
}
