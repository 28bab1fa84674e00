//! A folder in which somebody has been at the entries.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use waystation_cache::{Cache, Config, Origin};
use waystation_lifecycle::bucket::layout;

use crate::kit::{self, Compiler, LONG, ask};

/// A folder with the entry of "a", and where it is.
async fn filled(path: &Path) -> PathBuf {
    let cache = kit::cache(path);
    ask(&cache, &Compiler::default(), "a").await;
    assert_eq!(cache.shutdown(LONG).await, 0);
    let mut files = kit::files(path);
    assert_eq!(files.len(), 1);
    files.remove(0)
}

/// A bad entry is compiled anew and repaired in the next slot; the next process has a hit and the bad one still lies
/// there.
async fn is_stepped_over_and_repaired(path: &Path, what: &str) {
    let compiler = Compiler::default();
    let cache = kit::cache(path);
    assert_eq!(
        ask(&cache, &compiler, "a").await,
        Origin::Compiled,
        "{what}"
    );
    assert_eq!(cache.shutdown(LONG).await, 0);
    let counts = cache.counters();
    assert_eq!(counts.bad_entries, 1, "{what}");
    assert_eq!(
        (counts.bucket_misses, counts.bucket_writes),
        (1, 1),
        "{what}"
    );

    let next = kit::cache(path);
    assert_eq!(ask(&next, &compiler, "a").await, Origin::Bucket, "{what}");
    assert_eq!(next.counters().bad_entries, 1, "{what}");
}

#[tokio::test]
async fn damage_of_every_kind_is_a_miss_and_repaired() {
    type Damage = fn(&mut Vec<u8>);
    let kinds: [(&str, Damage); 8] = [
        ("an empty object", |o| o.clear()),
        ("a foreign file", |o| *o = b"\x7fELF and so on".repeat(50)),
        ("cut in the header", |o| o.truncate(40)),
        ("cut in the body", |o| o.truncate(o.len() / 2)),
        ("cut by one byte", |o| o.truncate(o.len() - 1)),
        ("a bit flipped in the executable", |o| {
            let at = o.len() - 60;
            o[at] ^= 4;
        }),
        ("a byte more", |o| o.push(0)),
        ("another format", |o| o[8] = 77),
    ];
    for (what, damage) in kinds {
        let temp = tempfile::tempdir().unwrap();
        let file = filled(temp.path()).await;
        let mut object = std::fs::read(&file).unwrap();
        damage(&mut object);
        std::fs::write(&file, object).unwrap();
        is_stepped_over_and_repaired(temp.path(), what).await;
    }
}

#[tokio::test]
async fn an_entry_under_another_key_is_a_miss() {
    let temp = tempfile::tempdir().unwrap();
    let a = filled(temp.path()).await;
    let other = tempfile::tempdir().unwrap();
    let cache = kit::cache(other.path());
    ask(&cache, &Compiler::default(), "b").await;
    cache.shutdown(LONG).await;
    std::fs::copy(&kit::files(other.path())[0], &a).unwrap();
    is_stepped_over_and_repaired(temp.path(), "the entry of another program").await;
}

#[tokio::test]
async fn when_every_slot_is_bad_the_job_goes_on_without() {
    let temp = tempfile::tempdir().unwrap();
    let file = filled(temp.path()).await;
    for slot in 0..4 {
        std::fs::write(file.with_file_name(slot.to_string()), b"rubbish").unwrap();
    }
    let compiler = Compiler::default();
    let cache = kit::cache(temp.path());
    assert_eq!(ask(&cache, &compiler, "a").await, Origin::Compiled);
    assert_eq!(ask(&cache, &compiler, "a").await, Origin::Memory);
    assert_eq!(cache.shutdown(LONG).await, 0);
    let counts = cache.counters();
    assert_eq!((counts.bucket_writes, counts.bucket_write_errors), (0, 1));
    assert_eq!(counts.bucket_writes_no_room, 1);
    assert_eq!(counts.bad_entries, 4, "each slot once");
    assert_eq!(kit::files(temp.path()).len(), 4);
}

