//! The dispatch thread: the one place that touches shards, executables and waiting ops. It calls the plugin itself, so ops
//! take effect in stream order without a lock, and it never waits for bytes, compiles or executions.

use std::{
    sync::Arc,
    thread::JoinHandle,
    time::{Duration, Instant},
};

use crossbeam_channel::Receiver;
use waystation_proto::{
    tensorflow::{StatusProto, error::Code},
    waystation::worker::{Attach, Attached, reply},
};

use crate::{
    core::{Core, Event},
    outbox::Outbox,
    session::Session,
    status,
};

/// An event that takes longer is noted in the log.
const SLOW: Duration = Duration::from_millis(20);

/// Starts the thread. It ends with [`Event::Stop`].
pub(crate) fn start(core: Arc<Core>, events: Receiver<Event>) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name("dispatch".to_owned())
        .spawn(move || {
            let mut dispatch = Dispatch {
                core,
                session: None,
                attempt: 0,
                serial: 0,
            };
            while let Ok(event) = events.recv() {
                if matches!(event, Event::Stop) {
                    break;
                }
                let begun = Instant::now();
                dispatch.handle(event);
                let took = begun.elapsed();
                if took > SLOW {
                    // All other ops waited: the plugin blocks its caller, or does large copies itself.
                    tracing::debug!(?took, "one event held up the dispatch thread");
                }
            }
        })
}

struct Dispatch {
    core: Arc<Core>,
    session: Option<Session>,
    /// The proxy's attempt that made it.
    attempt: u64,
    /// Sessions so far: a completion that outlives its session finds another number.
    serial: u64,
}

impl Dispatch {
    fn handle(&mut self, event: Event) {
        match event {
            Event::Attach {
                attach,
                outbox,
                accepted,
            } => {
                // A caller that is gone has no use for its session.
                let result = self.attach(&attach, outbox);
                if let Err(Ok(serial)) = accepted.send(result) {
                    self.end(serial);
                }
            }
            Event::Op { serial, op, permit } => {
                if let Some(session) = self.of_serial(serial) {
                    session.apply(*op, permit);
                }
            }
            Event::End { serial } => self.end(serial),
            Event::Job { serial, job } => {
                if let Some(session) = self.of_serial(serial) {
                    job(session);
                    session.settle();
                }
            }
            Event::Data { epoch, call } => match &mut self.session {
                Some(session) if session.epoch() == epoch => {
                    call(Ok(session));
                    session.settle();
                }
                Some(session) => {
                    let now = session.epoch();
                    call(Err(status::invalid(format!(
                        "the transfer belongs to lease {epoch}, the worker now serves lease {now}"
                    ))));
                }
                None => call(Err(status::invalid(format!(
                    "the transfer belongs to lease {epoch}, which has ended"
                )))),
            },
            Event::Stop => {}
        }
    }

    fn of_serial(&mut self, serial: u64) -> Option<&mut Session> {
        self.session
            .as_mut()
            .filter(|session| session.serial() == serial)
    }

    fn attach(&mut self, attach: &Attach, outbox: Outbox) -> Result<u64, StatusProto> {
        let ours = waystation_proto::LINK_VERSION;
        if attach.link_version != ours {
            return Err(status::of(
                Code::FailedPrecondition,
                format!(
                    "the proxy ({:?}) speaks link version {}, this worker ({:?}) speaks {ours}; run the same build everywhere",
                    attach.build_id,
                    attach.link_version,
                    waystation_proto::BUILD_ID
                ),
            ));
        }
        if let Some(session) = &self.session
            && (session.epoch(), self.attempt) >= (attach.epoch, attach.attempt)
        {
            return Err(status::of(
                Code::FailedPrecondition,
                format!(
                    "the worker serves lease {}, which lease {} does not end",
                    session.epoch(),
                    attach.epoch
                ),
            ));
        }
        // The proxy of an older one may not know yet that it has lost its slices to others, who have ended since.
        let last = self.core.lease.epochs().last();
        if attach.epoch < last {
            return Err(status::of(
                Code::FailedPrecondition,
                format!(
                    "the worker has served lease {last}, which is newer than lease {}",
                    attach.epoch
                ),
            ));
        }
        let local = self.core.client.devices().len();
        if attach.device_ids.len() != local {
            return Err(status::invalid(format!(
                "{} device ids came for {local} local devices",
                attach.device_ids.len()
            )));
        }
        if let Some(session) = self.session.take() {
            session.superseded(attach.epoch);
        }
        self.serial += 1;
        self.attempt = attach.attempt;
        self.core.lease.serves(attach.epoch);
        tracing::info!(
            epoch = attach.epoch,
            proxy = attach.build_id,
            "a proxy takes the worker"
        );
        let window = u32::try_from(self.core.limits.queued_ops).unwrap_or(u32::MAX);
        let mut attached = Attached {
            window,
            local_memory: self.core.segments.announcement(),
            ..Attached::default()
        };
        // Not the core itself, which has the lease's engine.
        let (events, serial) = (self.core.events.clone(), self.serial);
        let lease = self.core.spanning.begin(attach, move |process, connected| {
            // The thread is gone only when the process shuts down.
            let _ = events.send(Event::Job {
                serial,
                job: Box::new(move |session| session.connection(process, connected)),
            });
        });
        match &lease {
            Ok(lease) => attached.collectives_address.clone_from(&lease.address),
            Err(why) => attached.cannot_span.clone_from(why),
        }
        outbox.send(reply::Reply::Attached(attached));
        self.session = Some(Session::new(
            Arc::clone(&self.core),
            attach,
            self.serial,
            outbox,
            lease,
        ));
        Ok(self.serial)
    }

    fn end(&mut self, serial: u64) {
        if let Some(session) = self.of_serial(serial) {
            tracing::info!(
                epoch = session.epoch(),
                "the session has ended; all it held is freed"
            );
            self.session = None;
            self.core.lease.serves(0);
        }
    }
}
