//! Arrays under other shardings and other types, for what no JAX client asks: uneven shards, specifications that do not fit, bytes
//! that are still to come.

use bytes::Bytes;
use waystation_client::{Client, Error, Request, Response, request};
use waystation_proto::xla::{
    OpSharding,
    ifrt::{
        ArraySpecProto, DTypeProto, ShapeProto,
        d_type_proto::Kind,
        proto::ArrayCopySemantics,
        proxy::{
            BitcastArraysRequest, CheckValueReadyRequest, CopyArraysRequest, DeleteArrayRequest,
            DestructArrayRequest, IsArrayDeletedRequest, ReshardArraysRequest,
        },
    },
    op_sharding,
};
use waystation_tests::{cluster::Cluster, shards::shards};

const INVALID_ARGUMENT: Option<i32> = Some(3);
const UNIMPLEMENTED: Option<i32> = Some(12);

fn floats(values: &[f32]) -> Bytes {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    bytes.into()
}

/// Tiles in each dimension; the devices in order, each tile on as many as are left over.
fn tiles(dims: &[i64], devices: usize) -> OpSharding {
    let tiles: i64 = dims.iter().product();
    let copies = i64::try_from(devices).expect("few") / tiles;
    let mut assignment = dims.to_vec();
    if copies > 1 {
        assignment.push(copies);
    }
    OpSharding {
        r#type: op_sharding::Type::Other as i32,
        tile_assignment_dimensions: assignment,
        tile_assignment_devices: (0..).take(devices).collect(),
        replicate_on_last_tile_dim: copies > 1,
        ..Default::default()
    }
}

fn spec(kind: Kind, dims: &[i64], devices: &[i32], sharding: OpSharding) -> ArraySpecProto {
    ArraySpecProto {
        dtype: Some(DTypeProto {
            version_number: 0,
            kind: kind as i32,
        }),
        shape: Some(ShapeProto {
            version_number: 0,
            dims: dims.to_vec(),
        }),
        sharding: Some(request::sharding(devices, sharding)),
        ..Default::default()
    }
}

/// An f32 array, whole on each of the devices.
async fn put(client: &Client, values: &[f32], dims: &[i64], devices: &[i32]) -> u64 {
    let handle = client.handle();
    client.store(handle, floats(values)).await.expect("stored");
    client
        .call(request::make_array(handle, dims, devices, None))
        .await
        .expect("made");
    handle
}

async fn reshard_as(
    client: &Client,
    array: u64,
    spec: ArraySpecProto,
    semantics: ArrayCopySemantics,
) -> Result<u64, Error> {
    let result = client.handle();
    let request = ReshardArraysRequest {
        array_handles: vec![array],
        array_specs: vec![spec],
        copy_semantics: semantics as i32,
        result_handles: vec![result],
    };
    client
        .call(Request::ReshardArraysRequest(request))
        .await
        .map(|_| result)
}

async fn reshard(client: &Client, array: u64, spec: ArraySpecProto) -> Result<u64, Error> {
    reshard_as(client, array, spec, ArrayCopySemantics::AlwaysCopy).await
}