#[tokio::test]
async fn the_newest_of_the_other_slots_is_tried_first() {
    let temp = tempfile::tempdir().unwrap();
    let file = filled(temp.path()).await;
    // Slot 0 has been swept, 2 is older than 3; 7 and a folder are nobody's.
    std::fs::rename(&file, file.with_file_name("3")).unwrap();
    let older = file.with_file_name("2");
    std::fs::write(&older, b"rubbish").unwrap();
    let past = std::time::SystemTime::now() - std::time::Duration::from_secs(100);
    let times = std::fs::FileTimes::new().set_modified(past);
    std::fs::File::options()
        .write(true)
        .open(&older)
        .unwrap()
        .set_times(times)
        .unwrap();
    std::fs::write(file.with_file_name("7"), b"foreign").unwrap();
    std::fs::create_dir(file.with_file_name("1")).unwrap();
    let cache = kit::cache(temp.path());
    let compiler = Compiler::default();
    assert_eq!(ask(&cache, &compiler, "a").await, Origin::Bucket);
    assert_eq!(
        cache.counters().bad_entries,
        0,
        "the older one was not read"
    );
}

#[tokio::test]
async fn an_entry_is_found_where_the_folder_cannot_be_listed() {
    let temp = tempfile::tempdir().unwrap();
    let file = filled(temp.path()).await;
    std::fs::rename(&file, file.with_file_name("2")).unwrap();
    // Nobody gets to the end of such a folder.
    std::os::unix::fs::symlink(".", file.with_file_name("endless")).unwrap();
    let cache = kit::cache(temp.path());
    let compiler = Compiler::default();
    assert_eq!(ask(&cache, &compiler, "a").await, Origin::Bucket);
    let counts = cache.counters();
    assert_eq!((counts.bucket_read_errors, counts.bad_entries), (0, 0));
}

#[tokio::test]
async fn files_with_impossible_names_hide_no_entry_and_no_claim() {
    use std::os::unix::ffi::OsStrExt as _;
    let temp = tempfile::tempdir().unwrap();
    let file = filled(temp.path()).await;
    std::fs::rename(&file, file.with_file_name("2")).unwrap();
    let claims = temp
        .path()
        .join(layout::claims_folder(kit::key("b").digest()).as_ref());
    std::fs::create_dir_all(&claims).unwrap();
    for folder in [file.parent().unwrap(), &claims] {
        for name in [b"\xff", b"\n"] {
            std::fs::write(folder.join(std::ffi::OsStr::from_bytes(name)), b"x").unwrap();
        }
    }
    let cache = kit::cache(temp.path());
    let compiler = Compiler::default();
    assert_eq!(ask(&cache, &compiler, "a").await, Origin::Bucket);
    assert_eq!(ask(&cache, &compiler, "b").await, Origin::Compiled);
    assert_eq!(cache.shutdown(LONG).await, 0);
    let counts = cache.counters();
    assert_eq!((counts.claims, counts.claim_errors), (1, 0));
    assert_eq!((counts.bucket_read_errors, counts.bucket_writes), (0, 1));
}

#[tokio::test]
async fn a_folder_where_the_entry_should_be_is_a_miss() {
    let temp = tempfile::tempdir().unwrap();
    let file = filled(temp.path()).await;
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    let cache = kit::cache(temp.path());
    let compiler = Compiler::default();
    assert_eq!(ask(&cache, &compiler, "a").await, Origin::Compiled);
    cache.shutdown(LONG).await;
    assert_eq!(cache.counters().bucket_writes, 1, "{:?}", cache.counters());
    assert_eq!(
        ask(&kit::cache(temp.path()), &compiler, "a").await,
        Origin::Bucket
    );
}

