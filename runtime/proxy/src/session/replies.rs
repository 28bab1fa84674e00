//! Replies on their way to the client, and their numbers.
//!
//! jaxlib takes the destroyed user contexts of replies in the order of `seq_num`, from 0 and without a gap, once it has let go of
//! the reply. It looks at OK replies only, and replies to its batched deletes and destructs never come to that bookkeeping: a
//! number there would be a gap. The reply to InitRequest does come, but jaxlib holds it to the session's end: its number
//! must be one that nothing waits for.

use std::sync::{
    Arc,
    atomic::{AtomicI64, Ordering::Relaxed},
};

use tokio::sync::mpsc;
use waystation_proto::xla::ifrt::proxy::{IfrtResponse, ResponseMetadata, ifrt_response::Response};

use super::user_context::Destroyed;
use crate::status::Status;

/// The number of the reply to InitRequest: after all others.
const LAST: i64 = i64::MAX;

/// Whether an OK reply counts in the client's bookkeeping.
#[derive(Clone, Copy)]
pub(super) enum Numbered {
    Yes,
    /// It does, but nothing may have to wait for it.
    Last,
    No,
}

/// One session's way back to its client.
pub(super) struct Replies {
    queue: mpsc::Sender<Result<IfrtResponse, tonic::Status>>,
    next: AtomicI64,
    destroyed: Arc<Destroyed>,
}

impl Replies {
    pub(super) fn new(
        queue: mpsc::Sender<Result<IfrtResponse, tonic::Status>>,
        destroyed: Arc<Destroyed>,
    ) -> Self {
        Self {
            queue,
            next: AtomicI64::new(0),
            destroyed,
        }
    }

    /// Sends a body, or a status and no body; waits while the queue is full. A client that is gone needs no reply.
    pub(super) async fn send(
        &self,
        op_id: u64,
        numbered: Numbered,
        result: Result<Response, Status>,
    ) {
        let Ok(place) = self.queue.reserve().await else {
            return;
        };
        // From here to the end nothing waits: a number that is taken is sent.
        let mut metadata = ResponseMetadata {
            op_id,
            ..Default::default()
        };
        let (status, response) = match result {
            Ok(response) => {
                match numbered {
                    Numbered::Yes => {
                        metadata.seq_num = self.next.fetch_add(1, Relaxed);
                        metadata.destroyed_user_context_ids = self.destroyed.take();
                    }
                    Numbered::Last => metadata.seq_num = LAST,
                    Numbered::No => {}
                }
                (Status::default(), Some(response))
            }
            Err(status) => (status, None),
        };
        metadata.status = Some(status);
        place.send(Ok(IfrtResponse {
            response_metadata: Some(metadata),
            response,
        }));
    }

    /// Ends the client's stream with an error. One that does not read its replies does not hear of it.
    pub(super) fn break_off(&self, error: tonic::Status) {
        let _ = self.queue.try_send(Err(error));
    }

    /// Ends when the client does not listen any more.
    pub(super) async fn closed(&self) {
        self.queue.closed().await;
    }
}
