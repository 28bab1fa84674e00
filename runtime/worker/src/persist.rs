//! Which pieces of checkpoint arrays this worker writes and reads. Plans only; the session moves the bytes.

use std::collections::HashMap;

use waystation_checkpoint::{Cut, IndexDomain, RestoreArray, SaveArray, Sharding};
use waystation_pjrt::ElementType;
use waystation_proto::{
    tensorflow::StatusProto,
    waystation::worker::{ArrayFile, save_arrays::Share},
    xla::OpSharding,
};

use crate::{dtype::Dtype, status};

/// What a worker writes of one array.
#[derive(Debug)]
pub(crate) struct Pieces {
    pub(crate) array: SaveArray,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) writes_metadata: bool,
}

/// One shard to write, or a share of it.
#[derive(Debug)]
pub(crate) struct Piece {
    /// Index among the item's shards.
    pub(crate) shard: usize,
    /// The global id of the shard's device.
    pub(crate) device: i32,
    /// Host bytes of all of the shard.
    pub(crate) bytes: usize,
    /// What is written of it.
    pub(crate) cuts: Vec<Cut>,
}

impl Pieces {
    /// `shards`: element type and dimensions of the local shards, which lie at `positions` of the sharding's device list.
    pub(crate) fn plan(
        file: Option<ArrayFile>,
        positions: &[u32],
        shares: &[Share],
        shards: &[(ElementType, &[i64])],
        writes_metadata: bool,
    ) -> Result<Pieces, StatusProto> {
        let (file, sharding, domains) = lay(file)?;
        if positions.len() != shards.len() || shares.len() != shards.len() {
            return Err(status::invalid(format!(
                "'{}': {} positions and {} shares for {} shards",
                file.name,
                positions.len(),
                shares.len(),
                shards.len()
            )));
        }
        let dtype = match (file.dtype, shards.first()) {
            (0, Some((element, _))) => Dtype::of_element(*element)?,
            (number, _) => Dtype::of_number(number)?,
        };
        let array = SaveArray::sharded(
            &file.location,
            &file.name,
            dtype.primitive,
            &file.dims,
            &sharding,
        )
        .map_err(|error| of_checkpoint(&error))?;
        let mut pieces = Vec::new();
        for (shard, (&position, &(element, dims))) in positions.iter().zip(shards).enumerate() {
            let (position, domain) = at(&file, &domains, position)?;
            if element != dtype.element || dims != domain.shape {
                return Err(status::invalid(format!(
                    "'{}': the shard at position {position} is {element:?} {dims:?}; {} {:?} is needed",
                    file.name,
                    dtype.primitive.as_str_name(),
                    domain.shape
                )));
            }
            let Share { part, parts } = shares[shard];
            if parts == 0 {
                continue;
            }
            let too_large = || status::invalid(format!("'{}': too large a shard", file.name));
            let bytes = domain
                .num_elements()
                .and_then(|elements| elements.checked_mul(dtype.host_bytes))
                .ok_or_else(too_large)?;
            let cuts = array.cut(domain).ok_or_else(too_large)?.into_iter();
            let cuts = cuts.zip(0u32..);
            let cuts: Vec<Cut> = cuts
                .filter(|(_, number)| number % parts == part)
                .map(|(cut, _)| cut)
                .collect();
            // Its range is taken from a copy of the shard.
            if cuts.iter().any(|cut| cut.bytes.end > bytes) {
                return Err(too_large());
            }
            if !cuts.is_empty() {
                pieces.push(Piece {
                    shard,
                    device: file.device_ids.get(position).copied().unwrap_or(-1),
                    bytes,
                    cuts,
                });
            }
        }
        Ok(Pieces {
            array,
            pieces,
            writes_metadata,
        })
    }
}

/// What a worker reads of one array.
#[derive(Debug)]
pub(crate) struct Boxes {
    pub(crate) array: RestoreArray,
    pub(crate) dtype: Dtype,
    /// Distinct ones.
    pub(crate) domains: Vec<IndexDomain>,
    /// For each target the index of its domain.
    pub(crate) of_target: Vec<usize>,
    /// Host bytes of all domains.
    pub(crate) bytes: usize,
}

impl Boxes {
    /// `positions`: where the targets lie in the sharding's device list.
    pub(crate) fn plan(file: Option<ArrayFile>, positions: &[u32]) -> Result<Boxes, StatusProto> {
        let (file, _, all) = lay(file)?;
        let dtype = Dtype::of_number(file.dtype)?;
        let mut domains: Vec<IndexDomain> = Vec::new();
        let mut index_of: HashMap<&IndexDomain, usize> = HashMap::new();
        let mut of_target = Vec::with_capacity(positions.len());
        let mut bytes = 0usize;
        for &position in positions {
            let (_, domain) = at(&file, &all, position)?;
            let index = *index_of.entry(domain).or_insert(domains.len());
            if index == domains.len() {
                domains.push(domain.clone());
                bytes = domain
                    .num_elements()
                    .and_then(|elements| elements.checked_mul(dtype.host_bytes))
                    .and_then(|size| bytes.checked_add(size))
                    .ok_or_else(|| status::invalid(format!("'{}': too large", file.name)))?;
            }
            of_target.push(index);
        }
        let array = RestoreArray {
            location: file.location,
            name: file.name,
            dtype: dtype.primitive,
            dims: file.dims,
        };
        Ok(Boxes {
            array,
            dtype,
            domains,
            of_target,
            bytes,
        })
    }
}