/// What may lie where an entry should, and is none.
fn put_there(file: &Path, what: &str) {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    use std::os::unix::fs::symlink;
    std::fs::remove_file(file).unwrap();
    match what {
        "a FIFO" => mknodat(CWD, file, FileType::Fifo, Mode::RWXU, 0).unwrap(),
        "a folder" => std::fs::create_dir(file).unwrap(),
        "a loop" => symlink("0", file).unwrap(),
        "a device" => symlink("/dev/zero", file).unwrap(),
        "a link to nowhere" => symlink("/no/where", file).unwrap(),
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn what_cannot_be_read_is_stepped_over_and_repaired() {
    let kinds = [
        "a FIFO",
        "a folder",
        "a loop",
        "a device",
        "a link to nowhere",
    ];
    let temp = tempfile::tempdir().unwrap();
    let compiler = Compiler::default();
    let first = kit::cache(temp.path());
    for what in kinds {
        ask(&first, &compiler, what).await;
    }
    ask(&first, &compiler, "a good one").await;
    assert_eq!(first.shutdown(LONG).await, 0);
    for what in kinds {
        let path = layout::executable(kit::key(what).digest(), 0);
        put_there(&temp.path().join(path.as_ref()), what);
    }
    // One process meets all of them, and the bucket is well.
    let cache = kit::cache(temp.path());
    for what in kinds {
        assert_eq!(
            ask(&cache, &compiler, what).await,
            Origin::Compiled,
            "{what}"
        );
    }
    assert_eq!(ask(&cache, &compiler, "a good one").await, Origin::Bucket);
    assert_eq!(cache.shutdown(LONG).await, 0);
    let counts = cache.counters();
    assert_eq!((counts.bad_entries, counts.bad_unreadable), (5, 5));
    assert_eq!((counts.bucket_misses, counts.bucket_writes), (5, 5));
    let next = kit::cache(temp.path());
    for what in kinds {
        assert_eq!(ask(&next, &compiler, what).await, Origin::Bucket, "{what}");
    }
    assert_eq!(next.counters().bucket_read_errors, 0);
}

#[tokio::test]
async fn a_key_whose_folder_is_none_is_not_kept_and_the_others_are() {
    let theirs = tempfile::tempdir().unwrap();
    std::fs::write(theirs.path().join("0"), b"somebody's").unwrap();
    for is_link in [false, true] {
        let temp = tempfile::tempdir().unwrap();
        let file = filled(temp.path()).await;
        let folder = file.parent().unwrap();
        std::fs::remove_dir_all(folder).unwrap();
        if is_link {
            std::os::unix::fs::symlink(theirs.path(), folder).unwrap();
        } else {
            std::fs::write(folder, b"x").unwrap();
        }
        let cache = Cache::open(Config {
            remove_bad: true,
            ..kit::config(Some(kit::folder(temp.path())))
        });
        let compiler = Compiler::default();
        assert_eq!(ask(&cache, &compiler, "a").await, Origin::Compiled);
        assert_eq!(ask(&cache, &compiler, "b").await, Origin::Compiled);
        assert_eq!(cache.shutdown(LONG).await, 0);
        let counts = cache.counters();
        assert_eq!((counts.bucket_read_errors, counts.bucket_writes), (0, 1));
        assert_eq!(
            (counts.bucket_writes_no_room, counts.bad_unreadable),
            (1, 4)
        );
        let left = std::fs::read_dir(theirs.path()).unwrap();
        assert_eq!(left.count(), 1, "nothing is written or removed there");
        let left = std::fs::read(theirs.path().join("0")).unwrap();
        assert_eq!(left, b"somebody's");
    }
}

/// What is logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn the_warning_says_what_becomes_of_the_request() {
    for (has_another, outcome) in [
        (true, "a good one in another slot is used"),
        (false, "the program is compiled again"),
    ] {
        let temp = tempfile::tempdir().unwrap();
        let file = filled(temp.path()).await;
        if has_another {
            std::fs::rename(&file, file.with_file_name("1")).unwrap();
        }
        std::fs::write(&file, b"rubbish").unwrap();
        let log = Log::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt().with_writer(move || writer.clone());
        // Of this thread, which is all that the test has.
        let guard = tracing::subscriber::set_default(subscriber.finish());
        let cache = kit::cache(temp.path());
        ask(&cache, &Compiler::default(), "a").await;
        assert_eq!(cache.shutdown(LONG).await, 0);
        drop(guard);
        let log = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
        let told: Vec<_> = log
            .lines()
            .filter(|line| line.contains("bad cache entry"))
            .collect();
        assert_eq!(told.len(), 1, "{log}");
        assert!(told[0].contains(outcome), "{log}");
    }
}

#[tokio::test]
async fn strangers_names_hide_no_slot() {
    for (folders, files) in [(8, 0), (0, 1500), (300, 4)] {
        let temp = tempfile::tempdir().unwrap();
        let file = filled(temp.path()).await;
        std::fs::rename(&file, file.with_file_name("1")).unwrap();
        std::fs::write(&file, b"rubbish").unwrap();
        for folder in 0..folders {
            let folder = file.with_file_name(format!("a{folder}"));
            std::fs::create_dir(&folder).unwrap();
            for slot in 0..4 {
                std::fs::write(folder.join(slot.to_string()), b"x").unwrap();
            }
        }
        for number in 0..files {
            std::fs::write(file.with_file_name(format!("f{number}")), b"x").unwrap();
        }
        let cache = kit::cache(temp.path());
        let compiler = Compiler::default();
        let origin = ask(&cache, &compiler, "a").await;
        assert_eq!(origin, Origin::Bucket, "{folders} {files}");
        assert_eq!(cache.counters().bad_entries, 1);
    }
}

#[tokio::test]
async fn an_entry_that_the_plugin_refuses_is_not_asked_for_again() {
    let temp = tempfile::tempdir().unwrap();
    filled(temp.path()).await;
    let compiler = Compiler::default();
    let cache = kit::cache(temp.path());
    let key = kit::key("a");
    let (entry, origin) = cache.get(&key).await.unwrap();
    assert_eq!(origin, Origin::Bucket);
    cache.reject(&key, &entry);
    assert!(cache.get(&key).await.is_none());
    assert_eq!(ask(&cache, &compiler, "a").await, Origin::Compiled);
    assert_eq!(ask(&cache, &compiler, "a").await, Origin::Memory);
    assert_eq!(cache.shutdown(LONG).await, 0);
    let counts = cache.counters();
    assert_eq!(
        (counts.rejected, counts.bucket_hits, counts.compiles),
        (1, 1, 1)
    );
    assert_eq!(counts.bad_refused, counts.bad_entries);
    assert_eq!(counts.bucket_writes, 1, "published beside the other");

    // The one beside is another object: it is not refused with the first.
    let (entry, _) = cache.get(&key).await.unwrap();
    cache.reject(&key, &entry);
    let next = kit::cache(temp.path());
    let (first, _) = next.get(&key).await.unwrap();
    next.reject(&key, &first);
    let (second, origin) = next.get(&key).await.unwrap();
    assert_eq!(origin, Origin::Bucket);
    assert_ne!(first.object, second.object);
}

#[tokio::test]
async fn what_a_killed_writer_left_behind_is_not_seen() {
    let temp = tempfile::tempdir().unwrap();
    let file = filled(temp.path()).await;
    let object = std::fs::read(&file).unwrap();
    std::fs::remove_file(&file).unwrap();
    // The store writes beside the name, with a number behind a '#', and links when all is there.
    for left in ["0#1", "0#2"] {
        std::fs::write(file.with_file_name(left), &object[..object.len() / 2]).unwrap();
    }
    let compiler = Compiler::default();
    let cache = kit::cache(temp.path());
    assert_eq!(ask(&cache, &compiler, "a").await, Origin::Compiled);
    assert_eq!(cache.shutdown(LONG).await, 0);
    let counts = cache.counters();
    assert_eq!((counts.bad_entries, counts.bucket_writes), (0, 1));
    assert_eq!(
        ask(&kit::cache(temp.path()), &compiler, "a").await,
        Origin::Bucket
    );
}
