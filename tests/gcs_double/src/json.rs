//! The JSON API, as far as TensorStore, gcsfs, Orbax and our own bucket calls use it.

mod batch;
mod buckets;
mod compose;
mod objects;
mod upload;

pub(crate) use objects::bytes;

use crate::call::Call;
use crate::reply::{Refusal, Reply};
use crate::state::State;

/// Whether a request is for this API.
pub(crate) fn serves(call: &Call) -> bool {
    let path: Vec<_> = call.path.iter().map(String::as_str).collect();
    matches!(
        path[..],
        ["storage", "v1", ..]
            | ["upload", "storage", "v1", ..]
            | ["resumable", "upload", "storage", "v1", ..]
            | ["download", "storage", "v1", ..]
            | ["batch", "storage", "v1", ..]
    )
}

pub(crate) fn serve(state: &mut State, call: &Call) -> Result<Reply, Refusal> {
    let path: Vec<_> = call.path.iter().map(String::as_str).collect();
    let path = if path[0] == "resumable" {
        &path[1..]
    } else {
        &path[..]
    };
    let name = |rest: &[&str]| rest.join("/");
    match (call.method.as_str(), path) {
        ("POST", ["batch", ..]) => batch::serve(state, call),
        ("POST" | "PUT" | "DELETE", ["upload", _, _, "b", bucket, "o"]) => {
            upload::serve(state, call, bucket)
        }
        ("GET", ["download", _, _, "b", bucket, "o", rest @ ..]) => {
            objects::media(state, call, bucket, &name(rest))
        }
        ("POST", ["storage", _, "b"]) => buckets::insert(state, call),
        ("GET", ["storage", _, "b", bucket]) => buckets::get(state, call, bucket),
        ("PATCH", ["storage", _, "b", bucket]) => buckets::patch(state, call, bucket),
        ("GET", ["storage", _, "b", bucket, "iam", "testPermissions"]) => {
            buckets::test_permissions(state, call, bucket)
        }
        ("GET", ["storage", _, "b", bucket, "o"]) => objects::list(state, call, bucket),
        ("POST", ["storage", _, "b", bucket, "o", to, "compose"]) => {
            compose::compose(state, call, bucket, to)
        }
        (
            "POST",
            [
                "storage",
                _,
                "b",
                bucket,
                "o",
                from,
                "rewriteTo",
                "b",
                to_bucket,
                "o",
                to,
            ],
        ) => compose::rewrite(state, call, (bucket, from), (to_bucket, to)),
        (
            "POST",
            [
                "storage",
                _,
                "b",
                bucket,
                "o",
                from,
                "copyTo",
                "b",
                to_bucket,
                "o",
                to,
            ],
        ) => compose::copy(state, call, (bucket, from), (to_bucket, to)),
        // Of newer clients, which then copy and delete. The emulator refuses it with the same status.
        ("POST", ["storage", _, "b", _, "o", _, "moveTo", "o", _]) => {
            Err(Refusal::Invalid("objects are not moved here".to_owned()))
        }
        ("GET", ["storage", _, "b", bucket, "o", rest @ ..]) => {
            if call.param("alt") == Some("media") {
                objects::media(state, call, bucket, &name(rest))
            } else {
                objects::get(state, call, bucket, &name(rest))
            }
        }
        ("PATCH", ["storage", _, "b", bucket, "o", rest @ ..]) => {
            objects::patch(state, call, bucket, &name(rest))
        }
        ("DELETE", ["storage", _, "b", bucket, "o", rest @ ..]) => {
            objects::delete(state, call, bucket, &name(rest))
        }
        (method, path) => Err(Refusal::NotBuilt(format!("{method} {}", path.join("/")))),
    }
}
