//! Requests that need more than a line.

use prost::Message as _;
use waystation_proto::xla::{
    CompileOptionsProto, DeviceAssignmentProto, ExecutableBuildOptionsProto, OpSharding,
    device_assignment_proto::ComputationDevice,
    ifrt::{
        DTypeProto, DeviceListProto, ExecuteOptionsProto, HloShardingProto, Serialized, ShapeProto,
        ShardingProto, XlaCompileOptionsProto,
        d_type_proto::Kind,
        proto::ByteStrides,
        proxy::{
            CompileRequest, CopyToHostBufferRequest, LoadedExecutableExecuteRequest,
            MakeArrayFromHostBufferRequest, ifrt_request::Request,
        },
    },
};

/// An `HloSharding` over devices, in order.
pub fn sharding(devices: &[i32], op_sharding: OpSharding) -> ShardingProto {
    let proto = HloShardingProto {
        version_number: 0,
        devices: Some(DeviceListProto {
            version_number: 0,
            device_ids: devices.to_vec(),
        }),
        memory_kind: None,
        xla_op_sharding: Some(op_sharding),
    };
    ShardingProto {
        serialized_sharding: Some(Serialized {
            type_name: "xla::ifrt::HloSharding".to_owned(),
            data: proto.encode_to_vec().into(),
        }),
    }
}

/// An f32 array of the host buffer's bytes, whole on each of the devices. The array's handle is the buffer's.
pub fn make_array(
    handle: u64,
    dims: &[i64],
    devices: &[i32],
    byte_strides: Option<Vec<i64>>,
) -> Request {
    Request::MakeArrayFromHostBufferRequest(MakeArrayFromHostBufferRequest {
        dtype: Some(DTypeProto {
            version_number: 0,
            kind: Kind::F32 as i32,
        }),
        shape: Some(ShapeProto {
            version_number: 0,
            dims: dims.to_vec(),
        }),
        sharding: Some(sharding(devices, OpSharding::default())),
        layout: None,
        host_buffer_handle: handle,
        byte_strides: byte_strides.map(|strides| ByteStrides { strides }),
        array_handle: Some(handle),
    })
}

/// The type of an array of strings.
pub fn string_type() -> Option<DTypeProto> {
    Some(DTypeProto {
        version_number: 0,
        kind: Kind::String as i32,
    })
}

/// An array of the host buffer's strings, whole on each of the devices. The array's handle is the buffer's.
pub fn make_strings(handle: u64, dims: &[i64], devices: &[i32]) -> Request {
    let mut request = make_array(handle, dims, devices, None);
    if let Request::MakeArrayFromHostBufferRequest(request) = &mut request {
        request.dtype = string_type();
    }
    request
}

/// Reads an array into a host buffer, dense row-major.
pub fn copy_to_host(array_handle: u64, host_buffer_handle: u64) -> Request {
    Request::CopyToHostBufferRequest(CopyToHostBufferRequest {
        array_handle,
        byte_strides: None,
        host_buffer_handle,
    })
}

/// Compiles an MLIR module, one partition a device.
pub fn compile(program: &[u8], devices: &[i32]) -> Request {
    let assignment = DeviceAssignmentProto {
        replica_count: 1,
        computation_count: i32::try_from(devices.len()).unwrap_or(i32::MAX),
        computation_devices: devices
            .iter()
            .map(|&id| ComputationDevice {
                replica_device_ids: vec![i64::from(id)],
            })
            .collect(),
    };
    let build = ExecutableBuildOptionsProto {
        num_replicas: 1,
        num_partitions: i64::try_from(devices.len()).unwrap_or(i64::MAX),
        use_spmd_partitioning: true,
        device_assignment: Some(assignment),
        ..Default::default()
    };
    let options = XlaCompileOptionsProto {
        compile_options: Some(CompileOptionsProto {
            executable_build_options: Some(build),
            ..Default::default()
        }),
        ..Default::default()
    };
    Request::CompileRequest(CompileRequest {
        program: Some(Serialized {
            type_name: "xla::ifrt::XlaProgram".to_owned(),
            data: program.to_vec().into(),
        }),
        compile_options: Some(Serialized {
            type_name: "xla::ifrt::XlaCompileOptions".to_owned(),
            data: options.encode_to_vec().into(),
        }),
        host_callbacks: Vec::new(),
    })
}

/// Executes a program; without result handles as the first time, with them later.
pub fn execute(executable: u64, args: &[u64], results: &[u64], launch_id: i32) -> Request {
    Request::LoadedExecutableExecuteRequest(LoadedExecutableExecuteRequest {
        loaded_executable_handle: executable,
        args_handles: args.to_vec(),
        execute_options: Some(ExecuteOptionsProto {
            launch_id,
            ..Default::default()
        }),
        device_ids: Vec::new(),
        result_array_handle: results.to_vec(),
        result_status_handle: 0,
    })
}
