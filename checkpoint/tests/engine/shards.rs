//! Zarr v3: shards of any make are read, by no more than what is needed of them, and never wrongly.

use bytes::Bytes;
use object_store::{ObjectStoreExt as _, path::Path};
use proptest::prelude::*;
use waystation_checkpoint::zarr::{Codec, Format};
use waystation_checkpoint::{Error, IndexDomain};
use waystation_proto::tensorflow::error::Code;

use crate::sharded::{Layout, get, put, seal};
use crate::store::Counting;
use crate::support::{Array, boxes, domain, engine, engine_of, to_restore, to_save};

async fn restored(
    store: &Counting,
    dims: &[i64],
    asked: &[IndexDomain],
) -> Result<Vec<Bytes>, Error> {
    engine()
        .restore_from(&store.bucket(), &to_restore("here", "w", dims), asked)
        .await
}

/// Dimensions, inner chunks and how many of those a shard has; boxes as fractions.
#[allow(clippy::type_complexity, reason = "a strategy's tuple")]
fn layouts() -> impl Strategy<Value = (Vec<i64>, Layout, Vec<Vec<(f64, f64)>>)> {
    (0..4usize).prop_flat_map(|rank| {
        let extents = move |range: std::ops::Range<i64>| proptest::collection::vec(range, rank);
        let part = proptest::collection::vec((0.0..1.0f64, 0.0..1.0f64), rank);
        let flags = (any::<bool>(), any::<bool>(), any::<bool>(), 0..3usize);
        (
            extents(1..9),
            extents(1..4),
            extents(1..4),
            flags,
            proptest::collection::vec(part, 1..4),
        )
            .prop_map(
                |(dims, inner, times, (index_at_start, checksum, compressed, gap), parts)| {
                    let shard: Vec<i64> = inner.iter().zip(&times).map(|(a, b)| a * b).collect();
                    let layout = Layout {
                        index_at_start,
                        checksum,
                        compressed,
                        // Larger than a shard can be without it, so that the whole is not taken at once.
                        gap: [0, 1, 5000][gap],
                        ..Layout::new(&shard, &inner)
                    };
                    (dims, layout, parts)
                },
            )
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn any_box_of_any_shards_comes_back((dims, layout, parts) in layouts(), whole in any::<bool>()) {
        crate::round_trip::run(async {
            let (store, array) = (Counting::new(), Array::new(&dims));
            layout.write(&store, &array).await;
            let mut asked: Vec<IndexDomain> = parts.iter().map(|part| {
                let mut asked = domain(&[], &[]);
                for (&dim, (a, b)) in dims.iter().zip(part) {
                    let from = (a * dim as f64) as i64;
                    asked.origin.push(from);
                    asked.shape.push(((dim - from + 1) as f64 * b) as i64);
                }
                asked
            }).collect();
            if whole {
                asked.push(IndexDomain::whole(&dims));
            }
            let found = restored(&store, &dims, &asked).await.unwrap();
            for (found, asked) in found.iter().zip(&asked) {
                assert_eq!(found, &array.part(asked), "{asked:?}");
            }
        });
    }
}

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

#[tokio::test]
async fn a_save_in_v3_makes_shards_of_one() {
    let (store, dims) = (Counting::new(), [5, 4]);
    let array = Array::new(&dims);
    for codec in [None, Some(Codec::Raw)] {
        let mut save = to_save("here", "w", &dims, &[2, 4]);
        save.codec = codec;
        let stored = engine_of(Format::Zarr3)
            .save_to(
                &store.bucket(),
                &save,
                array.pieces(&boxes(&dims, &[2, 4])),
                true,
            )
            .await
            .unwrap();
        let mut sizes = 0;
        for name in ["w/zarr.json", "w/c/0/0", "w/c/1/0", "w/c/2/0"] {
            sizes += get(&store, name).await.len() as u64;
        }
        assert_eq!((store.take().puts.len(), stored), (4, sizes));
        let shard = get(&store, "w/c/1/0").await;
        let (chunk, index) = shard.split_at(shard.len() - 20);
        let elements = array.part(&domain(&[2, 0], &[2, 4]));
        match codec {
            None => assert_eq!(zstd::bulk::decompress(chunk, 100).unwrap(), elements),
            Some(_) => assert_eq!(chunk, elements),
        }
        let mut expected = vec![0; 8];
        expected.extend((chunk.len() as u64).to_le_bytes());
        seal(&mut expected);
        assert_eq!(index, expected);
        let whole = [IndexDomain::whole(&dims)];
        assert_eq!(
            restored(&store, &dims, &whole).await.unwrap()[0],
            array.part(&whole[0])
        );
    }
}

#[tokio::test]
async fn of_a_shard_only_what_is_needed_is_read() {
    // Chunks of 256 bytes, 64 in a shard; shards of 16 KiB and more of index.
    let (store, dims) = (Counting::new(), [128, 128]);
    let array = Array::new(&dims);
    let mut layout = Layout::new(&[64, 128], &[8, 16]);
    layout.compressed = false;
    layout.write(&store, &array).await;
    store.take();
    let asked = [domain(&[72, 20], &[4, 4]), domain(&[72, 22], &[4, 4])];
    let found = restored(&store, &dims, &asked).await.unwrap();
    assert_eq!(found[1], array.part(&asked[1]));
    let read = store.take();
    assert_eq!(
        read.gets.get("w/c/1/0"),
        Some(&2),
        "the index and one chunk: {read:?}"
    );
    assert!(!read.gets.contains_key("w/c/0/0"));
    let metadata = get(&store, "w/zarr.json").await.len() as u64;
    assert_eq!(read.bytes, metadata + 64 * 16 + 4 + 256);

    // The whole is taken at once, where it is small.
    store.take();
    let whole = [IndexDomain::whole(&dims)];
    assert_eq!(
        restored(&store, &dims, &whole).await.unwrap()[0],
        array.part(&whole[0])
    );
    let read = store.take();
    assert_eq!((read.gets["w/c/0/0"], read.gets["w/c/1/0"]), (1, 1));
}

#[tokio::test]
async fn a_shard_that_changes_while_it_is_read_is_no_mixture() {
    let (store, dims) = (Counting::new(), [4, 4]);
    Layout::new(&[4, 4], &[2, 2])
        .write(&store, &Array::new(&dims))
        .await;
    let error = restored(&store.restless(), &dims, &[domain(&[0, 0], &[1, 1])])
        .await
        .unwrap_err();
    assert!(
        matches!(&error, Error::CorruptChunk { object, .. } if object.starts_with("w/c/0/0")),
        "{error}"
    );
    assert!(error.report().contains("changed"), "{}", error.report());
}

#[tokio::test]
async fn an_empty_shard_is_a_damaged_one() {
    let (store, dims) = (Counting::new(), [4, 4]);
    for index_at_start in [false, true] {
        let mut layout = Layout::new(&[4, 4], &[2, 2]);
        layout.index_at_start = index_at_start;
        layout.write(&store, &Array::new(&dims)).await;
        put(&store, "w/c/0/0", Vec::new()).await;
        let error = restored(&store, &dims, &[domain(&[0, 0], &[1, 1])])
            .await
            .unwrap_err();
        assert!(
            matches!(&error, Error::CorruptChunk { object, .. } if object == "w/c/0/0"),
            "{}",
            error.report()
        );
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
