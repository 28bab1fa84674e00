//! Segments: memory that a proxy on this machine writes puts to and reads fetches from, so that their bytes need no socket.
//!
//! A segment is an unnamed file in memory, mapped here. The proxy opens it as `/proc/PID/fd/N` of this process, which the
//! system allows to processes of the same user (and root) that see this process under that number; nothing listens for
//! anybody. At its attach a proxy is told of a segment with a secret in it: one that reads the secret there is on this
//! machine and may. All others, and all that finds no segment, go by the data service.
//!
//! Fresh pages cost more than the transfer itself, so a segment that is free again is kept for the next transfer of its size,
//! for a moment. One that was told to a proxy is kept only when the proxy has said that it is done with it; after a transfer
//! that broke off it goes, and who still writes to it writes into nothing.

use std::{
    fs::File,
    ops::{Deref, DerefMut},
    os::{fd::AsRawFd as _, unix::fs::MetadataExt as _},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use waystation_pjrt::AlignedBytes;
use waystation_proto::waystation::worker::{LocalMemory, Segment};

use crate::{counters, host};

/// What segments that nobody uses may hold when memory is taken anew, in bytes.
const IDLE_BYTES: u64 = 64 << 20;
/// How long a segment that nobody uses is kept.
const IDLE_TIME: Duration = Duration::from_secs(1);
/// The part of a segment that a smaller transfer may leave unused: one in so many bytes.
const SLACK: usize = 8;
const SECRET_BYTES: usize = 32;

/// The segments of this process.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    /// Most that there are at a time; each takes a file descriptor and a mapping.
    most: usize,
    proof: Option<LocalMemory>,
    /// Keeps the file of the proof open.
    _secret: Option<AlignedBytes>,
    state: Mutex<State>,
    /// Gauge: of those in use and those kept.
    bytes: AtomicU64,
    /// That came and went through segments.
    moved: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    in_use: usize,
    /// The one that has waited longest first.
    idle: Vec<(AlignedBytes, Instant)>,
}

impl State {
    fn idle_bytes(&self) -> u64 {
        let bytes = self.idle.iter().map(|(bytes, _)| bytes.capacity() as u64);
        bytes.sum()
    }
}

impl Segments {
    /// At most so many segments; none at all where the system gives no such memory.
    pub(crate) fn new(most: usize) -> Arc<Segments> {
        let mut segments = Segments::default();
        if most > 0 {
            match proof() {
                Ok((secret, proof)) => {
                    segments.most = most;
                    segments.proof = Some(proof);
                    segments._secret = Some(secret);
                }
                Err(error) => tracing::info!(
                    error,
                    "no memory can be shared with a proxy on this machine"
                ),
            }
        }
        Arc::new(segments)
    }

    /// What a proxy is told.
    pub(crate) fn announcement(&self) -> Option<LocalMemory> {
        self.proof.clone()
    }

