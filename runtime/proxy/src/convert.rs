//! IFRT's messages to and from what the proxy works with: element types, shapes, shardings.

use std::borrow::Cow;

use prost::Message as _;
use waystation_checkpoint::sharding::IndexDomain;
use waystation_proto::xla::{
    OpSharding, PrimitiveType,
    ifrt::{
        ConcreteEvenShardingProto, ConcreteShardingProto, DTypeProto, DeviceListProto,
        HloShardingProto, OpaqueShardingProto, Serialized, ShapeProto, ShardingProto,
        SingleDeviceShardingProto, d_type_proto::Kind,
    },
    op_sharding,
};

use crate::status::{self, Status};

/// Sizes above this are refused before anything is allocated: no host holds such an array.
const MAX_ELEMENTS: i64 = 1 << 48;
/// Dimensions above this are refused: several times NumPy's limit, which is JAX's.
const MAX_RANK: usize = 256;
/// Devices a sharding may name.
const MAX_DEVICES: usize = 1 << 16;

/// The names under which jaxlib registers its sharding messages.
const HLO_SHARDING: &str = "xla::ifrt::HloSharding";
const SINGLE_DEVICE_SHARDING: &str = "xla::ifrt::SingleDeviceSharding";
const CONCRETE_EVEN_SHARDING: &str = "xla::ifrt::ConcreteEvenSharding";
const CONCRETE_SHARDING: &str = "xla::ifrt::ConcreteSharding";
const OPAQUE_SHARDING: &str = "xla::ifrt::OpaqueSharding";

/// Element types whose numbers differ between IFRT's `DTypeProto.Kind` and XLA's `PrimitiveType`; all others agree.
const DIFFERENT: &[(Kind, PrimitiveType)] = &[
    (Kind::S1, PrimitiveType::S1),
    (Kind::U1, PrimitiveType::U1),
    (Kind::F4e2m1fn, PrimitiveType::F4e2m1fn),
    (Kind::F8e8m0fnu, PrimitiveType::F8e8m0fnu),
    (Kind::F6e2m3fn, PrimitiveType::F6e2m3fn),
    (Kind::F6e3m2fn, PrimitiveType::F6e3m2fn),
];

/// What an array's elements are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dtype {
    /// XLA's types, which plugins know.
    Numbers(PrimitiveType),
    /// Byte strings of any length, which only the proxy knows.
    Strings,
}

impl From<PrimitiveType> for Dtype {
    fn from(primitive: PrimitiveType) -> Self {
        Self::Numbers(primitive)
    }
}

/// The element type of an array that may hold strings.
///
/// # Errors
/// INVALID_ARGUMENT where it is missing or unknown.
pub(crate) fn element_type(dtype: Option<&DTypeProto>) -> Result<Dtype, Status> {
    match dtype {
        Some(d) if d.kind == Kind::String as i32 => Ok(Dtype::Strings),
        other => primitive_type(other).map(Dtype::Numbers),
    }
}

/// XLA's element type for an IFRT one.
///
/// # Errors
/// INVALID_ARGUMENT where it is missing or unknown, UNIMPLEMENTED for types that are not arrays of numbers (strings).
pub(crate) fn primitive_type(dtype: Option<&DTypeProto>) -> Result<PrimitiveType, Status> {
    let number = dtype.map_or(0, |d| d.kind);
    let kind = Kind::try_from(number)
        .map_err(|_| status::invalid_argument(format!("unknown dtype kind {number}")))?;
    if let Some((_, xla)) = DIFFERENT.iter().find(|(ifrt, _)| *ifrt == kind) {
        return Ok(*xla);
    }
    match kind {
        Kind::Unspecified => Err(status::invalid_argument("the array has no dtype")),
        Kind::String => Err(status::unimplemented(
            "strings are not served here, only numbers",
        )),
        _ => PrimitiveType::try_from(number)
            .map_err(|_| status::invalid_argument(format!("unknown dtype kind {number}"))),
    }
}

/// IFRT's element type for an XLA one.
pub(crate) fn dtype(primitive: PrimitiveType) -> DTypeProto {
    let kind = DIFFERENT
        .iter()
        .find(|(_, xla)| *xla == primitive)
        .map_or(primitive as i32, |(ifrt, _)| *ifrt as i32);
    DTypeProto {
        version_number: 0,
        kind,
    }
}

/// Checked dimensions: none negative, and a number of elements that a host can hold.
///
/// # Errors
/// INVALID_ARGUMENT.
pub(crate) fn dims(shape: Option<&ShapeProto>) -> Result<Vec<i64>, Status> {
    let dims = shape.map(|s| s.dims.clone()).unwrap_or_default();
    check_dims(&dims)?;
    Ok(dims)
}

