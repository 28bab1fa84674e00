//! The folder as several processes share it, as killed ones leave it, and as nobody should have left it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use sha2::{Digest as _, Sha256};
use waystation_lifecycle::bucket::layout::Digest;
use waystation_proto::waystation::ExecutableInfo;

use super::census::{Bounds, Census};
use super::folder::{Folder, footprint};
use super::store::{Settings, Store};
use crate::counters::{Counters, Counts};
use crate::entry::{Entry, Provenance};
use crate::envelope::{self, Limits, Opened};
use crate::tier::Put;
use crate::verify::{Refused, Verifier};

mod history;
mod index;
mod killed;
mod model;
mod odd;
mod room;
mod shared;

/// Far longer than anything here takes.
const LONG: Duration = Duration::from_secs(60);

/// True in `make soak`.
fn soak() -> bool {
    std::env::var_os("WAYSTATION_SOAK").is_some()
}

/// A store and its counters.
struct Subject {
    store: Store,
    counters: Arc<Counters>,
}

impl Subject {
    fn new(folder: &Path, bytes: u64) -> Subject {
        Subject::with(folder, bytes, verifier())
    }

    fn with(folder: &Path, bytes: u64, verifier: Verifier) -> Subject {
        let counters = Arc::new(Counters::default());
        let settings = Settings {
            folder: folder.to_owned(),
            bounds: Bounds {
                bytes,
                entries: 1000,
            },
            verifier,
            index_retry: Duration::ZERO,
        };
        Subject {
            store: Store::new(settings, Arc::clone(&counters)),
            counters,
        }
    }

    fn counts(&self) -> Counts {
        self.counters.read()
    }

    fn put(&self, number: u32) -> Put {
        let (key, object) = sealed(number);
        self.store.put(&key, &object).unwrap()
    }

    /// True where the entry is there; what is there must be the right one.
    fn has(&self, number: u32) -> bool {
        let found = self.store.get(&key(number)).unwrap();
        found
            .map(|found| assert_right(number, &found.opened))
            .is_some()
    }
}

fn verifier() -> Verifier {
    Verifier::new(Limits::default(), None, Arc::default())
}

fn assert_right(number: u32, found: &Opened) {
    let expected = entry(number);
    assert_eq!(
        (&found.entry.info, &found.entry.executable),
        (&expected.info, &expected.executable)
    );
}

fn key(number: u32) -> Digest {
    Sha256::digest(number.to_le_bytes()).into()
}

/// An entry of one to four blocks, which does not compress.
fn entry(number: u32) -> Entry {
    let length = 1000 + 4096 * (number as usize % 4);
    let mut executable = Vec::new();
    let mut last = key(number);
    while executable.len() < length {
        last = Sha256::digest(last).into();
        executable.extend_from_slice(&last);
    }
    Entry {
        info: ExecutableInfo {
            name: format!("program {number}"),
            ..ExecutableInfo::default()
        },
        executable: executable.into(),
        text: None,
        object: None,
    }
}

fn sealed(number: u32) -> (Digest, Bytes) {
    let key = key(number);
    let object = envelope::seal(
        &key,
        &entry(number),
        &Provenance::default(),
        &Limits::default(),
    );
    (key, object.unwrap())
}

fn blocks(number: u32) -> u64 {
    footprint(sealed(number).1.len() as u64)
}

/// Where the entry of a number lies.
fn path(folder: &Path, number: u32) -> PathBuf {
    let name = hex::encode(key(number));
    folder.join(&name[..2]).join(&name)
}

/// The files of all shards, and their names.
fn files(folder: &Path) -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    for shard in 0..=u8::MAX {
        let Ok(items) = folder.join(hex::encode([shard])).read_dir() else {
            continue;
        };
        for item in items.flatten() {
            found.push((item.file_name().into_string().unwrap(), item.path()));
        }
    }
    found
}

/// What has been written to the folder: a file that is only as long as it will be has no blocks yet.
fn written(folder: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    let sizes = files(folder).into_iter().map(|(name, path)| {
        let Ok(meta) = path.symlink_metadata() else {
            return 0;
        };
        match name.starts_with(".tmp-") {
            true => footprint(meta.len()).min(meta.blocks() * 512),
            false => footprint(meta.len()),
        }
    });
    sizes.sum()
}

/// The count that a process makes which knows nothing.
fn census(folder: &Path) -> Census {
    let mut census = Census::new();
    census
        .refresh(
            &Folder::new(folder.to_owned()),
            std::time::SystemTime::now(),
        )
        .unwrap();
    census
}

/// Says that an entry was used so many seconds after the first moment.
fn used(folder: &Path, number: u32, second: u64) {
    let file = File::options()
        .write(true)
        .open(path(folder, number))
        .unwrap();
    let time = std::time::UNIX_EPOCH + Duration::from_secs(1_700_000_000 + second);
    file.set_modified(time).unwrap();
}
