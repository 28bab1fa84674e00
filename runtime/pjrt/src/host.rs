//! Memory of the host, as transfers want it.

use crate::error::{Code, Error};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

/// Bytes that a transfer reads, kept alive by whoever holds a clone.
pub type HostBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// Alignment from which CPU plugins use host memory in place.
pub(crate) const ALIGNMENT: usize = 64;

/// A block of initialised bytes whose start is a multiple of 64, so that plugins can use it in place.
pub struct AlignedBytes {
    start: NonNull<u8>,
    len: usize,
    capacity: usize,
}

// SAFETY: the block is owned and plain memory.
unsafe impl Send for AlignedBytes {}
// SAFETY: shared access only reads.
unsafe impl Sync for AlignedBytes {}

impl AlignedBytes {
    /// `len` bytes of zero.
    ///
    /// # Errors
    ///
    /// [`Code::ResourceExhausted`] if there is no memory for them.
    pub fn zeroed(len: usize) -> Result<Self, Error> {
        if len == 0 {
            // A well aligned place for nothing.
            return Ok(Self {
                start: Self::dangling(),
                len: 0,
                capacity: 0,
            });
        }
        let exhausted = || {
            Error::own(
                Code::ResourceExhausted,
                "AlignedBytes",
                format!("no memory for {len} bytes on the host"),
            )
        };
        let layout = Layout::from_size_align(len, ALIGNMENT).map_err(|_| exhausted())?;
        // SAFETY: the size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or_else(exhausted)?;
        Ok(Self {
            start,
            len,
            capacity: len,
        })
    }

    /// A block of `len` bytes for a transfer to write: this one with what it held, if it is large enough and not
    /// more than twice as large, else a new one of zero.
    ///
    /// # Errors
    ///
    /// As [`AlignedBytes::zeroed`].
    pub fn recycle(mut self, len: usize) -> Result<Self, Error> {
        if len <= self.capacity && self.capacity / 2 <= len {
            // The whole capacity was initialised when it was allocated.
            self.len = len;
            return Ok(self);
        }
        drop(self);
        Self::zeroed(len)
    }

    /// Shortens to `len` bytes; longer does nothing.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Bytes allocated, at least the length.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    fn dangling() -> NonNull<u8> {
        #[repr(align(64))]
        struct Aligned;
        NonNull::<Aligned>::dangling().cast()
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        if self.capacity == 0 {
            return;
        }
        // SAFETY: allocated with this layout, which was valid then.
        unsafe {
            let layout = Layout::from_size_align_unchecked(self.capacity, ALIGNMENT);
            dealloc(self.start.as_ptr(), layout);
        }
    }
}

impl Deref for AlignedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes are allocated and initialised, or `len` is zero.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed mutably.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl AsRef<[u8]> for AlignedBytes {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for AlignedBytes {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "AlignedBytes({} of {})", self.len, self.capacity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_aligned_zero_and_reused() {
        for len in [0, 1, 63, 64, 65, 1 << 20] {
            let block = AlignedBytes::zeroed(len).expect("memory");
            assert_eq!(block.as_ptr().align_offset(ALIGNMENT), 0);
            assert_eq!(block.len(), len);
            assert!(block.iter().all(|byte| *byte == 0));
        }
        let mut block = AlignedBytes::zeroed(1000).expect("memory");
        block[999] = 7;
        let place = block.as_ptr();
        let block = block.recycle(600).expect("memory");
        assert_eq!((block.as_ptr(), block.len()), (place, 600));
        let block = block.recycle(1000).expect("memory");
        assert_eq!((block.as_ptr(), block[999]), (place, 7));
        assert_eq!(block.recycle(100).expect("memory").capacity(), 100);
    }

    #[test]
    fn absurd_lengths_are_an_error() {
        let error = AlignedBytes::zeroed(usize::MAX).expect_err("no such memory");
        assert_eq!(error.code(), Code::ResourceExhausted);
    }
}
