//! How attributes, types and properties are encoded: the tables of the dialects that JAX's programs use.
//!
//! An encoded attribute or type begins with a code of its dialect; the code says which fields follow. The codes are those of
//! MLIR's `BuiltinDialectBytecode.td`, StableHLO's `VhloBytecode.cpp` and Shardy's bytecode interface. VHLO never changes an
//! attribute, type or op once it is released: it adds another with a new code or version suffix.
//!
//! Codes that are not listed are refused by name, so nothing is ever decoded by guess.

use crate::{artifact::Artifact, cursor::Cursor, error::Error};

/// The dialects that are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    Builtin,
    Vhlo,
    Sdy,
}

impl Family {
    pub(crate) fn of(dialect: &[u8]) -> Option<Self> {
        match dialect {
            b"builtin" => Some(Self::Builtin),
            b"vhlo" => Some(Self::Vhlo),
            b"sdy" => Some(Self::Sdy),
            _ => None,
        }
    }
}

/// One decoded field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Field<'a> {
    /// Index of an attribute.
    Attribute(u64),
    /// Index of an attribute that may be absent.
    Optional(Option<u64>),
    /// Index of a type.
    Type(u64),
    String(&'a [u8]),
    Number(u64),
    Signed(i64),
    Attributes(Vec<u64>),
    Types(Vec<u64>),
    Numbers(Vec<u64>),
    Signeds(Vec<i64>),
    Pairs(Vec<(u64, u64)>),
    Strings(Vec<&'a [u8]>),
    Bytes(&'a [u8]),
}

/// The fields of an attribute. One letter a field, as [`decode`] reads them; `None` for a code that is not read.
///
/// Left out on purpose: builtin 16 (dense_resource: its content lies in another section under a name that changes from
/// process to process), 21 (distinct: equal only to itself).
pub(crate) fn attribute(family: Family, code: u64) -> Option<&'static str> {
    Some(match (family, code) {
        (Family::Builtin, 0) => "A",
        (Family::Builtin, 1) => "P",
        (Family::Builtin, 2) => "s",
        (Family::Builtin, 3) => "st",
        (Family::Builtin, 4) => "a",
        (Family::Builtin, 5) => "aA",
        (Family::Builtin, 6) => "t",
        (Family::Builtin, 7) => "",
        (Family::Builtin, 8 | 9) => "tR",
        (Family::Builtin, 17) => "tvB",
        (Family::Builtin, 18) => "tB",
        (Family::Builtin, 19) => "tvS",
        (Family::Builtin, 20) => "taa",
        // An affine map, met in kernels: numbers alone.
        (Family::Builtin, 23) => "R",
        (Family::Vhlo, 1) => "A",
        (Family::Vhlo, 2..=5 | 7 | 11..=13 | 16 | 19) => "v",
        (Family::Vhlo, 6) => "P",
        (Family::Vhlo, 8 | 9) => "tR",
        (Family::Vhlo, 10) => "VzV",
        (Family::Vhlo, 14) => "s",
        (Family::Vhlo, 15) => "tB",
        (Family::Vhlo, 17) => "t",
        (Family::Vhlo, 18) => "V",
        (Family::Vhlo, 20) => "vvza",
        (Family::Vhlo, 21) => "zz",
        (Family::Vhlo, 22) => "aO",
        (Family::Vhlo, 23) => "aa",
        (Family::Vhlo, 24) => "az",
        (Family::Vhlo, 25) => "ao",
        (Family::Sdy, 0 | 7 | 9 | 11 | 12 | 14 | 16) => "A",
        (Family::Sdy, 1) => "sz",
        (Family::Sdy, 2) => "AV",
        (Family::Sdy, 3) => "zz",
        (Family::Sdy, 4) => "so",
        (Family::Sdy, 5) => "Abv",
        (Family::Sdy, 6) => "aAA",
        (Family::Sdy, 8) => "V",
        (Family::Sdy, 10) => "VAAVVVVb",
        (Family::Sdy, 13) => "Azz",
        (Family::Sdy, 15) => "aAAA",
        (Family::Sdy, 17) => "aAAAz",
        _ => return None,
    })
}

/// Builtin attributes that say where in a source file something comes from.
pub(crate) fn is_location(family: Family, code: u64) -> bool {
    family == Family::Builtin && matches!(code, 10..=15 | 22)
}

/// The fields of a type; `None` for a code that is not read.
pub(crate) fn type_fields(family: Family, code: u64) -> Option<&'static str> {
    Some(match (family, code) {
        (Family::Builtin, 0) => "v",
        (Family::Builtin, 1 | 3..=8 | 12) => "",
        (Family::Builtin, 2) => "TT",
        (Family::Builtin, 9 | 16 | 18) => "t",
        (Family::Builtin, 13 | 19) => "Zt",
        (Family::Builtin, 10) => "Zta",
        (Family::Builtin, 11) => "aZta",
        (Family::Builtin, 14) => "aZt",
        (Family::Builtin, 15) => "T",
        (Family::Builtin, 17) => "at",
        (Family::Vhlo, 0 | 2..=7 | 9..=19 | 22 | 26..=29 | 31..=40) => "",
        (Family::Vhlo, 1 | 25 | 42) => "t",
        (Family::Vhlo, 8) => "TT",
        (Family::Vhlo, 20 | 41) => "Zt",
        (Family::Vhlo, 21) => "aZt",
        (Family::Vhlo, 23) => "T",
        (Family::Vhlo, 24) => "vttvzzz",
        _ => return None,
    })
}

