//! Host bytes into the memory of a worker on this machine, as they come from the client.

use std::{fs::File, os::unix::fs::FileExt as _};

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use waystation_proto::waystation::worker::{DataHeader, LocalPut, LocalPutReply, local_put::Step};

use super::PendingPut;
use crate::{
    host_buffers::Incoming,
    local::LocalMemory,
    status::{self, Status},
};

impl PendingPut {
    /// Hands the bytes over in the worker's memory. False: it has none to be had, and they must be sent.
    pub(super) async fn hand_over(
        &self,
        buffer: &Incoming,
        header: DataHeader,
        local: &LocalMemory,
    ) -> Result<bool, Status> {
        let from_worker = |e: &tonic::Status| status::from_worker(&self.link.name, e);
        let size = header.size_bytes;
        let (steps, queue) = mpsc::channel(2);
        // The header and one more: neither waits.
        let step = |step| {
            let _ = steps.try_send(LocalPut { step: Some(step) });
        };
        step(Step::Header(header));
        let mut data = self.link.data();
        let mut replies = data
            .put_local(ReceiverStream::new(queue))
            .await
            .map_err(|e| from_worker(&e))?
            .into_inner();
        let reply = replies.message().await.map_err(|e| from_worker(&e))?;
        let Some(segment) = reply.and_then(|reply| reply.segment) else {
            return Ok(false);
        };
        let written = match local.open(&segment, size) {
            Some(file) => self.write(buffer, size, &file, &mut replies).await,
            None => {
                step(Step::GivenUp(true));
                // Sent by the other way before the worker has heard of it, the bytes would be there twice.
                ended(&mut replies).await.map_err(|e| from_worker(&e))?;
                return Ok(false);
            }
        };
        step(match written {
            Ok(()) => Step::Written(true),
            Err(_) => Step::GivenUp(true),
        });
        drop(steps);
        let taken = ended(&mut replies).await.map_err(|e| from_worker(&e));
        written.and(taken).map(|()| true)
    }

    async fn write(
        &self,
        buffer: &Incoming,
        size: u64,
        file: &File,
        replies: &mut Streaming<LocalPutReply>,
    ) -> Result<(), Status> {
        let mut offset = 0;
        for index in 0.. {
            let chunk = tokio::select! {
                chunk = buffer.chunk(index) => chunk?,
                // Before its time: the worker is gone or has refused the transfer.
                end = ended(replies) => {
                    end.map_err(|e| status::from_worker(&self.link.name, &e))?;
                    return Err(status::worker_lost(&self.link.name, "it broke a put off"));
                }
            };
            let Some(chunk) = chunk else { break };
            // Memory, as a copy is: nothing to wait for.
            file.write_all_at(&chunk, offset).map_err(|error| {
                status::resource_exhausted(format!(
                    "no memory for a host buffer of {size} bytes: {error}"
                ))
            })?;
            offset += chunk.len() as u64;
            drop(chunk);
            buffer.is_read(index);
            // Chunks may all be here already.
            tokio::task::yield_now().await;
        }
        if offset == size {
            return Ok(());
        }
        Err(status::invalid_argument(format!(
            "a host buffer of {size} bytes has only {offset}"
        )))
    }
}

/// Waits for the end of the worker's replies.
async fn ended(replies: &mut Streaming<LocalPutReply>) -> Result<(), tonic::Status> {
    while replies.message().await?.is_some() {}
    Ok(())
}
