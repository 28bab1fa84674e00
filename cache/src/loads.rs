//! A record of loads that the process did not survive, so that it does not die of the same entry when it comes back.
//!
//! Before an executable is loaded a file that names it is made in a local folder, and removed after. While the load goes
//! on the file is locked, and the system unlocks it when the process ends, however it ends. So a file that nobody has
//! locked is of a load that ended its process: when a cache opens, that entry is refused from then on (a bad object, to
//! be passed over for the next slot). Where a program was compiled for the load, and a second process dies that knew of
//! the first, the program is not loaded any more at all.
//!
//! Processes that did not know of each other's deaths may have had one cause that is not the program, as when somebody
//! kills all workers of a machine: they count as one. Loads that the end of the machine broke off count as nothing.
//!
//! The files are the record, and are forgotten after a day. Several processes may share the folder, those of several
//! machines too. A process that is killed in mid-load by somebody else costs one needless compile. A folder that hangs
//! costs one short wait, and goes without notes until it answers.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use tracing::{debug, warn};
use waystation_lifecycle::bucket::layout::Digest;

use crate::clerk::Clerk;
use crate::quiet::Quiet;

/// How long a load that ended its process is remembered. By then somebody may have mended what was to blame.
const REMEMBERED: Duration = Duration::from_secs(24 * 3600);

/// How long a process that starts waits for the record.
const OPENED_WITHIN: Duration = Duration::from_secs(2);

/// How long a load waits for its note.
const NOTED_WITHIN: Duration = Duration::from_secs(1);

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
    desk: Option<Desk>,
    deaths: HashMap<Digest, Deaths>,
    warning: Quiet,
}

/// Where notes are made.
#[derive(Debug)]
struct Desk {
    folder: PathBuf,
    /// Of the machine, as long as it runs.
    boot: String,
    clerk: Arc<Clerk>,
    next: Arc<AtomicU64>,
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
    objects: HashSet<Digest>,
    /// Whether what was loaded had just been compiled, once at least.
    compiled: bool,
    /// Of how many deaths each process knew that died, so that those that may have died together count once.
    generations: BTreeSet<u32>,
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
    /// Locked. None once it has gone.
    file: Option<File>,
    clerk: Arc<Clerk>,
    under_way: Arc<Mutex<UnderWay>>,
}

/// What a file's name says.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Name {
    key: Digest,
    /// The object's checksum, if it had one.
    object: Option<Digest>,
    boot: String,
    generation: u32,
}

impl Loads {
    /// Reads the record of `folder`, which is made if it is missing; without one nothing is remembered. Blocks for as
    /// long as a few file operations take, and not long where they hang.
    pub(crate) fn open(folder: Option<&Path>) -> Loads {
        Loads::open_on(folder, boot())
    }

    fn open_on(folder: Option<&Path>, boot: String) -> Loads {
        let mut loads = Loads {
            desk: None,
            deaths: HashMap::new(),
            warning: Quiet::default(),
        };
        let Some(folder) = folder.map(|folder| folder.join("loads")) else {
            return loads;
        };
        let read = Clerk::new().and_then(|clerk| {
            let (folder, boot) = (folder.clone(), boot.clone());
            let read = clerk.within(OPENED_WITHIN, move || {
                fs::create_dir_all(&folder).and_then(|()| read(&folder, &boot))
            });
            let deaths = read.unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()))?;
            Ok((clerk, deaths))
        });
        match read {
            Ok((clerk, deaths)) => {
                loads.deaths = deaths;
                loads.desk = Some(Desk {
                    folder,
                    boot,
                    clerk: Arc::new(clerk),
                    next: Arc::default(),
                    under_way: Arc::default(),
                });
            }
            Err(error) => {
                warn!(folder = %folder.display(), %error, "an entry that ends the worker will not be remembered");
            }
        }
        loads
    }

    /// Key and checksum of every object that has ended a process.
    pub(crate) fn objects(&self) -> impl Iterator<Item = (&Digest, &Digest)> {
        let all = self.deaths.iter();
        all.flat_map(|(key, deaths)| deaths.objects.iter().map(move |object| (key, object)))
    }

    /// Notes that a load begins. `object`: the checksum of what is loaded, if it has not just been compiled. Blocks for as
    /// long as it takes to make a file, and not long where that hangs; a record that cannot be kept is a warning.
    ///
    /// # Errors
    /// [`Fatal`] when the load is not to be tried again.
    pub(crate) fn begin(&self, key: &Digest, object: Option<&Digest>) -> Result<Loading, Fatal> {
        self.check(key)?;
        let Some(desk) = &self.desk else {
            return Ok(Loading(None));
        };
        let known = self.deaths.get(key);
        let last = known.and_then(|deaths| deaths.generations.last());
        let name = Name {
            key: *key,
            object: object.copied(),
            boot: desk.boot.clone(),
            generation: last.map_or(0, |last| last.saturating_add(1)),
        };
        let note = desk.note(&name).unwrap_or_else(|error| {
            if let Some(suppressed) = self.warning.due() {
                warn!(folder = %desk.folder.display(), %error, suppressed, "a load cannot be noted");
            }
            None
        });
        Ok(Loading(note))
    }

    /// Says that the process ends in order: loads that this breaks off have not ended it. Waits at most so long for the
    /// notes to go.
    pub(crate) async fn forgive(&self, deadline: Duration) {
        let Some(desk) = &self.desk else {
            return;
        };
        let notes: Vec<_> = {
            let mut under_way = lock(&desk.under_way);
            under_way.stopping = true;
            under_way.notes.drain().collect()
        };
        desk.clerk.finish(move || {
            for path in notes {
                let _ = fs::remove_file(path);
            }
        });
        desk.clerk.idle(deadline).await;
    }

    /// # Errors
    /// [`Fatal`] when no load of this key is to be tried.
    pub(crate) fn check(&self, key: &Digest) -> Result<(), Fatal> {
        let Some(deaths) = self.deaths.get(key) else {
            return Ok(());
        };
        let times = deaths.generations.len();
        if deaths.compiled && times > 1 {
            return Err(Fatal { times });
        }
        Ok(())
    }
}

