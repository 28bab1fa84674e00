//! Digests of real artifacts (`golden/make.py` made them), and of damaged ones.

use std::collections::HashSet;

use proptest::prelude::*;
use waystation_stablehlo::{Error, Refusal, digest, identity};

macro_rules! golden {
    ($name:literal) => {
        include_bytes!(concat!("golden/", $name, ".mlirbc")).as_slice()
    };
}

const STEP: &[u8] = golden!("step");

const CHANGED: [(&str, &[u8]); 4] = [
    ("constant", golden!("step_constant")),
    ("sharding", golden!("step_sharding")),
    ("donation", golden!("step_donation")),
    ("layout", golden!("step_layout")),
];

const OTHERS: [&[u8]; 7] = [
    golden!("elements"),
    golden!("odd_types"),
    golden!("donated"),
    golden!("unused"),
    golden!("kept_unused"),
    golden!("nothing"),
    golden!("sharded"),
];

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes
        .windows(text.len())
        .any(|window| window == text.as_bytes())
}

#[test]
fn a_program_has_one_digest_wherever_it_was_written() {
    let elsewhere = golden!("step_elsewhere");
    assert!(
        contains(STEP, "/home/one/train.py")
            && contains(elsewhere, "/srv/jobs/7/very/deep/main.py")
    );
    assert!(
        contains(STEP, "body/eval_jaxpr/layer") && contains(elsewhere, "body/eval_jaxpr/block")
    );
    assert_eq!(digest(STEP), digest(elsewhere));
}

#[test]
fn the_digest_is_fixed() {
    // Entries in buckets are named by it. When the rules change on purpose, so must the algorithm's name, and this.
    let hex: String = digest(STEP)
        .expect("readable")
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert_eq!(
        hex,
        "14a151e82f53cdcfbc70dc03a09da1dcb21b9957f9f2f0b26aac12b10948524b"
    );
}

#[test]
fn a_change_of_the_program_changes_the_digest() {
    let mut seen = HashSet::from([digest(STEP).expect("readable")]);
    for (what, program) in CHANGED {
        assert!(seen.insert(digest(program).expect(what)), "{what}");
    }
    for (index, program) in OTHERS.iter().enumerate() {
        assert!(
            seen.insert(digest(program).expect("readable")),
            "program {index} looks like another"
        );
    }
}

#[test]
fn the_producers_name_has_no_say() {
    let mut other = STEP.to_vec();
    assert_eq!(&other[5..21], b"StableHLO_v1.16.");
    other[20] = b'9';
    assert_eq!(digest(&other), digest(STEP));
}

#[test]
fn a_callback_is_refused_by_name_and_has_no_raw_key_either() {
    let refusal = digest(golden!("callback")).expect_err("refused");
    assert_eq!(
        refusal,
        Refusal::Uncacheable {
            construct: "xla_ffi_python_cpu_callback".into()
        }
    );
    assert!(!refusal.allows_raw_key());
}

#[test]
fn a_partitioner_of_the_clients_process_is_refused_by_name() {
    let refusal = digest(golden!("partitioner")).expect_err("refused");
    assert_eq!(
        refusal,
        Refusal::Uncacheable {
            construct: "CustomSPMDPartitioning".into()
        }
    );
}

/// A Mosaic kernel here, elsewhere, and with another constant: with its locations beside it, and in it.
const KERNELS: [[&[u8]; 3]; 2] = [
    [
        golden!("kernel"),
        golden!("kernel_elsewhere"),
        golden!("kernel_constant"),
    ],
    [
        golden!("kernel_old"),
        golden!("kernel_old_elsewhere"),
        golden!("kernel_old_constant"),
    ],
];

#[test]
fn a_kernel_counts_without_its_locations() {
    let mut seen = HashSet::new();
    for [here, elsewhere, constant] in KERNELS {
        assert_ne!(here, elsewhere);
        let identities = [here, elsewhere, constant].map(|program| identity(program).unwrap());
        assert!(identities.iter().all(|identity| identity.opaque.is_none()));
        let [here, elsewhere, constant] = identities.map(|identity| identity.digest);
        assert_eq!(here, elsewhere);
        assert!(seen.insert(here) && seen.insert(constant));
    }
}

