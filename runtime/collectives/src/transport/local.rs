//! The way between two processes of one machine: an abstract Unix socket, whose bytes take the system half of the time that they
//! take over loopback.
//!
//! Its name follows from the secret, the process and the port that it has for TCP: who knows the way by TCP knows this one too,
//! and nobody else can guess the name or take it first. Such names are a network namespace's own, as ports are. Who finds none is
//! somewhere else, or was told a port that something between passes on, and goes by TCP.

use super::hello::{Secret, refused};
use super::{CHUNK, Process};
use sha2::{Digest as _, Sha256};
use socket2::SockRef;
use std::fmt::Write as _;
use std::io;
use tokio::net::{UnixListener, UnixStream};

/// What the system is to take before who sends has to wait: room for more than a chunk, so that both ends need not take turns. It
/// may give less.
const SEND_BUFFER: usize = 4 * CHUNK;

fn name(secret: &Secret, process: Process, port: u16) -> String {
    let hash = Sha256::new()
        .chain_update(b"waystation collectives")
        .chain_update(secret.bytes())
        .chain_update(process.0.to_le_bytes())
        .chain_update(port.to_le_bytes())
        .finalize();
    let mut name = "\0waystation-collectives-".to_owned();
    for byte in &hash[..16] {
        let _ = write!(name, "{byte:02x}");
    }
    name
}

/// Takes connections for a process that has this port for TCP.
pub(super) fn listen(secret: &Secret, process: Process, port: u16) -> io::Result<UnixListener> {
    UnixListener::bind(name(secret, process, port))
}

/// The next connection of a process of the same user. An abstract socket has no file whose rights would keep others out.
pub(super) async fn accept(listener: &UnixListener) -> io::Result<UnixStream> {
    loop {
        let (stream, _) = listener.accept().await?;
        match own_users(&stream) {
            Ok(()) => return Ok(stream),
            Err(error) => tracing::warn!(%error, "a stranger was turned away"),
        }
    }
}

/// Connects to a process that has this port for TCP, if it is here.
///
/// # Errors
///
/// Mostly that it is not, or does not listen here.
pub(super) async fn connect(
    secret: &Secret,
    process: Process,
    port: u16,
) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(name(secret, process, port)).await?;
    // Before it is told the secret.
    own_users(&stream)?;
    Ok(stream)
}

fn own_users(stream: &UnixStream) -> io::Result<()> {
    let user = stream.peer_cred()?.uid();
    if user != rustix::process::geteuid().as_raw() {
        return Err(refused(format!("it is a process of the user {user}")));
    }
    Ok(())
}

/// Gives a connection its room.
pub(super) fn widen(stream: &UnixStream) {
    if let Err(error) = SockRef::from(stream).set_send_buffer_size(SEND_BUFFER) {
        tracing::debug!(%error, "a connection keeps the room it has");
    }
}
