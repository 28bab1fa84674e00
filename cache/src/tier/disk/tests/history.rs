//! The history of misses.

use super::super::history::{MAX_RECORD_BYTES, Miss};
use super::super::recent_misses;
use super::*;

const PLENTY: u64 = 1 << 20;

fn texts(misses: &[Miss]) -> Vec<String> {
    let text = |miss: &Miss| String::from_utf8(miss.record.to_vec()).unwrap();
    let mut texts: Vec<String> = misses.iter().map(text).collect();
    texts.sort();
    texts
}

#[test]
fn records_of_all_processes_are_found_newest_first() {
    let temp = tempfile::tempdir().unwrap();
    let owner = Subject::new(temp.path(), PLENTY);
    owner.put(1);
    owner.store.tend().unwrap();
    let other = Subject::new(temp.path(), PLENTY);
    assert!(owner.store.has_index() && !other.store.has_index());
    owner.store.record_miss(b"one").unwrap();
    other.store.record_miss(b"two").unwrap();
    other.store.record_miss(b"").unwrap();
    for subject in [&owner, &other] {
        assert_eq!(texts(&subject.store.recent_misses(10)), ["", "one", "two"]);
    }
    let found = owner.store.recent_misses(10);
    assert!(found.is_sorted_by(|a, b| a.unix_ms >= b.unix_ms));
    assert_eq!(owner.store.recent_misses(1), found[..1]);
    assert!(
        owner
            .store
            .record_miss(&vec![0; MAX_RECORD_BYTES + 1])
            .is_err()
    );
    assert_eq!(
        texts(&recent_misses(temp.path(), 10)),
        ["", "one", "two"],
        "a process beside"
    );
    // The owner's index takes over what the files had.
    owner.store.tend().unwrap();
    std::fs::remove_file(temp.path().join("misses")).unwrap();
    assert_eq!(texts(&owner.store.recent_misses(10)), ["", "one", "two"]);
    drop(owner);
    assert_eq!(
        texts(&recent_misses(temp.path(), 10)),
        ["", "one", "two"],
        "and has kept it"
    );
    assert!(recent_misses(&temp.path().join("nowhere"), 10).is_empty());
}

#[test]
fn the_files_are_bounded_and_damage_costs_a_record() {
    let temp = tempfile::tempdir().unwrap();
    let subject = Subject::new(temp.path(), PLENTY);
    let record = |n: u32| [vec![b'.'; 10_000], n.to_string().into_bytes()].concat();
    let records = 300;
    for n in 0..records {
        subject.store.record_miss(&record(n)).unwrap();
    }
    let sizes =
        ["misses", "misses.old"].map(|name| temp.path().join(name).metadata().unwrap().len());
    assert!(
        sizes.iter().all(|size| *size < (1 << 20) + 2 * 20_100),
        "{sizes:?}"
    );
    let found = subject.store.recent_misses(1000).len();
    assert!((50..records as usize).contains(&found), "{found}");

    let file = temp.path().join("misses");
    let whole = std::fs::read(&file).unwrap();
    // Cut in the last line; the next record starts a line of its own.
    std::fs::write(&file, &whole[..whole.len() - 100]).unwrap();
    subject.store.record_miss(b"after").unwrap();
    let found_then = subject.store.recent_misses(1000);
    assert_eq!(found_then.len(), found);
    assert_eq!(
        found_then
            .iter()
            .filter(|miss| miss.record == "after")
            .count(),
        1
    );
    std::fs::write(&file, b"\xff\xfe 1 2 3\n\n9 9 9\n").unwrap();
    assert!(subject.store.recent_misses(1000).len() < found);

    // A link in its place is not written through.
    let outside = temp.path().join("outside");
    std::fs::write(&outside, b"").unwrap();
    std::fs::remove_file(&file).unwrap();
    std::os::unix::fs::symlink(&outside, &file).unwrap();
    assert!(subject.store.record_miss(b"x").is_err());
    assert_eq!(std::fs::read(&outside).unwrap(), b"");
}
