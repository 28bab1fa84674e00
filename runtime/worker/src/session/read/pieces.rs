//! A large shard piece by piece, for a proxy on this machine: while it reads one piece the next is copied, into the same few
//! segments over and over. The shard is held meanwhile, so that nothing takes its memory over.
//!
//! The plugin must be able to copy a part of a buffer, and the buffer must lie as the host wants it. Others are read whole.
//! So are those whose first piece fails, which also tells why.

use std::{rc::Rc, sync::Arc, time::Instant};

use waystation_pjrt::{AlignedBytes, Buffer, Error};
use waystation_proto::waystation::worker::{ReadDone, ReadPiece, reply};

use super::{Copied, Parts, State};
use crate::{
    counters,
    dtype::Dtype,
    geometry,
    segments::Block,
    session::Session,
    status,
    table::{Shard, Slot, Value},
};

/// Smaller shards are read whole.
const PIECES_FROM_BYTES: u64 = 4 << 20;
/// The most in a piece.
const MAX_PIECE_BYTES: usize = 8 << 20;

/// A shard that is read in pieces.
pub(super) struct Held {
    slot: Rc<Slot>,
    first: Block,
}

impl Held {
    pub(super) fn release(self) {
        self.first.is_back();
        self.slot.unhold();
    }
}

/// Bytes of every piece of a shard but the last: a quarter of it, so that the client soon has something to do.
fn piece_bytes(shard: &Shard) -> usize {
    usize::try_from(shard.bytes() / 4).map_or(MAX_PIECE_BYTES, |quarter| {
        quarter.next_multiple_of(4096).min(MAX_PIECE_BYTES)
    })
}

/// Whether all of the shard is wanted, it is large, and its bytes lie on the device as they are wanted.
pub(super) fn fits(parts: &Parts, shard: &Shard) -> bool {
    if shard.bytes() < PIECES_FROM_BYTES {
        return false;
    }
    let dims = shard.buffer.dims();
    let Ok(dtype) = Dtype::of_element(shard.buffer.element_type()) else {
        return false;
    };
    let whole = match parts {
        Parts::Whole(None) => true,
        Parts::Whole(Some(strides)) => geometry::is_dense(dims, strides, dtype.host_bytes),
        Parts::Regions(_) => false,
    };
    whole && lies_as_wanted(shard)
}

/// Whether a shard's bytes lie on the device as on the host, dense and row-major.
pub(in crate::session) fn lies_as_wanted(shard: &Shard) -> bool {
    let dims = shard.buffer.dims();
    let row_major = |order: &Vec<i64>| order.iter().rev().copied().eq((0..).take(dims.len()));
    // Neither padding nor packing.
    Dtype::of_element(shard.buffer.element_type())
        .and_then(|dtype| geometry::dense_bytes(dims, dtype.host_bytes))
        .is_ok_and(|bytes| bytes as u64 == shard.bytes())
        && matches!(shard.buffer.minor_to_major(), Ok(Some(order)) if row_major(&order))
}

impl Session {
    /// Copies the first piece, which shows whether the plugin can.
    pub(super) fn read_in_pieces(&mut self, transfer: u64, slot: Rc<Slot>, shard: &Shard) {
        // Until the transfer is released.
        slot.hold();
        let reader = self.produce(vec![slot]);
        let (core, serial) = (Arc::clone(&self.core), self.serial);
        let buffer = shard.buffer.clone();
        let piece = piece_bytes(shard);
        self.core.runtime.spawn_blocking(move || {
            let block = core.segments.take(piece);
            let then = move |first: Option<Block>| {
                core.post(serial, move |session| {
                    if let Some(slot) = session.take_produced(reader).pop() {
                        session.first_piece(transfer, slot, first);
                    }
                });
            };
            match block {
                Some(block) => copy(&buffer, 0, piece, block, move |first| then(first.ok())),
                None => then(None),
            }
        });
    }

