//! Who goes when the folder is full.

use super::*;

const BLOCK: u64 = 4096;

/// Numbers whose entries take one block.
fn small(n: u32) -> u32 {
    4 * n
}

fn held(subject: &Subject, folder: &Path) -> Vec<u32> {
    let _ = subject;
    (0..20)
        .filter(|n| path(folder, small(*n)).exists())
        .collect()
}

#[test]
fn the_least_recently_used_goes_until_a_tenth_is_free() {
    let temp = tempfile::tempdir().unwrap();
    let subject = Subject::new(temp.path(), 10 * BLOCK);
    for n in 0..10 {
        assert_eq!(blocks(small(n)), BLOCK);
        assert_eq!(subject.put(small(n)), Put::Created);
        used(temp.path(), small(n), u64::from(n));
    }
    assert_eq!(
        held(&subject, temp.path()).len(),
        10,
        "the limit is reached, not exceeded"
    );
    // The oldest is read, so the next two go.
    assert!(subject.has(small(0)));
    assert_eq!(subject.put(small(10)), Put::Created);
    assert_eq!(held(&subject, temp.path()), [0, 3, 4, 5, 6, 7, 8, 9, 10]);
    let counts = subject.counts();
    assert_eq!(
        (counts.disk_evictions, counts.disk_evicted_bytes),
        (2, 2 * BLOCK)
    );
    assert_eq!(census(temp.path()).bytes(), 9 * BLOCK);
}

#[test]
fn what_another_process_has_used_stays() {
    let temp = tempfile::tempdir().unwrap();
    let (subject, other) = (
        Subject::new(temp.path(), 10 * BLOCK),
        Subject::new(temp.path(), 10 * BLOCK),
    );
    for n in 0..10 {
        subject.put(small(n));
        used(temp.path(), small(n), u64::from(n));
    }
    // Its count is as old as this.
    subject.store.tend().unwrap();
    for n in 0..8 {
        assert!(other.has(small(n)));
    }
    subject.put(small(10));
    assert_eq!(held(&subject, temp.path()), [0, 1, 2, 3, 4, 5, 6, 7, 10]);
}

#[test]
fn what_does_not_fit_is_not_kept_and_drives_nothing_out() {
    let temp = tempfile::tempdir().unwrap();
    let subject = Subject::new(temp.path(), 3 * BLOCK);
    assert_eq!(subject.put(small(0)), Put::Created);
    assert_eq!(blocks(3), 4 * BLOCK);
    assert_eq!(subject.put(3), Put::NoRoom);
    assert!(subject.has(small(0)));
    assert_eq!(files(temp.path()).len(), 1);
    let none = Subject::new(&temp.path().join("other"), 0);
    assert_eq!(none.put(small(0)), Put::NoRoom);
}

#[test]
fn a_lower_limit_is_kept_from_the_start() {
    let temp = tempfile::tempdir().unwrap();
    let subject = Subject::new(temp.path(), 100 * BLOCK);
    for n in 0..20 {
        subject.put(small(n));
    }
    drop(subject);
    let subject = Subject::new(temp.path(), 10 * BLOCK);
    subject.store.tend().unwrap();
    assert_eq!(written(temp.path()), 9 * BLOCK);
    assert_eq!(subject.counts().disk_bytes, 9 * BLOCK);
}

#[test]
fn a_disk_that_is_full_before_the_limit_gets_a_tenth_back() {
    let temp = tempfile::tempdir().unwrap();
    let subject = Subject::new(temp.path(), 100 * BLOCK);
    for n in 0..20 {
        subject.put(small(n));
        used(temp.path(), small(n), u64::from(n));
    }
    subject.store.shrink().unwrap();
    let left = written(temp.path());
    assert!((17 * BLOCK..=18 * BLOCK).contains(&left), "{left}");
    assert!(!subject.has(small(0)) && subject.has(small(19)));
    drop(subject);
    let empty = Subject::new(&temp.path().join("other"), 100 * BLOCK);
    empty.store.shrink().unwrap();
}

#[test]
fn there_is_a_bound_on_how_many_there_are() {
    let temp = tempfile::tempdir().unwrap();
    let counters = Arc::new(Counters::default());
    let settings = Settings {
        folder: temp.path().to_owned(),
        bounds: Bounds {
            bytes: u64::MAX,
            entries: 10,
        },
        verifier: verifier(),
        index_retry: LONG,
    };
    let store = Store::new(settings, counters);
    for number in 0..15 {
        let (key, object) = sealed(number);
        assert_eq!(store.put(&key, &object).unwrap(), Put::Created);
        // One more while the new one is not counted as an entry yet.
        assert!(files(temp.path()).len() <= 11);
    }
}

#[test]
fn files_being_written_count_and_stay_until_their_writer_is_gone() {
    let temp = tempfile::tempdir().unwrap();
    let folder = Folder::new(temp.path().to_owned());
    let writing = folder.begin(&key(1), 3 * BLOCK).unwrap();
    let subject = Subject::new(temp.path(), 4 * BLOCK);
    assert_eq!(subject.put(small(0)), Put::Created);
    assert_eq!(
        subject.put(5),
        Put::NoRoom,
        "two blocks, and none of the other writer's is free"
    );
    assert_eq!(files(temp.path()).len(), 1, "room was made in vain");
    subject.put(small(0));
    subject.store.tend().unwrap();
    assert_eq!(files(temp.path()).len(), 2);
    // An hour later it is nobody's, whoever lives.
    let old = files(temp.path())
        .into_iter()
        .find(|(name, _)| name.starts_with(".tmp-"))
        .unwrap()
        .1;
    let hour = std::time::SystemTime::now() - Duration::from_secs(3601);
    File::options()
        .write(true)
        .open(&old)
        .unwrap()
        .set_modified(hour)
        .unwrap();
    subject.store.tend().unwrap();
    assert!(!old.exists());
    // Its writer, if it lives after all, fails and nothing else does.
    assert!(writing.keep(&key(1), &[0; 10]).is_err());
    assert!(subject.has(small(0)) && !subject.has(1));
}

#[test]
fn only_a_writer_of_this_place_can_be_known_to_be_dead() {
    let temp = tempfile::tempdir().unwrap();
    let folder = Folder::new(temp.path().to_owned());
    drop(folder.begin(&key(1), BLOCK).unwrap().keep(&key(1), b"x"));
    let own = folder.begin(&key(1), BLOCK).unwrap();
    let name = files(temp.path())
        .into_iter()
        .find(|(name, _)| name.starts_with(".tmp-"))
        .unwrap()
        .0;
    drop(own);
    let place = name.split('-').nth(1).unwrap();
    // The largest process id there can be is 4194304.
    let dead = format!(".tmp-{place}-4194999-0");
    let elsewhere = ".tmp-00000000-4194999-0".to_owned();
    let strange = [
        ".tmp-".to_owned(),
        format!(".tmp-{place}-x-0"),
        format!(".tmp-{place}--1-0"),
    ];
    let shard = path(temp.path(), 1).parent().unwrap().to_owned();
    for name in strange.iter().chain([&dead, &elsewhere]) {
        std::fs::write(shard.join(name), b"x").unwrap();
    }
    Subject::new(temp.path(), 100 * BLOCK).store.tend().unwrap();
    assert!(!shard.join(dead).exists());
    assert!(shard.join(elsewhere).exists());
    assert!(strange.iter().all(|name| shard.join(name).exists()));
}
