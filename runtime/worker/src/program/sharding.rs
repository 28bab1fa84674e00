//! The shardings of a compiled module, in the one form that everybody reads.

mod named;

use waystation_proto::xla::{OpSharding, op_sharding::Type};

/// Pieces of each dimension of an array of that rank: all 1 for shardings that do not cut. For shardings by [`flatten`].
///
/// `None` when the sharding does not fit the rank or has a count that is no positive number.
pub(super) fn tiles(sharding: &OpSharding, rank: usize) -> Option<Vec<i64>> {
    if sharding.r#type() != Type::Other {
        return Some(vec![1; rank]);
    }
    // Behind the array's dimensions stand those over which the pieces are repeated.
    let pieces = sharding.tile_assignment_dimensions.get(..rank)?;
    pieces
        .iter()
        .all(|pieces| *pieces > 0)
        .then(|| pieces.to_vec())
}

/// The shardings of an XLA program's parameters or results, tuples taken apart, all in tile form.
///
/// `None` when one of them cannot be understood.
pub(super) fn flatten(shardings: &[OpSharding]) -> Option<Vec<OpSharding>> {
    let mut flat = Vec::new();
    let mut pending: Vec<&OpSharding> = shardings.iter().rev().collect();
    while let Some(sharding) = pending.pop() {
        match (&sharding.named_sharding, sharding.r#type()) {
            (Some(named), _) => flat.push(named::tiled(named)?),
            (None, Type::Tuple) => pending.extend(sharding.tuple_shardings.iter().rev()),
            (None, _) => flat.push(sharding.clone()),
        }
    }
    Some(flat)
}

/// The sharding of a value of `replicas` replicas with `partitions` devices each, over all their devices, replica by replica: each
/// replica has all pieces. `None` when it cannot be understood.
pub(super) fn over_replicas(
    mut sharding: OpSharding,
    replicas: u32,
    partitions: u32,
) -> Option<OpSharding> {
    if replicas <= 1 || sharding.r#type() != Type::Other {
        return Some(sharding);
    }
    let (replicas, partitions) = (i64::from(replicas), i64::from(partitions));
    let dims = &mut sharding.tile_assignment_dimensions;
    if sharding.replicate_on_last_tile_dim {
        let last = dims.last_mut()?;
        *last = last.checked_mul(replicas)?;
    } else {
        dims.push(replicas);
        if sharding.last_tile_dims.is_empty() {
            sharding.replicate_on_last_tile_dim = true;
        } else {
            sharding.last_tile_dims.push(Type::Replicated.into());
        }
    }
    if sharding.iota_reshape_dims.is_empty() {
        let devices = sharding.tile_assignment_devices.iter();
        let number = |device: &i64, replica| device.checked_add(partitions.checked_mul(replica)?);
        sharding.tile_assignment_devices = devices
            .flat_map(|device| (0..replicas).map(move |replica| number(device, replica)))
            .collect::<Option<_>>()?;
        return Some(sharding);
    }
    // Of the numbers in order, those of a replica follow each other; in the assignment, the replicas of a piece do.
    let count = i32::try_from(sharding.iota_reshape_dims.len()).ok()?;
    if sharding.iota_transpose_perm.is_empty() {
        sharding.iota_transpose_perm = (0..count).collect();
    }
    sharding.iota_reshape_dims.insert(0, replicas);
    for place in &mut sharding.iota_transpose_perm {
        *place = place.checked_add(1)?;
    }
    sharding.iota_transpose_perm.push(0);
    Some(sharding)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn other(tiles: &[i64]) -> OpSharding {
        OpSharding {
            r#type: Type::Other.into(),
            tile_assignment_dimensions: tiles.to_vec(),
            ..Default::default()
        }
    }

    #[test]
    fn a_tile_assignment_cuts_its_first_dimensions() {
        assert_eq!(
            tiles(&other(&[2, 1, 4]), 2),
            Some(vec![2, 1]),
            "the last dimension repeats the pieces"
        );
        assert_eq!(tiles(&other(&[2, 2]), 2), Some(vec![2, 2]));
        assert_eq!(tiles(&other(&[2]), 2), None, "too few dimensions");
        assert_eq!(tiles(&other(&[0, 1]), 2), None);
        assert_eq!(tiles(&OpSharding::default(), 3), Some(vec![1; 3]));
    }

    /// Two replicas of four partitions: the devices of the second are 4 to 7.
    #[test]
    fn each_replica_has_all_pieces() {
        let whole = OpSharding::default();
        assert_eq!(over_replicas(whole.clone(), 2, 4), Some(whole));
        assert_eq!(over_replicas(other(&[4]), 1, 4), Some(other(&[4])));
        let listed = OpSharding {
            tile_assignment_devices: vec![3, 1, 2, 0],
            ..other(&[2, 2])
        };
        let found = over_replicas(listed, 2, 4).expect("readable");
        assert_eq!(found.tile_assignment_dimensions, [2, 2, 2]);
        assert_eq!(found.tile_assignment_devices, [3, 7, 1, 5, 2, 6, 0, 4]);
        assert!(found.replicate_on_last_tile_dim);
        assert_eq!(tiles(&found, 2), Some(vec![2, 2]));
        // Two pieces, each on two devices of its replica: 0 and 2, 1 and 3.
        let numbered = OpSharding {
            replicate_on_last_tile_dim: true,
            iota_reshape_dims: vec![2, 2],
            iota_transpose_perm: vec![1, 0],
            ..other(&[2, 2])
        };
        let found = over_replicas(numbered, 2, 4).expect("readable");
        // As [replica][a][b] transposed to [b][a][replica]: 0 4 2 6, 1 5 3 7.
        assert_eq!(found.tile_assignment_dimensions, [2, 4]);
        assert_eq!(found.iota_reshape_dims, [2, 2, 2]);
        assert_eq!(found.iota_transpose_perm, [2, 1, 0]);
        let plain = OpSharding {
            iota_reshape_dims: vec![4],
            ..other(&[4])
        };
        let found = over_replicas(plain, 2, 4).expect("readable");
        assert_eq!(found.iota_transpose_perm, [1, 0]);
        let huge = OpSharding {
            replicate_on_last_tile_dim: true,
            ..other(&[i64::MAX])
        };
        assert_eq!(over_replicas(huge, 2, 4), None);
    }

    #[test]
    fn tuples_are_taken_apart_in_order() {
        let tuple = |parts| OpSharding {
            r#type: Type::Tuple.into(),
            tuple_shardings: parts,
            ..Default::default()
        };
        let nested = tuple(vec![
            other(&[1]),
            tuple(vec![other(&[2]), other(&[3])]),
            other(&[4]),
        ]);
        let flat = flatten(&[nested]).expect("readable");
        let tiles: Vec<_> = flat
            .iter()
            .map(|part| part.tile_assignment_dimensions[0])
            .collect();
        assert_eq!(tiles, [1, 2, 3, 4]);
    }
}
