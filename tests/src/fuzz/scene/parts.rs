//! What the requests of a scene are made of.

use bytes::Bytes;
use prost::Message as _;
use waystation_client::{Request, request};
use waystation_proto::xla::{
    OpSharding,
    ifrt::{
        ArraySpecProto, DTypeProto, DeviceListProto, LayoutProto, PjRtLayoutProto, Serialized,
        ShapeProto,
        d_type_proto::Kind,
        proto::{ArrayCopySemantics, StringArrayContents},
    },
    op_sharding,
};

pub(super) const REUSE: i32 = ArrayCopySemantics::ReuseInput as i32;

/// Programs in the form in which JAX sends them.
pub(super) const STEP: &[u8] =
    include_bytes!("../../../../cache/stablehlo/tests/golden/step.mlirbc");
pub(super) const DONATED: &[u8] =
    include_bytes!("../../../../cache/stablehlo/tests/golden/donated.mlirbc");
/// x -> 2x over eight f32, cut in two.
pub(super) const WIDE: &[u8] = br#"module @jit_wide attributes {mhlo.num_partitions = 2 : i32} {
  func.func public @main(%arg0: tensor<8xf32> {mhlo.sharding = "{devices=[2]<=[2]}"}) -> (tensor<8xf32> {mhlo.sharding = "{devices=[2]<=[2]}"}) {
  %0 = stablehlo.add %arg0, %arg0 : tensor<8xf32>
  return %0 : tensor<8xf32> } }"#;

/// What a request of a kind is about, where that takes another way through the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sort {
    Usual,
    Strings,
    Plugin,
}

/// The kind of a request: its name in the protocol.
pub fn name(request: &Request) -> &'static str {
    names(request, Sort::Usual)
}

/// As [`name`], with what it is about.
pub(super) fn names(request: &Request, sort: Sort) -> &'static str {
    macro_rules! names {
        ($($kind:ident)*) => {
            match (request, sort) {$(
                (Request::$kind(_), Sort::Usual) => stringify!($kind),
                (Request::$kind(_), Sort::Strings) => concat!(stringify!($kind), ", strings"),
                (Request::$kind(_), Sort::Plugin) => concat!(stringify!($kind), ", plugin program"),
            )*}
        };
    }
    names! {
        InitRequest CheckFutureRequest CheckValueReadyRequest MakeArrayFromHostBufferRequest
        MakeArraysFromHostBufferShardsRequest MakeErrorArraysRequest AssembleArrayFromSingleDeviceArraysRequest
        RemapArraysRequest BitcastArraysRequest ReshardArraysRequest CopyToHostBufferRequest
        DisassembleIntoSingleDeviceArraysRequest DeleteArrayRequest CopyArraysRequest FullyReplicatedShardRequest
        IsArrayDeletedRequest DestructArrayRequest CompileRequest LoadedExecutableMetadataRequest
        LoadedExecutableExecuteRequest LoadedExecutableFetchExecuteResultRequest LoadedExecutableCostAnalysisRequest
        LoadedExecutableHumanReadableProgramTextRequest LoadedExecutableDeleteRequest
        LoadedExecutableIsDeletedRequest LoadedExecutableDestructRequest LoadedExecutableMpmdMetadataRequest
        LoadedExecutableMpmdCostAnalysisRequest LoadedHostCallbackPollRequest LoadedHostCallbackReturnRequest
        GetDefaultDeviceAssignmentRequest GetDefaultLayoutRequest
    }
}

pub(super) fn shape(dims: &[i64]) -> Option<ShapeProto> {
    Some(ShapeProto {
        version_number: 0,
        dims: dims.to_vec(),
    })
}

pub(super) fn f32_type() -> Option<DTypeProto> {
    Some(DTypeProto {
        version_number: 0,
        kind: Kind::F32 as i32,
    })
}

pub(super) fn list(ids: &[i32]) -> Option<DeviceListProto> {
    Some(DeviceListProto {
        version_number: 0,
        device_ids: ids.to_vec(),
    })
}

/// One dimension, cut in two.
pub(super) fn cut() -> OpSharding {
    OpSharding {
        r#type: op_sharding::Type::Other as i32,
        tile_assignment_dimensions: vec![2],
        iota_reshape_dims: vec![2],
        iota_transpose_perm: vec![0],
        ..Default::default()
    }
}

pub(super) fn spec(dims: &[i64], devices: &[i32], op: OpSharding) -> ArraySpecProto {
    ArraySpecProto {
        version_number: 0,
        dtype: f32_type(),
        shape: shape(dims),
        sharding: Some(request::sharding(devices, op)),
        layout: None,
    }
}

/// The bytes of `n` f32.
pub(super) fn floats(n: u8) -> Bytes {
    (0..n)
        .flat_map(|i| f32::from(i).to_le_bytes())
        .collect::<Vec<u8>>()
        .into()
}

/// The layout that every plugin knows, asked for by its name.
pub(super) fn row_major() -> LayoutProto {
    let layout = PjRtLayoutProto {
        xla_layout: Some(waystation_proto::xla::LayoutProto {
            minor_to_major: vec![0],
            ..Default::default()
        }),
        ..Default::default()
    };
    LayoutProto {
        serialized_layout: Some(Serialized {
            type_name: "xla::ifrt::PjRtLayout".to_owned(),
            data: layout.encode_to_vec().into(),
        }),
    }
}

/// A host buffer of strings.
pub(super) fn words(words: &[&str]) -> Bytes {
    let strings = words.iter().map(|word| word.as_bytes().to_vec()).collect();
    StringArrayContents { strings }.encode_to_vec().into()
}
