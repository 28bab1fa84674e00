//! Arithmetic on elements as they lie in memory.

use crate::call::{Code, Failure};
use crate::op::Reduction::{self, Add, And, Maximum, Minimum, Multiply, Or, Xor};

/// `xla::PrimitiveType` of what is reduced.
mod element {
    pub(super) const PRED: i32 = 1;
    pub(super) const S8: i32 = 2;
    pub(super) const S16: i32 = 3;
    pub(super) const S32: i32 = 4;
    pub(super) const S64: i32 = 5;
    pub(super) const U8: i32 = 6;
    pub(super) const U16: i32 = 7;
    pub(super) const U32: i32 = 8;
    pub(super) const U64: i32 = 9;
    pub(super) const F16: i32 = 10;
    pub(super) const F32: i32 = 11;
    pub(super) const F64: i32 = 12;
    pub(super) const C64: i32 = 15;
    pub(super) const BF16: i32 = 16;
    pub(super) const C128: i32 = 18;
}

/// How to reduce, element by element. Which of the two is used depends on where the members lie, so both must give the same bits. Of
/// two that are not numbers, the language leaves open which one's bits their sum has: that compilers give one answer is only tested.
#[derive(Clone, Copy)]
pub(super) struct Fold {
    /// The first with the second, into the first.
    pub(super) forward: fn(&mut [u8], &[u8]),
    /// The second with the first, into the first.
    pub(super) backward: fn(&mut [u8], &[u8]),
}

/// Bytes of an element that can be reduced.
pub(super) fn width(element: i32) -> Option<usize> {
    Some(match element {
        element::PRED | element::S8 | element::U8 => 1,
        element::S16 | element::U16 | element::F16 | element::BF16 => 2,
        element::S32 | element::U32 | element::F32 => 4,
        element::S64 | element::U64 | element::F64 | element::C64 => 8,
        element::C128 => 16,
        _ => return None,
    })
}

/// The reduction of elements of a type.
pub(super) fn fold(reduction: Reduction, element: i32) -> Result<Fold, Failure> {
    let found = match element {
        element::PRED => boolean(reduction),
        element::S8 => i8::fold(reduction),
        element::S16 => i16::fold(reduction),
        element::S32 => i32::fold(reduction),
        element::S64 => i64::fold(reduction),
        element::U8 => u8::fold(reduction),
        element::U16 => u16::fold(reduction),
        element::U32 => u32::fold(reduction),
        element::U64 => u64::fold(reduction),
        element::F16 => Half::fold(reduction),
        element::F32 => f32::fold(reduction),
        element::F64 => f64::fold(reduction),
        element::C64 => Complex::<f32, 4>::fold(reduction),
        element::BF16 => Brain::fold(reduction),
        element::C128 => Complex::<f64, 8>::fold(reduction),
        _ => None,
    };
    found.ok_or_else(|| {
        Failure::new(
            Code::Unimplemented,
            format!(
                "the reduction {} of elements of type number {element} between workers",
                reduction.name()
            ),
        )
    })
}

trait Element: Copy {
    fn fold(reduction: Reduction) -> Option<Fold>;
}

/// Applies an operation to elements of `N` bytes; `BACK`: with the second's first.
fn each<const N: usize, const BACK: bool>(
    into: &mut [u8],
    from: &[u8],
    op: impl Fn([u8; N], [u8; N]) -> [u8; N],
) {
    let (into, _) = into.as_chunks_mut::<N>();
    let (from, _) = from.as_chunks::<N>();
    for (into, from) in into.iter_mut().zip(from) {
        *into = if BACK {
            op(*from, *into)
        } else {
            op(*into, *from)
        };
    }
}

/// Both directions of a function that has the direction as its parameter.
macro_rules! both {
    ($apply:ident, $op:expr) => {
        Fold {
            forward: |into, from| $apply::<false>(into, from, $op),
            backward: |into, from| $apply::<true>(into, from, $op),
        }
    };
}

macro_rules! fold_of {
    ($ty:ty, $size:literal, $op:expr) => {{
        fn apply<const BACK: bool>(into: &mut [u8], from: &[u8], op: impl Fn($ty, $ty) -> $ty) {
            each::<$size, BACK>(into, from, |a, b| {
                op(<$ty>::from_le_bytes(a), <$ty>::from_le_bytes(b)).to_le_bytes()
            });
        }
        both!(apply, $op)
    }};
}

