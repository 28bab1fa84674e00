//! Memory that a caller has of its own.

use std::fmt::Debug;

/// Bytes to write to, which are given back when it is dropped.
pub trait Buffer: AsRef<[u8]> + AsMut<[u8]> + Send + Sync {}

impl<T: AsRef<[u8]> + AsMut<[u8]> + Send + Sync> Buffer for T {}

/// Gives out memory.
pub trait Buffers: Debug + Send + Sync {
    /// A buffer of `len` bytes, whatever they are; `None` when there is no memory for it.
    fn take(&self, len: usize) -> Option<Box<dyn Buffer>>;
}

/// A buffer on the heap.
pub(crate) fn heap(len: usize) -> Option<Box<dyn Buffer>> {
    Some(Box::new(crate::strided::zeroed(len)?))
}
