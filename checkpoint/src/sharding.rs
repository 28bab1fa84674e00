//! Which piece of a global array lies at which position of a device list.
//!
//! Reads XLA's `OpSharding` as the IFRT client sends it (in an `HloShardingProto`) and as the persistence requests carry
//! it (serialized and in base64). The facts, as XLA and IFRT have them:
//!
//! - A tiled (`OTHER`) sharding cuts dimension `d` into `tiles[d]` tiles of `ceil(dim / tiles)` elements. Where that does not
//!   divide evenly, the last tiles are clipped at the edge of the array and may be empty.
//! - The tile assignment says which tile lies at which *position* of the device list.
//! - With `replicate_on_last_tile_dim` the last dimension of the assignment counts copies; `last_tile_dims` names such
//!   trailing dimensions one by one, of which only `REPLICATED` ones can be laid out.
//! - `REPLICATED` is 0, so an empty message is a replicated sharding.
//! - `MAXIMAL` puts the array on one device; IFRT gives every position the whole shape.

mod domain;
mod tile_assignment;

#[cfg(test)]
mod tests;

use waystation_proto::xla::{OpSharding, op_sharding::Type};

pub use self::domain::IndexDomain;
pub(crate) use self::domain::num_elements;
use crate::{Error, Result};

/// The most devices a sharding may be over. A bound for hostile requests, far above any machine.
pub const MAX_DEVICES: usize = 1 << 20;
/// The most dimensions of an array or a tile assignment: NumPy's limit, hence JAX's.
pub const MAX_RANK: usize = 64;

/// A sharding over a list of devices, checked and ready to be laid over arrays.
///
/// Two shardings are equal when they place every array they both can be laid over in the same way, whatever their spelling.
#[derive(Debug, Clone)]
pub struct Sharding {
    num_devices: usize,
    placement: Placement,
}

#[derive(Debug, Clone)]
enum Placement {
    /// The whole array everywhere.
    Replicated,
    /// The whole array, meant for one position alone.
    Maximal(usize),
    /// Tiles; for each position the row-major number of its tile.
    Tiled {
        tiles: Vec<i64>,
        tile_of: Vec<usize>,
    },
}

impl Sharding {
    /// The replicated sharding over `num_devices` devices.
    ///
    /// # Errors
    /// No device, or more than [`MAX_DEVICES`].
    pub fn replicated(num_devices: usize) -> Result<Self> {
        check_num_devices(num_devices)?;
        Ok(Self {
            num_devices,
            placement: Placement::Replicated,
        })
    }

    /// Reads an `OpSharding` over a list of `num_devices` devices.
    ///
    /// # Errors
    /// [`Error::UnsupportedSharding`] for a kind that places no array (tuple, manual, unreduced, unknown, or one spelled as a
    /// named sharding); [`Error::MalformedSharding`] for contradictions: a tile product other than `num_devices`, a device
    /// named twice, a permutation that is none.
    pub fn new(proto: &OpSharding, num_devices: usize) -> Result<Self> {
        check_num_devices(num_devices)?;
        if proto.named_sharding.is_some() {
            return unsupported("NAMED");
        }
        let placement = match Type::try_from(proto.r#type) {
            Ok(Type::Replicated) => Placement::Replicated,
            Ok(Type::Maximal) => Placement::Maximal(maximal_position(proto, num_devices)?),
            Ok(Type::Other) => tiled(proto, num_devices)?,
            Ok(Type::Tuple) => return unsupported("TUPLE"),
            Ok(Type::Manual) => return unsupported("MANUAL"),
            Ok(Type::Unknown) => return unsupported("UNKNOWN"),
            Ok(Type::Unreduced) => return unsupported("UNREDUCED"),
            Err(_) => {
                return Err(Error::MalformedSharding(format!(
                    "unknown kind {}",
                    proto.r#type
                )));
            }
        };
        Ok(Self {
            num_devices,
            placement,
        })
    }

    /// The number of positions of the device list.
    #[must_use]
    pub fn num_devices(&self) -> usize {
        self.num_devices
    }

