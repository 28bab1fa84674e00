//! `XLA_FLAGS` and its like may name a file that holds the flags. XLA reads such a file when it pleases, in each process
//! anew: after an edit, a process that compiles would obey other flags than those in the keys of what it compiles. So a
//! worker's process reads the file once, at its start, and has the flags themselves in its environment from then on, as
//! have its children.

use std::{
    ffi::{OsStr, OsString},
    fs::File,
    io::{self, Read as _},
    os::unix::ffi::OsStringExt as _,
};

use waystation_cache::platform;

use crate::{
    anew::{self, Change},
    error::Failure,
};

/// The system lets no variable be longer than 128 KiB, with its name.
const MOST_BYTES: usize = 120 << 10;

/// Starts this process anew where a variable names a file, as [`anew::with`] does.
///
/// # Errors
/// When a file cannot be a variable's value, or the binary cannot be started again.
pub(crate) fn take_in() -> Result<(), Failure> {
    anew::with(changes(std::env::var_os::<&'static str>)?)
}

/// What the variables that name files are to be.
///
/// # Errors
/// [`Failure::usage`] for a file that no variable can hold.
pub(crate) fn changes(
    variable: impl Fn(&'static str) -> Option<OsString>,
) -> Result<Vec<Change>, Failure> {
    let mut changes = Vec::new();
    for name in platform::FLAG_LISTS {
        let Some(value) = variable(name) else {
            continue;
        };
        if !platform::names_a_file(&value.to_string_lossy()) {
            continue;
        }
        let unfit = |what: &str| {
            let value = value.display();
            Failure::usage(format!(
                "{name} names the file {value}, which {what}: give the flags in the variable"
            ))
        };
        let flags = match read(&value) {
            Ok(text) if text.len() > MOST_BYTES => {
                return Err(unfit("is longer than 120 KiB"));
            }
            Ok(text) if text.contains(&0) => return Err(unfit("is no text")),
            Ok(text) => text.trim_ascii().to_vec(),
            // XLA does without as well; but that must not change when the file comes.
            Err(error) => {
                tracing::warn!(variable = name, file = %value.display(), %error, "the file of flags cannot be read; there are no flags");
                Vec::new()
            }
        };
        // XLA reads words that are flags, up to the first that is none.
        let flags = flags.starts_with(b"-").then(|| OsString::from_vec(flags));
        changes.push((name, flags));
    }
    Ok(changes)
}

fn read(file: &OsStr) -> io::Result<Vec<u8>> {
    let file = File::open(file)?;
    let mut text = Vec::new();
    file.take(MOST_BYTES as u64 + 1).read_to_end(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(value: &str) -> Result<Vec<Change>, Failure> {
        changes(|name| (name == "XLA_FLAGS").then(|| value.into()))
    }

    #[test]
    fn flags_stay_and_a_file_is_what_it_holds() {
        for flags in ["", "  ", "--a=1", " --a"] {
            assert_eq!(of(flags), Ok(Vec::new()), "{flags:?}");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("flags");
        let name = path.to_str().unwrap();
        assert_eq!(of(name), Ok(vec![("XLA_FLAGS", None)]));
        for (text, flags) in [("\n--a=1\n--b\n", Some("--a=1\n--b")), ("# --a", None)] {
            std::fs::write(&path, text).unwrap();
            let expected = vec![("XLA_FLAGS", flags.map(OsString::from))];
            assert_eq!(of(name), Ok(expected), "{text:?}");
        }
        for text in ["--a\0".to_owned(), "-".repeat(MOST_BYTES + 1)] {
            std::fs::write(&path, text).unwrap();
            assert_eq!(of(name).unwrap_err().status, crate::error::USAGE);
        }
    }
}
