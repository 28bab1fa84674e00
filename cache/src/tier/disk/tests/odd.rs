//! What may lie under an entry's name.

use std::os::unix::fs::symlink;

use super::*;

const PLENTY: u64 = 1 << 20;

fn place(folder: &Path, number: u32) -> PathBuf {
    let path = path(folder, number);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    path
}

#[test]
fn a_damaged_file_is_a_counted_miss_and_is_repaired() {
    let temp = tempfile::tempdir().unwrap();
    let (_, good) = sealed(1);
    let mut damaged: Vec<Vec<u8>> = (0..good.len())
        .step_by(if soak() { 1 } else { 97 })
        .map(|at| {
            let mut object = good.to_vec();
            object[at] ^= 1 << (at % 8);
            object
        })
        .collect();
    damaged.extend(
        [0, 1, 8, 55, 56, 88, good.len() / 2, good.len() - 1].map(|length| good[..length].to_vec()),
    );
    // Another's entry, something foreign, and one with bytes behind it.
    damaged.extend([
        sealed(2).1.to_vec(),
        b"#!/bin/sh\n".to_vec(),
        [&good[..], b"x"].concat(),
    ]);
    let subject = Subject::new(temp.path(), PLENTY);
    let count = damaged.len() as u64;
    for object in damaged {
        std::fs::write(place(temp.path(), 1), object).unwrap();
        assert!(!subject.has(1));
    }
    let counts = subject.counts();
    assert_eq!(counts.disk_bad_entries, count);
    assert_eq!(subject.put(1), Put::Created);
    assert!(subject.has(1));
    assert_eq!(subject.put(1), Put::Present);
}

#[test]
fn bad_files_do_not_stay_but_those_of_another_format_do() {
    let temp = tempfile::tempdir().unwrap();
    let subject = Subject::new(temp.path(), PLENTY);
    let file = place(temp.path(), 1);
    std::fs::write(&file, b"nothing of ours").unwrap();
    assert!(!subject.has(1));
    assert!(!file.exists());
    let mut other = sealed(1).1.to_vec();
    other[8] = 200;
    std::fs::write(&file, other).unwrap();
    assert!(!subject.has(1));
    assert!(file.exists());
    assert_eq!(subject.put(1), Put::Created);
    assert!(subject.has(1));
}

#[test]
fn links_pipes_and_folders_are_stepped_over() {
    let temp = tempfile::tempdir().unwrap();
    let outside = temp.path().join("outside");
    std::fs::write(&outside, sealed(1).1).unwrap();
    let folder = temp.path().join("cache");
    let subject = Subject::new(&folder, PLENTY);

    symlink(&outside, place(&folder, 1)).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, place(&folder, 2), rustix::fs::Mode::RWXU).unwrap();
    std::fs::create_dir(place(&folder, 3)).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(place(&folder, 4)).unwrap();
    for number in 1..=4 {
        assert!(!subject.has(number), "{number}");
    }
    assert_eq!(subject.counts().disk_bad_entries, 4);
    // They take no room, and are not the cache's to remove.
    subject.store.tend().unwrap();
    assert_eq!(subject.counts().disk_bytes, 0);
    assert_eq!(files(&folder).len(), 4);
    for (number, put) in [
        (1, Put::Created),
        (2, Put::Created),
        (3, Put::NoRoom),
        (4, Put::Created),
    ] {
        assert_eq!(subject.put(number), put, "{number}");
        assert_eq!(subject.has(number), put == Put::Created);
    }
    assert_eq!(
        std::fs::read(&outside).unwrap(),
        sealed(1).1,
        "nothing is written through a link"
    );
    assert_eq!(files(&folder).len(), 4, "no temporary file is left");
}

