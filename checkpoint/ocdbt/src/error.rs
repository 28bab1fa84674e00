//! Why a database cannot be read or built.

/// What a [`Source`](crate::Source) says of a failed read.
pub type SourceError = Box<dyn std::error::Error + Send + Sync>;

/// Why bytes are not what the format allows, or a database cannot be read or built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The bytes contradict the format.
    #[error("{what} at byte {offset} of the decoded body")]
    Damaged {
        /// What does not fit.
        what: &'static str,
        /// How far the decoder had come.
        offset: usize,
    },
    /// Fewer bytes than every manifest and node has.
    #[error("{found} bytes where a manifest or node has at least {least}")]
    TooShort {
        /// How many there are.
        found: usize,
        /// The fewest that there can be.
        least: usize,
    },
    /// The first bytes are those of something else.
    #[error("begins with {found:#010x} instead of {expected:#010x}")]
    Magic {
        /// What was to be read.
        expected: u32,
        /// What is there.
        found: u32,
    },
    /// The length in the header is not that of the bytes.
    #[error("the header says {stated} bytes, there are {actual}")]
    Length {
        /// By the header.
        stated: u64,
        /// In fact.
        actual: u64,
    },
    /// The bytes have changed since they were written.
    #[error("the checksum is {computed:#010x}, stored is {stored:#010x}")]
    Checksum {
        /// By the footer.
        stored: u32,
        /// Of the bytes.
        computed: u32,
    },
    /// A value of a field that the format, as far as it is known here, does not have.
    #[error("{what} {value} is not known")]
    Unknown {
        /// The field.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// The body cannot be compressed or decompressed.
    #[error("zstd: {reason}")]
    Zstd {
        /// What is wrong.
        reason: String,
    },
    /// A number beyond what the format or the reader's [`Limits`](crate::Limits) allow.
    #[error("{what} is {value}, at most {limit} is allowed")]
    TooLarge {
        /// What is counted or measured.
        what: &'static str,
        /// How large it is, as far as it was counted.
        value: u64,
        /// The largest allowed.
        limit: u64,
    },
    /// A path in a data file table that leads out of the database, or is no path.
    #[error("{path:?} is no path of a file in a database")]
    Path {
        /// The path.
        path: String,
    },
    /// A node that is sound in itself and not what its parent says.
    #[error("{what}, against what its parent says")]
    Misplaced {
        /// What differs.
        what: &'static str,
    },
    /// An error in a part of a file.
    #[error("{path} at {offset}, {length} bytes")]
    In {
        /// The file.
        path: String,
        /// Where the part begins.
        offset: u64,
        /// How long it is.
        length: u64,
        /// What is wrong with it.
        source: Box<Error>,
    },
    /// A file is not there.
    #[error("there is no {path}")]
    Missing {
        /// The file.
        path: String,
    },
    /// A file ends before what is referred to.
    #[error("{path} ends early: {found} of {length} bytes at {offset}")]
    CutShort {
        /// The file.
        path: String,
        /// Where the part begins.
        offset: u64,
        /// How long it should be.
        length: u64,
        /// How much there is.
        found: u64,
    },
    /// The source failed.
    #[error("reading {path} failed")]
    Source {
        /// The file.
        path: String,
        /// Why.
        source: SourceError,
    },
    /// The manifest says that the versions are in numbered manifests, of which only a listing finds the latest.
    #[error("the database has numbered manifests; open the latest by its number")]
    Numbered,
    /// Keys are to be added in order, each once.
    #[error("key {key:?} does not come after the one before it")]
    Order {
        /// The key.
        key: String,
    },
    /// Two databases to be merged have different values for a key.
    #[error("key {key:?} has different values in two of the databases")]
    Conflict {
        /// The key.
        key: String,
    },
}

impl Error {
    /// The text with that of every source, for where only one line can be shown.
    #[must_use]
    pub fn report(&self) -> String {
        let mut text = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(error) = source {
            text.push_str(": ");
            text.push_str(&error.to_string());
            source = error.source();
        }
        text
    }
}

/// A result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// `value` unless it is beyond `limit`.
pub(crate) fn at_most(what: &'static str, value: u64, limit: u64) -> Result<u64> {
    if value <= limit {
        Ok(value)
    } else {
        Err(Error::TooLarge { what, value, limit })
    }
}

/// A key for a message.
pub(crate) fn shown(key: &[u8]) -> String {
    String::from_utf8_lossy(&key[..key.len().min(200)]).into_owned()
}
