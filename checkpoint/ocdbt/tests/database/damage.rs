//! Every bit of what a reader of the tree reads, flipped: found, each one.

use std::collections::BTreeSet;

use futures::executor::block_on;
use waystation_ocdbt::{Database, Entries, Limits, MANIFEST_NAME, Node};

use crate::support::{Memory, config, everything, open, pairs, stored};

fn flipped(memory: &Memory, path: &str, byte: usize, bit: u8) -> Memory {
    let mut files = memory.files.clone();
    let mut content = files[path].to_vec();
    content[byte] ^= 1 << bit;
    files.insert(path.into(), content.into());
    Memory {
        files,
        ..Memory::default()
    }
}

/// Opens and reads everything but the values.
fn read(memory: &Memory) -> waystation_ocdbt::Result<usize> {
    block_on(async {
        let database = Database::open(memory, Limits::default()).await?;
        let listed = database.list(b"").collect(1000).await?;
        database.check(1000).await?;
        Ok(listed.len())
    })
}

#[test]
fn every_flipped_bit_of_manifest_and_nodes_is_found() {
    for zstd in [false, true] {
        let (memory, built) = stored(&pairs(40), config(900, 10, zstd));
        assert_eq!(built.height, 1);
        assert_eq!(read(&memory).unwrap(), 40);
        let values: BTreeSet<usize> = value_bytes(&memory);
        let (mut found, mut elsewhere) = (0, 0);
        for (path, file) in &memory.files {
            for byte in 0..file.len() {
                for bit in 0..8 {
                    let outcome = read(&flipped(&memory, path, byte, bit));
                    if path != MANIFEST_NAME && values.contains(&byte) {
                        // OCDBT has no checksum of values: the formats above it have.
                        assert_eq!(outcome.unwrap(), 40);
                        elsewhere += 1;
                    } else {
                        assert!(outcome.is_err(), "{path} byte {byte} bit {bit}");
                        found += 1;
                    }
                }
            }
        }
        let total: usize = memory.files.values().map(|file| file.len()).sum();
        assert_eq!((found, elsewhere), (8 * (total - 14 * 50), 8 * 14 * 50));
    }
}

fn value_bytes(memory: &Memory) -> BTreeSet<usize> {
    let database = open(memory);
    assert_eq!(everything(&database).len(), 40);
    let listed = block_on(database.list(b"").collect(1000)).unwrap();
    let ranges = listed.iter().filter_map(|entry| match &entry.value {
        waystation_ocdbt::Value::Inline(_) => None,
        waystation_ocdbt::Value::Stored(location) => Some(location.range()),
    });
    ranges
        .flat_map(|range| range.start as usize..range.end as usize)
        .collect()
}

#[test]
fn every_length_but_the_right_one_is_found() {
    let (memory, _) = stored(&pairs(40), config(900, 10, true));
    for (path, file) in &memory.files {
        for length in 0..file.len() {
            let mut files = memory.files.clone();
            files.insert(path.clone(), file.slice(..length));
            let cut = Memory {
                files,
                ..Memory::default()
            };
            assert!(read(&cut).is_err(), "{path} cut to {length}");
        }
    }
    let mut files = memory.files.clone();
    let longer = [&files[MANIFEST_NAME][..], &[0]].concat();
    files.insert(MANIFEST_NAME.into(), longer.into());
    assert!(
        read(&Memory {
            files,
            ..Memory::default()
        })
        .is_err()
    );
}

/// Statistics that do not add up are no reader's business, and found by a check.
#[test]
fn wrong_statistics_are_found_by_a_check() {
    let (mut memory, _) = stored(&pairs(40), config(900, 10, false));
    let root = open(&memory).version().root.clone().unwrap();
    let node = Node::decode(&memory.part(&root.location), "", 1 << 20).unwrap();
    let Entries::Interior { height, children } = &node.entries else {
        panic!("{node:?}");
    };
    for field in 0..3 {
        let mut children = children.clone();
        let statistics = &mut children[1].node.statistics;
        match field {
            0 => statistics.keys -= 1,
            1 => statistics.tree_bytes -= 1,
            _ => statistics.stored_value_bytes -= 1,
        }
        let changed = Node {
            prefix: node.prefix.clone(),
            entries: Entries::Interior {
                height: *height,
                children,
            },
        };
        let encoded = changed.encode(waystation_ocdbt::Compression::None).unwrap();
        assert_eq!(encoded.len() as u64, root.location.length());
        memory.put(root.location.path(), root.location.offset(), &encoded);
        let database = open(&memory);
        assert_eq!(everything(&database).len(), 40);
        assert!(block_on(database.check(1000)).is_err(), "{field}");
    }
}
