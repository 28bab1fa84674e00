//! What a reader does not go beyond, whatever a database says.

/// Bounds of a reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The most bytes of a manifest, stored and decoded.
    pub manifest_bytes: usize,
    /// The most bytes of a node, decoded. A node is also held to what the database says of its nodes
    /// (`max_decoded_node_bytes`), but not below 8 MiB: a node with few large entries may be larger than it says.
    pub node_bytes: usize,
    /// The most memory of decoded nodes kept between reads.
    pub kept_bytes: usize,
    /// The most memory of the nodes from the root to where a list is, which it holds.
    pub list_bytes: usize,
    /// The highest root: a tree of 2^32 keys has this height where each node has but two entries.
    pub height: u8,
}

impl Default for Limits {
    /// For databases as Orbax writes them, whose nodes are up to 100 MB.
    fn default() -> Self {
        Self {
            manifest_bytes: 16 << 20,
            node_bytes: 128 << 20,
            kept_bytes: 256 << 20,
            list_bytes: 1 << 30,
            height: 32,
        }
    }
}

impl Limits {
    const LEAST_NODE_BYTES: usize = 8 << 20;

    /// The bound on nodes of a database that itself says `max_decoded_node_bytes`.
    pub(crate) fn node_bytes(&self, max_decoded_node_bytes: u32) -> usize {
        (max_decoded_node_bytes as usize)
            .max(Self::LEAST_NODE_BYTES)
            .min(self.node_bytes)
    }
}
