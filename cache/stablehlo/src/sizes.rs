//! Arrays that no program can have.

use crate::{
    artifact::Artifact,
    schema::Field,
    signature::{is_tensor, type_entry},
};

/// The largest element, a complex number of two f64, in bytes.
const LARGEST_ELEMENT_BYTES: i64 = 16;

/// The shape of an array type in the program whose bytes cannot be counted in 64 bits; `None` where there is none.
///
/// XLA multiplies dimensions before it looks for memory, and where the product overflows it throws a C++ exception or breaks
/// off its process. No such program may reach a plugin. A program that cannot be read has no such array as far as is known.
pub fn oversized_array(program: &[u8]) -> Option<Vec<i64>> {
    let artifact = Artifact::parse(program).ok()?;
    (0..artifact.types.len() as u64).find_map(|index| {
        let (family, code, fields) = type_entry(&artifact, index, &artifact.ir).ok()?;
        let dims = fields.iter().find_map(|field| match field {
            Field::Signeds(dims) if is_tensor(family, code) => Some(dims),
            _ => None,
        })?;
        overflows(dims).then(|| dims.clone())
    })
}

/// Dynamic dimensions, which are negative, and empty ones count as 1: XLA multiplies in any order.
fn overflows(dims: &[i64]) -> bool {
    dims.iter()
        .try_fold(LARGEST_ELEMENT_BYTES, |bytes, &dim| {
            bytes.checked_mul(dim.max(1))
        })
        .is_none()
}

#[cfg(test)]
mod tests {
    use super::overflows;

    #[test]
    fn products_beyond_64_bits_are_found() {
        assert!(!overflows(&[]));
        assert!(!overflows(&[1 << 30, 1 << 20]));
        assert!(overflows(&[1 << 62, 1 << 10]));
        assert!(
            overflows(&[0, 1 << 62, 4]),
            "a zero does not undo an overflow before it"
        );
        assert!(!overflows(&[i64::MIN, 1 << 20]), "a dynamic dimension");
    }
}