macro_rules! integers {
    ($($ty:ty = $size:literal;)*) => {
        $(impl Element for $ty {
            fn fold(reduction: Reduction) -> Option<Fold> {
                Some(match reduction {
                    Add => fold_of!($ty, $size, |a, b| a.wrapping_add(b)),
                    Multiply => fold_of!($ty, $size, |a, b| a.wrapping_mul(b)),
                    Minimum => fold_of!($ty, $size, |a, b| a.min(b)),
                    Maximum => fold_of!($ty, $size, |a, b| a.max(b)),
                    And => fold_of!($ty, $size, |a, b| a & b),
                    Or => fold_of!($ty, $size, |a, b| a | b),
                    Xor => fold_of!($ty, $size, |a, b| a ^ b),
                })
            }
        })*
    };
}

integers! {
    i8 = 1;
    i16 = 2;
    i32 = 4;
    i64 = 8;
    u8 = 1;
    u16 = 2;
    u32 = 4;
    u64 = 8;
}

macro_rules! floats {
    ($($ty:ty = $size:literal;)*) => {
        $(impl Element for $ty {
            fn fold(reduction: Reduction) -> Option<Fold> {
                Some(match reduction {
                    Add => fold_of!($ty, $size, |a, b| a + b),
                    Multiply => fold_of!($ty, $size, |a, b| a * b),
                    // What is not a number stays so, as in `jnp.minimum`; XLA's own CPU collectives may lose it.
                    Minimum => fold_of!($ty, $size, |a, b| if a.is_nan() || a < b { a } else { b }),
                    Maximum => fold_of!($ty, $size, |a, b| if a.is_nan() || a > b { a } else { b }),
                    And | Or | Xor => return None,
                })
            }
        })*
    };
}

floats! {
    f32 = 4;
    f64 = 8;
}

/// Floats of two bytes, reduced as `f32` and rounded after each step.
trait Narrow {
    fn widen(bits: u16) -> f32;
    fn narrow(value: f32) -> u16;
}

fn narrow<T: Narrow, const BACK: bool>(into: &mut [u8], from: &[u8], op: impl Fn(f32, f32) -> f32) {
    each::<2, BACK>(into, from, |a, b| {
        let (a, b) = (u16::from_le_bytes(a), u16::from_le_bytes(b));
        T::narrow(op(T::widen(a), T::widen(b))).to_le_bytes()
    });
}

macro_rules! narrow_floats {
    ($($ty:ident;)*) => {
        $(impl Element for $ty {
            fn fold(reduction: Reduction) -> Option<Fold> {
                fn apply<const BACK: bool>(into: &mut [u8], from: &[u8], op: impl Fn(f32, f32) -> f32) {
                    narrow::<$ty, BACK>(into, from, op);
                }
                Some(match reduction {
                    Add => both!(apply, |a, b| a + b),
                    Multiply => both!(apply, |a, b| a * b),
                    Minimum => both!(apply, |a, b| if a.is_nan() || a < b { a } else { b }),
                    Maximum => both!(apply, |a, b| if a.is_nan() || a > b { a } else { b }),
                    And | Or | Xor => return None,
                })
            }
        })*
    };
}

narrow_floats! {
    Half;
    Brain;
}

/// The upper half of an `f32`.
#[derive(Clone, Copy)]
struct Brain;

impl Narrow for Brain {
    fn widen(bits: u16) -> f32 {
        f32::from_bits(u32::from(bits) << 16)
    }

    fn narrow(value: f32) -> u16 {
        let bits = value.to_bits();
        if value.is_nan() {
            // Quiet, whatever is cut off.
            return (bits >> 16) as u16 | 0x40;
        }
        // To the nearest, and of two to the even one.
        let odd = (bits >> 16) & 1;
        ((bits.wrapping_add(0x7fff + odd)) >> 16) as u16
    }
}

/// IEEE half precision.
#[derive(Clone, Copy)]
struct Half;

impl Narrow for Half {
    fn widen(bits: u16) -> f32 {
        let sign = u32::from(bits >> 15) << 31;
        let exponent = u32::from(bits >> 10) & 0x1f;
        let fraction = u32::from(bits) & 0x3ff;
        match exponent {
            // 2^-24 each.
            0 => {
                let value = fraction as f32 * f32::from_bits(0x3380_0000);
                f32::from_bits(sign | value.to_bits())
            }
            0x1f => f32::from_bits(sign | 0x7f80_0000 | fraction << 13),
            _ => f32::from_bits(sign | (exponent + 112) << 23 | fraction << 13),
        }
    }

