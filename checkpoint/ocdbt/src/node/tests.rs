use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::DataFile;
use crate::config::Compression;
use crate::envelope::{self, NODE_MAGIC};
use crate::primitive::put_varint;

/// The CRC-32C by its definition, a bit at a time.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 }
        })
    })
}

fn file(base: &str, name: &str) -> Arc<DataFile> {
    Arc::new(DataFile::new(base, name).unwrap())
}

fn at(file: &Arc<DataFile>, offset: u64, length: u64) -> Location {
    Location::new(Arc::clone(file), offset, length).unwrap()
}

fn inline(key: &'static str, value: &'static str) -> LeafEntry {
    LeafEntry {
        key: key.into(),
        value: Value::Inline(value.into()),
    }
}

fn stored(key: &'static str, location: Location) -> LeafEntry {
    LeafEntry {
        key: key.into(),
        value: Value::Stored(location),
    }
}

fn sealed(body: &[u8]) -> Bytes {
    envelope::seal(NODE_MAGIC, Compression::None, body).unwrap()
}

fn decode(body: &[u8]) -> Result<Node> {
    Node::decode(&sealed(body), "", 1 << 20)
}

#[test]
fn a_leaf_byte_by_byte() {
    let node = Node::leaf(vec![
        inline("a/x", "hi"),
        stored("a/y", at(&file("p0/", "d/f"), 5, 300)),
        inline("b", ""),
    ]);
    let body = [
        &[0][..], // height
        &[1, 6, 3],
        b"p0/d/f", // one data file; its path; 3 bytes of it are the base path
        &[3],      // entries
        &[2, 0],   // "a/|y" and "|b" share so much with the key before
        &[3, 1, 1],
        b"a/xyb",            // the rest of the keys
        &[2, 0xac, 0x02, 0], // lengths of the values: 2, 300, 0
        &[0, 1, 0],          // inline, out of line, inline
        &[0, 5],             // data file, offset
        b"hi",
    ]
    .concat();
    let mut whole = vec![0x0c, 0xdb, 0x20, 0xde];
    whole.extend((14 + body.len() as u64 + 4).to_le_bytes());
    whole.extend([0, 0]); // version, no compression
    whole.extend(&body);
    whole.extend(crc32c(&whole).to_le_bytes());

    assert_eq!(node.encode(Compression::None).unwrap(), whole);
    assert_eq!(Node::decode(&whole.into(), "", 1 << 20).unwrap(), node);
    let statistics = node.statistics(77);
    assert_eq!(
        (
            statistics.keys,
            statistics.tree_bytes,
            statistics.stored_value_bytes
        ),
        (3, 77, 300)
    );
}

#[test]
fn an_interior_node_byte_by_byte() {
    let file = file("", "d/f");
    let child = |key: &'static str, subtree_prefix, offset, keys| ChildEntry {
        key: key.into(),
        subtree_prefix,
        node: NodeRef {
            location: at(&file, offset, 64),
            statistics: Statistics {
                keys,
                tree_bytes: 64,
                stored_value_bytes: 0,
            },
        },
    };
    let node = Node::interior(
        2,
        vec![child("w.a/0", 4, 0, 10), child("w.b/7", 2, 64, 200)],
    );
    assert_eq!(node.prefix, "w.");
    let body = [
        &[2][..], // height
        &[1, 3, 0],
        b"d/f", // data files
        &[2],   // entries
        &[2],
        &[5, 3],
        &[4, 2],
        b"w.a/0b/7", // keys: shared, rest, what the keys below share
        &[0, 0],
        &[0, 64],
        &[64, 64], // data files, offsets, lengths
        &[10, 0xc8, 0x01],
        &[64, 64],
        &[0, 0], // keys, bytes of nodes, bytes of values
    ]
    .concat();
    assert_eq!(node.encode(Compression::None).unwrap(), sealed(&body));
    assert_eq!(decode(&body).unwrap(), node);
    let sum = node.statistics(64);
    assert_eq!(
        (sum.keys, sum.tree_bytes, sum.stored_value_bytes),
        (210, 192, 0)
    );
}

/// Written by TensorStore 0.1.86: `{"a": "1", "ab": "12345678"}` with max_inline_value_bytes 4, no compression.
#[test]
fn a_leaf_of_tensorstore() {
    let bytes = hex::decode(concat!(
        "0cdb20de4500000000000000000000012200642f656138373666613537313237616130303465363539666262333630323064",
        "323402010101616201080001000031a7684f52"
    ))
    .unwrap();
    let node = Node::decode(&bytes.clone().into(), "", 1 << 20).unwrap();
    let file = file("", "d/ea876fa57127aa004e659fbb36020d24");
    assert_eq!(
        node,
        Node::leaf(vec![inline("a", "1"), stored("ab", at(&file, 0, 8))])
    );
    assert_eq!(node.encode(Compression::None).unwrap(), bytes);
}

