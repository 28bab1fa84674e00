//! Misses, for whoever asks later why a program was compiled again.
//!
//! A record is bytes to this module. Each is appended to a file that all processes share, and to the index where this
//! process has it. The file is short; what falls out of it the index still has. Neither is waited for or relied on.
//!
//! The file has a line a record: time, a mark by which it is known to be whole, and the record in hex. A line that was
//! cut off ends where the next one begins.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use rustix::fs::{self, FileType, Mode, OFlags};
use rustix::io::Errno;
use sha2::{Digest as _, Sha256};

use super::folder::{FILE_MODE, Folder};

/// Records longer than this are not kept.
pub const MAX_RECORD_BYTES: usize = 16 << 10;

/// The file is put aside at this size, and the one put aside before it goes.
const FILE_BYTES: u64 = 1 << 20;

const FILE: &str = "misses";
const OLD_FILE: &str = "misses.old";

/// Names a record: its time in milliseconds since 1970 UTC, and a digest of time and record.
pub(super) type MissId = (u64, [u8; 8]);

/// A record of the history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Miss {
    /// When, in milliseconds since 1970 UTC, by the clock of who recorded it.
    pub unix_ms: u64,
    /// What was recorded.
    pub record: Bytes,
}

impl Miss {
    pub(super) fn new((unix_ms, _): MissId, record: impl Into<Bytes>) -> Miss {
        let record = record.into();
        Miss { unix_ms, record }
    }
}

/// The name of a record of this moment.
pub(super) fn id_now(record: &[u8]) -> MissId {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    id(
        now.map_or(0, |time| {
            u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
        }),
        record,
    )
}

fn id(unix_ms: u64, record: &[u8]) -> MissId {
    let mut hash = Sha256::new();
    hash.update(unix_ms.to_le_bytes());
    hash.update(record);
    let mut mark = [0; 8];
    mark.copy_from_slice(&hash.finalize()[..8]);
    (unix_ms, mark)
}

/// Appends a record to the file.
pub(super) fn append(folder: &Folder, (unix_ms, mark): MissId, record: &[u8]) -> io::Result<()> {
    let root = folder.make_root()?;
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE;
    let mut file = open(&root, FILE, flags)?;
    if file.metadata()?.len() >= FILE_BYTES {
        // Two that do so at once lose the older half.
        fs::renameat(&root, FILE, &root, OLD_FILE)?;
        file = open(&root, FILE, flags)?;
    }
    let (mark, record) = (hex::encode(mark), hex::encode(record));
    // In one write, so that the lines of two processes do not mix.
    file.write_all(format!("\n{unix_ms} {mark} {record}\n").as_bytes())
}

/// The records in the files.
pub(super) fn read(folder: &Folder) -> BTreeMap<MissId, Miss> {
    let mut found = BTreeMap::new();
    let Ok(Some(root)) = folder.root() else {
        return found;
    };
    for name in [OLD_FILE, FILE] {
        let Ok(file) = open(&root, name, OFlags::RDONLY) else {
            continue;
        };
        let mut bytes = Vec::new();
        // What is longer has not been written by this module; what cannot be read is not there.
        let _ = file.take(2 * FILE_BYTES).read_to_end(&mut bytes);
        for line in bytes.split(|byte| *byte == b'\n') {
            if let Some((id, miss)) = parse(line) {
                found.insert(id, miss);
            }
        }
    }
    found
}

fn parse(line: &[u8]) -> Option<(MissId, Miss)> {
    let mut parts = std::str::from_utf8(line).ok()?.split(' ');
    let unix_ms = parts.next()?.parse().ok()?;
    let mark = hex::decode(parts.next()?).ok()?;
    let record = hex::decode(parts.next()?).ok()?;
    let id = id(unix_ms, &record);
    (id.1[..] == mark && record.len() <= MAX_RECORD_BYTES).then(|| (id, Miss::new(id, record)))
}

fn open(root: &std::os::fd::OwnedFd, name: &str, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = fs::openat(root, name, flags, Mode::from_raw_mode(FILE_MODE))?;
    if !FileType::from_raw_mode(fs::fstat(&file)?.st_mode).is_file() {
        return Err(Errno::INVAL.into());
    }
    Ok(File::from(file))
}
