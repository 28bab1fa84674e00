//! The nodes of a database, from the leaves up, each written when it is full.

use bytes::Bytes;

use super::log::Log;
use crate::config::{Compression, Config, MAX_INLINE_VALUE_BYTES};
use crate::error::{Error, Result, at_most, shown};
use crate::node::{ChildEntry, LeafEntry, MAX_KEY_BYTES, MAX_NODE_ENTRIES, Node, Value};
use crate::primitive::common_prefix;
use crate::reference::NodeRef;

/// What TensorStore counts of an entry when it decides where to split, besides key, inline value and path: two words of a
/// leaf's entry and two of a location, seven and a location of an interior node's.
const LEAF_ENTRY_BYTES: usize = 16;
const LOCATION_BYTES: usize = 16;
const CHILD_ENTRY_BYTES: usize = 56;

pub(super) struct Tree {
    max_node_bytes: usize,
    compression: Compression,
    last: Option<Bytes>,
    leaf: Vec<LeafEntry>,
    leaf_bytes: usize,
    /// The interior nodes that are open, from height 1 up.
    levels: Vec<Level>,
}

#[derive(Default)]
struct Level {
    children: Vec<ChildEntry>,
    bytes: usize,
}

impl Tree {
    pub(super) fn new(config: &Config) -> Self {
        Self {
            max_node_bytes: config.max_decoded_node_bytes as usize,
            compression: config.compression,
            last: None,
            leaf: Vec::new(),
            leaf_bytes: 0,
            levels: Vec::new(),
        }
    }

    /// Whether a key can be the next.
    pub(super) fn check(&self, key: &[u8]) -> Result<()> {
        at_most("length of a key", key.len() as u64, MAX_KEY_BYTES as u64)?;
        if self.last.as_ref().is_some_and(|last| last[..] >= *key) {
            return Err(Error::Order { key: shown(key) });
        }
        Ok(())
    }

    /// Adds a key that [`Tree::check`] has found to be the next.
    pub(super) fn push(&mut self, key: Bytes, value: Value, log: &mut Log) -> Result<()> {
        let value_bytes = match &value {
            Value::Inline(value) => {
                let length = value.len() as u64;
                at_most("length of an inline value", length, MAX_INLINE_VALUE_BYTES)?;
                value.len()
            }
            Value::Stored(location) => LOCATION_BYTES + location.path().len(),
        };
        let bytes = LEAF_ENTRY_BYTES + key.len() + value_bytes;
        let full =
            self.leaf_bytes + bytes > self.max_node_bytes || self.leaf.len() == MAX_NODE_ENTRIES;
        if full && !self.leaf.is_empty() {
            self.close_leaf(log)?;
        }
        self.last = Some(key.clone());
        self.leaf.push(LeafEntry { key, value });
        self.leaf_bytes += bytes;
        Ok(())
    }

    /// Writes the leaf that is open, which is not the root.
    fn close_leaf(&mut self, log: &mut Log) -> Result<()> {
        self.leaf_bytes = 0;
        let entries = std::mem::take(&mut self.leaf);
        let (Some(first), Some(last)) = (entries.first(), entries.last()) else {
            return Ok(());
        };
        let key = first.key.clone();
        let shared = common_prefix(&key, &last.key);
        let node = write(below(Node::leaf(entries), shared), self.compression, log)?;
        self.add_child(0, key, shared, node, log)
    }

    /// Writes the interior node that is open at a level, which is not the root.
    fn close_level(&mut self, level: usize, log: &mut Log) -> Result<()> {
        let Level { children, .. } = std::mem::take(&mut self.levels[level]);
        let (Some(first), Some(last)) = (children.first(), children.last()) else {
            return Ok(());
        };
        let key = first.key.clone();
        // The last key is only a lower bound of those below it: what those share counts too.
        let least = children.iter().map(|child| child.subtree_prefix).min();
        let shared = common_prefix(&key, &last.key).min(least.unwrap_or(0));
        let height = height_of(level)?;
        let node = below(Node::interior(height, children), shared);
        let node = write(node, self.compression, log)?;
        self.add_child(level + 1, key, shared, node, log)
    }

    fn add_child(
        &mut self,
        level: usize,
        key: Bytes,
        subtree_prefix: usize,
        node: NodeRef,
        log: &mut Log,
    ) -> Result<()> {
        if level == self.levels.len() {
            self.levels.push(Level::default());
        }
        let bytes = CHILD_ENTRY_BYTES + LOCATION_BYTES + key.len() + node.location.path().len();
        let open = &self.levels[level];
        let full =
            open.bytes + bytes > self.max_node_bytes || open.children.len() == MAX_NODE_ENTRIES;
        // With fewer than two entries a node, the tree would have no end.
        if full && open.children.len() >= 2 {
            self.close_level(level, log)?;
        }
        let open = &mut self.levels[level];
        open.bytes += bytes;
        open.children.push(ChildEntry {
            key,
            subtree_prefix,
            node,
        });
        Ok(())
    }

    /// Writes what is open, and last the root: none where there are no keys.
    pub(super) fn finish(mut self, log: &mut Log) -> Result<(Option<NodeRef>, u8)> {
        if self.levels.is_empty() {
            if self.leaf.is_empty() {
                return Ok((None, 0));
            }
            let root = Node::leaf(self.leaf);
            return Ok((Some(write(root, self.compression, log)?), 0));
        }
        self.close_leaf(log)?;
        let mut level = 0;
        while level + 1 < self.levels.len() {
            self.close_level(level, log)?;
            level += 1;
        }
        let height = height_of(level)?;
        let children = std::mem::take(&mut self.levels[level].children);
        let root = Node::interior(height, children);
        Ok((Some(write(root, self.compression, log)?), height))
    }
}

fn height_of(level: usize) -> Result<u8> {
    Ok(at_most("height of a node", level as u64 + 1, u8::MAX.into())? as u8)
}

/// The node without what its parent says that all keys begin with.
fn below(mut node: Node, shared: usize) -> Node {
    node.prefix = node.prefix.slice(shared.min(node.prefix.len())..);
    node
}

fn write(node: Node, compression: Compression, log: &mut Log) -> Result<NodeRef> {
    let encoded = node.encode(compression)?;
    let statistics = node.statistics(encoded.len() as u64);
    Ok(NodeRef {
        location: log.append(encoded)?,
        statistics,
    })
}
