//! A node as it is met on the way from the root: with what precedes its keys, and held against what its parent says of it.

use std::sync::Arc;

use super::kept::Loaded;
use super::{Database, Source};
use crate::error::{Error, Result, at_most};
use crate::node::{ChildEntry, Entries, MAX_KEY_BYTES, Node, Value};
use crate::reference::NodeRef;

#[derive(Debug)]
pub(super) struct Visit {
    loaded: Arc<Loaded>,
    /// What precedes the keys of the entries: what the parents say, and the node's own prefix.
    prefix: Vec<u8>,
    /// All keys of the node are less; none at the right edge of the tree.
    upper: Option<Vec<u8>>,
}

impl Visit {
    pub(super) fn node(&self) -> &Node {
        &self.loaded.node
    }

    /// The memory that the node takes, about.
    pub(super) fn bytes(&self) -> usize {
        self.loaded.bytes
    }

    pub(super) fn is_leaf(&self) -> bool {
        matches!(self.node().entries, Entries::Leaf(_))
    }

    pub(super) fn children(&self) -> &[ChildEntry] {
        match &self.node().entries {
            Entries::Leaf(_) => &[],
            Entries::Interior { children, .. } => children,
        }
    }

    /// The whole key of an entry.
    pub(super) fn key(&self, index: usize) -> Vec<u8> {
        let key = self.node().key(index).map_or(&[][..], |key| key);
        [&self.prefix, key].concat()
    }

    pub(super) fn value(&self, index: usize) -> Option<&Value> {
        match &self.node().entries {
            Entries::Leaf(entries) => entries.get(index).map(|entry| &entry.value),
            Entries::Interior { .. } => None,
        }
    }

    /// How many entries have keys less than this, or not greater.
    fn rank(&self, key: &[u8], or_equal: bool) -> usize {
        let Some(rest) = key.strip_prefix(&self.prefix[..]) else {
            // All keys are on one side.
            return if self.prefix[..] < *key {
                self.node().len()
            } else {
                0
            };
        };
        let before = |own: &[u8]| own < rest || (or_equal && own == rest);
        match &self.node().entries {
            Entries::Leaf(entries) => entries.partition_point(|entry| before(&entry.key)),
            Entries::Interior { children, .. } => {
                children.partition_point(|child| before(&child.key))
            }
        }
    }

    /// A leaf's value of a key.
    pub(super) fn find(&self, key: &[u8]) -> Option<&Value> {
        let index = self.rank(key, false);
        let own = self.node().key(index)?;
        let found = key.strip_prefix(&self.prefix[..]) == Some(&own[..]);
        self.value(index).filter(|_| found)
    }

    /// The child that has a key, if any has.
    pub(super) fn child_with(&self, key: &[u8]) -> Option<usize> {
        self.rank(key, true).checked_sub(1)
    }

    /// The first entry that is, or may have below it, a key not less than this.
    pub(super) fn seek(&self, key: &[u8]) -> usize {
        if self.is_leaf() {
            self.rank(key, false)
        } else {
            self.rank(key, true).saturating_sub(1)
        }
    }

    /// Holds the node against what its parent says, or the version: its height, and between which keys its own lie.
    fn check(&self, height: u8, lower: &[u8]) -> Result<()> {
        let misplaced = |what| Err(Error::Misplaced { what });
        if self.node().height() != height {
            return misplaced("height of a node");
        }
        // A decoded node has an entry.
        let (first, last) = (self.key(0), self.key(self.node().len().saturating_sub(1)));
        if first[..] < *lower {
            return misplaced("key before those of the node");
        }
        if self.upper.as_ref().is_some_and(|upper| last >= *upper) {
            return misplaced("key after those of the node");
        }
        let longest = self.prefix.len() + self.loaded.longest_key;
        at_most("length of a key", longest as u64, MAX_KEY_BYTES as u64)?;
        Ok(())
    }
}

impl<S: Source> Database<S> {
    /// The root, unless there is no key.
    pub(super) async fn root(&self) -> Result<Option<Visit>> {
        let Some(root) = &self.version.root else {
            return Ok(None);
        };
        let visit = self.visit(root, self.version.root_height, &[], &[], None);
        visit.await.map(Some)
    }

    /// The child that an entry of an interior node refers to.
    pub(super) async fn child(&self, parent: &Visit, index: usize) -> Result<Visit> {
        let entry = parent.children().get(index).ok_or(Error::Misplaced {
            what: "number of a child",
        })?;
        let lower = parent.key(index);
        let inherited = &lower[..(parent.prefix.len() + entry.subtree_prefix).min(lower.len())];
        let upper = if index + 1 < parent.node().len() {
            Some(parent.key(index + 1))
        } else {
            parent.upper.clone()
        };
        let height = parent.node().height() - 1;
        self.visit(&entry.node, height, inherited, &lower, upper)
            .await
    }

    async fn visit(
        &self,
        reference: &NodeRef,
        height: u8,
        inherited: &[u8],
        lower: &[u8],
        upper: Option<Vec<u8>>,
    ) -> Result<Visit> {
        let location = &reference.location;
        let loaded = self.kept.get(location, self.load(location)).await?;
        let visit = Visit {
            prefix: [inherited, &loaded.node.prefix].concat(),
            loaded,
            upper,
        };
        visit
            .check(height, lower)
            .map_err(|error| location.blame(error))?;
        Ok(visit)
    }
}
