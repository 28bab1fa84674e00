//! What a worker's process needs in its environment from its start: variables that XLA's CPU client and the C library read
//! once.
//!
//! The client runs every device's part of a program on one pool of `NPROC` threads, by default one a core or device. Parts
//! of a collective hold their thread until all others have come. With several programs in flight the pool can then be full
//! of parts that wait for parts that have no thread: XLA gives up after 40 s and aborts the process. Four threads a device
//! leave room for the programs that the plugin lets be in flight.
//!
//! The client takes device memory from the C heap. glibc makes a heap for each of those threads, and keeps up to 64 MiB of
//! freed memory at the end of each, out of reach of the call that gives memory back. With one heap for all
//! (`MALLOC_ARENA_MAX=1`) everything freed can be given back; small blocks come from each thread's own store all the same.

use std::num::NonZero;

use crate::{anew, error::Failure};

/// XLA's variable for the size of its thread pools.
const NPROC: &str = "NPROC";
/// glibc's variable for the number of its heaps.
const ARENAS: &str = "MALLOC_ARENA_MAX";
const THREADS_PER_DEVICE: usize = 4;
/// What the CPU plugins make when they are not told.
const DEFAULT_DEVICES: u32 = 4;

/// Starts this process anew with `NPROC` and `MALLOC_ARENA_MAX` set, unless they are set, as [`anew::with`] does: they are
/// read when libraries are loaded.
///
/// # Errors
/// When the binary cannot be started again.
pub(crate) fn ensure(devices: Option<u32>) -> Result<(), Failure> {
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let threads = threads(cores, devices.unwrap_or(DEFAULT_DEVICES));
    let wanted = [(NPROC, threads.to_string()), (ARENAS, "1".to_owned())];
    let missing = wanted
        .into_iter()
        .filter(|(name, _)| std::env::var_os(name).is_none())
        .map(|(name, value)| (name, Some(value.into())));
    anew::with(missing.collect())
}

fn threads(cores: usize, devices: u32) -> usize {
    // No collective holds a thread on one device, and more threads than cores only get in each other's way.
    if devices <= 1 {
        return cores;
    }
    usize::try_from(devices)
        .unwrap_or(usize::MAX)
        .saturating_mul(THREADS_PER_DEVICE)
        .max(cores)
}

#[cfg(test)]
mod tests {
    use super::threads;

    #[test]
    fn every_device_has_room_for_programs_in_flight() {
        assert_eq!(threads(2, 8), 32);
        assert_eq!(threads(64, 8), 64);
        assert_eq!(threads(2, 2), 8);
    }

    #[test]
    fn one_device_has_a_thread_a_core() {
        assert_eq!(threads(2, 1), 2);
    }
}
