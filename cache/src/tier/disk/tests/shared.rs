//! Four processes on one folder.

use std::process::Child;
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process};

use super::killed::start;
use super::*;

const FOLDER: &str = "WAYSTATION_TEST_FOLDER";

const NUMBERS: u32 = 40;

fn limit() -> u64 {
    (0..NUMBERS).map(blocks).sum::<u64>() / 2
}

/// Puts and gets until it is killed, and says beside the folder when it has the index.
#[test]
#[ignore = "the other half of the test below"]
fn child() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else {
        return;
    };
    let me = std::process::id();
    let subject = Subject::new(&folder, limit());
    for n in 0.. {
        // All four write the same ones at nearly the same time.
        let number = (n / 3 * 7) % NUMBERS;
        subject.put(number);
        subject.has(number);
        subject.has((number * 3 + me) % NUMBERS);
        if n % 10 == 0 {
            subject.store.tend().unwrap();
        }
        if subject.store.has_index() {
            std::fs::write(folder.with_extension(me.to_string()), b"").unwrap();
        }
        assert_eq!(subject.counts().disk_bad_entries, 0);
    }
}

struct Children(Vec<Child>);

impl Children {
    fn signal(&self, signal: Signal) {
        for child in &self.0 {
            kill_process(Pid::from_child(child), signal).unwrap();
        }
    }

    /// All of them standing still, so that what is there is there at one moment.
    fn assert_within_limit(&mut self, folder: &Path) {
        self.signal(Signal::STOP);
        let bytes = written(folder);
        self.signal(Signal::CONT);
        assert!(bytes <= limit(), "{bytes} of {}", limit());
        for child in &mut self.0 {
            assert_eq!(child.try_wait().unwrap(), None, "none has failed");
        }
    }

    /// Waits until one of them has the index.
    fn owner(&mut self, folder: &Path) -> usize {
        let started = Instant::now();
        loop {
            self.assert_within_limit(folder);
            let has = |child: &Child| folder.with_extension(child.id().to_string()).exists();
            if let Some(owner) = self.0.iter().position(has) {
                return owner;
            }
            assert!(started.elapsed() < LONG, "nobody takes the index");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn four_processes_keep_the_limit_and_hand_the_index_on() {
    let temp = tempfile::tempdir().unwrap();
    let folder = temp.path().join("cache");
    let variables = [(FOLDER, folder.to_str().unwrap())];
    let four = (0..4).map(|_| start("tier::disk::tests::shared::child", &variables));
    let mut children = Children(four.collect());
    while children.0.len() > 1 {
        let owner = children.owner(&folder);
        let mut owner = children.0.swap_remove(owner);
        owner.kill().unwrap();
        owner.wait().unwrap();
        for _ in 0..20 {
            children.assert_within_limit(&folder);
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    children.owner(&folder);
    drop(children);

    let subject = Subject::new(&folder, limit());
    subject.store.tend().unwrap();
    assert!(subject.store.has_index());
    assert!((0..NUMBERS).filter(|number| subject.has(*number)).count() > 5);
    assert_eq!(subject.counts().disk_bad_entries, 0);
    assert!(
        files(&folder)
            .iter()
            .all(|(name, _)| !name.starts_with(".tmp-"))
    );
}
