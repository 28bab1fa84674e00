//! A record of loads that the process did not survive, so that it does not die of the same entry when it comes back.
//!
//! Before an executable is loaded a file that names it is made in a local folder, and removed after. While the load goes
//! on the file is locked, and the system unlocks it when the process ends, however it ends. So a file that nobody has
//! locked is of a load that ended its process: when a cache opens, that entry is refused from then on (a bad object, to
//! be passed over for the next slot). Where a program was compiled for the load, and a second one dies, the program is
//! not loaded any more at all.
//!
//! The files are the record, and are forgotten after a day. Several processes may share the folder. A process that is
//! killed in mid-load by somebody else costs one needless compile.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tracing::{debug, warn};
use waystation_lifecycle::bucket::layout::Digest;

use crate::quiet::Quiet;

/// How long a load that ended its process is remembered. By then somebody may have mended what was to blame.
const REMEMBERED: Duration = Duration::from_secs(24 * 3600);

/// Files that are looked at when a cache opens. A process leaves one, or as many as it has loads at a time.
const FILES: usize = 4096;

/// Names that are tried for a file.
const NAMES: usize = 64;

/// End of the name of a file that is not locked yet.
const NEW: &str = ".new";

/// In place of an object's checksum: what was loaded was compiled for it.
const COMPILED: &str = "compiled";

/// The record.
#[derive(Debug)]
pub(crate) struct Loads {
    folder: Option<PathBuf>,
    deaths: HashMap<Digest, Deaths>,
    next: AtomicU64,
    warning: Quiet,
    under_way: Arc<Mutex<UnderWay>>,
}

/// Notes of loads that go on.
#[derive(Debug, Default)]
struct UnderWay {
    notes: HashSet<PathBuf>,
    /// The process ends in order: no load that it breaks off is a death.
    stopping: bool,
}

/// Loads of a key that ended their process.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
struct Deaths {
    /// Checksums of the objects loaded.
    objects: Vec<Digest>,
    /// How often what was loaded had just been compiled.
    compiled: usize,
}

/// A program whose executables end the process that loads them, stored or compiled anew.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "loading the executable of this program has ended the worker {times} times; it is not loaded again for a day, or until \
     the notes below --state_dir are removed"
)]
pub struct Fatal {
    /// How often.
    pub times: usize,
}

