//! Layouts on the device that a client asks for, and strides on the host.

use bytes::Bytes;
use prost::Message as _;
use waystation_client::{Client, Error, Request, Response, request};
use waystation_proto::xla::{
    self, OpSharding,
    ifrt::{
        ArraySpecProto, DTypeProto, LayoutProto, PjRtLayoutProto, Serialized, ShapeProto,
        d_type_proto::Kind,
        proto::ByteStrides,
        proxy::{
            CheckValueReadyRequest, CopyArraysRequest, CopyToHostBufferRequest,
            MakeArraysFromHostBufferShardsRequest,
            make_arrays_from_host_buffer_shards_request::{
                HostBuffer, MakeArraysFromHostBufferShardsSpec, ShardIndices,
            },
        },
    },
};
use waystation_tests::cluster::Cluster;

const INVALID_ARGUMENT: Option<i32> = Some(3);
const UNIMPLEMENTED: Option<i32> = Some(12);

fn floats(values: impl IntoIterator<Item = u8>) -> Bytes {
    let bytes = values.into_iter().flat_map(|v| f32::from(v).to_le_bytes());
    bytes.collect::<Vec<_>>().into()
}

/// An f32 array with a layout, by the request for one buffer.
async fn make(client: &Client, dims: &[i64], minor_to_major: &[i64], bytes: Bytes) -> u64 {
    let handle = client.handle();
    client.store(handle, bytes).await.expect("stored");
    let mut make = request::make_array(handle, dims, &[0, 1], None);
    if let Request::MakeArrayFromHostBufferRequest(make) = &mut make {
        let layout = PjRtLayoutProto {
            version_number: 0,
            xla_layout: Some(xla::LayoutProto {
                minor_to_major: minor_to_major.to_vec(),
                ..Default::default()
            }),
        };
        make.layout = Some(LayoutProto {
            serialized_layout: Some(Serialized {
                type_name: "xla::ifrt::PjRtLayout".to_owned(),
                data: layout.encode_to_vec().into(),
            }),
        });
    }
    client.call(make).await.expect("made");
    handle
}

/// The same by the request for shards, whose specs have layouts as text.
async fn make_shards(
    client: &Client,
    dims: &[i64],
    layout: &str,
    bytes: Bytes,
) -> Result<u64, Error> {
    let handle = client.handle();
    client.store(handle, bytes).await.expect("stored");
    let (dtype, shape) = (
        Some(DTypeProto {
            version_number: 0,
            kind: Kind::F32 as i32,
        }),
        Some(ShapeProto {
            version_number: 0,
            dims: dims.to_vec(),
        }),
    );
    let spec = MakeArraysFromHostBufferShardsSpec {
        addressable_shard_indices: vec![ShardIndices {
            indices: vec![0, 1],
        }],
        host_buffers: vec![HostBuffer {
            dtype,
            shape: shape.clone(),
            host_buffer_handle: handle,
            byte_strides: None,
        }],
        array_spec: Some(ArraySpecProto {
            version_number: 0,
            dtype,
            shape,
            sharding: Some(request::sharding(&[0, 1], OpSharding::default())),
            layout: Some(layout.as_bytes().to_vec()),
        }),
    };
    let make =
        Request::MakeArraysFromHostBufferShardsRequest(MakeArraysFromHostBufferShardsRequest {
            specs: vec![spec],
            array_handles: vec![handle],
        });
    client.call(make).await?;
    Ok(handle)
}

async fn fetch(
    client: &Client,
    array: u64,
    byte_strides: Option<Vec<i64>>,
) -> Result<Bytes, Error> {
    let buffer = client.handle();
    let copy = Request::CopyToHostBufferRequest(CopyToHostBufferRequest {
        array_handle: array,
        byte_strides: byte_strides.map(|strides| ByteStrides { strides }),
        host_buffer_handle: buffer,
    });
    client.call(copy).await?;
    client.lookup(buffer).await
}

async fn ready(client: &Client, array: u64) -> Result<Response, Error> {
    client
        .call(Request::CheckValueReadyRequest(CheckValueReadyRequest {
            value_handles: vec![array],
        }))
        .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn arrays_take_the_layouts_asked_for() {
    // The two devices are on two workers, so that copies cross over.
    let cluster = Cluster::start(2, 1).await;
    let client = cluster.client().await;
    let bytes = floats(0..6);
    let one = make(&client, &[2, 3], &[0, 1], bytes.clone()).await;
    let two = make_shards(&client, &[2, 3], "{0,1}", bytes.clone())
        .await
        .expect("made");
    let default = make_shards(&client, &[2, 3], "{1,0}", bytes.clone())
        .await
        .expect("made");
    let cube = make(&client, &[1, 2, 3], &[1, 0, 2], bytes.clone()).await;
    let copies = [client.handle(), client.handle()];
    client
        .call(Request::CopyArraysRequest(CopyArraysRequest {
            array_handles: vec![one, two],
            device_ids: vec![1, 0],
            result_handles: copies.to_vec(),
            ..Default::default()
        }))
        .await
        .expect("copied");
    for array in [one, two, default, cube, copies[0], copies[1]] {
        // Row-major on the host whatever the device has.
        assert_eq!(fetch(&client, array, None).await.expect("fetched"), bytes);
    }
    let transposed = floats([0, 3, 1, 4, 2, 5]);
    for array in [one, default, copies[0]] {
        let strides = Some(vec![4, 8]);
        assert_eq!(
            fetch(&client, array, strides).await.expect("fetched"),
            transposed
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layouts_of_nothing_and_layouts_that_do_not_fit() {
    let cluster = Cluster::start(1, 2).await;
    let client = cluster.client().await;
    let empty = make(&client, &[0, 3], &[0, 1], Bytes::new()).await;
    assert_eq!(fetch(&client, empty, None).await.expect("fetched"), "");
    assert_eq!(
        fetch(&client, empty, Some(vec![4, 4]))
            .await
            .expect("fetched"),
        ""
    );
    let twice = make(&client, &[2, 3], &[1, 1], floats(0..6)).await;
    let error = ready(&client, twice).await.expect_err("no order");
    assert_eq!(error.code(), INVALID_ARGUMENT, "{error}");
    for (layout, code) in [("{0,1:T(2,2)}", UNIMPLEMENTED), ("{0;1}", INVALID_ARGUMENT)] {
        let made = make_shards(&client, &[2, 3], layout, floats(0..6)).await;
        assert_eq!(made.expect_err(layout).code(), code, "{layout}");
    }
    let fine = make(&client, &[2, 3], &[0, 1], floats(0..6)).await;
    assert_eq!(
        fetch(&client, fine, None).await.expect("fetched"),
        floats(0..6)
    );
}
