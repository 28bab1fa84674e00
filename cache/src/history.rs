//! What keys were made of, kept on this machine, so that a miss can be explained afterwards.
//!
//! Each compile, and each first hit of a process, leaves one line: which program, how it was served, and the digest of each
//! component of its key. [`explain`] compares a compile with the nearest earlier line and names what differs. The lines hold
//! digests and names, no values. They are for people: a history that is lost, or cannot be written, changes nothing else.

use std::{
    collections::HashSet,
    fmt,
    io::{self, Read as _, Seek as _, SeekFrom, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Serialize};
use waystation_lifecycle::bucket::layout::Digest;

use crate::{
    Key, Origin, Treatment,
    clerk::Clerk,
    quiet::Quiet,
    tier::disk::{self, Disk},
};

/// A file of lines is set aside when it is as long, and the one set aside before it goes: about two thousand programs.
const FILE_BYTES: u64 = 2 << 20;

/// Hex digits of a component's digest that are kept.
const DIGITS: usize = 16;

/// Names are cut here.
const NAME_BYTES: usize = 256;

/// Keys of one process that are noted once each; beyond that all are forgotten, and noted again.
const NOTED_KEYS: usize = 65_536;

/// A bounded store of short records, newest kept. Calls may block for as long as a write to a local disk takes.
pub trait History: Send + Sync + fmt::Debug {
    /// Keeps one more.
    ///
    /// # Errors
    /// When it cannot be kept; nothing else is lost.
    fn record(&self, record: &[u8]) -> io::Result<()>;

    /// The newest so many, oldest first.
    ///
    /// # Errors
    /// When they cannot be read.
    fn recent(&self, count: usize) -> io::Result<Vec<Vec<u8>>>;
}

/// One line of a history.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Note {
    /// When, in milliseconds since 1970 UTC.
    pub unix_ms: u64,
    /// The program's name.
    pub program: String,
    /// 64 hex digits.
    pub key: String,
    /// "compiled", "disk" or "bucket"; see [`Origin::as_str`].
    pub origin: String,
    /// Why the program was not keyed by its structure, when it was not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub construct: Option<String>,
    /// Names of the key's components and the beginnings of their digests.
    pub components: Vec<(String, String)>,
}

impl Note {
    /// Names of the components by which two differ, sorted.
    fn differences(&self, other: &Note) -> Vec<String> {
        let only = |a: &Note, b: &Note| {
            let missing = a.components.iter().filter(|c| !b.components.contains(c));
            missing.map(|(name, _)| name.clone()).collect::<Vec<_>>()
        };
        let mut names = only(self, other);
        names.extend(only(other, self));
        names.sort_unstable();
        names.dedup();
        names
    }
}

/// Why a program was compiled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// The compile.
    pub note: Note,
    /// What it is compared with, and what of the key has changed since then; none where no program before it is like it.
    pub since: Option<Change>,
}

/// What has changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Change {
    /// When the earlier one was served.
    pub unix_ms: u64,
    /// Its key.
    pub key: String,
    /// The components that differ. None: the key is the same, and its entry was not there or not good.
    pub components: Vec<String>,
}

/// Explains the compiles of a history, oldest first. Lines that are no notes are passed over.
pub fn explain(records: &[Vec<u8>]) -> Vec<Explanation> {
    let notes: Vec<Note> = records
        .iter()
        .filter_map(|record| serde_json::from_slice(record).ok())
        .collect();
    let compiled = |note: &&Note| note.origin == Origin::Compiled.as_str();
    let place = |(at, note): (usize, &Note)| Explanation {
        note: note.clone(),
        since: nearest(note, &notes[..at]),
    };
    let compiles = notes.iter().enumerate().filter(|(_, note)| compiled(note));
    compiles.map(place).collect()
}

/// The earlier program that is most like it: of the same name, with the fewest differences, the latest. One of another name is
/// like it only when it is the same program.
fn nearest(note: &Note, earlier: &[Note]) -> Option<Change> {
    let candidates = earlier.iter().enumerate().filter_map(|(at, other)| {
        let components = note.differences(other);
        let same_program = !components.iter().any(|name| name == "program");
        (other.program == note.program || same_program).then_some((components, at))
    });
    let (components, at) =
        candidates.min_by_key(|(components, at)| (components.len(), usize::MAX - at))?;
    Some(Change {
        unix_ms: earlier[at].unix_ms,
        key: earlier[at].key.clone(),
        components,
    })
}

