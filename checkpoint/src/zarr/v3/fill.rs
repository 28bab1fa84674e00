//! Fill values. None is ever used, but one that is no value of the array's type says that the file is damaged.

use serde_json::{Value, json};
use waystation_proto::xla::PrimitiveType;

use crate::zarr::{DType, Result, malformed};

/// The zero of a type.
pub(super) fn zero(dtype: DType) -> Value {
    match kind(dtype) {
        Kind::Bool => json!(false),
        Kind::Integer(..) => json!(0),
        Kind::Float => json!(0.0),
        Kind::Complex => json!([0.0, 0.0]),
    }
}

/// Checks that a value is one of a type.
pub(super) fn check(dtype: DType, value: &Value) -> Result<()> {
    let fits = match kind(dtype) {
        Kind::Bool => value.is_boolean(),
        Kind::Integer(least, most) => value
            .as_i64()
            .map(i128::from)
            .or(value.as_u64().map(i128::from))
            .is_some_and(|value| (least..=most).contains(&value)),
        Kind::Float => is_float(value),
        Kind::Complex => value
            .as_array()
            .is_some_and(|parts| parts.len() == 2 && parts.iter().all(is_float)),
    };
    if fits {
        return Ok(());
    }
    malformed(format!("a fill_value that is no {}", dtype.v3_name()))
}

/// A number, or the text of what JSON has no number for: an infinity, NaN, or the bits of another NaN.
fn is_float(value: &Value) -> bool {
    match value {
        Value::Number(_) => true,
        Value::String(text) => match text.as_str() {
            "NaN" | "Infinity" | "-Infinity" => true,
            text => text.strip_prefix("0x").is_some_and(|bits| {
                !bits.is_empty() && bits.len() <= 16 && bits.bytes().all(|b| b.is_ascii_hexdigit())
            }),
        },
        _ => false,
    }
}

enum Kind {
    Bool,
    /// The least and the greatest.
    Integer(i128, i128),
    Float,
    Complex,
}

fn kind(dtype: DType) -> Kind {
    use PrimitiveType as P;
    let signed = |bits: u32| Kind::Integer(-(1 << (bits - 1)), (1 << (bits - 1)) - 1);
    let unsigned = |bits: u32| Kind::Integer(0, (1 << bits) - 1);
    match dtype.primitive() {
        P::Pred => Kind::Bool,
        P::S2 => signed(2),
        P::S4 => signed(4),
        P::S8 => signed(8),
        P::S16 => signed(16),
        P::S32 => signed(32),
        P::S64 => signed(64),
        P::U8 => unsigned(8),
        P::U16 => unsigned(16),
        P::U32 => unsigned(32),
        P::U64 => unsigned(64),
        P::C64 | P::C128 => Kind::Complex,
        _ => Kind::Float,
    }
}
