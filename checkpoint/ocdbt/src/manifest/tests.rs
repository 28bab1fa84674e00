use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::config::Compression;
use crate::envelope::{VERSION_NODE_MAGIC, seal};
use crate::reference::{Location, NodeRef, Statistics};
use crate::version::{VersionEntries, VersionNode};
use crate::{DataFile, Limits};

const LIMIT: usize = 1 << 20;

fn at(offset: u64, length: u64) -> Location {
    let file = Arc::new(DataFile::random([0x5a; 16]));
    Location::new(file, offset, length).unwrap()
}

fn version(generation: u64) -> Version {
    Version {
        generation,
        root: Some(NodeRef {
            location: at(3, 69),
            statistics: Statistics {
                keys: 2,
                tree_bytes: 69,
                stored_value_bytes: 8,
            },
        }),
        root_height: 0,
        commit_time_ns: 1_700_000_000_000_000_000,
    }
}

fn node(generation: u64, height: u8) -> VersionNodeRef {
    VersionNodeRef {
        generation,
        location: at(1000, 50),
        generations: 1,
        commit_time_ns: 7,
        height,
    }
}

fn manifest(versions: Vec<Version>, version_nodes: Vec<VersionNodeRef>) -> Manifest {
    let mut config = Config::orbax([0x11; 16]);
    config.compression = Compression::None;
    Manifest {
        config,
        versions,
        version_nodes,
    }
}

#[test]
fn a_manifest_byte_by_byte() {
    let file = format!("d/{}", "5a".repeat(16));
    let body = [
        &[0x11; 16][..],           // uuid
        &[0],                      // single
        &[0x80, 0x08],             // values of up to 1024 bytes inline
        &[0x80, 0xc2, 0xd7, 0x2f], // nodes of up to 100,000,000 bytes
        &[4, 0],                   // arity 16; no compression
        &[1, 34, 0],
        file.as_bytes(), // one data file
        &[1, 1, 0],      // one version: generation 1, height 0
        &[0, 3, 69],     // its root: data file, offset, length
        &[2, 69, 8],     // keys, bytes of nodes, bytes of values
        &1_700_000_000_000_000_000_u64.to_le_bytes(),
        &[0], // no nodes
    ]
    .concat();
    let sealed = seal(MANIFEST_MAGIC, Compression::None, &body).unwrap();
    let manifest = manifest(vec![version(1)], vec![]);
    assert_eq!(manifest.encode().unwrap(), sealed);
    assert_eq!(Manifest::decode(&sealed, "", LIMIT).unwrap(), manifest);
    // Below another database, its paths are from there.
    let below = Manifest::decode(&sealed, "ocdbt.process_0/", LIMIT).unwrap();
    let root = below.versions[0].root.as_ref().unwrap();
    assert_eq!(root.location.path(), format!("ocdbt.process_0/{file}"));
    assert_eq!(root.location.file().base(), "ocdbt.process_0/");
}

#[test]
fn a_version_node_byte_by_byte() {
    let file = format!("d/{}", "5a".repeat(16));
    let body = [
        &[1, 2][..], // arity 2, height 2
        &[1, 34, 0],
        file.as_bytes(),
        &[2, 4, 8], // two children, up to generations 4 and 8
        &[0, 0],
        &[0xe8, 0x07, 0xe8, 0x07],
        &[50, 50],
        &[1, 1], // of one generation each
        &7_u64.to_le_bytes(),
        &7_u64.to_le_bytes(),
    ]
    .concat();
    let sealed = seal(VERSION_NODE_MAGIC, Compression::None, &body).unwrap();
    let node = VersionNode {
        arity_log2: 1,
        entries: VersionEntries::Interior {
            height: 2,
            nodes: vec![node(4, 1), node(8, 1)],
        },
    };
    assert_eq!(node.encode(Compression::None).unwrap(), sealed);
    assert_eq!(VersionNode::decode(&sealed, "", LIMIT).unwrap(), node);
}

