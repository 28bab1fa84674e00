//! How a worker shares compiled programs with others: the flags, and what it makes of them.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use waystation_cache::{Config, Mode, sign::SigningKey};

use crate::{
    duration::{parse_duration, show_duration},
    error::{Failure, chain},
    size::parse_bytes,
};

/// How a worker uses its cache.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct SharingArgs {
    /// What is done with the bucket: read-write, read-only, or off, which compiles every program
    #[arg(
        long = "cache_mode",
        value_name = "MODE",
        default_value = "read-write",
        hide_possible_values = true,
        value_enum
    )]
    pub(crate) cache_mode: CacheMode,
    /// File with the secret or Ed25519 key that cached programs are signed with and have to be [default: none]
    #[arg(long = "cache_signing_key", value_name = "FILE")]
    pub(crate) cache_signing_key: Option<PathBuf>,
    /// How long to wait for a program that another job compiles; 0 waits for none [default: three times its last compile, or 30s]
    #[arg(long = "cache_wait", value_name = "TIME", value_parser = parse_duration)]
    pub(crate) cache_wait: Option<Duration>,
    /// Programs that compile in less time are not published [default: 0]
    #[arg(long = "cache_min_compile_time", value_name = "TIME", value_parser = parse_duration)]
    pub(crate) cache_min_compile_time: Option<Duration>,
    /// Smaller entries are not published [default: 0]
    #[arg(long = "cache_min_entry_size", value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) cache_min_entry_size: Option<u64>,
    /// Larger entries are not published [default: 4GiB]
    #[arg(long = "cache_max_entry_size", value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) cache_max_entry_size: Option<u64>,
    /// Programs kept in a worker's memory, in bytes [default: 512MiB]
    #[arg(long = "cache_memory_size", value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) cache_memory_size: Option<u64>,
    /// Programs kept in a worker's memory, in number [default: 65536]
    #[arg(long = "cache_memory_entries", value_name = "N")]
    pub(crate) cache_memory_entries: Option<usize>,
    /// Folder for notes that outlive a worker: which cached program it was loading when it died
    #[arg(long = "state_dir", value_name = "FOLDER")]
    pub(crate) state_dir: Option<PathBuf>,
}

/// What is done with the bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum CacheMode {
    /// Programs are read and published.
    #[default]
    ReadWrite,
    /// Programs are read.
    ReadOnly,
    /// Every program is compiled.
    Off,
}

impl CacheMode {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            CacheMode::ReadWrite => "read-write",
            CacheMode::ReadOnly => "read-only",
            CacheMode::Off => "off",
        }
    }
}

impl SharingArgs {
    /// The signing key, if one is given.
    ///
    /// # Errors
    /// [`Failure::usage`] for a file without a key.
    pub(crate) fn signing_key(&self) -> Result<Option<SigningKey>, Failure> {
        read_signing_key(self.cache_signing_key.as_deref())
    }

    /// `config` with what the flags say. `state_dir`: where notes are kept when no flag says so.
    ///
    /// # Errors
    /// As [`SharingArgs::signing_key`].
    pub(crate) fn apply(
        &self,
        config: Config,
        state_dir: Option<PathBuf>,
    ) -> Result<Config, Failure> {
        Ok(Config {
            mode: match self.cache_mode {
                CacheMode::ReadWrite => Mode::ReadWrite,
                CacheMode::ReadOnly => Mode::ReadOnly,
                CacheMode::Off => Mode::Off,
            },
            signing: self.signing_key()?.map(Arc::new),
            claim_wait: self.cache_wait,
            min_compile_time: self.cache_min_compile_time.unwrap_or_default(),
            min_entry_bytes: self.cache_min_entry_size.unwrap_or_default(),
            max_entry_bytes: self.cache_max_entry_size.unwrap_or(config.max_entry_bytes),
            memory_bytes: self.cache_memory_size.unwrap_or(config.memory_bytes),
            memory_entries: self.cache_memory_entries.unwrap_or(config.memory_entries),
            state_folder: self.state_dir.clone().or(state_dir),
            ..config
        })
    }

