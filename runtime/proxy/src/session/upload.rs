//! Host bytes on their way to the workers.

mod local;

use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock},
};

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use waystation_proto::{
    waystation::worker::{DataFrame, DataHeader, Put, Strides, Target, op},
    xla::LayoutProto,
};

use super::{Session, UserContext};
use crate::{
    array::Shard,
    convert::Dtype,
    host_buffers::Incoming,
    link::Link,
    local::LOCAL_FROM_BYTES,
    needs::Needs,
    status::{self, Status},
};

/// Buffers up to this size, in bytes, ride in the op itself when they are here already.
const INLINE_BYTES: u64 = 64 << 10;
/// Frames under way to a worker beyond what HTTP/2 holds.
const FRAMES: usize = 4;

/// Where one copy of the bytes goes.
pub(super) struct Destination {
    /// Index in the array's sharding.
    pub(super) position: usize,
    /// Global device id.
    pub(super) device: i32,
}

/// What the bytes are.
pub(super) struct Contents {
    pub(super) dtype: Dtype,
    /// Of one shard.
    pub(super) dims: Vec<i64>,
    pub(super) byte_strides: Option<Vec<i64>>,
    pub(super) layout: Option<LayoutProto>,
    pub(super) memory_kind: String,
    pub(super) user_context: UserContext,
}

impl Session {
    /// Makes a shard of the buffer's bytes on each destination, one transfer a worker.
    pub(super) async fn upload(
        &mut self,
        buffer: Arc<Incoming>,
        contents: Contents,
        destinations: &[Destination],
    ) -> Result<Vec<(usize, Arc<Shard>)>, Status> {
        let Dtype::Numbers(dtype) = contents.dtype else {
            return self.keep_strings(buffer, &contents, destinations);
        };
        let cluster = Arc::clone(self.cluster()?);
        let mut by_link: BTreeMap<usize, (Vec<Target>, Needs)> = BTreeMap::new();
        let mut shards = Vec::with_capacity(destinations.len());
        for destination in destinations {
            let device = cluster.device(destination.device).ok_or_else(|| {
                status::invalid_argument(format!("unknown device {}", destination.device))
            })?;
            let link = Arc::clone(cluster.link(device));
            let put = by_link.entry(device.link);
            let (targets, needs) =
                put.or_insert_with(|| (Vec::new(), self.needs_of(&buffer, &link)));
            let shard = Shard::new(
                self.shared.ids.next(),
                device.id,
                link,
                &contents.user_context,
            )
            .needing(needs);
            targets.push(Target {
                shard: shard.id,
                device: device.ordinal,
                memory_kind: contents.memory_kind.clone(),
            });
            shards.push((destination.position, Arc::new(shard)));
        }
        let inline = buffer.small(INLINE_BYTES);
        buffer.will_be_read(by_link.len());
        for (index, (targets, _)) in by_link {
            let link = Arc::clone(&cluster.links[index]);
            let transfer = self.shared.ids.next();
            link.send(op::Op::Put(Put {
                transfer,
                dtype: dtype as i32,
                dims: contents.dims.clone(),
                byte_strides: contents
                    .byte_strides
                    .clone()
                    .map(|strides| Strides { strides }),
                targets,
                inline_data: inline.clone(),
                user_context: contents.user_context.id(),
                layout: contents.layout.clone(),
            }))
            .await;
            if inline.is_none() {
                let put = PendingPut {
                    link,
                    transfer,
                    done: false,
                    why: None,
                };
                self.tasks.spawn(put.run(Arc::clone(&buffer)));
            }
        }
        Ok(shards)
    }
}

impl Session {
    /// What waits for the bytes of a buffer at a worker, until the client has sent them: how they get there is no matter of the
    /// client's.
    fn needs_of(&mut self, buffer: &Arc<Incoming>, link: &Link) -> Needs {
        if buffer.has_ended() {
            return Needs::default();
        }
        let (needs, unmet) = Needs::one();
        let (buffer, gone) = (Arc::clone(buffer), link.gone());
        self.tasks.spawn(async move {
            tokio::select! {
                () = buffer.ended() => {}
                () = gone => {}
            }
            drop(unmet);
        });
        needs
    }
}

/// A put whose bytes are still to be sent. Dropped before its end (the session ended), it tells the worker so.
struct PendingPut {
    link: Arc<Link>,
    transfer: u64,
    done: bool,
    /// Why the bytes do not come.
    why: Option<Status>,
}

impl PendingPut {
    async fn run(mut self, buffer: Arc<Incoming>) {
        match self.stream(&buffer).await {
            Ok(()) => self.done = true,
            // The drop that follows fails the shards at the worker; who asks for the array hears it there.
            Err(status) => {
                tracing::warn!(worker = %self.link.name, error = %status.message, "a host buffer did not reach its worker");
                self.why = Some(status);
            }
        }
    }

    async fn stream(&self, buffer: &Incoming) -> Result<(), Status> {
        let size_bytes = buffer.size().await?;
        let header = DataHeader {
            epoch: self.link.epoch,
            transfer: self.transfer,
            size_bytes,
            secret: self.link.secret(),
            ..DataHeader::default()
        };
        if size_bytes >= LOCAL_FROM_BYTES
            && let Some(local) = self.link.local()
            && self.hand_over(buffer, header.clone(), &local).await?
        {
            return Ok(());
        }
        let header = DataFrame {
            header: Some(header),
            ..Default::default()
        };
        let (frames, queue) = mpsc::channel(FRAMES);
        let mut data = self.link.data();
        let call = async {
            data.put_data(ReceiverStream::new(queue))
                .await
                .map(|_| ())
                .map_err(|e| status::from_worker(&self.link.name, &e))
        };
        let broken = OnceLock::new();
        let feed = async {
            let frames = frames;
            let mut next = Some(header);
            let mut index = 0;
            while let Some(frame) = next {
                // The call has ended early; its own error says why.
                if frames.send(frame).await.is_err() {
                    return Ok(());
                }
                let data = match buffer.chunk(index).await {
                    Ok(data) => data,
                    Err(status) => {
                        // To the worker a stream that just ended would be one that lied about its size.
                        let give_up = DataFrame {
                            given_up: true,
                            ..Default::default()
                        };
                        let _ = broken.set(status);
                        let _ = frames.send(give_up).await;
                        // The call ends by itself then. Giving it up here would reset its stream, and hyper shows the worker
                        // a stream reset with CANCEL as one that just ended.
                        return Ok(());
                    }
                };
                next = data.map(|data| DataFrame {
                    data,
                    ..Default::default()
                });
                buffer.is_read(index);
                index += 1;
            }
            Ok(())
        };
        let ended = tokio::try_join!(call, feed).map(|_| ());
        // What the buffer says is the cause of what the worker says.
        broken.into_inner().map_or(ended, Err)
    }
}

impl Drop for PendingPut {
    fn drop(&mut self) {
        if !self.done {
            let why = self.why.take().unwrap_or_else(|| {
                status::failed_precondition("the client went away before the array's bytes came")
            });
            self.link.cancel_put(self.transfer, why);
        }
    }
}
