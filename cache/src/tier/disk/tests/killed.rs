//! Writers that are killed, at every stage and at any moment.

use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, Stdio};

use super::super::fault;
use super::*;

const FOLDER: &str = "WAYSTATION_TEST_FOLDER";

const NUMBERS: u32 = 60;

/// Room for half of them, so that there is eviction too.
fn limit() -> u64 {
    (0..NUMBERS).map(blocks).sum::<u64>() / 2
}

/// Writes until it is killed. Started by the tests below, as a process.
#[test]
#[ignore = "the other half of the tests beside it"]
fn child() {
    let Some(folder) = std::env::var_os(FOLDER) else {
        return;
    };
    let subject = Subject::new(folder.as_ref(), limit());
    let start = std::process::id();
    for n in 0.. {
        let number = (n * 7 + start) % NUMBERS;
        subject.put(number);
        assert!(subject.has(number));
        subject.store.tend().unwrap();
        subject.store.record_miss(b"a miss").unwrap();
        let _ = std::fs::remove_file(path(folder.as_ref(), (number + 1) % NUMBERS));
    }
}

pub(super) fn start(test: &str, variables: &[(&str, &str)]) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored"])
        .envs(variables.iter().copied())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Opens the folder as the next process would.
fn assert_well(folder: &Path) {
    let subject = Subject::new(folder, limit());
    subject.store.tend().unwrap();
    if folder.exists() {
        assert!(subject.store.has_index());
        let left = files(folder)
            .into_iter()
            .filter(|(name, _)| name.starts_with(".tmp-"));
        assert_eq!(left.count(), 0, "what the dead have left is removed");
        assert!(written(folder) <= limit());
        assert_eq!(subject.counts().disk_bytes, census(folder).bytes());
    }
    for number in 0..NUMBERS {
        // `has` checks that it is the right one.
        subject.has(number);
    }
    let counts = subject.counts();
    assert_eq!(
        counts.disk_bad_entries, 0,
        "no half entry bears a key's name"
    );
    assert_ne!(subject.put(0), Put::NoRoom);
    assert!(subject.has(0));
}

#[test]
fn a_writer_killed_at_any_stage_leaves_nothing_wrong() {
    let points = [
        "temporary created",
        "half written",
        "before rename",
        "after rename",
        "index not yet written",
    ];
    for point in points {
        let temp = tempfile::tempdir().unwrap();
        for time in 0..if soak() { 10 } else { 1 } {
            let folder = temp.path().join("cache");
            let fault = format!("{point}:{}", 3 + 5 * time);
            let mut child = start(
                "tier::disk::tests::killed::child",
                &[
                    (FOLDER, folder.to_str().unwrap()),
                    (fault::VARIABLE, &fault),
                ],
            );
            let status = child.wait().unwrap();
            assert_eq!(status.signal(), Some(9), "{point}: {status}");
            assert_well(&folder);
        }
    }
}

#[test]
fn a_writer_killed_at_any_moment_leaves_nothing_wrong() {
    let temp = tempfile::tempdir().unwrap();
    let folder = temp.path().join("cache");
    for kill in 0..if soak() { 50 } else { 3 } {
        let mut child = start(
            "tier::disk::tests::killed::child",
            &[(FOLDER, folder.to_str().unwrap())],
        );
        // Once it is at work, at a moment of no meaning.
        let started = std::time::Instant::now();
        while !folder.join("misses").exists() && started.elapsed() < LONG {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(13 * kill % 97));
        child.kill().unwrap();
        let status = child.wait().unwrap();
        assert_eq!(status.signal(), Some(9), "it lived until then: {status}");
        assert_well(&folder);
    }
}