/// The records of a folder on disk, oldest first: those of all processes that have shared it, as far as the last megabytes go.
/// Blocks.
pub fn of_folder(folder: &Path) -> Vec<Vec<u8>> {
    let newest_first = disk::recent_misses(folder, usize::MAX);
    let oldest_first = newest_first.into_iter().rev();
    oldest_first.map(|miss| miss.record.to_vec()).collect()
}

/// Two histories that may have records in common, oldest first.
pub fn merged(one: Vec<Vec<u8>>, other: Vec<Vec<u8>>) -> Vec<Vec<u8>> {
    let known: HashSet<Vec<u8>> = one.iter().cloned().collect();
    let new = other.into_iter().filter(|record| !known.contains(record));
    let mut all: Vec<_> = one.into_iter().chain(new).collect();
    // What is no note is passed over later, wherever it stands.
    all.sort_by_cached_key(|record| {
        serde_json::from_slice::<Note>(record).map_or(0, |note| note.unix_ms)
    });
    all
}

const NONBLOCK: i32 = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();

/// A history in a file of lines, and one that was set aside. Several processes may write to it at the same time: each line is
/// one appending write.
#[derive(Debug)]
pub struct File {
    path: PathBuf,
}

impl File {
    /// The file is made when something is recorded, and its folder.
    pub fn new(path: PathBuf) -> File {
        File { path }
    }

    fn aside(&self) -> PathBuf {
        let mut name = self.path.clone().into_os_string();
        name.push(".old");
        name.into()
    }
}

impl History for File {
    fn record(&self, record: &[u8]) -> io::Result<()> {
        if let Some(folder) = self.path.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let mut options = std::fs::OpenOptions::new();
        // Not waiting for a pipe's reader.
        options.create(true).append(true).custom_flags(NONBLOCK);
        let mut file = options.open(&self.path)?;
        if file.metadata()?.len() >= FILE_BYTES {
            // Of two processes that do it at the same time one sets a short file aside: some lines are lost then.
            std::fs::rename(&self.path, self.aside())?;
            file = options.open(&self.path)?;
        }
        let mut line = record.to_vec();
        line.retain(|byte| *byte != b'\n');
        line.push(b'\n');
        file.write_all(&line)
    }

    fn recent(&self, count: usize) -> io::Result<Vec<Vec<u8>>> {
        let mut text = tail(&self.aside())?;
        text.extend(tail(&self.path)?);
        let lines: Vec<_> = text
            .split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty())
            .collect();
        let from = lines.len().saturating_sub(count);
        Ok(lines[from..].iter().map(|line| line.to_vec()).collect())
    }
}

/// The end of a file; nothing where there is no file. Bounded, whatever somebody has put there.
fn tail(path: &Path) -> io::Result<Vec<u8>> {
    const MOST: u64 = 2 * FILE_BYTES;
    // Not waiting for a pipe's writer.
    let mut options = std::fs::OpenOptions::new();
    options.read(true).custom_flags(NONBLOCK);
    let mut file = match options.open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let file_is = file.metadata()?;
    if !file_is.is_file() {
        return Err(io::Error::other("it is no file"));
    }
    let length = file_is.len();
    file.seek(SeekFrom::Start(length.saturating_sub(MOST)))?;
    let mut text = Vec::new();
    file.take(MOST).read_to_end(&mut text)?;
    Ok(text)
}

/// A cache's side of its histories: the one that it was given, and that of its folder on disk, which all processes that share
/// the folder have in common.
#[derive(Debug)]
pub(crate) struct Notes {
    history: Option<Arc<dyn History>>,
    disk: Option<Arc<Disk>>,
    /// None where there is no thread for it.
    clerk: Option<Clerk>,
    noted: Mutex<HashSet<(Digest, Origin)>>,
    warning: Arc<Quiet>,
}