    /// A segment of `len` bytes, whatever they are, or `None` where there is none to be had.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Option<Block> {
        if self.most == 0 || len == 0 {
            return None;
        }
        let mut gone = Vec::new();
        let kept = {
            let mut state = self.lock();
            if state.in_use >= self.most {
                return None;
            }
            let fits = |bytes: &AlignedBytes| {
                let capacity = bytes.capacity();
                capacity >= len && capacity - len <= len / SLACK
            };
            // The one used last: its pages are the likeliest to be in a cache.
            let found = state.idle.iter().rposition(|(bytes, _)| fits(bytes));
            let kept = found.map(|index| state.idle.remove(index).0);
            if kept.is_none() {
                while state.idle_bytes() > IDLE_BYTES
                    || (state.in_use + state.idle.len() >= self.most && !state.idle.is_empty())
                {
                    gone.push(state.idle.remove(0).0);
                }
            }
            state.in_use += 1;
            kept
        };
        self.free(gone);
        let bytes = match kept {
            Some(bytes) => bytes.recycle(len),
            None => AlignedBytes::shared(len).inspect(|bytes| {
                self.bytes.fetch_add(bytes.capacity() as u64, Relaxed);
            }),
        };
        match bytes {
            Ok(bytes) => Some(Block {
                capacity: bytes.capacity() as u64,
                bytes,
                lent: AtomicBool::new(false),
                home: Some(Arc::clone(self)),
            }),
            Err(error) => {
                tracing::debug!(%error, "no segment");
                self.lock().in_use -= 1;
                None
            }
        }
    }

    /// Lets go of what nobody has used for a while.
    pub(crate) fn sweep(&self) {
        let gone = {
            let mut state = self.lock();
            let old = state
                .idle
                .iter()
                .take_while(|(_, since)| since.elapsed() >= IDLE_TIME)
                .count();
            state.idle.drain(..old).map(|(bytes, _)| bytes).collect()
        };
        self.free(gone);
    }

    /// Gauge: bytes of all segments.
    pub(crate) fn bytes(&self) -> u64 {
        counters::get(&self.bytes)
    }

    /// Bytes that came and went through segments.
    pub(crate) fn moved(&self) -> u64 {
        counters::get(&self.moved)
    }

    /// Counts bytes that came or went.
    pub(crate) fn count(&self, bytes: usize) {
        counters::add(&self.moved, bytes as u64);
    }

    /// Outside the lock, as in [`Block`].
    fn free(&self, gone: Vec<AlignedBytes>) {
        for bytes in gone {
            counters::sub(&self.bytes, bytes.capacity() as u64);
            drop(bytes);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No change of the state can be left half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Host bytes of a transfer: of the heap, or a segment.
#[derive(Debug, Default)]
pub(crate) struct Block {
    bytes: AlignedBytes,
    /// Of the segment; its bytes may be elsewhere for a while.
    capacity: u64,
    /// A proxy knows of it and has not said that it is done.
    lent: AtomicBool,
    home: Option<Arc<Segments>>,
}

impl Block {
    /// Names the block to a proxy; `None` where it is no segment.
    pub(crate) fn lend(&self) -> Option<Segment> {
        let home = self.home.as_ref()?;
        let name = self.bytes.file().and_then(name)?;
        self.lent.store(true, Relaxed);
        home.count(self.bytes.len());
        Some(name)
    }

    /// The proxy has said that it will not touch the block again.
    pub(crate) fn is_back(&self) {
        self.lent.store(false, Relaxed);
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let Some(home) = self.home.take() else { return };
        let bytes = std::mem::take(&mut self.bytes);
        let mut state = home.lock();
        state.in_use -= 1;
        // Without its file its bytes were lost on the way.
        if !self.lent.load(Relaxed) && bytes.file().is_some() {
            state.idle.push((bytes, Instant::now()));
            return;
        }
        // The system takes its time over large mappings.
        drop(state);
        drop(bytes);
        counters::sub(&home.bytes, self.capacity);
    }
}

impl From<AlignedBytes> for Block {
    fn from(bytes: AlignedBytes) -> Block {
        let mut block = Block::default();
        block.bytes = bytes;
        block
    }
}

impl Deref for Block {
    type Target = AlignedBytes;

    fn deref(&self) -> &AlignedBytes {
        &self.bytes
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut AlignedBytes {
        &mut self.bytes
    }
}

impl AsRef<[u8]> for Block {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

fn name(file: &File) -> Option<Segment> {
    let metadata = file.metadata().ok()?;
    Some(Segment {
        fd: file.as_raw_fd(),
        device: metadata.dev(),
        inode: metadata.ino(),
    })
}

/// A segment with a secret, and what to tell a proxy of it.
fn proof() -> Result<(AlignedBytes, LocalMemory), String> {
    let mut segment = AlignedBytes::shared(SECRET_BYTES).map_err(|error| error.to_string())?;
    host::randomize(&mut segment).map_err(|error| error.to_string())?;
    let proof = LocalMemory {
        pid: std::process::id(),
        segment: segment.file().and_then(name),
        secret: segment.to_vec().into(),
    };
    Ok((segment, proof))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn a_segment_is_used_again_when_the_proxy_is_done_with_it() {
        let segments = Segments::new(8);
        let mut block = segments.take(MIB).expect("a segment");
        block[5] = 7;
        let first = block.lend().expect("a name");
        block.is_back();
        drop(block);
        let block = segments.take(MIB - 100).expect("a segment");
        assert_eq!(block.lend(), Some(first), "the same file");
        assert_eq!((block.len(), block[5]), (MIB - 100, 7));
        // A smaller one would waste too much of it.
        drop(block);
        assert_eq!(segments.bytes(), 0, "one that a proxy may still use goes");
        let block = segments.take(MIB).expect("a segment");
        assert_eq!(block[5], 0, "and comes never again");
        drop(block);
        assert_eq!(segments.take(MIB / 2).expect("a segment").len(), MIB / 2);
        assert_eq!(segments.bytes(), (MIB + MIB / 2) as u64);
    }

    #[test]
    fn there_are_no_more_than_the_limit() {
        let segments = Segments::new(2);
        let (one, _two) = (segments.take(MIB), segments.take(MIB));
        assert!(one.is_some() && segments.take(MIB).is_none());
        drop(one);
        // What is kept makes room.
        let other = segments.take(3 * MIB);
        assert!(other.is_some() && segments.bytes() == 4 * MIB as u64);
        assert!(Segments::new(0).take(MIB).is_none());
        assert!(Segments::new(0).announcement().is_none());
    }

    #[test]
    fn what_is_kept_goes_in_time_and_before_more_is_taken() {
        let segments = Segments::new(8);
        let held: Vec<_> = (0..3).map(|_| segments.take(40 * MIB)).collect();
        drop(held);
        assert_eq!(segments.bytes(), 120 * MIB as u64);
        let small = segments.take(MIB);
        assert_eq!(segments.bytes(), 41 * MIB as u64);
        segments.sweep();
        assert_eq!(segments.bytes(), 41 * MIB as u64, "not yet");
        for (_, since) in &mut segments.lock().idle {
            *since = since.checked_sub(IDLE_TIME).expect("a machine that runs");
        }
        segments.sweep();
        assert_eq!(segments.bytes(), MIB as u64);
        drop(small);
    }
}
