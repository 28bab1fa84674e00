//! Memory of the host, as transfers want it.

use crate::error::{Code, Error};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::fs::File;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::{NonNull, null_mut};
use std::slice;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

/// Bytes that a transfer reads, kept alive by whoever holds a clone.
pub type HostBytes = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// The name that files of shared blocks show in `/proc/PID/fd`.
const SHARED_NAME: &str = "waystation-segment";

/// Alignment from which CPU plugins use host memory in place.
pub(crate) const ALIGNMENT: usize = 64;

/// [`AlignedBytes::mapped`] blocks from this on are in large pages where the system has some: those are filled sooner.
const HUGE: usize = 4 << 20;

/// [`AlignedBytes::mapped`] blocks can be cut at multiples of this: no page is larger on the systems that we know.
const GRAIN: usize = 64 << 10;

/// A block of initialised bytes whose start is a multiple of 64, so that plugins can use it in place.
pub struct AlignedBytes {
    start: NonNull<u8>,
    len: usize,
    capacity: usize,
    origin: Origin,
}

/// Where a block is from.
enum Origin {
    Heap,
    /// A mapping of its own, or a part of one, by its number.
    Map(u64),
    /// A mapping of a file.
    File(File),
}

// SAFETY: the block is owned and plain memory; of a shared one other processes see the file, not the place.
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
            return Ok(Self::default());
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
            origin: Origin::Heap,
        })
    }

    /// `len` bytes of zero that are no part of the heap: dropped, their memory is the system's again.
    ///
    /// # Errors
    ///
    /// [`Code::ResourceExhausted`] if there is no memory for them.
    pub fn mapped(len: usize) -> Result<Self, Error> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        if len == 0 {
            return Ok(Self::default());
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at a place that the system chooses.
        let made =
            unsafe { rustix::mm::mmap_anonymous(null_mut(), len, access, MapFlags::PRIVATE) };
        let start = made.ok().and_then(|start| NonNull::new(start.cast::<u8>()));
        if let Some(start) = start.filter(|_| len >= HUGE) {
            let advice = rustix::mm::Advice::LinuxHugepage;
            // SAFETY: the mapping just made. The system may not know of such pages; then it has its usual ones.
            let _ = unsafe { rustix::mm::madvise(start.as_ptr().cast(), len, advice) };
        }
        match start {
            Some(start) => Ok(Self {
                start,
                len,
                capacity: len,
                origin: Origin::Map(NEXT.fetch_add(1, Ordering::Relaxed)),
            }),
            None => Err(Error::own(
                Code::ResourceExhausted,
                "AlignedBytes",
                format!("no memory for {len} bytes on the host"),
            )),
        }
    }

    /// `len` bytes of zero that other processes can read and write through [`AlignedBytes::file`]: an unnamed file in memory,
    /// whose size nobody can change, mapped here.
    ///
    /// Whoever hands the file to a process vouches that it writes only while nothing here reads, and reads only while
    /// nothing here writes: such a process is part of this program as far as the bytes go.
    ///
    /// # Errors
    ///
    /// [`Code::ResourceExhausted`] if the system gives no such file or no room in the address space.
    pub fn shared(len: usize) -> Result<Self, Error> {
        if len == 0 {
            return Ok(Self::default());
        }
        let made = || -> rustix::io::Result<(File, NonNull<u8>)> {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
            let file = rustix::fs::memfd_create(SHARED_NAME, flags)?;
            rustix::fs::ftruncate(&file, u64::try_from(len).unwrap_or(u64::MAX))?;
            // A file cut off under a mapping ends the process that touches it.
            let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
            rustix::fs::fcntl_add_seals(&file, seals)?;
            let access = ProtFlags::READ | ProtFlags::WRITE;
            // SAFETY: a new mapping, at a place that the system chooses.
            let start =
                unsafe { rustix::mm::mmap(null_mut(), len, access, MapFlags::SHARED, &file, 0)? };
            let start = NonNull::new(start.cast()).ok_or(rustix::io::Errno::NOMEM)?;
            Ok((File::from(file), start))
        };
        match made() {
            Ok((file, start)) => Ok(Self {
                start,
                len,
                capacity: len,
                origin: Origin::File(file),
            }),
            Err(error) => Err(Error::own(
                Code::ResourceExhausted,
                "AlignedBytes",
                format!("no shared memory for {len} bytes: {error}"),
            )),
        }
    }

    /// The file through which other processes see a [`AlignedBytes::shared`] block.
    #[must_use]
    pub fn file(&self) -> Option<&File> {
        match &self.origin {
            Origin::File(file) => Some(file),
            Origin::Heap | Origin::Map(_) => None,
        }
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

    /// Cuts off what an [`AlignedBytes::mapped`] block has behind its first `len` bytes, rounded up to pages; `None` where that
    /// is nothing. What was cut off can be joined again.
    #[must_use]
    pub fn cut(&mut self, len: usize) -> Option<Self> {
        let Origin::Map(mapping) = self.origin else {
            return None;
        };
        let at = len.checked_next_multiple_of(GRAIN)?;
        if at == 0 || at >= self.capacity {
            return None;
        }
        let rest = Self {
            // SAFETY: within the mapping.
            start: unsafe { self.start.add(at) },
            len: self.capacity - at,
            capacity: self.capacity - at,
            origin: Origin::Map(mapping),
        };
        self.capacity = at;
        self.len = self.len.min(at);
        Some(rest)
    }

    /// Takes back what was cut off right behind this block, which then has all its bytes.
    ///
    /// # Errors
    ///
    /// The other block, where it is none such.
    pub fn join(&mut self, next: Self) -> Result<(), Self> {
        match (&self.origin, &next.origin) {
            (Origin::Map(own), Origin::Map(other))
                if own == other && self.end() == next.start.as_ptr() =>
            {
                self.capacity += next.capacity;
                self.len = self.capacity;
                std::mem::forget(next);
                Ok(())
            }
            _ => Err(next),
        }
    }

    /// Where the block is, and where its capacity ends.
    #[must_use]
    pub fn place(&self) -> Range<usize> {
        self.start.as_ptr().addr()..self.end().addr()
    }

    fn end(&self) -> *mut u8 {
        self.start.as_ptr().wrapping_add(self.capacity)
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

impl Default for AlignedBytes {
    /// No bytes.
    fn default() -> Self {
        Self {
            // A well aligned place for nothing.
            start: Self::dangling(),
            len: 0,
            capacity: 0,
            origin: Origin::Heap,
        }
    }
}

impl Drop for AlignedBytes {
    fn drop(&mut self) {
        if self.capacity == 0 {
            return;
        }
        if let Origin::Map(_) | Origin::File(_) = self.origin {
            // SAFETY: mapped with this size, or a part of what was, and nothing borrows from a block that is dropped. An error would leave it
            // mapped.
            let _ = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.capacity) };
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
    fn a_shared_block_is_seen_through_its_file() {
        use std::os::unix::fs::FileExt as _;
        let mut block = AlignedBytes::shared(10_000).expect("memory");
        assert_eq!(block.as_ptr().align_offset(ALIGNMENT), 0);
        assert!(block.len() == 10_000 && block.iter().all(|byte| *byte == 0));
        let file = block.file().expect("one").try_clone().expect("another");
        file.write_all_at(&[7; 100], 9_900).expect("written");
        assert!(block[..9_900].iter().all(|byte| *byte == 0));
        assert!(block[9_900..].iter().all(|byte| *byte == 7));
        block[0] = 9;
        let mut first = [0];
        file.read_exact_at(&mut first, 0).expect("read");
        assert_eq!(first, [9]);
        // Neither end moves.
        assert!(file.set_len(100).is_err() && file.set_len(20_000).is_err());
        assert!(file.write_all_at(&[1; 8], 9_996).is_err());
        let block = block.recycle(9_000).expect("memory");
        assert_eq!((block.len(), block[0]), (9_000, 9));
        drop(block);
        // Whoever still has the file has the bytes.
        file.read_exact_at(&mut first, 9_999).expect("read");
        assert_eq!(first, [7]);
        assert!(AlignedBytes::shared(0).expect("nothing").file().is_none());
    }

    #[test]
    fn a_mapped_block_is_as_any_other() {
        let mut block = AlignedBytes::mapped(10_000).expect("memory");
        assert_eq!(block.as_ptr().align_offset(ALIGNMENT), 0);
        assert!(block.len() == 10_000 && block.iter().all(|byte| *byte == 0));
        block[9_999] = 7;
        let block = block.recycle(9_000).expect("memory");
        assert!(block.file().is_none() && block.capacity() == 10_000);
        assert_eq!(block.recycle(10_000).expect("memory")[9_999], 7);
        assert!(AlignedBytes::mapped(0).expect("nothing").is_empty());
    }

    #[test]
    fn a_mapped_block_is_cut_and_joined() {
        let mut block = AlignedBytes::mapped(4 * GRAIN + 10).expect("memory");
        let all = block.place();
        let mut rest = block.cut(GRAIN + 1).expect("more");
        assert_eq!((block.capacity(), rest.len()), (2 * GRAIN, 2 * GRAIN + 10));
        assert_eq!(block.place().end, rest.place().start);
        rest[0] = 7;
        block[2 * GRAIN - 1] = 6;
        let last = rest.cut(GRAIN).expect("more");
        assert!(block.cut(2 * GRAIN).is_none(), "nothing is left");
        // Not what it ends at, and not in this order.
        let last = block.join(last).expect_err("a gap");
        let mut last = last;
        let rest = last.join(rest).expect_err("before it");
        block.join(rest).expect("what was cut off");
        block.join(last).expect("and the last");
        assert_eq!((block.place(), block.len()), (all, 4 * GRAIN + 10));
        assert_eq!(block[2 * GRAIN - 1..=2 * GRAIN], [6, 7]);
        // One part goes, the others stay.
        let rest = block.cut(2 * GRAIN).expect("more");
        drop(block);
        assert_eq!(rest[0], 7);
        for mut whole in [
            AlignedBytes::zeroed(4 * GRAIN).expect("memory"),
            AlignedBytes::shared(4 * GRAIN).expect("memory"),
        ] {
            assert!(whole.cut(GRAIN).is_none(), "only what is mapped can be cut");
        }
        let (mut one, other) = (
            AlignedBytes::mapped(GRAIN).expect("memory"),
            AlignedBytes::mapped(GRAIN).expect("memory"),
        );
        assert!(one.join(other).is_err(), "wherever the system puts them");
    }

    #[test]
    fn absurd_lengths_are_an_error() {
        for absurd in [
            AlignedBytes::zeroed,
            AlignedBytes::shared,
            AlignedBytes::mapped,
        ] {
            let error = absurd(usize::MAX).expect_err("no such memory");
            assert_eq!(error.code(), Code::ResourceExhausted);
        }
    }
}
