//! Zarr v3 that is damaged or lies: an error that names it, and never elements.

use object_store::{ObjectStoreExt as _, path::Path};
use proptest::prelude::*;
use waystation_checkpoint::zarr::Format;
use waystation_checkpoint::{Error, IndexDomain};
use waystation_proto::tensorflow::error::Code;

use crate::sharded::{Layout, get, put, seal};
use crate::shards::restored;
use crate::store::Counting;
use crate::support::{Array, domain, engine_of, to_save};

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    /// Bytes changed, taken away and added, in the shard or in the metadata.
    #[test]
    fn no_change_of_what_is_stored_is_taken_for_elements(
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..4),
        cut in proptest::option::of(any::<proptest::sample::Index>()),
        more in proptest::option::of(proptest::collection::vec(any::<u8>(), 1..100)),
        in_metadata in any::<bool>(),
        index_at_start in any::<bool>(),
        whole in any::<bool>(),
    ) {
        crate::round_trip::run(async {
            let (store, dims) = (Counting::new(), [4, 4]);
            let array = Array::new(&dims);
            let layout = Layout { index_at_start, ..Layout::new(&[4, 4], &[2, 2]) };
            layout.write(&store, &array).await;
            let name = if in_metadata { "w/zarr.json" } else { "w/c/0/0" };
            let mut bytes = get(&store, name).await;
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            bytes.truncate(cut.map_or(usize::MAX, |cut| cut.index(bytes.len())));
            bytes.extend(more.unwrap_or_default());
            put(&store, name, bytes).await;
            let asked = if whole { IndexDomain::whole(&dims) } else { domain(&[1, 1], &[2, 1]) };
            // What the metadata says may change and still be true to itself: then nothing is to be expected but an end.
            match restored(&store, &dims, std::slice::from_ref(&asked)).await {
                Ok(found) if !in_metadata => assert_eq!(found[0], array.part(&asked)),
                Ok(_) => {}
                Err(error) => assert!(
                    matches!(error.code(), Code::FailedPrecondition | Code::Unimplemented),
                    "{}",
                    error.report()
                ),
            }
        });
    }
}

/// Damage to an object.
type Damage = fn(&mut Vec<u8>);

#[tokio::test]
async fn damaged_shards_are_named_and_never_zeros() {
    let dims = [4, 4];
    let array = Array::new(&dims);
    let (whole, corner) = (IndexDomain::whole(&dims), domain(&[2, 2], &[1, 1]));
    let entry = |bytes: &mut Vec<u8>, offset: u64, len: u64| {
        // The last of four, of the chunk [1, 1].
        let at = bytes.len() - 20;
        bytes[at..at + 8].copy_from_slice(&offset.to_le_bytes());
        bytes[at + 8..at + 16].copy_from_slice(&len.to_le_bytes());
        let mut index = bytes[bytes.len() - 68..bytes.len() - 4].to_vec();
        seal(&mut index);
        let from = bytes.len() - 68;
        bytes[from..].copy_from_slice(&index);
    };
    let damages: [(&str, Damage, bool); 11] = [
        ("empty", |bytes| bytes.clear(), false),
        (
            "shorter than its index",
            |bytes| {
                bytes.drain(..bytes.len() - 60);
            },
            false,
        ),
        (
            "cut at the end",
            |bytes| {
                bytes.pop();
            },
            false,
        ),
        (
            "cut at the start",
            |bytes| {
                bytes.remove(0);
            },
            true,
        ),
        ("longer", |bytes| bytes.push(0), false),
        (
            "another checksum",
            |bytes| *bytes.last_mut().unwrap() ^= 1,
            false,
        ),
        (
            "another offset",
            |bytes| {
                let at = bytes.len() - 20;
                bytes[at] ^= 1;
            },
            false,
        ),
        (
            "a flipped bit in a chunk",
            |bytes| {
                let at = bytes.len() - 70;
                bytes[at] ^= 4;
            },
            true,
        ),
        ("zeros", |bytes| bytes.fill(0), false),
        ("another array's", |bytes| *bytes = vec![7; 4000], false),
        (
            "noise",
            |bytes| {
                bytes
                    .iter_mut()
                    .enumerate()
                    .for_each(|(i, byte)| *byte ^= (i * 37) as u8)
            },
            false,
        ),
    ];
    for compressed in [true, false] {
        let mut layout = Layout::new(&[4, 4], &[2, 2]);
        layout.compressed = compressed;
        for asked in [&whole, &corner] {
            for (name, damage, in_chunk) in &damages {
                // Nothing guards elements that are stored as they are.
                if *in_chunk && (!compressed || *name == "cut at the start" && asked == &corner) {
                    continue;
                }
                let store = Counting::new();
                layout.write(&store, &array).await;
                let mut bytes = get(&store, "w/c/0/0").await;
                damage(&mut bytes);
                put(&store, "w/c/0/0", bytes).await;
                let error = restored(&store, &dims, std::slice::from_ref(asked))
                    .await
                    .unwrap_err();
                assert!(
                    matches!(&error, Error::CorruptChunk { object, .. } if object.starts_with("w/c/0/0")),
                    "{name}: {}",
                    error.report()
                );
                assert_eq!(error.code(), Code::FailedPrecondition);
            }
            // An index that is whole and lies.
            for (offset, len) in [
                (0, 0),
                (0, 1 << 40),
                (1 << 40, 8),
                (u64::MAX, 8),
                (u64::MAX - 1, u64::MAX),
                (0, 7),
                (0, u64::MAX),
            ] {
                let store = Counting::new();
                layout.write(&store, &array).await;
                let mut bytes = get(&store, "w/c/0/0").await;
                entry(&mut bytes, offset, len);
                put(&store, "w/c/0/0", bytes).await;
                let error = restored(&store, &dims, std::slice::from_ref(asked))
                    .await
                    .unwrap_err();
                assert!(
                    matches!(&error, Error::CorruptChunk { object, .. } if object == "w/c/0/0, inner chunk [1, 1]"),
                    "{offset} {len}: {}",
                    error.report()
                );
            }
            // An absent chunk, and an absent shard.
            let store = Counting::new();
            layout.write(&store, &array).await;
            let mut bytes = get(&store, "w/c/0/0").await;
            entry(&mut bytes, u64::MAX, u64::MAX);
            put(&store, "w/c/0/0", bytes).await;
            let error = restored(&store, &dims, std::slice::from_ref(asked))
                .await
                .unwrap_err();
            assert!(
                matches!(&error, Error::MissingChunk { object, .. } if object == "w/c/0/0, inner chunk [1, 1]"),
                "{error}"
            );
            let other = [domain(&[0, 0], &[4, 2])];
            assert_eq!(
                restored(&store, &dims, &other).await.unwrap()[0],
                array.part(&other[0])
            );
            let path = Path::parse("w/c/0/0").unwrap();
            store.bucket().store().delete(&path).await.unwrap();
            let error = restored(&store, &dims, std::slice::from_ref(asked))
                .await
                .unwrap_err();
            assert!(
                matches!(&error, Error::MissingChunk { object, .. } if object == "w/c/0/0"),
                "{error}"
            );
            assert_eq!(error.code(), Code::FailedPrecondition);
        }
    }
}

