//! Elements as numbers, and casts between element types.
//!
//! A cast goes through the nearest wider type: integers through 128 bits, everything else through 64-bit floats. Floats are
//! rounded to the nearest, ties to even; what is beyond a type without infinities becomes NaN where it has one, else its
//! largest value. Integers are clamped to what the type holds, NaN becomes 0, and what is not 0 is true.

use waystation_checkpoint::zarr::DType;
use waystation_proto::xla::PrimitiveType as P;

use crate::item::Item;
use crate::pattern::Pattern;
use crate::{Error, Result};

/// What elements of a type are.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Class {
    Bool,
    /// Bits, and whether there is a sign.
    Int(u32, bool),
    Float(Float),
    F32,
    F64,
    /// Of two floats of so many bytes.
    Complex(usize),
}

/// A binary float of at most 16 bits.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Float {
    exponent: u32,
    mantissa: u32,
    bias: i32,
    special: Special,
    has_sign: bool,
}

/// What a float's largest exponent stands for.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Special {
    /// Infinities and NaN, as in IEEE 754.
    Ieee,
    /// Numbers, but for all ones, which is NaN (`fn`).
    OneNan,
    /// Numbers; NaN is what would be -0 (`fnuz`).
    NegativeZero,
    /// Numbers only.
    None,
}

const fn float(exponent: u32, mantissa: u32, bias: i32, special: Special) -> Class {
    Class::Float(Float {
        exponent,
        mantissa,
        bias,
        special,
        has_sign: true,
    })
}

fn class(dtype: DType) -> Option<Class> {
    Some(match dtype.primitive() {
        P::Pred => Class::Bool,
        P::S2 => Class::Int(2, true),
        P::S4 => Class::Int(4, true),
        P::S8 => Class::Int(8, true),
        P::S16 => Class::Int(16, true),
        P::S32 => Class::Int(32, true),
        P::S64 => Class::Int(64, true),
        P::U8 => Class::Int(8, false),
        P::U16 => Class::Int(16, false),
        P::U32 => Class::Int(32, false),
        P::U64 => Class::Int(64, false),
        P::F16 => float(5, 10, 15, Special::Ieee),
        P::Bf16 => float(8, 7, 127, Special::Ieee),
        P::F32 => Class::F32,
        P::F64 => Class::F64,
        P::F4e2m1fn => float(2, 1, 1, Special::None),
        P::F8e3m4 => float(3, 4, 3, Special::Ieee),
        P::F8e4m3fn => float(4, 3, 7, Special::OneNan),
        P::F8e4m3fnuz => float(4, 3, 8, Special::NegativeZero),
        P::F8e4m3b11fnuz => float(4, 3, 11, Special::NegativeZero),
        P::F8e5m2 => float(5, 2, 15, Special::Ieee),
        P::F8e5m2fnuz => float(5, 2, 16, Special::NegativeZero),
        P::F8e8m0fnu => Class::Float(Float {
            exponent: 8,
            mantissa: 0,
            bias: 127,
            special: Special::OneNan,
            has_sign: false,
        }),
        P::C64 => Class::Complex(4),
        P::C128 => Class::Complex(8),
        _ => return None,
    })
}

/// One element.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Number {
    Int(i128),
    Real(f64),
    Complex(f64, f64),
}

impl Number {
    /// How far two are apart; NaN where that is no number.
    pub(crate) fn distance(self, other: Number) -> f64 {
        match (self, other) {
            (Number::Int(a), Number::Int(b)) => a.abs_diff(b) as f64,
            (a, b) => {
                let ((ar, ai), (br, bi)) = (a.parts(), b.parts());
                // Equal infinities are 0 apart.
                let gap = |a: f64, b: f64| if a == b { 0.0 } else { (a - b).abs() };
                gap(ar, br).hypot(gap(ai, bi))
            }
        }
    }

    fn parts(self) -> (f64, f64) {
        match self {
            Number::Int(value) => (value as f64, 0.0),
            Number::Real(value) => (value, 0.0),
            Number::Complex(real, imaginary) => (real, imaginary),
        }
    }
}

