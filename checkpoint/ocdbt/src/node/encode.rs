//! Node to bytes.

use bytes::Bytes;

use super::{Entries, LeafEntry, MAX_KEY_BYTES, Node, Value};
use crate::config::{Compression, MAX_INLINE_VALUE_BYTES};
use crate::envelope::{self, NODE_MAGIC};
use crate::error::{Error, Result, at_most, shown};
use crate::files::FileTableBuilder;
use crate::primitive::{common_prefix, put_varint};
use crate::reference::{Location, encode_locations, encode_statistics};

impl Node {
    /// Writes the node as it can be stored in any file whose base path is empty: paths are from the root of the database.
    ///
    /// # Errors
    /// No entries or too many, keys out of order or too long, inline values that are too long.
    pub fn encode(&self, compression: Compression) -> Result<Bytes> {
        Self::check_count(self.len())?;
        let mut table = FileTableBuilder::default();
        for location in self.locations() {
            table.add(location.file());
        }
        let mut out = vec![self.height()];
        table.encode(&mut out)?;
        put_varint(&mut out, self.len() as u64);
        self.encode_keys(&mut out)?;
        match &self.entries {
            Entries::Leaf(entries) => encode_values(&mut out, &table, entries)?,
            Entries::Interior { height, children } => {
                if *height == 0 {
                    return Err(Error::Damaged {
                        what: "interior node of height 0",
                        offset: 0,
                    });
                }
                let nodes = children.iter().map(|child| &child.node);
                encode_locations(
                    &mut out,
                    &table,
                    nodes.clone().map(|node| Some(&node.location)),
                );
                encode_statistics(&mut out, nodes.map(|node| node.statistics));
            }
        }
        envelope::seal(NODE_MAGIC, compression, &out)
    }

    fn locations(&self) -> Box<dyn Iterator<Item = &Location> + '_> {
        match &self.entries {
            Entries::Leaf(entries) => {
                Box::new(entries.iter().filter_map(|entry| match &entry.value {
                    Value::Inline(_) => None,
                    Value::Stored(location) => Some(location),
                }))
            }
            Entries::Interior { children, .. } => {
                Box::new(children.iter().map(|child| &child.node.location))
            }
        }
    }

    fn encode_keys(&self, out: &mut Vec<u8>) -> Result<()> {
        let prefix = self.prefix.len();
        let keys = || (0..self.len()).filter_map(|index| self.key(index));
        let mut suffixes: Vec<&[u8]> = Vec::with_capacity(self.len());
        let mut last: Option<&Bytes> = None;
        for key in keys() {
            at_most(
                "length of a key",
                (prefix + key.len()) as u64,
                MAX_KEY_BYTES as u64,
            )?;
            if let Some(last) = last {
                if last >= key {
                    return Err(Error::Order {
                        key: shown(&[&self.prefix[..], key].concat()),
                    });
                }
                let common = common_prefix(last, key);
                put_varint(out, (prefix + common) as u64);
                suffixes.push(&key[common..]);
            } else {
                suffixes.push(key);
            }
            last = Some(key);
        }
        for (index, suffix) in suffixes.iter().enumerate() {
            // The first is the whole key.
            let own = if index == 0 { prefix } else { 0 };
            put_varint(out, (own + suffix.len()) as u64);
        }
        if let Entries::Interior { children, .. } = &self.entries {
            for child in children {
                at_most(
                    "what keys below share",
                    child.subtree_prefix as u64,
                    child.key.len() as u64,
                )?;
                put_varint(out, (prefix + child.subtree_prefix) as u64);
            }
        }
        out.extend_from_slice(&self.prefix);
        for suffix in suffixes {
            out.extend_from_slice(suffix);
        }
        Ok(())
    }
}

fn encode_values(out: &mut Vec<u8>, table: &FileTableBuilder, entries: &[LeafEntry]) -> Result<()> {
    let stored = || {
        entries.iter().filter_map(|entry| match &entry.value {
            Value::Inline(_) => None,
            Value::Stored(location) => Some(location),
        })
    };
    for entry in entries {
        put_varint(out, entry.value.length());
    }
    for entry in entries {
        out.push(match &entry.value {
            Value::Inline(value) => {
                let length = value.len() as u64;
                at_most("length of an inline value", length, MAX_INLINE_VALUE_BYTES)?;
                0
            }
            Value::Stored(_) => 1,
        });
    }
    for location in stored() {
        put_varint(out, table.id(location.file()));
    }
    for location in stored() {
        put_varint(out, location.offset());
    }
    for entry in entries {
        if let Value::Inline(value) = &entry.value {
            out.extend_from_slice(value);
        }
    }
    Ok(())
}
