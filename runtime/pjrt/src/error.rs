//! What can go wrong at the plugin's border.

/// Canonical status codes, numbered as absl, gRPC and PJRT number them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Code {
    /// The caller gave the operation up.
    Cancelled = 1,
    /// No better code is known.
    Unknown = 2,
    /// The request is wrong whatever the state of the system.
    InvalidArgument = 3,
    /// Time ran out.
    DeadlineExceeded = 4,
    /// Something that was asked for does not exist.
    NotFound = 5,
    /// Something that was to be created exists.
    AlreadyExists = 6,
    /// The caller lacks a right.
    PermissionDenied = 7,
    /// Memory or another resource is used up.
    ResourceExhausted = 8,
    /// The system is not in the state that the request needs.
    FailedPrecondition = 9,
    /// The operation was given up, typically for a conflict.
    Aborted = 10,
    /// Past the valid range.
    OutOfRange = 11,
    /// Not built, or not built into this plugin.
    Unimplemented = 12,
    /// A promise inside the system is broken.
    Internal = 13,
    /// Not now; a retry may help.
    Unavailable = 14,
    /// Data is lost for good.
    DataLoss = 15,
    /// The caller is not known.
    Unauthenticated = 16,
}

impl Code {
    /// The code of a number that a plugin gave; anything outside the list is [`Code::Unknown`].
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

    /// The number on the wire (absl, gRPC).
    #[must_use]
    pub fn number(self) -> i32 {
        self as i32
    }
}

/// A failure at the plugin's border: reported by the plugin, or found by this crate before or after a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{function}: {message}")]
pub struct Error {
    code: Code,
    message: String,
    function: &'static str,
    from_plugin: bool,
}

impl Error {
    /// An error that this crate found itself, while about to call or having called `function`.
    pub(crate) fn own(code: Code, function: &'static str, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
            function,
            from_plugin: false,
        }
    }

    /// An error that the plugin reported; code and message pass unchanged.
    pub(crate) fn plugin(code: Code, function: &'static str, message: String) -> Self {
        Self {
            code,
            message,
            function,
            from_plugin: true,
        }
    }

    /// An argument that cannot be right.
    pub(crate) fn invalid(function: &'static str, message: impl Into<String>) -> Self {
        Self::own(Code::InvalidArgument, function, message)
    }

    /// The plugin broke the contract of the C API.
    pub(crate) fn contract(function: &'static str, what: &str) -> Self {
        Self::own(
            Code::Unknown,
            function,
            format!("the plugin reported success but {what}"),
        )
    }

    /// The same error, named after the function that started the work.
    pub(crate) fn from(mut self, function: &'static str) -> Self {
        self.function = function;
        self
    }

    /// The status code: the plugin's own where the plugin reported the error.
    #[must_use]
    pub fn code(&self) -> Code {
        self.code
    }

    /// The text: the plugin's own where the plugin reported the error.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// The function of the C API that failed or could not be called; `discover` for a plugin not found.
    #[must_use]
    pub fn function(&self) -> &'static str {
        self.function
    }

    /// Whether the plugin reported it, so that code and message are XLA's and must pass unchanged.
    #[must_use]
    pub fn is_from_plugin(&self) -> bool {
        self.from_plugin
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_keep_their_numbers() {
        for number in 1..=16 {
            assert_eq!(Code::from_number(number).number(), number);
        }
        assert_eq!(Code::from_number(0), Code::Unknown);
        assert_eq!(Code::from_number(17), Code::Unknown);
        assert_eq!(Code::from_number(-3), Code::Unknown);
    }
}