    fn narrow(value: f32) -> u16 {
        let bits = value.to_bits();
        let sign = (bits >> 16) as u16 & 0x8000;
        let size = bits & 0x7fff_ffff;
        if value.is_nan() {
            return sign | 0x7e00 | (size >> 13) as u16 & 0x3ff;
        }
        // What rounds to 2^16 and more is infinite.
        if size >= 0x477f_f000 {
            return sign | 0x7c00;
        }
        // Below 2^-14 the steps are 2^-24 each, as those of an `f32` are next to this number.
        if size < 0x3880_0000 {
            let magic = f32::from_bits(0x3f00_0000);
            let rounded = f32::from_bits(size) + magic;
            return sign | (rounded.to_bits() - magic.to_bits()) as u16;
        }
        let odd = (size >> 13) & 1;
        let rounded = size + 0xfff + odd;
        sign | ((rounded >> 13) - (112 << 10)) as u16
    }
}

/// A complex number of two `T` of `N` bytes.
#[derive(Clone, Copy)]
struct Complex<T, const N: usize>(std::marker::PhantomData<T>);

macro_rules! complex {
    ($($ty:ty, $size:literal, $whole:literal;)*) => {
        $(impl Element for Complex<$ty, $size> {
            fn fold(reduction: Reduction) -> Option<Fold> {
                fn both(whole: [u8; $whole]) -> ($ty, $ty) {
                    let (mut real, mut imaginary) = ([0; $size], [0; $size]);
                    real.copy_from_slice(&whole[..$size]);
                    imaginary.copy_from_slice(&whole[$size..]);
                    (<$ty>::from_le_bytes(real), <$ty>::from_le_bytes(imaginary))
                }
                fn apply<const BACK: bool>(
                    into: &mut [u8],
                    from: &[u8],
                    op: impl Fn(($ty, $ty), ($ty, $ty)) -> ($ty, $ty),
                ) {
                    each::<$whole, BACK>(into, from, |a, b| {
                        let (real, imaginary) = op(both(a), both(b));
                        let mut whole = [0; $whole];
                        whole[..$size].copy_from_slice(&real.to_le_bytes());
                        whole[$size..].copy_from_slice(&imaginary.to_le_bytes());
                        whole
                    });
                }
                Some(match reduction {
                    Add => both!(apply, |a, b| (a.0 + b.0, a.1 + b.1)),
                    Multiply => both!(apply, |a, b| {
                        (a.0 * b.0 - a.1 * b.1, a.0 * b.1 + a.1 * b.0)
                    }),
                    Minimum | Maximum | And | Or | Xor => return None,
                })
            }
        })*
    };
}

complex! {
    f32, 4, 8;
    f64, 8, 16;
}

