//! What becomes of a client's launches when it is gone: nobody can receive their results, and others wait for the devices.
//!
//! What has not begun is dropped. A launch that spans workers and has begun ends with its next collective: a loop over one may
//! never end by itself. What the plugin has on this worker alone runs on, since nothing ends it, and so does what spans workers
//! by the plugin's own collectives.
//!
//! Each worker is told for itself, and fails the launches that it knows; the engine tells the others, whose word may come later.

use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering::Relaxed},
};

use waystation_proto::tensorflow::{StatusProto, error::Code};

use super::{Session, launches::InFlight};
use crate::{
    status::{self, Fault},
    usage::Usage,
};

/// How many clients that have ended are known. Their last ops leave the proxy soon after, and it bounds how many those are.
const ENDED: usize = 1024;

/// Clients that have ended, so that their ops that come still find them so.
#[derive(Default)]
pub(super) struct Gone(VecDeque<Arc<Usage>>);

impl Session {
    /// The client whose op this is has ended.
    pub(super) fn client_ended(&mut self) {
        let client = Arc::clone(&self.client);
        if client.ended.swap(true, Relaxed) {
            return;
        }
        self.gone.0.push_back(Arc::clone(&client));
        if self.gone.0.len() > ENDED {
            self.gone.0.pop_front();
        }
        let its = |other: &Arc<Usage>| Arc::ptr_eq(other, &client);
        let native = self.is_native();
        let fault: Fault = Arc::new(over());
        for sequence in self.launches.parts_of(&client) {
            // Where this one has said that it can start, the others may have, and nothing ends that.
            if !(native && self.is_said(sequence)) {
                self.part_fails(sequence, &fault);
            }
        }
        let ready = &self.launches.ready;
        let local = ready.iter().filter(|(_, launch)| its(&launch.cause.client));
        let local: Vec<u64> = local.map(|(sequence, _)| *sequence).collect();
        for sequence in local {
            if let Some(launch) = self.launches.ready.remove(&sequence) {
                self.launch_failed(&launch.results, launch.watch, &fault);
            }
        }
        if native {
            return;
        }
        let launches = &self.launches;
        let starting = launches.starting.values().filter_map(|starting| {
            let launch = starting.launch();
            launch.part.as_ref().filter(|_| its(&launch.cause.client))
        });
        let running =
            launches
                .in_flight
                .values()
                .filter_map(|InFlight { origin, part, .. }| {
                    part.as_ref().filter(|_| its(&origin.cause.client))
                });
        for part in starting.chain(running) {
            part.fail(&fault, &self.core.place);
        }
    }

    /// Why a launch of the client does not begin any more, where it has ended.
    pub(super) fn goes_on(client: &Usage) -> Result<(), StatusProto> {
        match client.ended.load(Relaxed) {
            true => Err(over()),
            false => Ok(()),
        }
    }
}

fn over() -> StatusProto {
    status::of(Code::Cancelled, "the session of the client has ended")
}
