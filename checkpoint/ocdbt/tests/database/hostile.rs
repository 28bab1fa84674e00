//! Databases that are sound byte by byte and lie.

use std::sync::Arc;

use bytes::Bytes;
use futures::executor::block_on;
use waystation_ocdbt::envelope::{self, NODE_MAGIC};
use waystation_ocdbt::{
    ChildEntry, Compression, Config, DataFile, Database, Error, LeafEntry, Limits, Location,
    MANIFEST_NAME, Manifest, Node, NodeRef, Result, Statistics, Value, Version,
};

use crate::support::Memory;

const FILE: &str = "d/f";

fn at(offset: usize, length: usize) -> Location {
    let file = Arc::new(DataFile::new("", FILE).unwrap());
    Location::new(file, offset as u64, length as u64).unwrap()
}

fn reference(location: Location) -> NodeRef {
    NodeRef {
        location,
        statistics: Statistics::default(),
    }
}

fn leaf(keys: &[&'static str]) -> Node {
    let entry = |key: &&'static str| LeafEntry {
        key: (*key).into(),
        value: Value::Inline("v".into()),
    };
    Node::leaf(keys.iter().map(entry).collect())
}

fn child(key: &'static str, subtree_prefix: usize, location: Location) -> ChildEntry {
    ChildEntry {
        key: key.into(),
        subtree_prefix,
        node: reference(location),
    }
}

/// A database whose data file is this, with this root.
fn database(file: Vec<u8>, root: Location, root_height: u8) -> Memory {
    let mut config = Config::orbax([1; 16]);
    config.compression = Compression::None;
    let manifest = Manifest {
        config,
        versions: vec![Version {
            generation: 1,
            root: Some(reference(root)),
            root_height,
            commit_time_ns: 0,
        }],
        version_nodes: vec![],
    };
    let mut memory = Memory::default();
    memory.files.insert(FILE.into(), file.into());
    memory
        .files
        .insert(MANIFEST_NAME.into(), manifest.encode().unwrap());
    memory
}

