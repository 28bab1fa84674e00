//! Connections that break and are made again, between processes that live.
//!
//! What was on its way is lost with a connection, on both sides, so a launch that has begun fails. One that waits for its processes
//! waits on: of such a launch nothing is lost but word of who can start it, which each side says again when there is a new
//! connection. Who has failed the launch meanwhile answers that with the failure.

use super::Engine;
use super::exchange::lock;
use crate::call::Failure;
use crate::transport::{Message, Process};

impl Engine {
    /// Says that the connection to a process has broken, before there may be another one. Whether the process is gone
    /// ([`Engine::lost`]) is not known by that.
    pub fn broke(&self, process: Process, failure: &Failure) {
        let open: Vec<_> = {
            let mut table = lock(&self.0.table);
            table.drop_said_by(process);
            table.open.values().cloned().collect()
        };
        for state in open {
            if state.placement.contains(&process) && !state.gather.forgets(process) {
                self.end(state.number, failure.clone(), true);
            }
        }
    }

    /// Says that there is a connection to a process, the first one or another one.
    pub fn connected(&self, process: Process) {
        let open: Vec<_> = lock(&self.0.table).open.values().cloned().collect();
        for state in open {
            if state.placement.contains(&process) && state.gather.has(self.0.me) {
                // One that breaks at once is followed by yet another one.
                let _ = self.0.transport.send(process, Message::Here(state.number));
            }
        }
    }
}
