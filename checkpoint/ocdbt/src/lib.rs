//! OCDBT, the key-value format in which TensorStore, and Orbax by default, keep arrays: a B+tree in a few files. Bytes only:
//! nothing here knows of buckets, arrays or threads.
//!
//! The format is that of <https://google.github.io/tensorstore/kvstore/ocdbt/index.html>, "Storage format". Each module
//! names the section it implements and says where real files differ from the text.
//!
//! | module | holds | section of the format |
//! | --- | --- | --- |
//! | [`envelope`] | magic, length, version, compression, checksum | headers and footers |
//! | [`Manifest`], [`Config`] | what a reader begins with | Manifest format |
//! | [`Version`], [`VersionNode`] | which roots there are | Version tree node format |
//! | [`DataFile`] | which files are referred to | Data file table format |
//! | [`Node`], [`Value`], [`Location`] | keys and values | B+tree node format |
//! | [`Database`], [`List`], [`Source`] | the latest version, by key and in order | |
//! | [`Builder`], [`merge`] | a database of one version, from keys in order or over others | |
//!
//! ```
//! use std::collections::HashMap;
//! use std::ops::Range;
//!
//! use bytes::Bytes;
//! use waystation_ocdbt::{Builder, Config, Database, Limits, MANIFEST_NAME, Source, SourceError};
//!
//! struct Files(HashMap<String, Bytes>);
//!
//! impl Source for Files {
//!     async fn read(&self, path: &str, range: Range<u64>) -> Result<Option<Bytes>, SourceError> {
//!         let file = self.0.get(path);
//!         Ok(file.map(|file| file.slice(range.start as usize..file.len().min(range.end as usize))))
//!     }
//! }
//!
//! # fn main() -> waystation_ocdbt::Result<()> {
//! # futures::executor::block_on(async {
//! let mut builder = Builder::new(Config::orbax([1; 16]), || [2; 16])?; // random ids, in earnest
//! builder.put("w/.zarray".into(), "{}".into())?;
//! builder.put("w/0".into(), vec![7; 2000].into())?;
//! let built = builder.finish(0)?;
//! let mut files = HashMap::from([(MANIFEST_NAME.to_owned(), built.manifest)]);
//! for new in built.files {
//!     files.insert(new.file.path().to_owned(), new.parts.concat().into());
//! }
//!
//! let database = Database::open(Files(files), Limits::default()).await?;
//! let mut list = database.list(b"w/");
//! while let Some(entry) = list.next().await? {
//!     let value = database.value(&entry.value, 1 << 20).await?;
//!     assert_eq!(value.len() as u64, entry.value.length());
//! }
//! assert!(database.get(b"w/1").await?.is_none());
//! # Ok(())
//! # })
//! # }
//! ```
//!
//! Whatever bytes are read, the result is a value or an [`Error`]; memory stays within [`Limits`]. What a file says of itself
//! (counts, lengths, paths) is held against what there is before memory is taken for it. A node's height, and the range of
//! its keys, are held against its parent, so no reference leads in a circle and no key is met twice.

mod builder;
mod config;
pub mod envelope;
mod error;
mod files;
mod limits;
mod manifest;
mod node;
mod primitive;
mod reader;
mod reference;
mod version;

pub use builder::{Builder, Built, Merged, NewFile, TARGET_DATA_FILE_BYTES, merge};
pub use config::{Compression, Config, MAX_INLINE_VALUE_BYTES, ManifestKind};
pub use error::{Error, Result, SourceError};
pub use files::{DataFile, MAX_PATH_BYTES};
pub use limits::Limits;
pub use manifest::{MANIFEST_NAME, Manifest, numbered_manifest_generation, numbered_manifest_name};
pub use node::{ChildEntry, Entries, LeafEntry, MAX_KEY_BYTES, MAX_NODE_ENTRIES, Node, Value};
pub use reader::{Database, Entry, List, Report, Source};
pub use reference::{Location, NodeRef, Statistics};
pub use version::{Version, VersionEntries, VersionNode, VersionNodeRef};