    /// These flags for a worker's command line. `state_dir` as in [`SharingArgs::apply`].
    pub(crate) fn flags(&self, state_dir: PathBuf) -> Vec<OsString> {
        let flag = |name: &str, value: OsString| {
            let mut flag = OsString::from(format!("--{name}="));
            flag.push(value);
            flag
        };
        let time = |time: Duration| show_duration(time).into();
        let mut flags = vec![flag("cache_mode", self.cache_mode.as_str().into())];
        let file = self.cache_signing_key.clone();
        let optional = [
            ("cache_signing_key", file.map(PathBuf::into_os_string)),
            ("cache_wait", self.cache_wait.map(time)),
            (
                "cache_min_compile_time",
                self.cache_min_compile_time.map(time),
            ),
            ("cache_min_entry_size", number(self.cache_min_entry_size)),
            ("cache_max_entry_size", number(self.cache_max_entry_size)),
            ("cache_memory_size", number(self.cache_memory_size)),
            ("cache_memory_entries", number(self.cache_memory_entries)),
        ];
        let given = optional.into_iter();
        flags.extend(given.filter_map(|(name, value)| Some(flag(name, value?))));
        let state_dir = self.state_dir.clone().unwrap_or(state_dir);
        flags.push(flag("state_dir", state_dir.into_os_string()));
        flags
    }
}

/// The key in the file of `--cache_signing_key`, if one is given.
///
/// # Errors
/// [`Failure::usage`] for a file without a key.
pub(crate) fn read_signing_key(file: Option<&Path>) -> Result<Option<SigningKey>, Failure> {
    let Some(file) = file else {
        return Ok(None);
    };
    let key = SigningKey::read(file).map_err(|error| {
        let (file, why) = (file.display(), chain(&error));
        Failure::usage(format!("--cache_signing_key={file}: {why}"))
    })?;
    Ok(Some(key))
}

fn number(value: Option<impl ToString>) -> Option<OsString> {
    value.map(|value| value.to_string().into())
}

/// Where a program keeps such notes for its user, by the system's convention. `None`: the user has no home.
pub(crate) fn state_dir() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from);
    let is_good = |path: &PathBuf| path.is_absolute();
    let state = variable("XDG_STATE_HOME").filter(is_good);
    let state = state.or_else(|| Some(variable("HOME").filter(is_good)?.join(".local/state")));
    state.map(|state| state.join("waystation"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{self, Command};
    use crate::error::USAGE;

    fn worker(flags: &[OsString]) -> SharingArgs {
        let mut line: Vec<OsString> = ["w", "worker", "--resource_manager_address=h:1"]
            .map(OsString::from)
            .into();
        line.extend_from_slice(flags);
        match args::parse(line).unwrap().command {
            Command::Worker(args) => args.cache.sharing,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_worker_understands_what_run_hands_on() {
        let folder = tempfile::tempdir().unwrap();
        let key = folder.path().join("key");
        std::fs::write(&key, [7; 32]).unwrap();
        let given = SharingArgs {
            cache_mode: CacheMode::ReadOnly,
            cache_signing_key: Some(key),
            cache_wait: Some(Duration::from_millis(1500)),
            cache_min_compile_time: Some(Duration::from_secs(2)),
            cache_min_entry_size: Some(3),
            cache_max_entry_size: Some(4),
            cache_memory_size: Some(5),
            cache_memory_entries: Some(6),
            state_dir: Some("/s".into()),
        };
        let flags = given.flags("/other".into());
        let config = worker(&flags).apply(Config::default(), None).unwrap();
        assert_eq!(config.mode, Mode::ReadOnly);
        assert!(config.signing.is_some_and(|key| key.signs()));
        assert_eq!(config.claim_wait, Some(Duration::from_millis(1500)));
        assert_eq!(config.min_compile_time, Duration::from_secs(2));
        assert_eq!((config.min_entry_bytes, config.max_entry_bytes), (3, 4));
        assert_eq!((config.memory_bytes, config.memory_entries), (5, 6));
        assert_eq!(config.state_folder, Some("/s".into()));
    }

    #[test]
    fn without_flags_it_is_as_the_cache_would_have_it() {
        let ours = worker(&SharingArgs::default().flags("/s".into()));
        let theirs = Config::default();
        let config = ours.apply(Config::default(), None).unwrap();
        assert_eq!((config.mode, config.claim_wait), (theirs.mode, None));
        assert_eq!(config.max_entry_bytes, theirs.max_entry_bytes);
        assert_eq!(config.memory_bytes, theirs.memory_bytes);
        assert_eq!(config.state_folder, Some("/s".into()));
    }

    #[test]
    fn a_file_without_a_key_is_the_users_to_mend() {
        let folder = tempfile::tempdir().unwrap();
        let short = folder.path().join("short");
        std::fs::write(&short, b"x").unwrap();
        for file in [short, folder.path().join("absent")] {
            let args = SharingArgs {
                cache_signing_key: Some(file.clone()),
                ..SharingArgs::default()
            };
            let failure = args.signing_key().unwrap_err();
            assert_eq!(failure.status, USAGE);
            assert!(failure.message.contains(&file.display().to_string()));
            assert!(!failure.message.contains('\n'), "{failure}");
        }
    }
}
