//! Writers that are killed at any moment.

use std::process::{Command, Stdio};
use std::time::Duration;

use waystation_cache::Origin;

use crate::kit::{self, Compiler, LONG, ask};

/// Tells the child where to write. Without it the child does nothing, so it may be run by hand.
const FOLDER: &str = "WAYSTATION_TEST_FOLDER";

/// Programs that the child publishes, over and over in another order each time it is started.
const PROGRAMS: usize = 40;

const KILLS: u64 = 12;

fn program(number: usize) -> String {
    format!("p{number:02}")
}

/// Publishes until it is killed. Started by the test below, as a process.
#[test]
#[ignore = "the other half of a_killed_writer_leaves_nothing_wrong"]
fn child() {
    let Some(folder) = std::env::var_os(FOLDER) else {
        return;
    };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let cache = kit::cache(folder.as_ref());
        let start = std::process::id() as usize;
        let all: Vec<String> = (0..PROGRAMS)
            .map(|n| program((n * 7 + start) % PROGRAMS))
            .collect();
        let compiler = Compiler::default();
        futures::future::join_all(all.iter().map(|program| ask(&cache, &compiler, program))).await;
        cache.flush(LONG).await;
    });
}

#[tokio::test]
async fn a_killed_writer_leaves_nothing_wrong() {
    let temp = tempfile::tempdir().unwrap();
    for kill in 0..KILLS {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "killed::child", "--ignored"])
            .env(FOLDER, temp.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Spread over the time that starting and publishing take.
        tokio::time::sleep(Duration::from_millis(7 + 11 * kill)).await;
        // SIGKILL. It may be done already, which is as good.
        let _ = child.kill();
        child.wait().unwrap();
    }
    let compiler = Compiler::default();
    let cache = kit::cache(temp.path());
    let mut hits = 0;
    for number in 0..PROGRAMS {
        // `ask` checks that the entry is the right one.
        hits += usize::from(ask(&cache, &compiler, &program(number)).await == Origin::Bucket);
    }
    let counts = cache.counters();
    assert_eq!((counts.bad_entries, counts.bucket_read_errors), (0, 0));
    assert_eq!(hits + compiler.compiles(), PROGRAMS);
    assert_eq!(cache.shutdown(LONG).await, 0);
    assert_eq!(
        cache.counters().bucket_write_errors,
        0,
        "what is left over is in nobody's way"
    );
    let last = kit::cache(temp.path());
    for number in 0..PROGRAMS {
        assert_eq!(
            ask(&last, &compiler, &program(number)).await,
            Origin::Bucket
        );
    }
}
