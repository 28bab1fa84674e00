//! Copies: to other devices and memories, directly between workers, and to the host.

use std::{sync::Arc, time::Instant};

use waystation_proto::{
    waystation::worker::{Copy, Pull, Read, Strides, Target, op, reply},
    xla::ifrt::{
        proto::ArrayCopySemantics,
        proxy::{
            CopyArraysRequest, CopyArraysResponse, CopyToHostBufferRequest,
            CopyToHostBufferResponse, ifrt_response::Response,
        },
    },
};

use super::{Handled, Outcome, Session, UserContext, arrays::result_handles, init::unexpected};
use crate::{
    array::{Array, Shard},
    cluster::Device,
    convert::Dtype,
    host_buffers::{FetchRoom, Outgoing, Transfer},
    link::{Answer, Link},
    local::LOCAL_FROM_BYTES,
    status::{self, Status},
};

/// How one array's copy differs from the array.
struct Change {
    devices: Vec<i32>,
    memory_kind: Option<String>,
    /// Must not share what could be shared.
    always_copy: bool,
    user_context: UserContext,
}

impl Session {
    pub(super) async fn copy_arrays(
        &mut self,
        user_context: &UserContext,
        request: CopyArraysRequest,
    ) -> Handled {
        let handles = result_handles(
            &request.result_handles,
            request.array_handles.len(),
            "CopyArrays",
        )?;
        let semantics = request.copy_semantics();
        let mut copies = Vec::with_capacity(handles.len());
        for &handle in &request.array_handles {
            let array = self.array(user_context, handle)?.clone();
            let devices = if request.device_ids.is_empty() {
                array.sharding.devices.clone()
            } else {
                request.device_ids.clone()
            };
            if devices.len() != array.shards.len() {
                return Err(status::invalid_argument(format!(
                    "array {handle} has {} shards and cannot be copied to {} devices",
                    array.shards.len(),
                    devices.len()
                )));
            }
            let change = Change {
                devices,
                // Unset keeps the kind; empty asks for the default.
                memory_kind: match &request.memory_kind {
                    None => array.sharding.memory_kind.clone(),
                    Some(kind) => Some(kind.clone()).filter(|k| !k.is_empty()),
                },
                always_copy: semantics == ArrayCopySemantics::AlwaysCopy,
                user_context: user_context.clone(),
            };
            copies.push(self.copy_array(&array, change).await?);
        }
        self.settle_now_and_then(user_context, &copies).await;
        let mut array_handles = Vec::with_capacity(handles.len());
        for (copy, handle) in copies.into_iter().zip(handles) {
            array_handles.push(self.insert(handle, Ok(copy))?);
        }
        if semantics == ArrayCopySemantics::DonateInput {
            self.donate(&request.array_handles);
        }
        Ok(Outcome::Now(Response::CopyArraysResponse(
            CopyArraysResponse { array_handles },
        )))
    }

    async fn copy_array(&mut self, array: &Array, change: Change) -> Result<Array, Status> {
        let Dtype::Numbers(dtype) = array.dtype else {
            return self.copy_strings(
                &change.user_context,
                array,
                change.devices,
                change.memory_kind,
            );
        };
        let cluster = Arc::clone(self.cluster()?);
        let shard_dims = array.sharding.shard_dims(&array.dims)?;
        let same_memory = change.memory_kind == array.sharding.memory_kind;
        let mut shards = Vec::with_capacity(array.shards.len());
        for ((source, &device), dims) in array.shards.iter().zip(&change.devices).zip(shard_dims) {
            let device = cluster
                .device(device)
                .ok_or_else(|| status::invalid_argument(format!("unknown device {device}")))?;
            if device.id == source.device && same_memory && !change.always_copy {
                shards.push(Arc::clone(source));
                continue;
            }
            let link = cluster.link(device);
            let shard = Shard::new(
                self.shared.ids.next(),
                device.id,
                Arc::clone(link),
                &change.user_context,
            );
            let shard = Arc::new(shard.needing(&source.needs));
            let target = target(&shard, device, change.memory_kind.as_deref());
            if Arc::ptr_eq(link, &source.link) {
                let copy = Copy {
                    source: source.id,
                    target: Some(target),
                    user_context: change.user_context.id(),
                };
                link.send(op::Op::Copy(copy)).await;
            } else {
                self.pull(source, link, |transfer, request, from: &Link| Pull {
                    transfer,
                    from: from.address.to_string(),
                    from_epoch: from.epoch,
                    dtype: dtype as i32,
                    dims,
                    target: Some(target),
                    user_context: change.user_context.id(),
                    request,
                })
                .await;
            }
            shards.push(shard);
        }
        let sharding = array.sharding.moved(change.devices, change.memory_kind);
        Ok(Array::new(
            array.dtype,
            array.dims.clone(),
            sharding,
            shards,
        ))
    }