    fn first_piece(&mut self, transfer: u64, slot: Rc<Slot>, first: Option<Block>) {
        let shard = match slot.value() {
            Value::Ready(shard) => shard,
            Value::Failed(fault) => {
                slot.unhold();
                self.read_done(transfer, Err(fault));
                return;
            }
            // It was ready before.
            Value::Pending { .. } => return,
        };
        let since = match self.transfers.by_id.get(&transfer) {
            Some(State::Coming { since, .. }) => *since,
            // Released before it was there: nobody wants it.
            _ => return slot.unhold(),
        };
        let Some(first) = first else {
            self.read_shard(transfer, &slot, &shard, Parts::Whole(None), true);
            slot.unhold();
            return;
        };
        counters::add(&self.core.counters.fetched_bytes, first.len() as u64);
        counters::add(&self.core.counters.reads, 1);
        counters::add_time(&self.core.counters.read_nanos, since.elapsed());
        let done = ReadDone {
            transfer,
            size_bytes: shard.bytes(),
            segment: first.lend(),
            piece_bytes: first.len() as u64,
            ..ReadDone::default()
        };
        let held = State::InPieces(Held { slot, first });
        self.transfers.by_id.insert(transfer, held);
        self.outbox.send(reply::Reply::ReadDone(done));
    }

    /// One more piece of a shard.
    pub(in crate::session) fn next_piece(&mut self, op: &ReadPiece) {
        let held = match self.transfers.by_id.get(&op.of) {
            Some(State::InPieces(held)) => Some((Rc::clone(&held.slot), held.first.len())),
            _ => None,
        };
        let transfer = op.transfer;
        let coming = State::Coming {
            fetches: Vec::new(),
            notify: true,
            since: Instant::now(),
            origin: None,
            once: false,
        };
        if self.transfers.by_id.insert(transfer, coming).is_some() {
            tracing::warn!(transfer, "a transfer id was used twice");
        }
        let Some((slot, piece)) = held else {
            let fault = status::invalid(format!("transfer {} does not come in pieces", op.of));
            self.read_done(transfer, Err(Arc::new(fault)));
            return;
        };
        let shard = match slot.value() {
            Value::Ready(shard) => shard,
            Value::Failed(fault) => return self.read_done(transfer, Err(fault)),
            Value::Pending { .. } => return,
        };
        let size = match usize::try_from(op.size) {
            Ok(size) if size <= piece => size,
            _ => {
                let fault = status::invalid(format!("a piece of {} bytes", op.size));
                self.read_done(transfer, Err(Arc::new(fault)));
                return;
            }
        };
        let user_context = shard.origin.user_context();
        let (core, serial) = (Arc::clone(&self.core), self.serial);
        let (buffer, offset) = (shard.buffer.clone(), op.offset);
        // Its Read may be released while the copy begins.
        slot.hold();
        let reader = self.produce(vec![slot]);
        self.core.runtime.spawn_blocking(move || {
            let block = match core.segments.take(piece) {
                Some(block) => Ok(block),
                None => AlignedBytes::zeroed(size).map(Block::from),
            };
            let then = move |piece: Result<Block, Error>| {
                let piece = piece.map(|block| Copied::new(block, None));
                let piece =
                    piece.map_err(|error| Arc::new(status::of_plugin(&error, user_context)));
                core.post(serial, move |session| {
                    for slot in session.take_produced(reader) {
                        slot.unhold();
                    }
                    session.read_done(transfer, piece);
                });
            };
            match block {
                Ok(block) => copy(&buffer, offset, size, block, then),
                Err(error) => then(Err(error)),
            }
        });
    }
}

/// Copies a part of a buffer into a block, which is shortened to it.
fn copy(
    buffer: &Buffer,
    offset: u64,
    size: usize,
    mut block: Block,
    then: impl FnOnce(Result<Block, Error>) + Send + 'static,
) {
    let mut bytes = std::mem::take(&mut *block);
    bytes.truncate(size);
    match buffer.part_to_host(offset, bytes) {
        Ok(copy) => copy.on_ready(move |result| {
            then(result.map(|bytes| {
                *block = bytes;
                block
            }));
        }),
        Err(error) => then(Err(error)),
    }
}
