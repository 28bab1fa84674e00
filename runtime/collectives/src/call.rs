//! One call of a collective by one partition: its memory, and whom to tell the outcome.

use bytes::Bytes;

/// Status codes, numbered as gRPC's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Code {
    /// The launch was given up.
    Cancelled = 1,
    /// No better code is known.
    Unknown = 2,
    /// The program calls a collective wrongly.
    InvalidArgument = 3,
    /// Not used here; what fails a launch may have it.
    DeadlineExceeded = 4,
    /// As before.
    NotFound = 5,
    /// As before.
    AlreadyExists = 6,
    /// As before.
    PermissionDenied = 7,
    /// A bound was reached.
    ResourceExhausted = 8,
    /// Processes do not agree with each other.
    FailedPrecondition = 9,
    /// The launch failed elsewhere.
    Aborted = 10,
    /// Not used here; what fails a launch may have it.
    OutOfRange = 11,
    /// Not built.
    Unimplemented = 12,
    /// Not used here; what fails a launch may have it.
    Internal = 13,
    /// A process cannot be reached.
    Unavailable = 14,
    /// A process is gone.
    DataLoss = 15,
    /// Not used here; what fails a launch may have it.
    Unauthenticated = 16,
}

impl Code {
    /// The number.
    #[must_use]
    pub fn number(self) -> i32 {
        self as i32
    }

    /// The code of a number; [`Code::Unknown`] for what is none.
    #[must_use]
    pub fn from_number(number: i32) -> Self {
        match number {
            1 => Self::Cancelled,
            3 => Self::InvalidArgument,
            4 => Self::DeadlineExceeded,
            5 => Self::NotFound,
            6 => Self::AlreadyExists,
            7 => Self::PermissionDenied,
            8 => Self::ResourceExhausted,
            9 => Self::FailedPrecondition,
            10 => Self::Aborted,
            11 => Self::OutOfRange,
            12 => Self::Unimplemented,
            13 => Self::Internal,
            14 => Self::Unavailable,
            15 => Self::DataLoss,
            16 => Self::Unauthenticated,
            _ => Self::Unknown,
        }
    }
}

/// Why a call or a launch failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    code: Code,
    message: String,
}

impl Failure {
    /// A failure with a text for the user.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }

    /// The code.
    #[must_use]
    pub fn code(&self) -> Code {
        self.code
    }

    /// The text.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }
}

/// The memory of a call's results.
pub trait Outputs: Send {
    /// How many results there are.
    fn count(&self) -> usize;

    /// The bytes of a result; empty if there is no such result.
    fn get(&mut self, index: usize) -> &mut [u8];
}

impl Outputs for Vec<Vec<u8>> {
    fn count(&self) -> usize {
        self.len()
    }

    fn get(&mut self, index: usize) -> &mut [u8] {
        self.get_mut(index).map_or(&mut [], Vec::as_mut_slice)
    }
}

/// One call.
///
/// The memory of operands may be read until the last clone of its [`Bytes`] is gone, which can be after `done` was called: pieces
/// may be on their way yet. Who lends memory by [`Bytes::from_owner`] must keep it until then.
pub struct Call {
    /// The operands.
    pub inputs: Vec<Bytes>,
    /// The results.
    pub outputs: Box<dyn Outputs>,
    /// Called once with the outcome, after the results are let go of: on a thread of the transport or on the one that
    /// made the call. It must not block.
    pub done: Box<dyn FnOnce(Result<(), Failure>) + Send>,
}

impl std::fmt::Debug for Call {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Call")
            .field("inputs", &self.inputs.len())
            .field("outputs", &self.outputs.count())
            .finish_non_exhaustive()
    }
}
