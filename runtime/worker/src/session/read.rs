//! Read: a shard's bytes to the host, kept until released, fetched by the data service or sent along with the reply.

mod pieces;
mod seen;

use std::{collections::HashMap, rc::Rc, sync::Arc, time::Instant};

use bytes::Bytes;
use tokio::sync::oneshot;
use waystation_pjrt::{AlignedBytes, Buffer, Error};
use waystation_proto::{
    tensorflow::StatusProto,
    waystation::worker::{Read, ReadDone, reply},
};

pub(super) use self::pieces::lies_as_wanted;
use super::Session;
use crate::{
    counters,
    dtype::Dtype,
    geometry, host,
    layout::{self, Order},
    region::{self, Dense, Region},
    segments::{Block, Segments},
    status::{self, Fault},
    table::{Origin, Shard, Slot, Value},
};

/// Shards up to this size are copied to the host on the dispatch thread; a task would cost more.
pub(super) const COPY_HERE_BYTES: u64 = 128 << 10;

/// Transfers from this worker by id.
#[derive(Default)]
pub(super) struct Transfers {
    by_id: HashMap<u64, State>,
    /// Fetches of transfers that no op has named.
    early: HashMap<u64, Vec<Fetch>>,
}

enum State {
    Coming {
        fetches: Vec<oneshot::Sender<Result<Copied, Fault>>>,
        notify: bool,
        since: Instant,
        /// What made the shard, once the copy has begun.
        origin: Option<Rc<Origin>>,
        /// The bytes are forgotten once they have been fetched.
        once: bool,
    },
    /// Its shard is there, and held; nothing is copied until somebody fetches.
    OnDemand {
        slot: Rc<Slot>,
        parts: Parts,
    },
    Here(Result<Copied, Fault>),
    /// Its shard is there, and held; its bytes are copied piece by piece as they are asked for.
    InPieces(pieces::Held),
}

/// A shard's bytes, and how its device laid them out.
#[derive(Clone, Debug)]
pub(crate) struct Copied {
    pub(crate) bytes: Bytes,
    pub(crate) order: Order,
    /// The same bytes.
    pub(crate) block: Arc<Block>,
}

impl Copied {
    pub(crate) fn new(block: Block, order: Order) -> Copied {
        struct Owner(Arc<Block>);
        impl AsRef<[u8]> for Owner {
            fn as_ref(&self) -> &[u8] {
                (*self.0).as_ref()
            }
        }
        let block = Arc::new(block);
        Copied {
            bytes: Bytes::from_owner(Owner(Arc::clone(&block))),
            order,
            block,
        }
    }

    /// Bytes that no proxy can be told the place of, dense and row-major as they lie on the device.
    fn seen(bytes: Bytes) -> Copied {
        Copied {
            bytes,
            order: None,
            block: Arc::default(),
        }
    }
}

/// What of a shard is read.
enum Parts {
    /// All, dense or with these strides.
    Whole(Option<Vec<i64>>),
    /// Regions, one behind the other.
    Regions(Vec<Region>),
}

/// A call that wants a transfer's bytes.
pub(crate) struct Fetch {
    /// Told when the transfer's op is there.
    pub(crate) known: oneshot::Sender<()>,
    pub(crate) bytes: oneshot::Sender<Result<Copied, Fault>>,
}