impl Notes {
    /// None where nothing is noted.
    pub(crate) fn new(history: Option<Arc<dyn History>>, disk: Option<Arc<Disk>>) -> Option<Notes> {
        (history.is_some() || disk.is_some()).then(|| Notes {
            clerk: history.as_ref().and_then(|_| Clerk::new().ok()),
            history,
            disk,
            noted: Mutex::default(),
            warning: Arc::default(),
        })
    }

    /// Waits until what was taken so far is noted, at most so long.
    pub(crate) async fn settle(&self, deadline: Duration) {
        if let Some(clerk) = &self.clerk {
            clerk.idle(deadline).await;
        }
    }

    /// Notes a key that was served, behind the caller. Where lines come quicker than they are written they are lost. Must be
    /// called on a tokio runtime.
    pub(crate) fn take(&self, key: &Key, program: &str, origin: Origin) {
        // What is compiled because nobody may keep it says nothing about keys, and each compile of it would be a line.
        if !key.is_cacheable() || !self.is_new(key, origin) {
            return;
        }
        let note = Note {
            unix_ms: SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .map_or(0, |time| {
                    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
                }),
            program: program[..program.floor_char_boundary(NAME_BYTES)].to_owned(),
            key: key.to_string(),
            origin: origin.as_str().to_owned(),
            construct: match key.treatment() {
                Treatment::Raw { construct } | Treatment::Opaque { construct } => {
                    Some(construct.clone())
                }
                _ => None,
            },
            components: key
                .record()
                .components()
                .iter()
                .map(|(name, digest)| (name.clone(), hex::encode(&digest[..DIGITS / 2])))
                .collect(),
        };
        let line = match serde_json::to_vec(&note) {
            Ok(line) => line,
            Err(error) => return warn(&self.warning, &error.into()),
        };
        if let Some(disk) = &self.disk {
            disk.record_miss(line.clone().into());
        }
        let Some(history) = self.history.clone() else {
            return;
        };
        let warning = Arc::clone(&self.warning);
        let work = move || {
            if let Err(error) = history.record(&line) {
                warn(&warning, &error);
            }
        };
        let posted = self.clerk.as_ref().is_some_and(|clerk| clerk.post(work));
        if !posted {
            warn(&self.warning, &io::ErrorKind::TimedOut.into());
        }
    }

    fn is_new(&self, key: &Key, origin: Origin) -> bool {
        let mut noted = self.noted.lock().unwrap_or_else(PoisonError::into_inner);
        if noted.len() >= NOTED_KEYS {
            noted.clear();
        }
        noted.insert((*key.digest(), origin))
    }
}

