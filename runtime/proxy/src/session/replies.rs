//! Replies on their way to the client, and their numbers.
//!
//! jaxlib takes the destroyed user contexts of replies in the order of `seq_num`, from 0 and without a gap, once it has let go of
//! the reply. It looks at OK replies only, and replies to its batched deletes and destructs never come to that bookkeeping: a
//! number there would be a gap. The reply to InitRequest does come, but jaxlib holds it to the session's end: its number
//! must be one that nothing waits for.
//!
//! A client that does not read its replies must not grow the server: replies on their way are bounded in number and in
//! bytes, and a session that has no room for the next one reads no further requests.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};

use prost::Message as _;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio_stream::Stream;
use waystation_proto::xla::ifrt::proxy::{IfrtResponse, ResponseMetadata, ifrt_response::Response};

use super::user_context::Destroyed;
use crate::status::Status;

/// Replies on their way at a time.
const QUEUE: usize = 1024;
/// Their bytes, small ones aside; one larger reply travels alone.
const QUEUE_BYTES: u32 = 4 << 20;
/// Replies up to this size, in bytes, are bounded by their number.
const SMALL_BYTES: usize = 1 << 10;

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

/// A reply and its room.
#[derive(Debug)]
struct Queued {
    reply: Result<IfrtResponse, tonic::Status>,
    _room: Option<OwnedSemaphorePermit>,
}

/// The replies as the client gets them.
#[derive(Debug)]
pub(crate) struct ReplyStream(mpsc::Receiver<Queued>);

impl Stream for ReplyStream {
    type Item = Result<IfrtResponse, tonic::Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let queued = ready!(self.0.poll_recv(context));
        Poll::Ready(queued.map(|queued| queued.reply))
    }
}

/// One session's way back to its client.
pub(super) struct Replies {
    queue: mpsc::Sender<Queued>,
    room: Arc<Semaphore>,
    next: AtomicI64,
    destroyed: Arc<Destroyed>,
}

impl Replies {
    pub(super) fn new(destroyed: Arc<Destroyed>) -> (Self, ReplyStream) {
        let (queue, stream) = mpsc::channel(QUEUE);
        let replies = Self {
            queue,
            room: Arc::new(Semaphore::new(QUEUE_BYTES as usize)),
            next: AtomicI64::new(0),
            destroyed,
        };
        (replies, ReplyStream(stream))
    }

    /// Sends a body, or a status and no body; waits while the queue is full. A client that is gone needs no reply.
    pub(super) async fn send(
        &self,
        op_id: u64,
        numbered: Numbered,
        result: Result<Response, Status>,
    ) {
        let (status, response) = match result {
            Ok(response) => (Status::default(), Some(response)),
            Err(status) => (status, None),
        };
        let mut reply = IfrtResponse {
            response_metadata: Some(ResponseMetadata {
                op_id,
                status: Some(status),
                ..Default::default()
            }),
            response,
        };
        let room = match reply.encoded_len() {
            0..=SMALL_BYTES => None,
            bytes => {
                let bytes = u32::try_from(bytes).unwrap_or(u32::MAX).min(QUEUE_BYTES);
                // The room is never closed, and comes back when the client is gone.
                Arc::clone(&self.room).acquire_many_owned(bytes).await.ok()
            }
        };
        let Ok(place) = self.queue.reserve().await else {
            return;
        };
        // From here to the end nothing waits: a number that is taken is sent.
        if let Some(metadata) = &mut reply.response_metadata
            && reply.response.is_some()
        {
            match numbered {
                Numbered::Yes => {
                    metadata.seq_num = self.next.fetch_add(1, Relaxed);
                    metadata.destroyed_user_context_ids = self.destroyed.take();
                }
                Numbered::Last => metadata.seq_num = LAST,
                Numbered::No => {}
            }
        }
        place.send(Queued {
            reply: Ok(reply),
            _room: room,
        });
    }

    /// Ends the client's stream with an error. One that does not read its replies does not hear of it.
    pub(super) fn break_off(&self, error: tonic::Status) {
        let _ = self.queue.try_send(Queued {
            reply: Err(error),
            _room: None,
        });
    }

    /// Ends when the client does not listen any more.
    pub(super) async fn closed(&self) {
        self.queue.closed().await;
    }
}