impl Session {
    pub(super) fn read(&mut self, op: Read) {
        let Read {
            transfer,
            shard,
            byte_strides,
            notify,
            regions,
            on_demand,
            in_segment,
            in_pieces,
        } = op;
        let parts = match regions.is_empty() {
            true => Parts::Whole(byte_strides.map(|strides| strides.strides)),
            false => Parts::Regions(regions.into_iter().map(Region::from).collect()),
        };
        let once = on_demand;
        let mut fetches = Vec::new();
        for fetch in self.transfers.early.remove(&transfer).unwrap_or_default() {
            // A caller that has given up is found out when its bytes come.
            let _ = fetch.known.send(());
            fetches.push(fetch.bytes);
        }
        let coming = State::Coming {
            fetches,
            notify,
            since: Instant::now(),
            origin: None,
            once,
        };
        if self.transfers.by_id.insert(transfer, coming).is_some() {
            tracing::warn!(transfer, "a transfer id was used twice");
        }
        if let Err(status) = self.room_to_wait() {
            self.read_done(transfer, Err(Arc::new(status)));
            return;
        }
        let slot = self.slot(shard);
        let wanted = Rc::clone(&slot);
        self.when(&[slot], move |session| match wanted.value() {
            Value::Pending { .. } => {}
            Value::Failed(fault) => session.read_done(transfer, Err(fault)),
            Value::Ready(_) if on_demand && !session.is_wanted(transfer) => {
                session.read_on_demand(transfer, wanted, parts);
            }
            Value::Ready(shard) if !notify => {
                session.read_for_worker(transfer, wanted, &shard, parts);
            }
            Value::Ready(shard) => {
                if in_pieces && in_segment && pieces::fits(&parts, &shard) {
                    session.read_in_pieces(transfer, wanted, &shard);
                } else {
                    session.read_shard(transfer, &wanted, &shard, parts, in_segment);
                }
            }
        });
    }

    /// Whether somebody waits for a transfer's bytes.
    fn is_wanted(&self, transfer: u64) -> bool {
        match self.transfers.by_id.get(&transfer) {
            Some(State::Coming { fetches, .. }) => !fetches.is_empty(),
            _ => false,
        }
    }

    fn read_on_demand(&mut self, transfer: u64, slot: Rc<Slot>, parts: Parts) {
        // Released meanwhile: nobody will fetch it.
        if let Some(state) = self.transfers.by_id.get_mut(&transfer) {
            slot.begin_send();
            *state = State::OnDemand { slot, parts };
        }
    }

    fn read_shard(
        &mut self,
        transfer: u64,
        slot: &Rc<Slot>,
        shard: &Shard,
        parts: Parts,
        in_segment: bool,
    ) {
        if let Some(State::Coming { origin, .. }) = self.transfers.by_id.get_mut(&transfer) {
            *origin = Some(Rc::clone(&shard.origin));
        }
        let (core, serial) = (Arc::clone(&self.core), self.serial);
        let runtime = self.core.runtime.clone();
        let dims = shard.buffer.dims().to_vec();
        let order = layout::of_buffer(&shard.buffer);
        let copied = |block: Block| Copied::new(block, order);
        let segments = in_segment.then(|| Arc::clone(&self.core.segments));
        let element = Dtype::of_element(shard.buffer.element_type()).map(|dtype| dtype.host_bytes);
        self.read_host_into(slot, shard, segments, move |result| {
            let as_it_is = match &parts {
                Parts::Whole(None) => true,
                Parts::Whole(Some(strides)) => element
                    .as_ref()
                    .is_ok_and(|&element| geometry::is_dense(&dims, strides, element)),
                Parts::Regions(regions) => {
                    matches!(regions.as_slice(), [region] if region.is_whole(&dims))
                }
            };
            if as_it_is {
                core.post(serial, move |session| {
                    session.read_done(transfer, result.map(copied))
                });
                return;
            }
            runtime.spawn_blocking(move || {
                let result = result.and_then(|dense| {
                    let element = element.map_err(Arc::new)?;
                    match &parts {
                        Parts::Whole(None) => Ok(dense),
                        Parts::Whole(Some(strides)) => {
                            scatter(&dense, &dims, strides, element).map(Block::from)
                        }
                        Parts::Regions(regions) => {
                            let mut all = host::zeroed(region::total_bytes(regions, element)?)?;
                            cut(&dense, &dims, regions, element, &mut all).map(|()| all.into())
                        }
                    }
                    .map(copied)
                    .map_err(Arc::new)
                });
                core.post(serial, move |session| session.read_done(transfer, result));
            });
        });
    }

    /// Copies a shard's bytes to the host, dense and row-major; `then` runs on another thread, or on this one when the
    /// copy fails to begin.
    pub(super) fn read_host(
        &mut self,
        slot: &Rc<Slot>,
        shard: &Shard,
        then: impl FnOnce(Result<Block, Fault>) + Send + 'static,
    ) {
        self.read_host_into(slot, shard, None, then);
    }

