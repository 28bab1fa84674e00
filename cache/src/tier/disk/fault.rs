//! Places where a test kills the process.

/// In the tests' own child processes: kills the process, as `kill -9` does, where the environment names this point.
/// Elsewhere there is nothing here.
#[cfg(not(test))]
#[inline]
pub(super) fn point(_name: &str) {}

/// The variable that names the point, and how many times it is passed first: `before rename:3`.
#[cfg(test)]
pub(super) const VARIABLE: &str = "WAYSTATION_TEST_FAULT";

/// See above.
#[cfg(test)]
pub(super) fn point(name: &str) {
    use std::sync::atomic::{AtomicU64, Ordering};
    static PASSED: AtomicU64 = AtomicU64::new(0);
    let Ok(wanted) = std::env::var(VARIABLE) else {
        return;
    };
    let Some((point, times)) = wanted.rsplit_once(':') else {
        return;
    };
    if point == name && PASSED.fetch_add(1, Ordering::SeqCst) >= times.parse().unwrap_or(0) {
        let _ =
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
}
