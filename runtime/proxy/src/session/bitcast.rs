//! BitcastArrays: the bytes of each shard under another type and shape.

use std::sync::Arc;

use waystation_proto::{
    waystation::worker::{Bitcast, op},
    xla::{
        PrimitiveType,
        ifrt::{
            proto::ArrayCopySemantics,
            proxy::{BitcastArraysRequest, BitcastArraysResponse, ifrt_response::Response},
        },
    },
};

use super::{Handled, Outcome, Session, UserContext, arrays::result_handles, copies::target};
use crate::{
    array::{Array, Shard},
    convert, status,
};

impl Session {
    pub(super) async fn bitcast_arrays(
        &mut self,
        context: &UserContext,
        request: BitcastArraysRequest,
    ) -> Handled {
        let given = &request.array_handles;
        let handles = result_handles(&request.result_handles, given.len(), "BitcastArrays")?;
        if request.array_specs.len() != given.len() {
            return Err(status::invalid_argument(format!(
                "BitcastArrays of {} arrays comes with {} specifications",
                given.len(),
                request.array_specs.len()
            )));
        }
        let mut made = Vec::with_capacity(given.len());
        for (&handle, spec) in given.iter().zip(&request.array_specs) {
            let array = self.array(context, handle)?.clone();
            let from = array.numbers("the argument of BitcastArrays")?;
            let dtype = convert::primitive_type(spec.dtype.as_ref())?;
            let dims = convert::dims(spec.shape.as_ref())?;
            let sharding = convert::sharding(spec.sharding.as_ref())?;
            if sharding.devices != array.sharding.devices
                || sharding.memory_kind != array.sharding.memory_kind
            {
                return Err(status::invalid_argument(format!(
                    "BitcastArrays keeps an array where it is; array {handle} is asked for elsewhere"
                )));
            }
            let old_dims = array.sharding.shard_dims(&array.dims)?;
            let new_dims = sharding.shard_dims(&dims)?;
            for (old, new) in old_dims.iter().zip(&new_dims) {
                if bits(from, old) != bits(dtype, new) {
                    return Err(status::invalid_argument(format!(
                        "a shard of {} {old:?} cannot be seen as {} {new:?}: its size is another",
                        from.as_str_name(),
                        dtype.as_str_name()
                    )));
                }
            }
            let cluster = Arc::clone(self.cluster()?);
            let mut shards = Vec::with_capacity(array.shards.len());
            for (source, dims) in array.shards.iter().zip(new_dims) {
                let device = cluster.device(source.device).ok_or_else(|| {
                    status::invalid_argument(format!("unknown device {}", source.device))
                })?;
                let link = Arc::clone(&source.link);
                let shard = Shard::new(self.shared.ids.next(), device.id, link, context)
                    .needing(&source.needs);
                let bitcast = Bitcast {
                    source: source.id,
                    target: Some(target(&shard, device, sharding.memory_kind.as_deref())),
                    dtype: dtype as i32,
                    dims,
                    user_context: context.id(),
                };
                source.link.send(op::Op::Bitcast(bitcast)).await;
                shards.push(Arc::new(shard));
            }
            made.push(Array::new(dtype, dims, sharding, shards));
        }
        self.settle_now_and_then(context, &made).await;
        let donates = request.copy_semantics() == ArrayCopySemantics::DonateInput;
        let mut array_handles = Vec::with_capacity(handles.len());
        for (array, handle) in made.into_iter().zip(handles) {
            array_handles.push(self.insert(handle, Ok(array))?);
        }
        if donates {
            self.donate(given);
        }
        Ok(Outcome::Now(Response::BitcastArraysResponse(
            BitcastArraysResponse { array_handles },
        )))
    }
}

/// Bits of a dense array; dimensions are checked to have a product that fits.
fn bits(dtype: PrimitiveType, dims: &[i64]) -> Option<i64> {
    dims.iter()
        .try_fold(element_bits(dtype)?, |bits, dim| bits.checked_mul(*dim))
}

/// Bytes of a dense array in host memory, where an element takes whole bytes; dimensions as in [`bits`].
pub(super) fn host_bytes(dtype: PrimitiveType, dims: &[i64]) -> u64 {
    let element = element_bits(dtype).map_or(1, |bits| bits.max(8) / 8);
    let bytes = dims
        .iter()
        .try_fold(element, |bytes, dim| bytes.checked_mul(*dim));
    bytes
        .and_then(|bytes| u64::try_from(bytes).ok())
        .unwrap_or(u64::MAX)
}

/// Bits of an element; `None` for types that have no elements.
fn element_bits(dtype: PrimitiveType) -> Option<i64> {
    use PrimitiveType as P;
    Some(match dtype {
        P::S1 | P::U1 => 1,
        P::S2 | P::U2 => 2,
        P::S4 | P::U4 | P::F4e2m1fn => 4,
        P::F6e2m3fn | P::F6e3m2fn => 6,
        P::Pred
        | P::S8
        | P::U8
        | P::F8e5m2
        | P::F8e4m3
        | P::F8e4m3fn
        | P::F8e4m3b11fnuz
        | P::F8e3m4
        | P::F8e5m2fnuz
        | P::F8e4m3fnuz
        | P::F8e8m0fnu => 8,
        P::S16 | P::U16 | P::F16 | P::Bf16 => 16,
        P::S32 | P::U32 | P::F32 => 32,
        P::S64 | P::U64 | P::F64 | P::C64 => 64,
        P::C128 => 128,
        _ => return None,
    })
}
