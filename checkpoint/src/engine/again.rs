//! Requests that break in a way that the store's client does not try again: in the middle of an answer, say.

use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use tokio::time::Instant;

use super::{Engine, Root};

/// How often a request is made at most.
const TIMES: u32 = 4;
/// The most time before the second, doubled each time.
const FIRST_WAIT: Duration = Duration::from_millis(200);
/// What has failed only after this, the client has tried for long enough.
const PATIENCE: Duration = Duration::from_secs(60);

impl Engine {
    /// Makes a request that may be made again, to a bucket a few times where the client has not said what is wrong with it.
    pub(super) async fn persistently<T, F>(
        &self,
        root: &Root,
        once: impl Fn() -> F,
    ) -> object_store::Result<T>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let begun = Instant::now();
        let mut wait = FIRST_WAIT;
        for _ in 1..TIMES {
            let result = once().await;
            let is_unknown = matches!(result, Err(object_store::Error::Generic { .. }));
            if !is_unknown || root.is_local() || begun.elapsed() > PATIENCE {
                return result;
            }
            self.shared.counters.retries.one();
            tokio::time::sleep(wait.mul_f64(random())).await;
            wait *= 2;
        }
        once().await
    }
}

/// Between a half and one: those who have failed together shall not come back together.
fn random() -> f64 {
    let bits = RandomState::new().hash_one(0) % 1024;
    0.5 + f64::from(u16::try_from(bits).unwrap_or(0)) / 2048.0
}