fn warn(warning: &Quiet, error: &io::Error) {
    if let Some(suppressed) = warning.due() {
        tracing::warn!(
            %error, suppressed,
            "keys are not noted: `waystation cache why-miss` cannot explain misses"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a file on a server that does not answer.
    #[derive(Debug)]
    struct Hangs(Mutex<std::sync::mpsc::Receiver<()>>);

    impl History for Hangs {
        fn record(&self, _: &[u8]) -> io::Result<()> {
            let _ = self.0.lock().unwrap().recv();
            Ok(())
        }

        fn recent(&self, _: usize) -> io::Result<Vec<Vec<u8>>> {
            Ok(Vec::new())
        }
    }

    #[test]
    fn a_history_that_hangs_takes_no_thread_from_others() {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime
            .max_blocking_threads(2)
            .enable_time()
            .build()
            .unwrap();
        let (go, hangs) = std::sync::mpsc::channel();
        let history = Arc::new(Hangs(Mutex::new(hangs)));
        let notes = Notes::new(Some(history), None).unwrap();
        runtime.block_on(async {
            for number in 0..4000u32 {
                let program = number.to_le_bytes();
                let key = Key::of(&crate::KeyInputs {
                    program: &program,
                    ..crate::KeyInputs::default()
                });
                notes.take(&key, "f", Origin::Compiled);
            }
            let other = tokio::task::spawn_blocking(|| 7);
            let other = tokio::time::timeout(Duration::from_secs(30), other).await;
            assert_eq!(other.unwrap().unwrap(), 7);
            notes.settle(Duration::from_millis(10)).await;
        });
        drop(go);
    }

    fn note(program: &str, origin: &str, components: &[(&str, &str)]) -> Vec<u8> {
        let components: Vec<_> = components
            .iter()
            .map(|(name, digest)| ((*name).to_owned(), (*digest).to_owned()))
            .collect();
        let key: String = components.iter().map(|(_, digest)| &**digest).collect();
        serde_json::to_vec(&Note {
            unix_ms: 1,
            program: program.to_owned(),
            key,
            origin: origin.to_owned(),
            construct: None,
            components,
        })
        .unwrap()
    }

    fn changes(records: &[Vec<u8>]) -> Vec<Option<Vec<String>>> {
        explain(records)
            .into_iter()
            .map(|explanation| explanation.since.map(|change| change.components))
            .collect()
    }

    #[test]
    fn a_compile_is_compared_with_the_nearest_before_it() {
        let records = [
            note(
                "f",
                "compiled",
                &[("rules", "1"), ("program", "a"), ("environment/X", "1")],
            ),
            note(
                "f",
                "bucket",
                &[("rules", "1"), ("program", "b"), ("environment/X", "2")],
            ),
            note(
                "g",
                "compiled",
                &[("rules", "1"), ("program", "c"), ("environment/X", "1")],
            ),
            b"no note".to_vec(),
            // Like the second, but for X.
            note(
                "f",
                "compiled",
                &[("rules", "1"), ("program", "b"), ("environment/X", "3")],
            ),
            note(
                "f",
                "compiled",
                &[("rules", "2"), ("program", "b"), ("environment/X", "3")],
            ),
            // The same again: the entry was gone.
            note(
                "f",
                "compiled",
                &[("rules", "2"), ("program", "b"), ("environment/X", "3")],
            ),
            // Another name for a program that is the same.
            note("h", "compiled", &[("rules", "2"), ("program", "b")]),
        ];
        let named = |names: &[&str]| Some(names.iter().map(|name| (*name).to_owned()).collect());
        assert_eq!(
            changes(&records),
            [
                None,
                None,
                named(&["environment/X"]),
                named(&["rules"]),
                named(&[]),
                named(&["environment/X"]),
            ]
        );
    }

    #[test]
    fn two_histories_are_one() {
        let at = |unix_ms: u64| {
            let note: Note = serde_json::from_slice(&note("f", "bucket", &[])).unwrap();
            serde_json::to_vec(&Note { unix_ms, ..note }).unwrap()
        };
        let merged = merged(vec![at(1), at(3), at(5)], vec![at(2), at(3), at(9)]);
        assert_eq!(merged, [at(1), at(2), at(3), at(5), at(9)]);
    }

    #[test]
    fn a_file_keeps_the_newest_lines() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::new(folder.path().join("a/b/history"));
        assert!(file.recent(9).unwrap().is_empty());
        let line = vec![b'x'; 100_000];
        for number in 0..60_u8 {
            let mut line = line.clone();
            line[0] = number + 64;
            file.record(&line).unwrap();
        }
        let kept = file.recent(usize::MAX).unwrap();
        assert!((20..60).contains(&kept.len()), "{} lines", kept.len());
        assert_eq!(kept.last().unwrap()[0], 59 + 64);
        let firsts: Vec<u8> = file.recent(3).unwrap().iter().map(|line| line[0]).collect();
        assert_eq!(firsts, [57 + 64, 58 + 64, 59 + 64]);
        // One record is one line, whatever is in it.
        file.record(b"a\nb").unwrap();
        assert_eq!(file.recent(1).unwrap(), [b"ab"]);
    }

    #[test]
    fn a_history_that_cannot_be_written_is_an_error_and_no_more() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("file"), b"").unwrap();
        let file = File::new(folder.path().join("file/history"));
        file.record(b"x").unwrap_err();
    }

    #[test]
    fn a_pipe_holds_nobody_up() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RWXU).unwrap();
        let file = File::new(path);
        file.recent(9).unwrap_err();
        file.record(b"x").unwrap_err();
    }
}