    /// How many tiles each dimension is cut into; `None` when the array is whole at every position, whatever its rank.
    #[must_use]
    pub fn tiles(&self) -> Option<&[i64]> {
        match &self.placement {
            Placement::Tiled { tiles, .. } => Some(tiles),
            Placement::Replicated | Placement::Maximal(_) => None,
        }
    }

    /// The shape of a tile that is not clipped: `ceil(dim / tiles)` in every dimension.
    ///
    /// # Errors
    /// A rank other than the sharding's, a negative dimension, or more elements than can be counted.
    pub fn shard_dims(&self, dims: &[i64]) -> Result<Vec<i64>> {
        check_dims(dims)?;
        let Placement::Tiled { tiles, .. } = &self.placement else {
            return Ok(dims.to_vec());
        };
        if tiles.len() != dims.len() {
            return Err(Error::MalformedSharding(format!(
                "it tiles {} dimensions, the array has {} (shape {dims:?})",
                tiles.len(),
                dims.len()
            )));
        }
        Ok(dims
            .iter()
            .zip(tiles)
            .map(|(&dim, &tiles)| ceil_div(dim, tiles))
            .collect())
    }

    /// For every position the domain of an array of dimensions `dims` that lies there, clipped at the array's edge.
    ///
    /// # Errors
    /// As [`Sharding::shard_dims`].
    pub fn domains(&self, dims: &[i64]) -> Result<Vec<IndexDomain>> {
        let shard_dims = self.shard_dims(dims)?;
        let Placement::Tiled { tiles, tile_of } = &self.placement else {
            return Ok(vec![IndexDomain::whole(dims); self.num_devices]);
        };
        Ok(tile_of
            .iter()
            .map(|&tile| tile_domain(tile, tiles, &shard_dims, dims))
            .collect())
    }

    /// Whether every position holds the whole array.
    #[must_use]
    pub fn is_fully_replicated(&self) -> bool {
        match &self.placement {
            Placement::Replicated => true,
            Placement::Maximal(_) => self.num_devices == 1,
            Placement::Tiled { tiles, .. } => tiles.iter().all(|&tiles| tiles == 1),
        }
    }

    /// The first position that holds the same piece as `position`; `None` when there is no such position. Of a maximal sharding
    /// it is always the one position the array is meant for.
    #[must_use]
    pub fn first_holder(&self, position: usize) -> Option<usize> {
        if position >= self.num_devices {
            return None;
        }
        match &self.placement {
            Placement::Replicated => Some(0),
            Placement::Maximal(holder) => Some(*holder),
            Placement::Tiled { tile_of, .. } => {
                let tile = tile_of[position];
                tile_of.iter().position(|&other| other == tile)
            }
        }
    }

    /// For every position the number of the piece that lies there; equal numbers, equal pieces.
    #[must_use]
    pub fn pieces(&self) -> Vec<usize> {
        match &self.placement {
            Placement::Replicated | Placement::Maximal(_) => vec![0; self.num_devices],
            Placement::Tiled { tile_of, .. } => tile_of.clone(),
        }
    }

    /// One position for each distinct piece, the first that holds it, in rising order: together they hold the array once.
    #[must_use]
    pub fn first_holders(&self) -> Vec<usize> {
        match &self.placement {
            Placement::Replicated => vec![0],
            Placement::Maximal(holder) => vec![*holder],
            Placement::Tiled { tile_of, .. } => {
                // Tile numbers are below the number of devices: the tile product divides it.
                let mut taken = vec![false; self.num_devices];
                (0..self.num_devices)
                    .filter(|&position| !std::mem::replace(&mut taken[tile_of[position]], true))
                    .collect()
            }
        }
    }
}

impl PartialEq for Sharding {
    fn eq(&self, other: &Self) -> bool {
        if self.num_devices != other.num_devices {
            return false;
        }
        if self.is_fully_replicated() && other.is_fully_replicated() {
            return true;
        }
        match (&self.placement, &other.placement) {
            (Placement::Maximal(a), Placement::Maximal(b)) => a == b,
            (
                Placement::Tiled {
                    tiles: a,
                    tile_of: a_of,
                },
                Placement::Tiled {
                    tiles: b,
                    tile_of: b_of,
                },
            ) => a == b && a_of == b_of,
            _ => false,
        }
    }
}

impl Eq for Sharding {}

