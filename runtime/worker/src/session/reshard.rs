//! Reshard: shards out of pieces of other shards. The pieces are gathered in host memory, one source after the other, so that
//! beside the new shards no more than one source is there at a time; what lies on another worker comes from its data service.

use std::{
    collections::{HashMap, VecDeque},
    rc::Rc,
    sync::Arc,
};

use waystation_checkpoint::Term;
use waystation_proto::{
    tensorflow::StatusProto,
    waystation::worker::{Answer, Reshard, Target, reshard},
};

use super::{Session, put::Placement};
use crate::{
    counters,
    dtype::Dtype,
    geometry, host,
    peers::Elsewhere,
    region::{self, Dense, Region},
    slabs::Slab,
    status::{self, Fault},
    table::{Slot, Value},
    usage::Cause,
};

/// What the memory table calls shards made here.
const RESHARD: &str = "reshard";

/// Those under way, by number.
pub(super) type Reshards = HashMap<u64, Job>;

/// New shards, and what they are to be.
type Shards = Vec<(Target, Rc<Slot>)>;

pub(super) struct Job {
    request: u64,
    cause: Cause,
    dtype: Dtype,
    /// The shards of each part.
    targets: Vec<Shards>,
    /// Held as long as they are here.
    sources: VecDeque<Source>,
    /// The dimensions of each part.
    dims: Arc<Vec<Vec<i64>>>,
    /// The bytes of each part; elsewhere while a source is copied into them.
    parts: Vec<Slab>,
}

struct Source {
    from: From,
    pieces: Vec<Piece>,
}

enum From {
    Here(Rc<Slot>),
    There(reshard::Remote),
}

struct Piece {
    region: Region,
    part: usize,
    offset: Vec<i64>,
}

impl Session {
    pub(super) fn reshard(&mut self, op: Reshard) {
        let mut targets = Vec::with_capacity(op.parts.len());
        let mut dims = Vec::with_capacity(op.parts.len());
        for part in op.parts {
            let made = part
                .targets
                .into_iter()
                .map(|target| (target, Slot::pending(false)))
                .collect::<Vec<_>>();
            for (target, slot) in &made {
                self.insert(target.shard, Rc::clone(slot));
            }
            targets.push(made);
            dims.push(part.dims);
        }
        let checked = Dtype::of_number(op.dtype).and_then(|dtype| {
            self.room_to_wait()?;
            Ok((dtype, self.sources(op.sources)?))
        });
        let (dtype, sources) = match checked {
            Ok(checked) => checked,
            Err(status) => {
                let status = status::with_context(status, op.user_context);
                self.reshard_failed(op.request, &targets, &Arc::new(status));
                return;
            }
        };
        let here: Vec<Rc<Slot>> = sources
            .iter()
            .filter_map(|source| match &source.from {
                From::Here(slot) => Some(Rc::clone(slot)),
                From::There(_) => None,
            })
            .collect();
        let mut job = Job {
            request: op.request,
            cause: self.cause(op.user_context),
            dtype,
            targets,
            sources,
            dims: Arc::new(dims),
            parts: Vec::new(),
        };
        self.when(&here.clone(), move |session| {
            // No execution may take a source over before it has been read.
            for slot in &here {
                slot.begin_send();
            }
            let number = session.mint();
            let parts = job.dims.iter().map(|dims| part(dims, job.dtype));
            match parts.collect::<Result<_, _>>() {
                Ok(parts) => {
                    job.parts = parts;
                    session.reshards.insert(number, job);
                    session.reshard_next(number);
                }
                Err(status) => {
                    let fault = Arc::new(status::with_context(status, job.cause.user_context));
                    session.reshard_failed(job.request, &job.targets, &fault);
                    session.let_go(job);
                }
            }
        });
    }

