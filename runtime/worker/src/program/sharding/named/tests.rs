use waystation_proto::xla::{
    axis_ref_proto::SubAxis,
    mesh_proto::{IotaTransform, MeshAxis},
    named_sharding_proto::{DimensionSharding, ReductionOpProto},
};

use super::*;

fn mesh(sizes: &[i64]) -> MeshProto {
    let axis = |size: &i64| MeshAxis {
        name: String::new(),
        size: *size,
    };
    MeshProto {
        axes: sizes.iter().map(axis).collect(),
        ..Default::default()
    }
}

fn axis(index: i64) -> AxisRefProto {
    AxisRefProto {
        mesh_axis_index: index,
        sub_axis_info: None,
    }
}

fn sub(index: i64, pre_size: i64, size: i64) -> AxisRefProto {
    AxisRefProto {
        mesh_axis_index: index,
        sub_axis_info: Some(SubAxis { pre_size, size }),
    }
}

fn named(mesh: MeshProto, dims: &[&[AxisRefProto]]) -> NamedShardingProto {
    let dimension = |axes: &&[AxisRefProto]| DimensionSharding {
        axes: axes.to_vec(),
        is_closed: true,
    };
    NamedShardingProto {
        mesh: Some(mesh),
        dim_shardings: dims.iter().map(dimension).collect(),
        ..Default::default()
    }
}