#[test]
fn a_link_or_a_file_in_a_shards_place_is_not_followed() {
    let temp = tempfile::tempdir().unwrap();
    let outside = temp.path().join("outside");
    std::fs::create_dir(&outside).unwrap();
    let name = hex::encode(key(1));
    std::fs::write(outside.join(&name), sealed(1).1).unwrap();
    let folder = temp.path().join("cache");
    std::fs::create_dir(&folder).unwrap();
    symlink(&outside, folder.join(&name[..2])).unwrap();
    std::fs::write(folder.join(&hex::encode(key(2))[..2]), b"").unwrap();
    let subject = Subject::new(&folder, 4096);
    for number in [1, 2] {
        assert!(!subject.has(number));
        let (key, _) = sealed(number);
        let small = Bytes::from_static(b"x");
        assert_eq!(subject.store.put(&key, &small).unwrap(), Put::NoRoom);
    }
    for number in [4, 8, 12] {
        subject.put(number);
    }
    assert!(subject.counts().disk_evictions > 0);
    assert!(outside.join(&name).exists(), "no eviction reaches it");
}

#[test]
fn foreign_files_are_left_alone() {
    let temp = tempfile::tempdir().unwrap();
    let subject = Subject::new(temp.path(), 2 * 4096);
    subject.put(0);
    let shard = path(temp.path(), 0).parent().unwrap().to_owned();
    let name = hex::encode(key(0));
    let mut foreign = vec![
        shard.join("README"),
        shard.join(name.to_uppercase()),
        temp.path().join("notes"),
    ];
    foreign.push(shard.join(format!(
        "{}{}",
        if name.starts_with("00") { "01" } else { "00" },
        &name[2..]
    )));
    for file in &foreign {
        std::fs::write(file, vec![1; 100_000]).unwrap();
    }
    for number in 1..20 {
        subject.put(number);
    }
    assert!(foreign.iter().all(|file| file.exists()));
    assert!(subject.counts().disk_evictions > 0);
}

#[test]
fn a_folder_that_cannot_be_is_an_error_and_one_that_goes_is_made_again() {
    let temp = tempfile::tempdir().unwrap();
    let file = temp.path().join("file");
    std::fs::write(&file, b"").unwrap();
    let subject = Subject::new(&file.join("cache"), PLENTY);
    let (key, object) = sealed(1);
    assert!(subject.store.get(&key).is_err());
    assert!(subject.store.put(&key, &object).is_err());
    assert!(subject.store.tend().is_err());

    let folder = temp.path().join("a/b/cache");
    let subject = Subject::new(&folder, PLENTY);
    assert!(!subject.has(1));
    subject.store.tend().unwrap();
    assert!(
        !folder.exists(),
        "nothing is made before there is something to keep"
    );
    assert_eq!(subject.put(1), Put::Created);
    std::fs::remove_dir_all(&folder).unwrap();
    assert!(!subject.has(1));
    assert_eq!(subject.put(1), Put::Created);
    assert!(subject.has(1));
    use std::os::unix::fs::PermissionsExt as _;
    for private in [folder.clone(), path(&folder, 1)] {
        let mode = private.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{private:?}");
    }
}

#[test]
fn an_entry_that_does_not_load_gives_way_to_the_next() {
    let temp = tempfile::tempdir().unwrap();
    let refused = Arc::new(Refused::default());
    let subject = Subject::with(
        temp.path(),
        PLENTY,
        Verifier::new(Limits::default(), None, Arc::clone(&refused)),
    );
    subject.put(1);
    let found = subject.store.get(&key(1)).unwrap().unwrap();
    refused.add(&key(1), &found.opened.checksum);
    assert!(!subject.has(1));
    assert_eq!(subject.counts().disk_bad_entries, 1);
    let again = Provenance {
        writer: "another".to_owned(),
        ..Provenance::default()
    };
    let object = envelope::seal(&key(1), &entry(1), &again, &Limits::default()).unwrap();
    assert_eq!(subject.store.put(&key(1), &object).unwrap(), Put::Created);
    assert!(subject.has(1));
}

fn allow(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
}

