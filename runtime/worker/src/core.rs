//! What the dispatch thread, the gRPC service and the tasks between them share.

use std::sync::Arc;

use crossbeam_channel::Sender;
use tokio::{runtime::Handle, sync::OnceCell};
use waystation_pjrt::{Client, Memory};
use waystation_proto::{
    tensorflow::StatusProto,
    waystation::worker::{Attach, Op},
};

use crate::{
    compiler::Compiler, config::Limits, counters::Counters, data::Offers, lease::Lease,
    ledger::Ledger, outbox::Outbox, peers::Peers, segments::Segments, session::Session,
    slabs::Slabs, spanning::Spanning, status, usage::Clients, window::Permit, writing::Writing,
};

/// Work for the dispatch thread on a session's state.
pub(crate) type Job = Box<dyn FnOnce(&mut Session) + Send>;

/// A call of the data service: on the session that it names, or with the reason why that is not there.
pub(crate) type DataCall = Box<dyn FnOnce(Result<&mut Session, StatusProto>) + Send>;

/// Everything that reaches the dispatch thread, in order of arrival.
pub(crate) enum Event {
    /// A proxy takes the worker over. Answered with the number of the new session, or the reason why not.
    Attach {
        attach: Attach,
        outbox: Outbox,
        accepted: tokio::sync::oneshot::Sender<Result<u64, StatusProto>>,
    },
    /// The next op of session `serial`.
    Op {
        serial: u64,
        op: Box<Op>,
        /// None for what takes no place in the window.
        permit: Option<Permit>,
    },
    /// The op stream of session `serial` has ended.
    End { serial: u64 },
    /// Something that session `serial` waits for; void when the session is over.
    Job { serial: u64, job: Job },
    /// A call of the data service, which names the session by its epoch.
    Data { epoch: u64, call: DataCall },
    /// The end of the thread.
    Stop,
}

/// Shared by reference count.
pub(crate) struct Core {
    pub(crate) client: Client,
    pub(crate) counters: Arc<Counters>,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) clients: Clients,
    pub(crate) limits: Limits,
    pub(crate) runtime: Handle,
    pub(crate) events: Sender<Event>,
    pub(crate) compiler: Arc<Compiler>,
    pub(crate) peers: Arc<Peers>,
    /// What other workers may fetch from this one.
    pub(crate) offers: Arc<Offers>,
    pub(crate) segments: Arc<Segments>,
    pub(crate) checkpoints: waystation_checkpoint::Engine,
    pub(crate) slabs: Arc<Slabs>,
    pub(crate) spanning: Spanning,
    pub(crate) lease: Arc<Lease>,
    /// The worker, for messages: "slice 0 task 1".
    pub(crate) place: String,
    /// Whether the plugin can copy parts of a buffer to the host.
    pub(crate) reads_parts: OnceCell<bool>,
    /// What saves are writing.
    pub(crate) writing: Arc<Writing>,
}

impl Core {
    /// Runs `job` on the dispatch thread if session `serial` is still there.
    pub(crate) fn post(&self, serial: u64, job: impl FnOnce(&mut Session) + Send + 'static) {
        // The thread is gone only when the process shuts down; nobody waits for the job then.
        let _ = self.events.send(Event::Job {
            serial,
            job: Box::new(job),
        });
    }

    /// Waits until no other worker needs anything more of this one's collectives, for as long as a shutdown waits.
    pub(crate) async fn collectives_at_rest(&self) {
        // What is not at rest then fails on the other workers, which lose this one.
        let _ = tokio::time::timeout(self.limits.grace, self.spanning.at_rest()).await;
    }

    /// Whether that is the device's default memory, which alone is accounted against its limit.
    pub(crate) fn is_default_memory(&self, device: usize, kind: &str) -> bool {
        let device = self.client.devices().get(device);
        let default = device.and_then(|device| device.memories().get(device.default_memory()));
        kind.is_empty() || default.is_some_and(|memory| memory.kind() == kind)
    }

    /// A memory of a local device by kind; the empty kind is the device's default memory.
    pub(crate) fn memory(&self, device: u32, kind: &str) -> Result<&Memory, StatusProto> {
        let devices = self.client.devices();
        let Some(found) = usize::try_from(device)
            .ok()
            .and_then(|device| devices.get(device))
        else {
            return Err(status::invalid(format!(
                "there is no local device {device}; this worker has {}",
                devices.len()
            )));
        };
        let memory = if kind.is_empty() {
            found.memories().get(found.default_memory())
        } else {
            found.memories().iter().find(|memory| memory.kind() == kind)
        };
        memory.ok_or_else(|| {
            let kinds: Vec<&str> = found.memories().iter().map(Memory::kind).collect();
            status::invalid(format!(
                "device {device} has no memory {kind:?}, only {kinds:?}"
            ))
        })
    }
}