/// Tile dimensions, iota reshape dimensions and permutation, and whether the last dimension replicates.
fn iota(sharding: &OpSharding) -> (&[i64], &[i64], &[i32], bool) {
    assert_eq!(sharding.r#type(), Type::Other);
    assert_eq!(
        (
            &sharding.named_sharding,
            sharding.tile_assignment_devices.len()
        ),
        (&None, 0)
    );
    (
        &sharding.tile_assignment_dimensions,
        &sharding.iota_reshape_dims,
        &sharding.iota_transpose_perm,
        sharding.replicate_on_last_tile_dim,
    )
}

/// The devices by piece, however they are written.
fn devices(sharding: &OpSharding) -> Vec<i64> {
    if !sharding.tile_assignment_devices.is_empty() {
        return sharding.tile_assignment_devices.clone();
    }
    let order: Vec<_> = sharding
        .iota_transpose_perm
        .iter()
        .map(|dim| *dim as usize)
        .collect();
    let places = transposed(&sharding.iota_reshape_dims, &order).expect("valid");
    places.into_iter().map(|place| place as i64).collect()
}

#[test]
fn specs_of_a_2x2_mesh_are_what_jax_sends_for_them() {
    let (x, y) = (axis(0), axis(1));
    for (dims, expected) in [
        (
            vec![vec![x], vec![y]],
            (vec![2, 2], vec![4], vec![0], false),
        ),
        (
            vec![vec![y], vec![x]],
            (vec![2, 2], vec![2, 2], vec![1, 0], false),
        ),
        (
            vec![vec![x], vec![]],
            (vec![2, 1, 2], vec![4], vec![0], true),
        ),
        (
            vec![vec![], vec![y]],
            (vec![1, 2, 2], vec![2, 2], vec![1, 0], true),
        ),
        (
            vec![vec![x, y], vec![]],
            (vec![4, 1], vec![4], vec![0], false),
        ),
    ] {
        let dims: Vec<&[AxisRefProto]> = dims.iter().map(Vec::as_slice).collect();
        let sharding = tiled(&named(mesh(&[2, 2]), &dims)).expect("valid");
        let (tiles, reshape, permutation, replicate) = expected;
        assert_eq!(
            iota(&sharding),
            (&tiles[..], &reshape[..], &permutation[..], replicate)
        );
    }
}

#[test]
fn what_does_not_cut_is_replicated() {
    let replicated = OpSharding::default();
    assert_eq!(
        tiled(&NamedShardingProto::default()),
        Some(replicated.clone())
    );
    assert_eq!(
        tiled(&named(mesh(&[2, 4]), &[&[], &[]])),
        Some(replicated.clone())
    );
    assert_eq!(
        tiled(&named(mesh(&[1, 4]), &[&[axis(0)]])),
        Some(replicated)
    );
}

#[test]
fn factors_of_an_axis_split_it() {
    // An axis of 8 as 2 x 4: the first dimension takes the minor factor of 4, the second the major one of 2.
    let sharding = tiled(&named(mesh(&[8]), &[&[sub(0, 2, 4)], &[sub(0, 1, 2)]])).expect("valid");
    assert_eq!(
        iota(&sharding),
        (&[4, 2][..], &[2, 4][..], &[1, 0][..], false)
    );
    assert_eq!(devices(&sharding), [0, 4, 1, 5, 2, 6, 3, 7]);
    // A factor in the middle; the rest replicates.
    let sharding = tiled(&named(mesh(&[8]), &[&[sub(0, 2, 2)]])).expect("valid");
    assert_eq!(
        iota(&sharding),
        (&[2, 4][..], &[2, 2, 2][..], &[1, 0, 2][..], true)
    );
    assert_eq!(devices(&sharding), [0, 1, 4, 5, 2, 3, 6, 7]);
}

#[test]
fn a_mesh_may_list_or_permute_its_devices() {
    let mut listed = mesh(&[2, 2]);
    listed.device_ids = vec![3, 1, 2, 0];
    let sharding = tiled(&named(listed, &[&[axis(1)], &[axis(0)]])).expect("valid");
    assert_eq!(sharding.tile_assignment_dimensions, [2, 2]);
    assert_eq!(devices(&sharding), [3, 2, 1, 0]);
    let mut permuted = mesh(&[2, 3]);
    permuted.iota_transform = Some(IotaTransform {
        reshape_dims: vec![3, 2],
        transpose_perm: vec![1, 0],
    });
    let sharding = tiled(&named(permuted, &[&[axis(0)], &[axis(1)]])).expect("valid");
    assert_eq!(devices(&sharding), [0, 2, 4, 1, 3, 5]);
    let one = NamedShardingProto {
        mesh: Some(MeshProto {
            device_ids: vec![5],
            ..Default::default()
        }),
        ..Default::default()
    };
    let sharding = tiled(&one).expect("valid");
    assert_eq!(
        (
            sharding.r#type(),
            sharding.tile_assignment_devices.as_slice()
        ),
        (Type::Maximal, &[5][..])
    );
}

#[test]
fn axes_may_be_manual_or_unreduced() {
    let mut sharding = named(mesh(&[2, 4, 3]), &[&[axis(1)]]);
    sharding.unreduced_axes = vec![axis(0)];
    let sharding = tiled(&sharding).expect("valid");
    assert_eq!(sharding.tile_assignment_dimensions, [4, 2, 3]);
    assert_eq!(
        sharding.last_tile_dims,
        [Type::Unreduced as i32, Type::Replicated as i32]
    );
    assert!(!sharding.replicate_on_last_tile_dim);
    assert_eq!(sharding.metadata, [], "a sum is what everybody expects");
    let mut greatest = named(mesh(&[2]), &[&[]]);
    greatest.unreduced_axes = vec![axis(0)];
    greatest.set_reduction_op(ReductionOpProto::Max);
    let greatest = tiled(&greatest).expect("valid");
    assert_eq!(greatest.r#type(), Type::Unreduced);
    assert_eq!(greatest.metadata[0].op_type, "sdy::reduction_op");
    assert_eq!(greatest.metadata[0].op_name, "MAX");
    let mut all = named(mesh(&[2]), &[&[]]);
    all.manual_axes = vec![axis(0)];
    assert_eq!(tiled(&all).expect("valid").r#type(), Type::Manual);
}

#[test]
fn contradictions_are_refused() {
    let mut short = mesh(&[2, 2]);
    short.device_ids = vec![0, 1, 2];
    for sharding in [
        named(mesh(&[2]), &[&[axis(1)]]),
        named(mesh(&[2]), &[&[axis(-1)]]),
        named(mesh(&[2]), &[&[axis(0)], &[axis(0)]]),
        named(mesh(&[0]), &[&[axis(0)]]),
        named(mesh(&[1 << 40, 1 << 40]), &[&[axis(0)]]),
        named(mesh(&[1 << 17]), &[&[axis(0)]]),
        named(mesh(&[8]), &[&[sub(0, 3, 2)]]),
        named(mesh(&[8]), &[&[sub(0, i64::MAX, 2)]]),
        named(mesh(&[8]), &[&[sub(0, 0, 2)]]),
        named(mesh(&[6]), &[&[sub(0, 1, 2)], &[sub(0, 1, 3)]]),
        named(short, &[&[axis(0)]]),
    ] {
        assert_eq!(tiled(&sharding), None, "{sharding:?}");
    }
}

#[test]
fn every_order_of_axes_names_the_devices_that_a_plain_count_names() {
    // Against a count over all coordinates, for every assignment of three axes to two dimensions.
    let sizes = [2_i64, 3, 4];
    let orders: [&[usize]; 8] = [
        &[0],
        &[1],
        &[2],
        &[0, 1],
        &[1, 0],
        &[2, 0],
        &[0, 2, 1],
        &[2, 1, 0],
    ];
    for first in orders {
        for second in orders
            .iter()
            .filter(|second| second.iter().all(|axis| !first.contains(axis)))
            .chain([&[].as_slice()])
        {
            let refs = |axes: &[usize]| {
                axes.iter()
                    .map(|index| axis(*index as i64))
                    .collect::<Vec<_>>()
            };
            let sharding =
                tiled(&named(mesh(&sizes), &[&refs(first), &refs(second)])).expect("valid");
            let rest = (0..3).filter(|axis| !first.contains(axis) && !second.contains(axis));
            let order: Vec<usize> = first.iter().chain(*second).copied().chain(rest).collect();
            let mut expected = Vec::new();
            for a in 0..sizes[order[0]] {
                for b in 0..sizes[order[1]] {
                    for c in 0..sizes[order[2]] {
                        let mut at = [0; 3];
                        (at[order[0]], at[order[1]], at[order[2]]) = (a, b, c);
                        expected.push((at[0] * 3 + at[1]) * 4 + at[2]);
                    }
                }
            }
            assert_eq!(devices(&sharding), expected, "{first:?} {second:?}");
        }
    }
}
