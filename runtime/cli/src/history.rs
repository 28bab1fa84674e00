//! `--cache_history`: where workers note what the keys of the compile cache were made of.

use std::{ffi::OsString, path::PathBuf};

/// The flag's word for no history.
const NONE: &str = "none";

/// The file that the flag names, or the user's own: `waystation-history` in the folder for caches, beside that of executables. None: nowhere.
pub(crate) fn file(flag: Option<PathBuf>) -> Option<PathBuf> {
    choose(flag, |name| std::env::var_os(name))
}

fn choose(flag: Option<PathBuf>, variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    if let Some(flag) = flag {
        return (flag.as_os_str() != NONE).then_some(flag);
    }
    let folder = |name| variable(name).map(PathBuf::from);
    // A relative folder there is to be ignored, by its specification.
    let caches = folder("XDG_CACHE_HOME").filter(|folder| folder.is_absolute());
    let caches = caches.or_else(|| Some(folder("HOME")?.join(".cache")))?;
    Some(caches.join("waystation-history")).filter(|file| file.is_absolute())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_flag_wins_over_the_users_folders() {
        let variables = |xdg: Option<&'static str>, home: Option<&'static str>| {
            move |name: &str| match name {
                "XDG_CACHE_HOME" => xdg.map(OsString::from),
                "HOME" => home.map(OsString::from),
                _ => None,
            }
        };
        let both = || variables(Some("/x"), Some("/h"));
        assert_eq!(choose(Some("f".into()), both()), Some("f".into()));
        assert_eq!(choose(Some("none".into()), both()), None);
        assert_eq!(choose(None, both()), Some("/x/waystation-history".into()));
        assert_eq!(
            choose(None, variables(Some("x"), Some("/h"))),
            Some("/h/.cache/waystation-history".into())
        );
        assert_eq!(choose(None, variables(None, None)), None);
    }
}
