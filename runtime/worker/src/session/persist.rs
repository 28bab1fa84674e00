//! SaveArrays and RestoreArrays: shards straight between devices and a bucket.
//!
//! The session takes hold of the shards in stream order, and a task moves them piece by piece under one bound of host bytes.
//! A piece is read from its device when there is room for it; until then no execution may take its buffer over.

use std::{collections::HashMap, rc::Rc, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use tokio::sync::oneshot;
use waystation_checkpoint::{Checkpoints, within};
use waystation_pjrt::Buffer;
use waystation_proto::{
    tensorflow::{StatusProto, error::Code},
    waystation::worker::{Answer, RestoreArrays, SaveArrays, Target},
};

use super::Session;
use crate::{
    core::Core,
    counters, geometry,
    ledger::Charge,
    persist::{self, Boxes, Pieces},
    status::{self, Fault},
    table::{Maker, Origin, Shard, Slot, Value},
    usage::Cause,
};

/// Pieces that one save or restore has under way at the same time, bounds of bytes apart.
const WIDTH: usize = 16;

/// Saves under way: the shards that are not read yet, by save and piece.
#[derive(Default)]
pub(super) struct Saves(HashMap<(u64, usize), (Rc<Slot>, Rc<Shard>)>);

impl Session {
    pub(super) fn save_arrays(&mut self, op: SaveArrays) {
        let request = op.request;
        if let Err(status) = self.room_to_wait() {
            self.answer(request, Err(status));
            return;
        }
        let slots: Vec<Rc<Slot>> = op
            .items
            .iter()
            .flat_map(|item| &item.shards)
            .map(|&shard| self.slot(shard))
            .collect();
        let held = slots.clone();
        self.when(&slots, move |session| {
            if let Err(status) = session.start_save(op, &held) {
                session.answer(request, Err(status));
            }
        });
    }

    /// The buffers are there: takes hold of those to write, and starts the task.
    fn start_save(&mut self, op: SaveArrays, slots: &[Rc<Slot>]) -> Result<(), StatusProto> {
        let SaveArrays {
            request,
            items,
            timeout_ms,
            user_context,
        } = op;
        let mut shards = Vec::with_capacity(slots.len());
        for slot in slots {
            match slot.value() {
                Value::Ready(shard) => shards.push((Rc::clone(slot), shard)),
                Value::Failed(fault) => return Err(Arc::unwrap_or_clone(fault)),
                Value::Pending { .. } => {
                    return Err(status::invalid("a save began before its shards"));
                }
            }
        }
        let save = self.mint();
        let mut left = shards.into_iter();
        let mut plans = Vec::with_capacity(items.len());
        let mut pieces = 0;
        for item in items {
            let own: Vec<_> = left.by_ref().take(item.shards.len()).collect();
            let kinds: Vec<_> = own
                .iter()
                .map(|(_, shard)| (shard.buffer.element_type(), shard.buffer.dims()))
                .collect();
            let plan = Pieces::plan(item.file, &item.positions, &kinds, item.writes_metadata)
                .map_err(|status| status::with_context(status, user_context))?;
            plans.push((plan, own));
        }
        let mut arrays = Vec::with_capacity(plans.len());
        for (plan, own) in plans {
            for piece in &plan.pieces {
                let Some((slot, shard)) = own.get(piece.shard) else {
                    continue;
                };
                slot.hold();
                let entry = (Rc::clone(slot), Rc::clone(shard));
                self.saves.0.insert((save, pieces), entry);
                pieces += 1;
            }
            arrays.push(plan);
        }
        let (core, serial) = (Arc::clone(&self.core), self.serial);
        self.core.runtime.spawn(async move {
            let saved = save_all(&core, serial, save, arrays, timeout_ms).await;
            core.post(serial, move |session| {
                for piece in 0..pieces {
                    session.let_go(save, piece);
                }
                let result = saved.map(|()| Answer::default());
                let result = result.map_err(|status| status::with_context(status, user_context));
                session.answer(request, result);
            });
        });
        Ok(())
    }

    /// Reads one piece of a save to the host.
    fn read_piece(
        &mut self,
        save: u64,
        piece: usize,
        bytes: oneshot::Sender<Result<Bytes, Fault>>,
    ) {
        if let Some((slot, shard)) = self.saves.0.get(&(save, piece)).cloned() {
            self.read_host(&slot, &shard, move |result| {
                // A save that has failed or run out of time takes no more pieces.
                let _ = bytes.send(result.map(Bytes::from_owner));
            });
        }
        // The copy is under way, and keeps the buffer itself.
        self.let_go(save, piece);
    }

    fn let_go(&mut self, save: u64, piece: usize) {
        if let Some((slot, _)) = self.saves.0.remove(&(save, piece)) {
            slot.unhold();
        }
    }

    pub(super) fn restore_arrays(&mut self, op: RestoreArrays) {
        let RestoreArrays {
            request,
            items,
            timeout_ms,
            user_context,
        } = op;
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
            let result = restore_all(&core, serial, arrays, timeout_ms).await;
            core.post(serial, move |session| {
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

    /// Reads the boxes and makes the shards of them.
    async fn fetch(
        &self,
        core: &Arc<Core>,
        serial: u64,
        checkpoints: &Checkpoints,
        limit: Option<Duration>,
    ) -> Result<Vec<(Buffer, Charge)>, StatusProto> {
        let charges = self.room(core, serial).await?;
        let _room = core.stage(self.boxes.bytes).await?;
        let (array, domains) = (&self.boxes.array, &self.boxes.domains);
        let read = checkpoints.restore(array, domains);
        let read = within(limit, "restoring an array", read).await;
        let boxes = read.map_err(|error| persist::of_checkpoint(&error))?;
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

async fn save_all(
    core: &Arc<Core>,
    serial: u64,
    save: u64,
    arrays: Vec<Pieces>,
    timeout_ms: u64,
) -> Result<(), StatusProto> {
    let mut jobs = Vec::new();
    let mut number = 0;
    for array in &arrays {
        for piece in &array.pieces {
            jobs.push((array, piece, number));
            number += 1;
        }
    }
    let work = async {
        let written = stream::iter(jobs.into_iter().map(Ok)).try_for_each_concurrent(
            WIDTH,
            async |(array, piece, number)| {
                let _room = core.stage(piece.bytes).await?;
                let (sender, bytes) = oneshot::channel();
                core.post(serial, move |session| {
                    session.read_piece(save, number, sender)
                });
                let bytes = bytes.await.map_err(|_| session_over())?;
                let bytes = bytes.map_err(Arc::unwrap_or_clone)?;
                let size = bytes.len() as u64;
                let pieces = vec![(piece.domain.clone(), bytes)];
                let written = core.checkpoints.save(&array.array, pieces, false).await;
                written.map_err(|error| persist::of_checkpoint(&error))?;
                counters::add(&core.counters.saved_bytes, size);
                Ok::<(), StatusProto>(())
            },
        );
        written.await?;
        // The metadata comes last: without it there is no array, so a save that broke off leaves none that looks whole.
        for array in arrays.iter().filter(|array| array.writes_metadata) {
            let written = core.checkpoints.save(&array.array, Vec::new(), true).await;
            written.map_err(|error| persist::of_checkpoint(&error))?;
        }
        Ok(())
    };
    limited(timeout_ms, "saving arrays", work).await
}

async fn restore_all(
    core: &Arc<Core>,
    serial: u64,
    arrays: Vec<Arriving>,
    timeout_ms: u64,
) -> Result<(), StatusProto> {
    let limit = timeout(timeout_ms).map(|after| tokio::time::Instant::now() + after);
    let checkpoints = &Checkpoints::new(&core.checkpoints);
    let results: Vec<Result<(), StatusProto>> = stream::iter(arrays)
        .map(|array| async move {
            let left = limit.map(|at| at.saturating_duration_since(tokio::time::Instant::now()));
            let user_context = array.cause.user_context;
            let made = array.fetch(core, serial, checkpoints, left).await;
            let made = made.map_err(|status| Arc::new(status::with_context(status, user_context)));
            let (sender, placed) = oneshot::channel();
            core.post(serial, move |session| {
                // Nobody listens when the session's other half is gone.
                let _ = sender.send(session.restored(&array, made));
            });
            let placed = placed.await.map_err(|_| session_over())?;
            placed.map_err(Arc::unwrap_or_clone)
        })
        .buffer_unordered(WIDTH)
        .collect()
        .await;
    results.into_iter().collect()
}

fn timeout(timeout_ms: u64) -> Option<Duration> {
    (timeout_ms != 0).then(|| Duration::from_millis(timeout_ms))
}

/// Runs `work` for at most so long; 0 sets no limit.
async fn limited(
    timeout_ms: u64,
    what: &str,
    work: impl Future<Output = Result<(), StatusProto>>,
) -> Result<(), StatusProto> {
    let Some(after) = timeout(timeout_ms) else {
        return work.await;
    };
    match tokio::time::timeout(after, work).await {
        Ok(result) => result,
        Err(_) => Err(status::of(
            Code::Unavailable,
            format!(
                "{what} took longer than the {} s allowed",
                after.as_secs_f32()
            ),
        )),
    }
}

fn session_over() -> StatusProto {
    status::of(Code::Cancelled, "the session has ended")
}
