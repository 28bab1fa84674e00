//! Compiles the .proto files with protox, a Rust compiler of protos: no system protoc is needed.

use std::{env, fs, path::PathBuf};

use prost::Message as _;

/// The files that pull in all others.
const ROOTS: &[&str] = &[
    "xla/python/ifrt_proxy/common/grpc_ifrt_service.proto",
    "xla/python/ifrt_proxy/common/array_util.proto",
    "xla/python/ifrt_proxy/contrib/pathways/status_annotator.proto",
    "xla/python/ifrt/layout_serdes.proto",
    "xla/python/ifrt/sharding_serdes.proto",
    "xla/python/pjrt_ifrt/xla_compiler.proto",
    "xla/python/pjrt_ifrt/xla_sharding.proto",
    "xla/python/pjrt_ifrt/pjrt_layout_serdes.proto",
    "xla/xla.proto",
    "waystation/compile.proto",
    "waystation/executable.proto",
    "waystation/group.proto",
    "waystation/recording.proto",
    "waystation/worker.proto",
    "waystation/scheduler.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=protos");
    let descriptors = protox::compile(ROOTS, ["protos"])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    // The test that holds our messages against the installed jaxlib's reads this file.
    fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure()
        .bytes(".xla.ifrt.proxy.GrpcHostBufferStoreRequest")
        .bytes(".xla.ifrt.proxy.GrpcHostBufferLookupResponse")
        .bytes(".xla.ifrt.Serialized")
        .bytes(".waystation.compile")
        .bytes(".waystation.group")
        .bytes(".waystation.recording")
        .bytes(".waystation.worker")
        // An entry's bytes follow from what it says.
        .btree_map(".waystation.ExecutableInfo.cost")
        .boxed(".xla.ifrt.proxy.IfrtResponse.response.loaded_executable_metadata_response")
        .compile_fds(descriptors)?;
    Ok(())
}
