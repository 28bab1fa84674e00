//! Which data files a manifest or node refers to (format: "Data file table format").
//!
//! | field | encoding | count |
//! | --- | --- | --- |
//! | number of files | varint | 1 |
//! | bytes in common with the path before | varint | files - 1 |
//! | bytes of the path after those | varint | files |
//! | bytes of the path that are its base path | varint | files |
//! | the paths after what they have in common | bytes | files |
//!
//! A file lies at transitive path + base path + name. The manifest's transitive path is empty; that of a node is the
//! transitive and base path of the file it was read from. So a database can take over nodes and values of another that lies
//! in a folder below it, without copying them.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result, at_most};
use crate::node::MAX_NODE_ENTRIES;
use crate::primitive::{Cursor, common_prefix, put_varint};

/// The longest path of a data file.
pub const MAX_PATH_BYTES: usize = 65535;

/// A file in a database: its path from the root of the database, which has two parts.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct DataFile {
    path: String,
    base_length: usize,
}

impl DataFile {
    /// The file `name` under `base`, which may be empty and else ends in `/` in all known databases.
    ///
    /// # Errors
    /// A path that is empty, absolute, too long, or has an empty component, `.`, `..`, a backslash or a NUL.
    pub fn new(base: &str, name: &str) -> Result<Self> {
        let path = format!("{base}{name}");
        check_path(&path)?;
        Ok(Self {
            path,
            base_length: base.len(),
        })
    }

    /// The file that a writer makes of 16 random bytes: `d/` and 32 hexadecimal digits.
    #[must_use]
    pub fn random(id: [u8; 16]) -> Self {
        use fmt::Write as _;
        let mut path = String::from("d/");
        for byte in id {
            // Writing to a string does not fail.
            let _ = write!(path, "{byte:02x}");
        }
        Self {
            path,
            base_length: 0,
        }
    }

    /// What a reference to nothing names as its file.
    pub(crate) fn none() -> Self {
        Self {
            path: String::new(),
            base_length: 0,
        }
    }

    /// The path from the root of the database.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The part of the path that nodes in this file have as their transitive path.
    #[must_use]
    pub fn base(&self) -> &str {
        &self.path[..self.base_length]
    }

    /// The rest of the path.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.path[self.base_length..]
    }
}

impl fmt::Debug for DataFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}+{:?}", self.base(), self.name())
    }
}

/// The order of a table: by base path, then by name.
impl Ord for DataFile {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.base().as_bytes(), self.name().as_bytes())
            .cmp(&(other.base().as_bytes(), other.name().as_bytes()))
    }
}

impl PartialOrd for DataFile {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

fn check_path(path: &str) -> Result<()> {
    at_most("length of a path", path.len() as u64, MAX_PATH_BYTES as u64)?;
    let stray = |part: &str| matches!(part, "" | "." | "..");
    if path.split('/').any(stray) || path.contains(['\\', '\0']) {
        return Err(Error::Path { path: path.into() });
    }
    Ok(())
}

/// A table as it was read.
#[derive(Debug)]
pub(crate) struct FileTable(Vec<Arc<DataFile>>);

impl FileTable {
    /// Reads a table whose paths, unpacked, take no more than `limit` bytes together.
    pub(crate) fn decode(cursor: &mut Cursor<'_>, transitive: &str, limit: usize) -> Result<Self> {
        // Suffix and base length take a byte each.
        let count = cursor.count("number of data files", MAX_NODE_ENTRIES, 2)?;
        let mut common = vec![0];
        for _ in 1..count {
            common.push(cursor.length16("length of a path")?);
        }
        let suffixes = cursor.column(count, |cursor| cursor.length16("length of a path"))?;
        let bases = cursor.column(count, |cursor| cursor.length16("length of a path"))?;

        let mut files: Vec<Arc<DataFile>> = Vec::with_capacity(count);
        // Without the transitive path, which all have.
        let mut path: Vec<u8> = Vec::new();
        let (mut last_base, mut total) = (0, 0);
        for ((common, suffix), base) in common.into_iter().zip(suffixes).zip(bases) {
            if common > path.len() {
                return Err(cursor.damaged("path that shares more than there is"));
            }
            if common > base.min(last_base) && base != last_base {
                return Err(cursor.damaged("path that shares more than a base path"));
            }
            if base > common + suffix {
                return Err(cursor.damaged("base path longer than the path"));
            }
            let length = transitive.len() + common + suffix;
            at_most("length of a path", length as u64, MAX_PATH_BYTES as u64)?;
            total += length;
            at_most("size of the paths", total as u64, limit as u64)?;
            path.truncate(common);
            path.extend_from_slice(cursor.take(suffix)?);
            last_base = base;
            files.push(Arc::new(resolve(transitive, &path, base)?));
        }
        Ok(Self(files))
    }