/// A root over the given leaves, each with its lower bound and what its keys share.
fn two_levels(children: &[(&'static str, usize, Node)]) -> Memory {
    let mut file = Vec::new();
    let mut entries = Vec::new();
    for (key, shared, node) in children {
        let encoded = node.encode(Compression::None).unwrap();
        entries.push(child(key, *shared, at(file.len(), encoded.len())));
        file.extend_from_slice(&encoded);
    }
    let root = Node::interior(1, entries)
        .encode(Compression::None)
        .unwrap();
    let location = at(file.len(), root.len());
    file.extend_from_slice(&root);
    database(file, location, 1)
}

fn list(memory: &Memory) -> Result<Vec<Bytes>> {
    block_on(async {
        let database = Database::open(memory, Limits::default()).await?;
        let entries = database.list(b"").collect(1000).await?;
        Ok(entries.into_iter().map(|entry| entry.key).collect())
    })
}

fn misplaced(memory: &Memory) -> String {
    match list(memory) {
        Err(Error::In { source, .. }) => match *source {
            Error::Misplaced { what } => what.into(),
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

#[test]
fn keys_outside_of_what_the_parent_says_are_refused() {
    let sound = two_levels(&[("a", 0, leaf(&["a", "b"])), ("c", 0, leaf(&["c", "d"]))]);
    assert_eq!(list(&sound).unwrap(), ["a", "b", "c", "d"]);
    let early = two_levels(&[("b", 0, leaf(&["a", "b"])), ("c", 0, leaf(&["c"]))]);
    assert_eq!(misplaced(&early), "key before those of the node");
    let late = two_levels(&[("a", 0, leaf(&["a", "c"])), ("c", 0, leaf(&["c"]))]);
    assert_eq!(misplaced(&late), "key after those of the node");
    // The last has no upper bound but that of its parent: none here.
    let open = two_levels(&[("a", 0, leaf(&["a"])), ("c", 0, leaf(&["z"]))]);
    assert_eq!(list(&open).unwrap(), ["a", "z"]);
    // What the keys below share precedes them, whatever they are.
    let shared = two_levels(&[("w.1", 2, leaf(&["1", "2"])), ("x", 0, leaf(&["x"]))]);
    assert_eq!(list(&shared).unwrap(), ["w.1", "w.2", "x"]);
}

#[test]
fn nodes_of_another_height_are_refused_so_none_leads_in_a_circle() {
    // A node that has itself below it: its length is known when all numbers are small.
    let root = |length| Node::interior(1, vec![child("a", 0, at(0, length))]);
    let length = root(1).encode(Compression::None).unwrap().len();
    let encoded = root(length).encode(Compression::None).unwrap();
    assert_eq!(encoded.len(), length);
    let circle = database(encoded.to_vec(), at(0, length), 1);
    assert_eq!(misplaced(&circle), "height of a node");
    assert_eq!(circle.reads(), 2);

    let encoded = leaf(&["a"]).encode(Compression::None).unwrap();
    let low = database(encoded.to_vec(), at(0, encoded.len()), 1);
    assert_eq!(misplaced(&low), "height of a node");
    let high = database(vec![], at(0, 100), 33);
    assert!(matches!(
        list(&high),
        Err(Error::TooLarge {
            what: "height of the root",
            ..
        })
    ));
}

/// A tree of 32 levels, at each of which both children are the same node: 2^32 keys in 3 KB.
#[test]
fn a_tree_without_end_is_read_as_far_as_one_asks() {
    let mut file = Vec::new();
    let encoded = leaf(&[""]).encode(Compression::None).unwrap();
    let mut below = at(0, encoded.len());
    file.extend_from_slice(&encoded);
    for height in 1..=32 {
        let children = vec![child("a", 1, below.clone()), child("b", 1, below)];
        let encoded = Node::interior(height, children)
            .encode(Compression::None)
            .unwrap();
        below = at(file.len(), encoded.len());
        file.extend_from_slice(&encoded);
    }
    assert!(file.len() < 5000);
    let memory = database(file, below, 32);
    let database = block_on(Database::open(&memory, Limits::default())).unwrap();
    let mut list = database.list(b"");
    for _ in 0..1000 {
        assert_eq!(block_on(list.next()).unwrap().unwrap().key.len(), 32);
    }
    assert_eq!(memory.reads(), 1 + 33);
    assert!(block_on(database.list(b"").collect(1000)).is_err());
    assert!(block_on(database.check(1000)).is_err());
    assert!(block_on(database.get(&[b'b'; 32])).unwrap().is_some());
}

#[test]
fn keys_that_grow_too_long_on_the_way_are_refused() {
    // 40,000 bytes that the keys below share, and as many again.
    let long: &'static str = Box::leak("k".repeat(40_000).into_boxed_str());
    let memory = two_levels(&[(long, 40_000, leaf(&[long]))]);
    assert!(matches!(list(&memory), Err(Error::In { .. })));
}

#[test]
fn nodes_longer_than_any_may_be_are_not_even_read() {
    for length in [1 << 40, usize::MAX >> 1] {
        let memory = database(vec![0; 100], at(0, length), 0);
        let Err(Error::In { source, .. }) = list(&memory) else {
            panic!("{length}");
        };
        assert!(matches!(
            *source,
            Error::TooLarge {
                what: "length of a node",
                ..
            }
        ));
        assert_eq!(memory.reads(), 1, "the manifest");
    }
}

#[test]
fn a_bomb_is_refused_at_the_limit() {
    // 200 MB of zeros for a body; more than a node may have by default.
    let body = vec![0; 200 << 20];
    let bomb = envelope::seal(NODE_MAGIC, Compression::Zstd { level: 1 }, &body).unwrap();
    assert!(bomb.len() < 1 << 20);
    let memory = database(bomb.to_vec(), at(0, bomb.len()), 0);
    let Err(Error::In { source, .. }) = list(&memory) else {
        panic!("read");
    };
    assert!(
        matches!(
            *source,
            Error::TooLarge {
                what: "size of the body",
                limit: 100_000_000,
                ..
            }
        ),
        "{source:?}"
    );
}

#[test]
fn data_files_outside_of_the_database_are_not_read() {
    for path in ["../secret", "/etc/passwd", "d/../../secret"] {
        // A leaf with one value of 5 bytes at 0 of a file with this path.
        let body = [
            &[0, 1, path.len() as u8, 0],
            path.as_bytes(),
            &[1, 1, b'k', 5, 1, 0, 0],
        ]
        .concat();
        let node = envelope::seal(NODE_MAGIC, Compression::None, &body).unwrap();
        let memory = database(node.to_vec(), at(0, node.len()), 0);
        let Err(Error::In { source, .. }) = list(&memory) else {
            panic!("{path}");
        };
        assert!(matches!(*source, Error::Path { .. }), "{source:?}");
    }
}

#[test]
fn a_manifest_longer_than_any_may_be_is_not_read_to_its_end() {
    let mut memory = Memory::default();
    memory
        .files
        .insert(MANIFEST_NAME.into(), vec![0; 5000].into());
    let limits = Limits {
        manifest_bytes: 1000,
        ..Limits::default()
    };
    let refused = block_on(Database::open(&memory, limits));
    assert!(matches!(refused, Err(Error::In { .. })));
    assert_eq!(memory.log.lock().unwrap()[0].1, 0..1001);
}
