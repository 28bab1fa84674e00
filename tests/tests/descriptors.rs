//! Our messages against the installed jaxlib's: the test that keeps us wire-compatible.

use std::collections::BTreeSet;

use prost::Message as _;
use prost_types::{FileDescriptorProto, FileDescriptorSet};
use waystation_tests::{
    agreement::{Difference, differences},
    jaxlib,
};

/// What we declare and an older jaxlib does not have yet: (the first tested version that has it, full name). A field that
/// is not in this list must be in every jaxlib that is tested.
const NEWER: &[(&str, &str)] = &[
    ("0.12.0.1", "xla.NamedShardingProto.ReductionOpProto"),
    ("0.12.0.1", "xla.NamedShardingProto.reduction_op"),
    ("0.12.0.1", "xla.ifrt.DTypeProto.Kind.KIND_F6E2M3FN"),
    ("0.12.0.1", "xla.ifrt.DTypeProto.Kind.KIND_F6E3M2FN"),
    (
        "0.12.0.1",
        "xla.ifrt.XlaCompileOptionsProto.outputs_bundle_slice_sizes",
    ),
    ("0.12.0.1", "xla.ifrt.XlaCompileOptionsProto.version_number"),
];

/// The files that agree with public ones; `waystation/` is ours alone.
fn ours() -> Vec<FileDescriptorProto> {
    FileDescriptorSet::decode(waystation_proto::DESCRIPTORS)
        .expect("our own descriptors decode")
        .file
        .into_iter()
        .filter(|file| !file.name().starts_with("waystation/"))
        .collect()
}

/// "0.10.2" -> [0, 10, 2]
fn version(text: &str) -> Vec<u32> {
    text.split('.')
        .map_while(|part| part.parse().ok())
        .collect()
}

#[test]
fn every_field_we_declare_is_the_same_in_the_installed_jaxlibs() {
    let ours = ours();
    let names: Vec<&str> = ours.iter().map(|file| file.name()).collect();
    assert!(
        names.contains(&"xla/python/ifrt_proxy/common/ifrt_service.proto"),
        "no proxy messages in {names:?}"
    );

    let mut wrong = Vec::new();
    for jaxlib in jaxlib::installed().unwrap_or_else(|error| panic!("{error}")) {
        let theirs = jaxlib
            .descriptors(&names)
            .unwrap_or_else(|error| panic!("{error}"));
        let lacking: Vec<_> = names
            .iter()
            .filter(|name| !theirs.contains_key(**name))
            .collect();
        if !lacking.is_empty() {
            wrong.push(format!(
                "jaxlib {}: has no files {lacking:?}",
                jaxlib.version
            ));
        }
        let allowed: BTreeSet<&str> = NEWER
            .iter()
            .filter(|(since, _)| version(&jaxlib.version) < version(since))
            .map(|(_, name)| *name)
            .collect();
        for difference in differences(&ours, theirs.values()) {
            match &difference {
                Difference::Missing(name) if allowed.contains(name.as_str()) => {
                    eprintln!("jaxlib {}: {difference} (older)", jaxlib.version);
                }
                _ => wrong.push(format!("jaxlib {}: {difference}", jaxlib.version)),
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{} differences:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}
