//! Launches that span workers, with the plugin's own collectives.
//!
//! They are agreed on like the others (see `span`): all workers start them in one order, each when all can. What has started cannot
//! be ended from outside, though: a device waits for the others' parts for as long as it takes. So a part says that it can start
//! only when its inputs have buffers and its room is reserved, and one that fails all the same takes the whole group down.
//!
//! All of them go to the plugin by one thread, for its devices together, so that each device gets them in that order.

use std::{rc::Rc, sync::Arc};

use waystation_pjrt::{Buffer, Execution};

use super::{Session, execution::Launch, launch::Prepared};
use crate::{
    ledger::Charge,
    status::{self, Fault},
    table::Shard,
};

/// A part that is being handed to the plugin.
pub(super) struct Handing {
    launch: Launch,
    kept: Vec<i64>,
    shards: Vec<Rc<Shard>>,
    room: Vec<Charge>,
}

/// The launch id that the plugin is told: the same on all workers, and not that of the launches around it. Clients number theirs
/// each for itself.
fn launch_id(number: u64) -> i32 {
    let below = number % u64::from(i32::MAX.unsigned_abs());
    i32::try_from(below).unwrap_or_default().saturating_add(1)
}

impl Session {
    /// Whether the plugin moves the data of programs over several workers.
    pub(super) fn is_native(&self) -> bool {
        self.core.spanning.group().is_some()
    }

    /// Gives parts what they need, in the order in which they start, until one has to wait: what comes behind it must not have the
    /// room that it needs.
    pub(super) fn prepare_parts(&mut self) {
        if self.room.waiting() > 0 {
            // What asked for room before gets it first, when an execution ends.
            return;
        }
        let order: Vec<u64> = self.launches.order.values().copied().collect();
        // Those before it hold room, which comes free when they have ended.
        let mut behind = false;
        for sequence in order {
            let Some(waiting) = self.launches.parts.get_mut(&sequence) else {
                continue;
            };
            if waiting.prepared.is_some() {
                behind = true;
                continue;
            }
            let Some(launch) = waiting.launch.take() else {
                return;
            };
            let prepared = self.prepare(&launch);
            if let Some(waiting) = self.launches.parts.get_mut(&sequence) {
                waiting.launch = Some(launch);
            }
            match prepared {
                Ok(Some(prepared)) => {
                    if let Some(waiting) = self.launches.parts.get_mut(&sequence) {
                        waiting.prepared = Some(prepared);
                    }
                    behind = true;
                }
                Ok(None) => return,
                Err(_) if behind => return,
                Err(fault) => self.part_fails(sequence, &fault),
            }
        }
    }

    /// Hands a part to the plugin, beside the dispatch thread: it may wait there for the other workers.
    pub(super) fn start_native(&mut self, sequence: u64, launch: Launch, prepared: Prepared) {
        let (shards, kept, room) = prepared;
        let args: Vec<Vec<Buffer>> = (0..launch.ordinals.len())
            .map(|device| launch.args_of(device, &shards).cloned().collect())
            .collect();
        let mut options = launch.options(&kept);
        if let Some(part) = &launch.part {
            options.launch_id = launch_id(part.number);
        }
        let (executable, user_context) =
            (launch.loaded.executable.clone(), launch.cause.user_context);
        self.launches.handing.insert(
            sequence,
            Handing {
                launch,
                kept,
                shards,
                room,
            },
        );
        let (core, serial) = (Arc::clone(&self.core), self.serial);
        let sent = self.core.spanning.on_device(0, move || {
            let args: Vec<Vec<&Buffer>> = args.iter().map(|args| args.iter().collect()).collect();
            let started = executable.execute(&args, &options);
            let started =
                started.map_err(|error| Arc::new(status::of_plugin(&error, user_context)));
            core.post(serial, move |session| session.handed(sequence, started));
        });
        if let Err(status) = sent {
            self.handed(sequence, Err(Arc::new(status)));
        }
    }

    /// The plugin has taken a part, or has refused it.
    fn handed(&mut self, sequence: u64, started: Result<Execution, Fault>) {
        let Some(handing) = self.launches.handing.remove(&sequence) else {
            return;
        };
        let Handing {
            launch,
            kept,
            shards,
            room,
        } = handing;
        match started {
            Ok(execution) => self.launched(sequence, launch, &kept, shards, room, execution),
            Err(fault) => {
                let device = launch.ordinals.first().copied().unwrap_or(0);
                let fault = self.with_table_if_memory(fault, device, &launch.cause);
                if let Some(part) = &launch.part {
                    part.fail(&fault, &self.core.place);
                }
                self.launch_failed(&launch.results, launch.watch, &fault);
                self.retry_asks();
                self.native_failed(&fault);
            }
        }
    }

    /// A part has failed, while the other workers' may wait for it in the plugin, where nothing ends them.
    pub(super) fn native_failed(&self, fault: &Fault) {
        if let Some(group) = self.core.spanning.group() {
            group.end(&format!(
                "a program over several workers failed on {}, and the others wait for it: {}",
                self.core.place, fault.message
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_that_follow_each_other_have_other_ids() {
        let most = u64::from(i32::MAX.unsigned_abs());
        assert_eq!((launch_id(0), launch_id(1)), (1, 2));
        assert_eq!((launch_id(most - 1), launch_id(most)), (i32::MAX, 1));
        assert_eq!(launch_id(u64::MAX - 1) + 1, launch_id(u64::MAX));
    }
}
