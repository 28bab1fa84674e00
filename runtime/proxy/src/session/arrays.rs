//! Requests that make arrays of host bytes or of other arrays, and that end them.

use std::sync::Arc;

use prost::Message as _;
use waystation_proto::xla::ifrt::proxy::{
    AssembleArrayFromSingleDeviceArraysRequest, AssembleArrayFromSingleDeviceArraysResponse,
    DeleteArrayRequest, DeleteArrayResponse, DestructArrayRequest, DestructArrayResponse,
    DisassembleIntoSingleDeviceArraysRequest, DisassembleIntoSingleDeviceArraysResponse,
    FullyReplicatedShardRequest, FullyReplicatedShardResponse, IsArrayDeletedRequest,
    IsArrayDeletedResponse, MakeArrayFromHostBufferRequest, MakeArrayFromHostBufferResponse,
    MakeArraysFromHostBufferShardsRequest, MakeArraysFromHostBufferShardsResponse,
    MakeErrorArraysRequest, MakeErrorArraysResponse, ifrt_response::Response,
    make_arrays_from_host_buffer_shards_request::MakeArraysFromHostBufferShardsSpec,
};

use super::{
    Future, Handled, Outcome, Session, UserContext,
    upload::{Contents, Destination},
};
use crate::{
    array::{Array, Failure, Shard},
    convert::{self, Sharding},
    layout,
    status::{self, Status},
};

/// The largest error that a client may make arrays of, in bytes: every reply about such an array repeats it.
const MAX_ERROR_BYTES: usize = 1 << 20;

impl Session {
    /// One buffer that is the whole array, on one device or on many.
    pub(super) async fn make_array(
        &mut self,
        user_context: &UserContext,
        request: MakeArrayFromHostBufferRequest,
    ) -> Handled {
        let buffer = self.host_buffers.consume(request.host_buffer_handle)?;
        let dtype = convert::element_type(request.dtype.as_ref())?;
        let dims = convert::dims(request.shape.as_ref())?;
        let sharding = convert::sharding(request.sharding.as_ref())?;
        if !sharding.is_fully_replicated(&dims) {
            return Err(status::invalid_argument(
                "MakeArrayFromHostBuffer takes one buffer for the whole array, but the sharding cuts it",
            ));
        }
        let contents = Contents {
            dtype,
            dims: dims.clone(),
            byte_strides: request.byte_strides.map(|s| s.strides),
            layout: layout::of_message(request.layout.and_then(|l| l.serialized_layout).as_ref())?,
            memory_kind: sharding.memory_kind.clone().unwrap_or_default(),
            user_context: user_context.clone(),
        };
        let destinations: Vec<_> = sharding
            .devices
            .iter()
            .enumerate()
            .map(|(position, &device)| Destination { position, device })
            .collect();
        let shards = self.upload(buffer, contents, &destinations).await?;
        let shards = shards.into_iter().map(|(_, shard)| shard).collect();
        let array = Array::new(dtype, dims, sharding, shards);
        let array_handle = self.insert(request.array_handle, Ok(array))?;
        Ok(Outcome::Now(Response::MakeArrayFromHostBufferResponse(
            MakeArrayFromHostBufferResponse { array_handle },
        )))
    }

    /// Arrays of which each piece has a buffer; one buffer may serve several pieces.
    pub(super) async fn make_arrays(
        &mut self,
        user_context: &UserContext,
        request: MakeArraysFromHostBufferShardsRequest,
    ) -> Handled {
        let handles = result_handles(
            &request.array_handles,
            request.specs.len(),
            "MakeArraysFromHostBufferShards",
        )?;
        let mut array_handles = Vec::with_capacity(handles.len());
        for (spec, handle) in request.specs.into_iter().zip(handles) {
            let array = self.make_array_of_shards(user_context, spec).await?;
            array_handles.push(self.insert(handle, Ok(array))?);
        }
        Ok(Outcome::Now(
            Response::MakeArraysFromHostBufferShardsResponse(
                MakeArraysFromHostBufferShardsResponse { array_handles },
            ),
        ))
    }

