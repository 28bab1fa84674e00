//! RestoreArrays: each array gets room on its devices, then room on the host, then its bytes.

use std::{
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use futures::{StreamExt as _, stream};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use waystation_checkpoint::{Checkpoints, within};
use waystation_pjrt::Buffer;
use waystation_proto::{
    tensorflow::{StatusProto, error::Code},
    waystation::worker::{Answer, RestoreArrays, Target},
};

use super::{IN_FLIGHT, Session, session_over, timeout};
use crate::{
    core::Core,
    counters, geometry,
    ledger::Charge,
    persist::{self, Boxes},
    status::{self, Fault},
    table::{Maker, Origin, Slot},
    usage::Cause,
};

impl Session {
    pub(in crate::session) fn restore_arrays(&mut self, op: RestoreArrays) {
        let RestoreArrays {
            request,
            items,
            timeout_ms,
            user_context,
        } = op;
        let cancelled = self.under_way(request);
        let slots: Vec<Vec<Rc<Slot>>> = items
            .iter()
            .map(|item| {
                item.targets
                    .iter()
                    .map(|target| {
                        let slot = Slot::pending(false);
                        self.insert(target.shard, Rc::clone(&slot));
                        slot
                    })
                    .collect()
            })
            .collect();
        let planned: Result<Vec<_>, StatusProto> = self.room_to_wait().and_then(|()| {
            items
                .into_iter()
                .map(|item| {
                    let boxes = Boxes::plan(item.file, &item.positions)?;
                    if boxes.of_target.len() == item.targets.len() {
                        return Ok((boxes, item.targets));
                    }
                    Err(status::invalid(
                        "a restore with other numbers of positions than of targets",
                    ))
                })
                .collect()
        });
        let plans = match planned {
            Ok(plans) => plans,
            Err(status) => {
                let status = status::with_context(status, user_context);
                let fault = Arc::new(status.clone());
                for slots in &slots {
                    self.fail_all(slots, &fault);
                }
                self.persists.under_way.remove(&request);
                self.answer(request, Err(status));
                return;
            }
        };
        let arrays: Vec<Arriving> = plans
            .into_iter()
            .zip(slots)
            .map(|((boxes, targets), slots)| Arriving {
                boxes,
                targets,
                producer: self.produce(slots),
                cause: self.cause(user_context),
            })
            .collect();
        let (core, serial) = (Arc::clone(&self.core), self.serial);
        self.core.runtime.spawn(async move {
            let begun = Instant::now();
            let result = restore_all(&core, serial, arrays, timeout_ms, &cancelled).await;
            core.counters.restores.ended(begun, result.is_ok());
            core.post(serial, move |session| {
                session.persists.under_way.remove(&request);
                session.answer(request, result.map(|()| Answer::default()));
            });
        });
    }

    /// Fills an array's shards.
    fn restored(
        &mut self,
        array: &Arriving,
        buffers: Result<Vec<(Buffer, Charge)>, Fault>,
    ) -> Result<(), Fault> {
        let slots = self.take_produced(array.producer);
        let buffers = match buffers {
            Ok(buffers) => buffers,
            Err(fault) => {
                let device = array.targets.first().map_or(0, |target| target.device);
                let device = usize::try_from(device).unwrap_or(usize::MAX);
                let fault = self.with_table_if_memory(fault, device, &array.cause);
                self.fail_all(&slots, &fault);
                return Err(fault);
            }
        };
        for ((buffer, charge), slot) in buffers.into_iter().zip(&slots) {
            let origin = Origin::new(array.cause.clone(), Maker::Op("restore"));
            let shard = self.shard_of(buffer, vec![charge], origin);
            self.resolve(slot, Ok(shard));
        }
        Ok(())
    }
}

impl Arriving {
    /// Takes the devices' memory before anything is read.
    async fn room(&self, core: &Arc<Core>, serial: u64) -> Result<Vec<Charge>, StatusProto> {
        let boxes = &self.boxes;
        let wanted: Vec<(Target, Vec<i64>)> = self
            .targets
            .iter()
            .zip(&boxes.of_target)
            .filter_map(|(target, &index)| {
                Some((target.clone(), boxes.domains.get(index)?.shape.clone()))
            })
            .collect();
        let (element, cause) = (boxes.dtype.host_bytes, self.cause.clone());
        let (sender, room) = oneshot::channel();
        core.post(serial, move |session| {
            let asks = wanted
                .into_iter()
                .map(|(target, dims)| {
                    let bytes = geometry::dense_bytes(&dims, element)?;
                    session.ask(&target, bytes as u64)
                })
                .collect::<Result<Vec<_>, _>>();
            match asks {
                Ok(asks) => session.with_room(asks, cause, move |_, charges| {
                    // A restore that nobody waits for gives its room back.
                    let _ = sender.send(charges.map_err(Arc::unwrap_or_clone));
                }),
                Err(status) => {
                    let _ = sender.send(Err(status));
                }
            }
        });
        room.await.map_err(|_| session_over())?
    }

    /// Reads the boxes and makes the shards of them, for as long as somebody waits.
    async fn fetch(
        &self,
        core: &Arc<Core>,
        checkpoints: &Checkpoints,
        serial: u64,
        limit: Option<Duration>,
        cancelled: &CancellationToken,
    ) -> Result<Vec<(Buffer, Charge)>, StatusProto> {
        tokio::select! {
            () = cancelled.cancelled() => Err(session_over()),
            made = self.fetch_all(core, checkpoints, serial, limit) => made,
        }
    }

    async fn fetch_all(
        &self,
        core: &Arc<Core>,
        checkpoints: &Checkpoints,
        serial: u64,
        limit: Option<Duration>,
    ) -> Result<Vec<(Buffer, Charge)>, StatusProto> {
        let charges = self.room(core, serial).await?;
        let _room = core.checkpoints.room_for_boxes(self.boxes.bytes).await;
        let (array, domains) = (&self.boxes.array, &self.boxes.domains);
        let read = checkpoints.restore(array, domains);
        let read = within(limit, "restoring an array", read).await;
        let boxes = read.map_err(|error| {
            let mut status = persist::of_checkpoint(&error);
            status.message = format!("{}: {}", core.place, status.message);
            status
        })?;
        let targets: Vec<(Target, Bytes, Vec<i64>)> = self
            .targets
            .iter()
            .zip(&self.boxes.of_target)
            .filter_map(|(target, &index)| {
                let (bytes, domain) = (boxes.get(index)?, domains.get(index)?);
                Some((target.clone(), bytes.clone(), domain.shape.clone()))
            })
            .collect();
        let (core, element) = (Arc::clone(core), self.boxes.dtype.element);
        // The plugin may copy the bytes, which takes as long as they are many.
        let made = tokio::task::spawn_blocking(move || {
            let one = |(target, bytes, dims): (Target, Bytes, Vec<i64>)| {
                counters::add(&core.counters.restored_bytes, bytes.len() as u64);
                let memory = core.memory(target.device, &target.memory_kind)?;
                let made =
                    core.client
                        .buffer_from_host(Arc::new(bytes), element, &dims, None, memory);
                made.map_err(|error| status::of_plugin(&error, 0))
            };
            let buffers = targets.into_iter().map(one);
            let charged = buffers.zip(charges);
            charged
                .map(|(buffer, charge)| Ok((buffer?, charge)))
                .collect()
        });
        made.await
            .map_err(|error| status::of(Code::Unknown, format!("a restore broke off: {error}")))?
    }
}

/// An array on its way from the bucket.
struct Arriving {
    boxes: Boxes,
    targets: Vec<Target>,
    producer: u64,
    cause: Cause,
}

async fn restore_all(
    core: &Arc<Core>,
    serial: u64,
    arrays: Vec<Arriving>,
    timeout_ms: u64,
    cancelled: &CancellationToken,
) -> Result<(), StatusProto> {
    let limit = timeout(timeout_ms).map(|after| tokio::time::Instant::now() + after);
    let checkpoints = &Checkpoints::new(&core.checkpoints);
    let results: Vec<Result<(), StatusProto>> = stream::iter(arrays)
        .map(|array| async move {
            let left = limit.map(|at| at.saturating_duration_since(tokio::time::Instant::now()));
            let user_context = array.cause.user_context;
            let made = array
                .fetch(core, checkpoints, serial, left, cancelled)
                .await;
            let made = made.map_err(|status| Arc::new(status::with_context(status, user_context)));
            let (sender, placed) = oneshot::channel();
            core.post(serial, move |session| {
                // Nobody listens when the session's other half is gone.
                let _ = sender.send(session.restored(&array, made));
            });
            let placed = placed.await.map_err(|_| session_over())?;
            placed.map_err(Arc::unwrap_or_clone)
        })
        .buffer_unordered(IN_FLIGHT)
        .collect()
        .await;
    results.into_iter().collect()
}
