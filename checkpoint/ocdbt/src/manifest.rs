//! The manifest: what a reader of a database begins with (format: "Manifest format").
//!
//! In the body of the [envelope](crate::envelope) with [`MANIFEST_MAGIC`]: the [configuration](crate::Config) and, unless
//! it says that manifests are numbered, the data file table, the latest versions, and references to the nodes of the version
//! tree with the ones before them.

use bytes::Bytes;

use crate::config::{Config, ManifestKind};
use crate::envelope::{self, MANIFEST_MAGIC};
use crate::error::{Error, Result, at_most};
use crate::files::{FileTable, FileTableBuilder};
use crate::primitive::Cursor;
use crate::version::{
    self, Version, VersionNodeRef, add_node_files, add_version_files, check_versions, decode_nodes,
    decode_versions, encode_nodes, encode_versions,
};

/// The name of the manifest in a database.
pub const MANIFEST_NAME: &str = "manifest.ocdbt";

/// The name of the manifest of one generation, where they are numbered.
#[must_use]
pub fn numbered_manifest_name(generation: u64) -> String {
    format!("manifest.{generation:016x}")
}

/// The generation whose manifest has this name.
#[must_use]
pub fn numbered_manifest_generation(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("manifest.")?;
    let generation = u64::from_str_radix(digits, 16).ok()?;
    (numbered_manifest_name(generation) == name).then_some(generation)
}

/// A manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    /// How the database is written.
    pub config: Config,
    /// The latest versions, the last one last: 1 to 2^arity of them, or none where the manifests are numbered.
    pub versions: Vec<Version>,
    /// Nodes with earlier versions, the highest first.
    pub version_nodes: Vec<VersionNodeRef>,
}

impl Manifest {
    /// Reads a manifest, with a body of `limit` bytes at most. `transitive` is empty, or where the database lies below that
    /// of which the paths are wanted: all paths then begin with it.
    ///
    /// # Errors
    /// What contradicts the format, or is beyond the limit.
    pub fn decode(sealed: &Bytes, transitive: &str, limit: usize) -> Result<Self> {
        let body = envelope::open(sealed, MANIFEST_MAGIC, limit)?;
        let cursor = &mut Cursor::new(&body);
        let config = Config::decode(cursor)?;
        let (mut versions, mut version_nodes) = (Vec::new(), Vec::new());
        if config.manifest_kind == ManifestKind::Single {
            let arity_log2 = config.version_tree_arity_log2;
            let table = FileTable::decode(cursor, transitive, limit)?;
            versions = decode_versions(cursor, &table, arity_log2)?;
            let most = version::max_height(arity_log2).into();
            version_nodes = decode_nodes(cursor, &table, most, None)?;
        }
        cursor.finish()?;
        let manifest = Self {
            config,
            versions,
            version_nodes,
        };
        manifest.check()?;
        Ok(manifest)
    }

    /// Writes the manifest.
    ///
    /// # Errors
    /// A configuration or versions that the format does not allow.
    pub fn encode(&self) -> Result<Bytes> {
        self.config.check()?;
        self.check()?;
        let mut out = Vec::new();
        self.config.encode(&mut out);
        if self.config.manifest_kind == ManifestKind::Single {
            let mut table = FileTableBuilder::default();
            add_version_files(&mut table, &self.versions);
            add_node_files(&mut table, &self.version_nodes);
            table.encode(&mut out)?;
            encode_versions(&mut out, &table, &self.versions);
            encode_nodes(&mut out, &table, &self.version_nodes, true);
        }
        envelope::seal(MANIFEST_MAGIC, self.config.compression, &out)
    }

    fn check(&self) -> Result<()> {
        let wrong = |what| Err(Error::Damaged { what, offset: 0 });
        if self.config.manifest_kind == ManifestKind::Numbered {
            if self.versions.is_empty() && self.version_nodes.is_empty() {
                return Ok(());
            }
            return wrong("versions in the manifest of numbered ones");
        }
        let arity_log2 = self.config.version_tree_arity_log2;
        check_versions(&self.versions, arity_log2)?;
        let Some(last) = self.versions.last() else {
            return wrong("no version");
        };
        let (nodes, most) = (&self.version_nodes, version::max_height(arity_log2));
        version::check_order(nodes.iter().map(|node| node.generation))?;
        if nodes
            .windows(2)
            .any(|pair| pair[0].height <= pair[1].height)
        {
            return wrong("version nodes whose heights do not go down");
        }
        for node in nodes {
            if node.height == 0 {
                return wrong("version node of height 0");
            }
            at_most("height of a version node", node.height.into(), most.into())?;
            let (from, to) = covered(last.generation, arity_log2, node.height);
            if !(from..=to).contains(&node.generation) {
                return wrong("generations that are not of a node of that height");
            }
        }
        Ok(())
    }
}

/// Which generations a version node of some height in the manifest covers: height 1 those before the inline versions as far
/// as they are of one node of height 1, height 2 those before these, and so on; an empty range where there are none.
fn covered(last_generation: u64, arity_log2: u8, height: u8) -> (u64, u64) {
    // The largest multiple of 2^(arity_log2 * height) below the number.
    let below = |number: u64, height: u8| {
        let bits = u32::from(arity_log2) * u32::from(height);
        match number.checked_sub(1) {
            Some(number) => number.checked_shr(bits).map_or(0, |runs| runs << bits),
            None => 0,
        }
    };
    let mut to = last_generation;
    for level in 1..=height {
        to = below(to, level);
    }
    match to {
        0 => (1, 0),
        to => (below(to, height + 1) + 1, to),
    }
}

#[cfg(test)]
mod tests;
