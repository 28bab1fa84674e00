//! Expectations taken from JAX 0.12.0.1 (`NamedSharding.devices_indices_map` and the `OpSharding` it sends), and what a
//! sharding that lies must give.

use proptest::prelude::*;
use prost::Message as _;
use waystation_proto::xla::{NamedShardingProto, OpSharding, op_sharding::Type};

use super::{IndexDomain, MAX_DEVICES, Sharding};
use crate::Error;

/// One `NamedSharding` of JAX: the bytes it serializes to, an array, and where its shards begin, in device list order.
struct Case {
    name: &'static str,
    proto: &'static str,
    dims: &'static [i64],
    shard: &'static [i64],
    origins: &'static [&'static [i64]],
}

#[rustfmt::skip]
const JAX: &[Case] = &[
    Case { name: "2x2 P()", proto: "", dims: &[8, 4], shard: &[8, 4], origins: &[&[0, 0], &[0, 0], &[0, 0], &[0, 0]] },
    Case { name: "2x2 P('x', 'y')", proto: "08031a0202024a0104520100", dims: &[8, 4], shard: &[4, 2], origins: &[&[0, 0], &[0, 2], &[4, 0], &[4, 2]] },
    Case { name: "2x2 P('y', 'x')", proto: "08031a0202024a02020252020100", dims: &[8, 4], shard: &[4, 2], origins: &[&[0, 0], &[4, 0], &[0, 2], &[4, 2]] },
    Case { name: "2x2 P('x',)", proto: "08031a0302010230014a0104520100", dims: &[8, 4], shard: &[4, 4], origins: &[&[0, 0], &[0, 0], &[4, 0], &[4, 0]] },
    Case { name: "2x2 P(None, 'y')", proto: "08031a0301020230014a02020252020100", dims: &[8, 4], shard: &[8, 2], origins: &[&[0, 0], &[0, 2], &[0, 0], &[0, 2]] },
    Case { name: "2x2 P(('x', 'y'),)", proto: "08031a0204014a0104520100", dims: &[8, 4], shard: &[2, 4], origins: &[&[0, 0], &[2, 0], &[4, 0], &[6, 0]] },
    Case { name: "2x2 P(('y', 'x'),)", proto: "08031a0204014a02020252020100", dims: &[8, 4], shard: &[2, 4], origins: &[&[0, 0], &[4, 0], &[2, 0], &[6, 0]] },
    Case { name: "2x2 P(None, ('y', 'x'))", proto: "08031a0201044a02020252020100", dims: &[8, 4], shard: &[8, 1], origins: &[&[0, 0], &[0, 2], &[0, 1], &[0, 3]] },
    Case { name: "4x2 P('x', 'y')", proto: "08031a0204024a0108520100", dims: &[8, 16], shard: &[2, 8], origins: &[&[0, 0], &[0, 8], &[2, 0], &[2, 8], &[4, 0], &[4, 8], &[6, 0], &[6, 8]] },
    Case { name: "4x2 P('y', 'x')", proto: "08031a0202044a02040252020100", dims: &[8, 16], shard: &[4, 4], origins: &[&[0, 0], &[4, 0], &[0, 4], &[4, 4], &[0, 8], &[4, 8], &[0, 12], &[4, 12]] },
    Case { name: "4x2 P('y',)", proto: "08031a0302010430014a02040252020100", dims: &[8, 16], shard: &[4, 16], origins: &[&[0, 0], &[4, 0], &[0, 0], &[4, 0], &[0, 0], &[4, 0], &[0, 0], &[4, 0]] },
    Case { name: "4x2 P(None, 'x')", proto: "08031a0301040230014a0108520100", dims: &[8, 16], shard: &[8, 4], origins: &[&[0, 0], &[0, 0], &[0, 4], &[0, 4], &[0, 8], &[0, 8], &[0, 12], &[0, 12]] },
    Case { name: "4x2 P(('y', 'x'),)", proto: "08031a0208014a02040252020100", dims: &[8, 16], shard: &[1, 16], origins: &[&[0, 0], &[4, 0], &[1, 0], &[5, 0], &[2, 0], &[6, 0], &[3, 0], &[7, 0]] },
    Case { name: "8 P('x',)", proto: "08031a0208014a0108520100", dims: &[16, 3], shard: &[2, 3], origins: &[&[0, 0], &[2, 0], &[4, 0], &[6, 0], &[8, 0], &[10, 0], &[12, 0], &[14, 0]] },
    Case { name: "8 P(None, 'x')", proto: "08031a0201084a0108520100", dims: &[3, 8], shard: &[3, 1], origins: &[&[0, 0], &[0, 1], &[0, 2], &[0, 3], &[0, 4], &[0, 5], &[0, 6], &[0, 7]] },
    Case { name: "2x2x2 P('c', 'a')", proto: "08031a040202010230014a02040252020100", dims: &[8, 16, 4], shard: &[4, 8, 4], origins: &[&[0, 0, 0], &[4, 0, 0], &[0, 0, 0], &[4, 0, 0], &[0, 8, 0], &[4, 8, 0], &[0, 8, 0], &[4, 8, 0]] },
    Case { name: "2x2x2 P('b',)", proto: "08031a040201010430014a030202025203010002", dims: &[8, 16, 4], shard: &[4, 16, 4], origins: &[&[0, 0, 0], &[0, 0, 0], &[4, 0, 0], &[4, 0, 0], &[0, 0, 0], &[0, 0, 0], &[4, 0, 0], &[4, 0, 0]] },
    Case { name: "2x2x2 P(('c', 'a'), None, 'b')", proto: "08031a030401024a02040252020100", dims: &[8, 16, 4], shard: &[2, 16, 2], origins: &[&[0, 0, 0], &[4, 0, 0], &[0, 0, 2], &[4, 0, 2], &[2, 0, 0], &[6, 0, 0], &[2, 0, 2], &[6, 0, 2]] },
    Case { name: "2x2x2 P(None, ('c', 'b', 'a'))", proto: "08031a030108014a030202025203020100", dims: &[8, 16, 4], shard: &[8, 2, 4], origins: &[&[0, 0, 0], &[0, 8, 0], &[0, 4, 0], &[0, 12, 0], &[0, 2, 0], &[0, 10, 0], &[0, 6, 0], &[0, 14, 0]] },
    Case { name: "2x2 rank 0 P()", proto: "", dims: &[], shard: &[], origins: &[&[], &[], &[], &[]] },
    Case { name: "2x2, devices 3 1 2 0 P('x', 'y')", proto: "08031a0202024a0104520100", dims: &[4, 4], shard: &[2, 2], origins: &[&[0, 0], &[0, 2], &[2, 0], &[2, 2]] },
];

