//! One call under way: what has come, and where it goes.

use super::reduce::Fold;
use super::step::{Reduce, View};
use crate::call::{Failure, Outputs};
use crate::scratch::{Pool, Scratch};
use crate::transport::CHUNK;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::AcqRel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// No code that can panic on what comes from outside runs under these locks.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

type Done = Box<dyn FnOnce(Result<(), Failure>) + Send>;

/// A call that waits for pieces.
pub(super) struct Exchange(Mutex<Option<Waiting>>);

struct Waiting {
    outputs: Box<dyn Outputs>,
    /// Pieces that have not come whole.
    left: usize,
    done: Done,
}

impl Exchange {
    pub(super) fn new(outputs: Box<dyn Outputs>, left: usize, done: Done) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Some(Waiting {
            outputs,
            left,
            done,
        }))))
    }

    /// Puts bytes of a piece in their place.
    pub(super) fn place(&self, output: usize, view: &View, offset: usize, bytes: &[u8]) {
        let mut waiting = lock(&self.0);
        let Some(waiting) = waiting.as_mut() else {
            return;
        };
        let memory = waiting.outputs.get(output);
        view.runs(offset, bytes.len(), |place, at, count| {
            if let (Some(into), Some(from)) = (
                memory.get_mut(place..place + count),
                bytes.get(at..at + count),
            ) {
                into.copy_from_slice(from);
            }
        });
    }

    /// Lends a place in a result, if the call waits for it yet.
    pub(super) fn lend<T>(
        &self,
        output: usize,
        place: Range<usize>,
        each: impl FnOnce(&mut [u8]) -> T,
    ) -> Option<T> {
        let mut waiting = lock(&self.0);
        let memory = waiting.as_mut()?.outputs.get(output);
        memory.get_mut(place).map(each)
    }

    /// One piece fewer to wait for; tells the outcome if it was the last.
    pub(super) fn arrived(&self) {
        let mut waiting = lock(&self.0);
        if let Some(each) = waiting.as_mut() {
            each.left = each.left.saturating_sub(1);
            if each.left > 0 {
                return;
            }
        }
        let ended = waiting.take();
        drop(waiting);
        if let Some(Waiting { outputs, done, .. }) = ended {
            drop(outputs);
            done(Ok(()));
        }
    }

    /// Tells the failure, unless the outcome is told already.
    pub(super) fn fail(&self, failure: Failure) {
        let ended = lock(&self.0).take();
        if let Some(Waiting { outputs, done, .. }) = ended {
            drop(outputs);
            done(Err(failure));
        }
    }
}

/// What happens to the bytes of a piece.
#[derive(Clone)]
pub(super) enum Use {
    /// They are a part of a result.
    Place { output: usize, view: View },
    /// They are a member's part of a reduction.
    Reduce {
        reducer: Arc<Reducer>,
        member: usize,
    },
}

/// A piece that was asked for.
pub(super) struct Slot {
    pub(super) exchange: Arc<Exchange>,
    pub(super) usage: Use,
    len: usize,
    /// Which chunks have come, a bit each.
    came: Mutex<Vec<u64>>,
    /// Chunks that are not where they belong yet.
    left: AtomicUsize,
}

impl Slot {
    pub(super) fn new(exchange: Arc<Exchange>, usage: Use, len: usize) -> Arc<Self> {
        let chunks = len.div_ceil(CHUNK);
        Arc::new(Self {
            exchange,
            usage,
            len,
            came: Mutex::new(vec![0; chunks.div_ceil(64)]),
            left: AtomicUsize::new(chunks),
        })
    }

    /// Takes note of a chunk. False if there is no such chunk or it came before.
    pub(super) fn note(&self, offset: usize, len: usize) -> bool {
        let expected = self.len.checked_sub(offset).map(|rest| rest.min(CHUNK));
        if !offset.is_multiple_of(CHUNK) || Some(len) != expected || len == 0 {
            return false;
        }
        let chunk = offset / CHUNK;
        let mut came = lock(&self.came);
        let Some(word) = came.get_mut(chunk / 64) else {
            return false;
        };
        let bit = 1 << (chunk % 64);
        let new = *word & bit == 0;
        *word |= bit;
        new
    }

    /// A chunk that was noted is where it belongs. Whether all are.
    pub(super) fn landed(&self) -> bool {
        self.left.fetch_sub(1, AcqRel) == 1
    }
}

/// A reduction under way: chunk by chunk, each in the order of the group.
pub(super) struct Reducer {
    pub(super) reduce: Reduce,
    fold: Fold,
    pool: Pool,
    chunks: Mutex<Vec<Chunk>>,
    /// Chunks of the result that are not where they belong yet.
    left: AtomicUsize,
}

#[derive(Default)]
struct Chunk {
    /// The members before `next`, reduced.
    sum: Option<Sum>,
    next: usize,
    /// Members that came before their turn.
    early: BTreeMap<usize, Part>,
}

/// A member's bytes.
pub(super) enum Part {
    /// They are to be read only.
    Lent(Bytes),
    /// What is made of them may take their place.
    Own(Scratch),
}

impl Part {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Lent(bytes) => bytes,
            Self::Own(bytes) => bytes,
        }
    }
}

/// Members' bytes, reduced. The first one's are not copied before they have to be.
enum Sum {
    One(Part),
    More(Scratch),
}

/// A chunk of the result.
pub(super) struct Reduced {
    pub(super) offset: usize,
    pub(super) bytes: Bytes,
}

impl Reducer {
    pub(super) fn new(reduce: Reduce, fold: Fold, pool: Pool) -> Arc<Self> {
        let count = reduce.len.div_ceil(CHUNK);
        let mut chunks = Vec::new();
        chunks.resize_with(count, Chunk::default);
        Arc::new(Self {
            reduce,
            fold,
            pool,
            chunks: Mutex::new(chunks),
            left: AtomicUsize::new(count),
        })
    }

    /// Takes a member's chunk, which [`Slot::note`] has found right; gives the chunk of the result when it is the last member's.
    pub(super) fn take(&self, member: usize, offset: usize, part: Part) -> Option<Reduced> {
        let members = self.reduce.members.len();
        let mut chunks = lock(&self.chunks);
        let chunk = chunks.get_mut(offset / CHUNK)?;
        chunk.early.insert(member, part);
        while let Some(part) = chunk.early.remove(&chunk.next) {
            chunk.next += 1;
            chunk.sum = Some(match chunk.sum.take() {
                None => Sum::One(part),
                Some(sum) => Sum::More(self.both(sum, part)),
            });
        }
        if chunk.next < members {
            return None;
        }
        let bytes = match chunk.sum.take()? {
            Sum::One(Part::Lent(bytes)) => bytes,
            Sum::One(Part::Own(bytes)) | Sum::More(bytes) => Bytes::from_owner(bytes),
        };
        Some(Reduced { offset, bytes })
    }

    /// The sum with one more member, in memory of either that is nobody else's.
    fn both(&self, sum: Sum, part: Part) -> Scratch {
        let (mut sum, part) = match (sum, part) {
            (Sum::More(sum) | Sum::One(Part::Own(sum)), part) => (sum, part),
            (Sum::One(Part::Lent(first)), Part::Own(mut part)) => {
                (self.fold.backward)(&mut part, &first);
                return part;
            }
            (Sum::One(Part::Lent(first)), part) => (self.pool.copy(&first), part),
        };
        (self.fold.forward)(&mut sum, part.bytes());
        sum
    }

    /// A chunk of the result is where it belongs. Whether all are.
    pub(super) fn landed(&self) -> bool {
        self.left.fetch_sub(1, AcqRel) == 1
    }
}