    fn sources(&self, sources: Vec<reshard::Source>) -> Result<VecDeque<Source>, StatusProto> {
        sources
            .into_iter()
            .map(|source| {
                let from = match source.from {
                    Some(reshard::source::From::Shard(shard)) => From::Here(self.slot(shard)),
                    Some(reshard::source::From::Remote(remote)) => From::There(remote),
                    None => return Err(status::invalid("a source that is nowhere")),
                };
                let pieces = source
                    .pieces
                    .into_iter()
                    .map(|piece| Piece {
                        region: piece.region.unwrap_or_default().into(),
                        part: usize::try_from(piece.part).unwrap_or(usize::MAX),
                        offset: piece.offset,
                    })
                    .collect();
                Ok(Source { from, pieces })
            })
            .collect()
    }

    /// Copies the next source's pieces; after the last one the shards are made.
    fn reshard_next(&mut self, number: u64) {
        let Some(job) = self.reshards.get_mut(&number) else {
            return;
        };
        let Some(Source { from, pieces }) = job.sources.pop_front() else {
            self.reshard_done(number);
            return;
        };
        let (core, serial) = (Arc::clone(&self.core), self.serial);
        let (dtype, dims) = (job.dtype, Arc::clone(&job.dims));
        let mut parts = std::mem::take(&mut job.parts);
        match from {
            From::Here(slot) => {
                let read = match slot.value() {
                    Value::Ready(shard) => Ok(shard),
                    Value::Failed(fault) => Err(fault),
                    Value::Pending { .. } => {
                        Err(Arc::new(status::invalid("a source is not there yet")))
                    }
                };
                match read {
                    Err(fault) => self.reshard_broken(number, &fault),
                    Ok(shard) => {
                        let source = shard.buffer.dims().to_vec();
                        let runtime = core.runtime.clone();
                        self.read_host(&slot, &shard, move |bytes| {
                            // Not on the plugin's thread.
                            runtime.spawn_blocking(move || {
                                let copied = bytes.and_then(|bytes| {
                                    from_shard(&bytes, &source, &pieces, &mut parts, &dims, dtype)
                                        .map_err(Arc::new)
                                });
                                core.post(serial, move |session| {
                                    session.reshard_copied(number, copied.map(|()| parts));
                                });
                            });
                        });
                    }
                }
                self.end_send(&slot);
            }
            From::There(remote) => {
                let holder = self.holder.clone();
                self.core.runtime.spawn(async move {
                    let copied = async {
                        let regions = pieces.iter().map(|piece| &piece.region);
                        let bytes = region::total_bytes(regions, dtype.host_bytes)?;
                        let whole = whole_part(&pieces, &dims);
                        let term = whole.map_or(Term::Passing, |_| Term::Lasting);
                        let from = Elsewhere {
                            address: &remote.from,
                            epoch: remote.from_epoch,
                            transfer: remote.transfer,
                        };
                        let fetched = core.peers.fetch(&holder, from, bytes, term).await;
                        let (data, _) = fetched?;
                        counters::add(&core.counters.pulled_bytes, data.bytes.len() as u64);
                        if let Some(part) = whole.and_then(|part| parts.get_mut(part)) {
                            *part = data;
                            return Ok(parts);
                        }
                        let copying = move || {
                            from_pieces(&data.bytes, &pieces, &mut parts, &dims, dtype)
                                .map(|()| parts)
                        };
                        tokio::task::spawn_blocking(copying)
                            .await
                            .unwrap_or_else(|_| Err(status::invalid("the worker is shutting down")))
                    };
                    let copied = copied.await.map_err(Arc::new);
                    core.post(serial, move |session| {
                        session.reshard_copied(number, copied)
                    });
                });
            }
        }
    }

    fn reshard_copied(&mut self, number: u64, copied: Result<Vec<Slab>, Fault>) {
        match copied {
            Ok(parts) => {
                if let Some(job) = self.reshards.get_mut(&number) {
                    job.parts = parts;
                }
                self.reshard_next(number);
            }
            Err(fault) => self.reshard_broken(number, &fault),
        }
    }