/// A load that goes on. Dropped, it has been survived.
#[derive(Debug)]
pub struct Loading(#[allow(dead_code, reason = "held until the load has ended")] Option<Note>);

#[derive(Debug)]
struct Note {
    path: PathBuf,
    _locked: File,
    under_way: Arc<Mutex<UnderWay>>,
}

impl Loads {
    /// Reads the record of `folder`, which is made if it is missing; without one nothing is remembered. Blocks for as
    /// long as a few file operations take.
    pub(crate) fn open(folder: Option<&Path>) -> Loads {
        let folder = folder.map(|folder| folder.join("loads"));
        let mut loads = Loads {
            folder: None,
            deaths: HashMap::new(),
            next: AtomicU64::new(0),
            warning: Quiet::default(),
            under_way: Arc::default(),
        };
        let Some(folder) = folder else {
            return loads;
        };
        match fs::create_dir_all(&folder).and_then(|()| loads.read(&folder)) {
            Ok(()) => loads.folder = Some(folder),
            Err(error) => {
                warn!(folder = %folder.display(), %error, "an entry that ends the worker will not be remembered");
            }
        }
        loads
    }

    fn read(&mut self, folder: &Path) -> io::Result<()> {
        for file in fs::read_dir(folder)?.take(FILES) {
            let path = file?.path();
            // It may be gone by now: its load has ended well.
            let Ok(meta) = fs::metadata(&path) else {
                continue;
            };
            let age = meta
                .modified()
                .ok()
                .and_then(|at| SystemTime::now().duration_since(at).ok());
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if age.unwrap_or_default() > REMEMBERED && parse(name.trim_end_matches(NEW)).is_some() {
                // Another process may have removed it.
                let _ = fs::remove_file(&path);
                continue;
            }
            let Some((key, object)) = parse(&name) else {
                continue;
            };
            if !File::open(&path).is_ok_and(|file| file.try_lock_shared().is_ok()) {
                continue;
            }
            let deaths = self.deaths.entry(key).or_default();
            match object {
                Some(object) => deaths.objects.push(object),
                None => deaths.compiled += 1,
            }
        }
        Ok(())
    }

    /// Key and checksum of every object that has ended a process.
    pub(crate) fn objects(&self) -> impl Iterator<Item = (&Digest, &Digest)> {
        let all = self.deaths.iter();
        all.flat_map(|(key, deaths)| deaths.objects.iter().map(move |object| (key, object)))
    }

    /// Notes that a load begins. `object`: the checksum of what is loaded, if it has not just been compiled. Blocks for as
    /// long as it takes to make a file; a record that cannot be kept is a warning.
    ///
    /// # Errors
    /// [`Fatal`] when the load is not to be tried again.
    pub(crate) fn begin(&self, key: &Digest, object: Option<&Digest>) -> Result<Loading, Fatal> {
        self.check(key)?;
        let Some(folder) = &self.folder else {
            return Ok(Loading(None));
        };
        match self.mark(folder, key, object) {
            Ok((path, file)) => {
                let note = Note {
                    path: path.clone(),
                    _locked: file,
                    under_way: Arc::clone(&self.under_way),
                };
                let mut under_way = lock(&self.under_way);
                if !under_way.stopping {
                    under_way.notes.insert(path);
                }
                let stopping = under_way.stopping;
                drop(under_way);
                // Dropped, the note goes.
                Ok(Loading(Some(note).filter(|_| !stopping)))
            }
            Err(error) => {
                if let Some(suppressed) = self.warning.due() {
                    warn!(folder = %folder.display(), %error, suppressed, "a load cannot be noted");
                }
                Ok(Loading(None))
            }
        }
    }

    /// Says that the process ends in order: loads that this breaks off have not ended it.
    pub(crate) fn forgive(&self) {
        let mut under_way = lock(&self.under_way);
        under_way.stopping = true;
        for path in under_way.notes.drain() {
            let _ = fs::remove_file(path);
        }
    }

    /// # Errors
    /// [`Fatal`] when no load of this key is to be tried.
    pub(crate) fn check(&self, key: &Digest) -> Result<(), Fatal> {
        let Some(deaths) = self.deaths.get(key) else {
            return Ok(());
        };
        let times = deaths.objects.len() + deaths.compiled;
        if deaths.compiled > 0 && times > 1 {
            return Err(Fatal { times });
        }
        Ok(())
    }

    fn mark(
        &self,
        folder: &Path,
        key: &Digest,
        object: Option<&Digest>,
    ) -> io::Result<(PathBuf, File)> {
        let object = object.map_or_else(|| COMPILED.to_owned(), hex::encode);
        let key = hex::encode(key);
        let mut taken = io::Error::from(io::ErrorKind::AlreadyExists);
        for _ in 0..NAMES {
            let number = self.next.fetch_add(1, Ordering::Relaxed);
            let name = format!("{key}.{object}.{}-{number}", std::process::id());
            let path = folder.join(&name);
            let new = folder.join(name + NEW);
            let file = match File::create_new(&new) {
                Ok(file) => file,
                // A process of the same number in another container.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    taken = error;
                    continue;
                }
                Err(error) => return Err(error),
            };
            // Locked before it has its name: one that is not locked says that its process has died.
            let marked = file
                .try_lock()
                .map_err(io::Error::from)
                .and_then(|()| fs::rename(&new, &path));
            if let Err(error) = marked {
                // The error to tell is the first one.
                let _ = fs::remove_file(&new);
                return Err(error);
            }
            return Ok((path, file));
        }
        Err(taken)
    }
}

impl Drop for Note {
    fn drop(&mut self) {
        lock(&self.under_way).notes.remove(&self.path);
        if let Err(error) = fs::remove_file(&self.path) {
            debug!(%error, "the note of a load is gone already");
        }
    }
}

fn lock(under_way: &Mutex<UnderWay>) -> MutexGuard<'_, UnderWay> {
    under_way.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Key, and the object's checksum if it had one, of a file's name.