impl Float {
    fn decode(self, bits: u32) -> f64 {
        let magnitude = bits & ((1 << (self.exponent + self.mantissa)) - 1);
        let is_negative = self.has_sign && bits >> (self.exponent + self.mantissa) & 1 == 1;
        let sign = if is_negative { -1.0 } else { 1.0 };
        let exponent = magnitude >> self.mantissa;
        let mantissa = magnitude & ((1 << self.mantissa) - 1);
        let top = (1 << self.exponent) - 1;
        match self.special {
            Special::Ieee if exponent == top => {
                return if mantissa == 0 {
                    sign * f64::INFINITY
                } else {
                    f64::NAN
                };
            }
            Special::OneNan if magnitude == (1 << (self.exponent + self.mantissa)) - 1 => {
                return f64::NAN;
            }
            Special::NegativeZero if is_negative && magnitude == 0 => return f64::NAN,
            _ => {}
        }
        let unit = 1 - self.bias - self.mantissa as i32;
        // A power of two has no zero and no subnormals.
        if self.mantissa == 0 && !self.has_sign {
            return 2f64.powi(exponent as i32 - self.bias);
        }
        let value = if exponent == 0 {
            f64::from(mantissa) * 2f64.powi(unit)
        } else {
            f64::from(mantissa + (1 << self.mantissa)) * 2f64.powi(unit + exponent as i32 - 1)
        };
        sign * value
    }

    /// The largest number's bits, without a sign.
    fn largest(self) -> u32 {
        let all = (1u32 << (self.exponent + self.mantissa)) - 1;
        match self.special {
            Special::Ieee => (((1 << self.exponent) - 1) << self.mantissa) - 1,
            Special::OneNan => all - 1,
            Special::NegativeZero | Special::None => all,
        }
    }

    fn encode(self, value: f64) -> u32 {
        let sign_bit = 1u32 << (self.exponent + self.mantissa);
        let all = sign_bit - 1;
        let sign = if value.is_sign_negative() && self.has_sign {
            sign_bit
        } else {
            0
        };
        let nan = match self.special {
            Special::Ieee => {
                sign | (((1 << self.exponent) - 1) << self.mantissa) | (1 << self.mantissa) >> 1
            }
            Special::OneNan => sign | all,
            Special::NegativeZero => sign_bit,
            Special::None => sign | all,
        };
        let beyond = match self.special {
            Special::Ieee => sign | (((1 << self.exponent) - 1) << self.mantissa),
            Special::None => sign | all,
            Special::OneNan | Special::NegativeZero => nan,
        };
        if value.is_nan() || (!self.has_sign && (value <= 0.0)) {
            return nan;
        }
        if value.is_infinite() {
            return beyond;
        }
        let magnitude = value.abs();
        if magnitude == 0.0 {
            return if self.special == Special::NegativeZero {
                0
            } else {
                sign
            };
        }
        if self.mantissa == 0 && !self.has_sign {
            // The nearest power of two; in the middle, the even exponent.
            let exponent = magnitude.log2();
            let bits = (exponent + f64::from(self.bias)).round_ties_even();
            return if bits > f64::from(all - 1) {
                nan
            } else {
                bits.max(0.0) as u32
            };
        }
        // In units of the last place at this size: exact, for f64 has many more bits.
        let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(1 - self.bias);
        let unit = 2f64.powi(exponent - self.mantissa as i32);
        let steps = (magnitude / unit).round_ties_even() as u32;
        // The mantissa carries into the exponent as bits do.
        let base = ((exponent + self.bias - 1) as u32).checked_shl(self.mantissa);
        let bits = match base {
            Some(base) if exponent + self.bias < 1 << self.exponent => base + steps,
            _ => u32::MAX,
        };
        if bits > self.largest() {
            return beyond;
        }
        if bits == 0 && self.special == Special::NegativeZero {
            return 0;
        }
        sign | bits
    }
}

/// Reads elements of one type, writes those of another.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cast {
    from: DType,
    to: DType,
    source: Class,
    target: Class,
}

impl Cast {
    /// `None` where there is no cast: of complex numbers to real ones.
    pub(crate) fn new(from: DType, to: DType) -> Option<Cast> {
        let (source, target) = (class(from)?, class(to)?);
        let is_lossy = matches!(source, Class::Complex(_)) && !matches!(target, Class::Complex(_));
        (!is_lossy).then_some(Cast {
            from,
            to,
            source,
            target,
        })
    }

