//! SaveArrays: device to host, to chunks, to the bucket.
//!
//! A shard is read as soon as there is room for it, cut along its chunks where the plugin can read parts; until it has been
//! read no execution takes it over. Large cuts are read in parts, which the engine lets go of as it compresses them. The
//! metadata comes last: without it there is no array, so a save that broke off leaves none that looks whole.

use std::{ops::Range, rc::Rc, sync::Arc, time::Instant};

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _, future::try_join_all, stream};
use tokio::sync::oneshot;
use tokio_util::{sync::CancellationToken, task::AbortOnDropHandle};
use waystation_checkpoint::{Cut, Elements, Meeting, Room, Saving, Term, Together};
use waystation_pjrt::{Buffer, Error, ToHost};
use waystation_proto::{
    tensorflow::{StatusProto, error::Code},
    waystation::worker::{Answer, Copied, SaveArrays, reply, save_arrays},
};

use super::{Held, IN_FLIGHT, limited, session_over};
use crate::{
    core::Core,
    counters,
    persist::{self, Pieces},
    session::{
        Session,
        read::{COPY_HERE_BYTES, copy_to_host, lies_as_wanted},
    },
    slabs::{Slab, Slabs},
    status::{self, Fault},
    table::{Slot, Value},
    writing::Taken,
};

/// A cut is read in parts of this size. Each costs a call of the plugin.
const PART_BYTES: usize = 2 << 20;
/// What is read to learn whether the plugin can read parts.
const PROBE_BYTES: usize = 64;

/// What a save needs beside its arrays.
struct Ticket {
    request: u64,
    timeout_ms: u64,
    user_context: u64,
    cancelled: CancellationToken,
    meetings: AbortOnDropHandle<Result<Vec<Meeting>, StatusProto>>,
}

impl Session {
    pub(in crate::session) fn save_arrays(&mut self, op: SaveArrays) {
        let SaveArrays {
            request,
            items,
            timeout_ms,
            user_context,
            together,
        } = op;
        if let Err(status) = self.room_to_wait() {
            self.answer(request, Err(status));
            return;
        }
        let slots: Vec<Rc<Slot>> = items
            .iter()
            .flat_map(|item| &item.shards)
            .map(|&shard| self.slot(shard))
            .collect();
        for slot in &slots {
            slot.begin_save();
        }
        // Whether all see the same folder does not depend on the arrays, which others may have earlier or later.
        let core = Arc::clone(&self.core);
        let meetings = self
            .core
            .runtime
            .spawn(meet(core, locations(&items), together));
        let ticket = Ticket {
            request,
            timeout_ms,
            user_context,
            cancelled: self.under_way(request),
            meetings: AbortOnDropHandle::new(meetings),
        };
        let held = slots.clone();
        self.when(&slots, move |session| {
            match session.plan_save(items, &held, user_context) {
                Ok((save, arrays)) => session.start_save(ticket, save, arrays),
                Err(status) => {
                    for slot in &held {
                        session.end_save(slot);
                    }
                    session.save_done(ticket, Err(status));
                }
            }
        });
    }

    /// The buffers are there: keeps hold of those to write.
    fn plan_save(
        &mut self,
        items: Vec<save_arrays::Item>,
        slots: &[Rc<Slot>],
        user_context: u64,
    ) -> Result<(u64, Vec<Writing>), StatusProto> {
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
        let mut left = shards.into_iter();
        let mut plans = Vec::with_capacity(items.len());
        for item in items {
            let own: Vec<_> = left.by_ref().take(item.shards.len()).collect();
            let kinds: Vec<_> = own
                .iter()
                .map(|(_, shard)| (shard.buffer.element_type(), shard.buffer.dims()))
                .collect();
            let (positions, shares) = (&item.positions, &item.shares);
            let mut plan = Pieces::plan(item.file, positions, shares, &kinds, item.writes_metadata)
                .map_err(|status| status::with_context(status, user_context))?;
            plan.array.codec = self.core.limits.checkpoint_codec;
            plans.push((plan, own));
        }
        let save = self.mint();
        let (mut number, mut arrays) = (0, Vec::with_capacity(plans.len()));
        for (plan, own) in plans {
            let mut writing = Writing {
                plan,
                first: number,
                in_parts: Vec::new(),
            };
            let mut pieces = writing.plan.pieces.iter().peekable();
            for (index, (slot, shard)) in own.into_iter().enumerate() {
                let Some(piece) = pieces.next_if(|piece| piece.shard == index) else {
                    // Another holder writes it.
                    self.end_save(&slot);
                    continue;
                };
                let in_parts = piece.bytes > PART_BYTES && lies_as_wanted(&shard);
                writing.in_parts.push(in_parts);
                let left = if in_parts { piece.cuts.len() } else { 1 };
                let held = Held { slot, shard, left };
                self.persists.held.insert((save, number), held);
                number += 1;
            }
            arrays.push(writing);
        }
        Ok((save, arrays))
    }

