//! HostBufferStore and HostBufferLookup, the calls that carry the bytes of arrays.
//!
//! A codec of messages copies every byte once more, into memory that is fresh each time. These two calls are read and
//! written here instead, as gRPC's mapping to HTTP/2 has them ("gRPC over HTTP2", PROTOCOL-HTTP2.md): a message is a byte of
//! flags, four of length and the protobuf, whose one field is the bytes. Everything else goes to the generated service.

mod messages;

use std::{
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::{Bytes, BytesMut};
use futures::{StreamExt as _, future::BoxFuture};
use http::{HeaderMap, HeaderValue, Request, Response, header::CONTENT_TYPE};
use http_body::{Body as HttpBody, Frame};
use http_body_util::{BodyExt as _, Limited};
use prost::Message;
use tonic::{Status, body::Body, metadata::MetadataMap, server::NamedService};
use tower::Service;
use waystation_proto::xla::ifrt::proxy::{
    GrpcHostBufferLookupRequest, GrpcHostBufferStoreMetadata,
    grpc_ifrt_service_server::GrpcIfrtServiceServer,
};

use crate::{
    counters::Counters,
    front::{Front, buffer_size},
    host_buffers::Outgoing,
    lookup::{self, Frames},
    status,
    until::until,
};

use messages::Messages;
pub(crate) use messages::put_header;

/// Metadata key of the protocol.
const STORE_METADATA: &str = "ifrt-proxy-grpc-host-buffer-store-metadata-bin";
/// A request for a lookup is two numbers.
const MAX_REQUEST_BYTES: usize = 64 << 10;

/// The service that a client dials: the bulk calls, and all others behind them.
#[derive(Debug, Clone)]
pub(crate) struct Bulk {
    front: Arc<Front>,
    others: GrpcIfrtServiceServer<Front>,
}

impl Bulk {
    pub(crate) fn before(front: Front) -> Self {
        let front = Arc::new(front);
        let others = GrpcIfrtServiceServer::from_arc(Arc::clone(&front))
            .max_decoding_message_size(usize::MAX)
            .max_encoding_message_size(usize::MAX);
        Self { front, others }
    }
}

impl NamedService for Bulk {
    const NAME: &'static str = <GrpcIfrtServiceServer<Front> as NamedService>::NAME;
}

impl Service<Request<Body>> for Bulk {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let front = Arc::clone(&self.front);
        match request.uri().path().rsplit_once('/') {
            Some((_, "HostBufferStore")) => Box::pin(async move {
                let stored = store(&front, request).await;
                Ok(answer(stored.map(|()| nothing())))
            }),
            Some((_, "HostBufferLookup")) => {
                Box::pin(async move { Ok(answer(lookup(&front, request).await)) })
            }
            _ => self.others.call(request),
        }
    }
}

async fn store(front: &Front, request: Request<Body>) -> Result<(), Status> {
    let (head, mut body) = request.into_parts();
    let metadata = MetadataMap::from_headers(head.headers)
        .get_bin(STORE_METADATA)
        .and_then(|value| value.to_bytes().ok())
        .ok_or_else(|| {
            Status::invalid_argument(format!("HostBufferStore without {STORE_METADATA}"))
        })?;
    let metadata = GrpcHostBufferStoreMetadata::decode(metadata)
        .map_err(|e| Status::invalid_argument(format!("malformed {STORE_METADATA}: {e}")))?;
    let size = buffer_size(&metadata)?;
    let buffers = front.buffers(metadata.session_id)?;
    let end = buffers.ended();
    let store = buffers
        .store(metadata.handle, size)
        .map_err(|e| status::to_tonic(&e))?;
    let mut messages = Messages::default();
    loop {
        let frame = tokio::select! {
            frame = body.frame() => frame,
            // The client may keep this stream open for ever.
            () = end.cancelled() => return Err(session_ended()),
        };
        let Some(frame) = frame else { break };
        let Ok(mut bytes) = frame.map_err(status::malformed)?.into_data() else {
            continue;
        };
        while let Some(data) = messages.next(&mut bytes)? {
            Counters::add(&front.shared.counters.stored_bytes, data.len() as u64);
            store.push(data).await.map_err(|e| status::to_tonic(&e))?;
        }
    }
    messages.end()?;
    store.finish().map_err(|e| status::to_tonic(&e))
}

async fn lookup(front: &Front, request: Request<Body>) -> Result<Frames, Status> {
    let request: GrpcHostBufferLookupRequest = only_message(request.into_body()).await?;
    let buffers = front.buffers(request.session_id)?;
    let outgoing = buffers
        .lookup(request.handle)
        .map_err(|e| status::to_tonic(&e))?;
    let (size, is_inline) = match &*outgoing {
        Outgoing::AtWorker(transfer) => (transfer.size_bytes, transfer.inline.is_some()),
        Outgoing::Here(strings) => (strings.bytes().len() as u64, false),
    };
    let frames = lookup::frames_of(outgoing, &front.shared.ids).await?;
    let frames = match is_inline {
        true => frames,
        false => until(frames, buffers.ended(), Err(session_ended())),
    };
    Counters::add(&front.shared.counters.fetched_bytes, size);
    Ok(frames)
}

/// The one message of a request.
async fn only_message<M: Message + Default>(body: Body) -> Result<M, Status> {
    let malformed = |why: String| Status::invalid_argument(format!("malformed request: {why}"));
    let bytes = Limited::new(body, MAX_REQUEST_BYTES)
        .collect()
        .await
        .map_err(|e| malformed(e.to_string()))?
        .to_bytes();
    match bytes.split_first_chunk() {
        Some(([1, _, _, _, _], _)) => Err(messages::compressed()),
        Some((&[0, a, b, c, d], message))
            if usize::try_from(u32::from_be_bytes([a, b, c, d])) == Ok(message.len()) =>
        {
            M::decode(message).map_err(|e| malformed(e.to_string()))
        }
        _ => Err(malformed("no message of the length it gives".into())),
    }
}

/// The one message of an answer that says nothing.
fn nothing() -> Frames {
    let mut message = BytesMut::new();
    put_header(&mut message, 0);
    futures::stream::iter([Ok(message.freeze())]).boxed()
}

fn answer(frames: Result<Frames, Status>) -> Response<Body> {
    match frames {
        Ok(frames) => {
            let mut response = Response::new(Body::new(Answer {
                frames: Some(frames),
            }));
            let grpc = HeaderValue::from_static("application/grpc");
            response.headers_mut().insert(CONTENT_TYPE, grpc);
            response
        }
        Err(status) => status.into_http(),
    }
}

/// Messages, and the status behind them.
struct Answer {
    /// None behind the end.
    frames: Option<Frames>,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Some(frames) = &mut self.frames else {
            return Poll::Ready(None);
        };
        let status = match std::task::ready!(frames.poll_next_unpin(context)) {
            Some(Ok(message)) => return Poll::Ready(Some(Ok(Frame::data(message)))),
            Some(Err(status)) => status,
            None => Status::ok(""),
        };
        self.frames = None;
        Poll::Ready(Some(Ok(Frame::trailers(trailers(&status)))))
    }
}

fn trailers(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    if status.add_header(&mut trailers).is_err() {
        // A message that cannot be a header.
        let code = HeaderValue::from(i32::from(status.code()));
        trailers.insert(Status::GRPC_STATUS, code);
    }
    trailers
}

fn session_ended() -> Status {
    Status::unavailable("the session has ended")
}