fn tiled(tiles: &[i64], reshape: &[i64], perm: &[i32]) -> OpSharding {
    OpSharding {
        r#type: Type::Other.into(),
        tile_assignment_dimensions: tiles.to_vec(),
        iota_reshape_dims: reshape.to_vec(),
        iota_transpose_perm: perm.to_vec(),
        ..Default::default()
    }
}

fn domain(origin: &[i64], shape: &[i64]) -> IndexDomain {
    IndexDomain {
        origin: origin.to_vec(),
        shape: shape.to_vec(),
    }
}

#[test]
fn agrees_with_jax() {
    for case in JAX {
        let proto = OpSharding::decode(hex::decode(case.proto).unwrap().as_slice()).unwrap();
        let sharding = Sharding::new(&proto, case.origins.len()).unwrap();
        let expected: Vec<_> = case
            .origins
            .iter()
            .map(|origin| domain(origin, case.shard))
            .collect();
        assert_eq!(
            sharding.domains(case.dims).unwrap(),
            expected,
            "{}",
            case.name
        );
        assert_eq!(
            sharding.shard_dims(case.dims).unwrap(),
            case.shard,
            "{}",
            case.name
        );
        assert_eq!(
            sharding.is_fully_replicated(),
            case.shard == case.dims,
            "{}",
            case.name
        );

        let holders: Vec<_> = (0..expected.len())
            .filter(|&i| expected.iter().position(|d| *d == expected[i]) == Some(i))
            .collect();
        assert_eq!(sharding.first_holders(), holders, "{}", case.name);
        for (position, domain) in expected.iter().enumerate() {
            assert_eq!(
                sharding.first_holder(position),
                expected.iter().position(|d| d == domain),
                "{}",
                case.name
            );
        }
    }
}

