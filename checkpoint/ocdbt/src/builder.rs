//! Building a database: one version, from keys in order, written once.

mod log;
mod merge;
mod tree;

use std::sync::Arc;

use bytes::Bytes;

pub use log::NewFile;
pub use merge::{Merged, merge};

use crate::config::{Config, ManifestKind};
use crate::error::{Error, Result};
use crate::files::DataFile;
use crate::manifest::{MANIFEST_NAME, Manifest};
use crate::node::Value;
use crate::reference::Statistics;
use crate::version::Version;
use log::Log;
use tree::Tree;

/// Where a data file gets no more when it has this many bytes: what Orbax has on disks (2 GiB).
pub const TARGET_DATA_FILE_BYTES: u64 = 2 << 30;

/// Makes a database of one version: keys and values in, files out.
///
/// Values that are small enough go into the leaves; others, and the nodes, are appended to data files, as they are given,
/// without a copy. Values that are in a file already are referred to.
///
/// ```
/// use waystation_ocdbt::{Builder, Config};
///
/// # fn main() -> waystation_ocdbt::Result<()> {
/// let mut number = 0;
/// let mut random = move || { number += 1; [number; 16] }; // of a real random generator
/// let mut builder = Builder::new(Config::orbax(random()), random)?;
/// builder.put("w/.zarray".into(), "{}".into())?;
/// builder.put("w/0.0".into(), vec![7; 5000].into())?;
/// let built = builder.finish(1_700_000_000_000_000_000)?;
/// // First the data files, then, once they are durable, the manifest.
/// assert_eq!(built.files.len(), 1);
/// assert_eq!(built.files[0].file.path(), format!("d/{}", "02".repeat(16)));
/// assert_eq!(built.statistics.keys, 2);
/// assert!(built.manifest.starts_with(&[0x0c, 0xdb, 0x3a, 0x2a]));
/// # Ok(())
/// # }
/// ```
pub struct Builder {
    config: Config,
    log: Log,
    tree: Tree,
}

/// A database that is built.
#[derive(Debug, Clone)]
pub struct Built {
    /// The data files that are not taken yet ([`Builder::take_full_files`]). To be durable before the manifest is written.
    pub files: Vec<NewFile>,
    /// The content of [`MANIFEST_NAME`](Built::MANIFEST).
    pub manifest: Bytes,
    /// What the database has.
    pub statistics: Statistics,
    /// How many levels are below the root.
    pub height: u8,
}

impl Built {
    /// The path of the manifest.
    pub const MANIFEST: &str = MANIFEST_NAME;
}

impl Builder {
    /// A database without keys. `random` is asked for 16 random bytes for each data file.
    ///
    /// # Errors
    /// A configuration that the format does not allow, or of numbered manifests, which are for databases that change.
    pub fn new(config: Config, random: impl FnMut() -> [u8; 16] + Send + 'static) -> Result<Self> {
        config.check()?;
        if config.manifest_kind != ManifestKind::Single {
            return Err(Error::Numbered);
        }
        Ok(Self {
            tree: Tree::new(&config),
            log: Log::new(Box::new(random), TARGET_DATA_FILE_BYTES),
            config,
        })
    }

    /// Begins another data file when one has as many bytes as this.
    #[must_use]
    pub fn target_data_file_bytes(mut self, bytes: u64) -> Self {
        self.log.target_bytes(bytes);
        self
    }

    /// Adds a key, which must come after all before it.
    ///
    /// # Errors
    /// A key that does not, or is too long.
    pub fn put(&mut self, key: Bytes, value: Bytes) -> Result<()> {
        self.tree.check(&key)?;
        let value = if value.len() as u64 <= u64::from(self.config.max_inline_value_bytes) {
            Value::Inline(value)
        } else {
            Value::Stored(self.log.append(value)?)
        };
        self.tree.push(key, value, &mut self.log)
    }

    /// Adds a key whose value is in a file already, or inline whatever its size.
    ///
    /// # Errors
    /// As [`Builder::put`]; an inline value beyond what the format allows.
    pub fn put_value(&mut self, key: Bytes, value: Value) -> Result<()> {
        self.tree.check(&key)?;
        self.tree.push(key, value, &mut self.log)
    }

    /// The data files that get no more, which are then no longer held here.
    pub fn take_full_files(&mut self) -> Vec<NewFile> {
        self.log.take_full()
    }

    /// Writes what is left of the nodes, and the manifest.
    ///
    /// # Errors
    /// zstd fails, for want of memory.
    pub fn finish(mut self, commit_time_ns: u64) -> Result<Built> {
        let (root, height) = self.tree.finish(&mut self.log)?;
        let statistics = root
            .as_ref()
            .map(|root| root.statistics)
            .unwrap_or_default();
        let manifest = Manifest {
            config: self.config,
            versions: vec![Version {
                generation: 1,
                root,
                root_height: height,
                commit_time_ns,
            }],
            version_nodes: Vec::new(),
        };
        Ok(Built {
            files: self.log.finish(),
            manifest: manifest.encode()?,
            statistics,
            height,
        })
    }
}

/// A data file with an id, shared by the locations in it.
fn new_file(id: [u8; 16]) -> Arc<DataFile> {
    Arc::new(DataFile::random(id))
}
