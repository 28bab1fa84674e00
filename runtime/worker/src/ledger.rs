//! Device memory by the worker's own account: what live shards and running executions take of each device's default
//! memory. Reserved before the plugin is asked for anything, so that a limit holds on devices that have none of their own.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

/// All devices of a worker.
#[derive(Debug)]
pub(crate) struct Ledger {
    /// Bytes of each device; without it nothing is refused.
    limit: Option<u64>,
    used: Vec<AtomicU64>,
}

/// What one op wants of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ask {
    /// Local ordinal.
    pub(crate) device: usize,
    /// Of the default memory; 0 for what lies in another one.
    pub(crate) bytes: u64,
}

/// An ask that does not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full {
    pub(crate) ask: Ask,
    pub(crate) used: u64,
    pub(crate) limit: u64,
}

impl Ledger {
    pub(crate) fn new(devices: usize, limit: Option<u64>) -> Arc<Ledger> {
        Arc::new(Ledger {
            limit,
            used: std::iter::repeat_with(AtomicU64::default)
                .take(devices)
                .collect(),
        })
    }

    pub(crate) fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// Bytes in use, by device.
    pub(crate) fn used(&self) -> Vec<u64> {
        self.used.iter().map(|used| used.load(Relaxed)).collect()
    }

    /// Takes all that is asked for, or nothing.
    pub(crate) fn reserve(self: &Arc<Ledger>, asks: &[Ask]) -> Result<Vec<Charge>, Full> {
        asks.iter().map(|&ask| self.take(ask)).collect()
    }

    fn take(self: &Arc<Ledger>, ask: Ask) -> Result<Charge, Full> {
        let limit = self.limit.unwrap_or(u64::MAX);
        if ask.bytes > 0
            && let Some(used) = self.used.get(ask.device)
        {
            used.fetch_update(Relaxed, Relaxed, |used| {
                used.checked_add(ask.bytes).filter(|&sum| sum <= limit)
            })
            .map_err(|used| Full { ask, used, limit })?;
        }
        Ok(Charge {
            ledger: Arc::clone(self),
            device: ask.device,
            bytes: ask.bytes,
        })
    }
}

/// Bytes of a device that are taken until this is dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    ledger: Arc<Ledger>,
    device: usize,
    bytes: u64,
}

impl Charge {
    pub(crate) fn device(&self) -> usize {
        self.device
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Corrects the amount to what the plugin has really taken, be it beyond the limit.
    pub(crate) fn correct(&mut self, bytes: u64) {
        if let Some(used) = self.ledger.used.get(self.device) {
            if bytes > self.bytes {
                used.fetch_add(bytes - self.bytes, Relaxed);
            } else {
                used.fetch_sub(self.bytes - bytes, Relaxed);
            }
        }
        self.bytes = bytes;
    }

    /// Takes over another charge of the same device.
    pub(crate) fn merge(&mut self, mut other: Charge) {
        debug_assert_eq!(self.device, other.device);
        self.bytes += std::mem::take(&mut other.bytes);
    }

    /// Takes a part out for something of its own; what is missing here is taken from the device, be it beyond the limit.
    pub(crate) fn split(&mut self, bytes: u64) -> Charge {
        if bytes > self.bytes {
            self.correct(bytes);
        }
        self.bytes -= bytes;
        Charge {
            ledger: Arc::clone(&self.ledger),
            device: self.device,
            bytes,
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if self.bytes > 0
            && let Some(used) = self.ledger.used.get(self.device)
        {
            used.fetch_sub(self.bytes, Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(device: usize, bytes: u64) -> Ask {
        Ask { device, bytes }
    }

    #[test]
    fn a_limit_holds_on_each_device_and_is_given_back() {
        let ledger = Ledger::new(2, Some(100));
        let first = ledger.reserve(&[ask(0, 60)]).unwrap();
        let full = ledger.reserve(&[ask(0, 41)]).unwrap_err();
        assert_eq!((full.used, full.limit, full.ask.bytes), (60, 100, 41));
        let rest = ledger.reserve(&[ask(0, 40), ask(1, 100)]).unwrap();
        assert_eq!(ledger.used(), [100, 100]);
        assert!(ledger.reserve(&[ask(0, 0)]).is_ok(), "nothing always fits");
        drop((first, rest));
        assert_eq!(ledger.used(), [0, 0]);
    }

    #[test]
    fn what_does_not_fit_whole_is_not_taken_in_part() {
        let ledger = Ledger::new(2, Some(100));
        assert!(ledger.reserve(&[ask(0, 10), ask(1, 101)]).is_err());
        assert!(ledger.reserve(&[ask(0, u64::MAX), ask(0, 1)]).is_err());
        assert_eq!(ledger.used(), [0, 0]);
    }

    #[test]
    fn without_a_limit_all_is_counted_and_nothing_refused() {
        let ledger = Ledger::new(1, None);
        let charges = ledger.reserve(&[ask(0, u64::MAX)]).unwrap();
        assert_eq!(ledger.used(), [u64::MAX]);
        drop(charges);
        assert_eq!(ledger.used(), [0]);
    }

    #[test]
    fn charges_split_merge_and_follow_the_plugin() {
        let ledger = Ledger::new(1, Some(100));
        let mut pool = ledger.reserve(&[ask(0, 50)]).unwrap().remove(0);
        pool.merge(ledger.reserve(&[ask(0, 30)]).unwrap().remove(0));
        assert_eq!((pool.bytes(), ledger.used()), (80, vec![80]));
        let part = pool.split(70);
        assert_eq!(
            (pool.bytes(), part.bytes(), ledger.used()),
            (10, 70, vec![80])
        );
        // The plugin has taken more than was thought.
        let more = pool.split(45);
        assert_eq!(
            (pool.bytes(), more.bytes(), ledger.used()),
            (0, 45, vec![115])
        );
        let mut part = part;
        part.correct(20);
        assert_eq!(ledger.used(), [65]);
        drop((pool, part, more));
        assert_eq!(ledger.used(), [0]);
    }
}
