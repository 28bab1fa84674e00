//! Why a program cannot be read.

/// Why the bytes of a program cannot be read, wholly or as far as was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The bytes do not begin as MLIR bytecode does.
    #[error("program is not MLIR bytecode; send a StableHLO portable artifact")]
    NotBytecode,
    /// Another version of the container than the one that StableHLO's portable artifacts use.
    #[error("program is MLIR bytecode version {found}; version {expected} is read", expected = crate::artifact::VERSION)]
    Version {
        /// The version found.
        found: u64,
    },
    /// The bytes contradict the format.
    #[error("program is damaged: {what} at byte {offset}")]
    Damaged {
        /// What does not fit.
        what: &'static str,
        /// Absolute offset in the program.
        offset: usize,
    },
    /// Something that this reader does not know, or knows and does not take.
    #[error("program has {construct}, which is not supported here")]
    Unsupported {
        /// Names the construct.
        construct: String,
    },
    /// The module lacks a function `main` with one function type.
    #[error("program has no function `main` with a known type")]
    NoMain,
}

impl Error {
    pub(crate) fn unsupported(construct: impl Into<String>) -> Self {
        Self::Unsupported {
            construct: construct.into(),
        }
    }
}
