//! What a lookup answers with: the bytes of a fetched array, from wherever they lie.

use std::{os::unix::fs::FileExt as _, sync::Arc};

use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt as _, stream::BoxStream};
use tonic::Status;
use waystation_proto::waystation::worker::{FetchDataRequest, ReadPiece, op};

use crate::{
    bulk::put_header,
    host_buffers::{Outgoing, Transfer},
    link::{FRAME_BYTES, Ids},
    session::{ReleaseAtEnd, transferred},
    status,
};

/// Pieces of one array that the worker copies or that are being sent: one is read while others are made, and a slow client
/// keeps no more than these.
const PIECES_AT_ONCE: usize = 3;

/// Frames of one answer that the transport has at a time: it asks for the next one when it has begun to send the one before.
const FRAMES_AT_ONCE: usize = 3;
/// Bytes of the worker's memory in a message. What was read last is still in the processor's cache when it is sent.
const READ_BYTES: usize = 256 << 10;
/// Data below this size, in bytes, is copied behind its header: cheaper than a frame of HTTP/2.
const SMALL_BYTES: usize = 16 << 10;

/// The answer to a lookup: messages of gRPC, in pieces.
pub(crate) type Frames = BoxStream<'static, Result<Bytes, Status>>;

/// All bytes in their order.
pub(crate) async fn frames_of(outgoing: Arc<Outgoing>, ids: &Arc<Ids>) -> Result<Frames, Status> {
    match &*outgoing {
        Outgoing::AtWorker(transfer) if transfer.piece_bytes > 0 => {
            Ok(pieces(Arc::clone(&outgoing), transfer, Arc::clone(ids)))
        }
        _ => of_whole(outgoing).await,
    }
}

/// As [`frames_of`], of what does not come in pieces.
async fn of_whole(outgoing: Arc<Outgoing>) -> Result<Frames, Status> {
    let transfer = match &*outgoing {
        Outgoing::AtWorker(transfer) => transfer,
        Outgoing::Here(strings) => return Ok(frames(strings.bytes().clone())),
    };
    if let Some(bytes) = &transfer.inline {
        return Ok(frames(bytes.clone()));
    }
    if transfer.file.is_some() {
        return Ok(read(outgoing));
    }
    relay(Arc::clone(&outgoing), transfer).await
}

/// The pieces of an array one behind the other; the worker makes the next ones meanwhile.
fn pieces(outgoing: Arc<Outgoing>, transfer: &Transfer, ids: Arc<Ids>) -> Frames {
    let (size, piece) = (transfer.size_bytes, transfer.piece_bytes);
    futures::stream::iter(0..size.div_ceil(piece))
        .map(move |index| {
            let offset = index * piece;
            let len = piece.min(size - offset);
            one_piece(Arc::clone(&outgoing), Arc::clone(&ids), offset, len)
        })
        .buffered(PIECES_AT_ONCE)
        .flat_map(|piece| piece.unwrap_or_else(|e| futures::stream::iter([Err(e)]).boxed()))
        .boxed()
}

async fn one_piece(
    outgoing: Arc<Outgoing>,
    ids: Arc<Ids>,
    offset: u64,
    size: u64,
) -> Result<Frames, Status> {
    let Outgoing::AtWorker(whole) = &*outgoing else {
        return Ok(futures::stream::empty().boxed());
    };
    if offset == 0 && whole.file.is_some() {
        return Ok(read(outgoing));
    }
    let op = ReadPiece {
        transfer: ids.next(),
        of: whole.transfer,
        offset,
        size,
    };
    let release = ReleaseAtEnd::new(Arc::clone(&whole.link), op.transfer);
    let answer = whole.link.call(op.transfer, op::Op::ReadPiece(op)).await;
    let piece = transferred(answer, release, None).await;
    let piece = piece.map_err(|e| status::to_tonic(&e))?;
    if (piece.size_bytes, piece.piece_bytes) != (size, 0) {
        return Err(Status::unavailable(
            "the worker gave another piece than was asked for",
        ));
    }
    of_whole(Arc::new(Outgoing::AtWorker(piece))).await
}

/// What is here already.
fn frames(mut data: Bytes) -> Frames {
    let count = data.len().div_ceil(FRAME_BYTES).max(1);
    let frames = (0..count).map(move |_| data.split_to(data.len().min(FRAME_BYTES)));
    futures::stream::iter(frames).flat_map(message).boxed()
}

