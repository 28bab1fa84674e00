//! What the tests have in common.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use waystation_cache::{Cache, Config, Entry, Key, KeyInputs, Origin, Text};
use waystation_lifecycle::bucket::{Bucket, Location};
use waystation_proto::waystation::ExecutableInfo;

/// Far longer than anything here takes; a test that waits this long fails.
pub(crate) const LONG: Duration = Duration::from_secs(30);

pub(crate) fn key(program: &str) -> Key {
    Key::of(&KeyInputs {
        program: program.as_bytes(),
        ..KeyInputs::default()
    })
}

/// What "compiling" a program gives.
pub(crate) fn entry(program: &str) -> Entry {
    Entry {
        info: ExecutableInfo {
            name: program.to_owned(),
            ..ExecutableInfo::default()
        },
        executable: Bytes::from(format!("machine code of {program} ").repeat(100)),
        text: Text::new(&format!("HloModule {program}")),
        object: None,
    }
}

/// Pauses in milliseconds, so that recovery is seen within a test; deadlines that a slow machine does not meet.
pub(crate) fn config(bucket: Option<Bucket>) -> Config {
    Config {
        location: bucket,
        // With no more rights than to get, list and create.
        remove_bad: false,
        claim_wait: Some(Duration::from_millis(200)),
        backoff: Duration::from_millis(5),
        backoff_max: Duration::from_millis(20),
        read_deadline: LONG,
        write_deadline: LONG,
        writer: "test".to_owned(),
        ..Config::default()
    }
}

pub(crate) fn folder(path: &Path) -> Bucket {
    Bucket::open(&Location::File(path.to_owned())).expect("folder opens")
}

pub(crate) fn cache(path: &Path) -> Cache {
    Cache::open(config(Some(folder(path))))
}

/// A compiler that counts.
#[derive(Clone, Default)]
pub(crate) struct Compiler(Arc<AtomicUsize>);

impl Compiler {
    pub(crate) fn compiles(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    pub(crate) async fn compile(&self, program: &str) -> Result<Entry, Infallible> {
        self.0.fetch_add(1, Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(10)).await;
        Ok(entry(program))
    }
}

/// Asks for a program, checks that it is the right one, and says where it came from.
pub(crate) async fn ask(cache: &Cache, compiler: &Compiler, program: &str) -> Origin {
    let key = key(program);
    let (found, origin) = cache
        .get_or_compile(&key, || compiler.compile(program))
        .await
        .expect("the compiler does not fail");
    let mut expected = entry(program);
    expected.info.key = key.to_string();
    expected.object = found.object;
    assert_eq!(*found, expected);
    origin
}

/// The entries in a folder: all files but the claims.
pub(crate) fn files(path: &Path) -> Vec<PathBuf> {
    let mut files = all_files(path);
    files.retain(|file| !file.starts_with(path.join("claim")));
    files
}

/// All files below a folder.
pub(crate) fn all_files(path: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![path.to_owned()];
    while let Some(folder) = folders.pop() {
        for item in std::fs::read_dir(folder).expect("folder is there") {
            let path = item.expect("readable").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}