/// The attributes in an op's properties, in the alphabetical order of their names: `a` required, `o` optional. `None` for an op
/// that is not read. All attributes of a VHLO op are required.
pub(crate) fn properties(family: Family, op: &[u8]) -> Option<&'static str> {
    match family {
        Family::Builtin => match op {
            b"module" => Some("oo"),
            b"unrealized_conversion_cast" => Some(""),
            _ => None,
        },
        Family::Sdy => match op {
            b"mesh" => Some("aa"),
            b"sharding_constraint"
            | b"reshard"
            | b"sharding_group"
            | b"constant"
            | b"propagation_barrier" => Some("a"),
            b"manual_computation" => Some("aaa"),
            b"named_computation" => Some("oao"),
            b"return" => Some(""),
            _ => None,
        },
        Family::Vhlo => {
            let op = std::str::from_utf8(op).ok()?;
            let count = VHLO_PROPERTIES
                .iter()
                .find(|(_, ops)| ops.split_ascii_whitespace().any(|name| name == op));
            count.map(|(count, _)| &"aaaaaaaaaaaaaaaaa"[..*count])
        }
    }
}

/// Every VHLO op up to StableHLO 1.20 by its number of attributes, from `VhloOps.td`.
const VHLO_PROPERTIES: [(usize, &str); 13] = [
    (
        0,
        "abs_v1 add_v1 after_all_v1 and_v1 async_done_v1 async_start_v1 atan2_v1 bitcast_convert_v1 case_v1 cbrt_v1 ceil_v1 \
         clamp_v1 complex_v1 convert_v1 cosine_v1 count_leading_zeros_v1 create_token_v1 divide_v1 dynamic_pad_v1 \
         dynamic_reshape_v1 dynamic_update_slice_v1 exponential_minus_one_v1 exponential_v1 floor_v1 if_v1 imag_v1 \
         is_finite_v1 log_plus_one_v1 log_v1 logistic_v1 maximum_v1 minimum_v1 multiply_v1 negate_v1 not_v1 \
         optimization_barrier_v1 or_v1 partition_id_v1 popcnt_v1 power_v1 real_dynamic_slice_v1 real_v1 remainder_v1 \
         replica_id_v1 reshape_v1 return_v1 round_nearest_afz_v1 round_nearest_even_v1 rsqrt_v1 select_v1 shift_left_v1 \
         shift_right_arithmetic_v1 shift_right_logical_v1 sign_v1 sine_v1 sqrt_v1 subtract_v1 tan_v1 tanh_v1 tuple_v1 \
         uniform_dequantize_v1 uniform_quantize_v1 while_v1 xor_v1",
    ),
    (
        1,
        "broadcast_in_dim_v1 broadcast_v1 call_v1 cbrt_v2 cholesky_v1 concatenate_v1 constant_v1 cosine_v2 dot_v1 \
         dynamic_iota_v1 dynamic_slice_v1 einsum_v1 exponential_minus_one_v2 exponential_v2 get_dimension_size_v1 \
         get_tuple_element_v1 iota_v1 log_plus_one_v2 log_v2 logistic_v2 map_v1 outfeed_v1 reduce_v1 reverse_v1 \
         rng_bit_generator_v1 rng_v1 rsqrt_v2 set_dimension_size_v1 sine_v2 sqrt_v2 tan_v2 tanh_v2 transpose_v1 \
         unary_einsum_v1",
    ),
    (
        2,
        "batch_norm_grad_v1 batch_norm_inference_v1 batch_norm_training_v1 collective_broadcast_v1 collective_permute_v1 \
         compare_v1 fft_v1 infeed_v1 reduce_precision_v1 sort_v1 torch_index_select_v1",
    ),
    (
        3,
        "all_reduce_v1 all_reduce_v2 collective_broadcast_v2 dynamic_broadcast_in_dim_v1 pad_v1 recv_v1 \
         select_and_scatter_v1 send_v1 slice_v1",
    ),
    (
        4,
        "all_gather_v1 all_gather_v2 collective_reduce_v1 composite_v1 composite_v2 recv_v2 reduce_scatter_v1 send_v2 \
         triangular_solve_v1",
    ),
    (
        5,
        "all_to_all_v1 all_to_all_v2 dot_general_v1 dynamic_gather_v1 func_v1 reduce_window_v1",
    ),
    (6, "gather_v1 scatter_v1"),
    (7, "dynamic_gather_v2"),
    (8, "custom_call_v1 gather_v2 scatter_v2"),
    (9, "custom_call_v2"),
    (12, "dot_general_v2"),
    (16, "dynamic_conv_v2"),
    (17, "convolution_v1 dynamic_conv_v1"),
];

