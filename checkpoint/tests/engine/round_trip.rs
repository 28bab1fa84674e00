//! What went in comes out, and at what cost in requests.

use proptest::prelude::*;
use waystation_checkpoint::{
    IndexDomain, Sharding,
    zarr::{Codec, Format},
};
use waystation_proto::xla::{OpSharding, PrimitiveType, op_sharding::Type};

use crate::store::Counting;
use crate::support::{Array, boxes, domain, engine, engine_of, to_restore, to_save};

pub(crate) fn run<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
        .block_on(work)
}

/// Dimensions with a chunk extent each, and what a reader may ask for.
fn grids() -> impl Strategy<Value = (Vec<i64>, Vec<i64>, Vec<(f64, f64)>)> {
    (0..4usize).prop_flat_map(|rank| {
        (
            proptest::collection::vec(1..9i64, rank),
            proptest::collection::vec(1..6i64, rank),
            proptest::collection::vec((0.0..1.0f64, 0.0..1.0f64), rank * 4),
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn any_box_of_any_grid_comes_back((dims, chunks, cuts) in grids(), pieces_of_chunks in 1..4i64, v3 in any::<bool>()) {
        run(async {
            let (store, array) = (Counting::new(), Array::new(&dims));
            // Pieces of one or several chunks a dimension.
            let piece: Vec<i64> = chunks.iter().map(|chunk| chunk * pieces_of_chunks).collect();
            let pieces = array.pieces(&boxes(&dims, &piece));
            let save = to_save("here", "a.b", &dims, &chunks);
            let format = if v3 { Format::Zarr3 } else { Format::Zarr2 };
            engine_of(format).save_to(&store.bucket(), &save, pieces, true).await.unwrap();

            let mut asked: Vec<IndexDomain> = vec![IndexDomain::whole(&dims); 2];
            for cuts in cuts.chunks(dims.len().max(1)) {
                let mut part = domain(&[], &[]);
                for (&dim, (a, b)) in dims.iter().zip(cuts) {
                    let from = (a * dim as f64) as i64;
                    part.origin.push(from);
                    part.shape.push(((dim - from + 1) as f64 * b) as i64);
                }
                asked.push(part);
            }
            store.take();
            let found = engine().restore_from(&store.bucket(), &to_restore("here", "a.b", &dims), &asked).await.unwrap();
            assert_eq!(found.len(), asked.len());
            for (found, asked) in found.iter().zip(&asked) {
                assert_eq!(found, &array.part(asked), "{asked:?}");
            }
            // Every object at most once, though the whole array was asked for twice and more.
            let counts = store.take();
            assert!(counts.gets.values().all(|&count| count == 1), "{:?}", counts.gets);
            // Of metadata, a manifest is looked for first, then the file of v2.
            let metadata = if v3 { 3 } else { 2 };
            assert_eq!(counts.gets.len(), metadata + boxes(&dims, &chunks).len());
        });
    }
}

#[tokio::test]
async fn only_the_chunks_that_are_needed_are_read() {
    let (store, dims) = (Counting::new(), [8, 8]);
    let array = Array::new(&dims);
    let pieces = array.pieces(&boxes(&dims, &[2, 4]));
    engine()
        .save_to(
            &store.bucket(),
            &to_save("here", "w", &dims, &[2, 4]),
            pieces,
            true,
        )
        .await
        .unwrap();
    store.take();
    let asked = [domain(&[1, 5], &[2, 2]), domain(&[1, 5], &[2, 2])];
    let found = engine()
        .restore_from(&store.bucket(), &to_restore("here", "w", &dims), &asked)
        .await
        .unwrap();
    assert_eq!(found[0], array.part(&asked[0]));
    // Boxes that are equal share memory.
    assert_eq!(found[0].as_ptr(), found[1].as_ptr());
    let mut read: Vec<_> = store.take().gets.into_iter().collect();
    read.sort();
    let expected =
        ["manifest.ocdbt", "w/.zarray", "w/0.1", "w/1.1"].map(|name| (name.to_owned(), 1));
    assert_eq!(read, expected);
}

#[tokio::test]
async fn workers_write_their_own_pieces_and_one_the_metadata() {
    // A 2x2 mesh, the array cut in 2 uneven parts along its first dimension and copied along the second axis.
    let proto = OpSharding {
        r#type: Type::Other.into(),
        tile_assignment_dimensions: vec![2, 1, 2],
        iota_reshape_dims: vec![4],
        iota_transpose_perm: vec![0],
        replicate_on_last_tile_dim: true,
        ..Default::default()
    };
    let sharding = Sharding::new(&proto, 4).unwrap();
    let (store, dims) = (Counting::new(), [5, 3]);
    let array = Array::new(&dims);
    let domains = sharding.domains(&dims).unwrap();
    let mut save = waystation_checkpoint::SaveArray::sharded(
        "here",
        "w",
        PrimitiveType::Bf16,
        &dims,
        &sharding,
    )
    .unwrap();
    save.location = "here".to_owned();
    // Worker 0 has positions 0 and 1, worker 1 has 2 and 3.
    for worker in 0..2 {
        let mine: Vec<_> = sharding
            .first_holders()
            .into_iter()
            .filter(|position| position / 2 == worker)
            .map(|position| domains[position].clone())
            .collect();
        engine()
            .save_to(&store.bucket(), &save, array.pieces(&mine), worker == 0)
            .await
            .unwrap();
    }
    let mut written: Vec<_> = store.take().puts.into_iter().collect();
    written.sort();
    assert_eq!(
        written,
        ["w/.zarray", "w/0.0", "w/1.0"].map(|name| (name.to_owned(), 1))
    );
    let found = engine()
        .restore_from(&store.bucket(), &to_restore("here", "w", &dims), &domains)
        .await
        .unwrap();
    for (found, domain) in found.iter().zip(&domains) {
        assert_eq!(found, &array.part(domain));
    }
}

#[tokio::test]
async fn zero_size_arrays_have_metadata_alone() {
    let (store, dims) = (Counting::new(), [0, 3]);
    let piece = (domain(&[0, 0], &[0, 3]), Default::default());
    engine()
        .save_to(
            &store.bucket(),
            &to_save("here", "w", &dims, &[0, 3]),
            vec![piece],
            true,
        )
        .await
        .unwrap();
    assert_eq!(
        store.take().puts.into_keys().collect::<Vec<_>>(),
        ["w/.zarray"]
    );
    let asked = [IndexDomain::whole(&dims)];
    let found = engine()
        .restore_from(&store.bucket(), &to_restore("here", "w", &dims), &asked)
        .await
        .unwrap();
    assert!(found[0].is_empty());
}

#[tokio::test]
async fn the_array_at_the_location_itself_has_no_name() {
    let (store, dims) = (Counting::new(), [2]);
    let array = Array::new(&dims);
    let whole = [IndexDomain::whole(&dims)];
    engine()
        .save_to(
            &store.bucket(),
            &to_save("here", "", &dims, &dims),
            array.pieces(&whole),
            true,
        )
        .await
        .unwrap();
    assert!(store.take().puts.contains_key(".zarray"));
    let found = engine()
        .restore_from(&store.bucket(), &to_restore("here", "", &dims), &whole)
        .await
        .unwrap();
    assert_eq!(found[0], array.part(&whole[0]));
}

#[tokio::test]
async fn many_arrays_at_once_stay_within_small_limits_and_finish() {
    // Every array's chunks alone exceed the staging budget, which lets them through one by one.
    let engine = waystation_checkpoint::Engine::new(waystation_checkpoint::Config {
        host_memory_bytes: 1,
        requests: 1,
        threads: 1,
        ..waystation_checkpoint::Config::default()
    });
    let (store, dims) = (Counting::new(), [64, 64]);
    let array = Array::new(&dims);
    let mut saves = tokio::task::JoinSet::new();
    for i in 0..20 {
        let (engine, bucket, pieces) = (
            engine.clone(),
            store.bucket(),
            array.pieces(&boxes(&dims, &[32, 32])),
        );
        let save = to_save("here", &format!("a{i}"), &dims, &[32, 32]);
        saves.spawn(async move { engine.save_to(&bucket, &save, pieces, true).await });
    }
    while let Some(saved) = saves.join_next().await {
        assert!(saved.unwrap().unwrap() > 0);
    }
    let whole = [IndexDomain::whole(&dims)];
    for i in 0..20 {
        let restore = to_restore("here", &format!("a{i}"), &dims);
        let found = engine
            .restore_from(&store.bucket(), &restore, &whole)
            .await
            .unwrap();
        assert_eq!(found[0], array.part(&whole[0]));
    }
}

#[tokio::test]
async fn of_a_large_chunk_that_is_not_compressed_only_a_part_is_read() {
    let (store, dims) = (Counting::new(), [300, 512]);
    let array = Array::new(&dims);
    let mut save = to_save("here", "w", &dims, &[200, 512]);
    save.codec = Some(Codec::Raw);
    let pieces = array.pieces(&boxes(&dims, &[200, 512]));
    let (engine, bucket) = (engine(), store.bucket());
    engine.save_to(&bucket, &save, pieces, true).await.unwrap();
    let asked = to_restore("here", "w", &dims);
    // A few rows; a corner; two far boxes, between which all is read; both chunks; a whole one.
    for domains in [
        vec![domain(&[10, 0], &[20, 512])],
        vec![domain(&[150, 500], &[40, 12])],
        vec![domain(&[190, 7], &[1, 1]), domain(&[120, 3], &[5, 9])],
        vec![domain(&[180, 0], &[40, 512])],
        vec![domain(&[0, 0], &[200, 512])],
    ] {
        store.take();
        let found = engine.restore_from(&bucket, &asked, &domains).await;
        for (found, domain) in found.unwrap().iter().zip(&domains) {
            assert_eq!(found, &array.part(domain), "{domain:?}");
        }
        let first = domains.iter().map(|domain| domain.origin[0]).min().unwrap();
        let ends = domains
            .iter()
            .map(|domain| domain.origin[0] + domain.shape[0]);
        let rows = ends.max().unwrap() - first;
        let most = rows as u64 * 512 * 2 + 1000;
        let read = store.take().bytes;
        assert!(read <= most, "{domains:?}: {read} of {most}");
    }
    // One that ends early is found all the same, wherever that is.
    for len in [0, 100, 200 * 512 * 2 - 1, 200 * 512 * 2 + 1] {
        store.overwrite("w/0.0", vec![0; len]).await;
        let part = [domain(&[10, 0], &[20, 512])];
        let found = engine.restore_from(&bucket, &asked, &part).await;
        let error = found.unwrap_err().to_string();
        assert!(error.contains("w/0.0"), "{error}");
    }
}