/// Written by TensorStore 0.1.86 with `"compression": null`: opened, two keys written, all deleted; four generations.
#[test]
fn a_manifest_of_tensorstore_with_empty_versions() {
    let bytes = hex::decode(concat!(
        "0cdb3a2ada0000000000000000002cf15e9fd9cbe05d4ae27442b8476934000480808004040003000300221f000000642f",
        "65353336633064343033323736383539356631333735626431346164613264346138373666613537313237616130303465",
        "363539666262333630323064323404010203040000000000010200ffffffffffffffffff010008ffffffffffffffffff01",
        "ffffffffffffffffff011a45ffffffffffffffffff0100010200001a45000000080057df8b9b4ad0ec1836cfc99b4ad0ec",
        "181ea41f9d4ad0ec18e4f2da9d4ad0ec180093015c67"
    ))
    .unwrap();
    let manifest = Manifest::decode(&bytes.clone().into(), "", LIMIT).unwrap();
    let roots: Vec<_> = manifest
        .versions
        .iter()
        .map(|version| version.root.as_ref())
        .collect();
    assert!(roots[0].is_none() && roots[3].is_none());
    let root = roots[2].unwrap();
    assert_eq!(root.location.path(), "d/ea876fa57127aa004e659fbb36020d24");
    assert_eq!((root.location.offset(), root.location.length()), (8, 69));
    assert_eq!(
        (root.statistics.keys, root.statistics.stored_value_bytes),
        (2, 8)
    );
    assert_eq!(manifest.encode().unwrap(), bytes);
}

/// Written by TensorStore 0.1.86 with `"manifest_kind": "numbered"`: the configuration, and the first generation.
#[test]
fn numbered_manifests_of_tensorstore() {
    let bytes = hex::decode(concat!(
        "0cdb3a2a3700000000000000000128b52ffd201ce10000feaf9ff3ef7bc890b6bc01582354f7ea0164808080040401000000",
        "000c1aa5ac"
    ))
    .unwrap();
    let manifest = Manifest::decode(&bytes.into(), "", LIMIT).unwrap();
    assert_eq!(manifest.config.manifest_kind, ManifestKind::Numbered);
    assert!(manifest.versions.is_empty());
    assert_eq!(
        Manifest::decode(&manifest.encode().unwrap(), "", LIMIT).unwrap(),
        manifest
    );

    let bytes = hex::decode(concat!(
        "0cdb3a2a5500000000000000000128b52ffd2043d50100f402feaf9ff3ef7bc890b6bc01582354f7ea006480808004040100",
        "00000001000001010000ff01ffc764999e4ad0ec180003004205000826019e0ad2cada"
    ))
    .unwrap();
    let manifest = Manifest::decode(&bytes.into(), "", LIMIT).unwrap();
    assert_eq!(manifest.config.manifest_kind, ManifestKind::Single);
    assert_eq!(manifest.versions.len(), 1);
    assert_eq!(manifest.versions[0].root, None);

    assert_eq!(numbered_manifest_name(26), "manifest.000000000000001a");
    assert_eq!(
        numbered_manifest_generation("manifest.000000000000001a"),
        Some(26)
    );
    for name in [
        "manifest.ocdbt",
        "manifest.1a",
        "manifest.000000000000001A",
        "manifest.+00000000000001a",
    ] {
        assert_eq!(numbered_manifest_generation(name), None, "{name}");
    }
}