    fn reshard_done(&mut self, number: u64) {
        let Some(job) = self.reshards.remove(&number) else {
            return;
        };
        for ((bytes, dims), targets) in job.parts.into_iter().zip(job.dims.iter()).zip(job.targets)
        {
            let placement = Placement {
                dtype: job.dtype,
                dims: dims.clone(),
                strides: None,
                // A new cut has the plugin's own layout.
                order: None,
                bytes: bytes.bytes.len(),
                targets,
                cause: job.cause.clone(),
                maker: RESHARD,
            };
            // All shards of a part share its bytes.
            self.place_dense(placement, Arc::new(bytes));
        }
        self.answer(job.request, Ok(Answer::default()));
    }

    fn reshard_broken(&mut self, number: u64, fault: &Fault) {
        let Some(job) = self.reshards.remove(&number) else {
            return;
        };
        let fault = Arc::new(status::with_context(
            (**fault).clone(),
            job.cause.user_context,
        ));
        self.reshard_failed(job.request, &job.targets, &fault);
        self.let_go(job);
    }

    /// Of a job that ends early: sources that were not read may be taken over again.
    fn let_go(&mut self, job: Job) {
        for source in job.sources {
            if let From::Here(slot) = source.from {
                self.end_send(&slot);
            }
        }
    }

    fn reshard_failed(&mut self, request: u64, targets: &[Shards], fault: &Fault) {
        for (_, slot) in targets.iter().flatten() {
            self.resolve(slot, Err(Arc::clone(fault)));
        }
        self.answer(request, Err((**fault).clone()));
    }
}

/// Memory of zero, which takes nothing yet.
fn part(dims: &[i64], dtype: Dtype) -> Result<Slab, StatusProto> {
    host::zeroed(geometry::dense_bytes(dims, dtype.host_bytes)?).map(Slab::from)
}

/// The part that the pieces are all of, in its order.
fn whole_part(pieces: &[Piece], dims: &[Vec<i64>]) -> Option<usize> {
    match pieces {
        [piece] => {
            let dims = dims.get(piece.part)?;
            let all = piece.region.size == *dims && piece.offset.iter().all(|&at| at == 0);
            (all && piece.offset.len() == dims.len()).then_some(piece.part)
        }
        _ => None,
    }
}

/// Copies pieces of a whole shard.
fn from_shard(
    bytes: &[u8],
    source: &[i64],
    pieces: &[Piece],
    parts: &mut [Slab],
    dims: &[Vec<i64>],
    dtype: Dtype,
) -> Result<(), StatusProto> {
    for piece in pieces {
        let from = Dense {
            bytes,
            dims: source,
        };
        place(&from, &piece.region.offset, piece, parts, dims, dtype)?;
    }
    Ok(())
}

/// Copies pieces that came one behind the other.
fn from_pieces(
    mut bytes: &[u8],
    pieces: &[Piece],
    parts: &mut [Slab],
    dims: &[Vec<i64>],
    dtype: Dtype,
) -> Result<(), StatusProto> {
    for piece in pieces {
        let (one, rest) = bytes
            .split_at_checked(piece.region.bytes(dtype.host_bytes)?)
            .ok_or_else(|| status::invalid("the pieces have fewer bytes than they should"))?;
        bytes = rest;
        let from = Dense {
            bytes: one,
            dims: &piece.region.size,
        };
        let start = vec![0; piece.region.size.len()];
        place(&from, &start, piece, parts, dims, dtype)?;
    }
    Ok(())
}

fn place(
    from: &Dense<'_, &[u8]>,
    from_offset: &[i64],
    piece: &Piece,
    parts: &mut [Slab],
    dims: &[Vec<i64>],
    dtype: Dtype,
) -> Result<(), StatusProto> {
    let (Some(bytes), Some(dims)) = (parts.get_mut(piece.part), dims.get(piece.part)) else {
        return Err(status::invalid(format!(
            "a piece of part {}, which is not there",
            piece.part
        )));
    };
    let mut to = Dense {
        bytes: &mut bytes.bytes[..],
        dims,
    };
    region::copy(
        from,
        from_offset,
        &mut to,
        &piece.offset,
        &piece.region.size,
        dtype.host_bytes,
    )
}
