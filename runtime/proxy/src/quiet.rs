//! Gives memory back to the system after sessions have ended, and when all has been quiet for a moment after some traffic.
//!
//! The C library keeps what is freed for the next allocation. That is right while bytes flow, but what one client's large
//! arrays have taken would stay with the process for good.

use std::{
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use tokio_util::sync::CancellationToken;

use crate::counters::Counters;

/// How often the counters are looked at.
const INTERVAL: Duration = Duration::from_secs(1);
/// Looks after a session's end at which memory is given back: its parts go one after another.
const ECHOES: u32 = 3;

/// Looks at the counters until `stop` is cancelled; `release` walks the whole heap and may block.
pub(crate) async fn watch(counters: Arc<Counters>, release: fn(), stop: CancellationToken) {
    let mut quiet = Quiet::default();
    let mut ticks = tokio::time::interval(INTERVAL);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
        }
        if quiet.wants_release(Seen::of(&counters)) {
            // Fails only when the runtime ends.
            let _ = tokio::task::spawn_blocking(release).await;
        }
    }
}

/// What the counters say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Seen {
    traffic: u64,
    ended: u64,
}

impl Seen {
    fn of(counters: &Counters) -> Seen {
        let get = |counter: &std::sync::atomic::AtomicU64| counter.load(Relaxed);
        // Read in this order: a session is counted before it can end.
        let open = get(&counters.sessions);
        let traffic = [
            &counters.requests,
            &counters.stored_bytes,
            &counters.fetched_bytes,
        ];
        Seen {
            traffic: traffic.into_iter().map(get).fold(0, u64::wrapping_add),
            ended: get(&counters.sessions_total).saturating_sub(open),
        }
    }
}

#[derive(Debug, Default)]
struct Quiet {
    last: Seen,
    /// There was traffic since memory was last given back.
    stirred: bool,
    echoes: u32,
}

impl Quiet {
    fn wants_release(&mut self, now: Seen) -> bool {
        let last = std::mem::replace(&mut self.last, now);
        if now.ended > last.ended {
            self.echoes = ECHOES;
        }
        if self.echoes > 0 {
            self.echoes -= 1;
            return true;
        }
        if now.traffic != last.traffic {
            self.stirred = true;
            return false;
        }
        std::mem::take(&mut self.stirred)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn looks(seen: &[(u64, u64)]) -> Vec<bool> {
        let mut quiet = Quiet::default();
        let seen = seen.iter().map(|&(traffic, ended)| Seen { traffic, ended });
        seen.map(|now| quiet.wants_release(now)).collect()
    }

    #[test]
    fn memory_goes_back_once_when_traffic_has_stopped() {
        let seen = [(0, 0), (5, 0), (9, 0), (9, 0), (9, 0), (10, 0), (10, 0)];
        let wanted = [false, false, false, true, false, false, true];
        assert_eq!(looks(&seen), wanted);
    }

    #[test]
    fn a_sessions_end_counts_even_while_others_are_busy() {
        let seen = [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 1)];
        assert_eq!(looks(&seen), [false, false, true, true, true, false]);
    }
}
