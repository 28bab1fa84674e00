//! Large shards for other workers, where the device is this process's memory: they are sent from where they lie, without a copy.
//! Until that is done the shard is held, so that no execution takes its memory over.
//!
//! What lies otherwise than the host wants it, or on a device that is not the host, is copied like any other read. So is what
//! cannot be seen, which also tells why.

use std::{rc::Rc, sync::Arc};

use bytes::Bytes;
use waystation_checkpoint::Term;
use waystation_pjrt::{Error, HostView};
use waystation_proto::tensorflow::StatusProto;

use super::{COPY_HERE_BYTES, Copied, Parts, State, cut, lies_as_wanted};
use crate::{
    core::Core,
    dtype::Dtype,
    geometry,
    region::{self, Region},
    session::Session,
    slabs::Slabs,
    status,
    table::{Shard, Slot, Value},
};

/// A shard's bytes, and the hold on it.
struct Seen {
    view: Option<HostView>,
    core: Arc<Core>,
    serial: u64,
    reader: u64,
}

impl AsRef<[u8]> for Seen {
    fn as_ref(&self) -> &[u8] {
        self.view.as_ref().map_or(&[], AsRef::as_ref)
    }
}

impl Drop for Seen {
    fn drop(&mut self) {
        // First, so that the execution that waits for nothing else can have the memory.
        self.view = None;
        let reader = self.reader;
        self.core.post(self.serial, move |session| {
            for slot in session.take_produced(reader) {
                session.end_send(&slot);
            }
        });
    }
}

impl Session {
    /// Reads what another worker will fetch.
    pub(super) fn read_for_worker(
        &mut self,
        transfer: u64,
        slot: Rc<Slot>,
        shard: &Shard,
        parts: Parts,
    ) {
        if shard.bytes() <= COPY_HERE_BYTES || !lies_as_wanted(shard) {
            self.read_shard(transfer, &slot, shard, parts, false);
            return;
        }
        slot.begin_send();
        let reader = self.produce(vec![slot]);
        let (core, serial) = (Arc::clone(&self.core), self.serial);
        let buffer = shard.buffer.clone();
        let filled = buffer.ready();
        let see = move || {
            // Not on the plugin's thread.
            let runtime = core.runtime.clone();
            runtime.spawn_blocking(move || {
                let view = buffer.host_view();
                core.post(serial, move |session| {
                    session.seen(transfer, reader, parts, view);
                });
            });
        };
        match filled {
            // A failure is met again.
            Ok(filled) => filled.on_ready(move |_| see()),
            Err(_) => see(),
        }
    }

    fn seen(
        &mut self,
        transfer: u64,
        reader: u64,
        parts: Parts,
        view: Result<Option<HostView>, Error>,
    ) {
        let Some(slot) = self.take_produced(reader).pop() else {
            return;
        };
        let shard = match slot.value() {
            Value::Ready(shard) => shard,
            Value::Failed(fault) => {
                self.end_send(&slot);
                self.read_done(transfer, Err(fault));
                return;
            }
            // It was ready before.
            Value::Pending { .. } => return self.end_send(&slot),
        };
        let Ok(Some(view)) = view else {
            self.read_shard(transfer, &slot, &shard, parts, false);
            self.end_send(&slot);
            return;
        };
        if let Some(State::Coming { origin, .. }) = self.transfers.by_id.get_mut(&transfer) {
            *origin = Some(Rc::clone(&shard.origin));
        }
        let dims = shard.buffer.dims().to_vec();
        let dtype = Dtype::of_element(shard.buffer.element_type());
        let seen = Bytes::from_owner(Seen {
            view: Some(view),
            core: Arc::clone(&self.core),
            serial: self.serial,
            // As long as anybody has the bytes.
            reader: self.produce(vec![slot]),
        });
        let element = match dtype {
            Ok(dtype) => dtype.host_bytes,
            Err(status) => return self.read_done(transfer, Err(Arc::new(status))),
        };
        match in_place(&seen, &dims, &parts, element) {
            Ok(Some(bytes)) => self.read_done(transfer, Ok(Copied::seen(bytes))),
            Err(status) => self.read_done(transfer, Err(Arc::new(status))),
            Ok(None) => {
                let (core, serial) = (Arc::clone(&self.core), self.serial);
                self.core.runtime.spawn_blocking(move || {
                    let made = gathered(&core.slabs, &seen, &dims, &parts, element);
                    drop(seen);
                    let made = made.map(Copied::seen).map_err(Arc::new);
                    core.post(serial, move |session| session.read_done(transfer, made));
                });
            }
        }
    }
}

/// What is wanted, if it lies together.
fn in_place(
    seen: &Bytes,
    dims: &[i64],
    parts: &Parts,
    element: usize,
) -> Result<Option<Bytes>, StatusProto> {
    Ok(match parts {
        Parts::Whole(None) => Some(seen.clone()),
        Parts::Whole(Some(strides)) => {
            geometry::is_dense(dims, strides, element).then(|| seen.clone())
        }
        Parts::Regions(regions) => match regions.as_slice() {
            [one] => region::together(one, dims, element)?.map(|range| seen.slice(range)),
            _ => None,
        },
    })
}

/// What is wanted, copied.
fn gathered(
    slabs: &Arc<Slabs>,
    seen: &Bytes,
    dims: &[i64],
    parts: &Parts,
    element: usize,
) -> Result<Bytes, StatusProto> {
    let whole;
    let regions: &[Region] = match parts {
        Parts::Regions(regions) => regions,
        Parts::Whole(strides) => {
            if let Some(strides) = strides {
                let made = super::scatter(seen, dims, strides, element)?;
                return Ok(Bytes::from_owner(made));
            }
            whole = [Region {
                offset: vec![0; dims.len()],
                size: dims.to_vec(),
            }];
            &whole
        }
    };
    let total = region::total_bytes(regions, element)?;
    let slab = slabs.take(total, Term::Passing);
    let mut slab = slab.map_err(|error| status::of_plugin(&error, 0))?;
    cut(seen, dims, regions, element, &mut slab.bytes)?;
    Ok(Bytes::from_owner(slab))
}