    fn start_save(&mut self, ticket: Ticket, save: u64, arrays: Vec<Writing>) {
        match arrays.iter().map(|writing| writing.in_parts.len()).sum() {
            0 => self.all_read(ticket.request),
            count => drop(self.persists.unread.insert(save, (ticket.request, count))),
        }
        let (core, serial) = (Arc::clone(&self.core), self.serial);
        let mut ticket = ticket;
        self.core.runtime.spawn(async move {
            let begun = Instant::now();
            let task = Task {
                core: Arc::clone(&core),
                serial,
                save,
                arrays: Arc::new(arrays),
                saving: core.checkpoints.saving(),
            };
            let work = async {
                // Held until the last object is written or given up.
                let _names = task.names()?;
                let met = (&mut ticket.meetings).await;
                let meetings = met.map_err(|error| {
                    status::of(Code::Unknown, format!("a save broke off: {error}"))
                })??;
                task.write_all().await?;
                futures::future::join_all(meetings.into_iter().map(Meeting::part)).await;
                Ok(())
            };
            let saved = limited(ticket.timeout_ms, &ticket.cancelled, "saving arrays", work).await;
            core.counters.saves.ended(begun, saved.is_ok());
            core.post(serial, move |session| {
                session.persists.unread.remove(&save);
                let left = session.persists.held.extract_if(|(of, _), _| *of == save);
                let left: Vec<Held> = left.map(|(_, held)| held).collect();
                for held in left {
                    session.end_save(&held.slot);
                }
                let context = ticket.user_context;
                let saved = saved.map_err(|status| status::with_context(status, context));
                session.save_done(ticket, saved);
            });
        });
    }

    fn save_done(&mut self, ticket: Ticket, saved: Result<(), StatusProto>) {
        self.persists.under_way.remove(&ticket.request);
        self.answer(ticket.request, saved.map(|()| Answer::default()));
    }

    /// One save less is to copy a shard.
    fn end_save(&mut self, slot: &Slot) {
        for wait in slot.end_save() {
            self.progress(wait);
        }
    }

    /// Reads a shard for a save, or a part of it as it lies on the device.
    fn read_piece(&mut self, key: (u64, usize), part: Option<Range<usize>>, bytes: Reading) {
        let Some(held) = self.persists.held.get(&key) else {
            // The save has failed.
            return;
        };
        let shard = Rc::clone(&held.shard);
        let (core, serial) = (Arc::clone(&self.core), self.serial);
        let done = move |read: Result<Elements, Fault>| {
            core.post(serial, move |session| session.was_read(key));
            // A save that has failed or run out of time takes no more pieces.
            let _ = bytes.send(read);
        };
        let user_context = shard.origin.user_context();
        if part.is_none() && shard.bytes() <= COPY_HERE_BYTES {
            copy_to_host(&shard.buffer, user_context, None, move |read| {
                done(read.map(|block| Bytes::from_owner(block).into()));
            });
            return;
        }
        let (buffer, slabs) = (shard.buffer.clone(), Arc::clone(&self.core.slabs));
        self.core.runtime.spawn(async move {
            done(read_beside(slabs, buffer, part, user_context).await);
        });
    }

    fn was_read(&mut self, key: (u64, usize)) {
        let Some(held) = self.persists.held.get_mut(&key) else {
            return;
        };
        held.left = held.left.saturating_sub(1);
        if held.left == 0
            && let Some(held) = self.persists.held.remove(&key)
        {
            self.end_save(&held.slot);
            self.one_read(key.0);
        }
    }

    /// One shard less of a save is not read.
    fn one_read(&mut self, save: u64) {
        let Some((request, left)) = self.persists.unread.get_mut(&save) else {
            return;
        };
        *left -= 1;
        if *left == 0 {
            let request = *request;
            self.persists.unread.remove(&save);
            self.all_read(request);
        }
    }

    fn all_read(&self, request: u64) {
        self.outbox.send(reply::Reply::Copied(Copied { request }));
    }

