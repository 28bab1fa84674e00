//! Watch: one reply when all shards are ready, or with the first failure.

use std::{collections::HashMap, rc::Rc, sync::Arc, time::Instant};

use waystation_proto::waystation::worker::{Watch, WatchDone, reply};

use super::Session;
use crate::{
    counters,
    status::{self, Fault},
    table::{Shard, Value},
};

/// Watches not answered yet.
#[derive(Default)]
pub(super) struct Watches(HashMap<u64, Open>);

struct Open {
    /// Shards that it still waits for.
    missing: usize,
    since: Instant,
}

impl Session {
    pub(super) fn watch(&mut self, op: Watch) {
        if op.shards.is_empty() {
            self.watch_done(op.watch, None);
            return;
        }
        if let Err(status) = self.room_to_wait() {
            self.watch_done(op.watch, Some(Arc::new(status)));
            return;
        }
        let watch = op.watch;
        let open = Open {
            missing: op.shards.len(),
            since: Instant::now(),
        };
        self.watches.0.insert(watch, open);
        for shard in op.shards {
            let slot = self.slot(shard);
            let watched = Rc::clone(&slot);
            self.when(&[slot], move |session| match watched.value() {
                Value::Pending { .. } => {}
                Value::Failed(fault) => session.watch_part(watch, Err(fault)),
                Value::Ready(shard) => session.watch_buffer(watch, &shard),
            });
        }
    }

    fn watch_buffer(&mut self, watch: u64, shard: &Shard) {
        // The watch may be over; then nobody needs to hear of the buffer.
        if !self.watches.0.contains_key(&watch) {
            return;
        }
        let origin = Rc::clone(&shard.origin);
        if origin.is_execution() {
            self.when_ended(&Rc::clone(&origin), move |session| {
                session.watch_part(watch, origin.fault().map_or(Ok(()), Err));
            });
            return;
        }
        let user_context = origin.user_context();
        match shard.buffer.ready() {
            Err(error) => {
                let fault = Arc::new(status::of_plugin(&error, user_context));
                self.watch_part(watch, Err(fault));
            }
            Ok(event) => {
                let (core, serial) = (Arc::clone(&self.core), self.serial);
                event.on_ready(move |result| {
                    let result =
                        result.map_err(|error| Arc::new(status::of_plugin(&error, user_context)));
                    core.post(serial, move |session| session.watch_part(watch, result));
                });
            }
        }
    }

    fn watch_part(&mut self, watch: u64, result: Result<(), Fault>) {
        let Some(open) = self.watches.0.get_mut(&watch) else {
            return;
        };
        match result {
            Err(fault) => {
                self.watches.0.remove(&watch);
                self.watch_done(watch, Some(fault));
            }
            Ok(()) => {
                open.missing -= 1;
                if open.missing == 0 {
                    counters::add(&self.core.counters.watches, 1);
                    counters::add_time(&self.core.counters.watch_nanos, open.since.elapsed());
                    self.watches.0.remove(&watch);
                    self.watch_done(watch, None);
                }
            }
        }
    }

    pub(super) fn watch_done(&self, watch: u64, fault: Option<Fault>) {
        let status = fault.map(Arc::unwrap_or_clone);
        self.outbox
            .send(reply::Reply::WatchDone(WatchDone { watch, status }));
    }
}