#[test]
fn an_uneven_array_is_clipped_at_its_edge() {
    let sharding = Sharding::new(&tiled(&[8], &[8], &[0]), 8).unwrap();
    let domains = sharding.domains(&[13]).unwrap();
    let expected: Vec<_> = [
        (0, 2),
        (2, 2),
        (4, 2),
        (6, 2),
        (8, 2),
        (10, 2),
        (12, 1),
        (13, 0),
    ]
    .iter()
    .map(|&(o, s)| domain(&[o], &[s]))
    .collect();
    assert_eq!(domains, expected);
    assert_eq!(sharding.shard_dims(&[13]).unwrap(), [2]);

    let sharding = Sharding::new(&tiled(&[4, 2], &[2, 4], &[1, 0]), 8).unwrap();
    let domains = sharding.domains(&[5, 3]).unwrap();
    // Position 4 is first in the second column of tiles: tile (0, 1).
    assert_eq!(domains[4], domain(&[0, 2], &[2, 1]));
    assert_eq!(domains[2], domain(&[4, 0], &[1, 2]));
    assert!(domains[3].is_empty() && domains[7].is_empty());
    let covered: usize = domains.iter().map(|d| d.num_elements().unwrap()).sum();
    assert_eq!(covered, 15);
}

#[test]
fn zero_size_arrays_have_empty_domains() {
    let sharding = Sharding::new(&tiled(&[2, 2], &[4], &[0]), 4).unwrap();
    for domain in sharding.domains(&[0, 4]).unwrap() {
        assert_eq!(domain.shape, [0, 2]);
    }
}

#[test]
fn explicit_devices_and_iota_mean_the_same() {
    let explicit = OpSharding {
        r#type: Type::Other.into(),
        tile_assignment_dimensions: vec![2, 2],
        tile_assignment_devices: vec![0, 2, 1, 3],
        ..Default::default()
    };
    let explicit = Sharding::new(&explicit, 4).unwrap();
    assert_eq!(
        explicit,
        Sharding::new(&tiled(&[2, 2], &[2, 2], &[1, 0]), 4).unwrap()
    );
    assert_ne!(
        explicit,
        Sharding::new(&tiled(&[2, 2], &[4], &[0]), 4).unwrap()
    );
}

#[test]
fn replicated_subgroups_are_copies_and_others_are_refused() {
    let mut proto = tiled(&[2, 1, 2], &[4], &[0]);
    proto.last_tile_dims = vec![Type::Replicated.into()];
    let mut partial = tiled(&[2, 1, 2], &[4], &[0]);
    partial.replicate_on_last_tile_dim = true;
    assert_eq!(
        Sharding::new(&proto, 4).unwrap(),
        Sharding::new(&partial, 4).unwrap()
    );
    assert_eq!(Sharding::new(&proto, 4).unwrap().first_holders(), [0, 2]);

    proto.last_tile_dims = vec![Type::Manual.into()];
    let error = Sharding::new(&proto, 4).unwrap_err();
    assert!(error.to_string().contains("MANUAL"), "{error}");
}

#[test]
fn whole_arrays_are_equal_however_spelled() {
    let empty = Sharding::new(&OpSharding::default(), 4).unwrap();
    assert_eq!(empty, Sharding::replicated(4).unwrap());
    let mut all_ones = tiled(&[1, 1, 4], &[4], &[0]);
    all_ones.replicate_on_last_tile_dim = true;
    assert_eq!(empty, Sharding::new(&all_ones, 4).unwrap());
    assert_ne!(empty, Sharding::replicated(2).unwrap());
}

