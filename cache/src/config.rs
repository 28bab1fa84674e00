//! Settings of a cache. Only the command line reads flags and the environment; this is what it fills in.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use object_store::path::Path;
use waystation_lifecycle::bucket::Bucket;

use crate::envelope::Limits;
use crate::history::History;
use crate::sign::SigningKey;

/// Decoded entries kept in memory, in bytes. A large model's executable is tens of megabytes; this holds a job's worth.
pub const MEMORY_BYTES: u64 = 512 << 20;

/// Bytes that the folder on disk may take. A folder of the user's, on a disk with other things: small beside such disks,
/// and hundreds of large programs.
pub const DISK_BYTES: u64 = 10 << 30;

/// Time for one look-up on disk. A disk that takes longer hangs; a 1 GB executable is read within it at 200 MB/s.
pub const DISK_READ_DEADLINE: Duration = Duration::from_secs(5);

/// Time for one look-up in the bucket, body included. A compile that takes less is cheaper than a longer wait, and a
/// 1 GB executable arrives within it at 50 MB/s.
pub const READ_DEADLINE: Duration = Duration::from_secs(20);

/// Longest time for one attempt to write an entry.
pub const WRITE_DEADLINE: Duration = Duration::from_secs(120);

/// Time for one attempt to write a small entry; a larger one has a second more for each [`WRITTEN_PER_SECOND`] bytes.
/// [`UPLOADS`] writes that a bucket never answers hold up all others for as long, and most entries are small.
pub const WRITE_DEADLINE_SMALL: Duration = Duration::from_secs(20);

/// A bucket that takes less in a second of one write is as good as silent.
pub const WRITTEN_PER_SECOND: u64 = 1 << 20;

/// Attempts to write an entry before it is given up.
pub const WRITE_ATTEMPTS: u32 = 4;

/// First pause after a failed write or read; each further one is twice as long, up to [`BACKOFF_MAX`].
pub const BACKOFF: Duration = Duration::from_secs(1);

/// Longest pause after failures. The bucket is tried again at least this often, so it recovers by itself.
pub const BACKOFF_MAX: Duration = Duration::from_secs(30);

/// Entries that may wait for publication. Compiles are slower than uploads, so a fuller queue means a bucket in
/// trouble, and further entries are dropped (and counted) instead of being hoarded.
pub const QUEUE_ENTRIES: usize = 256;

/// Executable bytes that may wait for publication.
pub const QUEUE_BYTES: u64 = 1 << 30;

/// Entries sealed and written at the same time.
pub const UPLOADS: usize = 4;

/// How long the entry of a program that another process compiles is waited for, where nothing is known of its compile.
pub const CLAIM_WAIT: Duration = Duration::from_secs(30);

/// Decoded entries kept in memory, in number.
pub const MEMORY_ENTRIES: usize = 65_536;

/// How long an entry lives.
pub const TTL: Duration = Duration::from_secs(30 * 24 * 3600);

/// How an entry that is used outlives its age.
#[derive(Debug, Clone, Default)]
pub enum Renewal {
    /// It does not.
    Never,
    /// It is published again in another slot, which takes the right to create.
    #[default]
    Publish,
    /// It is marked as used.
    Touch(Arc<dyn Touch>),
}

/// Marks an object as used now, for stores whose rule goes by that.
#[async_trait]
pub trait Touch: std::fmt::Debug + Send + Sync + 'static {
    /// Marks it. One attempt, in bounded time.
    ///
    /// # Errors
    /// Where it is not known to have happened.
    async fn touch(&self, path: &Path) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;
}

/// What a cache does with the tiers behind memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mode {
    /// Reads them, and publishes what it compiles.
    #[default]
    ReadWrite,
    /// Reads them and writes nothing: neither entries nor claims.
    ReadOnly,
    /// Every program is compiled; nothing is kept, in memory neither.
    Off,
}

/// A folder on this machine that keeps entries between processes.
#[derive(Debug, Clone)]
pub struct Disk {
    /// The folder; made where it is missing. Any number of processes may share it.
    pub folder: PathBuf,
    /// Bound of what all of them together keep in it, in bytes of entries.
    pub bytes: u64,
    /// See [`DISK_READ_DEADLINE`].
    pub read_deadline: Duration,
}