/// The deaths that a folder's files tell of, of the machine that runs now.
fn read(folder: &Path, boot: &str) -> io::Result<HashMap<Digest, Deaths>> {
    let mut all: HashMap<Digest, Deaths> = HashMap::new();
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
        let text = path.file_name().unwrap_or_default().to_string_lossy();
        if age.unwrap_or_default() > REMEMBERED && Name::parse(text.trim_end_matches(NEW)).is_some()
        {
            // Another process may have removed it.
            let _ = fs::remove_file(&path);
            continue;
        }
        let Some(name) = Name::parse(&text) else {
            continue;
        };
        // Of another machine, or broken off with this one: a lock says nothing there.
        if name.boot != boot {
            continue;
        }
        if !File::open(&path).is_ok_and(|file| file.try_lock_shared().is_ok()) {
            continue;
        }
        let deaths = all.entry(name.key).or_default();
        deaths.generations.insert(name.generation);
        match name.object {
            Some(object) => drop(deaths.objects.insert(object)),
            None => deaths.compiled = true,
        }
    }
    Ok(all)
}

impl Desk {
    /// `None`: none is needed any more.
    fn note(&self, name: &Name) -> io::Result<Option<Note>> {
        let (folder, text) = (self.folder.clone(), name.to_string());
        let (clerk, next) = (Arc::clone(&self.clerk), Arc::clone(&self.next));
        let under_way = Arc::clone(&self.under_way);
        let noted = self.clerk.within(NOTED_WITHIN, move || {
            if lock(&under_way).stopping {
                return Ok(None);
            }
            let (path, file) = mark(&folder, &text, &next)?;
            let note = Note {
                path: path.clone(),
                file: Some(file),
                clerk,
                under_way: Arc::clone(&under_way),
            };
            let mut under_way = lock(&under_way);
            let stopping = under_way.stopping;
            if !stopping {
                under_way.notes.insert(path);
            }
            drop(under_way);
            // Dropped, the note goes.
            Ok(Some(note).filter(|_| !stopping))
        });
        noted.unwrap_or_else(|| Err(io::ErrorKind::TimedOut.into()))
    }
}