#[test]
fn all_else_of_a_kernels_configuration_counts_byte_by_byte() {
    let [kernel, ..] = KERNELS[0];
    let plain = identity(kernel).unwrap();
    let name = b"needs_layout_passes";
    let place = kernel
        .windows(name.len())
        .position(|window| window == name)
        .unwrap();
    let mut other = kernel.to_vec();
    other[place] = b'N';
    let other = identity(&other).unwrap();
    assert_ne!(other.digest, plain.digest);
    assert_eq!(other.opaque, None);
}

#[test]
fn a_kernel_that_is_not_understood_stands_by_its_bytes_and_is_named() {
    let place_of = |program: &[u8], text: &[u8]| {
        let found = program.windows(text.len()).position(|part| part == text);
        found.unwrap() + text.len()
    };
    for [kernel, elsewhere, _] in KERNELS {
        // Another version of the container.
        let newer = [kernel, elsewhere].map(|program| {
            let mut newer = program.to_vec();
            let body = place_of(program, br#""body": ""#);
            assert_eq!(&newer[body..body + 8], b"TUzvUgFN");
            newer[body + 6] = b'd';
            identity(&newer).unwrap()
        });
        assert_ne!(newer[0].digest, newer[1].digest);
        let named = newer[0].opaque.as_deref().unwrap();
        assert!(named.contains("Mosaic kernel"), "{named}");
        assert!(named.contains("version"), "{named}");
    }
    // Not even read.
    let triton = identity(golden!("kernel_triton")).unwrap();
    assert_eq!(
        triton.opaque.as_deref(),
        Some("a kernel in a call of __gpu$xla.gpu.triton")
    );
}

#[test]
fn a_kernels_damage_never_panics_and_never_passes_for_the_kernel() {
    let [kernel, ..] = KERNELS[1];
    let plain = identity(kernel).unwrap().digest;
    let text = br#""body": ""#;
    let body = kernel
        .windows(text.len())
        .position(|part| part == text)
        .unwrap()
        + text.len();
    let length = kernel[body..]
        .iter()
        .position(|byte| *byte == b'"')
        .unwrap();
    let mut same = 0;
    for place in body..body + length {
        let mut damaged = kernel.to_vec();
        damaged[place] = if damaged[place] == b'A' { b'B' } else { b'A' };
        same += usize::from(digest(&damaged).unwrap() == plain);
    }
    // What is in locations alone, and the producer's name.
    assert!(same < length / 2, "{same} of {length}");
}

#[test]
fn a_callback_is_found_behind_what_is_not_understood() {
    // Another version of the container: nothing of it is read.
    let mut newer = golden!("callback").to_vec();
    newer[4] = 0x0f;
    assert!(!digest(&newer).expect_err("refused").allows_raw_key());
    let mut newer = STEP.to_vec();
    newer[4] = 0x0f;
    let refusal = digest(&newer).expect_err("refused");
    assert_eq!(refusal, Refusal::Unreadable(Error::Version { found: 7 }));
}

#[test]
fn an_unknown_op_is_refused_by_name_and_may_be_keyed_on_its_bytes() {
    let place = STEP.windows(8).position(|window| window == b"tanh_v2\0");
    let mut newer = STEP.to_vec();
    newer[place.expect("the op is there") + 6] = b'9';
    let refusal = digest(&newer).expect_err("refused");
    assert_eq!(
        refusal,
        Refusal::Unreadable(Error::Unsupported {
            construct: "the op vhlo.tanh_v9".into()
        })
    );
    assert!(refusal.allows_raw_key());
}

#[test]
fn a_cut_program_has_no_digest() {
    for length in 0..STEP.len() {
        assert!(digest(&STEP[..length]).is_err(), "cut at {length}");
    }
}

#[test]
fn a_flipped_bit_never_panics() {
    for program in OTHERS.iter().chain([&golden!("callback")]) {
        let mut damaged = program.to_vec();
        // One bit of every byte, another each time: all of them would take a minute without optimisation.
        for (place, bit) in (0..program.len()).zip((0..8).cycle().step_by(3)) {
            damaged[place] ^= 1 << bit;
            let _ = digest(&damaged);
            damaged[place] ^= 1 << bit;
        }
    }
}

proptest! {
    #[test]
    fn no_damage_panics(
        edits in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut program = STEP.to_vec();
        for (place, byte) in edits {
            let place = place.index(program.len());
            program[place] = byte;
        }
        let _ = digest(&program);
    }

    #[test]
    fn random_bytes_behind_a_good_head_have_no_digest(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let mut program = STEP[..22].to_vec();
        program.extend(bytes);
        prop_assert!(digest(&program).is_err());
    }
}
