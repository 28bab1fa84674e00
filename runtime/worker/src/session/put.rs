//! Put: shards from host bytes, which ride along with the op or come by `PutData`, before it or after it.

use std::{collections::HashMap, rc::Rc, sync::Arc};

use waystation_pjrt::{AlignedBytes, ElementType, HostBytes};
use waystation_proto::{
    tensorflow::{StatusProto, error::Code},
    waystation::worker::{CancelPut, Put, Target},
    xla::LayoutProto,
};

use super::Session;
use crate::{
    counters,
    dtype::Dtype,
    geometry, host,
    layout::{self, Order},
    ledger::Charge,
    segments::Block,
    status::{self, Fault},
    table::{Maker, Origin, Shard, Slot},
    usage::Cause,
};

/// Regions up to this size are made dense on the dispatch thread; a task would cost more.
const GATHER_HERE_BYTES: usize = 64 << 10;

/// Transfers to this worker by id.
#[derive(Default)]
pub(super) struct Puts {
    by_transfer: HashMap<u64, State>,
    /// Bytes of transfers whose op has not come.
    early_bytes: u64,
    /// Strided bytes that a task makes dense, by its number.
    gathering: HashMap<u64, Placement>,
}

enum State {
    /// The op is there, the bytes are not.
    Awaited(Placement),
    /// Bytes are coming, the op is not there.
    Promised(u64),
    /// The bytes are there, the op is not.
    Early(Block),
}

/// How an announced transfer is taken.
pub(crate) enum Begun {
    /// The bytes may come.
    Expected,
    /// Too many bytes wait for their ops; with what to answer a sender that does not want to try again.
    NoRoomYet(StatusProto),
}

/// A transfer that did not come whole.
pub(crate) enum Broken {
    /// The sender is gone or has given up. It may come again.
    Off,
    /// The bytes are not those that the sender announced.
    Lying(StatusProto),
}

/// Where host bytes go.
pub(super) struct Placement {
    pub(super) dtype: Dtype,
    pub(super) dims: Vec<i64>,
    pub(super) strides: Option<Vec<i64>>,
    /// On the device.
    pub(super) order: Order,
    /// Bytes expected.
    pub(super) bytes: usize,
    pub(super) targets: Vec<(Target, Rc<Slot>)>,
    pub(super) cause: Cause,
    /// The op, for people.
    pub(super) maker: &'static str,
}

impl Placement {
    fn slots(&self) -> Vec<Rc<Slot>> {
        self.targets
            .iter()
            .map(|(_, slot)| Rc::clone(slot))
            .collect()
    }
}

impl Session {
    pub(super) fn put(&mut self, op: Put) {
        let targets: Vec<(Target, Rc<Slot>)> = op
            .targets
            .into_iter()
            .map(|target| (target, Slot::pending(false)))
            .collect();
        for (target, slot) in &targets {
            self.insert(target.shard, Rc::clone(slot));
        }
        let (transfer, inline) = (op.transfer, op.inline_data);
        let strides = op.byte_strides.map(|strides| strides.strides);
        let placed = expect(op.dtype, &op.dims, strides.as_deref(), op.layout.as_ref());
        let early = if inline.is_none() {
            self.take_early(transfer)
        } else {
            None
        };
        let placement = match placed {
            Ok((dtype, bytes, order)) => Placement {
                dtype,
                order,
                dims: op.dims,
                strides,
                bytes,
                targets,
                cause: self.cause(op.user_context),
                maker: "device_put",
            },
            Err(status) => {
                let slots: Vec<_> = targets.into_iter().map(|(_, slot)| slot).collect();
                self.fail_all(
                    &slots,
                    &Arc::new(status::with_context(status, op.user_context)),
                );
                return;
            }
        };
        if let Some(data) = inline {
            // The bytes sit inside a message; a copy gives them the alignment that lets a plugin use them in place.
            match host::copy(&data) {
                Ok(data) => self.place(placement, data.into()),
                Err(status) => self.fail_all(&placement.slots(), &Arc::new(status)),
            }
        } else if let Some(data) = early {
            self.place(placement, data);
        } else {
            self.puts
                .by_transfer
                .insert(transfer, State::Awaited(placement));
        }
    }

    /// The bytes of a transfer that came before its op; a promise of bytes turns into an awaited transfer.
    fn take_early(&mut self, transfer: u64) -> Option<Block> {
        match self.puts.by_transfer.remove(&transfer)? {
            State::Early(data) => {
                self.puts.early_bytes = self.puts.early_bytes.saturating_sub(data.len() as u64);
                Some(data)
            }
            State::Promised(bytes) => {
                self.puts.early_bytes = self.puts.early_bytes.saturating_sub(bytes);
                None
            }
            State::Awaited(old) => {
                let fault = Arc::new(status::invalid(format!(
                    "transfer {transfer} was used twice"
                )));
                self.fail_all(&old.slots(), &fault);
                None
            }
        }
    }

