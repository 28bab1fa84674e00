//! Bytes to node.

use bytes::{Buf as _, Bytes};

use super::{ChildEntry, Entries, LeafEntry, MAX_KEY_BYTES, MAX_NODE_ENTRIES, Node, Value};
use crate::config::MAX_INLINE_VALUE_BYTES;
use crate::envelope::{self, NODE_MAGIC};
use crate::error::{Error, Result, at_most};
use crate::files::FileTable;
use crate::primitive::{Cursor, common_prefix};
use crate::reference::{NodeRef, decode_locations, decode_statistics, decode_value_location};

impl Node {
    /// Reads a node that was found in a file whose base path is `transitive` (empty unless the node is of a database in a
    /// folder below).
    ///
    /// `limit` bounds the body, the keys unpacked, and the paths unpacked, each; beside them only the entries take memory,
    /// of which there are at most a fifth of `limit`, and 2^20.
    ///
    /// # Errors
    /// What contradicts the format, or is beyond the limit.
    pub fn decode(sealed: &Bytes, transitive: &str, limit: usize) -> Result<Self> {
        let body = envelope::open(sealed, NODE_MAGIC, limit)?;
        let cursor = &mut Cursor::new(&body);
        let height = cursor.byte()?;
        let table = FileTable::decode(cursor, transitive, limit)?;
        // Of a leaf's entries, each takes a byte for each of the lengths of suffix and value and for the kind.
        let least = if height == 0 { 3 } else { 8 };
        let count = cursor.count("number of entries", MAX_NODE_ENTRIES, least)?;
        Self::check_count(count)?;
        let node = if height == 0 {
            leaf(cursor, &table, count, limit)?
        } else {
            interior(cursor, &table, count, height, limit)?
        };
        cursor.finish()?;
        Ok(node)
    }
}

/// The keys of a node, what they have in common kept once.
struct Keys {
    prefix: Bytes,
    keys: Vec<Bytes>,
    /// Of an interior node, without the prefix.
    subtree_prefixes: Vec<usize>,
}

fn keys(cursor: &mut Cursor<'_>, count: usize, interior: bool, limit: usize) -> Result<Keys> {
    let mut common = vec![0];
    for _ in 1..count {
        common.push(cursor.length16("length of a key")?);
    }
    let suffixes = cursor.column(count, |cursor| cursor.length16("length of a key"))?;
    let mut subtree_prefixes = Vec::new();
    if interior {
        subtree_prefixes = cursor.column(count, |cursor| cursor.length16("length of a key"))?;
    }
    let shared = common[1..]
        .iter()
        .chain(&suffixes[..1])
        .chain(&subtree_prefixes);
    let prefix_length = shared.copied().min().unwrap_or(0);

    // How long the keys are, before any memory is taken for them.
    let (mut last, mut total) = (0, prefix_length);
    for (index, (common, suffix)) in common.iter().zip(&suffixes).enumerate() {
        if *common > last {
            return Err(cursor.damaged("key that shares more than there is"));
        }
        let length = common + suffix;
        at_most("length of a key", length as u64, MAX_KEY_BYTES as u64)?;
        if subtree_prefixes
            .get(index)
            .is_some_and(|prefix| *prefix > length)
        {
            return Err(cursor.damaged("keys below that share more than the key"));
        }
        total += length - prefix_length;
        at_most("size of the keys", total as u64, limit as u64)?;
        last = length;
    }

    let mut buffer: Vec<u8> = Vec::with_capacity(total);
    let mut ends = Vec::with_capacity(count);
    buffer.extend_from_slice(cursor.take(suffixes[0])?);
    ends.push(buffer.len());
    let mut start = prefix_length;
    for (common, suffix) in common.iter().zip(&suffixes).skip(1) {
        // From where the key before begins in the buffer, which lacks the prefix there.
        let kept = start..start + common - prefix_length;
        let replaced = kept.end..buffer.len();
        let suffix = cursor.take(*suffix)?;
        if buffer[replaced] >= *suffix {
            return Err(cursor.damaged("keys out of order"));
        }
        start = buffer.len();
        buffer.extend_from_within(kept);
        buffer.extend_from_slice(suffix);
        ends.push(buffer.len());
    }
    let buffer = Bytes::from(buffer);
    let mut start = prefix_length;
    let keys = ends.into_iter().map(|end| {
        let key = buffer.slice(start..end);
        start = end;
        key
    });
    let mut keys: Vec<Bytes> = keys.collect();
    for prefix in &mut subtree_prefixes {
        *prefix -= prefix_length;
    }
    // A writer may say that keys share less than they do: one node has one form here.
    let more = match (keys.first(), keys.last()) {
        (Some(first), Some(last)) => common_prefix(first, last),
        _ => 0,
    };
    let more = subtree_prefixes.iter().copied().fold(more, usize::min);
    if more > 0 {
        keys.iter_mut().for_each(|key| key.advance(more));
        subtree_prefixes
            .iter_mut()
            .for_each(|prefix| *prefix -= more);
    }
    Ok(Keys {
        prefix: buffer.slice(..prefix_length + more),
        keys,
        subtree_prefixes,
    })
}

fn leaf(cursor: &mut Cursor<'_>, table: &FileTable, count: usize, limit: usize) -> Result<Node> {
    let Keys { prefix, keys, .. } = keys(cursor, count, false, limit)?;
    let lengths = cursor.varints(count)?;
    let mut stored = Vec::with_capacity(count);
    for length in &lengths {
        stored.push(match cursor.byte()? {
            0 => {
                at_most("length of an inline value", *length, MAX_INLINE_VALUE_BYTES)?;
                false
            }
            1 => true,
            value => {
                return Err(Error::Unknown {
                    what: "kind of a value",
                    value: value.into(),
                });
            }
        });
    }
    let outside = stored.iter().filter(|stored| **stored).count();
    let mut ids = cursor.varints(outside)?.into_iter();
    let mut offsets = cursor.varints(outside)?.into_iter();
    let mut entries = Vec::with_capacity(count);
    for ((key, length), stored) in keys.into_iter().zip(lengths).zip(stored) {
        let value = match stored.then(|| ids.next().zip(offsets.next())).flatten() {
            Some((id, offset)) => {
                Value::Stored(decode_value_location(cursor, table, (id, offset, length))?)
            }
            // Checked above to fit.
            None => Value::Inline(cursor.share(length as usize)?),
        };
        entries.push(LeafEntry { key, value });
    }
    Ok(Node {
        prefix,
        entries: Entries::Leaf(entries),
    })
}

fn interior(
    cursor: &mut Cursor<'_>,
    table: &FileTable,
    count: usize,
    height: u8,
    limit: usize,
) -> Result<Node> {
    let Keys {
        prefix,
        keys,
        subtree_prefixes,
    } = keys(cursor, count, true, limit)?;
    let locations = decode_locations(cursor, table, count)?;
    let statistics = decode_statistics(cursor, count)?;
    let mut children = Vec::with_capacity(count);
    let columns = keys
        .into_iter()
        .zip(subtree_prefixes)
        .zip(locations)
        .zip(statistics);
    for (((key, subtree_prefix), location), statistics) in columns {
        let location = location.ok_or_else(|| cursor.damaged("reference to nothing"))?;
        children.push(ChildEntry {
            key,
            subtree_prefix,
            node: NodeRef {
                location,
                statistics,
            },
        });
    }
    Ok(Node {
        prefix,
        entries: Entries::Interior { height, children },
    })
}