impl Disk {
    /// A folder with the usual limits.
    pub fn new(folder: impl Into<PathBuf>) -> Disk {
        Disk {
            folder: folder.into(),
            bytes: DISK_BYTES,
            read_deadline: DISK_READ_DEADLINE,
        }
    }
}

/// How a cache behaves. Take [`Config::default`] and change what differs.
#[derive(Debug, Clone)]
pub struct Config {
    /// The bucket. `None` and `memory://` both mean: this process's memory and nothing else.
    pub location: Option<Bucket>,
    /// What is done with it.
    pub mode: Mode,
    /// What entries are signed with, and have to be. A key that only checks makes a cache that only reads.
    pub signing: Option<Arc<SigningKey>>,
    /// Where it is noted which entries a process has not survived the loading of. `None`: nowhere.
    pub state_folder: Option<PathBuf>,
    /// Whether bad objects that are in a new entry's way are removed, where the bucket grants that.
    pub remove_bad: bool,
    /// How long an entry lives in the bucket, by the bucket's own rule.
    pub ttl: Duration,
    /// What happens to an entry that is used when it has reached half that age.
    pub renewal: Renewal,
    /// Bound of the memory tier, in bytes of decoded entries. 0 keeps nothing.
    pub memory_bytes: u64,
    /// Bound of the memory tier, in entries.
    pub memory_entries: usize,
    /// How long the entry of a program that another process has claimed is waited for. `None`: three times the last
    /// compile of the program that this process knows of, and [`CLAIM_WAIT`] where it knows of none. Zero: not at all,
    /// and no claims are made.
    pub claim_wait: Option<Duration>,
    /// Programs that take less to compile are not published.
    pub min_compile_time: Duration,
    /// Entries of fewer bytes, as stored, are not published.
    pub min_entry_bytes: u64,
    /// Entries of more bytes, as stored, are not published. What others have published is read up to
    /// [`Limits::object`].
    pub max_entry_bytes: u64,
    /// The folder between memory and the bucket. `None`: there is none.
    pub disk: Option<Disk>,
    /// See [`READ_DEADLINE`].
    pub read_deadline: Duration,
    /// Longest time for one attempt to write an entry in the bucket; see [`WRITE_DEADLINE_SMALL`] for less.
    pub write_deadline: Duration,
    /// See [`WRITE_ATTEMPTS`]; at least one is made.
    pub write_attempts: u32,
    /// See [`BACKOFF`].
    pub backoff: Duration,
    /// See [`BACKOFF_MAX`].
    pub backoff_max: Duration,
    /// See [`QUEUE_ENTRIES`].
    pub queue_entries: usize,
    /// See [`QUEUE_BYTES`].
    pub queue_bytes: u64,
    /// See [`UPLOADS`]; at least one.
    pub uploads: usize,
    /// What an entry may hold at most, on both ways.
    pub limits: Limits,
    /// Entries keep XLA's text of the program before and after optimization, from which program text and dumps come on
    /// hits.
    pub keep_hlo_text: bool,
    /// Where it is noted what each key was made of, so that a miss can be explained; see [`crate::history`].
    pub history: Option<Arc<dyn History>>,
    /// Who writes, as noted in each entry for people to read: host and process, say. Cut at 256 bytes.
    pub writer: String,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            location: None,
            mode: Mode::default(),
            signing: None,
            state_folder: None,
            remove_bad: true,
            ttl: TTL,
            renewal: Renewal::default(),
            memory_bytes: MEMORY_BYTES,
            memory_entries: MEMORY_ENTRIES,
            claim_wait: None,
            min_compile_time: Duration::ZERO,
            min_entry_bytes: 0,
            max_entry_bytes: Limits::default().object,
            disk: None,
            read_deadline: READ_DEADLINE,
            write_deadline: WRITE_DEADLINE,
            write_attempts: WRITE_ATTEMPTS,
            backoff: BACKOFF,
            backoff_max: BACKOFF_MAX,
            queue_entries: QUEUE_ENTRIES,
            queue_bytes: QUEUE_BYTES,
            uploads: UPLOADS,
            limits: Limits::default(),
            keep_hlo_text: true,
            history: None,
            writer: waystation_proto::BUILD_ID.to_owned(),
        }
    }
}
