//! Bytes changed at random, with the checksum made right again so that decoding goes on: a value or an error, no panic, and
//! what is decoded is encoded and decoded to itself. `WAYSTATION_SOAK` makes it long.

use bytes::Bytes;
use futures::executor::block_on;
use proptest::prelude::*;
use proptest::test_runner::{Config as Runner, RngAlgorithm, TestRng};
use waystation_ocdbt::envelope::{self, MANIFEST_MAGIC, NODE_MAGIC, VERSION_NODE_MAGIC};
use waystation_ocdbt::{
    Compression, Database, Entries, Limits, MANIFEST_NAME, Manifest, Node, NodeRef, Version,
    VersionEntries, VersionNode, VersionNodeRef,
};

use crate::support::{Memory, config, open, pairs, stored};

const LIMIT: usize = 1 << 20;

fn rounds() -> usize {
    match std::env::var_os("WAYSTATION_SOAK") {
        Some(_) => 2_000_000,
        None => 20_000,
    }
}

/// Changes a body in a few places: other bytes, bytes that mean much, bytes gone or doubled, parts moved.
fn mutate(body: &mut Vec<u8>, random: &mut TestRng) {
    for _ in 0..1 + random.next_u32() % 3 {
        if body.is_empty() {
            return;
        }
        let at = random.next_u32() as usize % body.len();
        match random.next_u32() % 6 {
            0 => body[at] ^= 1 << (random.next_u32() % 8),
            1 => body[at] = random.next_u32() as u8,
            2 => body[at] = [0, 1, 0x7f, 0x80, 0xfe, 0xff][random.next_u32() as usize % 6],
            3 => {
                body.remove(at);
            }
            4 => body.insert(at, body[at]),
            _ => {
                let most = [0xff; 9];
                let end = (at + 1).min(body.len());
                body.splice(at..end, most.into_iter().chain([1]));
            }
        }
    }
}

fn random() -> TestRng {
    match std::env::var_os("WAYSTATION_SOAK") {
        // Other bytes each time.
        Some(_) => TestRng::from_seed(RngAlgorithm::ChaCha, &seed()),
        None => TestRng::deterministic_rng(RngAlgorithm::ChaCha),
    }
}

#[allow(clippy::print_stdout, reason = "shown where a run fails, to repeat it")]
fn seed() -> [u8; 32] {
    use std::hash::{BuildHasher as _, RandomState};
    let mut seed = [0; 32];
    for part in seed.chunks_mut(8) {
        part.copy_from_slice(&RandomState::new().hash_one(0).to_le_bytes());
    }
    println!("seed {seed:?}");
    seed
}

/// The bodies of all nodes of a database.
fn bodies(memory: &Memory, root: NodeRef) -> Vec<(NodeRef, Bytes)> {
    let (mut found, mut open) = (Vec::new(), vec![root]);
    while let Some(at) = open.pop() {
        let sealed = memory.part(&at.location);
        if let Entries::Interior { children, .. } =
            Node::decode(&sealed, "", LIMIT).unwrap().entries
        {
            open.extend(children.into_iter().map(|child| child.node));
        }
        found.push((at, envelope::open(&sealed, NODE_MAGIC, LIMIT).unwrap()));
    }
    found
}

#[test]
fn changed_nodes_are_decoded_or_refused() {
    let (memory, _) = stored(&pairs(30), config(500, 10, false));
    let root = open(&memory).version().root.clone().unwrap();
    let bodies = bodies(&memory, root);
    let mut random = random();
    let (mut sound, mut refused) = (0, 0);
    for round in 0..rounds() {
        let mut body = bodies[round % bodies.len()].1.to_vec();
        mutate(&mut body, &mut random);
        let sealed = envelope::seal(NODE_MAGIC, Compression::None, &body).unwrap();
        match Node::decode(&sealed, "p/", LIMIT) {
            Ok(node) => {
                sound += 1;
                let again = node.encode(Compression::None).unwrap();
                assert_eq!(
                    Node::decode(&again, "", LIMIT).unwrap(),
                    node,
                    "{body:02x?}"
                );
            }
            Err(_) => refused += 1,
        }
    }
    assert!(
        sound > rounds() / 20 && refused > rounds() / 5,
        "{sound} {refused}"
    );
}

#[test]
fn changed_manifests_are_decoded_or_refused() {
    let (_, built) = stored(&pairs(30), config(500, 10, false));
    let body = envelope::open(&built.manifest, MANIFEST_MAGIC, LIMIT).unwrap();
    let mut random = random();
    let (mut sound, mut refused) = (0, 0);
    for _ in 0..rounds() {
        let mut body = body.to_vec();
        mutate(&mut body, &mut random);
        let sealed = envelope::seal(MANIFEST_MAGIC, Compression::None, &body).unwrap();
        match Manifest::decode(&sealed, "", LIMIT) {
            Ok(mut manifest) => {
                sound += 1;
                // A limit on what is written, not on what is read.
                let inline = &mut manifest.config.max_inline_value_bytes;
                *inline = (*inline).min(1 << 20);
                let again = manifest.encode().unwrap();
                assert_eq!(Manifest::decode(&again, "", LIMIT).unwrap(), manifest);
            }
            Err(_) => refused += 1,
        }
    }
    assert!(
        sound > rounds() / 20 && refused > rounds() / 5,
        "{sound} {refused}"
    );
}