/// See [`dims`].
pub(crate) fn check_dims(dims: &[i64]) -> Result<(), Status> {
    if dims.len() > MAX_RANK {
        return Err(status::invalid_argument(format!(
            "a shape of {} dimensions, at most {MAX_RANK} are taken",
            dims.len()
        )));
    }
    let mut elements: i64 = 1;
    for &dim in dims {
        if dim < 0 {
            return Err(status::invalid_argument(format!(
                "shape {dims:?} has a negative dimension"
            )));
        }
        // A zero makes the product zero whatever else stands there, so each factor counts at least 1 here.
        elements = elements
            .checked_mul(dim.max(1))
            .filter(|&n| n <= MAX_ELEMENTS)
            .ok_or_else(|| {
                status::invalid_argument(format!("shape {dims:?} has too many elements"))
            })?;
    }
    Ok(())
}

/// Where an array's pieces are: a device for each piece, in order, and how the pieces tile the whole.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Sharding {
    /// Global device ids; a position here is a shard's position.
    pub(crate) devices: Vec<i32>,
    /// `None`: each device's default memory.
    pub(crate) memory_kind: Option<String>,
    /// How the pieces tile the array.
    pub(crate) tiling: Tiling,
}

/// How an array is cut.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Tiling {
    /// XLA's own sharding; positions are places in the device list.
    Op(Box<OpSharding>),
    /// Every piece has this shape; replicated or not as told.
    Even {
        shard_dims: Vec<i64>,
        replicated: bool,
    },
    /// A shape a piece, or nothing known (`None`).
    Opaque(Option<Vec<Vec<i64>>>),
}

impl Sharding {
    /// One device that holds everything.
    pub(crate) fn single(device: i32, memory_kind: Option<String>) -> Self {
        Self {
            devices: vec![device],
            memory_kind,
            tiling: Tiling::Op(Box::default()),
        }
    }

    /// The same cut, elsewhere.
    pub(crate) fn moved(&self, devices: Vec<i32>, memory_kind: Option<String>) -> Self {
        Self {
            devices,
            memory_kind,
            tiling: self.tiling.clone(),
        }
    }

    /// The shape of each position's piece.
    ///
    /// # Errors
    /// INVALID_ARGUMENT where the sharding does not fit the shape.
    pub(crate) fn shard_dims(&self, dims: &[i64]) -> Result<Vec<Vec<i64>>, Status> {
        match &self.tiling {
            _ if self.devices.len() == 1 => Ok(vec![dims.to_vec()]),
            Tiling::Even { shard_dims, .. } => Ok(vec![shard_dims.clone(); self.devices.len()]),
            Tiling::Opaque(Some(shapes)) => Ok(shapes.clone()),
            Tiling::Opaque(None) => Err(status::invalid_argument(
                "the sharding does not say what shape its shards have",
            )),
            // Each device holds a part of a sum over its piece, and has that piece's shape.
            Tiling::Op(op) => Ok(self
                .tiles(&reduced(op), dims)?
                .into_iter()
                .map(|domain| domain.shape)
                .collect()),
        }
    }

    /// Which elements of an array each position holds.
    ///
    /// # Errors
    /// INVALID_ARGUMENT where the sharding does not fit the shape, UNIMPLEMENTED where it does not say.
    pub(crate) fn domains(&self, dims: &[i64]) -> Result<Vec<IndexDomain>, Status> {
        match &self.tiling {
            Tiling::Op(op) if !self.is_unreduced() => self.tiles(op, dims),
            _ if !self.is_unreduced() && self.is_fully_replicated(dims) => {
                Ok(vec![IndexDomain::whole(dims); self.devices.len()])
            }
            _ => Err(status::unimplemented(
                "the sharding does not say which elements lie where",
            )),
        }
    }

    fn tiles(&self, op: &OpSharding, dims: &[i64]) -> Result<Vec<IndexDomain>, Status> {
        let bad = |e: waystation_checkpoint::Error| {
            status::invalid_argument(format!("the sharding does not fit shape {dims:?}: {e}"))
        };
        waystation_checkpoint::sharding::Sharding::new(op, self.devices.len())
            .and_then(|sharding| sharding.domains(dims))
            .map_err(bad)
    }

    /// True where every piece is the whole array.
    pub(crate) fn is_fully_replicated(&self, dims: &[i64]) -> bool {
        !self.is_unreduced()
            && self
                .shard_dims(dims)
                .is_ok_and(|shards| shards.iter().all(|shard| shard == dims))
    }

    fn is_unreduced(&self) -> bool {
        matches!(&self.tiling, Tiling::Op(op) if is_unreduced(op))
    }

    /// As a reply carries it.
    pub(crate) fn to_proto(&self) -> ShardingProto {
        let device_list = Some(DeviceListProto {
            version_number: 0,
            device_ids: self.devices.clone(),
        });
        let (type_name, data) = match &self.tiling {
            Tiling::Op(op) => (
                HLO_SHARDING,
                HloShardingProto {
                    version_number: 0,
                    devices: device_list,
                    memory_kind: self.memory_kind.clone(),
                    xla_op_sharding: Some((**op).clone()),
                }
                .encode_to_vec(),
            ),
            Tiling::Even {
                shard_dims,
                replicated,
            } => (
                CONCRETE_EVEN_SHARDING,
                ConcreteEvenShardingProto {
                    devices: device_list,
                    memory_kind: self.memory_kind.clone(),
                    shard_shape: Some(ShapeProto {
                        version_number: 0,
                        dims: shard_dims.clone(),
                    }),
                    is_fully_replicated: *replicated,
                    ..Default::default()
                }
                .encode_to_vec(),
            ),
            Tiling::Opaque(_) => (
                OPAQUE_SHARDING,
                OpaqueShardingProto {
                    version_number: 0,
                    devices: device_list,
                    memory_kind: self.memory_kind.clone(),
                }
                .encode_to_vec(),
            ),
        };
        ShardingProto {
            serialized_sharding: Some(Serialized {
                type_name: type_name.to_owned(),
                data: data.into(),
            }),
        }
    }
}