/// The pieces of the array at all positions.
fn lay(file: Option<ArrayFile>) -> Result<(ArrayFile, Sharding, Vec<IndexDomain>), StatusProto> {
    let Some(file) = file else {
        return Err(status::invalid("an item without its array"));
    };
    let replicated = OpSharding::default();
    let proto = file.sharding.as_ref().unwrap_or(&replicated);
    let sharding =
        Sharding::new(proto, file.device_ids.len()).map_err(|error| of_checkpoint(&error))?;
    let domains = sharding
        .domains(&file.dims)
        .map_err(|error| of_checkpoint(&error))?;
    Ok((file, sharding, domains))
}

fn at<'a>(
    file: &ArrayFile,
    domains: &'a [IndexDomain],
    position: u32,
) -> Result<(usize, &'a IndexDomain), StatusProto> {
    usize::try_from(position)
        .ok()
        .and_then(|position| Some((position, domains.get(position)?)))
        .ok_or_else(|| {
            status::invalid(format!(
                "'{}' has no position {position}, only {}",
                file.name,
                domains.len()
            ))
        })
}

/// The checkpoint engine's error under its own code.
pub(crate) fn of_checkpoint(error: &waystation_checkpoint::Error) -> StatusProto {
    status::of(error.code(), error.report())
}

#[cfg(test)]
mod tests {
    use waystation_proto::xla::PrimitiveType;

    use super::*;

    /// Eight elements over two tiles, each on two devices: positions 0 and 1 hold the first half, 2 and 3 the second.
    fn file() -> Option<ArrayFile> {
        Some(ArrayFile {
            location: "/tmp/x".to_owned(),
            name: "w".to_owned(),
            dims: vec![8],
            sharding: Some(OpSharding {
                r#type: waystation_proto::xla::op_sharding::Type::Other as i32,
                tile_assignment_dimensions: vec![2, 2],
                iota_reshape_dims: vec![4],
                iota_transpose_perm: vec![0],
                replicate_on_last_tile_dim: true,
                ..OpSharding::default()
            }),
            device_ids: vec![0, 1, 2, 3],
            dtype: 0,
        })
    }

    const HALF: (ElementType, &[i64]) = (ElementType::F32, &[4]);

    const ALL: Share = Share { part: 0, parts: 1 };
    const NONE: Share = Share { part: 0, parts: 0 };

    #[test]
    fn of_a_shard_its_share_is_written() {
        let (positions, shards) = ([0, 1, 2], [HALF; 3]);
        let plan = Pieces::plan(file(), &positions, &[ALL, NONE, ALL], &shards, true).unwrap();
        let pieces: Vec<(usize, i32, i64, usize)> = plan
            .pieces
            .iter()
            .map(|piece| {
                let origin = piece.cuts[0].domain.origin[0];
                (piece.shard, piece.device, origin, piece.bytes)
            })
            .collect();
        assert_eq!(pieces, [(0, 0, 0, 16), (2, 2, 4, 16)]);
        assert_eq!(plan.array.dtype, PrimitiveType::F32);
        // It has one chunk alone.
        let second = Share { part: 1, parts: 2 };
        let plan = Pieces::plan(file(), &[1, 3], &[NONE, second], &[HALF; 2], false).unwrap();
        assert!(plan.pieces.is_empty() && !plan.writes_metadata);
    }

    #[test]
    fn a_restore_reads_each_box_once() {
        let file = file().map(|file| ArrayFile {
            dtype: PrimitiveType::F32 as i32,
            ..file
        });
        let boxes = Boxes::plan(file, &[3, 0, 2]).unwrap();
        assert_eq!(boxes.of_target, [0, 1, 0]);
        assert_eq!(boxes.domains[0].origin, [4]);
        assert_eq!(boxes.bytes, 32);
    }

    #[test]
    fn pieces_that_do_not_fit_are_refused() {
        assert!(Pieces::plan(None, &[], &[], &[], false).is_err());
        assert!(Pieces::plan(file(), &[0, 1], &[ALL; 2], &[HALF], false).is_err());
        assert!(Pieces::plan(file(), &[0], &[], &[HALF], false).is_err());
        assert!(Pieces::plan(file(), &[4], &[ALL], &[HALF], false).is_err());
        let three = [(ElementType::F32, &[3][..])];
        assert!(Pieces::plan(file(), &[0], &[ALL], &three, false).is_err());
        let mixed = [HALF, (ElementType::S32, &[4][..])];
        assert!(Pieces::plan(file(), &[0, 2], &[ALL; 2], &mixed, false).is_err());
        assert!(Boxes::plan(file(), &[0]).is_err(), "a restore needs a type");
    }
}
