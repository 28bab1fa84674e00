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
