use waystation_proto::xla::{
    HloBufferDonorProto, HloInputOutputAliasProto, LayoutProto,
    hlo_buffer_donor_proto::BufferDonorEntryProto, hlo_input_output_alias_proto::AliasEntryProto,
    op_sharding::Type,
};

use super::*;

/// `sharded` takes bf16[8, 12] in a 2x4 mesh and an unused f32[6]; gives bf16[8, 12] and bf16[5, 12].
const SHARDED: &[u8] = include_bytes!("../../../../../cache/stablehlo/tests/golden/sharded.mlirbc");
const NOTHING: &[u8] = include_bytes!("../../../../../cache/stablehlo/tests/golden/nothing.mlirbc");
const DONATED: &[u8] = include_bytes!("../../../../../cache/stablehlo/tests/golden/donated.mlirbc");

fn shape(element: PrimitiveType, dims: &[i64]) -> ShapeProto {
    let layout = LayoutProto {
        minor_to_major: (0..dims.len() as i64).rev().collect(),
        ..Default::default()
    };
    ShapeProto {
        element_type: element.into(),
        dimensions: dims.to_vec(),
        layout: Some(Box::new(layout)),
        ..Default::default()
    }
}

fn tuple(parts: Vec<ShapeProto>) -> ShapeProto {
    ShapeProto {
        element_type: PrimitiveType::Tuple.into(),
        tuple_shapes: parts,
        ..Default::default()
    }
}

fn cut(tiles: &[i64]) -> OpSharding {
    OpSharding {
        r#type: Type::Other.into(),
        tile_assignment_dimensions: tiles.to_vec(),
        ..Default::default()
    }
}

fn module(parameters: Vec<ShapeProto>, result: ShapeProto) -> HloModuleProto {
    HloModuleProto {
        name: "jit_f".into(),
        host_program_shape: Some(ProgramShapeProto {
            parameters,
            result: Some(result),
            ..Default::default()
        }),
        ..Default::default()
    }
}

fn encode(module: HloModuleProto) -> Vec<u8> {
    HloModuleProtoWithConfig {
        hlo_module: Some(module),
    }
    .encode_to_vec()
}

fn facts(num_partitions: u32) -> PluginFacts {
    PluginFacts {
        num_replicas: 1,
        num_partitions,
        default_memory_kind: "device".into(),
        ..Default::default()
    }
}

/// The module that XLA makes of `sharded`: one device's shapes.
fn sharded_module() -> HloModuleProto {
    let (bf16, f32) = (PrimitiveType::Bf16, PrimitiveType::F32);
    let result = tuple(vec![shape(bf16, &[4, 12]), shape(bf16, &[3, 3])]);
    HloModuleProto {
        spmd_parameters_shardings: vec![cut(&[2, 4]), OpSharding::default()],
        spmd_output_sharding: Some(OpSharding {
            r#type: Type::Tuple.into(),
            tuple_shardings: vec![cut(&[2, 1, 4]), cut(&[2, 4])],
            ..Default::default()
        }),
        buffer_donor: Some(HloBufferDonorProto {
            entries: vec![BufferDonorEntryProto {
                parameter_number: 0,
                ..Default::default()
            }],
        }),
        ..module(vec![shape(bf16, &[4, 3]), shape(f32, &[6])], result)
    }
}

fn dims(values: &[Value]) -> Vec<(PrimitiveType, Vec<i64>)> {
    values
        .iter()
        .map(|value| (value.dtype(), value.dims.clone()))
        .collect()
}

#[test]
fn shapes_are_global_also_where_a_dimension_does_not_divide() {
    let mut facts = facts(8);
    facts.result_memory_kinds = vec!["device".into(), "pinned_host".into()];
    facts.fingerprint = vec![1, 2];
    let info = describe(SHARDED, &encode(sharded_module()), &facts).expect("described");
    let (bf16, f32) = (PrimitiveType::Bf16, PrimitiveType::F32);
    assert_eq!(
        dims(&info.parameters),
        [(bf16, vec![8, 12]), (f32, vec![6])]
    );
    assert_eq!(
        dims(&info.results),
        [(bf16, vec![8, 12]), (bf16, vec![5, 12])],
        "5 rows, not two pieces of 3"
    );
    assert_eq!(info.parameters[0].sharding, Some(cut(&[2, 4])));
    assert_eq!(info.results[0].sharding, Some(cut(&[2, 1, 4])));
    assert_eq!(
        info.results[1]
            .layout
            .as_ref()
            .map(|layout| layout.minor_to_major.clone()),
        Some(vec![1, 0])
    );
    let kinds: Vec<_> = info
        .results
        .iter()
        .map(|value| value.memory_kind.as_str())
        .collect();
    assert_eq!(kinds, ["device", "pinned_host"]);
    assert_eq!(
        (
            info.name.as_str(),
            info.num_partitions,
            info.donated_parameters.as_slice()
        ),
        ("jit_f", 8, &[0][..])
    );
    assert_eq!(info.fingerprint, [1, 2]);
}