#[test]
fn maximal_is_held_by_one_position() {
    let mut proto = OpSharding {
        r#type: Type::Maximal.into(),
        tile_assignment_devices: vec![2],
        ..Default::default()
    };
    let sharding = Sharding::new(&proto, 4).unwrap();
    assert_eq!(sharding.first_holders(), [2]);
    assert_eq!(sharding.first_holder(0), Some(2));
    assert!(!sharding.is_fully_replicated());
    assert_eq!(sharding.domains(&[3]).unwrap()[0], domain(&[0], &[3]));
    proto.tile_assignment_devices = vec![4];
    assert!(matches!(
        Sharding::new(&proto, 4),
        Err(Error::MalformedSharding(_))
    ));
}

#[test]
fn kinds_that_place_nothing_are_refused_by_name() {
    for (kind, name) in [
        (Type::Tuple, "TUPLE"),
        (Type::Manual, "MANUAL"),
        (Type::Unknown, "UNKNOWN"),
        (Type::Unreduced, "UNREDUCED"),
    ] {
        let proto = OpSharding {
            r#type: kind.into(),
            ..Default::default()
        };
        let error = Sharding::new(&proto, 2).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
    }
    let named = OpSharding {
        named_sharding: Some(NamedShardingProto::default()),
        ..Default::default()
    };
    assert!(
        Sharding::new(&named, 2)
            .unwrap_err()
            .to_string()
            .contains("NAMED")
    );
}

#[test]
fn a_lying_sharding_is_an_error() {
    let explicit = |tiles: &[i64], devices: &[i64]| OpSharding {
        r#type: Type::Other.into(),
        tile_assignment_dimensions: tiles.to_vec(),
        tile_assignment_devices: devices.to_vec(),
        ..Default::default()
    };
    let mut both = tiled(&[4], &[4], &[0]);
    both.tile_assignment_devices = vec![0, 1, 2, 3];
    let mut only_copies = tiled(&[4], &[4], &[0]);
    only_copies.last_tile_dims = vec![0, 0];
    let mut two_spellings = tiled(&[4], &[4], &[0]);
    two_spellings.last_tile_dims = vec![0];
    two_spellings.replicate_on_last_tile_dim = true;
    let mut kind = explicit(&[4], &[0, 1, 2, 3]);
    kind.r#type = 99;
    for (what, proto) in [
        ("too few tiles", tiled(&[3], &[3], &[0])),
        (
            "overflowing tiles",
            tiled(&[i64::MAX, i64::MAX], &[4], &[0]),
        ),
        ("huge tiles", tiled(&[1 << 40], &[1 << 40], &[0])),
        ("no tiles", tiled(&[4, 0], &[4], &[0])),
        ("negative tiles", tiled(&[-2, -2], &[4], &[0])),
        (
            "endless tile dimensions",
            tiled(&vec![1; 1_000_000], &[4], &[0]),
        ),
        ("a reshape of another size", tiled(&[4], &[2], &[0])),
        (
            "an overflowing reshape",
            tiled(&[4], &[i64::MAX, 4], &[0, 1]),
        ),
        ("a short permutation", tiled(&[4], &[2, 2], &[0])),
        ("a permutation with a double", tiled(&[4], &[2, 2], &[0, 0])),
        ("a permutation out of range", tiled(&[4], &[2, 2], &[0, 2])),
        ("a negative permutation", tiled(&[4], &[2, 2], &[0, -1])),
        ("no devices", explicit(&[4], &[])),
        ("a device twice", explicit(&[4], &[0, 1, 1, 3])),
        ("a device too high", explicit(&[4], &[0, 1, 2, 4])),
        ("a negative device", explicit(&[4], &[0, 1, 2, -1])),
        ("both spellings of devices", both),
        ("more trailing dimensions than there are", only_copies),
        ("both spellings of copies", two_spellings),
        ("an unknown kind", kind),
    ] {
        assert!(
            matches!(Sharding::new(&proto, 4), Err(Error::MalformedSharding(_))),
            "{what}"
        );
    }
    assert!(Sharding::replicated(0).is_err());
    assert!(Sharding::replicated(MAX_DEVICES + 1).is_err());
}

