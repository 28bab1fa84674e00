//! Nodes of the B+tree of keys (format: "B+tree node format").
//!
//! In the body of the [envelope](crate::envelope) with [`NODE_MAGIC`]:
//!
//! | field | encoding | count |
//! | --- | --- | --- |
//! | height, 0 for a leaf | u8 | 1 |
//! | data file table | [`files`](crate::DataFile) | 1 |
//! | number of entries, 1 to 2^20 | varint | 1 |
//! | keys: bytes in common with the key before | varint | entries - 1 |
//! | keys: bytes after those | varint | entries |
//! | interior: bytes of the key that all keys below have in common | varint | entries |
//! | keys: what follows after what they have in common | bytes | entries |
//! | leaf: length of the value | varint | entries |
//! | leaf: kind of the value, 0 inline, 1 out of line | u8 | entries |
//! | leaf: data file and offset, two columns | varint | values out of line |
//! | leaf: the values | bytes | values inline |
//! | interior: data file, offset, length, keys, bytes of nodes, bytes of values out of line, six columns | varint | entries |
//!
//! Keys are relative to what the parents on the way say that all keys below have in common. An interior node's entry has as
//! its key a lower bound of the keys below it, and the next entry's key is an upper bound.

mod decode;
mod encode;

use bytes::Bytes;

use crate::error::{Error, Result};
use crate::primitive::common_prefix;
use crate::reference::{Location, NodeRef, Statistics};

/// The most entries of a node, hence also the most data files that one or a manifest refers to.
pub const MAX_NODE_ENTRIES: usize = 1 << 20;
/// The longest key.
pub const MAX_KEY_BYTES: usize = 65535;

/// A value, or where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// Held by the leaf.
    Inline(Bytes),
    /// In a data file, as it is.
    Stored(Location),
}

impl Value {
    /// How many bytes it has.
    #[must_use]
    pub fn length(&self) -> u64 {
        match self {
            Self::Inline(bytes) => bytes.len() as u64,
            Self::Stored(location) => location.length(),
        }
    }
}

/// A key of a leaf and its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeafEntry {
    /// What follows [`Node::prefix`].
    pub key: Bytes,
    /// The value.
    pub value: Value,
}

/// A node below an interior one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChildEntry {
    /// What follows [`Node::prefix`] in a lower bound of the keys below the child.
    pub key: Bytes,
    /// How much of `key`, which follows the prefix, all keys below the child begin with. They lack prefix and this there.
    pub subtree_prefix: usize,
    /// The child.
    pub node: NodeRef,
}

/// The entries of a node, in order of their keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entries {
    /// Of a leaf.
    Leaf(Vec<LeafEntry>),
    /// Of a node above others.
    Interior {
        /// How many levels are below it, at least 1.
        height: u8,
        /// The nodes right below.
        children: Vec<ChildEntry>,
    },
}

/// A node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// What all keys in this node have in common; kept once.
    pub prefix: Bytes,
    /// The entries.
    pub entries: Entries,
}

impl Node {
    /// A leaf of entries whose keys are whole.
    #[must_use]
    pub fn leaf(mut entries: Vec<LeafEntry>) -> Self {
        let prefix = match (entries.first(), entries.last()) {
            (Some(first), Some(last)) => first.key.slice(..common_prefix(&first.key, &last.key)),
            _ => Bytes::new(),
        };
        for entry in &mut entries {
            entry.key = entry.key.slice(prefix.len().min(entry.key.len())..);
        }
        Self {
            prefix,
            entries: Entries::Leaf(entries),
        }
    }

    /// A node `height` levels above the leaves, of entries whose keys are whole.
    #[must_use]
    pub fn interior(height: u8, mut children: Vec<ChildEntry>) -> Self {
        let prefix = match (children.first(), children.last()) {
            (Some(first), Some(last)) => {
                let shared = common_prefix(&first.key, &last.key);
                let least = children.iter().map(|child| child.subtree_prefix).min();
                first.key.slice(..shared.min(least.unwrap_or(0)))
            }
            _ => Bytes::new(),
        };
        for child in &mut children {
            child.key = child.key.slice(prefix.len().min(child.key.len())..);
            child.subtree_prefix = child.subtree_prefix.saturating_sub(prefix.len());
        }
        Self {
            prefix,
            entries: Entries::Interior { height, children },
        }
    }

    /// How many levels are below it.
    #[must_use]
    pub fn height(&self) -> u8 {
        match &self.entries {
            Entries::Leaf(_) => 0,
            Entries::Interior { height, .. } => *height,
        }
    }

    /// How many entries it has.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.entries {
            Entries::Leaf(entries) => entries.len(),
            Entries::Interior { children, .. } => children.len(),
        }
    }

    /// Whether it has no entry, which no node in a database may.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The key of an entry, which follows [`Node::prefix`].
    pub(crate) fn key(&self, index: usize) -> Option<&Bytes> {
        match &self.entries {
            Entries::Leaf(entries) => entries.get(index).map(|entry| &entry.key),
            Entries::Interior { children, .. } => children.get(index).map(|child| &child.key),
        }
    }

    /// What a reference to this node says of it when it is stored in `stored_bytes`.
    #[must_use]
    pub fn statistics(&self, stored_bytes: u64) -> Statistics {
        let mut sum = Statistics {
            tree_bytes: stored_bytes,
            ..Statistics::default()
        };
        match &self.entries {
            Entries::Leaf(entries) => {
                sum.keys = entries.len() as u64;
                for entry in entries {
                    if let Value::Stored(location) = &entry.value {
                        sum.stored_value_bytes =
                            sum.stored_value_bytes.saturating_add(location.length());
                    }
                }
            }
            Entries::Interior { children, .. } => {
                for child in children {
                    sum.add(&child.node.statistics);
                }
            }
        }
        sum
    }

    /// About how much memory the node takes.
    pub(crate) fn memory(&self) -> usize {
        let mut sum = size_of::<Self>() + self.prefix.len();
        match &self.entries {
            Entries::Leaf(entries) => {
                for entry in entries {
                    sum += size_of::<LeafEntry>() + entry.key.len();
                    if let Value::Inline(value) = &entry.value {
                        sum += value.len();
                    }
                }
            }
            Entries::Interior { children, .. } => {
                for child in children {
                    sum += size_of::<ChildEntry>() + child.key.len();
                }
            }
        }
        sum
    }

    /// That a node has between 1 and 2^20 entries.
    fn check_count(count: usize) -> Result<()> {
        match count {
            1..=MAX_NODE_ENTRIES => Ok(()),
            0 => Err(Error::Damaged {
                what: "node without entries",
                offset: 0,
            }),
            count => Err(Error::TooLarge {
                what: "number of entries",
                value: count as u64,
                limit: MAX_NODE_ENTRIES as u64,
            }),
        }
    }
}

#[cfg(test)]
mod tests;