    /// Reads the first bytes of a shard.
    fn probe_parts(&mut self, key: (u64, usize), answer: oneshot::Sender<bool>) {
        let Some(held) = self.persists.held.get(&key) else {
            return;
        };
        let (buffer, slabs) = (held.shard.buffer.clone(), Arc::clone(&self.core.slabs));
        self.core.runtime.spawn(async move {
            // Whatever else may be wrong with the buffer is said when it is read.
            let read = read_beside(slabs, buffer, Some(0..PROBE_BYTES), 0).await;
            let cannot = |fault: Fault| fault.code == Code::Unimplemented as i32;
            let _ = answer.send(!read.is_err_and(cannot));
        });
    }
}

type Reading = oneshot::Sender<Result<Elements, Fault>>;

/// An array that is being written.
struct Writing {
    plan: Pieces,
    /// The number of its first piece in the save.
    first: usize,
    /// For each piece, whether its bytes lie on the device as they are wanted, and are many.
    in_parts: Vec<bool>,
}

/// One save.
#[derive(Clone)]
struct Task {
    core: Arc<Core>,
    serial: u64,
    save: u64,
    arrays: Arc<Vec<Writing>>,
    saving: Saving,
}

/// One read of a save, and what is made of it.
#[derive(Clone, Copy)]
struct Job {
    array: usize,
    piece: usize,
    /// The piece's number in the save.
    number: usize,
    /// Alone, of its bytes; else all cuts.
    cut: Option<usize>,
}

impl Task {
    /// Takes the names of the arrays of which this worker writes anything.
    fn names(&self) -> Result<Taken, StatusProto> {
        let plans = self.arrays.iter().map(|writing| &writing.plan);
        let names = plans
            .filter(|plan| plan.writes_metadata || !plan.pieces.is_empty())
            .map(|plan| (plan.array.location.clone(), plan.array.name.clone()));
        self.core.writing.take(names).map_err(|(location, name)| {
            let place = &self.core.place;
            let message = format!(
                "{place}, array '{name}': another save is writing it to '{location}'; wait for that to end, or save elsewhere"
            );
            status::of(Code::FailedPrecondition, message)
        })
    }

    async fn write_all(self) -> Result<(), StatusProto> {
        let mut jobs = Vec::new();
        for (array, writing) in self.arrays.iter().enumerate() {
            for (piece, in_parts) in writing.in_parts.iter().enumerate() {
                let job = Job {
                    array,
                    piece,
                    number: writing.first + piece,
                    cut: None,
                };
                if *in_parts && self.reads_parts(job.number).await? {
                    let cuts = 0..writing.plan.pieces[piece].cuts.len();
                    jobs.extend(cuts.map(|cut| Job {
                        cut: Some(cut),
                        ..job
                    }));
                } else {
                    jobs.push(job);
                }
            }
        }
        // In this order, for room is given in the order of asking.
        let task = self.clone();
        stream::iter(jobs)
            .map(move |job| task.clone().write(job))
            .buffer_unordered(IN_FLIGHT)
            .try_collect::<()>()
            .await?;
        let task = self.clone();
        stream::iter(0..self.arrays.len())
            .map(move |array| task.clone().write_metadata(array))
            .buffer_unordered(IN_FLIGHT)
            .try_collect::<()>()
            .await?;
        self.saving.finish().await.map_err(|error| {
            let mut status = persist::of_checkpoint(&error);
            status.message = format!("{}: {}", self.core.place, status.message);
            status
        })
    }

    async fn write_metadata(self, array: usize) -> Result<(), StatusProto> {
        let Pieces {
            array,
            writes_metadata,
            ..
        } = &self.arrays[array].plan;
        if !writes_metadata {
            return Ok(());
        }
        let written = self.saving.save(array, Vec::new(), true).await;
        written
            .map(|_| ())
            .map_err(|error| self.named(&array.name, None, &error))
    }

    async fn write(self, job: Job) -> Result<(), StatusProto> {
        let piece = &self.arrays[job.array].plan.pieces[job.piece];
        let engine = &self.core.checkpoints;
        let Some(cut) = job.cut.and_then(|cut| piece.cuts.get(cut)) else {
            let room = Arc::new(engine.room_for_piece(piece.bytes).await);
            let whole = self.read(job.number, None).await?.joined();
            let cuts = piece.cuts.iter().map(|cut| {
                let bytes = whole.slice(cut.bytes.clone());
                self.put(job, cut, bytes.into(), Arc::clone(&room))
            });
            return try_join_all(cuts).await.map(|_| ());
        };
        let room = Arc::new(engine.room_for_piece(cut.bytes.len()).await);
        let elements = self.read(job.number, Some(cut.bytes.clone())).await?;
        self.put(job, cut, elements, room).await
    }

