//! References: where bytes lie in the data files, and what is known of a tree by its root (format: the columns
//! `data_file_id`, `data_file_offset`, `data_file_length`, `num_keys`, `num_tree_bytes`, `num_indirect_value_bytes`).

use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::files::{DataFile, FileTable, FileTableBuilder};
use crate::primitive::{Cursor, put_varint};

/// A part of a data file.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Location {
    file: Arc<DataFile>,
    offset: u64,
    length: u64,
}

/// Offset and length of a reference to nothing.
const NOWHERE: u64 = u64::MAX;

impl Location {
    /// `length` bytes at `offset` of a file.
    ///
    /// # Errors
    /// An end beyond 64 bits.
    pub fn new(file: Arc<DataFile>, offset: u64, length: u64) -> Result<Self> {
        if offset.checked_add(length).is_none() {
            return Err(Error::TooLarge {
                what: "length at its offset",
                value: length,
                limit: u64::MAX - offset,
            });
        }
        if file.path().is_empty() {
            return Err(Error::Path {
                path: String::new(),
            });
        }
        Ok(Self {
            file,
            offset,
            length,
        })
    }

    /// The file.
    #[must_use]
    pub fn file(&self) -> &Arc<DataFile> {
        &self.file
    }

    /// The path of the file, from the root of the database that was opened.
    #[must_use]
    pub fn path(&self) -> &str {
        self.file.path()
    }

    /// Where the part begins.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// How long it is.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Where it begins and ends.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.length
    }

    /// An error in this part.
    pub(crate) fn blame(&self, source: Error) -> Error {
        Error::In {
            path: self.path().into(),
            offset: self.offset,
            length: self.length,
            source: Box::new(source),
        }
    }
}

/// What is known of all that is below a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Keys (`num_keys`).
    pub keys: u64,
    /// Bytes of all nodes as they are stored, this one too (`num_tree_bytes`).
    pub tree_bytes: u64,
    /// Bytes of all values out of line (`num_indirect_value_bytes`).
    pub stored_value_bytes: u64,
}

impl Statistics {
    pub(crate) fn add(&mut self, other: &Self) {
        self.keys = self.keys.saturating_add(other.keys);
        self.tree_bytes = self.tree_bytes.saturating_add(other.tree_bytes);
        self.stored_value_bytes = self
            .stored_value_bytes
            .saturating_add(other.stored_value_bytes);
    }
}

/// A reference to a B+tree node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeRef {
    /// Where it is.
    pub location: Location,
    /// What is below it.
    pub statistics: Statistics,
}

/// One reference, none where it is the one to nothing.
fn locate(
    cursor: &Cursor<'_>,
    table: &FileTable,
    (id, offset, length): (u64, u64, u64),
) -> Result<Option<Location>> {
    let file = table.get(cursor, id)?;
    if (offset, length) == (NOWHERE, NOWHERE) {
        return Ok(None);
    }
    Location::new(Arc::clone(file), offset, length).map(Some)
}

/// The columns of `count` locations, of which some may be nothing.
pub(crate) fn decode_locations(
    cursor: &mut Cursor<'_>,
    table: &FileTable,
    count: usize,
) -> Result<Vec<Option<Location>>> {
    let ids = cursor.varints(count)?;
    let offsets = cursor.varints(count)?;
    let lengths = cursor.varints(count)?;
    let columns = ids.into_iter().zip(offsets).zip(lengths);
    columns
        .map(|((id, offset), length)| locate(cursor, table, (id, offset, length)))
        .collect()
}

/// The location of a value out of line, which is never nothing.
pub(crate) fn decode_value_location(
    cursor: &Cursor<'_>,
    table: &FileTable,
    fields: (u64, u64, u64),
) -> Result<Location> {
    locate(cursor, table, fields)?.ok_or_else(|| cursor.damaged("reference to nothing"))
}

/// The columns of `count` statistics.
pub(crate) fn decode_statistics(cursor: &mut Cursor<'_>, count: usize) -> Result<Vec<Statistics>> {
    let keys = cursor.varints(count)?;
    let tree_bytes = cursor.varints(count)?;
    let stored_value_bytes = cursor.varints(count)?;
    let columns = keys.into_iter().zip(tree_bytes).zip(stored_value_bytes);
    Ok(columns
        .map(|((keys, tree_bytes), stored_value_bytes)| Statistics {
            keys,
            tree_bytes,
            stored_value_bytes,
        })
        .collect())
}

/// The columns of locations, nothing where there is none.
pub(crate) fn encode_locations<'a>(
    out: &mut Vec<u8>,
    table: &FileTableBuilder,
    locations: impl Iterator<Item = Option<&'a Location>> + Clone,
) {
    for location in locations.clone() {
        let id = location.map_or_else(|| table.id(&DataFile::none()), |at| table.id(&at.file));
        put_varint(out, id);
    }
    for location in locations.clone() {
        put_varint(out, location.map_or(NOWHERE, |at| at.offset));
    }
    for location in locations {
        put_varint(out, location.map_or(NOWHERE, |at| at.length));
    }
}

/// The columns of statistics.
pub(crate) fn encode_statistics(
    out: &mut Vec<u8>,
    statistics: impl Iterator<Item = Statistics> + Clone,
) {
    for one in statistics.clone() {
        put_varint(out, one.keys);
    }
    for one in statistics.clone() {
        put_varint(out, one.tree_bytes);
    }
    for one in statistics {
        put_varint(out, one.stored_value_bytes);
    }
}
