//! Versions: the roots that a database has had (format: "Version tree node format").
//!
//! In the body of the [envelope](crate::envelope) with [`VERSION_NODE_MAGIC`]: version_tree_arity_log2 (u8), height (u8, 0
//! for a leaf), data file table, entries.
//!
//! Entries of a leaf, and of the manifest's inline versions: number (varint), then the columns generation (varint), height of
//! the root (u8), data file, offset, length, keys, bytes of nodes, bytes of values out of line (varint), commit time (u64,
//! little-endian; nanoseconds since 1970, though the format's text says milliseconds).
//!
//! Entries of an interior node, and of the manifest's version nodes: number (varint), then the columns latest generation,
//! data file, offset, length, number of generations (varint), earliest commit time (u64, little-endian) and, in the manifest
//! alone, height (u8).

use bytes::Bytes;

use crate::config::{Compression, check_arity};
use crate::envelope::{self, VERSION_NODE_MAGIC};
use crate::error::{Error, Result, at_most};
use crate::files::{DataFile, FileTable, FileTableBuilder};
use crate::primitive::{Cursor, put_varint};
use crate::reference::{
    Location, NodeRef, Statistics, decode_locations, decode_statistics, encode_locations,
    encode_statistics,
};

/// One version of a database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// Its number, from 1.
    pub generation: u64,
    /// The root of its keys; none where there is no key.
    pub root: Option<NodeRef>,
    /// How many levels are below the root.
    pub root_height: u8,
    /// When it was made, in nanoseconds since 1970.
    pub commit_time_ns: u64,
}

/// A reference to a node of the version tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VersionNodeRef {
    /// The latest generation below it.
    pub generation: u64,
    /// Where it is.
    pub location: Location,
    /// How many generations are below it.
    pub generations: u64,
    /// When the earliest version below it was made, in nanoseconds since 1970.
    pub commit_time_ns: u64,
    /// How many levels are below it.
    pub height: u8,
}

/// The entries of a node of the version tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VersionEntries {
    /// Versions.
    Leaf(Vec<Version>),
    /// Nodes.
    Interior {
        /// How many levels are below this node, at least 1.
        height: u8,
        /// The nodes right below, all of height - 1.
        nodes: Vec<VersionNodeRef>,
    },
}

/// A node of the version tree. Only versions older than the manifest's inline ones are in such nodes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VersionNode {
    /// As in the [configuration](crate::Config::version_tree_arity_log2).
    pub arity_log2: u8,
    /// The entries.
    pub entries: VersionEntries,
}

impl VersionNode {
    /// Reads a node that was found in a file whose base path is `transitive`, with a body of `limit` bytes at most.
    ///
    /// # Errors
    /// What contradicts the format, or is beyond the limit.
    pub fn decode(sealed: &Bytes, transitive: &str, limit: usize) -> Result<Self> {
        let body = envelope::open(sealed, VERSION_NODE_MAGIC, limit)?;
        let cursor = &mut Cursor::new(&body);
        let arity_log2 = cursor.byte()?;
        check_arity(arity_log2)?;
        let height = cursor.byte()?;
        let table = FileTable::decode(cursor, transitive, limit)?;
        let entries = if height == 0 {
            VersionEntries::Leaf(decode_versions(cursor, &table, arity_log2)?)
        } else {
            let nodes = decode_nodes(cursor, &table, 1 << arity_log2, Some(height))?;
            VersionEntries::Interior { height, nodes }
        };
        cursor.finish()?;
        let node = Self {
            arity_log2,
            entries,
        };
        node.check()?;
        Ok(node)
    }

    /// Writes the node as it can be stored in any file whose base path is empty.
    ///
    /// # Errors
    /// Entries that the format does not allow together.
    pub fn encode(&self, compression: Compression) -> Result<Bytes> {
        self.check()?;
        let mut table = FileTableBuilder::default();
        let mut out = vec![self.arity_log2];
        match &self.entries {
            VersionEntries::Leaf(versions) => {
                out.push(0);
                add_version_files(&mut table, versions);
                table.encode(&mut out)?;
                encode_versions(&mut out, &table, versions);
            }
            VersionEntries::Interior { height, nodes } => {
                out.push(*height);
                add_node_files(&mut table, nodes);
                table.encode(&mut out)?;
                encode_nodes(&mut out, &table, nodes, false);
            }
        }
        envelope::seal(VERSION_NODE_MAGIC, compression, &out)
    }

    fn check(&self) -> Result<()> {
        check_arity(self.arity_log2)?;
        match &self.entries {
            VersionEntries::Leaf(versions) => check_versions(versions, self.arity_log2),
            VersionEntries::Interior { height, nodes } => {
                check_interior(nodes, self.arity_log2, *height)
            }
        }
    }
}

/// How high a version tree can be.
pub(crate) fn max_height(arity_log2: u8) -> u8 {
    63 / arity_log2
}

fn wrong(what: &'static str) -> Error {
    Error::Damaged { what, offset: 0 }
}

/// That generations go up from 1 on.
pub(crate) fn check_order(generations: impl Iterator<Item = u64>) -> Result<()> {
    let mut last = 0;
    for generation in generations {
        if generation <= last {
            return Err(wrong("generations out of order"));
        }
        last = generation;
    }
    Ok(())
}

