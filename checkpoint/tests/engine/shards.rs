//! Zarr v3: shards of any make are read, by no more than what is needed of them, and never wrongly.

use bytes::Bytes;
use proptest::prelude::*;
use waystation_checkpoint::zarr::{Codec, Format};
use waystation_checkpoint::{Error, IndexDomain};

use crate::sharded::{Layout, get, put, seal};
use crate::store::Counting;
use crate::support::{Array, boxes, domain, engine, engine_of, to_restore, to_save};

pub(crate) async fn restored(
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