#[tokio::test]
async fn lying_metadata_is_an_error_within_bounds() {
    let dims = [4, 4];
    let array = Array::new(&dims);
    for (from, to, code) in [
        ("{", "[", Code::FailedPrecondition),
        (
            r#""shape":[4,4]"#,
            r#""shape":[4,9223372036854775807]"#,
            Code::FailedPrecondition,
        ),
        (
            r#""shape":[4,4]"#,
            r#""shape":[4,8]"#,
            Code::FailedPrecondition,
        ),
        // Larger shards with more chunks in each: their index is longer.
        (
            r#""chunk_shape":[4,4]"#,
            r#""chunk_shape":[8,8]"#,
            Code::FailedPrecondition,
        ),
        (
            r#""chunk_shape":[4,4]"#,
            r#""chunk_shape":[1073741824,1073741824]"#,
            Code::Unimplemented,
        ),
        (
            r#""chunk_shape":[2,2]"#,
            r#""chunk_shape":[4,2]"#,
            Code::FailedPrecondition,
        ),
        (
            r#""chunk_shape":[2,2]"#,
            r#""chunk_shape":[3,2]"#,
            Code::FailedPrecondition,
        ),
        (r#""name":"zstd""#, r#""name":"blosc""#, Code::Unimplemented),
        (r#""bfloat16""#, r#""float16""#, Code::FailedPrecondition),
        (r#""bfloat16""#, r#""uint4""#, Code::Unimplemented),
    ] {
        let store = Counting::new();
        Layout::new(&[4, 4], &[2, 2]).write(&store, &array).await;
        let text = String::from_utf8(get(&store, "w/zarr.json").await).unwrap();
        assert!(text.contains(from), "{from}");
        put(
            &store,
            "w/zarr.json",
            text.replacen(from, to, 1).into_bytes(),
        )
        .await;
        let error = restored(&store, &dims, &[IndexDomain::whole(&dims)])
            .await
            .unwrap_err();
        assert_eq!(error.code(), code, "{to}: {}", error.report());
        assert!(error.to_string().contains("\"w\""), "{error}");
    }

    // One chunk of the largest size there is, for a small array.
    let huge = Layout::new(&[1 << 20, 1 << 40], &[1 << 20, 1 << 40]);
    let text = String::from_utf8({
        let store = Counting::new();
        Layout::new(&[4, 4], &[4, 4]).write(&store, &array).await;
        get(&store, "w/zarr.json").await
    })
    .unwrap();
    let store = Counting::new();
    let shape = format!("[{},{}]", huge.shard[0], huge.shard[1]);
    put(
        &store,
        "w/zarr.json",
        text.replace("\"chunk_shape\":[4,4]", &format!("\"chunk_shape\":{shape}"))
            .into_bytes(),
    )
    .await;
    let error = restored(&store, &dims, &[IndexDomain::whole(&dims)])
        .await
        .unwrap_err();
    assert!(
        matches!(error, Error::Metadata { .. }),
        "{}",
        error.report()
    );
}

/// Every bit of what is stored: found, or of no consequence.
#[tokio::test]
async fn every_flipped_bit_of_a_shard_is_found() {
    let (store, dims) = (Counting::new(), [4, 4]);
    let array = Array::new(&dims);
    let save = to_save("here", "w", &dims, &[4, 4]);
    let whole = [IndexDomain::whole(&dims)];
    engine_of(Format::Zarr3)
        .save_to(&store.bucket(), &save, array.pieces(&whole), true)
        .await
        .unwrap();
    let good = get(&store, "w/c/0/0").await;
    let mut found = 0;
    for bit in 0..good.len() * 8 {
        let mut bytes = good.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        put(&store, "w/c/0/0", bytes).await;
        match restored(&store, &dims, &whole).await {
            Ok(read) => assert_eq!(read[0], array.part(&whole[0]), "bit {bit}"),
            Err(error) => {
                assert!(
                    matches!(error, Error::CorruptChunk { .. }),
                    "bit {bit}: {error}"
                );
                found += 1;
            }
        }
    }
    assert!(found > good.len() * 8 - 8, "{found} of {}", good.len() * 8);
}