/// Makes a file whose name begins so, and locks it.
fn mark(folder: &Path, name: &str, next: &AtomicU64) -> io::Result<(PathBuf, File)> {
    let mut taken = io::Error::from(io::ErrorKind::AlreadyExists);
    for _ in 0..NAMES {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let name = format!("{name}.{}-{number}", std::process::id());
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

impl Drop for Note {
    fn drop(&mut self) {
        lock(&self.under_way).notes.remove(&self.path);
        let (path, file) = (std::mem::take(&mut self.path), self.file.take());
        self.clerk.finish(move || {
            if let Err(error) = fs::remove_file(path) {
                debug!(%error, "the note of a load is gone already");
            }
            drop(file);
        });
    }
}

fn lock(under_way: &Mutex<UnderWay>) -> MutexGuard<'_, UnderWay> {
    under_way.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Name {
    /// Reads a whole name, which has what tells it from others of its process behind.
    fn parse(text: &str) -> Option<Name> {
        let digest = |text: &str| -> Option<Digest> { hex::decode(text).ok()?.try_into().ok() };
        let parts: Vec<_> = text.split('.').collect();
        let &[key, object, boot, generation, _process] = parts.as_slice() else {
            return None;
        };
        Some(Name {
            key: digest(key)?,
            object: match object {
                COMPILED => None,
                checksum => Some(digest(checksum)?),
            },
            boot: boot.to_owned(),
            generation: generation.parse().ok()?,
        })
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let object = self.object.map_or_else(|| COMPILED.to_owned(), hex::encode);
        let (key, boot) = (hex::encode(self.key), &self.boot);
        write!(f, "{key}.{object}.{boot}.{}", self.generation)
    }
}

/// Names this start of the machine. One that does not say is one machine that never starts anew.
fn boot() -> String {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mut boot = boot.trim().to_owned();
    boot.retain(|c| c.is_ascii_alphanumeric() || c == '-');
    boot.truncate(40);
    boot
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Digest = [7; 32];

    const LONG: Duration = Duration::from_secs(30);

    fn files(folder: &Path) -> usize {
        fs::read_dir(folder.join("loads")).unwrap().count()
    }

    /// Waits until what was dropped is gone.
    fn settle(loads: &Loads) {
        let desk = loads.desk.as_ref().unwrap();
        desk.clerk.within(LONG, || ()).unwrap();
    }

    /// What a process leaves that dies in this load.
    fn die_with(loads: Loads, object: Option<&Digest>) {
        let loading = loads.begin(&KEY, object).unwrap();
        // The note stays, and who ends unlocks it.
        let path = loading.0.as_ref().unwrap().path.clone();
        let copy = path.with_extension("kept");
        fs::hard_link(&path, &copy).unwrap();
        drop(loading);
        settle(&loads);
        fs::rename(copy, path).unwrap();
    }

    fn die(folder: &Path, object: Option<&Digest>) {
        die_with(Loads::open(Some(folder)), object);
    }

    #[test]
    fn processes_that_die_together_count_once() {
        let temp = tempfile::tempdir().unwrap();
        for times in 1..3 {
            let workers = [(); 4].map(|()| Loads::open(Some(temp.path())));
            for (worker, object) in workers.into_iter().zip([None, Some([1; 32]), None, None]) {
                die_with(worker, object.as_ref());
            }
            let loads = Loads::open(Some(temp.path()));
            assert_eq!(loads.objects().count(), 1);
            let refused = loads.begin(&KEY, None).err();
            assert_eq!(refused, (times > 1).then_some(Fatal { times }));
        }
    }

    #[test]
    fn what_the_machines_end_broke_off_is_no_death() {
        let temp = tempfile::tempdir().unwrap();
        let on = |boot: &str| Loads::open_on(Some(temp.path()), boot.to_owned());
        for object in [None, Some([1; 32])] {
            die_with(on("one"), object.as_ref());
        }
        assert!(on("one").check(&KEY).is_err());
        assert_eq!(on("two").objects().count(), 0);
        assert!(on("two").begin(&KEY, None).is_ok());
        // Another machine's may be alive, so they stay.
        assert!(on("one").check(&KEY).is_err());
    }

    #[test]
    fn a_folder_that_hangs_is_waited_for_once() {
        let temp = tempfile::tempdir().unwrap();
        let loads = Loads::open(Some(temp.path()));
        let (go, gone) = std::sync::mpsc::channel::<()>();
        let desk = loads.desk.as_ref().unwrap();
        desk.clerk.finish(move || {
            let _ = gone.recv();
        });
        for _ in 0..1000 {
            assert!(loads.begin(&KEY, None).unwrap().0.is_none());
        }
        drop(go);
        // When it answers, so does the record; and nothing stays of the load that was not waited for.
        while loads.begin(&KEY, None).unwrap().0.is_none() {
            std::thread::yield_now();
        }
        settle(&loads);
        assert_eq!(files(temp.path()), 0);
    }

    #[tokio::test]
    async fn a_load_that_an_orderly_end_breaks_off_is_no_death() {
        let temp = tempfile::tempdir().unwrap();
        let loads = Loads::open(Some(temp.path()));
        let one = loads.begin(&KEY, None).unwrap();
        loads.forgive(LONG).await;
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
        settle(&loads);
        settle(&other);
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
