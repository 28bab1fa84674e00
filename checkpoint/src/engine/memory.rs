//! Host memory: one budget for all that saves and restores hold at a time.
//!
//! Pieces on their way to the bucket may have all of it. What is made of them while they are compressed is let go of as it
//! comes, so a small share beside the budget ([`SCRATCH_SHARE`]) is enough for that. Boxes that a restore fills may have
//! three quarters, for the chunks that fill them need room too: were there none, boxes would wait for chunks and chunks for
//! boxes. What is larger than its share is let through one at a time.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Memory is handed out in units of this many bytes: a semaphore counts to 2^32 at a time, a chunk may be larger.
const UNIT: usize = 4096;

/// What compressing may take beside the budget is this part of it.
const SCRATCH_SHARE: usize = 16;

/// A share of the budget, until it is dropped.
#[derive(Debug)]
#[must_use = "dropped, the room is given back"]
pub struct Room {
    _held: Vec<OwnedSemaphorePermit>,
}

#[derive(Debug)]
pub(super) struct Memory {
    all: Pool,
    boxes: Pool,
    scratch: Pool,
    /// A chunk beyond this share of `all` is one of the large ones, which come one at a time.
    chunk: u32,
    large: Arc<Semaphore>,
}

impl Memory {
    pub(super) fn new(bytes: usize) -> Self {
        let all = Pool::new(bytes);
        Self {
            boxes: Pool::new(bytes / 4 * 3),
            scratch: Pool::new(bytes / SCRATCH_SHARE),
            chunk: (all.size / 4).max(1),
            large: Arc::new(Semaphore::new(1)),
            all,
        }
    }

    /// Room for bytes on their way to the bucket.
    pub(super) async fn piece(&self, bytes: usize) -> Room {
        Room::of([self.all.take(units(bytes)).await])
    }

    /// Room for bytes on their way to devices, which chunks will fill.
    pub(super) async fn boxes(&self, bytes: usize) -> Room {
        // Never more of `all` than of `boxes`, or a restore alone could have it all.
        let share = units(bytes).min(self.boxes.size);
        let gate = self.boxes.take(share).await;
        Room::of([gate, self.all.take(share).await])
    }

    /// Room for a chunk that is being read, or written for a caller whose own bytes are not counted.
    pub(super) async fn chunk(&self, bytes: usize) -> Room {
        let share = units(bytes);
        if share <= self.chunk {
            return Room::of([self.all.take(share).await]);
        }
        let turn = Arc::clone(&self.large).acquire_owned().await.ok();
        Room::of([turn, self.all.take(self.chunk).await])
    }

    /// As [`Memory::chunk`] if it is to be had without waiting.
    pub(super) fn try_chunk(&self, bytes: usize) -> Option<Room> {
        let share = units(bytes);
        let free = u32::try_from(self.all.free.available_permits()).unwrap_or(u32::MAX);
        // Those who wait come first.
        if share > self.chunk || share > free {
            return None;
        }
        let taken = Arc::clone(&self.all.free).try_acquire_many_owned(share);
        Some(Room::of([taken.ok()]))
    }

    /// Room for what is made of a piece while it is compressed.
    pub(super) async fn scratch(&self, bytes: usize) -> Room {
        Room::of([self.scratch.take(units(bytes)).await])
    }

    /// Bytes of the budget that are taken.
    pub(super) fn used(&self) -> u64 {
        let free = u32::try_from(self.all.free.available_permits()).unwrap_or(u32::MAX);
        u64::from(self.all.size.saturating_sub(free)) * UNIT as u64
    }
}

impl Room {
    fn of(permits: impl IntoIterator<Item = Option<OwnedSemaphorePermit>>) -> Self {
        Self {
            _held: permits.into_iter().flatten().collect(),
        }
    }
}

#[derive(Debug)]
struct Pool {
    free: Arc<Semaphore>,
    size: u32,
}

impl Pool {
    fn new(bytes: usize) -> Self {
        let size = u32::try_from((bytes / UNIT).max(1)).unwrap_or(u32::MAX);
        Self {
            // A semaphore's own bound is far above u32.
            free: Arc::new(Semaphore::new(size as usize)),
            size,
        }
    }

    /// In the order of asking; all of it at most. Cancel-safe.
    async fn take(&self, units: u32) -> Option<OwnedSemaphorePermit> {
        // Fails only for a closed semaphore, and this one is never closed.
        Arc::clone(&self.free)
            .acquire_many_owned(units.min(self.size))
            .await
            .ok()
    }
}

fn units(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT))
        .unwrap_or(u32::MAX)
        .max(1)
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    const BUDGET: usize = 64 * UNIT;

    #[test]
    fn pieces_may_have_all_and_are_counted() {
        let memory = Memory::new(BUDGET);
        let whole = memory.piece(BUDGET).now_or_never().unwrap();
        assert_eq!(memory.used(), BUDGET as u64);
        assert!(memory.piece(1).now_or_never().is_none());
        assert!(memory.try_chunk(1).is_none());
        // What is made of it has room all the same.
        assert!(memory.scratch(UNIT).now_or_never().is_some());
        drop(whole);
        assert_eq!(memory.used(), 0);
        // More than there is comes alone.
        let _large = memory.piece(10 * BUDGET).now_or_never().unwrap();
        assert!(memory.piece(1).now_or_never().is_none());
    }

    #[test]
    fn chunks_have_room_however_many_boxes_wait() {
        let memory = Memory::new(BUDGET);
        let _boxes = memory.boxes(10 * BUDGET).now_or_never().unwrap();
        let mut next = Box::pin(memory.boxes(UNIT));
        assert!(next.as_mut().now_or_never().is_none());
        assert!(memory.chunk(BUDGET / 4).now_or_never().is_some());
        assert!(memory.chunk(BUDGET).now_or_never().is_some());
    }

    #[test]
    fn large_chunks_come_one_at_a_time() {
        let memory = Memory::new(BUDGET);
        let first = memory.chunk(BUDGET).now_or_never().unwrap();
        assert!(memory.chunk(BUDGET).now_or_never().is_none());
        assert!(memory.chunk(UNIT).now_or_never().is_some());
        drop(first);
        assert!(memory.chunk(BUDGET).now_or_never().is_some());
    }
}
