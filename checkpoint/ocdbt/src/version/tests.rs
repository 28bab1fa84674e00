use std::sync::Arc;

use super::*;

fn node(generation: u64, height: u8, generations: u64) -> VersionNodeRef {
    let file = Arc::new(DataFile::random([0x5a; 16]));
    VersionNodeRef {
        generation,
        location: Location::new(file, 7, 50).unwrap(),
        generations,
        commit_time_ns: 9,
        height,
    }
}

/// The node as it would be if nothing were checked. The heights of the children are not stored.
fn unchecked(arity_log2: u8, height: u8, nodes: &[VersionNodeRef]) -> Bytes {
    let mut table = FileTableBuilder::default();
    add_node_files(&mut table, nodes);
    let mut out = vec![arity_log2, height];
    table.encode(&mut out).unwrap();
    encode_nodes(&mut out, &table, nodes, false);
    envelope::seal(VERSION_NODE_MAGIC, Compression::None, &out).unwrap()
}

#[test]
fn interior_nodes_that_the_format_does_not_allow_are_refused_both_ways() {
    let read = |arity_log2, height, nodes: &[VersionNodeRef]| {
        let entries = VersionEntries::Interior {
            height,
            nodes: nodes.to_vec(),
        };
        let node = VersionNode {
            arity_log2,
            entries,
        };
        let sealed = unchecked(arity_log2, height, nodes);
        let read = VersionNode::decode(&sealed, "", 1 << 20);
        match node.encode(Compression::None) {
            Ok(encoded) => {
                assert_eq!(encoded, sealed);
                assert_eq!(read.unwrap(), node);
                true
            }
            Err(_) => {
                assert!(read.is_err(), "{node:?}");
                false
            }
        }
    };
    // Of arity 16, over leaves: each child ends at a multiple of 16 and has 16 generations at most.
    assert!(read(
        4,
        1,
        &[node(16, 0, 16), node(32, 0, 1), node(256, 0, 1)]
    ));
    assert!(!read(4, 1, &[]));
    assert!(!read(4, 1, &[node(0, 0, 1)]), "generation 0");
    assert!(!read(4, 1, &[node(32, 0, 1), node(16, 0, 1)]), "order");
    assert!(!read(4, 1, &[node(17, 0, 1)]), "in the midst of a leaf");
    assert!(!read(4, 1, &[node(16, 0, 17)]), "more than a leaf has");
    assert!(
        !read(4, 1, &[node(256, 0, 1), node(272, 0, 1)]),
        "of two nodes"
    );
    assert!(
        !read(1, 1, &[node(2, 0, 1), node(4, 0, 1), node(6, 0, 1)]),
        "more than 2"
    );
    // Higher up: multiples of 256, up to 63 bits.
    assert!(read(4, 2, &[node(256, 1, 256), node(512, 1, 3)]));
    assert!(!read(4, 2, &[node(128, 1, 1)]));
    assert!(read(16, 3, &[node(1 << 48, 2, 1 << 48)]));
    assert!(!read(16, 4, &[node(1 << 48, 3, 1)]), "higher than 63 bits");
    assert!(!read(0, 1, &[node(16, 0, 1)]), "no arity");
    assert!(!read(17, 1, &[node(1 << 17, 0, 1)]), "too large an arity");
}

#[test]
fn a_child_of_another_height_is_not_written() {
    let node = VersionNode {
        arity_log2: 4,
        entries: VersionEntries::Interior {
            height: 2,
            nodes: vec![node(256, 0, 1)],
        },
    };
    assert!(node.encode(Compression::None).is_err());
}