    /// The type that an array of an item is to have, by the last pattern that matches its name, and the cast to it if it has
    /// another one. A key's words are no numbers and stay.
    ///
    /// # Errors
    /// There is no such cast.
    pub(crate) fn asked(
        casts: &[(Pattern, DType)],
        item: &Item,
        name: &str,
        from: DType,
    ) -> Result<(DType, Option<Cast>)> {
        let wanted = casts.iter().rfind(|(pattern, _)| pattern.matches(name));
        let to = match wanted {
            Some((_, to)) if item.prng_impl(name).is_none() => *to,
            _ => from,
        };
        if to == from {
            return Ok((from, None));
        }
        let Some(cast) = Cast::new(from, to) else {
            let (from, to) = (from.v3_name(), to.v3_name());
            return Err(Error::Asked(format!(
                "array {name:?} is {from}, which cannot be cast to {to}"
            )));
        };
        Ok((to, Some(cast)))
    }

    /// Casts elements, all little-endian.
    pub(crate) fn apply(&self, elements: &[u8]) -> Vec<u8> {
        let (from, to) = (self.from.item_bytes(), self.to.item_bytes());
        let mut out = Vec::with_capacity(elements.len() / from * to);
        for element in elements.chunks_exact(from) {
            put(self.target, to, get(self.source, element), &mut out);
        }
        out
    }
}

/// The numbers of elements of a type; `None` for a type without any.
pub(crate) fn numbers(dtype: DType, elements: &[u8]) -> Option<impl Iterator<Item = Number>> {
    let class = class(dtype)?;
    Some(
        elements
            .chunks_exact(dtype.item_bytes())
            .map(move |element| get(class, element)),
    )
}

fn bits(element: &[u8]) -> u64 {
    let mut bytes = [0; 8];
    let len = element.len().min(8);
    bytes[..len].copy_from_slice(&element[..len]);
    u64::from_le_bytes(bytes)
}

fn get(class: Class, element: &[u8]) -> Number {
    let raw = bits(element);
    match class {
        Class::Bool => Number::Int(i128::from(raw != 0)),
        Class::Int(width, signed) => {
            let value = i128::from(raw) & ((1 << width) - 1);
            let is_negative = signed && value >> (width - 1) & 1 == 1;
            Number::Int(if is_negative {
                value - (1 << width)
            } else {
                value
            })
        }
        Class::Float(float) => Number::Real(float.decode(raw as u32)),
        Class::F32 => Number::Real(f32::from_bits(raw as u32).into()),
        Class::F64 => Number::Real(f64::from_bits(raw)),
        Class::Complex(part) => {
            let (real, imaginary) = element.split_at(part);
            let read = |bytes: &[u8]| match part {
                4 => f32::from_bits(bits(bytes) as u32).into(),
                _ => f64::from_bits(bits(bytes)),
            };
            Number::Complex(read(real), read(imaginary))
        }
    }
}