/// A message, in a piece of its own where it is small.
fn message(data: Bytes) -> impl Stream<Item = Result<Bytes, Status>> {
    let mut header = BytesMut::new();
    put_header(&mut header, data.len());
    let data = match data.len() {
        ..SMALL_BYTES => {
            header.extend_from_slice(&data);
            None
        }
        _ => Some(data),
    };
    futures::stream::iter([Some(header.freeze()), data].into_iter().flatten().map(Ok))
}

/// The bytes as they lie in the worker's memory. The transfer, and with it the memory, lives until the stream's end.
fn read(outgoing: Arc<Outgoing>) -> Frames {
    let start = (0, Used::default());
    futures::stream::unfold(start, move |(offset, mut used)| {
        let frame = next_frame(&outgoing, offset, &mut used);
        futures::future::ready(frame.map(|frame| {
            let next = match &frame {
                Ok((_, len)) => offset + *len as u64,
                Err(_) => u64::MAX,
            };
            (frame.map(|(frame, _)| frame), (next, used))
        }))
    })
    .boxed()
}

/// Frames that have been given to the transport. It sends one while the next is read: their memory is used again, since
/// fresh pages cost about as much as the copy.
#[derive(Default)]
struct Used([Bytes; FRAMES_AT_ONCE]);

impl Used {
    /// Memory of a frame that is sent, with what it held; empty memory where there is none.
    fn again(&mut self) -> BytesMut {
        let sent = self.0.iter_mut().find(|frame| frame.is_unique());
        sent.and_then(|frame| std::mem::take(frame).try_into_mut().ok())
            .unwrap_or_default()
    }

    fn keep(&mut self, frame: &Bytes) {
        // None is empty: it is fresh then, and nobody's loss.
        if let Some(place) = self.0.iter_mut().find(|frame| frame.is_empty()) {
            *place = frame.clone();
        }
    }
}

/// The next message of a transfer in memory and how many bytes are in it, if there are more.
fn next_frame(
    outgoing: &Outgoing,
    offset: u64,
    used: &mut Used,
) -> Option<Result<(Bytes, usize), Status>> {
    let Outgoing::AtWorker(Transfer {
        file: Some(file),
        size_bytes,
        piece_bytes,
        ..
    }) = outgoing
    else {
        return None;
    };
    let here = match *piece_bytes {
        0 => *size_bytes,
        piece => piece.min(*size_bytes),
    };
    let left = here.checked_sub(offset).filter(|&left| left > 0)?;
    let len = usize::try_from(left).map_or(READ_BYTES, |left| left.min(READ_BYTES));
    let mut header = BytesMut::new();
    put_header(&mut header, len);
    let mut frame = used.again();
    let size = header.len() + len;
    // Filled with zeros only where it is not a frame of this size again.
    frame.resize(size, 0);
    let (place, data) = frame.split_at_mut(header.len());
    place.copy_from_slice(&header);
    // Memory, as a copy is: nothing to wait for.
    let read = file.read_exact_at(data, offset);
    Some(match read {
        Ok(()) => {
            let frame = frame.freeze();
            used.keep(&frame);
            Ok((frame, len))
        }
        Err(error) => Err(Status::unavailable(format!(
            "the worker's memory cannot be read: {error}"
        ))),
    })
}

/// The worker's frames as they come; HTTP/2 slows the worker down to the client's speed. The transfer lives until the
/// stream's end, even when the client deletes the buffer meanwhile.
async fn relay(outgoing: Arc<Outgoing>, transfer: &Transfer) -> Result<Frames, Status> {
    let request = FetchDataRequest {
        epoch: transfer.link.epoch,
        transfer: transfer.transfer,
        by_connection: false,
        secret: transfer.link.secret(),
    };
    let worker = transfer.link.name.clone();
    let lost = move |e: &Status| status::to_tonic(&status::from_worker(&worker, e));
    let frames = transfer
        .link
        .data()
        .fetch_data(request)
        .await
        .map_err(|e| lost(&e))?
        .into_inner();
    Ok(frames
        .flat_map(move |frame| {
            let _until_the_end = &outgoing;
            match frame {
                Ok(frame) => message(frame.data).left_stream(),
                Err(e) => futures::stream::iter([Err(lost(&e))]).right_stream(),
            }
        })
        .boxed())
}