    async fn make_array_of_shards(
        &mut self,
        user_context: &UserContext,
        spec: MakeArraysFromHostBufferShardsSpec,
    ) -> Result<Array, Status> {
        let array_spec = spec.array_spec.unwrap_or_default();
        let dtype = convert::element_type(array_spec.dtype.as_ref())?;
        let dims = convert::dims(array_spec.shape.as_ref())?;
        let sharding = convert::sharding(array_spec.sharding.as_ref())?;
        let shard_dims = sharding.shard_dims(&dims)?;
        let layout = layout::of_text(array_spec.layout.as_deref())?;
        if spec.addressable_shard_indices.len() != spec.host_buffers.len() {
            return Err(status::invalid_argument(format!(
                "{} host buffers come with {} lists of shard indices",
                spec.host_buffers.len(),
                spec.addressable_shard_indices.len()
            )));
        }
        let mut shards: Vec<Option<Arc<Shard>>> = vec![None; sharding.devices.len()];
        for (buffer, indices) in spec
            .host_buffers
            .into_iter()
            .zip(spec.addressable_shard_indices)
        {
            let incoming = self.host_buffers.consume(buffer.host_buffer_handle)?;
            let buffer_dims = convert::dims(buffer.shape.as_ref())?;
            let mut destinations = Vec::with_capacity(indices.indices.len());
            for index in indices.indices {
                let place = usize::try_from(index)
                    .ok()
                    .and_then(|i| Some((i, *sharding.devices.get(i)?)));
                let Some((position, device)) = place else {
                    return Err(status::invalid_argument(format!(
                        "shard index {index} of a sharding over {} devices",
                        sharding.devices.len()
                    )));
                };
                if shard_dims[position] != buffer_dims {
                    return Err(status::invalid_argument(format!(
                        "shard {position} has shape {:?}, its host buffer {buffer_dims:?}",
                        shard_dims[position]
                    )));
                }
                destinations.push(Destination { position, device });
            }
            let contents = Contents {
                dtype,
                dims: buffer_dims,
                byte_strides: buffer.byte_strides.map(|s| s.strides),
                layout: layout.clone(),
                memory_kind: sharding.memory_kind.clone().unwrap_or_default(),
                user_context: user_context.clone(),
            };
            for (position, shard) in self.upload(incoming, contents, &destinations).await? {
                if shards[position].replace(shard).is_some() {
                    return Err(status::invalid_argument(format!(
                        "shard {position} is given twice"
                    )));
                }
            }
        }
        let shards = shards
            .into_iter()
            .enumerate()
            .map(|(i, shard)| {
                shard.ok_or_else(|| {
                    status::invalid_argument(format!("shard {i} has no host buffer"))
                })
            })
            .collect::<Result<_, _>>()?;
        Ok(Array::new(dtype, dims, sharding, shards))
    }

    /// Arrays that are an error from the start.
    pub(super) fn make_error_arrays(
        &mut self,
        context: &UserContext,
        request: MakeErrorArraysRequest,
    ) -> Handled {
        let handles = result_handles(
            &request.array_handles,
            request.array_specs.len(),
            "MakeErrorArrays",
        )?;
        let error = request.error.unwrap_or_default();
        if error.code == 0 {
            return Err(status::invalid_argument("MakeErrorArrays needs an error"));
        }
        if error.encoded_len() > MAX_ERROR_BYTES {
            return Err(status::invalid_argument(format!(
                "MakeErrorArrays with an error of {} bytes, at most {MAX_ERROR_BYTES} are taken",
                error.encoded_len()
            )));
        }
        let error = Arc::new(error);
        let array_handles = handles
            .into_iter()
            .map(|handle| {
                let failure = Failure {
                    status: Arc::clone(&error),
                    context: context.clone(),
                };
                self.insert(handle, Err(failure))
            })
            .collect::<Result<_, _>>()?;
        Ok(Outcome::Now(Response::MakeErrorArraysResponse(
            MakeErrorArraysResponse { array_handles },
        )))
    }

    pub(super) fn assemble(
        &mut self,
        context: &UserContext,
        request: &AssembleArrayFromSingleDeviceArraysRequest,
    ) -> Handled {
        let dims = convert::dims(request.shape.as_ref())?;
        let sharding = convert::sharding(request.sharding.as_ref())?;
        let handles = &request.single_device_array_handles;
        if handles.len() != sharding.devices.len() {
            return Err(status::invalid_argument(format!(
                "{} arrays are assembled under a sharding over {} devices",
                handles.len(),
                sharding.devices.len()
            )));
        }
        let mut shards = Vec::with_capacity(handles.len());
        let mut dtype = request
            .dtype
            .as_ref()
            .map(|d| convert::element_type(Some(d)))
            .transpose()?;
        for (&handle, &device) in handles.iter().zip(&sharding.devices) {
            let array = self.array(context, handle)?;
            let [shard] = array.shards.as_slice() else {
                return Err(status::invalid_argument(format!(
                    "array {handle} is not on a single device"
                )));
            };
            if shard.device != device {
                return Err(status::invalid_argument(format!(
                    "array {handle} is on device {}, the sharding wants device {device} in its place",
                    shard.device
                )));
            }
            if *dtype.get_or_insert(array.dtype) != array.dtype {
                return Err(status::invalid_argument(format!(
                    "array {handle} has another dtype than the result"
                )));
            }
            shards.push(Arc::clone(shard));
        }
        let dtype = dtype.ok_or_else(|| {
            status::invalid_argument("an array assembled of nothing needs a dtype")
        })?;
        let array = Array::new(dtype, dims, sharding, shards);
        let array_handle = self.insert(Some(request.result_handle), Ok(array))?;
        Ok(Outcome::Now(
            Response::AssembleArrayFromSingleDeviceArraysResponse(
                AssembleArrayFromSingleDeviceArraysResponse { array_handle },
            ),
        ))
    }

