//! The gRPC face of the dispatch thread.

mod executable;
mod local;

use std::{pin::Pin, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::StreamExt as _;
use tokio::sync::oneshot;
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};
use waystation_proto::{
    tensorflow::StatusProto,
    waystation::worker::{
        DataFrame, DataHeader, FetchDataRequest, FetchExecutableRequest, Leaving, LocalPut, Op,
        PutDataReply, Reply, WorkerStatus, WorkerStatusRequest, op, reply, worker_server::Worker,
    },
};

use crate::{
    core::{Core, Event},
    host,
    lease::OpenStream,
    outbox::{Gauge, Inbox, outbox},
    report::Report,
    segments::Block,
    session::{Begun, Broken, Copied, Fetch, Session},
    status,
    window::{self, Window},
};

/// Payload of one frame of the data service.
const FRAME_BYTES: usize = 1 << 20;

/// How often bytes that outran their op look for it. An op is rarely more than a few milliseconds behind.
const EARLY_PUT_POLL: Duration = Duration::from_millis(5);

/// Largest transfer that is taken: what an array of a size no machine has would need is refused before memory is asked for.
const MAX_TRANSFER_BYTES: u64 = 1 << 40;

/// The service.
pub(crate) struct Service {
    pub(crate) core: Arc<Core>,
    pub(crate) report: Report,
    /// Ends all sessions.
    pub(crate) stop: CancellationToken,
}

#[tonic::async_trait]
impl Worker for Service {
    type SessionStream = Pin<Box<dyn Stream<Item = Result<Reply, Status>> + Send>>;
    type PutLocalStream = local::Replies;
    type FetchExecutableStream = executable::Frames;
    type FetchDataStream = Pin<Box<dyn Stream<Item = Result<DataFrame, Status>> + Send>>;

    async fn session(
        &self,
        request: Request<Streaming<Op>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let mut ops = request.into_inner();
        let first = ops.message().await?.and_then(|op| op.op);
        let Some(op::Op::Attach(attach)) = first else {
            return Err(Status::invalid_argument(
                "the first op of a session must be Attach",
            ));
        };
        if self.stop.is_cancelled() {
            return Err(going_down());
        }
        let (outbox, inbox) = outbox();
        let gauge = outbox.gauge();
        let window = Window::new(
            self.core.limits.queued_ops,
            outbox.downgrade(),
            self.core.events.clone(),
        );
        let (accepted, answer) = oneshot::channel();
        self.send(Event::Attach {
            attach,
            outbox,
            accepted,
        })?;
        let serial = answer
            .await
            .map_err(|_| going_down())?
            .map_err(|status| status::to_grpc(&status))?;
        // Ends the session whichever way this call ends: the proxy's stream, its connection, or the worker's stop.
        let end = EndOnDrop {
            core: Arc::clone(&self.core),
            serial,
        };
        let reader = tokio::spawn(read_ops(Arc::clone(&self.core), ops, serial, gauge, window));
        let (core, stop, stopped) = (Arc::clone(&self.core), self.stop.clone(), self.stop.clone());
        let replies = Replies {
            inbox,
            _reader: AbortOnDrop(reader.abort_handle()),
            _end: end,
            _open: self.core.lease.stream(),
            leaving: Some(Box::pin(async move { stopped.cancelled().await })),
            over: Box::pin(async move {
                let cut = async {
                    stop.cancelled().await;
                    tokio::time::sleep(core.limits.grace).await;
                };
                tokio::select! {
                    // The end of the op stream is the proxy's way to end the session, also when the worker is to end and the
                    // proxy waits for nothing more of it: a save that is under way, a read.
                    _ = reader => {}
                    () = cut => {}
                }
                if stop.is_cancelled() {
                    core.collectives_at_rest().await;
                }
            }),
        };
        Ok(Response::new(Box::pin(futures::stream::unfold(
            replies,
            Replies::next,
        ))))
    }

