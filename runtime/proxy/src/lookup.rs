//! What a lookup answers with: the bytes of a fetched array, from wherever they lie.

use std::{os::unix::fs::FileExt as _, sync::Arc};

use bytes::{Bytes, BytesMut};
use futures::{StreamExt as _, stream::BoxStream};
use tonic::Status;
use waystation_proto::{
    waystation::worker::{FetchDataRequest, ReadPiece, op},
    xla::ifrt::proxy::GrpcHostBufferLookupResponse,
};

use crate::{
    host_buffers::{Outgoing, Transfer},
    link::{FRAME_BYTES, Ids},
    session::{ReleaseAtEnd, transferred},
    status,
};

/// Pieces of one array that the worker copies or that are being sent: one is read while others are made, and a slow client
/// keeps no more than these.
const PIECES_AT_ONCE: usize = 3;

/// The answer to a lookup.
pub(crate) type Frames = BoxStream<'static, Result<GrpcHostBufferLookupResponse, Status>>;

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
    futures::stream::iter((0..count).map(move |_| {
        let data = data.split_to(data.len().min(FRAME_BYTES));
        Ok(GrpcHostBufferLookupResponse { data })
    }))
    .boxed()
}

/// The bytes as they lie in the worker's memory. The transfer, and with it the memory, lives until the stream's end.
fn read(outgoing: Arc<Outgoing>) -> Frames {
    let start = (0, Bytes::new());
    futures::stream::unfold(start, move |(offset, last)| {
        let frame = next_frame(&outgoing, offset, last);
        futures::future::ready(frame.map(|frame| {
            let data = frame.as_ref().cloned().unwrap_or_default();
            let next = match &frame {
                Ok(data) => offset + data.len() as u64,
                Err(_) => u64::MAX,
            };
            let reply = frame.map(|data| GrpcHostBufferLookupResponse { data });
            (reply, (next, data))
        }))
    })
    .boxed()
}

/// The next bytes of a transfer in memory, if there are more. `last`: those before, whose place is used again when nobody
/// looks at them any more.
fn next_frame(outgoing: &Outgoing, offset: u64, last: Bytes) -> Option<Result<Bytes, Status>> {
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
    let len = usize::try_from(left).map_or(FRAME_BYTES, |left| left.min(FRAME_BYTES));
    let mut bytes = last.try_into_mut().unwrap_or_else(|_| BytesMut::new());
    bytes.resize(len, 0);
    // Memory, as a copy is: nothing to wait for.
    let read = file.read_exact_at(&mut bytes, offset);
    Some(read.map(|()| bytes.freeze()).map_err(|error| {
        Status::unavailable(format!("the worker's memory cannot be read: {error}"))
    }))
}

/// The worker's frames as they come; HTTP/2 slows the worker down to the client's speed. The transfer lives until the
/// stream's end, even when the client deletes the buffer meanwhile.
async fn relay(outgoing: Arc<Outgoing>, transfer: &Transfer) -> Result<Frames, Status> {
    let request = FetchDataRequest {
        epoch: transfer.link.epoch,
        transfer: transfer.transfer,
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
        .map(move |frame| {
            let _until_the_end = &outgoing;
            frame
                .map(|frame| GrpcHostBufferLookupResponse { data: frame.data })
                .map_err(|e| lost(&e))
        })
        .boxed())
}
