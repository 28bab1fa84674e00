//! The one bound on what is held of arrays.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Memory is handed out in units: a semaphore counts to 2^32 at a time.
const UNIT: u64 = 4096;

/// Memory for the elements of arrays and what is stored of them. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Memory {
    units: Arc<Semaphore>,
    total: u64,
}

impl Memory {
    /// The default bound: 4 GiB, in which chunks of a GiB can be converted.
    pub const DEFAULT_BYTES: u64 = 4 << 30;

    /// As much as this, and 16 MiB at least.
    #[must_use]
    pub fn new(bytes: u64) -> Memory {
        let most = u64::from(u32::MAX) * UNIT;
        let total = bytes.clamp(16 << 20, most);
        // It fits u32.
        let units = usize::try_from(total / UNIT).unwrap_or(1);
        Memory {
            units: Arc::new(Semaphore::new(units)),
            total,
        }
    }

    /// The bound.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Waits for that much. Not to be called by who holds some. `None` when it is more than there is.
    pub(crate) async fn take(&self, bytes: u64) -> Option<OwnedSemaphorePermit> {
        if bytes > self.total {
            return None;
        }
        let units = u32::try_from(bytes.div_ceil(UNIT).max(1)).ok()?;
        let units = units.min(u32::try_from(self.total / UNIT).ok()?);
        Arc::clone(&self.units).acquire_many_owned(units).await.ok()
    }
}

impl Default for Memory {
    fn default() -> Self {
        Memory::new(Memory::DEFAULT_BYTES)
    }
}
