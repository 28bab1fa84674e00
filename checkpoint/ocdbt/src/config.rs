//! How a database is written, as its manifest says (format: "Manifest configuration").
//!
//! | field | encoding |
//! | --- | --- |
//! | uuid | 16 bytes |
//! | manifest kind: 0 single, 1 numbered | u8 (in the bytes; the published table lacks it) |
//! | max_inline_value_bytes | varint, 32 bits |
//! | max_decoded_node_bytes | varint, 32 bits |
//! | version_tree_arity_log2, 1 to 16 | u8 |
//! | compression method: 0 none, 1 zstd | varint |
//! | with zstd, its level | i32, little-endian |

use crate::error::{Error, Result, at_most};
use crate::primitive::{Cursor, put_varint};

/// The largest value that a leaf may hold inline, whatever the configuration says.
pub const MAX_INLINE_VALUE_BYTES: u64 = 1 << 20;

/// Where the versions of a database are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ManifestKind {
    /// In `manifest.ocdbt`.
    Single,
    /// In files `manifest.%016x`, one a generation, each a whole manifest of kind [`ManifestKind::Single`];
    /// `manifest.ocdbt` holds the configuration alone.
    Numbered,
}

/// How the bodies of manifests and nodes are compressed. Values out of line never are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// Not at all.
    None,
    /// One zstd frame.
    Zstd {
        /// The level to write with; 0 stands for zstd's default.
        level: i32,
    },
}

/// The configuration in a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Tells the database from any other.
    pub uuid: [u8; 16],
    /// Where the versions are.
    pub manifest_kind: ManifestKind,
    /// Values up to this size are written into the leaves.
    pub max_inline_value_bytes: u32,
    /// Nodes are split where they would be larger than this, uncompressed.
    pub max_decoded_node_bytes: u32,
    /// Base-2 logarithm of how many versions, or nodes, a node of the version tree has.
    pub version_tree_arity_log2: u8,
    /// How bodies are compressed.
    pub compression: Compression,
}

impl Config {
    /// What Orbax configures: values up to 1 KiB inline, nodes up to 100 MB (hence one), zstd at its default level.
    #[must_use]
    pub fn orbax(uuid: [u8; 16]) -> Self {
        Self {
            uuid,
            manifest_kind: ManifestKind::Single,
            max_inline_value_bytes: 1024,
            max_decoded_node_bytes: 100_000_000,
            version_tree_arity_log2: 4,
            compression: Compression::Zstd { level: 0 },
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        check_arity(self.version_tree_arity_log2)?;
        at_most(
            "max_inline_value_bytes",
            u64::from(self.max_inline_value_bytes),
            MAX_INLINE_VALUE_BYTES,
        )?;
        if let Compression::Zstd { level } = self.compression {
            check_level(level)?;
        }
        Ok(())
    }

    pub(crate) fn decode(cursor: &mut Cursor<'_>) -> Result<Self> {
        let uuid = cursor.array()?;
        let manifest_kind = match cursor.byte()? {
            0 => ManifestKind::Single,
            1 => ManifestKind::Numbered,
            value => {
                return Err(Error::Unknown {
                    what: "manifest kind",
                    value: value.into(),
                });
            }
        };
        let max_inline_value_bytes = cursor.varint_u32("max_inline_value_bytes")?;
        let max_decoded_node_bytes = cursor.varint_u32("max_decoded_node_bytes")?;
        let version_tree_arity_log2 = cursor.byte()?;
        check_arity(version_tree_arity_log2)?;
        let compression = match cursor.varint()? {
            0 => Compression::None,
            1 => Compression::Zstd {
                level: check_level(i32::from_le_bytes(cursor.array()?))?,
            },
            value => {
                return Err(Error::Unknown {
                    what: "compression method",
                    value,
                });
            }
        };
        Ok(Self {
            uuid,
            manifest_kind,
            max_inline_value_bytes,
            max_decoded_node_bytes,
            version_tree_arity_log2,
            compression,
        })
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.uuid);
        out.push(match self.manifest_kind {
            ManifestKind::Single => 0,
            ManifestKind::Numbered => 1,
        });
        put_varint(out, self.max_inline_value_bytes.into());
        put_varint(out, self.max_decoded_node_bytes.into());
        out.push(self.version_tree_arity_log2);
        match self.compression {
            Compression::None => put_varint(out, 0),
            Compression::Zstd { level } => {
                put_varint(out, 1);
                out.extend_from_slice(&level.to_le_bytes());
            }
        }
    }
}

/// The arity's logarithm is 1 to 16.
pub(crate) fn check_arity(log2: u8) -> Result<()> {
    match log2 {
        1..=16 => Ok(()),
        value => Err(Error::Unknown {
            what: "version_tree_arity_log2",
            value: value.into(),
        }),
    }
}

fn check_level(level: i32) -> Result<i32> {
    if (zstd::zstd_safe::min_c_level()..=zstd::zstd_safe::max_c_level()).contains(&level) {
        Ok(level)
    } else {
        Err(Error::Zstd {
            reason: format!("there is no level {level}"),
        })
    }
}