#[test]
fn changed_version_nodes_are_decoded_or_refused() {
    let (memory, _) = stored(&pairs(3), config(500, 10, false));
    let version = open(&memory).version().clone();
    let root = version.root.clone().unwrap();
    let versions = (17..=32).map(|generation| Version {
        generation,
        ..version.clone()
    });
    let nodes = (1..=3).map(|number| VersionNodeRef {
        generation: 256 * number,
        location: root.location.clone(),
        generations: 256,
        commit_time_ns: 5,
        height: 1,
    });
    let bodies = [
        VersionEntries::Leaf(versions.collect()),
        VersionEntries::Interior {
            height: 2,
            nodes: nodes.collect(),
        },
    ]
    .map(|entries| {
        let node = VersionNode {
            arity_log2: 4,
            entries,
        };
        let sealed = node.encode(Compression::None).unwrap();
        assert_eq!(VersionNode::decode(&sealed, "", LIMIT).unwrap(), node);
        envelope::open(&sealed, VERSION_NODE_MAGIC, LIMIT).unwrap()
    });
    let mut random = random();
    let (mut sound, mut refused) = (0, 0);
    for round in 0..rounds() {
        let mut body = bodies[round % 2].to_vec();
        mutate(&mut body, &mut random);
        let sealed = envelope::seal(VERSION_NODE_MAGIC, Compression::None, &body).unwrap();
        match VersionNode::decode(&sealed, "", LIMIT) {
            Ok(node) => {
                sound += 1;
                let again = node.encode(Compression::None).unwrap();
                assert_eq!(VersionNode::decode(&again, "", LIMIT).unwrap(), node);
            }
            Err(_) => refused += 1,
        }
    }
    assert!(
        sound > rounds() / 20 && refused > rounds() / 5,
        "{sound} {refused}"
    );
}

/// The zstd frame itself is changed: nothing beyond the limit comes of it.
#[test]
fn changed_frames_are_decoded_or_refused() {
    let (memory, _) = stored(&pairs(30), config(100_000, 1000, true));
    let root = open(&memory).version().root.clone().unwrap();
    let sealed = memory.part(&root.location);
    let (header, frame) = sealed[..sealed.len() - 4].split_at(14);
    assert_eq!(frame[..4], [0x28, 0xb5, 0x2f, 0xfd]);
    let mut random = random();
    let (mut sound, mut refused) = (0, 0);
    for _ in 0..rounds() {
        let mut frame = frame.to_vec();
        mutate(&mut frame, &mut random);
        let mut whole = [header, &frame].concat();
        let length = whole.len() as u64 + 4;
        whole[4..12].copy_from_slice(&length.to_le_bytes());
        whole.extend(envelope::crc32c(&whole).to_le_bytes());
        match envelope::open(&whole.into(), NODE_MAGIC, 10_000) {
            Ok(body) => {
                sound += 1;
                assert!(body.len() <= 10_000);
            }
            Err(_) => refused += 1,
        }
    }
    assert!(sound > 0 && refused > rounds() / 5, "{sound} {refused}");
}

#[test]
fn changed_databases_are_read_within_bounds() {
    let (memory, built) = stored(&pairs(30), config(500, 10, false));
    let root = open(&memory).version().root.clone().unwrap();
    let bodies = bodies(&memory, root);
    let manifest = envelope::open(&built.manifest, MANIFEST_MAGIC, LIMIT).unwrap();
    let mut random = random();
    let (mut sound, mut refused) = (0, 0);
    for round in 0..rounds() / 10 {
        let mut changed = Memory {
            files: memory.files.clone(),
            ..Memory::default()
        };
        if round % 8 == 0 {
            let mut body = manifest.to_vec();
            mutate(&mut body, &mut random);
            let sealed = envelope::seal(MANIFEST_MAGIC, Compression::None, &body).unwrap();
            changed.files.insert(MANIFEST_NAME.into(), sealed);
        } else {
            // In its place only if it keeps its length, so bytes are changed alone.
            let (at, body) = &bodies[round % bodies.len()];
            let mut body = body.to_vec();
            for _ in 0..1 + random.next_u32() % 3 {
                let place = random.next_u32() as usize % body.len();
                body[place] ^= 1 << (random.next_u32() % 8);
            }
            let sealed = envelope::seal(NODE_MAGIC, Compression::None, &body).unwrap();
            changed.put(at.location.path(), at.location.offset(), &sealed);
        }
        let outcome: waystation_ocdbt::Result<()> = block_on(async {
            let database = Database::open(&changed, Limits::default()).await?;
            database.get(b"layers.0.w/1.4").await?;
            let listed = database.list(b"").collect(1000).await?;
            database.check(1000).await?;
            for entry in listed {
                database.value(&entry.value, LIMIT as u64).await?;
            }
            Ok(())
        });
        match outcome {
            Ok(()) => sound += 1,
            Err(_) => refused += 1,
        }
        assert!(changed.reads() < 100);
    }
    assert!(sound > 0 && refused > 0, "{sound} {refused}");
}

proptest! {
    #![proptest_config(Runner { cases: Runner::default().cases.max(2000), ..Runner::default() })]
    #[test]
    fn any_bytes_are_refused_or_decoded(
        body in prop::collection::vec(any::<u8>(), 0..60),
        zstd in any::<bool>(),
    ) {
        let bytes = Bytes::from(body);
        let compression = if zstd { Compression::Zstd { level: 1 } } else { Compression::None };
        for magic in [NODE_MAGIC, MANIFEST_MAGIC, VERSION_NODE_MAGIC] {
            let sealed = envelope::seal(magic, compression, &bytes).unwrap();
            for bytes in [&bytes, &sealed] {
                let _ = Node::decode(bytes, "", LIMIT);
                let _ = Manifest::decode(bytes, "", LIMIT);
                let _ = VersionNode::decode(bytes, "", LIMIT);
            }
        }
    }
}
