//! The HLO of compiled programs as text, which XLA writes while it compiles: into a private folder, from where the texts
//! before and after optimization go into the cache entry, and everything into a bucket where an operator asks for dumps
//! (`--xla_dump_to`). On a hit the kept texts are what there is.

mod kept;
mod upload;

use std::{
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use bytes::Bytes;
use tempfile::TempDir;
use waystation_proto::tensorflow::{StatusProto, error::Code};

pub(crate) use self::kept::Kept;
use self::upload::Uploads;
use crate::{program::Dump, text};

/// XLA's ending of the text before all passes.
const BEFORE: &str = "before_optimizations.txt";
/// XLA's ending of the text after all passes; each compiler puts its name before it.
const AFTER: &str = "after_optimizations.txt";

/// What one compile writes at most that is still taken to a bucket, in bytes and in files.
const DUMP_BYTES: u64 = 1 << 30;
const DUMP_FILES: usize = 20_000;

/// The texts of larger programs are not kept: they are held whole a few times on their way into an entry, which bounds
/// them too, and should not keep the executable out of the cache.
const KEPT_BYTES: u64 = 256 << 20;

/// The worker's texts and dumps.
#[derive(Debug)]
pub(crate) struct Hlo {
    keep: bool,
    /// The plugin refuses to dump.
    off: AtomicBool,
    left_out: AtomicU64,
    /// The next module's number, as XLA counts modules in a process.
    number: AtomicU64,
    uploads: Uploads,
}

/// A compile whose dumps go to a folder of its own.
#[derive(Debug)]
pub(crate) struct Watched {
    folder: TempDir,
    /// The plugin's options, which say so.
    pub(crate) options: Bytes,
}

impl Hlo {
    /// `keep`: texts go into cache entries. `place` names this process below the locations of dumps.
    pub(crate) fn new(keep: bool, place: String) -> Hlo {
        Hlo {
            keep,
            off: AtomicBool::new(false),
            left_out: AtomicU64::new(0),
            number: AtomicU64::new(0),
            uploads: Uploads::new(place),
        }
    }

    /// Gets a folder ready for a compile with these options of the plugin; `None` when nothing is to be written, or
    /// nothing can.
    pub(crate) fn watch(&self, options: &[u8], dump: Option<&Dump>) -> Option<Watched> {
        if self.off.load(Relaxed) || !(self.keep || dump.is_some()) {
            return None;
        }
        let watched = text::folder().and_then(|folder| {
            let options = text::options(options, &folder, dump)?.into();
            Ok(Watched { folder, options })
        });
        watched
            .inspect_err(|error| tracing::warn!(error = error.message, "no HLO is kept"))
            .ok()
    }

    /// True when a compile may have failed because the plugin does not dump.
    pub(crate) fn may_be_to_blame(&self, error: &StatusProto) -> bool {
        error.code == Code::InvalidArgument as i32
            && error.message.contains("option")
            && error.message.contains("xla_dump_")
    }

    /// The plugin does not dump: it has failed so, and not without. No other compile is asked to.
    pub(crate) fn turn_off(&self, error: &StatusProto) {
        if !self.off.swap(true, Relaxed) {
            tracing::warn!(
                error = error.message,
                "the plugin does not dump HLO: none is kept, and dumps that are asked for do not come"
            );
        }
    }

    /// Programs whose texts were too large to be kept.
    pub(crate) fn left_out(&self) -> u64 {
        self.left_out.load(Relaxed)
    }

    /// What a compile has written: into the dump's bucket all of it, and what is to be kept comes back. Blocks.
    pub(crate) fn collect(&self, watched: &Watched, dump: Option<&Dump>) -> Option<Kept> {
        let files = list(watched.folder.path());
        if let Some(dump) = dump {
            self.write_all(&files, watched.folder.path(), dump);
        }
        if !self.keep {
            return None;
        }
        // Small helper modules are dumped too; the program is the largest.
        let main = files
            .iter()
            .filter(|file| file.rest.ends_with(AFTER))
            .max_by_key(|file| file.bytes)?;
        let name = module_name(&files, main)?;
        let wanted = |file: &&Dumped| {
            file.number == main.number
                && file
                    .suffix_of(name)
                    .is_some_and(|suffix| suffix == BEFORE || suffix.ends_with(AFTER))
        };
        let bytes: u64 = files.iter().filter(wanted).map(|file| file.bytes).sum();
        if bytes > KEPT_BYTES {
            if self.left_out.fetch_add(1, Relaxed) == 0 {
                tracing::warn!(
                    module = name,
                    bytes,
                    "the HLO of a program is too large to be kept with it; others' will not be named"
                );
            }
            return None;
        }
        let read = |file: &Dumped| {
            let text = std::fs::read(watched.folder.path().join(&file.name)).ok()?;
            Some((
                file.suffix_of(name)?.to_owned(),
                String::from_utf8(text).ok()?,
            ))
        };
        let texts: Vec<_> = files.iter().filter(wanted).filter_map(read).collect();
        Kept::new(&texts)
    }

    /// Takes a whole folder into a dump's bucket, the modules numbered as this process's.
    fn write_all(&self, files: &[Dumped], folder: &Path, dump: &Dump) {
        let sum: u64 = files.iter().map(|file| file.bytes).sum();
        if sum > DUMP_BYTES || files.len() >= DUMP_FILES {
            tracing::warn!(
                files = files.len(),
                bytes = sum,
                "a program's dumps are too many; they are left out"
            );
            return;
        }
        let mut numbers: Vec<(u64, u64)> = Vec::new();
        let mut objects = Vec::with_capacity(files.len());
        for file in files {
            let known = numbers.iter().find(|(theirs, _)| *theirs == file.number);
            let number = if let Some((_, ours)) = known {
                *ours
            } else {
                let ours = self.number.fetch_add(1, Relaxed);
                numbers.push((file.number, ours));
                ours
            };
            match std::fs::read(folder.join(&file.name)) {
                Ok(bytes) => objects.push((object(number, &file.rest), Bytes::from(bytes))),
                Err(error) => tracing::warn!(file = file.name, %error, "a dump cannot be read"),
            }
        }
        self.uploads.send(&dump.to, objects);
    }

    /// What a hit leaves in a dump's bucket: the kept texts under the request's name for the module, and a line that says
    /// why there is no more. Blocks.
    pub(crate) fn write_hit(&self, dump: &Dump, module: &str, key: &str, kept: Option<&Kept>) {
        let number = self.number.fetch_add(1, Relaxed);
        let module = file_name(module);
        let texts = kept.map(Kept::texts).unwrap_or_default();
        let what = if texts.is_empty() {
            "no HLO was kept with it"
        } else {
            "the HLO that was kept with it is here, other dumps come from compiles only"
        };
        let line = format!(
            "module_{number:04}.{module} was not compiled, its executable came from the cache under {key}: {what}\n"
        );
        let mut objects = vec![(
            object(number, &format!("{module}.cache_hit.txt")),
            Bytes::from(line),
        )];
        objects.extend(texts.into_iter().map(|(suffix, text)| {
            (
                object(number, &format!("{module}.{suffix}")),
                Bytes::from(text),
            )
        }));
        self.uploads.send(&dump.to, objects);
    }

    /// Waits for the uploads, at most so long. The rest is given up.
    pub(crate) async fn finish(&self, deadline: Duration) {
        self.uploads.finish(deadline).await;
    }
}

/// A file that XLA has written: `module_NUMBER.REST`.
#[derive(Debug, PartialEq, Eq)]
struct Dumped {
    name: String,
    number: u64,
    rest: String,
    bytes: u64,
}

impl Dumped {
    /// Reads a file's name.
    fn of(name: &str, bytes: u64) -> Option<Dumped> {
        let (number, rest) = name.strip_prefix("module_")?.split_once('.')?;
        Some(Dumped {
            name: name.to_owned(),
            number: number.parse().ok()?,
            rest: rest.to_owned(),
            bytes,
        })
    }

    /// What stands behind the module's name.
    fn suffix_of(&self, module: &str) -> Option<&str> {
        self.rest.strip_prefix(module)?.strip_prefix('.')
    }
}

/// The files in a folder that have such a name, in order.
fn list(folder: &Path) -> Vec<Dumped> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut files: Vec<_> = entries
        .take(DUMP_FILES)
        .filter_map(|entry| {
            let bytes = entry
                .metadata()
                .ok()
                .filter(std::fs::Metadata::is_file)?
                .len();
            Dumped::of(entry.file_name().to_str()?, bytes)
        })
        .collect();
    files.sort_by(|a, b| (a.number, &a.rest).cmp(&(b.number, &b.rest)));
    files
}