    /// The bytes of a transfer are about to come. An error refuses them, before memory is taken for them.
    pub(crate) fn put_begins(&mut self, transfer: u64, bytes: u64) -> Result<Begun, StatusProto> {
        match self.puts.by_transfer.get(&transfer) {
            Some(State::Awaited(placement)) if placement.bytes as u64 == bytes => {
                Ok(Begun::Expected)
            }
            Some(State::Awaited(placement)) => {
                let status = wrong_size(placement, bytes);
                self.fail_put(transfer, status.clone());
                Err(status)
            }
            Some(State::Promised(_) | State::Early(_)) => Err(status::invalid(format!(
                "the bytes of transfer {transfer} were sent twice"
            ))),
            None => {
                let (limit, early) = (self.core.limits.early_put_bytes, self.puts.early_bytes);
                let Some(sum) = early.checked_add(bytes).filter(|&sum| sum <= limit) else {
                    return Ok(Begun::NoRoomYet(status::exhausted(format!(
                        "{bytes} bytes of transfer {transfer} came before their op, beside {early} others; \
                         at most {limit} may: send the op first"
                    ))));
                };
                self.puts.early_bytes = sum;
                self.puts
                    .by_transfer
                    .insert(transfer, State::Promised(bytes));
                Ok(Begun::Expected)
            }
        }
    }

    /// The bytes of a transfer are here, or the sender broke off.
    pub(crate) fn put_ends(&mut self, transfer: u64, data: Result<Block, Broken>) {
        let data = match data {
            Ok(data) => Some(data),
            Err(Broken::Lying(status)) => {
                self.fail_put(transfer, status);
                return;
            }
            Err(Broken::Off) => None,
        };
        match (self.puts.by_transfer.remove(&transfer), data) {
            (Some(State::Awaited(placement)), Some(data)) => self.place(placement, data),
            (Some(State::Promised(_)), Some(data)) => {
                self.puts.by_transfer.insert(transfer, State::Early(data));
            }
            (Some(State::Promised(bytes)), None) => {
                self.puts.early_bytes = self.puts.early_bytes.saturating_sub(bytes);
            }
            // A sender that broke off may come again, or its proxy cancels the put. A cancelled put wants no bytes.
            (Some(state), _) => {
                self.puts.by_transfer.insert(transfer, state);
            }
            (None, _) => {}
        }
    }

    pub(super) fn cancel_put(&mut self, op: CancelPut) {
        self.fail_put(
            op.transfer,
            op.status
                .unwrap_or_else(|| status::of(Code::Cancelled, "the transfer was cancelled")),
        );
    }

    fn fail_put(&mut self, transfer: u64, status: StatusProto) {
        match self.puts.by_transfer.remove(&transfer) {
            Some(State::Awaited(placement)) => {
                let fault = Arc::new(status::with_context(status, placement.cause.user_context));
                self.fail_all(&placement.slots(), &fault);
            }
            Some(State::Promised(bytes)) => {
                self.puts.early_bytes = self.puts.early_bytes.saturating_sub(bytes)
            }
            Some(State::Early(data)) => {
                self.puts.early_bytes = self.puts.early_bytes.saturating_sub(data.len() as u64);
            }
            None => {}
        }
    }

    /// Bytes and op are there: makes them dense and hands them to the plugin.
    pub(super) fn place(&mut self, placement: Placement, data: Block) {
        if data.len() != placement.bytes {
            let fault = Arc::new(status::with_context(
                wrong_size(&placement, data.len() as u64),
                placement.cause.user_context,
            ));
            self.fail_all(&placement.slots(), &fault);
            return;
        }
        counters::add(&self.core.counters.put_bytes, data.len() as u64);
        let element = placement.dtype.host_bytes;
        let Some(strides) = placement
            .strides
            .clone()
            .filter(|strides| !geometry::is_dense(&placement.dims, strides, element))
        else {
            self.place_dense(placement, Arc::new(data));
            return;
        };
        if data.len() <= GATHER_HERE_BYTES {
            match gather(&data, &placement.dims, &strides, element) {
                Ok(dense) => self.place_dense(placement, Arc::new(dense)),
                Err(status) => self.fail_all(&placement.slots(), &Arc::new(status)),
            }
            return;
        }
        let (dims, (core, serial)) = (
            placement.dims.clone(),
            (Arc::clone(&self.core), self.serial),
        );
        // The placement holds values of this thread; the task carries its number.
        let number = self.mint();
        self.puts.gathering.insert(number, placement);
        self.core.runtime.spawn_blocking(move || {
            let dense = gather(&data, &dims, &strides, element);
            core.post(serial, move |session| {
                let Some(placement) = session.puts.gathering.remove(&number) else {
                    return;
                };
                match dense {
                    Ok(dense) => session.place_dense(placement, Arc::new(dense)),
                    Err(status) => session.fail_all(&placement.slots(), &Arc::new(status)),
                }
            });
        });
    }

