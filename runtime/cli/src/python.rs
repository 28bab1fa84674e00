//! Which Python interpreter's packages hold the PJRT plugin.

use std::{
    env,
    ffi::OsStr,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

/// The interpreter to look for plugins with, when none was named: that of the command to run, else the active virtual
/// environment's, else `./.venv`'s, else `python3`. `command`: the first word of the command.
pub(crate) fn choose(command: Option<&OsStr>) -> Option<PathBuf> {
    let of_command = command
        .filter(|word| is_python(word))
        .and_then(find_program);
    of_command
        .or_else(|| {
            env::var_os("VIRTUAL_ENV")
                .map(|folder| Path::new(&folder).join("bin/python"))
                .filter(|path| is_program(path))
        })
        .or_else(|| Some(PathBuf::from(".venv/bin/python")).filter(|path| is_program(path)))
        .or_else(|| find_program(OsStr::new("python3")))
}

/// Whether a program's name is an interpreter's: `python`, `python3`, `/x/bin/python3.13`.
fn is_python(word: &OsStr) -> bool {
    let name = Path::new(word).file_name().and_then(OsStr::to_str);
    let version = name.and_then(|name| name.strip_prefix("python"));
    version.is_some_and(|version| version.chars().all(|c| c.is_ascii_digit() || c == '.'))
}

/// The program that a shell would run for `word`. The path is not resolved further: a virtual environment is found by the
/// path of its link to the interpreter.
pub(crate) fn find_program(word: &OsStr) -> Option<PathBuf> {
    if word.is_empty() {
        return None;
    }
    let path = Path::new(word);
    if path.components().count() > 1 || path.is_absolute() {
        return Some(path.to_owned()).filter(|path| is_program(path));
    }
    let folders = env::var_os("PATH")?;
    env::split_paths(&folders)
        .map(|folder| folder.join(path))
        .find(|path| is_program(path))
}

fn is_program(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpreters_are_known_by_name() {
        for word in [
            "python",
            "python3",
            "python3.13",
            "/opt/v/bin/python3",
            ".venv/bin/python",
        ] {
            assert!(is_python(OsStr::new(word)), "{word}");
        }
        for word in [
            "pythonic",
            "ipython",
            "bash",
            "/python/run",
            "python3-config",
            "",
        ] {
            assert!(!is_python(OsStr::new(word)), "{word}");
        }
    }

    #[test]
    fn programs_are_found_as_a_shell_finds_them() {
        assert!(find_program(OsStr::new("sh")).unwrap().is_absolute());
        assert_eq!(
            find_program(OsStr::new("/bin/sh")),
            Some(PathBuf::from("/bin/sh"))
        );
        assert_eq!(find_program(OsStr::new("no-such-program-here")), None);
        assert_eq!(
            find_program(OsStr::new("/etc/passwd")),
            None,
            "not executable"
        );
        assert_eq!(find_program(OsStr::new("/bin")), None, "a folder");
        assert_eq!(find_program(OsStr::new("")), None);
    }
}