/// The name of a file's module: what its siblings' names have before "before_optimizations". Names may have dots.
fn module_name<'a>(files: &'a [Dumped], of: &Dumped) -> Option<&'a str> {
    let siblings = files.iter().filter(|file| file.number == of.number);
    let mut names = siblings.filter_map(|file| file.rest.strip_suffix(BEFORE)?.strip_suffix('.'));
    names.find(|name| of.suffix_of(name).is_some())
}

fn object(number: u64, rest: &str) -> String {
    format!("module_{number:04}.{rest}")
}

/// A module's name as XLA makes file names of it, and short enough for one.
fn file_name(module: &str) -> String {
    let plain = |c: char| {
        if c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.') {
            c
        } else {
            '_'
        }
    };
    module.chars().take(150).map(plain).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(folder: &Path, files: &[(&str, &str)]) {
        for (name, text) in files {
            std::fs::write(folder.join(name), text).unwrap();
        }
    }

    const FILES: [(&str, &str); 7] = [
        ("module_0006.jit_f.1.before_optimizations.txt", "before"),
        (
            "module_0006.jit_f.1.cpu_after_optimizations.txt",
            "after passes",
        ),
        (
            "module_0006.jit_f.1.cpu_after_optimizations-buffer-assignment.txt",
            "buffers",
        ),
        ("module_0006.jit_f.1.obj-file.x.o", "\u{7f}ELF"),
        ("module_0007.helper.before_optimizations.txt", "b"),
        ("module_0007.helper.cpu_after_optimizations.txt", "a"),
        ("something.else", "x"),
    ];

    fn watched() -> Watched {
        let folder = text::folder().unwrap();
        write(folder.path(), &FILES);
        Watched {
            folder,
            options: Bytes::new(),
        }
    }

    #[test]
    fn the_texts_of_the_program_itself_are_kept() {
        let hlo = Hlo::new(true, "here".to_owned());
        let kept = hlo.collect(&watched(), None).expect("texts");
        let texts = [
            ("before_optimizations.txt", "before"),
            ("cpu_after_optimizations.txt", "after passes"),
        ];
        assert_eq!(
            kept.texts(),
            texts.map(|(suffix, text)| (suffix.to_owned(), text.to_owned()))
        );
        assert_eq!(kept.optimized().as_deref(), Some("after passes"));
        let not_kept = Hlo::new(false, "here".to_owned());
        assert!(not_kept.collect(&watched(), None).is_none());
        assert!(not_kept.watch(&[], None).is_none());
    }

    #[tokio::test]
    async fn a_compile_and_a_hit_leave_their_dumps() {
        let hlo = Hlo::new(true, "here".to_owned());
        let temp = tempfile::tempdir().unwrap();
        let dump = Dump {
            to: format!("file://{}/d/", temp.path().display()),
            flags: Vec::new(),
        };
        let kept = hlo.collect(&watched(), Some(&dump)).expect("texts");
        hlo.write_hit(&dump, "jit/g", "a key", Some(&kept));
        hlo.write_hit(&dump, "jit_h", "another", None);
        hlo.finish(Duration::from_secs(30)).await;
        let folder = temp.path().join("d/here");
        let mut names: Vec<_> = std::fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(
            names,
            [
                "module_0000.jit_f.1.before_optimizations.txt",
                "module_0000.jit_f.1.cpu_after_optimizations-buffer-assignment.txt",
                "module_0000.jit_f.1.cpu_after_optimizations.txt",
                "module_0000.jit_f.1.obj-file.x.o",
                "module_0001.helper.before_optimizations.txt",
                "module_0001.helper.cpu_after_optimizations.txt",
                "module_0002.jit_g.before_optimizations.txt",
                "module_0002.jit_g.cache_hit.txt",
                "module_0002.jit_g.cpu_after_optimizations.txt",
                "module_0003.jit_h.cache_hit.txt",
            ]
        );
        let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
        assert_eq!(
            read("module_0002.jit_g.cpu_after_optimizations.txt"),
            "after passes"
        );
        assert!(read("module_0002.jit_g.cache_hit.txt").contains("under a key"));
        assert!(read("module_0003.jit_h.cache_hit.txt").contains("no HLO was kept"));
    }

    #[test]
    fn texts_that_are_too_large_are_left_out_and_counted() {
        let hlo = Hlo::new(true, "here".to_owned());
        let watched = watched();
        let large = std::fs::File::options()
            .write(true)
            .open(watched.folder.path().join(FILES[1].0))
            .unwrap();
        // Zeros, that take no room.
        large.set_len(KEPT_BYTES - 5).unwrap();
        assert_eq!(FILES[0].1.len(), 6);
        for count in 1..3 {
            assert_eq!(hlo.collect(&watched, None), None);
            assert_eq!(hlo.left_out(), count);
        }
        large.set_len(1000).unwrap();
        assert!(hlo.collect(&watched, None).is_some());
        assert_eq!(hlo.left_out(), 2);
    }

    #[test]
    fn a_plugin_that_does_not_dump_is_asked_once() {
        let hlo = Hlo::new(true, "here".to_owned());
        let error = crate::status::invalid("No such compile option: 'xla_dump_to'");
        assert!(!hlo.may_be_to_blame(&crate::status::invalid("No such compile option: 'xla_a'")));
        assert!(hlo.may_be_to_blame(&error));
        assert!(hlo.watch(&[], None).is_some());
        hlo.turn_off(&error);
        assert!(hlo.watch(&[], None).is_none());
    }
}