/// Booleans are bytes, of which any but zero is true.
fn boolean(reduction: Reduction) -> Option<Fold> {
    fn apply<const BACK: bool>(into: &mut [u8], from: &[u8], op: impl Fn(bool, bool) -> bool) {
        each::<1, BACK>(into, from, |[a], [b]| [u8::from(op(a != 0, b != 0))]);
    }
    Some(match reduction {
        Add | Maximum | Or => both!(apply, |a, b| a | b),
        Multiply | Minimum | And => both!(apply, |a, b| a & b),
        Xor => both!(apply, |a, b| a ^ b),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reduced(reduction: Reduction, element: i32, a: &[u8], b: &[u8]) -> Vec<u8> {
        let fold = fold(reduction, element).expect("it reduces");
        let (mut into, mut back) = (a.to_vec(), b.to_vec());
        (fold.forward)(&mut into, b);
        (fold.backward)(&mut back, a);
        assert_eq!(into, back);
        into
    }

    #[test]
    fn numbers_are_reduced() {
        let bytes = |values: [f32; 3]| values.map(f32::to_le_bytes).concat();
        let (a, b) = (bytes([1.0, -2.0, f32::NAN]), bytes([3.0, f32::NAN, 1.0]));
        let add = reduced(Add, element::F32, &a, &b);
        assert_eq!(add[..4], 4_f32.to_le_bytes());
        for reduction in [Minimum, Maximum] {
            let both = reduced(reduction, element::F32, &a, &b);
            let (both, _) = both.as_chunks::<4>();
            assert_eq!(
                f32::from_le_bytes(both[0]),
                if reduction == Minimum { 1.0 } else { 3.0 }
            );
            assert!(f32::from_le_bytes(both[1]).is_nan());
            assert!(f32::from_le_bytes(both[2]).is_nan());
        }
        assert_eq!(reduced(Add, element::S8, &[127, 1], &[1, 0xff]), [0x80, 0]);
        assert_eq!(
            reduced(Maximum, element::S8, &[127, 1], &[1, 0xff]),
            [127, 1]
        );
        assert_eq!(
            reduced(Maximum, element::U8, &[127, 1], &[1, 0xff]),
            [127, 0xff]
        );
        assert_eq!(
            reduced(
                Multiply,
                element::S16,
                &300_i16.to_le_bytes(),
                &3_i16.to_le_bytes()
            ),
            900_i16.to_le_bytes()
        );
        assert_eq!(reduced(Xor, element::U16, &[1, 2], &[3, 4]), [2, 6]);
        assert_eq!(
            reduced(Add, element::PRED, &[0, 1, 1], &[0, 0, 1]),
            [0, 1, 1]
        );
        assert_eq!(
            reduced(Xor, element::PRED, &[0, 1, 1], &[0, 0, 1]),
            [0, 1, 0]
        );
        let complex =
            |real: f64, imaginary: f64| [real.to_le_bytes(), imaginary.to_le_bytes()].concat();
        assert_eq!(
            reduced(
                Multiply,
                element::C128,
                &complex(1.0, 2.0),
                &complex(3.0, 4.0)
            ),
            complex(-5.0, 10.0)
        );
        assert!(fold(Xor, element::F32).is_err());
        assert!(fold(Maximum, element::C64).is_err());
        assert!(fold(Add, 21).is_err());
        for element in 0..40 {
            assert_eq!(
                fold(Add, element).is_ok(),
                width(element).is_some(),
                "{element}"
            );
        }
    }

    /// Each partition may reduce for itself, in the direction that suits it.
    #[test]
    fn what_is_not_a_number_has_the_same_bits_in_both_directions() {
        // As many as are reduced at once, and some that are left over.
        const COUNT: u64 = 70;
        let all = |size: usize, infinite: u64, fractions: u64, seed: u64| -> Vec<u8> {
            let each = |index: u64| {
                let fraction = 1 + (index * 37 + seed) % fractions;
                let sign = ((index + seed) % 2) << (8 * size - 1);
                (sign | infinite | fraction).to_le_bytes()[..size].to_vec()
            };
            (0..COUNT).flat_map(each).collect()
        };
        // Quiet and signalling ones, with fractions of their own.
        for (element, size, infinite, fractions) in [
            (element::F16, 2, 0x7c00, 0x3ff),
            (element::BF16, 2, 0x7f80, 0x7f),
            (element::F32, 4, 0x7f80_0000, 0x7f_ffff),
            (element::F32, 4, 0x7fc0_0000, 0x3f_ffff),
            (element::F64, 8, 0x7ff0 << 48, (1 << 52) - 1),
            (element::F64, 8, 0x7ff8 << 48, (1 << 51) - 1),
            (element::C64, 4, 0x7fc0_0000, 0x3f_ffff),
            (element::C128, 8, 0x7ff8 << 48, (1 << 51) - 1),
        ] {
            let (a, b) = (
                all(size, infinite, fractions, 2),
                all(size, infinite, fractions, 5),
            );
            for reduction in [Add, Multiply, Minimum, Maximum] {
                if fold(reduction, element).is_ok() {
                    reduced(reduction, element, &a, &b);
                }
            }
        }
    }

    #[test]
    fn narrow_floats_round_to_the_nearest() {
        for bits in 0..=u16::MAX {
            for (wide, back) in [
                (Half::widen(bits), Half::narrow(Half::widen(bits))),
                (Brain::widen(bits), Brain::narrow(Brain::widen(bits))),
            ] {
                assert!(
                    back == bits || wide.is_nan(),
                    "{bits:04x} {wide} {back:04x}"
                );
            }
            assert_eq!(Half::widen(bits).is_nan(), bits & 0x7fff > 0x7c00);
            // What lies between two neighbours goes to the nearer, and in the middle to the even one.
            let (low, high) = (Half::widen(bits), Half::widen(bits.wrapping_add(1)));
            if bits & 0x7fff < 0x7bff {
                let middle = f32::midpoint(low, high);
                let even = if bits & 1 == 0 { bits } else { bits + 1 };
                assert_eq!(Half::narrow(middle), even, "{bits:04x}");
                let nearer = f32::midpoint(low, middle);
                assert_eq!(Half::narrow(nearer), bits, "{bits:04x}");
            }
        }
        assert_eq!(Half::widen(0x3c00), 1.0);
        assert_eq!(Half::widen(0x0001), 2_f32.powi(-24));
        assert_eq!(Half::widen(0xfbff), -65504.0);
        assert_eq!(Half::narrow(65520.0), 0x7c00);
        assert_eq!(Half::narrow(65519.0), 0x7bff);
        assert_eq!(Half::narrow(1e-10), 0);
        assert_eq!(Brain::narrow(1.0 + 2_f32.powi(-8)), 0x3f80);
        assert_eq!(Brain::narrow(1.0 + 3.0 * 2_f32.powi(-8)), 0x3f82);
        assert_eq!(Brain::narrow(f32::MAX), 0x7f80);
        assert!(Brain::widen(Brain::narrow(f32::from_bits(0x7f80_0001))).is_nan());
    }
}