#[test]
fn an_impossible_array_is_an_error() {
    let sharding = Sharding::new(&tiled(&[2, 2], &[4], &[0]), 4).unwrap();
    for dims in [
        &[4][..],
        &[4, 4, 4],
        &[-1, 4],
        &[i64::MAX, 2],
        &[i64::MIN, 0],
    ] {
        assert!(sharding.domains(dims).is_err(), "{dims:?}");
    }
    assert!(Sharding::replicated(1).unwrap().domains(&[1; 65]).is_err());
    // The largest extents that can be counted do not overflow on the way.
    let domains = sharding.domains(&[i64::MAX, 1]).unwrap();
    assert_eq!(domains[2].origin[0] + domains[2].shape[0], i64::MAX);
}

#[test]
fn domains_intersect_as_boxes() {
    let a = domain(&[0, 2], &[4, 4]);
    assert_eq!(
        a.intersect(&domain(&[2, 0], &[4, 3])),
        Some(domain(&[2, 2], &[2, 1]))
    );
    assert_eq!(a.intersect(&domain(&[4, 2], &[1, 1])), None);
    assert_eq!(a.intersect(&domain(&[0], &[1])), None);
    assert_eq!(
        domain(&[], &[]).intersect(&domain(&[], &[])),
        Some(domain(&[], &[]))
    );
    assert!(a.lies_in(&[4, 6]) && !a.lies_in(&[4, 5]) && !a.lies_in(&[4]));
    assert!(!domain(&[i64::MAX], &[1]).lies_in(&[i64::MAX]));
}

proptest! {
    /// Whatever a request says: an error, or domains that hold every element of the array, once for each copy.
    #[test]
    fn a_sharding_is_an_error_or_covers_the_array(
        kind in prop_oneof![9 => Just(3), 1 => -1..8i32],
        tiles in proptest::collection::vec(prop_oneof![20 => 1..4i64, 1 => any::<i64>()], 0..4),
        reshape in proptest::collection::vec(1..5i64, 0..4),
        perm in proptest::collection::vec(0..3i32, 0..4),
        devices in proptest::collection::vec(0..8i64, 0..9),
        iota in any::<bool>(),
        copies in any::<bool>(),
        dims in proptest::collection::vec(0..7i64, 0..4),
        num_devices in 0..28usize,
    ) {
        let fits: i64 = tiles.iter().fold(1i64, |product, &tiles| product.saturating_mul(tiles));
        // Mostly what fits, so that the far side of the checks is reached too.
        let (reshape, perm) = if num_devices % 2 == 0 { (vec![fits], vec![0]) } else { (reshape, perm) };
        let num_devices = if num_devices % 3 == 0 { num_devices } else { usize::try_from(fits).unwrap_or(0).min(64) };
        let proto = OpSharding {
            r#type: kind,
            tile_assignment_dimensions: tiles,
            tile_assignment_devices: if iota { Vec::new() } else { devices },
            iota_reshape_dims: if iota { reshape } else { Vec::new() },
            iota_transpose_perm: if iota { perm } else { Vec::new() },
            replicate_on_last_tile_dim: copies,
            ..Default::default()
        };
        if let Ok(sharding) = Sharding::new(&proto, num_devices)
            && let Ok(domains) = sharding.domains(&dims)
        {
            prop_assert_eq!(domains.len(), num_devices);
            prop_assert!(domains.iter().all(|domain| domain.lies_in(&dims)));
            let held: usize = sharding.first_holders().iter().map(|&p| domains[p].num_elements().unwrap()).sum();
            prop_assert_eq!(held as i64, dims.iter().product::<i64>());
            for (position, domain) in domains.iter().enumerate() {
                prop_assert_eq!(domain, &domains[sharding.first_holder(position).unwrap()]);
            }
        }
    }
}
