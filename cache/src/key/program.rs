//! The program's part of a key.

use waystation_lifecycle::bucket::layout::Digest;

use super::{Treatment, bytes_digest};

/// Digest of a program and how it was come by. Digests of different treatments never agree.
pub(super) fn digest(program: &[u8]) -> (Digest, Treatment) {
    (
        bytes_digest(b"raw program", program),
        Treatment::Raw {
            construct: "programs are keyed on their bytes by this build".to_owned(),
        },
    )
}