/// Reads fields by their letters: `a` attribute, `o` optional attribute, `O` a flag and an attribute when it is set, `t` type,
/// `s` string, `v` number, `z` signed number, `b` byte, `A T V Z P` counted lists of attributes, types, numbers, signed
/// numbers, attribute pairs, `S` strings to the end, `B` counted bytes, `R` bytes to the end.
pub(crate) fn decode<'a>(
    artifact: &Artifact<'a>,
    letters: &str,
    cursor: &mut Cursor<'a>,
) -> Result<Vec<Field<'a>>, Error> {
    let mut fields = Vec::with_capacity(letters.len());
    for letter in letters.bytes() {
        fields.push(match letter {
            b'a' => Field::Attribute(cursor.varint()?),
            b'o' => optional(cursor.flagged()?, cursor)?,
            b'O' => match cursor.varint()? {
                0 => Field::Optional(None),
                _ => Field::Optional(Some(cursor.varint()?)),
            },
            b't' => Field::Type(cursor.varint()?),
            b's' => Field::String(string(artifact, cursor)?),
            b'v' => Field::Number(cursor.varint()?),
            b'z' => Field::Signed(cursor.signed()?),
            b'b' => Field::Number(cursor.byte()?.into()),
            b'A' => Field::Attributes(list(cursor, Cursor::varint)?),
            b'T' => Field::Types(list(cursor, Cursor::varint)?),
            b'V' => Field::Numbers(list(cursor, Cursor::varint)?),
            b'Z' => Field::Signeds(list(cursor, Cursor::signed)?),
            b'P' => Field::Pairs(list(cursor, |cursor| {
                Ok((cursor.varint()?, cursor.varint()?))
            })?),
            b'S' => {
                let mut strings = Vec::new();
                while !cursor.is_empty() {
                    strings.push(string(artifact, cursor)?);
                }
                Field::Strings(strings)
            }
            b'B' => Field::Bytes(cursor.sized()?),
            _ => Field::Bytes(cursor.rest()),
        });
    }
    Ok(fields)
}

/// An optional attribute: index and presence in one number, 0 when it is absent.
fn optional<'a>((index, present): (u64, bool), cursor: &Cursor<'_>) -> Result<Field<'a>, Error> {
    match (index, present) {
        (0, false) => Ok(Field::Optional(None)),
        (index, true) => Ok(Field::Optional(Some(index))),
        _ => Err(cursor.damaged("absent attribute with an index")),
    }
}

fn string<'a>(artifact: &Artifact<'a>, cursor: &mut Cursor<'a>) -> Result<&'a [u8], Error> {
    let index = cursor.varint()?;
    artifact.string(index, cursor)
}

fn list<'a, T>(
    cursor: &mut Cursor<'a>,
    mut element: impl FnMut(&mut Cursor<'a>) -> Result<T, Error>,
) -> Result<Vec<T>, Error> {
    let count = cursor.count()?;
    (0..count).map(|_| element(cursor)).collect()
}