    async fn put_data(
        &self,
        request: Request<Streaming<DataFrame>>,
    ) -> Result<Response<PutDataReply>, Status> {
        let mut frames = request.into_inner();
        let first = frames.message().await?;
        let DataFrame { header, data, .. } = first.unwrap_or_default();
        let header = header_of(header)?;
        self.put_begins(&header).await?;
        let DataHeader {
            epoch,
            transfer,
            size_bytes,
            ..
        } = header;
        let received = receive(&mut frames, data, transfer, size_bytes).await;
        let (data, result) = match received {
            Ok(data) => (Ok(data), Ok(PutDataReply {})),
            Err(Receive::Broken(error)) => (Err(Broken::Off), Err(error)),
            Err(Receive::Lying(status)) => (
                Err(Broken::Lying(status.clone())),
                Err(status::to_grpc(&status)),
            ),
        };
        self.core
            .with_session(epoch, move |session| {
                session.put_ends(transfer, data);
                Ok(())
            })
            .await??;
        result.map(Response::new)
    }

    async fn put_local(
        &self,
        request: Request<Streaming<LocalPut>>,
    ) -> Result<Response<Self::PutLocalStream>, Status> {
        let replies = self.take_locally(request.into_inner()).await?;
        Ok(Response::new(replies))
    }

    async fn fetch_data(
        &self,
        request: Request<FetchDataRequest>,
    ) -> Result<Response<Self::FetchDataStream>, Status> {
        let FetchDataRequest {
            epoch,
            transfer,
            by_connection,
            secret,
        } = request.into_inner();
        let (known, named) = oneshot::channel();
        let (bytes, there) = oneshot::channel();
        let over = self
            .core
            .with_lease(epoch, secret, move |session| {
                session.fetch(transfer, Fetch { known, bytes });
                Ok(session.holder().over.clone())
            })
            .await??;
        let limit = self.core.limits.early_fetch_wait;
        if tokio::time::timeout(limit, named).await.is_err() {
            return Err(not_named(transfer, limit));
        }
        // A sender that is gone without a word belonged to a session that has ended.
        let bytes = there
            .await
            .map_err(|_| Status::invalid_argument(format!("lease {epoch} has ended")))?;
        let copied = bytes.map_err(|fault| status::to_grpc(&fault))?;
        if by_connection && copied.bytes.len() > FRAME_BYTES {
            let offer = self.offer(epoch, transfer, copied)?;
            return Ok(Response::new(Box::pin(while_held(offer, epoch, over))));
        }
        let frames = tokio_stream::iter(frames(epoch, transfer, copied));
        Ok(Response::new(Box::pin(while_held(frames, epoch, over))))
    }

    async fn fetch_executable(
        &self,
        request: Request<FetchExecutableRequest>,
    ) -> Result<Response<Self::FetchExecutableStream>, Status> {
        self.send_executable(request.into_inner())
            .await
            .map(Response::new)
    }

    async fn get_status(
        &self,
        _: Request<WorkerStatusRequest>,
    ) -> Result<Response<WorkerStatus>, Status> {
        Ok(Response::new(self.report.status(&self.core)))
    }
}

impl Service {
    /// The answer to who takes a transfer over connections of its own; the offer is good as long as this is there.
    fn offer(
        &self,
        epoch: u64,
        transfer: u64,
        Copied { bytes, order, .. }: Copied,
    ) -> Result<impl Stream<Item = Result<DataFrame, Status>> + use<>, Status> {
        let size_bytes = bytes.len() as u64;
        let offered = self.core.offers.make(bytes).map_err(|error| {
            let what = format!("no random numbers for transfer {transfer}: {error}");
            status::to_grpc(&status::exhausted(what))
        })?;
        let header = DataHeader {
            epoch,
            transfer,
            size_bytes,
            minor_to_major: order.unwrap_or_default(),
            ticket: Bytes::copy_from_slice(&offered.ticket),
            secret: Bytes::new(),
        };
        let first = DataFrame {
            header: Some(header),
            ..DataFrame::default()
        };
        let until_it_is_dropped = futures::stream::poll_fn(move |_| {
            let _kept = &offered;
            std::task::Poll::Pending
        });
        Ok(tokio_stream::StreamExt::chain(
            tokio_stream::once(Ok(first)),
            until_it_is_dropped,
        ))
    }

    fn send(&self, event: Event) -> Result<(), Status> {
        self.core.events.send(event).map_err(|_| going_down())
    }

