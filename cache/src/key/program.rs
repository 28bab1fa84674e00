//! The program's part of a key: by structure where the program is understood, by its bytes where it is not.

use waystation_lifecycle::bucket::layout::Digest;
use waystation_stablehlo::Refusal;

use super::{Treatment, bytes_digest};

/// Digest of a program and how it was come by. Digests of different treatments never agree.
pub(super) fn digest(program: &[u8]) -> (Digest, Treatment) {
    match waystation_stablehlo::identity(program) {
        Ok(identity) => (
            bytes_digest(b"structural program", &identity.digest),
            match identity.opaque {
                None => Treatment::Structural,
                Some(construct) => Treatment::Opaque { construct },
            },
        ),
        Err(refusal) if refusal.allows_raw_key() => (
            bytes_digest(b"raw program", program),
            Treatment::Raw {
                construct: cause(&refusal),
            },
        ),
        // Such a program has a name too, for messages; it is never looked up.
        Err(refusal) => (
            bytes_digest(b"uncacheable program", program),
            Treatment::Uncacheable {
                reason: cause(&refusal),
            },
        ),
    }
}

/// What is in the way, in the reader's own words.
fn cause(refusal: &Refusal) -> String {
    match refusal {
        Refusal::Unreadable(error) => error.to_string(),
        Refusal::Uncacheable { construct } => construct.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    macro_rules! golden {
        ($name:literal) => {
            include_bytes!(concat!("../../stablehlo/tests/golden/", $name, ".mlirbc")).as_slice()
        };
    }

    #[test]
    fn a_program_is_the_same_from_another_directory_and_line() {
        let (here, treatment) = digest(golden!("step"));
        assert_eq!(treatment, Treatment::Structural);
        assert_ne!(golden!("step"), golden!("step_elsewhere"));
        assert_eq!(digest(golden!("step_elsewhere")).0, here);
        for other in [
            golden!("step_constant"),
            golden!("step_sharding"),
            golden!("step_donation"),
            golden!("step_layout"),
        ] {
            let (digest, treatment) = digest(other);
            assert_eq!(treatment, Treatment::Structural);
            assert_ne!(digest, here);
        }
    }

    #[test]
    fn what_is_not_understood_is_keyed_on_its_bytes_and_named() {
        let (a, treatment) = digest(b"HloModule a");
        let Treatment::Raw { construct } = treatment else {
            panic!("{treatment:?}");
        };
        assert!(construct.contains("not MLIR bytecode"), "{construct}");
        assert_ne!(digest(b"HloModule b").0, a);

        let mut newer = golden!("step").to_vec();
        newer[4] = 0x0f;
        let Treatment::Raw { construct } = digest(&newer).1 else {
            panic!("another bytecode version is not understood");
        };
        assert!(construct.contains("version 7"), "{construct}");
    }

    #[test]
    fn a_kernel_that_is_not_understood_is_named() {
        for known in [golden!("kernel"), golden!("kernel_old_elsewhere")] {
            assert_eq!(digest(known).1, Treatment::Structural);
        }
        let Treatment::Opaque { construct } = digest(golden!("kernel_triton")).1 else {
            panic!("Triton's kernels are not followed");
        };
        assert!(construct.contains("xla.gpu.triton"), "{construct}");
    }

    #[test]
    fn calls_into_the_clients_process_are_not_cached() {
        let callback = golden!("callback");
        let (_, treatment) = digest(callback);
        let Treatment::Uncacheable { reason } = treatment else {
            panic!("{treatment:?}");
        };
        assert!(reason.contains("callback"), "{reason}");
        // Also in a program of which nothing else is understood.
        let mut newer = callback.to_vec();
        newer[4] = 0x0f;
        let (_, treatment) = digest(&newer);
        assert!(
            matches!(treatment, Treatment::Uncacheable { .. }),
            "{treatment:?}"
        );
    }
}
