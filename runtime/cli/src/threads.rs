//! Threads for XLA's CPU client.
//!
//! The client runs every device's part of a program on one pool of `NPROC` threads, by default one a core or device. Parts
//! of a collective hold their thread until all others have come. With several programs in flight the pool can then be full
//! of parts that wait for parts that have no thread: XLA gives up after 40 s and aborts the process. Four threads a device
//! leave room for the programs that the plugin lets be in flight.

use std::{ffi::OsString, num::NonZero, os::unix::process::CommandExt as _, process::Command};

use crate::error::Failure;

/// XLA's variable for the size of its thread pools.
const NPROC: &str = "NPROC";
const THREADS_PER_DEVICE: usize = 4;
/// What the CPU plugins make when they are not told.
const DEFAULT_DEVICES: u32 = 4;

/// Starts this process anew with `NPROC` set, unless it is set: XLA reads the variable when its library is loaded, and a
/// process cannot safely change its own environment. Must come before anything is opened that a new start would lose;
/// standard input and the process id stay.
///
/// # Errors
/// When the binary cannot be started again.
pub(crate) fn ensure(devices: Option<u32>) -> Result<(), Failure> {
    if std::env::var_os(NPROC).is_some() {
        return Ok(());
    }
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    let threads = threads(cores, devices.unwrap_or(DEFAULT_DEVICES));
    let binary = std::env::current_exe()
        .map_err(|e| Failure::because("this binary cannot be found again", &e))?;
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    // Returns only when it fails.
    let failed = Command::new(binary)
        .args(arguments)
        .env(NPROC, threads.to_string())
        .exec();
    Err(Failure::because(
        "this binary cannot be started again with NPROC set",
        &failed,
    ))
}

fn threads(cores: usize, devices: u32) -> usize {
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
        assert_eq!(threads(2, 1), 4);
    }
}
