//! What is different for arrays of strings: they are received, copied and fetched here, without a worker.

use std::sync::Arc;

use waystation_proto::xla::ifrt::proxy::{CopyToHostBufferResponse, ifrt_response::Response};

use super::{
    Outcome, Session, UserContext,
    upload::{Contents, Destination},
};
use crate::{
    array::{Array, Shard},
    host_buffers::{Incoming, Outgoing},
    status::{self, Status},
    strings::Coming,
};

impl Session {
    /// Shards of a host buffer's strings; all destinations share them.
    pub(super) fn keep_strings(
        &mut self,
        buffer: Arc<Incoming>,
        contents: &Contents,
        destinations: &[Destination],
    ) -> Result<Vec<(usize, Arc<Shard>)>, Status> {
        if contents
            .byte_strides
            .as_ref()
            .is_some_and(|strides| !strides.is_empty())
        {
            return Err(status::invalid_argument(
                "a host buffer of strings has no byte strides",
            ));
        }
        // Dimensions were checked when they were read: none is negative, and their product is bounded.
        let count: i64 = contents.dims.iter().product();
        let coming = Coming::of_buffer(
            buffer,
            self.host_buffers.memory(),
            count.unsigned_abs(),
            contents.user_context.id(),
        );
        let shards = destinations
            .iter()
            .map(|to| {
                let shard = self.string_shard(to.device, &contents.user_context, coming.clone())?;
                Ok((to.position, shard))
            })
            .collect::<Result<_, Status>>()?;
        // So that the buffer is let go as soon as it is complete, not when somebody asks.
        self.tasks.spawn(async move {
            let _ = coming.wait().await;
        });
        Ok(shards)
    }

    /// The same strings on other devices.
    pub(super) fn copy_strings(
        &self,
        context: &UserContext,
        array: &Array,
        devices: Vec<i32>,
        memory_kind: Option<String>,
    ) -> Result<Array, Status> {
        let shards = array
            .shards
            .iter()
            .zip(&devices)
            .map(|(shard, &device)| self.string_shard(device, context, shard.strings()?.clone()))
            .collect::<Result<_, _>>()?;
        let sharding = array.sharding.moved(devices, memory_kind);
        Ok(Array::new(
            array.dtype,
            array.dims.clone(),
            sharding,
            shards,
        ))
    }

    /// Offers a shard's strings under a host buffer's handle once they are there.
    pub(super) fn fetch_strings(&self, strings: Coming, handle: u64) -> Outcome {
        let buffers = Arc::clone(&self.host_buffers);
        Outcome::Later(Box::pin(async move {
            buffers.offer(handle, Outgoing::Here(strings.wait().await?))?;
            Ok(Response::CopyToHostBufferResponse(
                CopyToHostBufferResponse {},
            ))
        }))
    }

    pub(super) fn string_shard(
        &self,
        device: i32,
        context: &UserContext,
        strings: Coming,
    ) -> Result<Arc<Shard>, Status> {
        let cluster = self.cluster()?;
        let device = cluster
            .device(device)
            .ok_or_else(|| status::invalid_argument(format!("unknown device {device}")))?;
        let link = Arc::clone(cluster.link(device));
        Ok(Arc::new(Shard::of_strings(
            device.id, link, context, strings,
        )))
    }
}
