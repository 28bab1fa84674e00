//! What processes say to each other, and the way there.

mod frame;
mod hello;
mod local;
mod queue;
mod read;
mod strangers;
mod stream;
mod tcp;
#[cfg(test)]
mod tests;

pub use hello::Secret;
pub use strangers::{Stranger, Strangers};
pub use tcp::{Config, Tcp};

use crate::call::Failure;
use bytes::Bytes;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Acquire};

/// A process, by a number that all agree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Process(pub u32);

/// Bytes of a piece that go at once; pieces are cut at multiples of it.
pub const CHUNK: usize = if cfg!(test) { 4 << 10 } else { 256 << 10 };

/// A piece of data on the way from one partition to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The launch, by a number that is used once.
    pub launch: u64,
    /// How many times the partition has run the operation in this launch before.
    pub execution: u64,
    /// The operation's number in the program.
    pub op: u32,
    /// Which of the pieces that the operation has for this target.
    pub lane: u32,
    /// The partition that it comes from.
    pub source: u32,
    /// The partition that it goes to.
    pub target: u32,
}

/// Bytes of a piece that was asked for.
#[derive(Clone, Debug)]
pub struct Transfer {
    /// The piece.
    pub key: Key,
    /// Where in the piece the bytes begin; a multiple of [`CHUNK`].
    pub offset: u64,
    /// The bytes, to be cut at multiples of [`CHUNK`].
    pub bytes: Bytes,
    /// Whether the launch has failed, so that nobody wants them any more.
    pub failed: Arc<AtomicBool>,
}

impl Transfer {
    /// Whether nobody wants the bytes any more.
    #[must_use]
    pub fn is_void(&self) -> bool {
        self.failed.load(Acquire)
    }
}

/// What one process tells another.
#[derive(Clone, Debug)]
pub enum Message {
    /// The target has come to the operation and has memory for the piece.
    Ready(Key),
    /// Bytes of a piece.
    Data(Transfer),
    /// The sender can start its part of a launch.
    Here(u64),
    /// A launch has failed.
    Fail(u64, Failure),
}

/// The way to other processes.
pub trait Transport: Send + Sync + 'static {
    /// Takes a message to be sent, and does not block. Messages about the same launch other than data arrive in order.
    ///
    /// # Errors
    ///
    /// That there is no way to `to`.
    fn send(&self, to: Process, message: Message) -> Result<(), Failure>;
}
