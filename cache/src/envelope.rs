//! The bytes of an entry outside this process, and everything that is checked before they are believed.
//!
//! Format 1; integers are little-endian:
//!
//! ```text
//! offset  bytes  what
//! 0       8      magic "WAYSTEXE"
//! 8       4      format number, 1
//! 12      4      number of sections, n
//! 16      8      length of the whole object, in bytes
//! 24      32     key
//! 56      24*n   section table, ascending by kind, no kind twice:
//!                  u32 kind (1 provenance, 2 info, 3 executable, 4 text, 255 signature), u32 encoding (0 as is, 1 zstd),
//!                  u64 bytes here, u64 bytes when decoded
//! ...            the sections, in the order of the table, without gaps
//! end-32  32     SHA-256 of all bytes before it
//! ```
//!
//! Provenance is JSON ([`Provenance`]), info the proto `waystation.ExecutableInfo`, executable what the plugin
//! serialized, text UTF-8 (optional; the others must be there). The signature, if there is one, is the last section and
//! stands for all bytes of the object before it ([`crate::sign`]); it is looked at where a key is given, and then must be
//! there.
//!
//! The checksum finds accidents: a cut, a flip, a mix. It proves nothing about who wrote the object, so the limits hold
//! whatever it says: no length in a file is believed before it has been compared with the bytes that are there or with
//! [`Limits`], and decompression stops at the length stated. The text is decompressed only when it is asked for, and a
//! liar's that does not decompress is no text. An object of another format number is refused as a whole.

use bytes::Bytes;
use prost::Message;
use sha2::{Digest as _, Sha256};
use waystation_lifecycle::bucket::layout::Digest;

use crate::entry::{Entry, Provenance};
use crate::sign::SigningKey;

mod open;
mod packed;
mod seal;
#[cfg(test)]
mod tests;

pub use open::{open, open_signed};
pub(crate) use open::{stated_bytes, stated_length};
use packed::Packed;
pub use packed::Text;
pub use seal::{seal, seal_signed};

/// First bytes of every entry.
pub const MAGIC: [u8; 8] = *b"WAYSTEXE";

/// The format number that this build writes, and the only one it reads.
pub const FORMAT: u32 = 1;

const HEADER_BYTES: usize = 56;
const ROW_BYTES: usize = 24;
const CHECKSUM_BYTES: usize = 32;

/// No signature is longer.
const SIGNATURE_BYTES: u64 = 256;

/// What an entry may hold, in bytes. Larger entries are neither written nor read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The whole object as stored.
    pub object: u64,
    /// The executable, decoded. XLA's serialized executables are protos, which end at 2 GiB.
    pub executable: u64,
    /// The info, decoded.
    pub info: u64,
    /// The text, decoded.
    pub text: u64,
    /// The provenance.
    pub provenance: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            object: 4 << 30,
            executable: 2 << 30,
            info: 64 << 20,
            text: 512 << 20,
            provenance: 1 << 20,
        }
    }
}

/// What an entry says once it is believed.
#[derive(Debug, Clone, PartialEq)]
pub struct Opened {
    /// The program.
    pub entry: Entry,
    /// How it came to be.
    pub provenance: Provenance,
    /// Bytes of the object.
    pub stored_bytes: u64,
    /// The object's checksum, which tells it from every other.
    pub checksum: Digest,
}

/// Why bytes are not the entry that was asked for. Each is a miss.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Bad {
    /// Fewer bytes than the smallest entry.
    #[error("object of {bytes} bytes is shorter than any entry")]
    TooShort {
        /// Its length.
        bytes: u64,
    },
    /// More bytes than allowed.
    #[error("object of {bytes} bytes is larger than the limit of {limit}")]
    TooLarge {
        /// Its length.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// Other first bytes.
    #[error("object is no entry: its first bytes are others")]
    Foreign,
    /// Another format.
    #[error("entry has format {found}, this build reads {FORMAT}")]
    UnknownFormat {
        /// The number found.
        found: u32,
    },
    /// The length written in it is not the length it has.
    #[error("entry says it has {stated} bytes and has {actual}")]
    Length {
        /// Written in the entry.
        stated: u64,
        /// Counted.
        actual: u64,
    },
    /// A bit is not as it was written.
    #[error("entry does not match its checksum")]
    Checksum,
    /// The entry of another program under this name.
    #[error("entry is that of key {}", hex::encode(found))]
    WrongKey {
        /// The key in the entry.
        found: Digest,
    },
    /// The section table contradicts itself or the object.
    #[error("entry's section table is wrong: {0}")]
    Table(&'static str),
    /// A section is larger than allowed.
    #[error("entry's {section} would have {bytes} bytes, more than the limit of {limit}")]
    SectionTooLarge {
        /// Name of the section.
        section: &'static str,
        /// Its decoded length as stated.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// A section does not decode.
    #[error("entry's {section} does not decode: {reason}")]
    Section {
        /// Name of the section.
        section: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// It is not signed with the key given.
    #[error("entry {0}")]
    Signature(&'static str),
    /// It is whole, and of no use: see [`crate::verify`].
    #[error("entry is whole and has failed to load before")]
    Refused,
    /// The store gives out others and not this one, or what bears its name is no file.
    #[error("object cannot be read: {0}")]
    Unreadable(String),
}

impl Bad {
    /// True for what is of use to nobody. An entry of another format may be another version's, one without a signature
    /// somebody's who asks for none, and what is too large here need not be elsewhere.
    pub fn is_rubbish(&self) -> bool {
        matches!(self.reason(), "corrupt" | "foreign" | "wrong key")
    }

    /// A word for metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Bad::Foreign => "foreign",
            Bad::UnknownFormat { .. } => "format",
            Bad::WrongKey { .. } => "wrong key",
            Bad::TooLarge { .. } | Bad::SectionTooLarge { .. } => "too large",
            Bad::TooShort { .. }
            | Bad::Length { .. }
            | Bad::Checksum
            | Bad::Table(_)
            | Bad::Section { .. } => "corrupt",
            Bad::Signature(_) => "signature",
            Bad::Refused => "refused",
            Bad::Unreadable(_) => "unreadable",
        }
    }
}

/// An entry that cannot be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SealError {
    /// Larger than allowed.
    #[error("{section} has {bytes} bytes, more than the limit of {limit}")]
    TooLarge {
        /// Name of the section, or "entry".
        section: &'static str,
        /// Its length.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// The compressor or the encoder failed.
    #[error("{section} cannot be encoded: {reason}")]
    Encode {
        /// Name of the section.
        section: &'static str,
        /// What the encoder says.
        reason: String,
    },
    /// The key given only checks signatures.
    #[error("the signing key is a public one, which signs nothing")]
    NoSignature,
}

/// The kinds of sections, in the order in which they are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Provenance = 1,
    Info = 2,
    Executable = 3,
    Text = 4,
    Signature = 255,
}

impl Kind {
    fn of(number: u32) -> Option<Kind> {
        match number {
            1 => Some(Kind::Provenance),
            2 => Some(Kind::Info),
            3 => Some(Kind::Executable),
            4 => Some(Kind::Text),
            255 => Some(Kind::Signature),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Provenance => "provenance",
            Kind::Info => "info",
            Kind::Executable => "executable",
            Kind::Text => "text",
            Kind::Signature => "signature",
        }
    }

    fn limit(self, limits: &Limits) -> u64 {
        match self {
            Kind::Provenance => limits.provenance,
            Kind::Info => limits.info,
            Kind::Executable => limits.executable,
            Kind::Text => limits.text,
            Kind::Signature => SIGNATURE_BYTES,
        }
    }
}