#[test]
fn nodes_that_contradict_themselves_are_refused() {
    let refused = |body: &[u8]| decode(body).unwrap_err();
    let damaged = |body: &[u8], text: &str| {
        let error = refused(body);
        assert!(
            matches!(&error, Error::Damaged { what, .. } if *what == text),
            "{error:?}"
        );
    };
    // Two keys, "a" and "b" with empty values.
    assert!(decode(&[0, 0, 2, 0, 1, 1, b'a', b'b', 0, 0, 0, 0]).is_ok());
    damaged(
        &[0, 0, 2, 0, 1, 1, b'b', b'a', 0, 0, 0, 0],
        "keys out of order",
    );
    damaged(
        &[0, 0, 2, 0, 1, 1, b'a', b'a', 0, 0, 0, 0],
        "keys out of order",
    );
    damaged(&[0, 0, 2, 1, 1, 0, b'a', 0, 0, 0, 0], "keys out of order");
    damaged(
        &[0, 0, 2, 2, 1, 1, b'a', b'b', 0, 0, 0, 0],
        "key that shares more than there is",
    );
    damaged(
        &[0, 0, 2, 0, 1, 1, b'a', b'b', 0, 0, 0, 0, 9],
        "bytes after the end",
    );
    damaged(
        &[0, 0, 2, 0, 1, 1, b'a', b'b', 0, 1, 0, 0],
        "unexpected end",
    );
    damaged(&[0, 0, 0], "node without entries");
    damaged(
        &[0, 0, 200, 1, 0, 0, 0],
        "more entries than there are bytes for",
    );
    assert!(matches!(
        refused(&[0, 0, 0x81, 0x80, 0x40, 0]),
        Error::TooLarge {
            value: 0x10_0001,
            ..
        }
    ));
    assert!(matches!(
        refused(&[0, 0, 1, 1, b'a', 0, 2]),
        Error::Unknown {
            what: "kind of a value",
            value: 2
        }
    ));
    // An inline value of 2 MiB.
    assert!(matches!(
        refused(&[0, 0, 1, 1, b'a', 0x80, 0x80, 0x80, 0x01, 0]),
        Error::TooLarge {
            what: "length of an inline value",
            ..
        }
    ));
    // Out of line: a data file that is not there, one without a path, an end past 64 bits, nothing.
    let out = |tail: &[u8]| [&[0, 1, 1, 0, b'f', 1, 1, b'a'], tail].concat();
    let most: &[u8] = &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
    assert!(decode(&out(&[5, 1, 0, 7])).is_ok());
    damaged(&out(&[5, 1, 1, 7]), "data file that is not in the table");
    assert!(matches!(
        refused(&out(&[&[1, 1, 0], most].concat())),
        Error::TooLarge { .. }
    ));
    damaged(
        &out(&[most, &[1, 0], most].concat()),
        "reference to nothing",
    );
    assert!(matches!(
        refused(&[0, 1, 0, 0, 1, 1, b'a', 5, 1, 0, 7]),
        Error::Path { .. }
    ));
    // Keys below that share more than the key has.
    let child = |prefix| [1, 1, 1, 0, b'f', 1, 1, prefix, b'a', 0, 0, 9, 1, 9, 0];
    assert!(decode(&child(1)).is_ok());
    damaged(&child(2), "keys below that share more than the key");
}

#[test]
fn keys_that_share_more_than_is_said_are_the_same_node() {
    // "ab" and "ac", the second in whole; then with what the keys below share.
    let said = decode(&[0, 0, 2, 1, 2, 1, b'a', b'b', b'c', 0, 0, 0, 0]).unwrap();
    let unsaid = decode(&[0, 0, 2, 0, 2, 2, b'a', b'b', b'a', b'c', 0, 0, 0, 0]).unwrap();
    assert_eq!(said, unsaid);
    assert_eq!(said.prefix, "a");
    let numbers = [0, 0, 0, 0, 9, 9, 1, 1, 9, 9, 0, 0];
    let child = |keys: &[u8]| decode(&[&[1, 1, 1, 0, b'f', 2], keys, &numbers].concat()).unwrap();
    let said = child(&[1, 2, 1, 1, 2, b'a', b'b', b'c']);
    let unsaid = child(&[0, 2, 2, 1, 2, b'a', b'b', b'a', b'c']);
    assert_eq!(said, unsaid);
    assert_eq!(said.prefix, "a");
    let none_below = child(&[0, 2, 2, 0, 2, b'a', b'b', b'a', b'c']);
    assert_eq!(none_below.prefix, "");
}

