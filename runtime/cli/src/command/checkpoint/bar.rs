//! How far long work is, on one line of the terminal.

use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use waystation_checkpoint_tools::Progress;

use crate::command::cache::size;

const INTERVAL: Duration = Duration::from_millis(200);

/// Does the work while its progress is shown, where somebody looks.
pub(super) async fn shown<T>(
    is_wanted: bool,
    progress: &Progress,
    work: impl Future<Output = T>,
) -> T {
    if !is_wanted || !std::io::stderr().is_terminal() {
        return work.await;
    }
    let mut work = std::pin::pin!(work);
    let mut ticks = tokio::time::interval(INTERVAL);
    let begun = Instant::now();
    loop {
        tokio::select! {
            done = &mut work => {
                write(progress, begun);
                // A terminal that is gone is no reason to end.
                let _ = writeln!(std::io::stderr().lock());
                return done;
            }
            _ = ticks.tick() => write(progress, begun),
        }
    }
}

#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "figures for people"
)]
fn write(progress: &Progress, begun: Instant) {
    const WIDTH: u64 = 30;
    let done = progress.now();
    let total = done.total_bytes.max(done.bytes).max(1);
    let filled = (u128::from(done.bytes) * u128::from(WIDTH) / u128::from(total)) as usize;
    let rate = done.bytes as f64 / begun.elapsed().as_secs_f64().max(0.001);
    let _ = write!(
        std::io::stderr().lock(),
        "\r[{:<30}] {} of {}, {} chunks, {}/s   ",
        "#".repeat(filled),
        size(done.bytes),
        size(done.total_bytes),
        done.objects,
        size(rate as u64)
    );
}