    async fn put(
        &self,
        job: Job,
        cut: &Cut,
        elements: Elements,
        room: Arc<Room>,
    ) -> Result<(), StatusProto> {
        let plan = &self.arrays[job.array].plan;
        let (array, size) = (&plan.array, elements.len() as u64);
        let saving = &self.saving;
        let written = saving.save_held(array, &cut.domain, elements, room).await;
        let device = plan.pieces[job.piece].device;
        written.map_err(|error| self.named(&array.name, Some(device), &error))?;
        counters::add(&self.core.counters.saved_bytes, size);
        Ok(())
    }

    async fn read(
        &self,
        number: usize,
        part: Option<Range<usize>>,
    ) -> Result<Elements, StatusProto> {
        let (sender, bytes) = oneshot::channel();
        let key = (self.save, number);
        self.core.post(self.serial, move |session| {
            session.read_piece(key, part, sender);
        });
        let bytes = bytes.await.map_err(|_| session_over())?;
        bytes.map_err(Arc::unwrap_or_clone)
    }

    /// Whether the plugin can read parts of a buffer. Asked once a process.
    async fn reads_parts(&self, number: usize) -> Result<bool, StatusProto> {
        let asked = self.core.reads_parts.get_or_try_init(|| async {
            let (sender, answer) = oneshot::channel();
            let key = (self.save, number);
            self.core
                .post(self.serial, move |session| session.probe_parts(key, sender));
            answer.await.map_err(|_| session_over())
        });
        asked.await.copied()
    }

    /// The engine's error, with where it happened.
    fn named(
        &self,
        array: &str,
        device: Option<i32>,
        error: &waystation_checkpoint::Error,
    ) -> StatusProto {
        let mut status = persist::of_checkpoint(error);
        let shard = device.map_or_else(String::new, |id| format!(", the shard on device {id}"));
        status.message = format!(
            "{}, array '{array}'{shard}: {}",
            self.core.place, status.message
        );
        status
    }
}

/// Copies a buffer's bytes to the host: all of them, or a range as they lie on the device, which comes in parts.
async fn read_beside(
    slabs: Arc<Slabs>,
    buffer: Buffer,
    range: Option<Range<usize>>,
    user_context: u64,
) -> Result<Elements, Fault> {
    let fault = move |error: Error| Arc::new(status::of_plugin(&error, user_context));
    let begin = move || -> Result<Vec<(Slab, ToHost)>, Error> {
        let Some(range) = range else {
            let mut slab = slabs.take(buffer.host_bytes()?, Term::Passing)?;
            let copy = buffer.to_host(std::mem::take(&mut slab.bytes))?;
            return Ok(vec![(slab, copy)]);
        };
        let starts = range.clone().step_by(PART_BYTES);
        starts
            .map(|start| {
                let mut slab = slabs.take(PART_BYTES.min(range.end - start), Term::Passing)?;
                let bytes = std::mem::take(&mut slab.bytes);
                Ok((slab, buffer.part_to_host(start as u64, bytes)?))
            })
            .collect()
    };
    // A CPU plugin copies on the caller's thread.
    let begun = tokio::task::spawn_blocking(begin).await;
    let begun = begun.map_err(|error| {
        let message = format!("a read broke off: {error}");
        Arc::new(status::of(Code::Unknown, message))
    })?;
    let copies = begun.map_err(fault)?.into_iter();
    let copies = copies.map(|(mut slab, copy)| async move {
        slab.bytes = copy.await.map_err(fault)?;
        Ok::<_, Fault>(Bytes::from_owner(slab))
    });
    Ok(try_join_all(copies).await?.into_iter().collect())
}

fn locations(items: &[save_arrays::Item]) -> Vec<String> {
    let files = items.iter().filter_map(|item| item.file.as_ref());
    let mut locations: Vec<String> = files.map(|file| file.location.clone()).collect();
    locations.sort_unstable();
    locations.dedup();
    locations
}

/// Makes sure that all workers of a save see the same folders.
async fn meet(
    core: Arc<Core>,
    locations: Vec<String>,
    together: Option<save_arrays::Together>,
) -> Result<Vec<Meeting>, StatusProto> {
    let Some(together) = together else {
        return Ok(Vec::new());
    };
    let together = Together {
        nonce: together.nonce,
        place: usize::try_from(together.place).unwrap_or(usize::MAX),
        names: together.names,
    };
    let meetings = locations
        .iter()
        .map(|location| core.checkpoints.meet(location, &together));
    let met = try_join_all(meetings).await;
    let met = met.map_err(|error| persist::of_checkpoint(&error))?;
    Ok(met.into_iter().flatten().collect())
}