#[test]
fn versions_that_the_format_does_not_allow_are_refused_both_ways() {
    let good = |versions, nodes| {
        let manifest = manifest(versions, nodes);
        let read = Manifest::decode(&manifest.encode().unwrap(), "", LIMIT).unwrap();
        assert_eq!(read, manifest);
    };
    let bad = |versions: Vec<Version>, nodes: Vec<VersionNodeRef>| {
        let manifest = manifest(versions, nodes);
        assert!(manifest.encode().is_err(), "{manifest:?}");
        // As it would be if nothing were checked.
        let mut out = Vec::new();
        manifest.config.encode(&mut out);
        let mut table = FileTableBuilder::default();
        add_version_files(&mut table, &manifest.versions);
        add_node_files(&mut table, &manifest.version_nodes);
        table.encode(&mut out).unwrap();
        encode_versions(&mut out, &table, &manifest.versions);
        encode_nodes(&mut out, &table, &manifest.version_nodes, true);
        let sealed = seal(MANIFEST_MAGIC, Compression::None, &out).unwrap();
        assert!(
            Manifest::decode(&sealed, "", LIMIT).is_err(),
            "{manifest:?}"
        );
    };
    let versions = |generations: &[u64]| {
        generations
            .iter()
            .map(|number| version(*number))
            .collect::<Vec<_>>()
    };
    good(versions(&[1]), vec![]);
    good((1..=16).map(version).collect(), vec![]);
    good(versions(&[18, 20]), vec![node(16, 1)]);
    bad(versions(&[]), vec![]);
    bad(versions(&[0]), vec![]);
    bad(versions(&[2, 2]), vec![]);
    bad(versions(&[3, 2]), vec![]);
    bad((1..=17).map(version).collect(), vec![]);
    bad(versions(&[16, 17]), vec![]);
    // Arity 16: after 273 = 256 + 16 + 1 versions, the nodes end at 256 and 272.
    good(versions(&[273]), vec![node(256, 2), node(272, 1)]);
    good(versions(&[273]), vec![node(256, 2)]);
    bad(versions(&[273]), vec![node(272, 1), node(256, 2)]);
    bad(versions(&[273]), vec![node(257, 2)]);
    bad(versions(&[273]), vec![node(273, 1)]);
    bad(versions(&[273]), vec![node(256, 1)]);
    bad(versions(&[273]), vec![node(16, 3)]);
    bad(versions(&[273]), vec![node(256, 0)]);
    bad(versions(&[5]), vec![node(4, 1)]);
    bad(versions(&[u64::MAX]), vec![node(16, 16)]);
    let mut rootless = version(1);
    rootless.root = None;
    good(vec![rootless.clone()], vec![]);
    rootless.root_height = 1;
    bad(vec![rootless], vec![]);
}

#[test]
fn configurations_that_the_format_does_not_have_are_refused() {
    let body = |kind: u8, arity: u8, compression: &[u8]| {
        let mut body = vec![0x11; 16];
        body.extend([kind, 1, 1, arity]);
        body.extend(compression);
        seal(MANIFEST_MAGIC, Compression::None, &body).unwrap()
    };
    let decode = |kind, arity, compression: &[u8]| {
        Manifest::decode(&body(kind, arity, compression), "", LIMIT)
    };
    assert!(decode(1, 4, &[0]).is_ok());
    assert!(decode(1, 16, &[1, 22, 0, 0, 0]).is_ok());
    assert!(decode(2, 4, &[0]).is_err());
    assert!(decode(1, 0, &[0]).is_err());
    assert!(decode(1, 17, &[0]).is_err());
    assert!(decode(1, 4, &[2]).is_err());
    assert!(decode(1, 4, &[1, 23, 0, 0, 0]).is_err());
    assert!(decode(1, 4, &[0, 0]).is_err());
    assert!(decode(0, 4, &[0]).is_err());
    let mut config = Config::orbax([0; 16]);
    config.max_inline_value_bytes = (1 << 20) + 1;
    assert!(config.check().is_err());
    assert!(Limits::default().node_bytes(100_000_000) == 100_000_000);
    assert!(Limits::default().node_bytes(1) == 8 << 20);
    assert!(Limits::default().node_bytes(u32::MAX) == 128 << 20);
}

proptest! {
    #[test]
    fn manifests_round_trip(
        generations in prop::collection::btree_set(1..=16_u64, 1..16),
        zstd in any::<bool>(),
        rooted in any::<bool>(),
        time in any::<u64>(),
    ) {
        let mut versions: Vec<_> = generations.iter().map(|number| version(272 + number)).collect();
        versions[0].commit_time_ns = time;
        if !rooted {
            versions[0].root = None;
        }
        let mut manifest = manifest(versions, vec![node(256, 2), node(272, 1)]);
        if zstd {
            manifest.config.compression = Compression::Zstd { level: 3 };
        }
        let read = Manifest::decode(&manifest.encode().unwrap(), "", LIMIT).unwrap();
        prop_assert_eq!(&read, &manifest);
        let leaf = VersionNode { arity_log2: 4, entries: VersionEntries::Leaf(manifest.versions) };
        let encoded = leaf.encode(manifest.config.compression).unwrap();
        prop_assert_eq!(VersionNode::decode(&encoded, "", LIMIT).unwrap(), leaf);
    }
}
