//! Shards from shards: copies between the devices and memories of this worker, bitcasts, and pulls from other workers.

use std::{rc::Rc, sync::Arc};

use waystation_checkpoint::Term;
use waystation_proto::{
    tensorflow::{StatusProto, error::Code},
    waystation::worker::{Answer, Bitcast, Copy, Pull, Target},
};

use super::{Session, put::Placement};
use crate::{
    counters,
    dtype::Dtype,
    geometry, layout,
    ledger::Charge,
    peers::Elsewhere,
    status,
    table::{Maker, Origin, Shard, Slot, Value},
    usage::Cause,
};

/// What the memory table calls shards that come from other shards.
const COPY: &str = "copy";

impl Session {
    pub(super) fn copy(&mut self, op: Copy) {
        let Some(target) = op.target else {
            tracing::warn!("a Copy without a target was ignored");
            return;
        };
        let (source, slot) = (self.slot(op.source), Slot::pending(false));
        self.insert(target.shard, Rc::clone(&slot));
        let cause = self.cause(op.user_context);
        let from = Rc::clone(&source);
        self.when(&[source], move |session| match from.value() {
            Value::Pending { .. } => {}
            Value::Failed(fault) => session.resolve(&slot, Err(fault)),
            Value::Ready(shard) => session.copy_shard(from, &shard, target, slot, cause),
        });
    }

    fn copy_shard(
        &mut self,
        source: Rc<Slot>,
        shard: &Shard,
        target: Target,
        slot: Rc<Slot>,
        cause: Cause,
    ) {
        let ask = match self.ask(&target, shard.bytes()) {
            Ok(ask) => ask,
            Err(status) => {
                let status = status::with_context(status, cause.user_context);
                self.resolve(&slot, Err(Arc::new(status)));
                return;
            }
        };
        // While the copy waits for room no execution may take the source over.
        source.hold();
        self.with_room(vec![ask], cause.clone(), move |session, charges| {
            source.unhold();
            match (source.value(), charges) {
                (_, Err(fault)) | (Value::Failed(fault), _) => session.resolve(&slot, Err(fault)),
                (Value::Pending { .. }, _) => {}
                (Value::Ready(shard), Ok(charges)) => {
                    session.copy_into(&source, &shard, target, slot, cause, charges);
                }
            }
        });
    }

    fn copy_into(
        &mut self,
        source: &Rc<Slot>,
        shard: &Shard,
        target: Target,
        slot: Rc<Slot>,
        cause: Cause,
        charges: Vec<Charge>,
    ) {
        let order = layout::of_buffer(&shard.buffer);
        let same_order = layout::of_copy(order.clone(), &target.memory_kind) == order;
        let copied = self
            .core
            .memory(target.device, &target.memory_kind)
            .map(|memory| same_order.then(|| shard.buffer.copy_to_memory(memory)));
        match copied {
            Ok(Some(Ok(buffer))) => {
                let origin = Origin::new(cause, Maker::Op(COPY));
                let made = self.shard_of(buffer, charges, origin);
                self.resolve(&slot, Ok(made));
            }
            Ok(Some(Err(error))) if error.code() as i32 == Code::ResourceExhausted as i32 => {
                let device = usize::try_from(target.device).unwrap_or(usize::MAX);
                let fault = self.plugin_fault(&error, device, &cause);
                self.resolve(&slot, Err(fault));
            }
            // Some plugins do not copy a buffer to where it is, or between some kinds of memory; the host can.
            Ok(other) => {
                tracing::debug!(result = ?other, "the plugin does not copy so between these memories; the copy goes over the host");
                drop(charges);
                let dims = shard.buffer.dims().to_vec();
                match Dtype::of_element(shard.buffer.element_type()) {
                    Ok(dtype) => {
                        self.copy_over_host(source, shard, target, slot, dtype, dims, cause);
                    }
                    Err(status) => self.resolve(&slot, Err(Arc::new(status))),
                }
            }
            Err(status) => self.resolve(&slot, Err(Arc::new(status))),
        }
    }

    pub(super) fn bitcast(&mut self, op: Bitcast) {
        let Some(target) = op.target else {
            tracing::warn!("a Bitcast without a target was ignored");
            return;
        };
        let (source, slot) = (self.slot(op.source), Slot::pending(false));
        self.insert(target.shard, Rc::clone(&slot));
        let (dtype, dims, cause) = (op.dtype, op.dims, self.cause(op.user_context));
        let from = Rc::clone(&source);
        self.when(&[source], move |session| match from.value() {
            Value::Pending { .. } => {}
            Value::Failed(fault) => session.resolve(&slot, Err(fault)),
            Value::Ready(shard) => match bitcast_type(&shard, dtype, &dims) {
                Err(status) => session.resolve(
                    &slot,
                    Err(Arc::new(status::with_context(status, cause.user_context))),
                ),
                Ok(dtype) => {
                    session.copy_over_host(&from, &shard, target, slot, dtype, dims, cause)
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
        cause: Cause,
    ) {
        let order = layout::of_buffer(&shard.buffer).filter(|_| dims == shard.buffer.dims());
        let order = layout::of_copy(order, &target.memory_kind);
        let producer = self.produce(vec![slot]);
        let (core, serial) = (Arc::clone(&self.core), self.serial);
        self.read_host(source, shard, move |result| {
            core.post(serial, move |session| {
                let slots = session.take_produced(producer);
                match result {
                    Ok(host) => {
                        let bytes = host.len();
                        let placement = Placement {
                            dtype,
                            dims,
                            strides: None,
                            order,
                            bytes,
                            targets: slots
                                .into_iter()
                                .map(|slot| (target.clone(), slot))
                                .collect(),
                            cause,
                            maker: COPY,
                        };
                        session.place_dense(placement, Arc::new(host));
                    }
                    Err(fault) => session.fail_all(&slots, &fault),
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
        let cause = self.cause(user_context);
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
        let holder = self.holder.clone();
        self.core.runtime.spawn(async move {
            let peers = Arc::clone(&core.peers);
            let from = Elsewhere {
                address: &op.from,
                epoch: op.from_epoch,
                transfer: op.transfer,
            };
            let data = peers.fetch(&holder, from, bytes, Term::Lasting).await;
            core.post(serial, move |session| {
                let slots = session.take_produced(producer);
                match data {
                    Ok((data, order)) => {
                        let order = layout::of_copy(order, &target.memory_kind);
                        counters::add(&session.core.counters.pulled_bytes, data.bytes.len() as u64);
                        let targets = slots
                            .into_iter()
                            .map(|slot| (target.clone(), slot))
                            .collect();
                        let placement = Placement {
                            dtype,
                            dims,
                            strides: None,
                            order,
                            bytes,
                            targets,
                            cause,
                            maker: COPY,
                        };
                        session.place_dense(placement, Arc::new(data));
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
