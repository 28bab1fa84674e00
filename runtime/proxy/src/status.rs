//! The only place that builds statuses for clients (D9).
//!
//! Codes: DATA_LOSS says that a worker or slice is gone and nothing else; NOT_FOUND, INTERNAL and DEADLINE_EXCEEDED are
//! never ours, since pathwaysutils' elastic training takes them for a lost slice. The plugin's own codes pass unchanged.

use waystation_proto::tensorflow::{StatusProto, error::Code};

/// Payload key under which jaxlib finds the Python stack of the failing request (protocol facts: status payloads).
const USER_CONTEXT_KEY: &str = "type.googleapis.com/ifrt.UserContext";

/// What a request answers when it fails.
pub(crate) type Status = StatusProto;

/// The longest message made here, in bytes: it may repeat what a request says, and requests may say much.
const MAX_MESSAGE_BYTES: usize = 8 << 10;
/// The longest message of a call outside the session stream, in bytes. It travels in a header, of which clients take 8 KiB,
/// and is spelled with up to three bytes for one.
const MAX_HEADER_MESSAGE_BYTES: usize = 2 << 10;

fn status(code: Code, message: impl Into<String>) -> Status {
    Status {
        code: code as i32,
        message: shortened(message.into(), MAX_MESSAGE_BYTES),
        payload: Default::default(),
    }
}

/// The caller's mistake: an unknown handle, sizes that do not agree.
pub(crate) fn invalid_argument(message: impl Into<String>) -> Status {
    status(Code::InvalidArgument, message)
}

/// Not built, or not to be had from this plugin. Names the request.
pub(crate) fn unimplemented(message: impl Into<String>) -> Status {
    status(Code::Unimplemented, message)
}

/// A worker is gone, and what it held with it.
pub(crate) fn worker_lost(worker: &str, why: &str) -> Status {
    status(
        Code::DataLoss,
        format!("worker {worker} is gone ({why}); the arrays it held are lost"),
    )
}

/// Whether it says that a worker is gone.
pub(crate) fn is_worker_lost(status: &Status) -> bool {
    status.code == Code::DataLoss as i32
}

/// What failed at one of several workers, with its name.
pub(crate) fn at_worker(mut status: Status, worker: &str) -> Status {
    // A lost worker's says whose it is.
    if status.code != Code::DataLoss as i32 {
        status.message = format!("worker {worker}: {}", status.message);
    }
    status
}

/// Something that should come has not; trying again may help.
pub(crate) fn unavailable(message: impl Into<String>) -> Status {
    status(Code::Unavailable, message)
}

/// Deleted or donated arrays, and other states that forbid the request.
pub(crate) fn failed_precondition(message: impl Into<String>) -> Status {
    status(Code::FailedPrecondition, message)
}

/// The bound of some resource is reached.
pub(crate) fn resource_exhausted(message: impl Into<String>) -> Status {
    status(Code::ResourceExhausted, message)
}

/// Adds the request's user context, so that the Python error shows the user's own line. Zero is none; one that is there
/// already stays (the first failure is the cause).
pub(crate) fn with_user_context(mut status: Status, user_context: u64) -> Status {
    if user_context != 0 {
        status
            .payload
            .entry(USER_CONTEXT_KEY.to_owned())
            .or_insert_with(|| user_context.to_string().into_bytes());
    }
    status
}

/// The user context that a failure names.
pub(crate) fn user_context(status: &Status) -> Option<u64> {
    let id = status.payload.get(USER_CONTEXT_KEY)?;
    std::str::from_utf8(id).ok()?.parse().ok()
}

/// An optional status of a worker's reply: `Err` where it is set and not OK.
pub(crate) fn check(status: Option<Status>) -> Result<(), Status> {
    match status {
        Some(status) if status.code != Code::Ok as i32 => Err(status),
        _ => Ok(()),
    }
}

/// For a gRPC method outside the session stream.
pub(crate) fn to_tonic(status: &Status) -> tonic::Status {
    let message = shortened(status.message.clone(), MAX_HEADER_MESSAGE_BYTES);
    tonic::Status::new(tonic::Code::from_i32(status.code), message)
}

/// The error of a client's stream. tonic calls a message that does not decode an internal error of the server, which is not
/// what a client may take it for.
pub(crate) fn malformed(error: tonic::Status) -> tonic::Status {
    match error.code() {
        tonic::Code::Internal => tonic::Status::invalid_argument(error.message()),
        _ => error,
    }
}

fn shortened(mut message: String, limit: usize) -> String {
    if message.len() > limit {
        let end = (0..=limit).rev().find(|&end| message.is_char_boundary(end));
        message.truncate(end.unwrap_or(0));
        // A request may be hundreds of megabytes; what is kept must not hold them.
        message.shrink_to_fit();
        message.push_str(" ...");
    }
    message
}

/// A gRPC failure towards a worker, as the client sees it.
pub(crate) fn from_worker(worker: &str, error: &tonic::Status) -> Status {
    match error.code() {
        tonic::Code::Unavailable | tonic::Code::Unknown | tonic::Code::Cancelled => {
            worker_lost(worker, error.message())
        }
        code => Status {
            code: code as i32,
            message: error.message().to_owned(),
            payload: Default::default(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Codes that pathwaysutils takes for a lost slice must not come from here, DATA_LOSS apart.
    #[test]
    fn codes_are_those_the_design_allows() {
        let table = [
            (invalid_argument("x"), 3),
            (resource_exhausted("x"), 8),
            (failed_precondition("x"), 9),
            (unimplemented("x"), 12),
            (unavailable("x"), 14),
            (worker_lost("w", "x"), 15),
        ];
        for (status, code) in table {
            assert_eq!(status.code, code, "{}", status.message);
        }
    }

    #[test]
    fn long_messages_are_cut_between_characters() {
        let long = invalid_argument("é".repeat(100_000)).message;
        assert!(long.len() <= MAX_MESSAGE_BYTES + 4, "{}", long.len());
        assert!(long.ends_with("é ..."));
        let header = to_tonic(&invalid_argument(format!("x{}", "é".repeat(5000))));
        assert!(header.message().len() <= MAX_HEADER_MESSAGE_BYTES + 4);
        assert!(header.message().ends_with("é ..."));
        assert_eq!(invalid_argument("short").message, "short");
    }

    #[test]
    fn the_first_user_context_stays() {
        let status = with_user_context(with_user_context(invalid_argument("x"), 7), 8);
        assert_eq!(
            status.payload.get(USER_CONTEXT_KEY).map(|v| v.to_vec()),
            Some(b"7".to_vec())
        );
        assert_eq!(user_context(&status), Some(7));
        assert_eq!(user_context(&invalid_argument("x")), None);
        assert!(
            with_user_context(invalid_argument("x"), 0)
                .payload
                .is_empty()
        );
    }
}