    /// Announces a transfer. Bytes come over another connection than ops and may outrun theirs: where too many bytes wait for
    /// their ops, these wait unread, until the op is there or others have made room.
    async fn put_begins(&self, header: &DataHeader) -> Result<(), Status> {
        let (transfer, size_bytes) = (header.transfer, header.size_bytes);
        let deadline = tokio::time::Instant::now() + self.core.limits.early_fetch_wait;
        loop {
            let begun = self
                .core
                .with_lease(header.epoch, header.secret.clone(), move |session| {
                    session.put_begins(transfer, size_bytes)
                })
                .await?;
            match begun? {
                Begun::Expected => return Ok(()),
                Begun::NoRoomYet(_) if tokio::time::Instant::now() < deadline => {
                    tokio::time::sleep(EARLY_PUT_POLL).await;
                }
                Begun::NoRoomYet(status) => return Err(status::to_grpc(&status)),
            }
        }
    }
}

impl Core {
    /// Runs a call of another process on the dispatch thread, of one that knows the lease's secret. See [`Self::with_session`].
    async fn with_lease<T: Send + 'static>(
        &self,
        epoch: u64,
        secret: Bytes,
        call: impl FnOnce(&mut Session) -> Result<T, StatusProto> + Send + 'static,
    ) -> Result<Result<T, Status>, Status> {
        let call = move |session: &mut Session| {
            session.holder().check(&secret)?;
            call(session)
        };
        self.with_session(epoch, call).await
    }

    /// Runs a call of the data service on the dispatch thread. The outer error: the worker goes down; the inner one: the
    /// session is not there, or the call failed.
    async fn with_session<T: Send + 'static>(
        &self,
        epoch: u64,
        call: impl FnOnce(&mut Session) -> Result<T, StatusProto> + Send + 'static,
    ) -> Result<Result<T, Status>, Status> {
        let (done, result) = oneshot::channel();
        let call = Box::new(move |session: Result<&mut Session, StatusProto>| {
            // The caller may be gone.
            let _ = done.send(session.and_then(call));
        });
        self.events
            .send(Event::Data { epoch, call })
            .map_err(|_| going_down())?;
        let result = result.await.map_err(|_| going_down())?;
        Ok(result.map_err(|status| status::to_grpc(&status)))
    }
}

/// Frames that end with the lease. Who takes them is another of its workers, or serves its proxy: to both this one is gone.
fn while_held(
    frames: impl Stream<Item = Result<DataFrame, Status>>,
    epoch: u64,
    over: CancellationToken,
) -> impl Stream<Item = Result<DataFrame, Status>> {
    let held = frames.take_until(over.clone().cancelled_owned());
    let end = futures::stream::once(async move {
        let ended = || Err(Status::unavailable(format!("lease {epoch} has ended")));
        over.is_cancelled().then(ended)
    });
    held.chain(end.filter_map(std::future::ready))
}

/// The header of a transfer's first message, if it can be taken at its word.
fn header_of(header: Option<DataHeader>) -> Result<DataHeader, Status> {
    let Some(header) = header else {
        return Err(Status::invalid_argument(
            "the first frame of a transfer must carry its header",
        ));
    };
    if header.size_bytes > MAX_TRANSFER_BYTES {
        return Err(Status::invalid_argument(format!(
            "transfer {} says it has {} bytes; at most {MAX_TRANSFER_BYTES} are taken",
            header.transfer, header.size_bytes
        )));
    }
    Ok(header)
}

fn going_down() -> Status {
    Status::unavailable("the worker is going down")
}

fn not_named(transfer: u64, limit: Duration) -> Status {
    status::to_grpc(&status::invalid(format!(
        "no op named transfer {transfer} within {} s",
        limit.as_secs()
    )))
}

/// Takes ops off the stream as fast as they are dispatched and their replies are taken, and no faster. A proxy keeps to the
/// window; one that does not is slowed here. What takes no place in the window is so read however full it is.
async fn read_ops(
    core: Arc<Core>,
    mut ops: Streaming<Op>,
    serial: u64,
    gauge: Arc<Gauge>,
    window: Arc<Window>,
) {
    loop {
        gauge.below(core.limits.unsent_replies).await;
        let op = match ops.message().await {
            Ok(Some(op)) => Box::new(op),
            Ok(None) => break,
            Err(error) => {
                tracing::info!(%error, "the op stream broke");
                break;
            }
        };
        let permit = if window::takes_place(&op) {
            let Some(permit) = window.enter().await else {
                break;
            };
            Some(permit)
        } else {
            None
        };
        if core.events.send(Event::Op { serial, op, permit }).is_err() {
            break;
        }
    }
}

struct EndOnDrop {
    core: Arc<Core>,
    serial: u64,
}

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        // The dispatch thread is gone only when the worker goes down, and the session with it.
        let _ = self.core.events.send(Event::End {
            serial: self.serial,
        });
    }
}

