//! What a process does with a launch that is open: its partitions call collectives, and it ends.

use super::exchange::Part;
use super::launch::{self, State};
use super::{Engine, plan};
use crate::call::{Call, Code, Failure};
use crate::op::Op;
use crate::transport::{CHUNK, Message};
use bytes::Bytes;
use std::sync::Arc;

/// A launch that is open on this process. It ends when this is dropped; calls that are not done then fail.
#[derive(Debug)]
pub struct Launch {
    engine: Engine,
    state: Arc<State>,
}

impl Launch {
    pub(super) fn new(engine: Engine, state: Arc<State>) -> Self {
        Self { engine, state }
    }

    /// Its number.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.state.number
    }

    /// What a partition of this process calls collectives with.
    ///
    /// # Errors
    ///
    /// [`Code::InvalidArgument`] if the partition runs elsewhere.
    pub fn member(&self, partition: u32) -> Result<Member, Failure> {
        if self.state.process_of(partition) != Some(self.engine.0.me) {
            return Err(Failure::new(
                Code::InvalidArgument,
                format!(
                    "partition {partition} of launch {} does not run here",
                    self.number()
                ),
            ));
        }
        Ok(Member {
            engine: self.engine.clone(),
            state: Arc::clone(&self.state),
            partition,
        })
    }

    /// Calls `then` once: when every process of the launch has called [`Launch::here`], or when the launch fails before that. To
    /// be called before `here`. `then` is called on a thread of the transport or on one that uses the launch, and must not block.
    pub fn when_all_here(&self, then: impl FnOnce(Result<(), Failure>) + Send + 'static) {
        self.state.gather.when(Box::new(then));
        // It may have failed between.
        if let Some(failure) = self.failure() {
            self.state.gather.fail(&failure);
        }
    }

    /// Says that this process's part can start, with nothing more from outside and whatever else runs.
    pub fn here(&self) {
        self.engine.here(&self.state);
    }

    /// Fails the launch, here and everywhere.
    pub fn fail(&self, failure: Failure) {
        self.engine.end(self.state.number, failure, true);
    }

    /// Why the launch failed, if it did.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        self.state.failure()
    }
}

impl Drop for Launch {
    fn drop(&mut self) {
        let waits = self.state.gather.waits();
        if self.state.close() || waits {
            // Others wait for a call that is under way, or for this part to start.
            self.fail(Failure::new(
                Code::Aborted,
                format!("launch {} was given up", self.number()),
            ));
        } else if self.state.is_over() {
            self.engine.close(&self.state);
        }
    }
}

/// One partition of a launch.
#[derive(Clone, Debug)]
pub struct Member {
    engine: Engine,
    state: Arc<State>,
    partition: u32,
}

impl Member {
    /// Starts a collective and returns; `call.done` tells the outcome, at once or later.
    pub fn start(&self, op: &Op, call: Call) {
        let Call {
            inputs,
            mut outputs,
            done,
        } = call;
        let inputs_sizes: Vec<usize> = inputs.iter().map(Bytes::len).collect();
        let outputs_sizes: Vec<usize> = (0..outputs.count())
            .map(|index| outputs.get(index).len())
            .collect();
        let sizes = plan::Sizes {
            inputs: &inputs_sizes,
            outputs: &outputs_sizes,
        };
        let steps = match plan::plan(op, self.partition, &sizes) {
            Ok(steps) => steps,
            Err(failure) => {
                drop((inputs, outputs));
                return done(Err(failure));
            }
        };
        launch::copies(&steps, &inputs, outputs.as_mut());
        let started = self
            .state
            .start(op, self.partition, steps, &inputs, outputs, done);
        drop(inputs);
        let Some(started) = started else {
            return;
        };
        for key in started.asks {
            match self.state.process_of(key.source) {
                Some(process) if process == self.engine.0.me => {
                    let actions = self.state.ready(key).unwrap_or_default();
                    self.engine.act(&self.state, actions);
                }
                Some(process) => self.engine.send(&self.state, process, Message::Ready(key)),
                None => self.engine.misfit(&self.state, key),
            }
        }
        self.engine.act(&self.state, started.actions);
        for own in started.own {
            let mut rest = own.bytes;
            let mut offset = 0;
            while !rest.is_empty() {
                let chunk = rest.split_to(rest.len().min(CHUNK));
                let len = chunk.len();
                self.engine.reduce(
                    &self.state,
                    &own.key,
                    &own.exchange,
                    &own.reducer,
                    own.member,
                    offset,
                    Part::Lent(chunk),
                );
                offset += len;
            }
        }
    }
}
