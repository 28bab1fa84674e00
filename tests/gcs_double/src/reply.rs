//! Answers, and the refusals that both APIs know, each in its own words.

use axum::body::Body;
use axum::http::{Response, StatusCode};
use bytes::Bytes;
use serde_json::json;

/// An answer before it is HTTP, so that faults can still spoil it.
#[derive(Debug, Clone)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Bytes,
}

impl Reply {
    pub(crate) fn new(status: u16, body: impl Into<Bytes>) -> Reply {
        Reply {
            status,
            headers: Vec::new(),
            body: body.into(),
        }
    }

    pub(crate) fn empty(status: u16) -> Reply {
        Reply::new(status, Bytes::new())
    }

    pub(crate) fn json(value: &impl serde::Serialize) -> Reply {
        let text = serde_json::to_vec(value).unwrap_or_default();
        Reply::new(200, text).header("content-type", "application/json; charset=UTF-8")
    }

    pub(crate) fn xml(body: String) -> Reply {
        let body = format!("<?xml version='1.0' encoding='UTF-8'?>{body}");
        Reply::new(200, body).header("content-type", "application/xml; charset=UTF-8")
    }

    pub(crate) fn header(mut self, name: &'static str, value: impl ToString) -> Reply {
        self.headers.push((name, value.to_string()));
        self
    }

    pub(crate) fn status(mut self, status: u16) -> Reply {
        self.status = status;
        self
    }

    pub(crate) fn into_response(self) -> Response<Body> {
        self.with_body(Body::from)
    }

    /// `body`: makes something else of the body than what is in it.
    pub(crate) fn with_body(self, body: impl FnOnce(Bytes) -> Body) -> Response<Body> {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = Response::new(body(self.body));
        *response.status_mut() = status;
        for (name, value) in self.headers {
            if let Ok(value) = value.parse() {
                response.headers_mut().append(name, value);
            }
        }
        response
    }
}

/// Why a request gets nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Refusal {
    NoBucket(String),
    NoObject(String),
    Exists(String),
    Precondition,
    NotModified,
    Forbidden(String),
    Unauthorized,
    TooOften(String),
    BadRange(usize),
    Invalid(String),
    NotBuilt(String),
    /// Ordered by a fault.
    Ordered(u16),
}

impl Refusal {
    /// Status, the JSON API's reason, the XML API's code, and text.
    fn parts(&self) -> (u16, &'static str, &'static str, String) {
        match self {
            Refusal::NoBucket(_) => {
                let text = "The specified bucket does not exist.";
                (404, "notFound", "NoSuchBucket", text.to_owned())
            }
            Refusal::NoObject(name) => (
                404,
                "notFound",
                "NoSuchKey",
                format!("No such object: {name}"),
            ),
            Refusal::Exists(name) => {
                let text = format!("The bucket {name} exists already.");
                (409, "conflict", "BucketAlreadyExists", text)
            }
            Refusal::Precondition => {
                let text = "At least one of the pre-conditions you specified did not hold.";
                (
                    412,
                    "conditionNotMet",
                    "PreconditionFailed",
                    text.to_owned(),
                )
            }
            Refusal::NotModified => (304, "notModified", "NotModified", String::new()),
            Refusal::Forbidden(permission) => {
                let text = format!("The caller does not have {permission} access.");
                (403, "forbidden", "AccessDenied", text)
            }
            Refusal::Unauthorized => {
                let text = "Invalid Credentials";
                (401, "authError", "AuthenticationRequired", text.to_owned())
            }
            Refusal::TooOften(name) => {
                let text =
                    format!("{name} exceeded the rate limit for object mutation operations.");
                (429, "rateLimitExceeded", "SlowDown", text)
            }
            Refusal::BadRange(_) => {
                let text = "The requested range cannot be satisfied.";
                (
                    416,
                    "requestedRangeNotSatisfiable",
                    "InvalidRange",
                    text.to_owned(),
                )
            }
            Refusal::Invalid(text) => (400, "invalid", "InvalidArgument", text.clone()),
            Refusal::NotBuilt(text) => (
                501,
                "notImplemented",
                "NotImplemented",
                format!("the double has no {text}"),
            ),
            Refusal::Ordered(status) => {
                let (reason, code) = match status {
                    401 => ("authError", "AuthenticationRequired"),
                    403 => ("forbidden", "AccessDenied"),
                    404 => ("notFound", "NoSuchBucket"),
                    429 => ("rateLimitExceeded", "SlowDown"),
                    _ => ("backendError", "InternalError"),
                };
                (*status, reason, code, "ordered from the double".to_owned())
            }
        }
    }

    pub(crate) fn json(&self) -> Reply {
        let (status, reason, _, text) = self.parts();
        if status == 304 {
            return Reply::empty(status);
        }
        let mut error = json!({"message": text, "domain": "global", "reason": reason});
        if matches!(self, Refusal::Precondition) {
            error["locationType"] = "header".into();
            error["location"] = "If-Match".into();
        }
        let body = json!({"error": {"code": status, "message": text, "errors": [error]}});
        self.more(Reply::json(&body).status(status))
    }

    pub(crate) fn xml(&self) -> Reply {
        let (status, _, code, text) = self.parts();
        if status == 304 {
            return Reply::empty(status);
        }
        let text = crate::xml::escape(&text);
        let body = format!("<Error><Code>{code}</Code><Message>{text}</Message></Error>");
        self.more(Reply::xml(body).status(status))
    }

    fn more(&self, reply: Reply) -> Reply {
        match self {
            Refusal::BadRange(length) => reply.header("content-range", format!("bytes */{length}")),
            Refusal::Unauthorized => reply.header("www-authenticate", "Bearer"),
            _ => reply,
        }
    }
}