    /// Hands dense bytes to the plugin, once for each target; all targets share them.
    pub(super) fn place_dense(&mut self, placement: Placement, host: HostBytes) {
        let Placement {
            dtype,
            dims,
            order,
            targets,
            cause,
            maker,
            ..
        } = placement;
        // The array's own size; types below a byte may take less, which is known when the buffer is there.
        let bytes = geometry::dense_bytes(&dims, dtype.host_bytes);
        for (target, slot) in targets {
            let ask = bytes
                .clone()
                .and_then(|bytes| self.ask(&target, bytes as u64))
                .map_err(|status| Arc::new(status::with_context(status, cause.user_context)));
            let ask = match ask {
                Ok(ask) => ask,
                Err(fault) => {
                    self.resolve(&slot, Err(fault));
                    continue;
                }
            };
            let (host, dims, whose) = (Arc::clone(&host), dims.clone(), cause.clone());
            let order = order.clone();
            self.with_room(vec![ask], cause.clone(), move |session, charges| {
                let made = charges.and_then(|charges| {
                    let origin = Origin::new(whose, Maker::Op(maker));
                    let form = (dtype.element, dims.as_slice(), order.as_deref());
                    session.make_shard(host, form, &target, origin, charges)
                });
                session.resolve(&slot, made);
            });
        }
    }

    /// One shard from dense host bytes of a type, dimensions, and their order on the device.
    fn make_shard(
        &mut self,
        host: HostBytes,
        (element, dims, order): (ElementType, &[i64], Option<&[i64]>),
        target: &Target,
        origin: Rc<Origin>,
        charges: Vec<Charge>,
    ) -> Result<Shard, Fault> {
        let memory = self
            .core
            .memory(target.device, &target.memory_kind)
            .map_err(|status| Arc::new(status::with_context(status, origin.user_context())))?;
        let client = &self.core.client;
        let made = match order {
            Some(order) => client.buffer_from_host_in_order(host, element, dims, order, memory),
            None => client.buffer_from_host(host, element, dims, None, memory),
        };
        match made {
            Ok(buffer) => Ok(self.shard_of(buffer, charges, origin)),
            Err(error) => {
                let device = usize::try_from(target.device).unwrap_or(usize::MAX);
                Err(self.plugin_fault(&error, device, &origin.cause))
            }
        }
    }

    /// Accounts a buffer. `charges`: the one that was reserved for it, which is corrected to what the buffer takes.
    pub(super) fn shard_of(
        &self,
        buffer: waystation_pjrt::Buffer,
        charges: Vec<Charge>,
        origin: Rc<Origin>,
    ) -> Shard {
        let bytes = buffer.on_device_bytes().unwrap_or_default();
        let charge = charges.into_iter().next();
        Shard::new(buffer, bytes, charge, origin, &self.core.counters)
    }
}

/// The type, the bytes that a put expects, and the order on the device.
fn expect(
    dtype: i32,
    dims: &[i64],
    strides: Option<&[i64]>,
    layout: Option<&LayoutProto>,
) -> Result<(Dtype, usize, Order), StatusProto> {
    let dtype = Dtype::of_number(dtype)?;
    let order = layout::of_proto(layout, dims)?;
    let bytes = match strides {
        Some(strides) => geometry::region_bytes(dims, strides, dtype.host_bytes)?,
        None => geometry::dense_bytes(dims, dtype.host_bytes)?,
    };
    Ok((dtype, bytes, order))
}

fn wrong_size(placement: &Placement, bytes: u64) -> StatusProto {
    let strides = placement
        .strides
        .as_deref()
        .map(|strides| format!(" with byte strides {strides:?}"))
        .unwrap_or_default();
    status::invalid(format!(
        "{bytes} bytes came for an array of {:?}{strides}, which needs {}",
        placement.dims, placement.bytes
    ))
}

fn gather(
    data: &[u8],
    dims: &[i64],
    strides: &[i64],
    element: usize,
) -> Result<AlignedBytes, StatusProto> {
    let mut dense = host::zeroed(geometry::dense_bytes(dims, element)?)?;
    geometry::gather(data, &mut dense, dims, strides, element)?;
    Ok(dense)
}
