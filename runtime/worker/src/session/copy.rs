//! Shards from shards: copies between the devices and memories of this worker, bitcasts, and pulls from other workers.

use std::{rc::Rc, sync::Arc};

use waystation_pjrt::HostBytes;
use waystation_proto::{
    tensorflow::StatusProto,
    waystation::worker::{Answer, Bitcast, Copy, Pull, Target},
};

use super::{Session, put::Placement};
use crate::{
    counters,
    dtype::Dtype,
    geometry, status,
    table::{Origin, Shard, Slot, Value},
};

impl Session {
    pub(super) fn copy(&mut self, op: Copy) {
        let Some(target) = op.target else {
            tracing::warn!("a Copy without a target was ignored");
            return;
        };
        let (source, slot) = (self.slot(op.source), Slot::pending(false));
        self.insert(target.shard, Rc::clone(&slot));
        let user_context = op.user_context;
        let from = Rc::clone(&source);
        self.when(&[source], move |session| match from.value() {
            Value::Pending { .. } => {}
            Value::Failed(fault) => session.resolve(&slot, Err(fault)),
            Value::Ready(shard) => session.copy_shard(&from, &shard, &target, slot, user_context),
        });
    }

    fn copy_shard(
        &mut self,
        source: &Rc<Slot>,
        shard: &Shard,
        target: &Target,
        slot: Rc<Slot>,
        user_context: u64,
    ) {
        let memory = match self.core.memory(target.device, &target.memory_kind) {
            Ok(memory) => memory,
            Err(status) => {
                self.resolve(
                    &slot,
                    Err(Arc::new(status::with_context(status, user_context))),
                );
                return;
            }
        };
        match shard.buffer.copy_to_memory(memory) {
            Ok(buffer) => {
                let made = self.shard_of(buffer, Origin::new(user_context));
                self.resolve(&slot, Ok(made));
            }
            // Some plugins do not copy a buffer to where it is, or between some kinds of memory; the host can.
            Err(error) => {
                tracing::debug!(%error, "the plugin does not copy between these memories; the copy goes over the host");
                let dims = shard.buffer.dims().to_vec();
                match Dtype::of_element(shard.buffer.element_type()) {
                    Ok(dtype) => self.copy_over_host(
                        source,
                        shard,
                        target.clone(),
                        slot,
                        dtype,
                        dims,
                        user_context,
                    ),
                    Err(status) => self.resolve(&slot, Err(Arc::new(status))),
                }
            }
        }
    }

    pub(super) fn bitcast(&mut self, op: Bitcast) {
        let Some(target) = op.target else {
            tracing::warn!("a Bitcast without a target was ignored");
            return;
        };
        let (source, slot) = (self.slot(op.source), Slot::pending(false));
        self.insert(target.shard, Rc::clone(&slot));
        let (dtype, dims, user_context) = (op.dtype, op.dims, op.user_context);
        let from = Rc::clone(&source);
        self.when(&[source], move |session| match from.value() {
            Value::Pending { .. } => {}
            Value::Failed(fault) => session.resolve(&slot, Err(fault)),
            Value::Ready(shard) => match bitcast_type(&shard, dtype, &dims) {
                Err(status) => session.resolve(
                    &slot,
                    Err(Arc::new(status::with_context(status, user_context))),
                ),
                Ok(dtype) => {
                    session.copy_over_host(&from, &shard, target, slot, dtype, dims, user_context)
                }
            },
        });
    }

    /// Makes a shard from another one's host bytes.
    #[expect(clippy::too_many_arguments, reason = "the pieces of one op")]
    fn copy_over_host(
        &mut self,
        source: &Rc<Slot>,
        shard: &Shard,
        target: Target,
        slot: Rc<Slot>,
        dtype: Dtype,
        dims: Vec<i64>,
        user_context: u64,
    ) {
        let producer = self.produce(vec![slot]);
        let (core, serial) = (Arc::clone(&self.core), self.serial);
        self.read_host(source, shard, move |result| {
            core.post(serial, move |session| {
                let host = result.map(|host| Arc::new(host) as HostBytes);
                for slot in session.take_produced(producer) {
                    let made = match &host {
                        Ok(host) => {
                            session.make_shard(host, dtype.element, &dims, &target, user_context)
                        }
                        Err(fault) => Err(Arc::clone(fault)),
                    };
                    session.resolve(&slot, made);
                }
            });
        });
    }

    pub(super) fn pull(&mut self, op: Pull) {
        let Some(target) = op.target else {
            self.answer(op.request, Err(status::invalid("a Pull without a target")));
            return;
        };
        let slot = Slot::pending(false);
        self.insert(target.shard, Rc::clone(&slot));
        let (request, user_context, dims) = (op.request, op.user_context, op.dims);
        let expected = Dtype::of_number(op.dtype)
            .and_then(|dtype| Ok((dtype, geometry::dense_bytes(&dims, dtype.host_bytes)?)))
            .and_then(|expected| self.room_to_wait().map(|()| expected));
        let (dtype, bytes) = match expected {
            Ok(expected) => expected,
            Err(status) => {
                let status = status::with_context(status, user_context);
                self.resolve(&slot, Err(Arc::new(status.clone())));
                self.answer(request, Err(status));
                return;
            }
        };
        let producer = self.produce(vec![slot]);
        let (core, serial) = (Arc::clone(&self.core), self.serial);
        self.core.runtime.spawn(async move {
            let peers = Arc::clone(&core.peers);
            let data = peers
                .fetch(&op.from, op.from_epoch, op.transfer, bytes)
                .await;
            core.post(serial, move |session| {
                let slots = session.take_produced(producer);
                match data {
                    Ok(data) => {
                        counters::add(&session.core.counters.pulled_bytes, data.len() as u64);
                        let targets = slots
                            .into_iter()
                            .map(|slot| (target.clone(), slot))
                            .collect();
                        let placement = Placement {
                            dtype,
                            dims,
                            strides: None,
                            bytes,
                            targets,
                            user_context,
                        };
                        session.place_dense(&placement, &(Arc::new(data) as HostBytes));
                        session.answer(request, Ok(Answer::default()));
                    }
                    Err(status) => {
                        let status = status::with_context(status, user_context);
                        session.fail_all(&slots, &Arc::new(status.clone()));
                        session.answer(request, Err(status));
                    }
                }
            });
        });
    }
}

/// The type to see a shard's bytes as.
fn bitcast_type(shard: &Shard, dtype: i32, dims: &[i64]) -> Result<Dtype, StatusProto> {
    let from = Dtype::of_element(shard.buffer.element_type())?;
    let to = Dtype::of_number(dtype)?;
    if (from.is_below_a_byte() || to.is_below_a_byte()) && from != to {
        return Err(status::unimplemented(format!(
            "bitcasts between {} and {} are not built: elements below a byte",
            from.primitive.as_str_name(),
            to.primitive.as_str_name()
        )));
    }
    let have = geometry::dense_bytes(shard.buffer.dims(), from.host_bytes)?;
    let want = geometry::dense_bytes(dims, to.host_bytes)?;
    if have == want {
        return Ok(to);
    }
    Err(status::invalid(format!(
        "a shard of {have} bytes cannot be seen as {dims:?}, which has {want}"
    )))
}
