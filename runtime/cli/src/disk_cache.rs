//! The folder on this machine in which workers keep compiled programs.

use std::{
    ffi::{OsStr, OsString},
    path::PathBuf,
};

use waystation_cache::config::{DISK_BYTES, Disk};

use crate::{error::Failure, size::parse_some_bytes};

/// Says: the user's folder for caches.
const AUTO: &str = "auto";

/// Its flags, for all that start workers.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DiskArgs {
    /// Folder on this machine for compiled programs, which other jobs here load then; auto: $XDG_CACHE_HOME/waystation
    /// [default: none]
    #[arg(long = "cache_disk_dir", value_name = "DIR|auto")]
    cache_disk_dir: Option<PathBuf>,
    /// What that folder may take; the programs used least recently leave it
    #[arg(long = "cache_disk_bytes", value_name = "SIZE", default_value_t = DISK_BYTES, value_parser = parse_some_bytes,
          hide_default_value = true)]
    cache_disk_bytes: u64,
}

impl DiskArgs {
    /// The folder that is meant, made absolute. It need not be there, nor of use: workers do without.
    ///
    /// # Errors
    /// [`Failure::usage`] when no folder can be meant.
    pub(crate) fn disk(&self) -> Result<Option<Disk>, Failure> {
        let variable = |name: &str| std::env::var_os(name);
        self.disk_in(variable)
    }

    fn disk_in(
        &self,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Option<Disk>, Failure> {
        let Some(told) = &self.cache_disk_dir else {
            return Ok(None);
        };
        let folder = if told == OsStr::new(AUTO) {
            // The XDG specification has relative paths ignored.
            let absolute = |name| {
                variable(name)
                    .map(PathBuf::from)
                    .filter(|path| path.is_absolute())
            };
            let caches = absolute("XDG_CACHE_HOME")
                .or_else(|| absolute("HOME").map(|home| home.join(".cache")))
                .ok_or_else(|| {
                    Failure::usage(
                        "--cache_disk_dir=auto needs XDG_CACHE_HOME or HOME: set one, or name a folder",
                    )
                })?;
            caches.join("waystation")
        } else {
            std::path::absolute(told).map_err(|error| {
                Failure::usage(format!(
                    "--cache_disk_dir={} cannot be used: {error}",
                    told.display()
                ))
            })?
        };
        if folder.exists() && !folder.is_dir() {
            return Err(Failure::usage(format!(
                "--cache_disk_dir {} is no directory",
                folder.display()
            )));
        }
        Ok(Some(Disk {
            bytes: self.cache_disk_bytes,
            ..Disk::new(folder)
        }))
    }
}

/// The flags that say the same to a worker.
pub(crate) fn flags(disk: &Disk) -> [OsString; 2] {
    let mut folder = OsString::from("--cache_disk_dir=");
    folder.push(&disk.folder);
    [folder, format!("--cache_disk_bytes={}", disk.bytes).into()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::USAGE;

    fn disk(told: Option<&str>, environment: &[(&str, &str)]) -> Result<Option<PathBuf>, Failure> {
        let args = DiskArgs {
            cache_disk_dir: told.map(PathBuf::from),
            cache_disk_bytes: 7,
        };
        let variable = |name: &str| {
            let found = environment.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| OsString::from(value))
        };
        let disk = args.disk_in(variable)?;
        assert!(disk.as_ref().is_none_or(|disk| disk.bytes == 7));
        Ok(disk.map(|disk| disk.folder))
    }

    #[test]
    fn the_folder_is_the_one_that_is_meant() {
        let home = ("HOME", "/home/u");
        assert_eq!(disk(None, &[home]).unwrap(), None);
        assert_eq!(disk(Some("/x/y"), &[]).unwrap(), Some("/x/y".into()));
        let here = std::env::current_dir().unwrap();
        assert_eq!(disk(Some("y"), &[]).unwrap(), Some(here.join("y")));
        let auto = |environment: &[_]| disk(Some("auto"), environment);
        assert_eq!(
            auto(&[home]).unwrap(),
            Some("/home/u/.cache/waystation".into())
        );
        assert_eq!(
            auto(&[home, ("XDG_CACHE_HOME", "/c")]).unwrap(),
            Some("/c/waystation".into())
        );
        assert_eq!(
            auto(&[home, ("XDG_CACHE_HOME", "c")]).unwrap(),
            Some("/home/u/.cache/waystation".into())
        );
        assert_eq!(auto(&[]).unwrap_err().status, USAGE);
        let file = tempfile::NamedTempFile::new().unwrap();
        let failure = disk(file.path().to_str(), &[]).unwrap_err();
        assert!(failure.message.contains("no directory"), "{failure}");
    }
}
