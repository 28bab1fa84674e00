//! A client's side of programs over four devices, which may be several workers'.

use std::time::Duration;

use bytes::Bytes;
use waystation_client::{Client, Error, Request, Response, request};
use waystation_proto::xla::{
    OpSharding,
    ifrt::{
        ShapeProto, ShardingProto,
        proxy::{
            AssembleArrayFromSingleDeviceArraysRequest, CheckValueReadyRequest,
            DestructArrayRequest,
        },
    },
    op_sharding,
};

use crate::shards::shards;

/// The mean of all four elements and one, everywhere. An all-reduce over four devices.
pub const MEAN_AND_ONE: &str =
    "module @jit_mean attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<4xf32> {mhlo.sharding = \"{devices=[4]<=[4]}\"})
      -> (tensor<4xf32> {mhlo.sharding = \"{devices=[4]<=[4]}\"}) {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %sum = stablehlo.reduce(%arg0 init: %zero) applies stablehlo.add across dimensions = [0]
      : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
    %quarter = stablehlo.constant dense<0.25> : tensor<f32>
    %mean = stablehlo.multiply %sum, %quarter : tensor<f32>
    %one = stablehlo.constant dense<1.0> : tensor<f32>
    %next = stablehlo.add %mean, %one : tensor<f32>
    %all = stablehlo.broadcast_in_dim %next, dims = [] : (tensor<f32>) -> tensor<4xf32>
    return %all : tensor<4xf32> } }";

/// A loop over an all-reduce of four devices, which goes on for as long as the sum is what it always is.
pub const ENDLESS: &str =
    "module @jit_endless attributes {mhlo.num_partitions = 4 : i32, mhlo.num_replicas = 1 : i32} {
  func.func public @main(%arg0: tensor<4xf32> {mhlo.sharding = \"{devices=[4]<=[4]}\"})
      -> (tensor<4xf32> {mhlo.sharding = \"{devices=[4]<=[4]}\"}) {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %low = stablehlo.constant dense<-1000.0> : tensor<f32>
    %end = stablehlo.while(%x = %arg0) : tensor<4xf32>
    cond {
      %sum = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0]
        : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
      %on = stablehlo.compare GT, %sum, %low : (tensor<f32>, tensor<f32>) -> tensor<i1>
      stablehlo.return %on : tensor<i1>
    } do {
      %next = stablehlo.cosine %x : tensor<4xf32>
      stablehlo.return %next : tensor<4xf32>
    }
    return %end : tensor<4xf32> } }";

/// x + 1 on one device.
pub const ADD_ONE: &str =
    "module @jit_add_one { func.func public @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.constant dense<1.0> : tensor<4xf32>
  %1 = stablehlo.add %arg0, %0 : tensor<4xf32>
  return %1 : tensor<4xf32> } }";

/// Their bytes.
pub fn floats(values: &[f32]) -> Bytes {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    bytes.into()
}

/// Compiles for those devices.
///
/// # Errors
/// What the server answers.
pub async fn compile(client: &Client, program: &str, devices: &[i32]) -> Result<u64, Error> {
    let request = request::compile(program.as_bytes(), devices);
    match client.call(request).await? {
        Response::CompileResponse(compiled) => Ok(compiled.loaded_executable_handle),
        _ => Err(Error::WrongReply),
    }
}

fn in_quarters(devices: &[i32; 4]) -> ShardingProto {
    let quarters = OpSharding {
        r#type: op_sharding::Type::Other as i32,
        tile_assignment_dimensions: vec![4],
        tile_assignment_devices: vec![0, 1, 2, 3],
        ..Default::default()
    };
    request::sharding(devices, quarters)
}

/// An array of four values, one on each of the devices, whose bytes are still to come; and the handles for them.
///
/// # Panics
/// When the server refuses.
pub async fn announce(client: &Client, devices: &[i32; 4]) -> (u64, Vec<u64>) {
    let mut pieces = Vec::new();
    for &device in devices {
        let piece = client.handle();
        let made = request::make_array(piece, &[1], &[device], None);
        client.call(made).await.expect("made");
        pieces.push(piece);
    }
    let array = client.handle();
    let request = AssembleArrayFromSingleDeviceArraysRequest {
        shape: Some(ShapeProto {
            version_number: 0,
            dims: vec![4],
        }),
        sharding: Some(in_quarters(devices)),
        single_device_array_handles: pieces.clone(),
        result_handle: array,
        ..Default::default()
    };
    let request = Request::AssembleArrayFromSingleDeviceArraysRequest(request);
    client.call(request).await.expect("assembled");
    let forgotten = DestructArrayRequest {
        array_handle: pieces.clone(),
    };
    client
        .call(Request::DestructArrayRequest(forgotten))
        .await
        .expect("forgotten");
    (array, pieces)
}

/// An array of four values, one on each of the devices.
///
/// # Panics
/// When the server refuses.
pub async fn put(client: &Client, values: [f32; 4], devices: &[i32; 4]) -> u64 {
    let (array, pieces) = announce(client, devices).await;
    for (piece, value) in pieces.into_iter().zip(values) {
        client.store(piece, floats(&[value])).await.expect("stored");
    }
    array
}

/// The values.
///
/// # Errors
/// What the array failed with.
///
/// # Panics
/// When a shard is no float.
pub async fn values(client: &Client, array: u64) -> Result<Vec<f32>, Error> {
    let quarters = shards(client, array, 4).await?;
    let one = |bytes: Bytes| f32::from_le_bytes(bytes[..].try_into().expect("four bytes"));
    Ok(quarters.into_iter().map(one).collect())
}

/// Waits for an array.
///
/// # Errors
/// What the array failed with.
pub async fn ready(client: &Client, array: u64) -> Result<Response, Error> {
    let request = CheckValueReadyRequest {
        value_handles: vec![array],
    };
    client.call(Request::CheckValueReadyRequest(request)).await
}

/// Executes without waiting; the result's handle.
pub async fn execute(client: &Client, program: u64, argument: u64) -> u64 {
    let result = client.handle();
    let request = request::execute(program, &[argument], &[result], 1);
    drop(client.send(request).await);
    result
}

/// Drops an array.
pub async fn forget(client: &Client, array: u64) {
    let request = DestructArrayRequest {
        array_handle: vec![array],
    };
    drop(client.send(Request::DestructArrayRequest(request)).await);
}

/// Stuck is what takes longer than this.
///
/// # Panics
/// Then.
pub async fn in_time<T>(work: impl Future<Output = T>) -> T {
    let limit = Duration::from_secs(600);
    tokio::time::timeout(limit, work)
        .await
        .expect("it is stuck")
}
