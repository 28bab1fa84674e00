//! Signatures of real artifacts (`golden/make.py` made them), and of damaged ones.

use proptest::prelude::*;
use waystation_stablehlo::{
    Error, main_signature,
    signature::{Attribute, ElementType, TensorType, ValueType},
};

macro_rules! golden {
    ($name:literal) => {
        include_bytes!(concat!("golden/", $name, ".mlirbc")).as_slice()
    };
}

const ALL: [&[u8]; 8] = [
    golden!("elements"),
    golden!("odd_types"),
    golden!("no_main"),
    golden!("donated"),
    golden!("unused"),
    golden!("kept_unused"),
    golden!("nothing"),
    golden!("sharded"),
];

fn tensor(element: ElementType, dims: &[u64]) -> ValueType {
    ValueType::Tensor(TensorType {
        element,
        dims: dims.iter().copied().map(Some).collect(),
    })
}

#[test]
#[rustfmt::skip]
fn every_element_type_is_told_apart() {
    use ElementType::*;
    let expected = [
        Bool, Si2, Si4, Si8, Si16, Si32, Si64, Ui2, Ui4, Ui8, Ui16, Ui32, Ui64, F4E2M1FN, F6E2M3FN, F6E3M2FN, F8E3M4, F8E4M3,
        F8E4M3FN, F8E4M3FNUZ, F8E4M3B11FNUZ, F8E5M2, F8E5M2FNUZ, F8E8M0FNU, BF16, F16, F32, F64, ComplexF32, ComplexF64,
    ];
    let signature = main_signature(golden!("elements")).expect("readable");
    assert_eq!(signature.parameters.len(), expected.len());
    for (size, (parameter, element)) in (0..).zip(signature.parameters.iter().zip(expected)) {
        assert_eq!(parameter.ty, tensor(element, &[size]));
    }
    assert_eq!(signature.results, []);
}

#[test]
fn tokens_tuples_and_unknown_sizes() {
    let signature = main_signature(golden!("odd_types")).expect("readable");
    assert_eq!(signature.module_name, "odd");
    let types: Vec<_> = signature
        .parameters
        .into_iter()
        .map(|parameter| parameter.ty)
        .collect();
    let dynamic = TensorType {
        element: ElementType::F32,
        dims: vec![None, Some(3)],
    };
    let inner = ValueType::Tuple(vec![tensor(ElementType::Si32, &[2])]);
    let tuple = ValueType::Tuple(vec![tensor(ElementType::F32, &[]), inner]);
    assert_eq!(types, [ValueType::Token, ValueType::Tensor(dynamic), tuple]);
    let types: Vec<_> = signature
        .results
        .into_iter()
        .map(|result| result.ty)
        .collect();
    assert_eq!(types, [ValueType::Token, tensor(ElementType::Bool, &[])]);
}

#[test]
fn donation_stands_in_the_parameters_attributes() {
    let signature = main_signature(golden!("donated")).expect("readable");
    assert_eq!(signature.module_name, "jit_step");
    let donated: Vec<_> = signature
        .parameters
        .iter()
        .map(|parameter| parameter.is_donated())
        .collect();
    assert_eq!(donated, [true, false, true]);
    assert_eq!(
        signature.parameters[0].attributes["tf.aliasing_output"],
        Attribute::Integer(0)
    );
    assert_eq!(
        signature.parameters[2].attributes["tf.aliasing_output"],
        Attribute::Integer(1)
    );
    assert_eq!(
        signature.results[1].text("jax.result_info"),
        Some("result[1]")
    );
}

#[test]
fn jax_drops_unused_arguments_unless_told_to_keep_them() {
    let dropped = main_signature(golden!("unused")).expect("readable");
    assert_eq!(dropped.parameters.len(), 1);
    let kept = main_signature(golden!("kept_unused")).expect("readable");
    let types: Vec<_> = kept
        .parameters
        .into_iter()
        .map(|parameter| parameter.ty)
        .collect();
    assert_eq!(
        types,
        [
            tensor(ElementType::F32, &[3]),
            tensor(ElementType::Si8, &[4])
        ]
    );
}

#[test]
fn shapes_of_a_partitioned_program_are_global() {
    let signature = main_signature(golden!("sharded")).expect("readable");
    assert!(signature.has_sdy);
    assert_eq!(
        signature.parameters[0].ty,
        tensor(ElementType::BF16, &[8, 12])
    );
    assert_eq!(signature.results[0].ty, tensor(ElementType::BF16, &[8, 12]));
    assert_eq!(signature.results[1].ty, tensor(ElementType::BF16, &[5, 12]));
    assert!(signature.parameters[0].is_donated());
    assert_eq!(
        signature.parameters[0].attributes["sdy.sharding"],
        Attribute::Other
    );
}

#[test]
fn a_program_without_values_has_an_empty_signature() {
    let signature = main_signature(golden!("nothing")).expect("readable");
    assert_eq!(
        (
            signature.parameters.len(),
            signature.results.len(),
            signature.has_sdy
        ),
        (0, 0, false)
    );
}

#[test]
fn what_is_no_program_is_refused_by_name() {
    assert_eq!(main_signature(b"module {}"), Err(Error::NotBytecode));
    assert_eq!(main_signature(&[]), Err(Error::NotBytecode));
    assert_eq!(main_signature(golden!("no_main")), Err(Error::NoMain));
    let mut old = golden!("nothing").to_vec();
    old[4] = 0x03;
    assert_eq!(main_signature(&old), Err(Error::Version { found: 1 }));
}

#[test]
fn a_cut_program_is_refused_at_every_length() {
    for program in ALL {
        for length in 0..program.len() {
            assert!(
                main_signature(&program[..length]).is_err(),
                "cut at {length} of {}",
                program.len()
            );
        }
    }
}

#[test]
fn no_flipped_bit_panics() {
    for program in ALL {
        let mut damaged = program.to_vec();
        for bit in 0..program.len() * 8 {
            damaged[bit / 8] ^= 1 << (bit % 8);
            let _ = main_signature(&damaged);
            damaged[bit / 8] ^= 1 << (bit % 8);
        }
    }
}

proptest! {
    #[test]
    fn random_bytes_behind_a_good_head_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut program = golden!("sharded")[..22].to_vec();
        program.extend(bytes);
        prop_assert!(main_signature(&program).is_err());
    }

    #[test]
    fn no_damage_panics(
        which in 0..ALL.len(),
        edits in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut program = ALL[which].to_vec();
        for (place, byte) in edits {
            let place = place.index(program.len());
            program[place] = byte;
        }
        let _ = main_signature(&program);
    }
}
