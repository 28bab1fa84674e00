//! Named values: options of a client, attributes of a device, properties of a program.

use crate::api;
use crate::sys::{NamedValuePayload, PJRT_NamedValue, named_value};
use std::mem::offset_of;
use std::ptr::null_mut;

/// A value of one of the types that the C API knows.
#[derive(Clone, Debug, PartialEq)]
pub enum OptionValue {
    /// Text.
    String(String),
    /// A 64-bit integer.
    Int64(i64),
    /// A list of 64-bit integers.
    Int64List(Vec<i64>),
    /// A 32-bit float.
    Float(f32),
    /// True or false.
    Bool(bool),
}

/// The C form of `options`, which it borrows: the result must not outlive them.
pub(crate) fn to_raw(options: &[(String, OptionValue)]) -> Vec<PJRT_NamedValue> {
    let one = |(name, value): &(String, OptionValue)| {
        let (kind, payload, value_size) = match value {
            OptionValue::String(text) => (
                named_value::STRING,
                NamedValuePayload {
                    string: text.as_ptr().cast(),
                },
                text.len(),
            ),
            OptionValue::Int64(number) => {
                (named_value::INT64, NamedValuePayload { int64: *number }, 1)
            }
            OptionValue::Int64List(list) => (
                named_value::INT64_LIST,
                NamedValuePayload {
                    int64_list: list.as_ptr(),
                },
                list.len(),
            ),
            OptionValue::Float(number) => {
                (named_value::FLOAT, NamedValuePayload { float: *number }, 1)
            }
            OptionValue::Bool(truth) => {
                (named_value::BOOL, NamedValuePayload { boolean: *truth }, 1)
            }
        };
        PJRT_NamedValue {
            struct_size: offset_of!(PJRT_NamedValue, value_size) + size_of::<usize>(),
            extension_start: null_mut(),
            name: name.as_ptr().cast(),
            name_size: name.len(),
            kind,
            value: payload,
            value_size,
        }
    };
    options.iter().map(one).collect()
}

/// Copies named values that the plugin lends; those of a type that we do not know are left out.
///
/// # Safety
///
/// `values` is null or points to `count` valid named values.
pub(crate) unsafe fn from_raw(
    values: *const PJRT_NamedValue,
    count: usize,
) -> Vec<(String, OptionValue)> {
    // SAFETY: passed on from this function's contract.
    let values = unsafe { api::slice(values, count) };
    let one = |raw: &PJRT_NamedValue| {
        // SAFETY: `kind` says which member of the union is valid, and `value_size` how long what it points to.
        let value = unsafe {
            match raw.kind {
                named_value::STRING => {
                    OptionValue::String(api::text(raw.value.string, raw.value_size))
                }
                named_value::INT64 => OptionValue::Int64(raw.value.int64),
                named_value::INT64_LIST => OptionValue::Int64List(
                    api::slice(raw.value.int64_list, raw.value_size).to_vec(),
                ),
                named_value::FLOAT => OptionValue::Float(raw.value.float),
                named_value::BOOL => OptionValue::Bool(raw.value.boolean),
                _ => return None,
            }
        };
        // SAFETY: a valid named value has a name of that length.
        let name = unsafe { api::text(raw.name, raw.name_size) };
        Some((name, value))
    };
    values.iter().filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_survive_the_way_through_c() {
        let values = vec![
            ("text".to_owned(), OptionValue::String("naïve".to_owned())),
            ("empty".to_owned(), OptionValue::String(String::new())),
            ("number".to_owned(), OptionValue::Int64(i64::MIN)),
            ("list".to_owned(), OptionValue::Int64List(vec![3, -1])),
            ("none".to_owned(), OptionValue::Int64List(Vec::new())),
            ("float".to_owned(), OptionValue::Float(1.5)),
            ("truth".to_owned(), OptionValue::Bool(true)),
        ];
        let raw = to_raw(&values);
        // SAFETY: `raw` borrows from `values`, which live.
        let back = unsafe { from_raw(raw.as_ptr(), raw.len()) };
        assert_eq!(back, values);
    }
}