    /// Like [`Self::read_host`], into a segment where there is one.
    fn read_host_into(
        &mut self,
        slot: &Rc<Slot>,
        shard: &Shard,
        segments: Option<Arc<Segments>>,
        then: impl FnOnce(Result<Block, Fault>) + Send + 'static,
    ) {
        let user_context = shard.origin.user_context();
        if shard.bytes() <= COPY_HERE_BYTES {
            copy_to_host(&shard.buffer, user_context, None, then);
            return;
        }
        // A CPU plugin copies on the caller's thread. Until it has begun, no execution may take the buffer over.
        slot.begin_send();
        let reader = self.produce(vec![Rc::clone(slot)]);
        let (core, serial) = (Arc::clone(&self.core), self.serial);
        let buffer = shard.buffer.clone();
        self.core.runtime.spawn_blocking(move || {
            copy_to_host(&buffer, user_context, segments.as_ref(), then);
            core.post(serial, move |session| {
                for slot in session.take_produced(reader) {
                    session.end_send(&slot);
                }
            });
        });
    }

    fn read_done(&mut self, transfer: u64, mut result: Result<Copied, Fault>) {
        // Released before it was there: nobody wants it.
        let Some(state) = self.transfers.by_id.get_mut(&transfer) else {
            return;
        };
        if result.is_err()
            && let State::Coming {
                origin: Some(origin),
                ..
            } = state
        {
            let origin = Rc::clone(origin);
            if !origin.is_ready() {
                // The shard's execution has failed, as will be heard; what it says names the cause.
                self.when_ended(&origin, move |session| session.read_done(transfer, result));
                return;
            }
            result = origin.fault().map_or(result, Err);
        }
        let State::Coming {
            fetches,
            notify,
            since,
            once,
            ..
        } = std::mem::replace(state, State::Here(result.clone()))
        else {
            return;
        };
        if once && !fetches.is_empty() {
            self.transfers.by_id.remove(&transfer);
        }
        if let Ok(Copied { bytes, .. }) = &result {
            counters::add(&self.core.counters.fetched_bytes, bytes.len() as u64);
            counters::add(&self.core.counters.reads, 1);
            counters::add_time(&self.core.counters.read_nanos, since.elapsed());
        }
        for fetch in fetches {
            let _ = fetch.send(result.clone());
        }
        if notify {
            let done = match result {
                Ok(Copied { bytes, block, .. }) => {
                    let inline = bytes.len() <= self.core.limits.inline_read_bytes;
                    ReadDone {
                        transfer,
                        status: None,
                        size_bytes: bytes.len() as u64,
                        segment: if inline { None } else { block.lend() },
                        inline_data: inline.then_some(bytes),
                        piece_bytes: 0,
                    }
                }
                Err(fault) => ReadDone {
                    transfer,
                    status: Some(Arc::unwrap_or_clone(fault)),
                    ..ReadDone::default()
                },
            };
            self.outbox.send(reply::Reply::ReadDone(done));
        }
    }

    /// The data service wants a transfer's bytes.
    pub(crate) fn fetch(&mut self, transfer: u64, fetch: Fetch) {
        match self.transfers.by_id.get_mut(&transfer) {
            Some(State::Here(result)) => {
                let _ = fetch.known.send(());
                let _ = fetch.bytes.send(result.clone());
            }
            Some(State::Coming { fetches, .. }) => {
                let _ = fetch.known.send(());
                fetches.push(fetch.bytes);
            }
            Some(State::OnDemand { .. }) => {
                let _ = fetch.known.send(());
                self.demand(transfer, fetch.bytes);
            }
            Some(State::InPieces(_)) => {
                let _ = fetch.known.send(());
                let fault = status::invalid(format!("transfer {transfer} comes in pieces"));
                let _ = fetch.bytes.send(Err(Arc::new(fault)));
            }
            None => {
                let limit = self.core.limits.early_fetches;
                if self.transfers.early.len() >= limit {
                    // Those whose callers have given up make room first.
                    self.transfers.early.retain(|_, fetches| {
                        fetches.retain(|fetch| !fetch.bytes.is_closed());
                        !fetches.is_empty()
                    });
                }
                if self.transfers.early.len() >= limit {
                    let fault = Arc::new(status::exhausted(format!(
                        "{limit} fetches wait for ops that have not come"
                    )));
                    let _ = fetch.bytes.send(Err(fault));
                    return;
                }
                self.transfers
                    .early
                    .entry(transfer)
                    .or_default()
                    .push(fetch);
            }
        }
    }

