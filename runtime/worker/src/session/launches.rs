//! Executions of a session, from when their inputs are there until they have ended, and which of them goes next.

use std::{
    collections::{BTreeMap, HashMap},
    rc::Rc,
    sync::Arc,
};

use super::{
    execution::Launch,
    native::Handing,
    program::Loaded,
    span::{Part, Place, Starting, Waiting},
};
use crate::{
    ledger::Charge,
    status::Fault,
    table::{Origin, Shard},
    usage::Usage,
};

/// Executions of a session.
#[derive(Default)]
pub(super) struct Launches {
    /// Those whose inputs are there, in stream order.
    pub(super) ready: BTreeMap<u64, Launch>,
    /// Parts of those that span workers and have not started.
    pub(super) parts: HashMap<u64, Waiting>,
    /// The order in which they start: by place, which is their own number or that of their [`Session::place_part`].
    ///
    /// [`Session::place_part`]: super::Session::place_part
    pub(super) order: BTreeMap<u64, u64>,
    /// Those that have no place yet, by the proxy's number of the launch.
    pub(super) unplaced: HashMap<u64, u64>,
    /// There may be something to tell other workers of those.
    pub(super) unsaid: bool,
    /// Parts that are being handed to the plugin.
    pub(super) starting: HashMap<u64, Starting>,
    /// As these, with the plugin's own collectives.
    pub(super) handing: HashMap<u64, Handing>,
    /// Those handed to the plugin; what they hold of the devices is free when they end.
    pub(super) in_flight: HashMap<u64, InFlight>,
}

/// Parts of launches that span workers, started and not ended. With those within this worker, fewer than a CPU plugin takes
/// for a device without blocking its caller.
const PARTS: usize = 4;

/// What is started next.
pub(super) enum Next {
    Local,
    Part,
}

impl Launches {
    /// The place and the number of the part that starts first.
    pub(super) fn first_part(&self) -> Option<(u64, u64)> {
        let first = self.order.first_key_value();
        first.map(|(place, sequence)| (*place, *sequence))
    }

    /// Takes out a part.
    pub(super) fn remove_part(&mut self, sequence: u64) -> Option<Waiting> {
        let part = self.parts.remove(&sequence)?;
        match part.place() {
            Place::At(place) => self.order.remove(&place),
            Place::Later(launch) => self.unplaced.remove(&launch),
        };
        Some(part)
    }

    /// A client's parts that have not started, in the order in which they came.
    pub(super) fn parts_of(&self, client: &Arc<Usage>) -> Vec<u64> {
        let parts = self.parts.iter();
        let own = parts.filter(|(_, waiting)| Arc::ptr_eq(waiting.client(), client));
        let mut own: Vec<u64> = own.map(|(sequence, _)| *sequence).collect();
        own.sort_unstable();
        own
    }

    fn count(&self, which: impl Fn(&InFlight) -> bool) -> usize {
        self.in_flight
            .values()
            .filter(|record| which(record))
            .count()
    }

    /// What can start now, the first in the stream if both can.
    ///
    /// The plugin's own collectives take a thread of its pool for each device until all have one, and so may parts of launches that
    /// span workers; half of the one and half of the other would wait for ever. So they never run at the same time.
    pub(super) fn next(&self, limit: usize) -> Option<Next> {
        let part = self.first_part();
        let part = part
            .filter(|(_, sequence)| self.parts.get(sequence).is_some_and(Waiting::is_ready))
            .map(|(place, _)| place);
        let local = self.ready.first_key_value();
        let local = local.map(|(sequence, launch)| (*sequence, launch.ordinals.len() > 1));
        let starting = self.starting.len() + self.handing.len();
        let parts = starting + self.count(|record| record.part.is_some());
        let part_may = part.filter(|part| {
            let natives = || self.count(|record| record.part.is_none() && record.devices > 1);
            let earlier_native = local.is_some_and(|(local, native)| native && local < *part);
            parts < PARTS && !earlier_native && natives() == 0
        });
        let local_may = local.filter(|(local, native)| {
            let others = self.in_flight.len() + starting - parts;
            let waits = *native && (parts > 0 || part.is_some_and(|part| part < *local));
            others < limit && !waits
        });
        match (part_may, local_may) {
            (None, None) => None,
            (Some(part), Some((local, _))) if local < part => Some(Next::Local),
            (Some(_), _) => Some(Next::Part),
            (None, Some(_)) => Some(Next::Local),
        }
    }
}

pub(super) struct InFlight {
    /// Not to be destroyed while it runs.
    pub(super) loaded: Arc<Loaded>,
    pub(super) origin: Rc<Origin>,
    /// Held until the end: the device reads them, whatever the client has dropped. A failure of their making is the cause of
    /// one here.
    pub(super) inputs: Vec<Rc<Shard>>,
    /// The temporaries.
    pub(super) room: Vec<Charge>,
    pub(super) watch: u64,
    /// Devices here.
    pub(super) devices: usize,
    /// The first of them.
    pub(super) device: usize,
    /// Set if other workers have parts of it.
    pub(super) part: Option<Part>,
}

impl InFlight {
    /// An execution that made an input and has not ended.
    pub(super) fn open_input(&self) -> Option<Rc<Origin>> {
        let open = self.inputs.iter().find(|input| !input.origin.is_ready());
        open.map(|input| Rc::clone(&input.origin))
    }

    /// The failure that it has from elsewhere: of an input's making, or of another worker's part.
    pub(super) fn cause(&self) -> Option<Fault> {
        let input = self.inputs.iter().find_map(|input| input.origin.fault());
        input.or_else(|| self.part.as_ref()?.fault(self.origin.user_context()))
    }
}