fn maximal_position(proto: &OpSharding, num_devices: usize) -> Result<usize> {
    match proto.tile_assignment_devices.as_slice() {
        [] if num_devices == 1 => Ok(0),
        [device] => usize::try_from(*device)
            .ok()
            .filter(|&position| position < num_devices)
            .ok_or_else(|| {
                Error::MalformedSharding(format!(
                    "maximal on position {device} of {num_devices} devices"
                ))
            }),
        devices => Err(Error::MalformedSharding(format!(
            "maximal on {} devices",
            devices.len()
        ))),
    }
}

fn tiled(proto: &OpSharding, num_devices: usize) -> Result<Placement> {
    let positions = tile_assignment::positions(proto, num_devices)?;
    let trailing = trailing_dims(proto)?;
    let Some(rank) = proto.tile_assignment_dimensions.len().checked_sub(trailing) else {
        return Err(Error::MalformedSharding(
            "fewer tile dimensions than trailing ones".to_owned(),
        ));
    };
    let (tiles, copies) = proto.tile_assignment_dimensions.split_at(rank);
    // The product of all is num_devices, checked above; each part of it fits too.
    let copies: usize = copies
        .iter()
        .map(|&extent| usize::try_from(extent).unwrap_or(1))
        .product();
    let mut tile_of = vec![0; num_devices];
    for (index, position) in positions.into_iter().enumerate() {
        tile_of[position] = index / copies.max(1);
    }
    Ok(Placement::Tiled {
        tiles: tiles.to_vec(),
        tile_of,
    })
}

/// How many trailing dimensions of the tile assignment count copies.
fn trailing_dims(proto: &OpSharding) -> Result<usize> {
    if proto.last_tile_dims.is_empty() {
        return Ok(usize::from(proto.replicate_on_last_tile_dim));
    }
    if proto.replicate_on_last_tile_dim {
        return Err(Error::MalformedSharding(
            "both replicate_on_last_tile_dim and last_tile_dims are set".to_owned(),
        ));
    }
    for &kind in &proto.last_tile_dims {
        match Type::try_from(kind) {
            Ok(Type::Replicated) => {}
            Ok(Type::Manual) => return unsupported("tiled with MANUAL subgroups"),
            Ok(Type::Unreduced) => return unsupported("tiled with UNREDUCED subgroups"),
            _ => {
                return Err(Error::MalformedSharding(format!(
                    "a subgroup of kind {kind}"
                )));
            }
        }
    }
    Ok(proto.last_tile_dims.len())
}

fn tile_domain(tile: usize, tiles: &[i64], shard_dims: &[i64], dims: &[i64]) -> IndexDomain {
    let mut domain = IndexDomain {
        origin: vec![0; dims.len()],
        shape: vec![0; dims.len()],
    };
    // A tile's number is below MAX_DEVICES.
    let mut rest = i64::try_from(tile).unwrap_or(i64::MAX);
    for d in (0..dims.len()).rev() {
        let index = rest % tiles[d];
        rest /= tiles[d];
        let start = index.saturating_mul(shard_dims[d]).min(dims[d]);
        domain.origin[d] = start;
        domain.shape[d] = shard_dims[d].min(dims[d] - start);
    }
    domain
}

fn ceil_div(dim: i64, tiles: i64) -> i64 {
    dim / tiles + i64::from(dim % tiles != 0)
}

fn check_num_devices(num_devices: usize) -> Result<()> {
    if num_devices == 0 || num_devices > MAX_DEVICES {
        return Err(Error::MalformedSharding(format!(
            "over {num_devices} devices, 1 to {MAX_DEVICES} are taken"
        )));
    }
    Ok(())
}

fn check_dims(dims: &[i64]) -> Result<()> {
    if dims.len() > MAX_RANK {
        return Err(Error::MalformedSharding(format!(
            "an array of rank {}, at most {MAX_RANK} is taken",
            dims.len()
        )));
    }
    if num_elements(dims).is_none_or(|elements| i64::try_from(elements).is_err()) {
        return Err(Error::MalformedSharding(format!(
            "an impossible array shape {dims:?}"
        )));
    }
    Ok(())
}

fn unsupported<T>(kind: &'static str) -> Result<T> {
    Err(Error::UnsupportedSharding { kind })
}
