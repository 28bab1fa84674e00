use prost::Message as _;
use waystation_proto::xla::{DotDimensionNumbers, LayoutProto, PrimitiveType};

use super::*;

/// Made by `make.py` beside them: modules, and what XLA counts in each.
const MODULES: &[u8] = include_bytes!("../../../tests/golden/cost/modules.binpb");
const COSTS: &str = include_str!("../../../tests/golden/cost/costs.txt");

#[test]
fn the_numbers_are_xla_s_own() {
    let mut modules = MODULES;
    let mut wrong = Vec::new();
    for line in COSTS.lines() {
        let module = HloModuleProto::decode_length_delimited(&mut modules).unwrap();
        let mut words = line.split(' ');
        let name = words.next().unwrap();
        let theirs: Vec<f64> = words.map(|word| word.parse().unwrap()).collect();
        let ours = of(&module).unwrap();
        let ours = ["flops", "transcendentals", "bytes accessed"]
            .map(|number| ours.get(number).copied().unwrap_or(0.0));
        if ours != theirs.as_slice() {
            wrong.push(format!("{name}: {ours:?}, XLA counts {theirs:?}"));
        }
    }
    assert!(modules.is_empty());
    assert!(COSTS.lines().count() > 40);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn f32(dims: &[i64]) -> ShapeProto {
    let layout = LayoutProto {
        minor_to_major: (0..dims.len() as i64).rev().collect(),
        ..Default::default()
    };
    ShapeProto {
        element_type: PrimitiveType::F32.into(),
        dimensions: dims.to_vec(),
        layout: Some(Box::new(layout)),
        ..Default::default()
    }
}

fn op(id: i64, opcode: &str, shape: ShapeProto, operands: &[i64]) -> HloInstructionProto {
    HloInstructionProto {
        id,
        opcode: opcode.into(),
        shape: Some(shape),
        operand_ids: operands.to_vec(),
        ..Default::default()
    }
}

fn parameter(id: i64, number: i64, dims: &[i64]) -> HloInstructionProto {
    HloInstructionProto {
        parameter_number: number,
        ..op(id, "parameter", f32(dims), &[])
    }
}

fn computation(id: i64, instructions: Vec<HloInstructionProto>) -> HloComputationProto {
    HloComputationProto {
        id,
        root_id: instructions.last().map_or(0, |root| root.id),
        instructions,
        ..Default::default()
    }
}

/// The last one is the entry.
fn module(computations: Vec<HloComputationProto>) -> HloModuleProto {
    HloModuleProto {
        entry_computation_id: computations.last().map_or(0, |entry| entry.id),
        computations,
        ..Default::default()
    }
}

fn costs(module: &HloModuleProto) -> Vec<(String, f64)> {
    of(module).unwrap().into_iter().collect()
}

#[test]
fn a_matrix_product() {
    let dot = HloInstructionProto {
        dot_dimension_numbers: Some(DotDimensionNumbers {
            lhs_contracting_dimensions: vec![1],
        }),
        ..op(3, "dot", f32(&[64, 16]), &[1, 2])
    };
    let entry = vec![parameter(1, 0, &[64, 32]), parameter(2, 1, &[32, 16]), dot];
    let bytes = f64::from(4 * (64 * 32 + 32 * 16 + 64 * 16));
    assert_eq!(
        costs(&module(vec![computation(1, entry)])),
        [
            ("bytes accessed".to_owned(), bytes),
            ("flops".to_owned(), f64::from(2 * 64 * 32 * 16))
        ]
    );
}

#[test]
fn custom_calls_and_unknown_ops_count_their_bytes_alone() {
    for opcode in ["custom-call", "something-new"] {
        let entry = vec![
            parameter(1, 0, &[10]),
            op(2, opcode, f32(&[20]), &[1]),
            op(3, "tanh", f32(&[20]), &[2]),
        ];
        assert_eq!(
            costs(&module(vec![computation(1, entry)])),
            [
                ("bytes accessed".to_owned(), 40.0 + 80.0 + 160.0),
                ("transcendentals".to_owned(), 20.0)
            ]
        );
    }
}

#[test]
fn a_loop_counts_one_round_and_a_conditional_its_largest_branch() {
    let body = |id, opcode: &str, times| {
        let mut instructions = vec![parameter(1, 0, &[10])];
        instructions.extend((0..times).map(|index| op(2 + index, opcode, f32(&[10]), &[1])));
        computation(id, instructions)
    };
    let calling = |opcode: &str| {
        let call = HloInstructionProto {
            called_computation_ids: vec![7, 8],
            ..op(2, opcode, f32(&[10]), &[1])
        };
        let entry = computation(9, vec![parameter(1, 0, &[10]), call]);
        of(&module(vec![
            body(7, "add", 3),
            body(8, "exponential", 2),
            entry,
        ]))
        .unwrap()
    };
    let (both, largest) = (calling("while"), calling("conditional"));
    assert_eq!((both["flops"], both["transcendentals"]), (30.0, 20.0));
    assert_eq!((largest["flops"], largest["transcendentals"]), (30.0, 20.0));
    // Each op reads 40 bytes and writes 40.
    assert_eq!(both["bytes accessed"], 80.0 * 5.0);
    assert_eq!(largest["bytes accessed"], 80.0 * 3.0);
}

#[test]
fn damaged_modules_are_refused() {
    let call = |callee| HloInstructionProto {
        called_computation_ids: vec![callee],
        ..op(2, "call", f32(&[10]), &[1])
    };
    let entry = |last| computation(1, vec![parameter(1, 0, &[10]), last]);
    let most = i64::MAX;
    for (what, damaged) in [
        ("no entry", module(vec![])),
        (
            "operand",
            module(vec![entry(op(2, "add", f32(&[10]), &[1, 5]))]),
        ),
        (
            "operands",
            module(vec![entry(op(2, "gather", f32(&[10]), &[1]))]),
        ),
        ("callee", module(vec![entry(call(5))])),
        ("itself", module(vec![entry(call(1))])),
        (
            "negative",
            module(vec![entry(op(2, "add", f32(&[-1]), &[1, 1]))]),
        ),
        (
            "huge",
            module(vec![entry(op(2, "add", f32(&[most, most]), &[1, 1]))]),
        ),
        (
            "shape",
            module(vec![entry(HloInstructionProto {
                shape: None,
                ..op(2, "add", f32(&[10]), &[1, 1])
            })]),
        ),
        (
            "window",
            module(vec![entry(op(2, "convolution", f32(&[10]), &[1, 1]))]),
        ),
    ] {
        assert!(of(&damaged).is_err(), "{what}: {:?}", of(&damaged));
    }
}

/// Maps of maps multiply; a double holds that many only up to a point.
#[test]
fn counts_without_end_are_refused_and_take_no_time() {
    let wide = f32(&[i64::MAX]);
    let mut computations = vec![computation(
        0,
        vec![parameter(1, 0, &[]), op(2, "add", wide.clone(), &[1, 1])],
    )];
    for id in 1..100 {
        let map = HloInstructionProto {
            called_computation_ids: vec![id - 1],
            ..op(2, "map", wide.clone(), &[1])
        };
        computations.push(computation(
            id,
            vec![parameter(1, 0, &[]), map.clone(), map],
        ));
    }
    assert!(matches!(of(&module(computations)), Err(Error::Size)));
}
