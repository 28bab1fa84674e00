//! Arrays of strings, which live in the proxy: no worker is told of them.

use bytes::Bytes;
use prost::Message as _;
use waystation_client::{Client, Error, Request, Response, request};
use waystation_proto::xla::{
    OpSharding,
    ifrt::{
        ShapeProto,
        proto::StringArrayContents,
        proxy::{
            AssembleArrayFromSingleDeviceArraysRequest, CheckValueReadyRequest, CopyArraysRequest,
            DestructArrayRequest, DisassembleIntoSingleDeviceArraysRequest,
            FullyReplicatedShardRequest,
        },
    },
    op_sharding,
};
use waystation_tests::cluster::Cluster;

const INVALID_ARGUMENT: Option<i32> = Some(3);

/// y = x + x over two f32.
const DOUBLE: &[u8] =
    b"module @jit_double { func.func public @main(%arg0: tensor<2xf32>) -> tensor<2xf32> {
  %0 = stablehlo.add %arg0, %arg0 : tensor<2xf32>
  return %0 : tensor<2xf32> } }";

fn contents(strings: &[&str]) -> Bytes {
    let strings = strings.iter().map(|s| s.as_bytes().to_vec()).collect();
    StringArrayContents { strings }.encode_to_vec().into()
}

async fn fetch(client: &Client, array: u64) -> Result<Vec<String>, Error> {
    let buffer = client.handle();
    client.call(request::copy_to_host(array, buffer)).await?;
    let bytes = client.lookup(buffer).await?;
    client.delete(buffer).await?;
    let contents = StringArrayContents::decode(bytes).expect("well-formed");
    let strings = contents.strings.into_iter();
    Ok(strings
        .map(|s| String::from_utf8(s).expect("text"))
        .collect())
}

async fn ready(client: &Client, array: u64) -> Result<Response, Error> {
    client
        .call(Request::CheckValueReadyRequest(CheckValueReadyRequest {
            value_handles: vec![array],
        }))
        .await
}

async fn put(client: &Client, strings: &[&str], devices: &[i32]) -> u64 {
    let handle = client.handle();
    let dims = [i64::try_from(strings.len()).expect("small")];
    client
        .store(handle, contents(strings))
        .await
        .expect("stored");
    client
        .call(request::make_strings(handle, &dims, devices))
        .await
        .expect("made");
    handle
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strings_are_copied_taken_apart_put_together_and_fetched() {
    let cluster = Cluster::start(1, 2).await;
    let client = cluster.client().await;
    let array = put(&client, &["one", "zwei"], &[0, 1]).await;
    ready(&client, array).await.expect("ready");
    assert_eq!(
        fetch(&client, array).await.expect("fetched"),
        ["one", "zwei"]
    );

    let (left, right, whole, copy, one) = (
        client.handle(),
        client.handle(),
        client.handle(),
        client.handle(),
        client.handle(),
    );
    let requests = [
        Request::DisassembleIntoSingleDeviceArraysRequest(
            DisassembleIntoSingleDeviceArraysRequest {
                array_handle: array,
                result_handles: vec![left, right],
                ..Default::default()
            },
        ),
        Request::AssembleArrayFromSingleDeviceArraysRequest(
            AssembleArrayFromSingleDeviceArraysRequest {
                shape: Some(ShapeProto {
                    version_number: 0,
                    dims: vec![4],
                }),
                sharding: Some(request::sharding(
                    &[0, 1],
                    OpSharding {
                        r#type: op_sharding::Type::Other as i32,
                        tile_assignment_dimensions: vec![2],
                        iota_reshape_dims: vec![2],
                        iota_transpose_perm: vec![0],
                        ..Default::default()
                    },
                )),
                single_device_array_handles: vec![left, right],
                result_handle: whole,
                ..Default::default()
            },
        ),
        Request::CopyArraysRequest(CopyArraysRequest {
            array_handles: vec![left],
            device_ids: vec![1],
            result_handles: vec![copy],
            ..Default::default()
        }),
        Request::FullyReplicatedShardRequest(FullyReplicatedShardRequest {
            array_handle: array,
            result_handle: one,
            ..Default::default()
        }),
        Request::DestructArrayRequest(DestructArrayRequest {
            array_handle: vec![array, left],
        }),
    ];
    for request in requests {
        let shown = format!("{request:?}");
        client.call(request).await.expect(&shown);
    }
    for handle in [right, copy, one] {
        assert_eq!(
            fetch(&client, handle).await.expect("fetched"),
            ["one", "zwei"]
        );
    }
    // Each shard of a sharded array is fetched by itself.
    let error = fetch(&client, whole).await.expect_err("two shards");
    assert_eq!(error.code(), INVALID_ARGUMENT, "{error}");
    assert_eq!(cluster.worker_status().await[0].shards, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strings_that_come_later_or_wrong_are_told_to_who_asks() {
    let cluster = Cluster::start(1, 1).await;
    let client = cluster.client().await;
    // The array first, its bytes after: nothing waits but what needs them.
    let handle = client.handle();
    client
        .call(request::make_strings(handle, &[1], &[0]))
        .await
        .expect("made");
    let buffer = client.handle();
    let fetched = client.send(request::copy_to_host(handle, buffer)).await;
    let other = put(&client, &["other"], &[0]).await;
    assert_eq!(fetch(&client, other).await.expect("fetched"), ["other"]);
    client
        .store(handle, contents(&["late"]))
        .await
        .expect("stored");
    fetched.wait().await.expect("there by now");
    let bytes = client.lookup(buffer).await.expect("offered");
    assert_eq!(bytes, contents(&["late"]));

    // Three strings for two elements.
    let handle = client.handle();
    client
        .store(handle, contents(&["a", "b", "c"]))
        .await
        .expect("stored");
    client
        .call(request::make_strings(handle, &[2], &[0]))
        .await
        .expect("made");
    let error = ready(&client, handle).await.expect_err("too many");
    assert_eq!(error.code(), INVALID_ARGUMENT, "{error}");
    assert!(error.to_string().contains("3 strings"), "{error}");
    let error = fetch(&client, handle).await.expect_err("too many");
    assert_eq!(error.code(), INVALID_ARGUMENT, "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_does_not_take_strings() {
    let cluster = Cluster::start(1, 1).await;
    let client = cluster.client().await;
    let Response::CompileResponse(compiled) = client
        .call(request::compile(DOUBLE, &[0]))
        .await
        .expect("compiles")
    else {
        panic!("another reply");
    };
    let strings = put(&client, &["1.0", "2.0"], &[0]).await;
    let execute = request::execute(compiled.loaded_executable_handle, &[strings], &[], 1);
    let error = client.call(execute).await.expect_err("no numbers");
    assert_eq!(error.code(), INVALID_ARGUMENT, "{error}");
    assert!(error.to_string().contains("array of strings"), "{error}");
}
