//! How many pieces an XLA sharding cuts each dimension into.

use waystation_proto::xla::{OpSharding, op_sharding::Type};

/// Pieces of each dimension of an array of that rank: all 1 for shardings that do not cut.
///
/// `None` when the sharding does not fit the rank or has a count that is no positive number.
pub(super) fn tiles(sharding: &OpSharding, rank: usize) -> Option<Vec<i64>> {
    let pieces = match &sharding.named_sharding {
        Some(named) => {
            let axes = named
                .mesh
                .as_ref()
                .map(|mesh| mesh.axes.as_slice())
                .unwrap_or_default();
            let cut =
                |dimension: &waystation_proto::xla::named_sharding_proto::DimensionSharding| {
                    dimension.axes.iter().try_fold(1_i64, |pieces, axis| {
                        let size = match &axis.sub_axis_info {
                            Some(part) => part.size,
                            None => axes.get(usize::try_from(axis.mesh_axis_index).ok()?)?.size,
                        };
                        pieces.checked_mul(size)
                    })
                };
            named
                .dim_shardings
                .iter()
                .map(cut)
                .collect::<Option<Vec<_>>>()?
        }
        None if sharding.r#type() == Type::Other => {
            // Behind the array's dimensions stand those over which the pieces are repeated.
            sharding.tile_assignment_dimensions.get(..rank)?.to_vec()
        }
        None => Vec::new(),
    };
    if pieces.is_empty() {
        return Some(vec![1; rank]);
    }
    (pieces.len() == rank && pieces.iter().all(|pieces| *pieces > 0)).then_some(pieces)
}

/// The shardings of an XLA program's parameters or results, tuples taken apart.
pub(super) fn flatten(shardings: &[OpSharding]) -> Vec<OpSharding> {
    let mut flat = Vec::new();
    let mut pending: Vec<&OpSharding> = shardings.iter().rev().collect();
    while let Some(sharding) = pending.pop() {
        match sharding.r#type() {
            Type::Tuple => pending.extend(sharding.tuple_shardings.iter().rev()),
            _ => flat.push(sharding.clone()),
        }
    }
    flat
}

#[cfg(test)]
mod tests {
    use super::*;
    use waystation_proto::xla::{
        AxisRefProto, MeshProto, NamedShardingProto, axis_ref_proto::SubAxis, mesh_proto::MeshAxis,
        named_sharding_proto::DimensionSharding,
    };

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
    fn a_named_sharding_cuts_by_its_axes() {
        let axis = |index, part: Option<i64>| AxisRefProto {
            mesh_axis_index: index,
            sub_axis_info: part.map(|size| SubAxis { pre_size: 1, size }),
        };
        let dimension = |axes: Vec<AxisRefProto>| DimensionSharding {
            axes,
            is_closed: true,
        };
        let mesh_axis = |size| MeshAxis {
            name: String::new(),
            size,
        };
        let named = NamedShardingProto {
            mesh: Some(MeshProto {
                axes: vec![mesh_axis(4), mesh_axis(3)],
                ..Default::default()
            }),
            dim_shardings: vec![
                dimension(vec![axis(1, None), axis(0, Some(2))]),
                dimension(vec![]),
            ],
            ..Default::default()
        };
        let sharding = OpSharding {
            named_sharding: Some(named),
            ..Default::default()
        };
        assert_eq!(tiles(&sharding, 2), Some(vec![6, 1]));
        assert_eq!(tiles(&sharding, 3), None);
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
        let tiles: Vec<_> = flatten(&[nested])
            .iter()
            .map(|part| part.tile_assignment_dimensions[0])
            .collect();
        assert_eq!(tiles, [1, 2, 3, 4]);
    }
}