#[test]
fn keys_that_unpack_beyond_the_limit_are_refused() {
    // A key of 60,000 bytes, and 2,000 that share 59,998 bytes with the one before.
    let mut body = vec![0, 0];
    put_varint(&mut body, 2000);
    for _ in 1..2000 {
        put_varint(&mut body, 59_998);
    }
    put_varint(&mut body, 60_000);
    body.extend([2; 1999]);
    body.extend([b'a'; 60_000]);
    for number in 1..2000_u16 {
        body.extend((0x6161 + number).to_be_bytes());
    }
    body.extend([0; 4000]);
    // All share it, so it is kept once.
    let node = decode(&body).unwrap();
    assert_eq!((node.len(), node.prefix.len()), (2000, 59_998));
    // But for the first, which shares nothing.
    let mut odd = vec![0, 0];
    put_varint(&mut odd, 2001);
    odd.push(0);
    for _ in 1..2000 {
        put_varint(&mut odd, 59_998);
    }
    odd.push(1);
    put_varint(&mut odd, 60_000);
    odd.extend([2; 1999]);
    odd.push(b'A');
    odd.extend([b'a'; 60_000]);
    for number in 1..2000_u16 {
        odd.extend((0x6161 + number).to_be_bytes());
    }
    odd.extend([0; 4002]);
    assert!(matches!(
        decode(&odd),
        Err(Error::TooLarge {
            what: "size of the keys",
            ..
        })
    ));
    assert_eq!(
        Node::decode(&sealed(&odd), "", 200 << 20).unwrap().len(),
        2001
    );
}

#[test]
fn nodes_that_the_format_does_not_allow_are_not_written() {
    let encode = |node: Node| node.encode(Compression::None);
    assert!(encode(Node::leaf(vec![])).is_err());
    let entries = vec![inline("b", ""), inline("a", "")];
    assert!(matches!(
        encode(Node::leaf(entries)),
        Err(Error::Order { .. })
    ));
    let long = |length: usize| LeafEntry {
        key: vec![b'k'; length].into(),
        value: Value::Inline(Bytes::new()),
    };
    assert!(encode(Node::leaf(vec![long(65535)])).is_ok());
    assert!(encode(Node::leaf(vec![long(65536)])).is_err());
    let large = |length: usize| LeafEntry {
        key: "k".into(),
        value: Value::Inline(vec![0; length].into()),
    };
    assert!(encode(Node::leaf(vec![large(1 << 20)])).is_ok());
    assert!(encode(Node::leaf(vec![large((1 << 20) + 1)])).is_err());
    assert!(encode(Node::interior(0, vec![])).is_err());
}

fn values() -> impl Strategy<Value = Value> {
    let location = ("(|p/|é/)", "[ab]{1,2}", 0..u64::MAX / 2, 0..u64::MAX / 2);
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..20).prop_map(|bytes| Value::Inline(bytes.into())),
        location.prop_map(|(base, name, offset, length)| {
            Value::Stored(at(&file(&base, &name), offset, length))
        }),
    ]
}

fn compressions() -> impl Strategy<Value = Compression> {
    prop_oneof![
        Just(Compression::None),
        (-5..5).prop_map(|level| Compression::Zstd { level })
    ]
}

proptest! {
    #[test]
    fn leaves_round_trip(
        entries in prop::collection::btree_map(prop::collection::vec(0..4_u8, 0..6), values(), 1..40),
        compression in compressions(),
    ) {
        let entries = entries.into_iter().map(|(key, value)| LeafEntry { key: key.into(), value });
        let node = Node::leaf(entries.collect());
        let encoded = node.encode(compression).unwrap();
        prop_assert_eq!(Node::decode(&encoded, "", 1 << 20).unwrap(), node);
    }

    #[test]
    fn interior_nodes_round_trip(
        height in 1_u8..,
        children in prop::collection::btree_map(
            prop::collection::vec(0..4_u8, 0..6),
            (any::<prop::sample::Index>(), "[ab]{1,2}", 0..u64::MAX / 2, any::<(u64, u64, u64)>()),
            1..40,
        ),
        compression in compressions(),
    ) {
        let children = children.into_iter().map(|(key, (shared, name, offset, numbers))| ChildEntry {
            subtree_prefix: shared.index(key.len() + 1),
            key: key.into(),
            node: NodeRef {
                location: at(&file("", &name), offset, offset),
                statistics: Statistics {
                    keys: numbers.0,
                    tree_bytes: numbers.1,
                    stored_value_bytes: numbers.2,
                },
            },
        });
        let node = Node::interior(height, children.collect());
        let encoded = node.encode(compression).unwrap();
        prop_assert_eq!(Node::decode(&encoded, "", 1 << 20).unwrap(), node);
    }
}