fn put(class: Class, len: usize, number: Number, out: &mut Vec<u8>) {
    let (real, imaginary) = number.parts();
    let raw = match class {
        Class::Bool => u64::from(number != Number::Int(0) && real != 0.0),
        Class::Int(width, signed) => {
            let value = match number {
                Number::Int(value) => value,
                // Saturates, and makes NaN 0.
                _ => real as i128,
            };
            let (least, most) = if signed {
                (-(1i128 << (width - 1)), (1i128 << (width - 1)) - 1)
            } else {
                (0, (1i128 << width) - 1)
            };
            (value.clamp(least, most) as u64) & (u64::MAX >> (64 - width))
        }
        Class::Float(float) => float.encode(real).into(),
        // Both roundings of an integer would be one too many.
        Class::F32 => match number {
            Number::Int(value) => (value as f32).to_bits().into(),
            _ => (real as f32).to_bits().into(),
        },
        Class::F64 => real.to_bits(),
        Class::Complex(part) => {
            for value in [real, imaginary] {
                match part {
                    4 => out.extend_from_slice(&(value as f32).to_le_bytes()),
                    _ => out.extend_from_slice(&value.to_le_bytes()),
                }
            }
            return;
        }
    };
    out.extend_from_slice(&raw.to_le_bytes()[..len]);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn dtype(primitive: P) -> DType {
        DType::of(primitive).unwrap()
    }

    #[test]
    fn every_element_of_a_small_type_comes_back_through_f64() {
        for small in DType::all().filter(|dtype| dtype.item_bytes() <= 2) {
            let there = Cast::new(small, dtype(P::F64)).unwrap();
            let back = Cast::new(dtype(P::F64), small).unwrap();
            for raw in 0..1u32 << (8 * small.item_bytes()) {
                let mut element = raw.to_le_bytes()[..small.item_bytes()].to_vec();
                small.clear_padding(&mut element);
                if small.primitive() == P::Pred {
                    element[0] &= 1;
                }
                let wide = there.apply(&element);
                let value = f64::from_le_bytes(wide.clone().try_into().unwrap());
                let narrow = back.apply(&wide);
                if value.is_nan() {
                    let again = there.apply(&narrow);
                    assert!(f64::from_le_bytes(again.try_into().unwrap()).is_nan());
                } else {
                    assert_eq!(narrow, element, "{} {raw:#x} {value}", small.v3_name());
                }
            }
        }
    }

    #[test]
    fn rounding_is_to_the_nearest_and_ties_to_even() {
        let cast = |to, value: f64| {
            let cast = Cast::new(dtype(P::F64), dtype(to)).unwrap();
            let back = Cast::new(dtype(to), dtype(P::F64)).unwrap();
            let wide = back.apply(&cast.apply(&value.to_le_bytes()));
            f64::from_le_bytes(wide.try_into().unwrap())
        };
        for (to, value, rounded) in [
            (P::Bf16, 1.0 + 1.0 / 256.0, 1.0),
            (P::Bf16, 1.0 + 3.0 / 256.0, 1.0 + 4.0 / 256.0),
            (P::Bf16, 3.39e38, 3.3895313892515355e38),
            (P::Bf16, 1e39, f64::INFINITY),
            (P::F16, 65519.0, 65504.0),
            (P::F16, 65520.0, f64::INFINITY),
            (P::F16, 2f64.powi(-25), 0.0),
            (P::F16, 3.0 * 2f64.powi(-25), 2f64.powi(-23)),
            (P::F8e4m3fn, 448.0, 448.0),
            (P::F8e4m3fn, 464.0, 448.0),
            (P::F8e5m2fnuz, -1e-9, 0.0),
            (P::F4e2m1fn, 100.0, 6.0),
            (P::F4e2m1fn, 2.5, 2.0),
            (P::S4, 100.0, 7.0),
            (P::S4, -2.9, -2.0),
            (P::U8, -1.0, 0.0),
            (P::S32, f64::NAN, 0.0),
            (P::Pred, 0.5, 1.0),
        ] {
            assert_eq!(cast(to, value), rounded, "{to:?} {value}");
        }
        assert!(cast(P::F8e4m3fn, 465.0).is_nan());
        assert!(Cast::new(dtype(P::C64), dtype(P::F32)).is_none());
    }

    #[test]
    fn distances_of_large_integers_are_exact() {
        let a = Number::Int(i128::from(u64::MAX));
        assert_eq!(a.distance(Number::Int(i128::from(u64::MAX) - 1)), 1.0);
        assert_eq!(
            Number::Real(f64::INFINITY).distance(Number::Real(f64::INFINITY)),
            0.0
        );
        assert_eq!(
            Number::Complex(0.0, 3.0).distance(Number::Complex(4.0, 0.0)),
            5.0
        );
    }

    proptest! {
        #[test]
        fn bf16_is_rounded_as_the_bits_say(value in any::<f32>()) {
            let cast = Cast::new(dtype(P::F32), dtype(P::Bf16)).unwrap();
            let narrow = cast.apply(&value.to_le_bytes());
            let narrow = u16::from_le_bytes(narrow.try_into().unwrap());
            if value.is_nan() {
                prop_assert!(f32::from_bits(u32::from(narrow) << 16).is_nan());
            } else {
                let bits = value.to_bits();
                let rounded = (u64::from(bits) + 0x7fff + u64::from(bits >> 16 & 1)) >> 16;
                prop_assert_eq!(u64::from(narrow), rounded);
            }
        }
    }
}