/// The reply side of a session. Dropped by tonic when the proxy is gone.
struct Replies {
    inbox: Inbox,
    _reader: AbortOnDrop,
    _end: EndOnDrop,
    _open: OpenStream,
    /// Until it has been said that the worker is to end.
    leaving: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    over: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl Replies {
    async fn next(mut self) -> Option<(Result<Reply, Status>, Replies)> {
        let leaving = async {
            match &mut self.leaving {
                Some(leaving) => leaving.await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = leaving => {
                self.leaving = None;
                let said = Reply {
                    reply: Some(reply::Reply::Leaving(Leaving {})),
                };
                Some((Ok(said), self))
            }
            // A reply that is there goes out before an end is noticed.
            reply = self.inbox.next() => reply.map(|reply| (Ok(reply), self)),
            () = &mut self.over => None,
        }
    }
}

/// The reader of the op stream.
struct AbortOnDrop(tokio::task::AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Why a transfer did not come whole.
enum Receive {
    Broken(Status),
    Lying(StatusProto),
}

async fn receive(
    frames: &mut Streaming<DataFrame>,
    first: Bytes,
    transfer: u64,
    size_bytes: u64,
) -> Result<Block, Receive> {
    let lying = |message: String| Receive::Lying(status::invalid(message));
    let size = usize::try_from(size_bytes)
        .map_err(|_| lying("a transfer larger than an address space".to_owned()))?;
    let mut data = host::zeroed(size).map_err(Receive::Lying)?;
    let mut filled = 0usize;
    let mut next = Some(first);
    while let Some(bytes) = next {
        let Some(end) = filled.checked_add(bytes.len()).filter(|&end| end <= size) else {
            return Err(lying(format!(
                "transfer {transfer} has more than the {size} bytes it announced"
            )));
        };
        data[filled..end].copy_from_slice(&bytes);
        filled = end;
        next = match frames.message().await.map_err(Receive::Broken)? {
            Some(frame) if frame.given_up => {
                return Err(Receive::Broken(Status::cancelled(format!(
                    "the sender gave transfer {transfer} up"
                ))));
            }
            frame => frame.map(|frame| frame.data),
        };
    }
    if filled == size {
        return Ok(data.into());
    }
    Err(lying(format!(
        "transfer {transfer} ended after {filled} of {size} bytes"
    )))
}

/// The frames of a transfer; they share its bytes.
fn frames(
    epoch: u64,
    transfer: u64,
    Copied { bytes, order, .. }: Copied,
) -> impl Iterator<Item = Result<DataFrame, Status>> + Send {
    let size_bytes = bytes.len() as u64;
    let count = bytes.len().div_ceil(FRAME_BYTES).max(1);
    (0..count).map(move |frame| {
        let start = frame * FRAME_BYTES;
        let end = bytes.len().min(start + FRAME_BYTES);
        let header = (frame == 0).then_some(DataHeader {
            epoch,
            transfer,
            size_bytes,
            minor_to_major: order.clone().unwrap_or_default(),
            ticket: Bytes::new(),
            secret: Bytes::new(),
        });
        Ok(DataFrame {
            header,
            data: bytes.slice(start..end),
            given_up: false,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copied(bytes: &[u8]) -> Copied {
        Copied::new(host::copy(bytes).expect("memory").into(), None)
    }

    #[test]
    fn frames_cover_a_transfer_once() {
        let bytes = Bytes::from(
            (0..=255)
                .cycle()
                .take(FRAME_BYTES * 2 + 3)
                .collect::<Vec<u8>>(),
        );
        let all: Vec<DataFrame> = frames(1, 2, copied(&bytes)).map(Result::unwrap).collect();
        assert_eq!(all.len(), 3);
        assert_eq!(
            all[0].header.as_ref().unwrap().size_bytes,
            bytes.len() as u64
        );
        assert!(all[1].header.is_none());
        let joined: Vec<u8> = all.iter().flat_map(|frame| frame.data.to_vec()).collect();
        assert_eq!(joined, bytes);
        let empty: Vec<DataFrame> = frames(1, 2, copied(&[])).map(Result::unwrap).collect();
        assert_eq!(
            (empty.len(), empty[0].header.as_ref().unwrap().size_bytes),
            (1, 0)
        );
    }
}
