//! Memory that a caller has of its own.

use std::fmt::Debug;

use bytes::Bytes;

/// Bytes to write to, which are given back when it is dropped.
pub trait Buffer: AsRef<[u8]> + AsMut<[u8]> + Send + Sync {}

impl<T: AsRef<[u8]> + AsMut<[u8]> + Send + Sync> Buffer for T {}

/// How long memory is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Term {
    /// For bytes on their way.
    Passing,
    /// For elements that are given to whoever asked for them, as long as he has them.
    Lasting,
}

/// Gives out memory.
pub trait Buffers: Debug + Send + Sync {
    /// A buffer of `len` bytes, whatever they are; `None` when there is no memory for it.
    fn take(&self, len: usize, term: Term) -> Option<Box<dyn Buffer>>;
}

/// A buffer on the heap.
pub(crate) fn heap(len: usize) -> Option<Box<dyn Buffer>> {
    Some(Box::new(crate::strided::zeroed(len)?))
}

/// The first `len` bytes of a buffer, which goes when they do.
pub(crate) fn filled(buffer: Box<dyn Buffer>, len: usize) -> Bytes {
    struct Owner(Box<dyn Buffer>);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            (*self.0).as_ref()
        }
    }
    Bytes::from_owner(Owner(buffer)).slice(..len)
}