#[test]
fn what_others_can_write_to_is_not_used() {
    let temp = tempfile::tempdir().unwrap();
    let subject = Subject::new(temp.path(), PLENTY);
    assert_eq!(subject.put(1), Put::Created);
    let (key, object) = sealed(1);
    for mode in [0o777, 0o1777, 0o720] {
        allow(temp.path(), mode);
        let refused = subject.store.get(&key).unwrap_err().to_string();
        assert!(refused.contains("written to by others"), "{refused}");
        subject.store.put(&key, &object).unwrap_err();
        subject.store.tend().unwrap_err();
    }
    allow(temp.path(), 0o700);
    let file = path(temp.path(), 1);
    let shard = file.parent().unwrap();
    allow(shard, 0o777);
    assert!(!subject.has(1));
    assert_eq!(subject.put(1), Put::NoRoom);
    allow(shard, 0o700);
    assert!(subject.has(1));
    // Met twice, counted once, and replaced.
    allow(&file, 0o666);
    assert!(!subject.has(1) && !subject.has(1));
    assert_eq!(subject.counts().disk_bad_entries, 1);
    assert_eq!(subject.put(1), Put::Created);
    assert_eq!(subject.counts().disk_bad_entries, 1);
    assert!(subject.has(1));
}

/// Only the superuser can give files away.
#[test]
fn what_another_user_owns_is_not_used() {
    let temp = tempfile::tempdir().unwrap();
    let subject = Subject::new(temp.path(), PLENTY);
    assert_eq!(subject.put(1), Put::Created);
    let file = path(temp.path(), 1);
    let shard = file.parent().unwrap();
    let give = |path: &Path, user| std::os::unix::fs::chown(path, Some(user), None);
    if give(&file, 12_345).is_err() {
        return;
    }
    assert!(!subject.has(1));
    give(&file, 0).unwrap();
    give(shard, 12_345).unwrap();
    assert!(!subject.has(1));
    give(shard, 0).unwrap();
    assert!(subject.has(1));
    give(temp.path(), 12_345).unwrap();
    let refused = subject.store.get(&key(1)).unwrap_err().to_string();
    assert!(refused.contains("another user (uid 12345)"), "{refused}");
}

/// The superuser may read it all the same.
#[test]
fn an_entry_that_cannot_be_read_is_replaced() {
    let temp = tempfile::tempdir().unwrap();
    let subject = Subject::new(temp.path(), PLENTY);
    assert_eq!(subject.put(1), Put::Created);
    let file = path(temp.path(), 1);
    allow(&file, 0);
    let put = subject.put(1);
    let readable = put == Put::Present;
    assert!(readable || put == Put::Created);
    assert!(subject.has(1));
}

#[test]
fn a_file_that_was_only_made_long_takes_no_memory() {
    let temp = tempfile::tempdir().unwrap();
    let file = place(temp.path(), 1);
    File::create(&file).unwrap().set_len(3 << 30).unwrap();
    let folder = Folder::new(temp.path().to_owned());
    let found = folder.read(&key(1), u64::MAX).unwrap();
    let super::super::folder::Content::File(object, _) = found else {
        panic!("{found:?}");
    };
    assert_eq!(object.len(), 1 << 20);
    assert!(!Subject::new(temp.path(), PLENTY).has(1));
    assert!(!file.exists());
    // A long one that is an entry is read whole.
    let long = Entry {
        executable: Bytes::from(entry(3).executable.repeat(200)),
        ..entry(3)
    };
    let long = Entry {
        executable: long
            .executable
            .chunks(32)
            .enumerate()
            .flat_map(|(at, chunk)| Sha256::digest([&at.to_le_bytes(), chunk].concat()))
            .collect(),
        ..long
    };
    let object =
        envelope::seal(&key(1), &long, &Provenance::default(), &Limits::default()).unwrap();
    assert!(object.len() > 1 << 20, "{}", object.len());
    let subject = Subject::new(temp.path(), 16 << 20);
    assert_eq!(subject.store.put(&key(1), &object).unwrap(), Put::Created);
    let found = subject.store.get(&key(1)).unwrap().unwrap();
    assert_eq!(found.opened.entry.executable, long.executable);
}
