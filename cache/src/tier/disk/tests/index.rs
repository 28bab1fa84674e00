//! The index: whose it is, and that nothing hangs on it.

use std::hash::{BuildHasher as _, RandomState};

use super::*;

const PLENTY: u64 = 1 << 20;

/// A folder with entries and an index that was closed in good order.
fn filled(folder: &Path) {
    let subject = Subject::new(folder, PLENTY);
    for number in 0..30 {
        subject.put(number);
        // So that their folders' times can be relied on.
        let shard = File::open(path(folder, number).parent().unwrap()).unwrap();
        let time = std::time::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        shard.set_modified(time).unwrap();
    }
    subject.store.record_miss(b"a miss").unwrap();
    subject.store.tend().unwrap();
    assert!(subject.store.has_index());
}

#[test]
fn one_process_has_it_and_another_takes_it_over() {
    let temp = tempfile::tempdir().unwrap();
    filled(temp.path());
    let [first, second] = [(); 2].map(|()| Subject::new(temp.path(), PLENTY));
    first.store.tend().unwrap();
    second.store.tend().unwrap();
    assert!(first.store.has_index() && !second.store.has_index());
    // Without it everything works.
    assert!(second.has(1));
    assert_eq!(second.put(31), Put::Created);
    assert_eq!(
        first.counts().disk_bytes + blocks(31),
        second.counts().disk_bytes
    );
    drop(first);
    second.store.tend().unwrap();
    assert!(second.store.has_index());
    assert_eq!(second.counts().disk_bytes, census(temp.path()).bytes());
}

#[test]
fn it_is_corrected_by_the_files() {
    let temp = tempfile::tempdir().unwrap();
    filled(temp.path());
    // While nobody looks.
    std::fs::remove_file(path(temp.path(), 3)).unwrap();
    let (_, object) = sealed(40);
    std::fs::create_dir_all(path(temp.path(), 40).parent().unwrap()).unwrap();
    std::fs::write(path(temp.path(), 40), object).unwrap();
    let subject = Subject::new(temp.path(), PLENTY);
    subject.store.tend().unwrap();
    assert!(subject.store.has_index());
    assert_eq!(subject.counts().disk_bytes, census(temp.path()).bytes());
    assert!(subject.has(40) && !subject.has(3));
}

/// Changes the index's files as no program would.
fn damage(index: &Path, random: &mut impl FnMut(u64) -> u64) {
    let mut files: Vec<PathBuf> = index
        .read_dir()
        .unwrap()
        .map(|item| item.unwrap().path())
        .collect();
    files.sort();
    files.retain(|file| file.is_file());
    let file = files[random(files.len() as u64) as usize].clone();
    let mut bytes = std::fs::read(&file).unwrap();
    let length = bytes.len() as u64;
    match random(6) {
        0 => bytes.truncate(random(length + 1) as usize),
        1 => bytes = (0..random(4096)).map(|_| random(256) as u8).collect(),
        2 => bytes.extend((0..random(4096)).map(|_| random(256) as u8)),
        3 => bytes.fill(0),
        _ => {
            // Where something is written at all.
            let end = bytes
                .iter()
                .rposition(|byte| *byte != 0)
                .map_or(1, |last| last as u64 + 1);
            for _ in 0..1 + random(64) {
                let at = random(end.min(length.max(1))) as usize;
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = random(256) as u8;
                }
            }
        }
    }
    std::fs::write(&file, bytes).unwrap();
}

#[test]
fn a_damaged_one_is_used_or_made_anew_and_nothing_else_suffers() {
    let temp = tempfile::tempdir().unwrap();
    let (seed, mut count) = (RandomState::new(), 0u64);
    let mut random = |below: u64| {
        count += 1;
        seed.hash_one(count) % below.max(1)
    };
    let folder = temp.path().join("cache");
    filled(&folder);
    for round in 0..if soak() { 2000 } else { 25 } {
        damage(&folder.join("index"), &mut random);
        let subject = Subject::new(&folder, PLENTY);
        subject.store.tend().unwrap();
        // It opened, and failed when something was written to it; or a process that another test starts has this one's
        // locks until it runs its own program.
        let begun = std::time::Instant::now();
        while !subject.store.has_index() && begun.elapsed() < LONG {
            subject.store.tend().unwrap();
        }
        assert!(subject.store.has_index(), "round {round}");
        assert_eq!(
            subject.counts().disk_bytes,
            census(&folder).bytes(),
            "round {round}"
        );
        assert!((0..30).all(|number| subject.has(number)), "round {round}");
        std::fs::remove_file(path(&folder, round % 30)).unwrap();
        assert_eq!(subject.put(round % 30), Put::Created);
        assert_eq!(
            subject.store.recent_misses(10).len(),
            1,
            "the files have it too"
        );
    }
}

#[test]
fn something_else_in_its_place_goes() {
    let temp = tempfile::tempdir().unwrap();
    let folder = temp.path().join("cache");
    let outside = temp.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    filled(&folder);
    let index = folder.join("index");
    for what in ["file", "link", "empty", "nothing"] {
        std::fs::remove_dir_all(&index).unwrap();
        match what {
            "file" => std::fs::write(&index, b"x").unwrap(),
            "link" => std::os::unix::fs::symlink(&outside, &index).unwrap(),
            "empty" => std::fs::create_dir(&index).unwrap(),
            _ => {}
        }
        let subject = Subject::new(&folder, PLENTY);
        subject.store.tend().unwrap();
        assert!(subject.store.has_index(), "{what}");
        assert!(index.is_dir() && !index.is_symlink(), "{what}");
    }
    assert_eq!(outside.read_dir().unwrap().count(), 0);
    // A lock that cannot be one.
    std::fs::remove_file(folder.join("index.lock")).unwrap();
    std::fs::create_dir(folder.join("index.lock")).unwrap();
    let subject = Subject::new(&folder, PLENTY);
    subject.store.tend().unwrap();
    assert!(!subject.store.has_index());
    assert!(subject.has(1));
}
