//! What a key leads to.

use std::time::Duration;

use bytes::Bytes;
use prost::Message;
use serde::{Deserialize, Serialize};
use waystation_lifecycle::bucket::layout::Digest;
use waystation_proto::waystation::ExecutableInfo;

use crate::envelope::Text;

/// One compiled program: what a worker needs in order to serve it without compiling.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// What a client may ask about the program. The cache fills in an empty `key`.
    pub info: ExecutableInfo,
    /// The executable as the plugin serialized it. Empty where the plugin cannot: then the entry is handed to the
    /// caller and kept nowhere.
    pub executable: Bytes,
    /// The program's HLO texts, where they were taken, as the worker joins them.
    pub text: Option<Text>,
    /// SHA-256 of the object that it was read from, which tells it from another entry of the same key; `None` where it
    /// was compiled in this process.
    pub object: Option<Digest>,
}

impl Entry {
    /// What the entry takes in memory, in bytes, near enough to bound a tier by.
    pub fn memory_bytes(&self) -> u64 {
        // The decoded proto is a small multiple of its wire form; a fixed part covers bookkeeping.
        let info = self.info.encoded_len().saturating_mul(2);
        let text = self.text.as_ref().map_or(0, Text::packed_bytes);
        (self.executable.len() as u64)
            .saturating_add(info as u64)
            .saturating_add(text as u64)
            .saturating_add(256)
    }
}

/// No single entry is counted as having saved more: an hour.
const MOST_SAVED_MICROS: u64 = 3600 * 1_000_000;

/// Where an entry came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Origin {
    /// The plugin compiled it for this request.
    Compiled,
    /// This process had it, or compiled it for another request at the same time.
    Memory,
    /// A process on this machine had left it on disk.
    Disk,
    /// The bucket had it.
    Bucket,
}

impl Origin {
    /// A word for logs and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Origin::Compiled => "compiled",
            Origin::Memory => "memory",
            Origin::Disk => "disk",
            Origin::Bucket => "bucket",
        }
    }
}

/// How an entry came to be: for people and for statistics, never for decisions about loading it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Provenance {
    /// Who compiled it.
    pub writer: String,
    /// When, in milliseconds since 1970 UTC, by the writer's clock.
    pub created_unix_ms: u64,
    /// How long the compile took, in microseconds.
    pub compile_micros: u64,
    /// The components of the key and their digests in hex, so that a miss can be explained.
    pub components: Vec<(String, String)>,
}

impl Provenance {
    /// How long the compile took, as the entry says. Anyone may have written that.
    pub fn compile_time(&self) -> Duration {
        Duration::from_micros(self.compile_micros)
    }

    /// What a hit saves, in microseconds, as far as an entry's word is taken for it.
    pub(crate) fn saved_micros(&self) -> u64 {
        self.compile_micros.min(MOST_SAVED_MICROS)
    }
}
