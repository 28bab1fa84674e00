use proptest::{prelude::*, sample::select};

use super::*;

#[test]
fn every_primitive_type_survives_the_way_through_ifrt() {
    for number in 1..64 {
        let Ok(primitive) = PrimitiveType::try_from(number) else {
            continue;
        };
        if matches!(
            primitive,
            PrimitiveType::Tuple | PrimitiveType::Buffer | PrimitiveType::OpaqueType
        ) {
            continue;
        }
        let there = dtype(primitive);
        assert_eq!(primitive_type(Some(&there)).expect("known"), primitive);
    }
    assert_eq!(dtype(PrimitiveType::F8e8m0fnu).kind, Kind::F8e8m0fnu as i32);
    assert_eq!(primitive_type(None).expect_err("no dtype").code, 3);
    assert_eq!(
        primitive_type(Some(&DTypeProto {
            version_number: 0,
            kind: 99
        }))
        .expect_err("string")
        .code,
        12
    );
    let string = DTypeProto {
        version_number: 0,
        kind: 99,
    };
    assert_eq!(element_type(Some(&string)).expect("known"), Dtype::Strings);
    assert_eq!(
        primitive_type(Some(&DTypeProto {
            version_number: 0,
            kind: 1234
        }))
        .expect_err("unknown")
        .code,
        3
    );
}

#[test]
fn shapes_that_no_host_can_hold_are_refused() {
    assert!(check_dims(&[]).is_ok());
    assert!(check_dims(&[0, i64::MAX]).is_err());
    assert!(check_dims(&[1 << 30, 1 << 30]).is_err());
    assert!(check_dims(&[-1]).is_err());
    assert!(check_dims(&[1 << 20, 1 << 20]).is_ok());
    assert!(check_dims(&[1; MAX_RANK]).is_ok());
    assert!(check_dims(&[1; MAX_RANK + 1]).is_err());
}

#[test]
fn shardings_are_read_back_as_written() {
    let sharding_in = Sharding {
        devices: vec![3, 1],
        memory_kind: Some("device".into()),
        tiling: Tiling::Op(Box::new(OpSharding {
            r#type: op_sharding::Type::Other as i32,
            tile_assignment_dimensions: vec![2, 1],
            iota_reshape_dims: vec![2],
            iota_transpose_perm: vec![0],
            ..Default::default()
        })),
    };
    assert_eq!(
        sharding(Some(&sharding_in.to_proto())).expect("readable"),
        sharding_in
    );
    assert_eq!(
        sharding_in.shard_dims(&[5, 4]).expect("fits"),
        vec![vec![3, 4], vec![2, 4]]
    );
    assert!(!sharding_in.is_fully_replicated(&[5, 4]));
    let unreduced = Sharding {
        tiling: Tiling::Op(Box::new(OpSharding {
            r#type: op_sharding::Type::Unreduced as i32,
            ..Default::default()
        })),
        ..sharding_in.clone()
    };
    assert_eq!(
        unreduced.shard_dims(&[5, 4]).expect("fits"),
        vec![vec![5, 4], vec![5, 4]]
    );
    assert!(!unreduced.is_fully_replicated(&[5, 4]));
    // Two pieces, each as two parts of a sum.
    let parts = Sharding {
        devices: vec![0, 1, 2, 3],
        tiling: Tiling::Op(Box::new(OpSharding {
            r#type: op_sharding::Type::Other as i32,
            tile_assignment_dimensions: vec![2, 1, 2],
            iota_reshape_dims: vec![4],
            iota_transpose_perm: vec![0],
            last_tile_dims: vec![op_sharding::Type::Unreduced as i32],
            ..Default::default()
        })),
        ..sharding_in.clone()
    };
    let (upper, lower) = (vec![3, 4], vec![2, 4]);
    assert_eq!(
        parts.shard_dims(&[5, 4]).expect("fits"),
        [upper.clone(), upper, lower.clone(), lower]
    );
    assert_eq!(parts.domains(&[5, 4]).expect_err("parts of sums").code, 12);
    let one_piece = Sharding {
        tiling: Tiling::Op(Box::new(OpSharding {
            r#type: op_sharding::Type::Other as i32,
            tile_assignment_dimensions: vec![1, 1, 4],
            iota_reshape_dims: vec![4],
            iota_transpose_perm: vec![0],
            last_tile_dims: vec![op_sharding::Type::Unreduced as i32],
            ..Default::default()
        })),
        ..parts
    };
    assert!(!one_piece.is_fully_replicated(&[5, 4]));
    let twice = sharding_in.moved(vec![3, 3], None);
    let error = sharding(Some(&twice.to_proto())).expect_err("one device twice");
    assert!(error.message.contains("device 3 twice"), "{error:?}");
    let broken = ShardingProto {
        serialized_sharding: Some(Serialized {
            type_name: HLO_SHARDING.into(),
            data: vec![0xff].into(),
        }),
    };
    assert_eq!(sharding(Some(&broken)).expect_err("malformed").code, 3);
    assert_eq!(sharding(None).expect_err("missing").code, 3);
}

