//! Gives memory back to the system once many shards, or what a checkpoint held on its way, have been freed and the worker
//! has come to rest at that.

use std::{sync::Arc, sync::atomic::Ordering, time::Duration};

use tokio_util::sync::CancellationToken;

use crate::{counters::Counters, segments::Segments, slabs::Slabs};

/// How often the accounted bytes are looked at.
const INTERVAL: Duration = Duration::from_millis(500);
/// What must have been freed since the last time: less is not worth the walk over the heap.
const WORTH_BYTES: u64 = 32 << 20;
/// What a shard's book-keeping takes beside its bytes, about.
const SHARD_BYTES: u64 = 1 << 10;
/// How many more times the heap is walked after that.
const ECHOES: u32 = 4;

/// Watches the accounted bytes, those of checkpoints under way, and the segments until `stop` is cancelled.
pub(crate) async fn watch(
    counters: Arc<Counters>,
    checkpoints: waystation_checkpoint::Engine,
    slabs: Arc<Slabs>,
    segments: Arc<Segments>,
    stop: CancellationToken,
) {
    let mut level = Level::default();
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
        }
        segments.sweep();
        slabs.sweep();
        let bytes = counters.array_bytes.load(Ordering::Relaxed);
        let on_their_way = checkpoints.totals().host_memory_bytes;
        let bytes = bytes.saturating_add(on_their_way);
        let shards = counters.shards.load(Ordering::Relaxed);
        if level.has_fallen(bytes.saturating_add(shards.saturating_mul(SHARD_BYTES))) {
            // Fails only when the runtime ends.
            let _ = tokio::task::spawn_blocking(waystation_pjrt::release_free_heap).await;
        }
    }
}

/// The accounted bytes as they went up and down.
#[derive(Debug, Default)]
struct Level {
    highest: u64,
    last: u64,
    /// Readings that are still true after a fall.
    echoes: u32,
}

impl Level {
    /// Takes the next reading. True when much less is held than at the highest since the last time that this was true,
    /// and it is no more than at the reading before: a loop that frees and allocates is left alone while it goes up. True
    /// for some readings after that as well: executions in flight free what they held without an account.
    fn has_fallen(&mut self, bytes: u64) -> bool {
        self.highest = self.highest.max(bytes);
        let settled = bytes <= self.last;
        self.last = bytes;
        if !settled {
            self.echoes = 0;
            return false;
        }
        if self.highest - bytes >= WORTH_BYTES {
            self.highest = bytes;
            self.echoes = ECHOES;
            return true;
        }
        let echoes = self.echoes > 0;
        self.echoes = self.echoes.saturating_sub(1);
        echoes
    }
}

#[cfg(test)]
mod tests {
    use super::{ECHOES, Level};

    #[test]
    fn a_fall_is_seen_and_echoes_for_a_while() {
        let mut level = Level::default();
        let up = [0, 64 << 20, 128 << 20].map(|bytes| level.has_fallen(bytes));
        assert_eq!(up, [false; 3]);
        for _ in 0..=ECHOES {
            assert!(level.has_fallen(0));
        }
        assert!(!level.has_fallen(0));
    }

    #[test]
    fn small_changes_and_what_goes_up_are_left_alone() {
        let mut level = Level::default();
        let seen = [100, 90 << 20, 80 << 20, 85 << 20, 70 << 20, 80 << 20]
            .map(|bytes| level.has_fallen(bytes));
        assert!(!seen.contains(&true), "{seen:?}");
    }

    #[test]
    fn a_rise_ends_the_echoes() {
        let mut level = Level::default();
        let seen = [64 << 20, 0, 1 << 20, 1 << 20].map(|bytes| level.has_fallen(bytes));
        assert_eq!(seen, [false, true, false, false]);
    }
}
