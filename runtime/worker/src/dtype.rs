//! XLA's type numbers, PJRT's type numbers, and how many host bytes an element has.

use waystation_pjrt::ElementType;
use waystation_proto::{tensorflow::StatusProto, xla::PrimitiveType};

use crate::status;

/// An element type of arrays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Dtype {
    /// XLA's number and name.
    pub(crate) primitive: PrimitiveType,
    /// PJRT's.
    pub(crate) element: ElementType,
    /// Bytes of one element on the host and on the wire. Types below one byte take a whole byte there.
    pub(crate) host_bytes: usize,
}

/// Every type that PJRT knows: XLA's, PJRT's, host bytes.
const TYPES: &[(PrimitiveType, ElementType, usize)] = &[
    (PrimitiveType::Pred, ElementType::Pred, 1),
    (PrimitiveType::S1, ElementType::S1, 1),
    (PrimitiveType::S2, ElementType::S2, 1),
    (PrimitiveType::S4, ElementType::S4, 1),
    (PrimitiveType::S8, ElementType::S8, 1),
    (PrimitiveType::S16, ElementType::S16, 2),
    (PrimitiveType::S32, ElementType::S32, 4),
    (PrimitiveType::S64, ElementType::S64, 8),
    (PrimitiveType::U1, ElementType::U1, 1),
    (PrimitiveType::U2, ElementType::U2, 1),
    (PrimitiveType::U4, ElementType::U4, 1),
    (PrimitiveType::U8, ElementType::U8, 1),
    (PrimitiveType::U16, ElementType::U16, 2),
    (PrimitiveType::U32, ElementType::U32, 4),
    (PrimitiveType::U64, ElementType::U64, 8),
    (PrimitiveType::F16, ElementType::F16, 2),
    (PrimitiveType::F32, ElementType::F32, 4),
    (PrimitiveType::Bf16, ElementType::BF16, 2),
    (PrimitiveType::F64, ElementType::F64, 8),
    (PrimitiveType::C64, ElementType::C64, 8),
    (PrimitiveType::C128, ElementType::C128, 16),
    (PrimitiveType::F8e5m2, ElementType::F8E5M2, 1),
    (PrimitiveType::F8e4m3, ElementType::F8E4M3, 1),
    (PrimitiveType::F8e4m3fn, ElementType::F8E4M3FN, 1),
    (PrimitiveType::F8e4m3b11fnuz, ElementType::F8E4M3B11FNUZ, 1),
    (PrimitiveType::F8e3m4, ElementType::F8E3M4, 1),
    (PrimitiveType::F8e5m2fnuz, ElementType::F8E5M2FNUZ, 1),
    (PrimitiveType::F8e4m3fnuz, ElementType::F8E4M3FNUZ, 1),
    (PrimitiveType::F8e8m0fnu, ElementType::F8E8M0FNU, 1),
    (PrimitiveType::F4e2m1fn, ElementType::F4E2M1FN, 1),
];

impl Dtype {
    /// The type of XLA's number; an error names a type that has no arrays.
    pub(crate) fn of_number(number: i32) -> Result<Dtype, StatusProto> {
        let Ok(primitive) = PrimitiveType::try_from(number) else {
            return Err(status::invalid(format!(
                "{number} is no element type that this build knows"
            )));
        };
        TYPES
            .iter()
            .find(|entry| entry.0 == primitive)
            .map(Dtype::of_entry)
            .ok_or_else(|| {
                status::unimplemented(format!(
                    "arrays of {} are not built",
                    primitive.as_str_name()
                ))
            })
    }

    /// The type of a plugin's buffer.
    pub(crate) fn of_element(element: ElementType) -> Result<Dtype, StatusProto> {
        TYPES
            .iter()
            .find(|entry| entry.1 == element)
            .map(Dtype::of_entry)
            .ok_or_else(|| status::unimplemented(format!("arrays of {element:?} are not built")))
    }

    fn of_entry(&(primitive, element, host_bytes): &(PrimitiveType, ElementType, usize)) -> Dtype {
        Dtype {
            primitive,
            element,
            host_bytes,
        }
    }

    /// Whether an element takes less than a byte on the device.
    pub(crate) fn is_below_a_byte(self) -> bool {
        matches!(
            self.primitive,
            PrimitiveType::S1
                | PrimitiveType::S2
                | PrimitiveType::S4
                | PrimitiveType::U1
                | PrimitiveType::U2
                | PrimitiveType::U4
                | PrimitiveType::F4e2m1fn
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_lead_to_the_same_type_from_both_sides() {
        for entry in TYPES {
            let dtype = Dtype::of_number(entry.0 as i32).unwrap();
            assert_eq!(Dtype::of_element(entry.1).unwrap(), dtype, "{:?}", entry.0);
        }
        let f32 = Dtype::of_number(PrimitiveType::F32 as i32).unwrap();
        assert_eq!((f32.element, f32.host_bytes), (ElementType::F32, 4));
    }

    #[test]
    fn types_without_arrays_are_refused() {
        assert!(Dtype::of_number(PrimitiveType::Tuple as i32).is_err());
        assert!(Dtype::of_number(9999).is_err());
    }
}