fn parse(name: &str) -> Option<(Digest, Option<Digest>)> {
    let digest = |text: &str| -> Option<Digest> { hex::decode(text).ok()?.try_into().ok() };
    let mut parts = name.split('.');
    let (key, object, _process) = (parts.next()?, parts.next()?, parts.next()?);
    if parts.next().is_some() {
        return None;
    }
    let object = match object {
        COMPILED => None,
        checksum => Some(digest(checksum)?),
    };
    Some((digest(key)?, object))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Digest = [7; 32];

    fn files(folder: &Path) -> usize {
        fs::read_dir(folder.join("loads")).unwrap().count()
    }

    /// What a process leaves that dies in this load.
    fn die(folder: &Path, object: Option<&Digest>) {
        let loads = Loads::open(Some(folder));
        let loading = loads.begin(&KEY, object).unwrap();
        // The note stays, and who ends unlocks it.
        let path = loading.0.as_ref().unwrap().path.clone();
        let copy = path.with_extension("kept");
        fs::hard_link(&path, &copy).unwrap();
        drop(loading);
        fs::rename(copy, path).unwrap();
    }

    #[test]
    fn a_load_that_an_orderly_end_breaks_off_is_no_death() {
        let temp = tempfile::tempdir().unwrap();
        let loads = Loads::open(Some(temp.path()));
        let one = loads.begin(&KEY, None).unwrap();
        loads.forgive();
        assert_eq!(files(temp.path()), 0);
        let two = loads.begin(&KEY, None).unwrap();
        assert_eq!(files(temp.path()), 0);
        std::mem::forget((one, two));
    }

    #[test]
    fn a_load_that_ends_leaves_nothing_and_one_that_goes_on_is_nobodys_death() {
        let temp = tempfile::tempdir().unwrap();
        let loads = Loads::open(Some(temp.path()));
        let one = loads.begin(&KEY, Some(&[1; 32])).unwrap();
        let two = loads.begin(&KEY, None).unwrap();
        assert_eq!(files(temp.path()), 2);
        let other = Loads::open(Some(temp.path()));
        assert_eq!(other.objects().count(), 0);
        assert!(other.begin(&KEY, None).is_ok());
        drop((one, two));
        assert_eq!(files(temp.path()), 0);
    }

    #[test]
    fn an_object_is_refused_after_one_death_and_a_program_after_two() {
        let temp = tempfile::tempdir().unwrap();
        die(temp.path(), Some(&[1; 32]));
        let loads = Loads::open(Some(temp.path()));
        let refused: Vec<_> = loads.objects().collect();
        assert_eq!(refused, [(&KEY, &[1; 32])]);
        // Another object, or what is compiled anew, may be loaded.
        assert!(loads.begin(&KEY, None).is_ok());
        die(temp.path(), None);
        let loads = Loads::open(Some(temp.path()));
        assert_eq!(loads.begin(&KEY, None).unwrap_err(), Fatal { times: 2 });
        assert!(loads.begin(&[8; 32], None).is_ok());
    }

    #[test]
    fn objects_alone_never_refuse_a_program() {
        let temp = tempfile::tempdir().unwrap();
        for object in 0..4 {
            die(temp.path(), Some(&[object; 32]));
        }
        let loads = Loads::open(Some(temp.path()));
        assert_eq!(loads.objects().count(), 4);
        assert!(loads.begin(&KEY, None).is_ok());
    }

    #[test]
    fn after_a_day_it_is_forgotten_and_other_files_are_left_alone() {
        let temp = tempfile::tempdir().unwrap();
        die(temp.path(), Some(&[1; 32]));
        let folder = temp.path().join("loads");
        fs::write(folder.join("notes.txt"), b"mine").unwrap();
        for file in fs::read_dir(&folder).unwrap() {
            let file = File::options().write(true).open(file.unwrap().path());
            let past = SystemTime::now() - REMEMBERED - Duration::from_secs(60);
            file.unwrap().set_modified(past).unwrap();
        }
        assert_eq!(Loads::open(Some(temp.path())).objects().count(), 0);
        assert!(folder.join("notes.txt").exists());
        assert_eq!(files(temp.path()), 1);
    }

    #[test]
    fn a_folder_that_cannot_be_used_stops_nobody() {
        let temp = tempfile::tempdir().unwrap();
        let file = temp.path().join("file");
        fs::write(&file, b"").unwrap();
        for folder in [Some(&*file), None] {
            let loads = Loads::open(folder);
            drop(loads.begin(&KEY, None).unwrap());
        }
    }
}