/// Well-formed shardings whose parts need not agree with each other.
fn any_sharding() -> impl Strategy<Value = Sharding> {
    let op = (
        0..10i32,
        prop::collection::vec(-1..5i64, 0..4),
        prop::collection::vec(-1..5i64, 0..4),
        prop::collection::vec(-1..4i32, 0..4),
        prop::collection::vec(-1..9i64, 0..9),
        any::<bool>(),
    )
        .prop_map(|(kind, tiles, reshape, perm, devices, replicate)| {
            Tiling::Op(Box::new(OpSharding {
                r#type: kind,
                tile_assignment_dimensions: tiles,
                iota_reshape_dims: reshape,
                iota_transpose_perm: perm,
                tile_assignment_devices: devices,
                replicate_on_last_tile_dim: replicate,
                ..Default::default()
            }))
        });
    let even = (prop::collection::vec(0..9i64, 0..4), any::<bool>()).prop_map(
        |(shard_dims, replicated)| Tiling::Even {
            shard_dims,
            replicated,
        },
    );
    (
        prop::collection::vec(-2..9i32, 0..9),
        prop::option::of("[a-z]{0,6}"),
        prop_oneof![4 => op, 1 => even],
    )
        .prop_map(|(devices, memory_kind, tiling)| Sharding {
            devices,
            memory_kind,
            tiling,
        })
}

proptest! {
    /// Whatever a client sends, it is a sharding that says one shape a device for any array, or a refusal.
    #[test]
    fn any_sharding_is_taken_whole_or_refused(
        sent in any_sharding(),
        dims in prop::collection::vec(0..1_000_000i64, 0..4),
    ) {
        let Ok(taken) = sharding(Some(&sent.to_proto())) else {
            let mut devices = sent.devices.clone();
            devices.sort_unstable();
            devices.dedup();
            prop_assert!(devices.is_empty() || devices.len() < sent.devices.len());
            return Ok(());
        };
        prop_assert_eq!(&taken, &sent);
        if let Ok(shards) = taken.shard_dims(&dims) {
            prop_assert_eq!(shards.len(), taken.devices.len());
            prop_assert!(shards.iter().flatten().all(|&dim| dim >= 0));
        }
        if taken.is_fully_replicated(&dims) {
            prop_assert!(taken.shard_dims(&dims).is_ok());
        }
    }

    /// Bytes that are no sharding are refused, and nothing worse.
    #[test]
    fn bytes_in_a_shardings_place_do_no_harm(
        kind in select(vec![
            HLO_SHARDING,
            SINGLE_DEVICE_SHARDING,
            CONCRETE_EVEN_SHARDING,
            CONCRETE_SHARDING,
            OPAQUE_SHARDING,
            "xla::ifrt::ShardingParamSharding",
        ]),
        bytes in prop::collection::vec(any::<u8>(), 0..64),
        whole in any_sharding(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0..8u8), 0..4),
        random in any::<bool>(),
    ) {
        let mut data = bytes;
        if !random {
            let proto = whole.to_proto().serialized_sharding.unwrap_or_default();
            data = proto.data.to_vec();
            for (at, bit) in flips.iter().filter(|_| !data.is_empty()).copied().collect::<Vec<_>>() {
                let at = at.index(data.len());
                data[at] ^= 1 << bit;
            }
        }
        let proto = ShardingProto {
            serialized_sharding: Some(Serialized {
                type_name: kind.to_owned(),
                data: data.into(),
            }),
        };
        if let Ok(taken) = sharding(Some(&proto)) {
            prop_assert!((1..=MAX_DEVICES).contains(&taken.devices.len()));
            let _ = taken.shard_dims(&[8, 4]);
            let _ = taken.is_fully_replicated(&[8, 4]);
        }
    }

    /// A shape that is taken has a size that can be counted.
    #[test]
    fn shapes_are_bounded(
        dims in prop::collection::vec(
            prop_oneof![0..9i64, any::<i64>(), (0..62u32).prop_map(|bit| 1i64 << bit)],
            0..300,
        ),
    ) {
        if check_dims(&dims).is_ok() {
            prop_assert!(dims.len() <= MAX_RANK);
            let product = dims.iter().map(|&dim| dim.max(1)).try_fold(1i64, i64::checked_mul);
            prop_assert!(product.is_some_and(|n| n <= MAX_ELEMENTS));
        }
    }
}