    /// The first fetch of a transfer that is copied on demand.
    fn demand(&mut self, transfer: u64, fetch: oneshot::Sender<Result<Copied, Fault>>) {
        let coming = State::Coming {
            fetches: vec![fetch],
            notify: false,
            since: Instant::now(),
            origin: None,
            once: true,
        };
        let Some(State::OnDemand { slot, parts }) = self.transfers.by_id.insert(transfer, coming)
        else {
            return;
        };
        match slot.value() {
            Value::Ready(shard) => self.read_for_worker(transfer, Rc::clone(&slot), &shard, parts),
            Value::Failed(fault) => self.read_done(transfer, Err(fault)),
            Value::Pending { .. } => {}
        }
        self.end_send(&slot);
    }

    pub(super) fn release(&mut self, transfers: &[u64]) {
        for transfer in transfers {
            let fetches = match self.transfers.by_id.remove(transfer) {
                Some(State::Coming { fetches, .. }) => fetches,
                Some(State::OnDemand { slot, .. }) => {
                    self.end_send(&slot);
                    continue;
                }
                Some(State::Here(Ok(copied))) => {
                    copied.block.is_back();
                    continue;
                }
                Some(State::InPieces(held)) => {
                    held.release();
                    continue;
                }
                Some(State::Here(Err(_))) | None => continue,
            };
            let fault = Arc::new(status::invalid(format!(
                "transfer {transfer} was released before its bytes were there"
            )));
            for fetch in fetches {
                let _ = fetch.send(Err(Arc::clone(&fault)));
            }
        }
    }
}

pub(super) fn copy_to_host(
    buffer: &Buffer,
    user_context: u64,
    segments: Option<&Arc<Segments>>,
    then: impl FnOnce(Result<Block, Fault>) + Send + 'static,
) {
    let fault = move |error: Error| Arc::new(status::of_plugin(&error, user_context));
    let begun = buffer.host_bytes().and_then(|len| {
        let mut block = match segments.and_then(|segments| segments.take(len)) {
            Some(block) => block,
            None => AlignedBytes::zeroed(len)?.into(),
        };
        let copy = buffer.to_host(std::mem::take(&mut *block))?;
        Ok((copy, block))
    });
    match begun {
        Ok((copy, mut block)) => copy.on_ready(move |result| {
            then(result.map_err(fault).map(|bytes| {
                *block = bytes;
                block
            }));
        }),
        Err(error) => then(Err(fault(error))),
    }
}

/// The elements of regions, one region behind the other, into bytes of just their size.
fn cut(
    dense: &[u8],
    dims: &[i64],
    regions: &[Region],
    element: usize,
    mut rest: &mut [u8],
) -> Result<(), StatusProto> {
    for one in regions {
        let (bytes, behind) = rest
            .split_at_mut_checked(one.bytes(element)?)
            .ok_or_else(|| status::invalid("the pieces are larger than they are together"))?;
        rest = behind;
        let from = Dense { bytes: dense, dims };
        let start = vec![0; one.size.len()];
        let mut to = Dense {
            bytes,
            dims: &one.size,
        };
        region::copy(&from, &one.offset, &mut to, &start, &one.size, element)?;
    }
    Ok(())
}

fn scatter(
    dense: &[u8],
    dims: &[i64],
    strides: &[i64],
    element: usize,
) -> Result<AlignedBytes, StatusProto> {
    let mut region = host::zeroed(geometry::region_bytes(dims, strides, element)?)?;
    geometry::scatter(dense, &mut region, dims, strides, element)?;
    Ok(region)
}