#[test]
fn an_unread_program_gets_its_shapes_from_the_pieces() {
    let info = describe(b"text", &encode(sharded_module()), &facts(8)).expect("described");
    let (bf16, f32) = (PrimitiveType::Bf16, PrimitiveType::F32);
    assert_eq!(
        dims(&info.parameters),
        [(bf16, vec![8, 12]), (f32, vec![6])]
    );
    assert_eq!(
        dims(&info.results),
        [(bf16, vec![8, 12]), (bf16, vec![6, 12])]
    );
}

#[test]
fn a_program_with_other_values_is_not_believed() {
    let info = describe(NOTHING, &encode(sharded_module()), &facts(8)).expect("described");
    assert_eq!((info.parameters.len(), info.results.len()), (2, 2));
    assert_eq!(info.results[0].dims, [8, 12]);
}

#[test]
fn a_single_device_program_is_replicated_whatever_the_module_says() {
    let mut module = module(
        vec![shape(PrimitiveType::F32, &[4, 8])],
        shape(PrimitiveType::F32, &[4, 8]),
    );
    module.spmd_output_sharding = Some(cut(&[2, 1]));
    let info = describe(b"", &encode(module), &facts(1)).expect("described");
    assert_eq!(info.results[0].sharding, Some(OpSharding::default()));
    assert_eq!(info.results[0].dims, [4, 8]);
    assert_eq!(info.results.len(), 1, "a result that is no tuple");
}

#[test]
fn a_program_without_values_has_none() {
    let info =
        describe(NOTHING, &encode(module(vec![], tuple(vec![]))), &facts(1)).expect("described");
    assert_eq!((info.parameters.len(), info.results.len()), (0, 0));
}

#[test]
fn donation_comes_from_aliases_and_donors_with_and_without_a_tuple() {
    let (f32, s8) = (PrimitiveType::F32, PrimitiveType::S8);
    let parts = vec![shape(f32, &[4, 8]), shape(f32, &[]), shape(s8, &[3])];
    let result = tuple(vec![shape(f32, &[4, 8]), shape(s8, &[3])]);
    let alias = |number, index: &[i64]| AliasEntryProto {
        parameter_number: number,
        parameter_shape_index: index.to_vec(),
        ..Default::default()
    };
    let donor = |number, index: &[i64]| BufferDonorEntryProto {
        parameter_number: number,
        parameter_shape_index: index.to_vec(),
    };
    for (parameters, aliases, donors) in [
        (
            parts.clone(),
            vec![alias(2, &[])],
            vec![donor(0, &[]), donor(2, &[]), donor(9, &[])],
        ),
        (
            vec![tuple(parts)],
            vec![alias(0, &[2])],
            vec![donor(0, &[0])],
        ),
    ] {
        let module = HloModuleProto {
            input_output_alias: Some(HloInputOutputAliasProto { entries: aliases }),
            buffer_donor: Some(HloBufferDonorProto { entries: donors }),
            ..module(parameters, result.clone())
        };
        let info = describe(DONATED, &encode(module), &facts(1)).expect("described");
        assert_eq!(info.donated_parameters, [0, 2]);
        assert_eq!(dims(&info.parameters)[1], (f32, vec![]));
    }
}

#[test]
fn a_parameter_in_the_hosts_memory_is_told_by_its_layout() {
    let mut host = shape(PrimitiveType::F32, &[2]);
    host.layout.as_mut().expect("set").memory_space = HOST_MEMORY_SPACE;
    let info =
        describe(b"", &encode(module(vec![host.clone()], host)), &facts(1)).expect("described");
    assert_eq!(info.parameters[0].memory_kind, "pinned_host");
}

#[test]
fn an_optimized_program_that_lacks_its_parts_is_refused() {
    let empty = encode(HloModuleProto::default());
    assert!(matches!(
        describe(b"", &[], &facts(1)),
        Err(Error::Incomplete { what: "its module" })
    ));
    assert!(matches!(
        describe(b"", &empty, &facts(1)),
        Err(Error::Incomplete {
            what: "its program shape"
        })
    ));
    assert!(matches!(
        describe(b"", &[0xff], &facts(1)),
        Err(Error::Optimized(_))
    ));
}