    /// The file of a reference, which may be the one without a path.
    pub(crate) fn get(&self, cursor: &Cursor<'_>, id: u64) -> Result<&Arc<DataFile>> {
        usize::try_from(id)
            .ok()
            .and_then(|id| self.0.get(id))
            .ok_or_else(|| cursor.damaged("data file that is not in the table"))
    }
}

fn resolve(transitive: &str, path: &[u8], base: usize) -> Result<DataFile> {
    if path.is_empty() {
        // What references to nothing name; no other reference may.
        return Ok(DataFile::none());
    }
    let refused = || Error::Path {
        path: String::from_utf8_lossy(path).into_owned(),
    };
    let text = str::from_utf8(path).map_err(|_| refused())?;
    if !text.is_char_boundary(base) {
        return Err(refused());
    }
    let path = format!("{transitive}{text}");
    check_path(&path)?;
    Ok(DataFile {
        path,
        base_length: transitive.len() + base,
    })
}

/// A table to be written.
#[derive(Debug, Default)]
pub(crate) struct FileTableBuilder(BTreeMap<Arc<DataFile>, u64>);

impl FileTableBuilder {
    pub(crate) fn add(&mut self, file: &Arc<DataFile>) {
        if !self.0.contains_key(file) {
            self.0.insert(Arc::clone(file), 0);
        }
    }

    /// Writes the table and numbers the files.
    pub(crate) fn encode(&mut self, out: &mut Vec<u8>) -> Result<()> {
        let count = self.0.len() as u64;
        at_most("number of data files", count, MAX_NODE_ENTRIES as u64)?;
        put_varint(out, count);
        let mut suffixes = Vec::new();
        let mut last: Option<&DataFile> = None;
        for file in self.0.keys() {
            let common = last.map_or(0, |last| shared(last, file));
            if last.is_some() {
                put_varint(out, common as u64);
            }
            suffixes.push(&file.path.as_bytes()[common..]);
            last = Some(file);
        }
        for suffix in &suffixes {
            put_varint(out, suffix.len() as u64);
        }
        for file in self.0.keys() {
            put_varint(out, file.base_length as u64);
        }
        for suffix in suffixes {
            out.extend_from_slice(suffix);
        }
        for (number, id) in self.0.values_mut().enumerate() {
            *id = number as u64;
        }
        Ok(())
    }

    /// The number of a file that was added before the table was written.
    pub(crate) fn id(&self, file: &DataFile) -> u64 {
        self.0.get(file).copied().unwrap_or_default()
    }
}

/// How much of its path a file takes from the one before it: past the end of the base path only where it is the same.
fn shared(last: &DataFile, file: &DataFile) -> usize {
    if last.base() == file.base() {
        common_prefix(last.path.as_bytes(), file.path.as_bytes())
    } else {
        common_prefix(last.base().as_bytes(), file.base().as_bytes())
    }
}

/// Reads the table at the start of `bytes`: for tests of the encoding alone.
#[cfg(test)]
fn decode(bytes: &[u8], transitive: &str) -> Result<Vec<Arc<DataFile>>> {
    let bytes = bytes::Bytes::copy_from_slice(bytes);
    let mut cursor = Cursor::new(&bytes);
    let table = FileTable::decode(&mut cursor, transitive, 1 << 20)?;
    cursor.finish()?;
    Ok(table.0)
}

#[cfg(test)]
mod tests;
