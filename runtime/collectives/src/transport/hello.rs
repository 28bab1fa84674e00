//! How two processes greet each other.

use super::Process;
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt};

/// Number of the protocol between processes.
const PROTOCOL: u32 = 2;
const MAGIC: &[u8; 8] = b"WSTNCOLL";
const HELLO: usize = 8 + 4 + 4 + 4 + 32;

/// What all processes of a cluster know and nobody else.
#[derive(Clone)]
pub struct Secret([u8; 32]);

impl Secret {
    /// A secret of these bytes, which are to be random.
    #[must_use]
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// For who is to show that it knows it.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Whether it is these bytes. Takes as long for any other ones.
    #[must_use]
    pub fn is(&self, other: &[u8]) -> bool {
        other.len() == self.0.len()
            && self
                .0
                .iter()
                .zip(other)
                .fold(0, |differ, (a, b)| differ | (a ^ b))
                == 0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("Secret")
    }
}

pub(super) fn timed_out() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "it did not say hello in time")
}

pub(super) fn refused(what: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionRefused, what.into())
}

pub(super) fn hello(from: Process, to: Process, secret: &Secret) -> [u8; HELLO] {
    let mut out = [0; HELLO];
    out[..8].copy_from_slice(MAGIC);
    out[8..12].copy_from_slice(&PROTOCOL.to_le_bytes());
    out[12..16].copy_from_slice(&from.0.to_le_bytes());
    out[16..20].copy_from_slice(&to.0.to_le_bytes());
    out[20..].copy_from_slice(&secret.0);
    out
}

#[cfg(test)]
pub(super) fn hello_for_tests(from: Process, to: Process, secret: [u8; 32]) -> Vec<u8> {
    hello(from, to, &Secret(secret)).to_vec()
}

/// Reads the other's hello.
pub(super) async fn greeted(
    stream: &mut (impl AsyncRead + Unpin),
    me: Process,
    secret: &Secret,
) -> io::Result<Process> {
    let mut bytes = [0; HELLO];
    stream.read_exact(&mut bytes).await?;
    let number = |at: usize| {
        let mut four = [0; 4];
        four.copy_from_slice(&bytes[at..at + 4]);
        u32::from_le_bytes(four)
    };
    if &bytes[..8] != MAGIC {
        return Err(refused("it speaks another protocol"));
    }
    if !secret.is(&bytes[20..]) {
        return Err(refused("it does not know the cluster's secret"));
    }
    if number(8) != PROTOCOL {
        return Err(refused(format!(
            "it speaks version {} of the protocol between workers, and this process {PROTOCOL}",
            number(8)
        )));
    }
    if number(16) != me.0 {
        return Err(refused(format!(
            "it looks for process {}, and this is {}",
            number(16),
            me.0
        )));
    }
    Ok(Process(number(12)))
}