/// Whether devices hold parts of a sum, of the whole array or of its pieces.
fn is_unreduced(op: &OpSharding) -> bool {
    let unreduced = op_sharding::Type::Unreduced;
    op.r#type() == unreduced || op.last_tile_dims.contains(&unreduced.into())
}

/// The sharding with sums in the place of their parts: the devices of one sum have copies.
fn reduced(op: &OpSharding) -> Cow<'_, OpSharding> {
    if !is_unreduced(op) {
        return Cow::Borrowed(op);
    }
    let (unreduced, replicated) = (op_sharding::Type::Unreduced, op_sharding::Type::Replicated);
    if op.r#type() == unreduced {
        return Cow::Owned(OpSharding::default());
    }
    let mut op = op.clone();
    for kind in &mut op.last_tile_dims {
        if *kind == i32::from(unreduced) {
            *kind = replicated.into();
        }
    }
    Cow::Owned(op)
}

/// Reads a client's sharding.
///
/// # Errors
/// INVALID_ARGUMENT for a missing or malformed one, UNIMPLEMENTED for a kind that is not known.
pub(crate) fn sharding(sharding: Option<&ShardingProto>) -> Result<Sharding, Status> {
    let serialized = sharding
        .and_then(|s| s.serialized_sharding.as_ref())
        .ok_or_else(|| status::invalid_argument("the array has no sharding"))?;
    let bad = |e: prost::DecodeError| {
        status::invalid_argument(format!(
            "malformed sharding of type {}: {e}",
            serialized.type_name
        ))
    };
    let data = serialized.data.clone();
    let sharding = match serialized.type_name.as_str() {
        HLO_SHARDING => {
            let proto = HloShardingProto::decode(data).map_err(bad)?;
            Sharding {
                devices: proto.devices.unwrap_or_default().device_ids,
                memory_kind: proto.memory_kind,
                tiling: Tiling::Op(Box::new(proto.xla_op_sharding.unwrap_or_default())),
            }
        }
        SINGLE_DEVICE_SHARDING => {
            let proto = SingleDeviceShardingProto::decode(data).map_err(bad)?;
            Sharding::single(proto.device_id, proto.memory_kind)
        }
        CONCRETE_EVEN_SHARDING => {
            let proto = ConcreteEvenShardingProto::decode(data).map_err(bad)?;
            let shard_dims = dims(proto.shard_shape.as_ref())?;
            Sharding {
                devices: proto.devices.unwrap_or_default().device_ids,
                memory_kind: proto.memory_kind,
                tiling: Tiling::Even {
                    shard_dims,
                    replicated: proto.is_fully_replicated,
                },
            }
        }
        CONCRETE_SHARDING => {
            let proto = ConcreteShardingProto::decode(data).map_err(bad)?;
            let shapes = proto
                .shard_shapes
                .iter()
                .map(|s| dims(Some(s)))
                .collect::<Result<Vec<_>, _>>()?;
            let devices = proto.devices.unwrap_or_default().device_ids;
            if shapes.len() != devices.len() {
                return Err(status::invalid_argument(format!(
                    "the sharding names {} devices and {} shard shapes",
                    devices.len(),
                    shapes.len()
                )));
            }
            Sharding {
                devices,
                memory_kind: proto.memory_kind,
                tiling: Tiling::Opaque(Some(shapes)),
            }
        }
        OPAQUE_SHARDING => {
            let proto = OpaqueShardingProto::decode(data).map_err(bad)?;
            Sharding {
                devices: proto.devices.unwrap_or_default().device_ids,
                memory_kind: proto.memory_kind,
                tiling: Tiling::Opaque(None),
            }
        }
        other => {
            return Err(status::unimplemented(format!(
                "shardings of type '{other}' are not served"
            )));
        }
    };
    if sharding.devices.is_empty() || sharding.devices.len() > MAX_DEVICES {
        return Err(status::invalid_argument(format!(
            "a sharding over {} devices",
            sharding.devices.len()
        )));
    }
    if let Some(twice) = named_twice(&sharding.devices) {
        return Err(status::invalid_argument(format!(
            "a sharding that names device {twice} twice"
        )));
    }
    Ok(sharding)
}

/// A device that a list has more than once.
fn named_twice(devices: &[i32]) -> Option<i32> {
    let mut sorted = devices.to_vec();
    sorted.sort_unstable();
    sorted
        .windows(2)
        .find(|pair| pair[0] == pair[1])
        .map(|pair| pair[0])
}

#[cfg(test)]
mod tests;
