//! Room on the devices: asking the ledger for it, waiting for executions that hold some, and saying what is there when it
//! is not enough.
//!
//! An ask that does not fit fails when no execution is in flight. Until then it waits: executions give back their
//! temporaries, and inputs that the client has dropped since, when they end. While asks wait no execution is started, so
//! they do not wait for long, and a program that fits alone fits however many of it are sent at once.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use prost::Message as _;
use waystation_proto::{
    tensorflow::{StatusProto, error::Code},
    waystation::worker::Target,
};

use super::{Session, Then};
use crate::{
    dump::{self, Table},
    ledger::{Ask, Charge, Full},
    status::{self, Fault},
    table::Value,
    usage::{Cause, Waiting},
};

/// How long a memory table is good for: a client whose every op fails must not have the whole table of shards walked
/// for each.
const TABLE_LIFE: Duration = Duration::from_millis(100);

/// The session's asks.
#[derive(Default)]
pub(super) struct Room {
    /// Those that wait for executions to end, in order.
    waiting: VecDeque<Then>,
    last_table: Option<LastTable>,
}

struct LastTable {
    made: Instant,
    client: u64,
    device: usize,
    bytes: Bytes,
}

impl Room {
    /// Asks that wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }
}

impl Session {
    /// What a new shard asks for. Refuses devices and memories that are not there.
    pub(super) fn ask(&self, target: &Target, bytes: u64) -> Result<Ask, StatusProto> {
        self.core.memory(target.device, &target.memory_kind)?;
        // Just found; a device is never so far out that it has no place.
        let device = usize::try_from(target.device).unwrap_or(usize::MAX);
        let counts = self.core.is_default_memory(device, &target.memory_kind);
        Ok(Ask {
            device,
            bytes: if counts { bytes } else { 0 },
        })
    }

    /// Runs `then` with all that is asked for, or with the reason why it is not to be had; now, or when executions in
    /// flight have ended.
    pub(super) fn with_room(
        &mut self,
        asks: Vec<Ask>,
        cause: Cause,
        then: impl FnOnce(&mut Session, Result<Vec<Charge>, Fault>) + 'static,
    ) {
        if self.room.waiting.is_empty() {
            match self.core.ledger.reserve(&asks) {
                Ok(charges) => {
                    then(self, Ok(charges));
                    return;
                }
                Err(full) if !self.executes() => {
                    let fault = self.out_of_memory(full, "", &cause);
                    then(self, Err(fault));
                    return;
                }
                Err(_) => {}
            }
        }
        let waiting = Waiting::of(&cause.client);
        self.room.waiting.push_back(Box::new(move |session| {
            drop(waiting);
            session.with_room(asks, cause, then);
        }));
    }

    /// An execution has ended: those that wait try again.
    pub(super) fn retry_asks(&mut self) {
        self.runnable.append(&mut self.room.waiting);
    }

    /// The failure of an ask. `detail` says more of what was asked for.
    pub(super) fn out_of_memory(&mut self, full: Full, detail: &str, cause: &Cause) -> Fault {
        let Full { ask, used, limit } = full;
        let status = status::exhausted(format!(
            "out of memory on device {}: {} bytes more are needed{detail}, {used} of the {limit} bytes of --device_memory_bytes are in use",
            self.device_name(ask.device),
            ask.bytes,
        ));
        let status = status::with_context(status, cause.user_context);
        Arc::new(self.with_table(status, ask.device, cause))
    }

    /// A plugin's error; one of memory gets the memory table of the device.
    pub(super) fn plugin_fault(
        &mut self,
        error: &waystation_pjrt::Error,
        device: usize,
        cause: &Cause,
    ) -> Fault {
        let status = status::of_plugin(error, cause.user_context);
        self.with_table_if_memory(Arc::new(status), device, cause)
    }

    /// A plugin's failure on a device; one of memory gets the memory table.
    pub(super) fn with_table_if_memory(
        &mut self,
        fault: Fault,
        device: usize,
        cause: &Cause,
    ) -> Fault {
        if fault.code == Code::ResourceExhausted as i32 && !fault.payload.contains_key(dump::KEY) {
            Arc::new(self.with_table(Arc::unwrap_or_clone(fault), device, cause))
        } else {
            fault
        }
    }

    fn with_table(&mut self, mut status: StatusProto, device: usize, cause: &Cause) -> StatusProto {
        let table = self.table_of(device, cause.client.client);
        status.payload.insert(dump::KEY.to_owned(), table.to_vec());
        status
    }

    /// The memory table of a device for a client.
    fn table_of(&mut self, device: usize, client: u64) -> Bytes {
        if let Some(last) = &self.room.last_table
            && (last.client, last.device) == (client, device)
            && last.made.elapsed() < TABLE_LIFE
        {
            return last.bytes.clone();
        }
        let shards: Vec<_> = self
            .table
            .values()
            .filter_map(|slot| match slot.value() {
                Value::Ready(shard) => Some(shard),
                Value::Pending { .. } | Value::Failed(_) => None,
            })
            .collect();
        let mut table = Table::default();
        for shard in &shards {
            let Some((_, bytes)) = shard
                .charged()
                .filter(|&(at, bytes)| at == device && bytes > 0)
            else {
                continue;
            };
            let (origin, ready) = (&shard.origin, shard.origin.is_ready());
            if origin.cause.client.client == client {
                table.own(origin.user_context(), origin.maker(), bytes, ready);
            } else {
                table.other(bytes, ready);
            }
        }
        let dump = table.finish(self.device_name(device));
        let bytes = Bytes::from(dump.encode_to_vec());
        self.room.last_table = Some(LastTable {
            made: Instant::now(),
            client,
            device,
            bytes: bytes.clone(),
        });
        bytes
    }

    /// A device as clients know it, by number and kind.
    fn device_name(&self, device: usize) -> String {
        let ordinal = u32::try_from(device).ok();
        let global = self
            .ordinals
            .iter()
            .find(|(_, local)| Some(**local) == ordinal);
        let kind = self.core.client.devices().get(device);
        let kind = kind.map_or("unknown", |device| device.kind());
        match global {
            Some((id, _)) => format!("{id} ({kind})"),
            None => format!("{device} of the worker ({kind})"),
        }
    }
}