/// The rules for the entries of a leaf, which are those for the inline versions of a manifest.
pub(crate) fn check_versions(versions: &[Version], arity_log2: u8) -> Result<()> {
    let (Some(first), Some(last)) = (versions.first(), versions.last()) else {
        return Err(wrong("no version"));
    };
    check_order(versions.iter().map(|version| version.generation))?;
    // A leaf has the generations of one run of 2^arity_log2.
    if (first.generation - 1) >> arity_log2 != (last.generation - 1) >> arity_log2 {
        return Err(wrong("generations that are not of one node"));
    }
    if versions
        .iter()
        .any(|version| version.root.is_none() && version.root_height != 0)
    {
        return Err(wrong("height of a root that is not there"));
    }
    Ok(())
}

fn check_interior(nodes: &[VersionNodeRef], arity_log2: u8, height: u8) -> Result<()> {
    let most = max_height(arity_log2);
    at_most("height of a version node", height.into(), most.into())?;
    let (Some(first), Some(last)) = (nodes.first(), nodes.last()) else {
        return Err(wrong("no version node"));
    };
    if height == 0 || nodes.iter().any(|node| node.height != height - 1) {
        return Err(wrong("height of a version node"));
    }
    check_order(nodes.iter().map(|node| node.generation))?;
    // Each child is full, with the generations of one run of 2^(arity_log2 * height).
    let run = 1_u64 << (arity_log2 * height);
    for node in nodes {
        if node.generation % run != 0 || node.generations > run {
            return Err(wrong("generations that are not those of a node"));
        }
    }
    let own = |node: &VersionNodeRef| ((node.generation - 1) / run) >> arity_log2;
    if own(first) != own(last) {
        return Err(wrong("generations that are not of one node"));
    }
    Ok(())
}

/// The array of a leaf's entries, as the manifest has it too.
pub(crate) fn decode_versions(
    cursor: &mut Cursor<'_>,
    table: &FileTable,
    arity_log2: u8,
) -> Result<Vec<Version>> {
    let count = cursor.count("number of versions", 1 << arity_log2, 16)?;
    let generations = cursor.varints(count)?;
    let heights = cursor.column(count, Cursor::byte)?;
    let locations = decode_locations(cursor, table, count)?;
    let statistics = decode_statistics(cursor, count)?;
    let times = cursor.column(count, Cursor::u64_le)?;
    let mut versions = Vec::with_capacity(count);
    let columns = generations
        .into_iter()
        .zip(heights)
        .zip(locations)
        .zip(statistics)
        .zip(times);
    for ((((generation, root_height), location), statistics), commit_time_ns) in columns {
        if location.is_none() && statistics != Statistics::default() {
            return Err(cursor.damaged("statistics of a root that is not there"));
        }
        versions.push(Version {
            generation,
            root: location.map(|location| NodeRef {
                location,
                statistics,
            }),
            root_height,
            commit_time_ns,
        });
    }
    check_versions(&versions, arity_log2)?;
    Ok(versions)
}

pub(crate) fn encode_versions(out: &mut Vec<u8>, table: &FileTableBuilder, versions: &[Version]) {
    put_varint(out, versions.len() as u64);
    for version in versions {
        put_varint(out, version.generation);
    }
    for version in versions {
        out.push(version.root_height);
    }
    let roots = versions.iter().map(|version| version.root.as_ref());
    encode_locations(
        out,
        table,
        roots.clone().map(|root| root.map(|root| &root.location)),
    );
    encode_statistics(
        out,
        roots.map(|root| root.map(|root| root.statistics).unwrap_or_default()),
    );
    for version in versions {
        out.extend_from_slice(&version.commit_time_ns.to_le_bytes());
    }
}

/// The array of an interior node's entries; the manifest's has the heights too, a node's are one less than the node's own.
pub(crate) fn decode_nodes(
    cursor: &mut Cursor<'_>,
    table: &FileTable,
    limit: usize,
    parent_height: Option<u8>,
) -> Result<Vec<VersionNodeRef>> {
    let count = cursor.count("number of version nodes", limit, 13)?;
    let generations = cursor.varints(count)?;
    let locations = decode_locations(cursor, table, count)?;
    let numbers = cursor.varints(count)?;
    let times = cursor.column(count, Cursor::u64_le)?;
    let heights = match parent_height {
        Some(height) => vec![height.saturating_sub(1); count],
        None => cursor.column(count, Cursor::byte)?,
    };
    let mut nodes = Vec::with_capacity(count);
    let columns = generations
        .into_iter()
        .zip(locations)
        .zip(numbers)
        .zip(times)
        .zip(heights);
    for ((((generation, location), generations), commit_time_ns), height) in columns {
        nodes.push(VersionNodeRef {
            generation,
            location: location.ok_or_else(|| cursor.damaged("reference to nothing"))?,
            generations,
            commit_time_ns,
            height,
        });
    }
    Ok(nodes)
}

pub(crate) fn encode_nodes(
    out: &mut Vec<u8>,
    table: &FileTableBuilder,
    nodes: &[VersionNodeRef],
    heights: bool,
) {
    put_varint(out, nodes.len() as u64);
    for node in nodes {
        put_varint(out, node.generation);
    }
    encode_locations(out, table, nodes.iter().map(|node| Some(&node.location)));
    for node in nodes {
        put_varint(out, node.generations);
    }
    for node in nodes {
        out.extend_from_slice(&node.commit_time_ns.to_le_bytes());
    }
    if heights {
        out.extend(nodes.iter().map(|node| node.height));
    }
}

pub(crate) fn add_version_files(table: &mut FileTableBuilder, versions: &[Version]) {
    for version in versions {
        match &version.root {
            Some(root) => table.add(root.location.file()),
            None => table.add(&DataFile::none().into()),
        }
    }
}

pub(crate) fn add_node_files(table: &mut FileTableBuilder, nodes: &[VersionNodeRef]) {
    for node in nodes {
        table.add(node.location.file());
    }
}

#[cfg(test)]
mod tests;
