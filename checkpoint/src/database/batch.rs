//! Small values that are asked for at about the same time, and lie side by side in a data file, are read by one request:
//! thousands of small arrays cost a few round trips of a bucket.
//!
//! Who asks first for a part of a file waits a moment, and then reads for all who have asked by then. Where that comes to
//! nothing, each reads for itself.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use tokio::sync::oneshot;
use waystation_ocdbt::Location;

use crate::engine::{Engine, Root, Term};

/// What is longer is read alone.
const SMALL_BYTES: u64 = 256 << 10;
/// One request reads no more.
const MAX_BYTES: u64 = 4 << 20;
/// Bytes that nobody asked for are this part of a request at most.
const GAP_SHARE: u64 = 16;
/// How long the first waits: little beside a round trip, and enough for all arrays of a restore to ask.
const PAUSE: Duration = Duration::from_millis(1);

/// Those who wait, by file.
#[derive(Debug, Default)]
pub(super) struct Batches(Mutex<HashMap<String, Vec<Wanted>>>);

#[derive(Debug)]
struct Wanted {
    range: Range<u64>,
    answer: oneshot::Sender<Bytes>,
}

/// One request.
#[derive(Debug)]
struct Group {
    range: Range<u64>,
    /// Of the bytes in the range, those that are wanted.
    bytes: u64,
    wanted: Vec<Wanted>,
}

impl Batches {
    /// Whether a part of a file is to be read with others.
    pub(super) fn takes(root: &Root, location: &Location) -> bool {
        // A disk has no round trips to save.
        !root.is_local() && (1..=SMALL_BYTES).contains(&location.length())
    }

    /// The bytes of a part of a file; `None` when they could not be read along with others. Cancel-safe: the others read for
    /// themselves.
    pub(super) async fn read(
        &self,
        engine: &Engine,
        root: &Root,
        location: &Location,
    ) -> Option<Bytes> {
        let path = location.path();
        let (answer, bytes) = oneshot::channel();
        let leads = {
            let mut files = self.lock();
            let waiting = files.entry(path.to_owned()).or_default();
            waiting.push(Wanted {
                range: location.range(),
                answer,
            });
            waiting.len() == 1
        };
        if leads {
            let lead = Lead {
                batches: self,
                path,
            };
            tokio::time::sleep(PAUSE).await;
            let groups = groups(lead.take());
            join_all(
                groups
                    .into_iter()
                    .map(|group| group.read(engine, root, path)),
            )
            .await;
        }
        bytes.await.ok()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<Wanted>>> {
        // Whoever holds it runs nothing that panics half-way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The one who reads for all. Dropped, nobody waits for it any longer.
struct Lead<'a> {
    batches: &'a Batches,
    path: &'a str,
}

impl Lead<'_> {
    fn take(self) -> Vec<Wanted> {
        let taken = self.batches.lock().remove(self.path);
        std::mem::forget(self);
        taken.unwrap_or_default()
    }
}

impl Drop for Lead<'_> {
    fn drop(&mut self) {
        self.batches.lock().remove(self.path);
    }
}

fn groups(mut wanted: Vec<Wanted>) -> Vec<Group> {
    wanted.sort_unstable_by_key(|wanted| (wanted.range.start, wanted.range.end));
    let mut groups: Vec<Group> = Vec::new();
    for wanted in wanted {
        if let Some(last) = groups.last_mut()
            && let Some(range) = last.with(&wanted.range)
        {
            last.bytes += wanted
                .range
                .end
                .saturating_sub(last.range.end.max(wanted.range.start));
            last.range = range;
            last.wanted.push(wanted);
            continue;
        }
        groups.push(Group {
            bytes: wanted.range.end - wanted.range.start,
            range: wanted.range.clone(),
            wanted: vec![wanted],
        });
    }
    groups
}

impl Group {
    /// The range with another one that begins no earlier, unless that is too much or too far.
    fn with(&self, other: &Range<u64>) -> Option<Range<u64>> {
        let range = self.range.start..self.range.end.max(other.end);
        let len = range.end - range.start;
        let fresh = other.end.saturating_sub(self.range.end.max(other.start));
        let idle = len - (self.bytes + fresh);
        (len <= MAX_BYTES && idle <= len / GAP_SHARE).then_some(range)
    }

    async fn read(self, engine: &Engine, root: &Root, path: &str) {
        let range = self.range.clone();
        let read = engine.read_range(root, path, range, Term::Passing).await;
        let Ok(Some(bytes)) = read else {
            // Each will say itself what is wrong.
            return;
        };
        for wanted in self.wanted {
            // The group is no longer than a few megabytes.
            let start = (wanted.range.start - self.range.start) as usize;
            let end = (wanted.range.end - self.range.start) as usize;
            if end <= bytes.len() {
                // Who asked may have gone.
                let _ = wanted.answer.send(bytes.slice(start..end));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn grouped(ranges: &[Range<u64>]) -> Vec<(Range<u64>, usize)> {
        let wanted = ranges.iter().map(|range| Wanted {
            range: range.clone(),
            answer: oneshot::channel().0,
        });
        let groups = groups(wanted.collect());
        for group in &groups {
            let idle = group.range.end - group.range.start - group.bytes;
            assert!(idle <= (group.range.end - group.range.start) / GAP_SHARE);
        }
        groups
            .into_iter()
            .map(|group| (group.range, group.wanted.len()))
            .collect()
    }

    #[test]
    fn what_lies_side_by_side_is_read_at_once() {
        assert_eq!(
            grouped(&[100..200, 0..100, 200..300]),
            [(0..300, 3)],
            "in any order"
        );
        // Twice the same, one within another, overlapping.
        assert_eq!(grouped(&[0..100, 0..100, 20..30, 50..150]), [(0..150, 4)]);
        // A small gap, and one that is a large part.
        assert_eq!(grouped(&[0..1000, 1010..2000]), [(0..2000, 2)]);
        assert_eq!(
            grouped(&[0..1000, 1500..2000]),
            [(0..1000, 1), (1500..2000, 1)]
        );
        assert_eq!(grouped(&[0..MAX_BYTES, MAX_BYTES..MAX_BYTES + 1]).len(), 2);
        assert!(grouped(&[]).is_empty());
    }
}
