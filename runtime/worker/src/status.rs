//! Builds the statuses that leave this worker. One place, so that codes keep to the project's rule: `DATA_LOSS` only for a
//! worker that is gone; never `NOT_FOUND`, `INTERNAL` or `DEADLINE_EXCEEDED` for an error of our own (pathwaysutils takes
//! those for a lost slice); a plugin's own code and text pass unchanged.

use std::sync::Arc;

use prost::Message as _;
use waystation_proto::tensorflow::{StatusProto, error::Code};

/// A failure shared by all that depends on it.
pub(crate) type Fault = Arc<StatusProto>;

/// Payload under which JAX's client finds the Python stack of the failing request; the value is the request's user
/// context id in decimal ASCII.
const USER_CONTEXT: &str = "type.googleapis.com/ifrt.UserContext";

/// A status of our own.
pub(crate) fn of(code: Code, message: impl Into<String>) -> StatusProto {
    StatusProto {
        code: code as i32,
        message: message.into(),
        ..StatusProto::default()
    }
}

/// The request itself is wrong.
pub(crate) fn invalid(message: impl Into<String>) -> StatusProto {
    of(Code::InvalidArgument, message)
}

/// The request is not built; `message` names it.
pub(crate) fn unimplemented(message: impl Into<String>) -> StatusProto {
    of(Code::Unimplemented, message)
}

/// A bound of this worker is reached.
pub(crate) fn exhausted(message: impl Into<String>) -> StatusProto {
    of(Code::ResourceExhausted, message)
}

/// Names the request whose Python stack the client shall show. Zero means that the request had none.
pub(crate) fn with_context(mut status: StatusProto, user_context: u64) -> StatusProto {
    if user_context != 0 {
        status
            .payload
            .entry(USER_CONTEXT.to_owned())
            .or_insert_with(|| user_context.to_string().into_bytes());
    }
    status
}

/// A plugin's error: its own code and message.
pub(crate) fn of_plugin(error: &waystation_pjrt::Error, user_context: u64) -> StatusProto {
    let status = StatusProto {
        code: error.code() as i32,
        message: error.message().to_owned(),
        ..StatusProto::default()
    };
    with_context(status, user_context)
}

/// As a gRPC status, with the whole proto in its details.
pub(crate) fn to_grpc(status: &StatusProto) -> tonic::Status {
    tonic::Status::with_details(
        tonic::Code::from_i32(status.code),
        status.message.clone(),
        status.encode_to_vec().into(),
    )
}

/// Back from a gRPC status made by [`to_grpc`] in another worker; `None` when the details hold no failed status, which
/// says that the transport and not the worker failed.
pub(crate) fn of_grpc(status: &tonic::Status) -> Option<StatusProto> {
    let decoded = StatusProto::decode(status.details()).ok()?;
    (decoded.code != 0).then_some(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_survives_the_way_through_grpc() {
        let status = with_context(invalid("shard 7 is unknown"), 42);
        assert_eq!(status.payload[USER_CONTEXT], b"42");
        let grpc = to_grpc(&status);
        assert_eq!(grpc.code(), tonic::Code::InvalidArgument);
        assert_eq!(grpc.message(), "shard 7 is unknown");
        assert_eq!(of_grpc(&grpc), Some(status));
        assert_eq!(
            of_grpc(&tonic::Status::unavailable("connection refused")),
            None
        );
    }

    #[test]
    fn the_first_user_context_stays() {
        let status = with_context(with_context(invalid("x"), 1), 2);
        assert_eq!(status.payload[USER_CONTEXT], b"1");
        assert!(with_context(invalid("x"), 0).payload.is_empty());
    }
}
