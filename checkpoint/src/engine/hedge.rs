//! A second request for a read that takes much longer than others like it.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures::future::{Either, select};
use tokio::time::Instant;

use crate::Result;

/// Reads of one size that are remembered.
const REMEMBERED: usize = 64;
/// Fewer say nothing of what is usual.
const ENOUGH: usize = 8;
/// A read is slow beyond this many times what is usual, and [`FLOOR`].
const TIMES: u32 = 3;
/// No read is slow before this.
const FLOOR: Duration = Duration::from_millis(250);

/// How long reads of a bucket take.
#[derive(Debug, Default)]
pub(super) struct Pace(Mutex<Vec<VecDeque<Duration>>>);

impl Pace {
    /// Reads of at most `most` bytes, and once more when that is slow and `spare` has what it takes; the first to end counts.
    /// A read that fails while the other goes on leaves it to that.
    pub(super) async fn read<T, S, F: Future<Output = Result<T>>>(
        &self,
        most: usize,
        once: impl Fn() -> F,
        spare: impl FnOnce() -> Option<S>,
    ) -> Result<T> {
        let begun = Instant::now();
        let mut first = std::pin::pin!(once());
        let early = loop {
            let wait = match self.slow(most) {
                Some(slow) => slow.saturating_sub(begun.elapsed()),
                // May be known soon: others have begun at the same time.
                None => FLOOR,
            };
            if wait.is_zero() {
                break None;
            }
            if let Ok(read) = tokio::time::timeout(wait, first.as_mut()).await {
                break Some(read);
            }
        };
        if let Some(read) = early {
            if read.is_ok() {
                self.took(most, begun.elapsed());
            }
            return read;
        }
        let Some(_spare) = spare() else {
            return first.await;
        };
        let again = Instant::now();
        let second = std::pin::pin!(once());
        match select(first, second).await {
            Either::Left((Err(_), second)) => second.await,
            Either::Right((Err(_), first)) => first.await,
            Either::Left((read, _)) => {
                self.took(most, begun.elapsed());
                read
            }
            Either::Right((read, _)) => {
                self.took(most, again.elapsed());
                read
            }
        }
    }

    /// When a read is slow; `None` when it is not known what is usual.
    fn slow(&self, most: usize) -> Option<Duration> {
        let mut recent: Vec<Duration> = {
            let classes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            classes.get(class(most))?.iter().copied().collect()
        };
        if recent.len() < ENOUGH {
            return None;
        }
        let middle = recent.len() / 2;
        let (_, &mut median, _) = recent.select_nth_unstable(middle);
        Some(median.saturating_mul(TIMES) + FLOOR)
    }

    fn took(&self, most: usize, time: Duration) {
        let mut classes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let class = class(most);
        if classes.len() <= class {
            classes.resize_with(class + 1, VecDeque::new);
        }
        let recent = &mut classes[class];
        if recent.len() == REMEMBERED {
            recent.pop_front();
        }
        recent.push_back(time);
    }
}

/// Reads of like size: by powers of two, the small ones together.
fn class(most: usize) -> usize {
    (most >> 16)
        .checked_ilog2()
        .map_or(0, |log| log as usize + 1)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use super::*;

    async fn usual(pace: &Pace) {
        for _ in 0..ENOUGH {
            let quick = || async {
                tokio::time::sleep(Duration::from_millis(30)).await;
                Ok(0)
            };
            pace.read(10, quick, || -> Option<()> { panic!("not slow") })
                .await
                .unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_read_is_asked_for_again() {
        let pace = Pace::default();
        usual(&pace).await;
        let (calls, spared) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let read = || async {
            let number = calls.fetch_add(1, Relaxed);
            let time = if number == 0 { 100_000 } else { 20 };
            tokio::time::sleep(Duration::from_millis(time)).await;
            Ok(number)
        };
        let begun = Instant::now();
        let spare = || Some(spared.fetch_add(1, Relaxed));
        assert_eq!(pace.read(10, read, spare).await.unwrap(), 1);
        assert_eq!(begun.elapsed().as_millis(), 3 * 30 + 250 + 20);
        assert_eq!(spared.into_inner(), 1);
        // Of other sizes nothing is known.
        let other = || async {
            tokio::time::sleep(Duration::from_secs(100)).await;
            Ok(7)
        };
        let never = || -> Option<()> { panic!("not known to be slow") };
        assert_eq!(pace.read(1 << 20, other, never).await.unwrap(), 7);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_usual_may_become_known_while_a_read_goes_on() {
        let pace = Pace::default();
        let calls = AtomicUsize::new(0);
        let read = || async {
            let number = calls.fetch_add(1, Relaxed);
            let time = if number == 0 { 100_000 } else { 20 };
            tokio::time::sleep(Duration::from_millis(time)).await;
            Ok(number)
        };
        let begun = Instant::now();
        let (first, ()) = tokio::join!(pace.read(10, read, || Some(())), usual(&pace));
        assert_eq!(first.unwrap(), 1);
        assert!(begun.elapsed() < Duration::from_secs(1));
    }

    #[tokio::test(start_paused = true)]
    async fn without_what_it_takes_the_first_is_waited_for() {
        let pace = Pace::default();
        usual(&pace).await;
        let calls = AtomicUsize::new(0);
        let read = || async {
            calls.fetch_add(1, Relaxed);
            tokio::time::sleep(Duration::from_secs(9)).await;
            Ok(1)
        };
        assert_eq!(pace.read(10, read, || None::<()>).await.unwrap(), 1);
        assert_eq!(calls.into_inner(), 1);
    }
}