async fn bitcast(client: &Client, array: u64, spec: ArraySpecProto) -> Result<u64, Error> {
    let result = client.handle();
    let request = BitcastArraysRequest {
        array_handles: vec![array],
        array_specs: vec![spec],
        copy_semantics: ArrayCopySemantics::ReuseInput as i32,
        result_handles: vec![result],
    };
    client
        .call(Request::BitcastArraysRequest(request))
        .await
        .map(|_| result)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uneven_shards_hold_what_the_sharding_says() {
    let cluster = Cluster::start(2, 2).await;
    let client = cluster.client().await;
    let values: Vec<f32> = (0..35u8).map(f32::from).collect();
    let all = [0, 1, 2, 3];
    let whole = put(&client, &values, &[5, 7], &[3]).await;
    let at = |rows: std::ops::Range<usize>, columns: std::ops::Range<usize>| {
        let picked: Vec<f32> = rows
            .flat_map(|row| columns.clone().map(move |column| (row * 7 + column) as f32))
            .collect();
        floats(&picked)
    };
    // Four tiles of two rows each: the last but one has one row, the last none.
    let rows = spec(Kind::F32, &[5, 7], &all, tiles(&[4, 1], 4));
    let by_rows = reshard(&client, whole, rows.clone()).await.expect("moved");
    let expected = [
        at(0..2, 0..7),
        at(2..4, 0..7),
        at(4..5, 0..7),
        at(0..0, 0..7),
    ];
    assert_eq!(shards(&client, by_rows, 4).await.expect("there"), expected);
    // Blocks of 3 x 4, over the devices in another order.
    let order = [2, 0, 3, 1];
    let blocks = spec(Kind::F32, &[5, 7], &order, tiles(&[2, 2], 4));
    let by_blocks = reshard(&client, by_rows, blocks.clone())
        .await
        .expect("moved");
    let expected = [
        at(0..3, 0..4),
        at(0..3, 4..7),
        at(3..5, 0..4),
        at(3..5, 4..7),
    ];
    assert_eq!(
        shards(&client, by_blocks, 4).await.expect("there"),
        expected
    );
    // Columns, each half on two devices, from blocks; then whole again on one device of each worker.
    let halves = spec(Kind::F32, &[5, 7], &all, tiles(&[1, 2], 4));
    let by_halves = reshard(&client, by_blocks, halves).await.expect("moved");
    let (left, right) = (at(0..5, 0..4), at(0..5, 4..7));
    let expected = [left.clone(), left, right.clone(), right];
    assert_eq!(
        shards(&client, by_halves, 4).await.expect("there"),
        expected
    );
    let two = spec(Kind::F32, &[5, 7], &[1, 2], OpSharding::default());
    let again = reshard(&client, by_halves, two).await.expect("moved");
    assert_eq!(
        shards(&client, again, 2).await.expect("there"),
        [floats(&values), floats(&values)]
    );
    // The sources are as they were.
    assert_eq!(
        shards(&client, whole, 1).await.expect("there"),
        [floats(&values)]
    );
}

/// Bytes that have come to the proxy or left it, by clients and by workers; and those that went from worker to worker.
async fn traffic(cluster: &Cluster) -> (u64, u64) {
    let page = cluster.status().await;
    let of = |name: &str| page[name].as_u64().expect("a counter");
    let (mut by_proxy, mut between) = (of("stored_bytes") + of("fetched_bytes"), 0);
    for worker in cluster.worker_status().await {
        by_proxy += worker.put_bytes + worker.local_bytes;
        // What was fetched from a worker and came to no other has gone to the proxy.
        by_proxy += worker.fetched_bytes;
        between += worker.pulled_bytes;
    }
    (by_proxy.saturating_sub(between), between)
}

/// Under `make soak` it is a gigabyte.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_moves_between_workers_does_not_pass_the_proxy_and_is_no_more_than_is_needed() {
    let side = match std::env::var_os("WAYSTATION_SOAK") {
        Some(_) => 16 << 10,
        None => 2 << 10,
    };
    let cluster = Cluster::start(2, 2).await;
    let client = cluster.client().await;
    let dims = [side, side];
    let bytes = u64::try_from(side * side * 4).expect("positive");
    let values = vec![1.0; usize::try_from(side * side).expect("positive")];
    let whole = put(&client, &values, &dims, &[0]).await;
    drop(values);
    let all = [0, 1, 2, 3];
    let rows = spec(Kind::F32, &dims, &all, tiles(&[4, 1], 4));
    let columns = spec(Kind::F32, &dims, &all, tiles(&[1, 4], 4));
    let ready = async |array: u64| {
        let request = CheckValueReadyRequest {
            value_handles: vec![array],
        };
        client
            .call(Request::CheckValueReadyRequest(request))
            .await
            .expect("ready");
    };
    ready(whole).await;
    let (proxy, mut before) = traffic(&cluster).await;
    let mut moved = async |array: u64| {
        ready(array).await;
        let (_, between) = traffic(&cluster).await;
        std::mem::replace(&mut before, between).abs_diff(between)
    };
    // The other worker's half.
    let by_rows = reshard(&client, whole, rows).await.expect("moved");
    assert_eq!(moved(by_rows).await, bytes / 2);
    // Each worker has half of its columns already.
    let by_columns = reshard(&client, by_rows, columns).await.expect("moved");
    assert_eq!(moved(by_columns).await, bytes / 2);
    // Two devices of one worker share what comes.
    let both = spec(Kind::F32, &dims, &[2, 3], OpSharding::default());
    let copies = reshard(&client, whole, both).await.expect("moved");
    assert_eq!(moved(copies).await, bytes);
    let done = Request::DeleteArrayRequest(DeleteArrayRequest {
        array_handle: vec![whole, by_rows, copies],
    });
    client.call(done).await.expect("deleted");
    let copied = client.handle();
    let copy = CopyArraysRequest {
        array_handles: vec![by_columns],
        device_ids: vec![2, 1, 0, 3],
        copy_semantics: ArrayCopySemantics::ReuseInput as i32,
        result_handles: vec![copied],
        ..Default::default()
    };
    client
        .call(Request::CopyArraysRequest(copy))
        .await
        .expect("copied");
    assert_eq!(moved(copied).await, bytes / 2);
    let (now, _) = traffic(&cluster).await;
    assert!(
        now.abs_diff(proxy) < 1 << 20,
        "{} bytes passed the proxy",
        now.abs_diff(proxy)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_array_is_resharded_before_its_bytes_are_there_and_after_it_is_forgotten() {
    let cluster = Cluster::start(2, 1).await;
    let client = cluster.client().await;
    let handle = client.handle();
    client
        .call(request::make_array(handle, &[4], &[0], None))
        .await
        .expect("pending");
    let halves = spec(Kind::F32, &[4], &[1, 0], tiles(&[2], 2));
    let moved = reshard_as(
        &client,
        handle,
        halves.clone(),
        ArrayCopySemantics::DonateInput,
    )
    .await
    .expect("pending");
    let deleted = Request::IsArrayDeletedRequest(IsArrayDeletedRequest {
        array_handle: handle,
    });
    match client.call(deleted).await.expect("known") {
        Response::IsArrayDeletedResponse(reply) => assert!(reply.deleted),
        other => panic!("{other:?}"),
    }
    let error = reshard(&client, handle, halves.clone())
        .await
        .expect_err("donated");
    assert_eq!(error.code(), INVALID_ARGUMENT, "{error}");
    let destruct = Request::DestructArrayRequest(DestructArrayRequest {
        array_handle: vec![handle],
    });
    client.call(destruct).await.expect("forgotten");
    client
        .store(handle, floats(&[1.0, 2.0, 3.0, 4.0]))
        .await
        .expect("stored");
    let expected = [floats(&[1.0, 2.0]), floats(&[3.0, 4.0])];
    assert_eq!(shards(&client, moved, 2).await.expect("there"), expected);
    // Bytes that never come right fail what was made of them on the other worker too.
    let bad = client.handle();
    client.store(bad, floats(&[1.0])).await.expect("stored");
    client
        .call(request::make_array(bad, &[4], &[0], None))
        .await
        .expect("the lie is found at the worker");
    let failed = reshard(&client, bad, halves).await.expect("accepted");
    let error = shards(&client, failed, 2).await.expect_err("poisoned");
    assert_eq!(error.code(), INVALID_ARGUMENT, "{error}");
    let everything = Request::DeleteArrayRequest(DeleteArrayRequest {
        array_handle: vec![moved, failed],
    });
    client.call(everything).await.expect("deleted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn specifications_that_do_not_fit_are_refused() {
    let cluster = Cluster::start(1, 2).await;
    let client = cluster.client().await;
    let array = put(&client, &[1.0, 2.0, 3.0, 4.0], &[4], &[0]).await;
    let unreduced = OpSharding {
        r#type: op_sharding::Type::Unreduced as i32,
        ..Default::default()
    };
    let cases = [
        (
            spec(Kind::F32, &[2, 2], &[0], OpSharding::default()),
            INVALID_ARGUMENT,
        ),
        (
            spec(Kind::S32, &[4], &[0], OpSharding::default()),
            INVALID_ARGUMENT,
        ),
        (
            spec(Kind::F32, &[4], &[7], OpSharding::default()),
            INVALID_ARGUMENT,
        ),
        (
            spec(Kind::F32, &[4], &[1, 1], tiles(&[2], 2)),
            INVALID_ARGUMENT,
        ),
        (
            spec(Kind::F32, &[4], &[0, 1], tiles(&[3], 3)),
            INVALID_ARGUMENT,
        ),
        (spec(Kind::F32, &[4], &[0, 1], unreduced), UNIMPLEMENTED),
        (ArraySpecProto::default(), INVALID_ARGUMENT),
    ];
    for (spec, code) in cases {
        let shown = format!("{spec:?}");
        let error = reshard(&client, array, spec).await.expect_err(&shown);
        assert_eq!(error.code(), code, "{shown}: {error}");
    }
    let none = ReshardArraysRequest {
        array_handles: vec![array],
        ..Default::default()
    };
    let error = client.call(Request::ReshardArraysRequest(none)).await;
    assert_eq!(
        error.expect_err("no specification").code(),
        INVALID_ARGUMENT
    );
    assert_eq!(
        shards(&client, array, 1).await.expect("as it was"),
        [floats(&[1.0, 2.0, 3.0, 4.0])]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_are_seen_under_another_type() {
    let cluster = Cluster::start(1, 2).await;
    let client = cluster.client().await;
    let values = [1.0, -2.0, 0.5, 4.0];
    let both = [0, 1];
    let array = put(&client, &values, &[2, 2], &both).await;
    let bytes = floats(&values);
    for (kind, dims) in [
        (Kind::U32, &[2i64, 2][..]),
        (Kind::F32, &[4]),
        (Kind::Bf16, &[2, 4]),
        (Kind::U8, &[16]),
        (Kind::C64, &[2]),
    ] {
        let seen = spec(kind, dims, &both, OpSharding::default());
        let seen = bitcast(&client, array, seen).await.expect("same size");
        assert_eq!(
            shards(&client, seen, 2).await.expect("there"),
            [bytes.clone(), bytes.clone()]
        );
    }
    for spec in [
        spec(Kind::F32, &[5], &both, OpSharding::default()),
        spec(Kind::F64, &[4], &both, OpSharding::default()),
        spec(Kind::F32, &[4], &[1, 0], OpSharding::default()),
        spec(Kind::F32, &[4], &[0], OpSharding::default()),
        spec(Kind::F32, &[4], &both, tiles(&[2], 2)),
        ArraySpecProto::default(),
    ] {
        let shown = format!("{spec:?}");
        let error = bitcast(&client, array, spec).await.expect_err(&shown);
        assert_eq!(error.code(), INVALID_ARGUMENT, "{shown}: {error}");
    }
    assert_eq!(
        shards(&client, array, 2).await.expect("as it was"),
        [bytes.clone(), bytes]
    );
}