    pub(super) fn disassemble(
        &mut self,
        context: &UserContext,
        request: &DisassembleIntoSingleDeviceArraysRequest,
    ) -> Handled {
        let array = self.array(context, request.array_handle)?.clone();
        let shard_dims = array.sharding.shard_dims(&array.dims)?;
        let handles = result_handles(
            &request.result_handles,
            array.shards.len(),
            "DisassembleIntoSingleDeviceArrays",
        )?;
        let mut array_handles = Vec::with_capacity(handles.len());
        for ((shard, dims), handle) in array.shards.into_iter().zip(shard_dims).zip(handles) {
            let sharding = Sharding::single(shard.device, array.sharding.memory_kind.clone());
            array_handles.push(self.insert(
                handle,
                Ok(Array::new(array.dtype, dims, sharding, vec![shard])),
            )?);
        }
        Ok(Outcome::Now(
            Response::DisassembleIntoSingleDeviceArraysResponse(
                DisassembleIntoSingleDeviceArraysResponse { array_handles },
            ),
        ))
    }

    pub(super) fn fully_replicated_shard(
        &mut self,
        context: &UserContext,
        request: &FullyReplicatedShardRequest,
    ) -> Handled {
        let array = self.array(context, request.array_handle)?;
        let Some(shard) = array
            .shards
            .first()
            .filter(|_| array.sharding.is_fully_replicated(&array.dims))
        else {
            return Err(status::invalid_argument(format!(
                "array {} is not fully replicated",
                request.array_handle
            )));
        };
        let sharding = Sharding::single(shard.device, array.sharding.memory_kind.clone());
        let one = Array::new(
            array.dtype,
            array.dims.clone(),
            sharding,
            vec![Arc::clone(shard)],
        );
        let array_handle = self.insert(Some(request.result_handle), Ok(one))?;
        Ok(Outcome::Now(Response::FullyReplicatedShardResponse(
            FullyReplicatedShardResponse { array_handle },
        )))
    }

    /// `x.delete()`. The handles stay known until they are destructed.
    pub(super) fn delete_arrays(&mut self, request: &DeleteArrayRequest) -> Handled {
        for &handle in &request.array_handle {
            match self.values.get_mut(&handle) {
                None => {
                    return Err(status::invalid_argument(format!(
                        "unknown array handle {handle}"
                    )));
                }
                Some(Ok(array)) => array.delete(),
                Some(Err(_)) => {}
            }
        }
        let deletion_future_handle = self.future(Future::Deletion);
        Ok(Outcome::Unnumbered(Response::DeleteArrayResponse(
            DeleteArrayResponse {
                deletion_future_handle,
            },
        )))
    }

    /// The client's objects are gone.
    pub(super) fn destruct_arrays(&mut self, request: &DestructArrayRequest) -> Handled {
        let mut unknown = None;
        for handle in &request.array_handle {
            if self.values.remove(handle).is_none() {
                unknown.get_or_insert(*handle);
            }
        }
        match unknown {
            Some(handle) => Err(status::invalid_argument(format!(
                "unknown array handle {handle}"
            ))),
            None => Ok(Outcome::Unnumbered(Response::DestructArrayResponse(
                DestructArrayResponse {},
            ))),
        }
    }

    pub(super) fn is_array_deleted(&self, request: &IsArrayDeletedRequest) -> Handled {
        let deleted = match self.values.get(&request.array_handle) {
            None => {
                return Err(status::invalid_argument(format!(
                    "unknown array handle {}",
                    request.array_handle
                )));
            }
            Some(Ok(array)) => array.deleted,
            Some(Err(_)) => false,
        };
        Ok(Outcome::Now(Response::IsArrayDeletedResponse(
            IsArrayDeletedResponse { deleted },
        )))
    }
}

/// A handle for each result: the client's, or none where it leaves them to the server.
pub(super) fn result_handles(
    given: &[u64],
    wanted: usize,
    request: &str,
) -> Result<Vec<Option<u64>>, Status> {
    if given.is_empty() {
        return Ok(vec![None; wanted]);
    }
    if given.len() != wanted {
        return Err(status::invalid_argument(format!(
            "{request} has {wanted} results and {} handles for them",
            given.len()
        )));
    }
    Ok(given.iter().copied().map(Some).collect())
}