    /// Has one worker fetch a shard from another, and the source forget the bytes when that is done.
    async fn pull(
        &mut self,
        source: &Shard,
        to: &Arc<Link>,
        pull: impl FnOnce(u64, u64, &Link) -> Pull,
    ) {
        let transfer = self.shared.ids.next();
        let request = self.shared.ids.next();
        let read = Read {
            transfer,
            shard: source.id,
            byte_strides: None,
            notify: false,
            ..Read::default()
        };
        source.link.send(op::Op::Read(read)).await;
        let release = ReleaseAtEnd::new(Arc::clone(&source.link), transfer);
        let answer = to
            .call(request, op::Op::Pull(pull(transfer, request, &source.link)))
            .await;
        self.tasks.spawn(async move {
            // A failed pull has failed its shard; there is nobody else to tell.
            let _ = answer.wait().await;
            drop(release);
        });
    }

    /// Starts reading an array to the host; the bytes stay at the worker until the client looks them up.
    pub(super) async fn copy_to_host(
        &mut self,
        context: &UserContext,
        request: CopyToHostBufferRequest,
    ) -> Handled {
        let array = self.array(context, request.array_handle)?;
        let shard = match array.shards.as_slice() {
            [shard] => shard,
            [first, ..] if array.sharding.is_fully_replicated(&array.dims) => first,
            shards => {
                return Err(status::invalid_argument(format!(
                    "CopyToHostBuffer of array {} with {} shards; disassemble it first",
                    request.array_handle,
                    shards.len()
                )));
            }
        };
        let Dtype::Numbers(dtype) = array.dtype else {
            return Ok(self.fetch_strings(shard.strings()?.clone(), request.host_buffer_handle));
        };
        let link = Arc::clone(&shard.link);
        let shard = shard.id;
        let bytes = super::bitcast::host_bytes(dtype, &array.dims);
        let room = self.host_buffers.room_to_fetch(bytes).await;
        let transfer = self.shared.ids.next();
        let local = link.local().is_some() && bytes >= LOCAL_FROM_BYTES;
        let read = Read {
            transfer,
            shard,
            byte_strides: request.byte_strides.map(|s| Strides { strides: s.strides }),
            notify: true,
            in_segment: local,
            in_pieces: local,
            ..Read::default()
        };
        let release = ReleaseAtEnd::new(Arc::clone(&link), transfer);
        let since = Instant::now();
        let answer = link.call(transfer, op::Op::Read(read)).await;
        let counters = Arc::clone(&self.shared.counters);
        let buffers = Arc::clone(&self.host_buffers);
        let handle = request.host_buffer_handle;
        Ok(Outcome::Later(Box::pin(async move {
            let transfer = transferred(answer, release, Some(room)).await?;
            counters.read_link.add(since);
            buffers.offer(handle, Outgoing::AtWorker(transfer))?;
            Ok(Response::CopyToHostBufferResponse(
                CopyToHostBufferResponse {},
            ))
        })))
    }
}

/// Where a Read's bytes are when it has been answered.
pub(crate) async fn transferred(
    answer: Answer,
    release: ReleaseAtEnd,
    room: Option<FetchRoom>,
) -> Result<Transfer, Status> {
    let reply::Reply::ReadDone(done) = answer.wait().await? else {
        return Err(unexpected("Read"));
    };
    // Where the file does not open, the worker's data service gives the bytes as well.
    let segment = done.segment.as_ref();
    let bytes = match done.piece_bytes {
        0 => done.size_bytes,
        piece => piece.min(done.size_bytes),
    };
    let file = segment.and_then(|segment| release.link.local()?.open(segment, bytes));
    let (link, transfer) = release.keep();
    Ok(Transfer {
        link,
        transfer,
        size_bytes: done.size_bytes,
        inline: done.inline_data,
        file,
        piece_bytes: done.piece_bytes,
        _room: room,
    })
}

pub(super) fn target(shard: &Shard, device: &Device, memory_kind: Option<&str>) -> Target {
    Target {
        shard: shard.id,
        device: device.ordinal,
        memory_kind: memory_kind.unwrap_or_default().to_owned(),
    }
}

/// Has the worker forget a transfer's bytes when dropped.
pub(crate) struct ReleaseAtEnd {
    link: Arc<Link>,
    transfer: u64,
    handed_on: bool,
}

impl ReleaseAtEnd {
    pub(crate) fn new(link: Arc<Link>, transfer: u64) -> Self {
        Self {
            link,
            transfer,
            handed_on: false,
        }
    }

    /// Hands the duty on.
    fn keep(mut self) -> (Arc<Link>, u64) {
        self.handed_on = true;
        (Arc::clone(&self.link), self.transfer)
    }
}

impl Drop for ReleaseAtEnd {
    fn drop(&mut self) {
        if !self.handed_on {
            self.link.release(self.transfer);
        }
    }
}
