//! Element types of arrays.

use crate::error::{Code, Error};

macro_rules! element_types {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $bytes:literal;)*) => {
        /// Type of an array's elements, numbered as `PJRT_Buffer_Type` (not as `xla::PrimitiveType`).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(i32)]
        pub enum ElementType {
            $($(#[$doc])* $name = $number,)*
        }

        impl ElementType {
            /// Every type.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The type of a number of `PJRT_Buffer_Type`.
            #[must_use]
            pub fn from_number(number: i32) -> Option<Self> {
                match number {
                    $($number => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// Bytes of one element in host memory. Types narrower than a byte take a whole one, the value in
            /// its low bits, however densely a device packs them; a token takes none.
            #[must_use]
            pub fn host_bytes(self) -> usize {
                match self {
                    $(Self::$name => $bytes,)*
                }
            }
        }
    };
}

element_types! {
    /// Boolean, one byte of 0 or 1.
    Pred = 1, 1;
    /// Signed integer of 8 bits.
    S8 = 2, 1;
    /// Signed integer of 16 bits.
    S16 = 3, 2;
    /// Signed integer of 32 bits.
    S32 = 4, 4;
    /// Signed integer of 64 bits.
    S64 = 5, 8;
    /// Unsigned integer of 8 bits.
    U8 = 6, 1;
    /// Unsigned integer of 16 bits.
    U16 = 7, 2;
    /// Unsigned integer of 32 bits.
    U32 = 8, 4;
    /// Unsigned integer of 64 bits.
    U64 = 9, 8;
    /// IEEE half precision.
    F16 = 10, 2;
    /// IEEE single precision.
    F32 = 11, 4;
    /// IEEE double precision.
    F64 = 12, 8;
    /// The upper half of a single precision float.
    BF16 = 13, 2;
    /// Complex of two F32.
    C64 = 14, 8;
    /// Complex of two F64.
    C128 = 15, 16;
    /// 8-bit float, 5 bits of exponent, with infinities.
    F8E5M2 = 16, 1;
    /// 8-bit float, 4 bits of exponent, no infinities.
    F8E4M3FN = 17, 1;
    /// 8-bit float, 4 bits of exponent with bias 11, one NaN, no negative zero.
    F8E4M3B11FNUZ = 18, 1;
    /// 8-bit float, 5 bits of exponent, one NaN, no negative zero.
    F8E5M2FNUZ = 19, 1;
    /// 8-bit float, 4 bits of exponent, one NaN, no negative zero.
    F8E4M3FNUZ = 20, 1;
    /// Signed integer of 4 bits.
    S4 = 21, 1;
    /// Unsigned integer of 4 bits.
    U4 = 22, 1;
    /// A token: orders side effects, holds no data.
    Token = 23, 0;
    /// Signed integer of 2 bits.
    S2 = 24, 1;
    /// Unsigned integer of 2 bits.
    U2 = 25, 1;
    /// 8-bit float, 4 bits of exponent, with infinities.
    F8E4M3 = 26, 1;
    /// 8-bit float, 3 bits of exponent.
    F8E3M4 = 27, 1;
    /// 8 bits of exponent and nothing else.
    F8E8M0FNU = 28, 1;
    /// 4-bit float, 2 bits of exponent.
    F4E2M1FN = 29, 1;
    /// Signed integer of 1 bit (API 0.94).
    S1 = 30, 1;
    /// Unsigned integer of 1 bit (API 0.94).
    U1 = 31, 1;
}

impl ElementType {
    /// The number in `PJRT_Buffer_Type`.
    #[must_use]
    pub fn number(self) -> i32 {
        self as i32
    }

    /// Minor version of the C API that brought the type. A plugin aborts the process at a number that it does not
    /// know, so younger types must not reach it.
    fn since(self) -> i32 {
        match self {
            Self::F8E8M0FNU | Self::F4E2M1FN => 63,
            Self::S1 | Self::U1 => 94,
            _ => 0,
        }
    }

    /// Refuses a type that a plugin of this version does not know.
    pub(crate) fn known_to(self, version: (i32, i32), function: &'static str) -> Result<(), Error> {
        if version >= (0, self.since()) {
            return Ok(());
        }
        Err(Error::own(
            Code::Unimplemented,
            function,
            format!(
                "this plugin speaks API {}.{} and does not know the element type {self:?}; use a newer plugin",
                version.0, version.1
            ),
        ))
    }

    /// The type that a function of the plugin reported.
    pub(crate) fn reported(number: i32, function: &'static str) -> Result<Self, Error> {
        Self::from_number(number).ok_or_else(|| {
            Error::contract(function, &format!("gave the unknown element type {number}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_dense_and_go_both_ways() {
        for (index, ty) in ElementType::ALL.iter().enumerate() {
            assert_eq!(usize::try_from(ty.number()), Ok(index + 1));
            assert_eq!(ElementType::from_number(ty.number()), Some(*ty));
        }
        assert_eq!(ElementType::from_number(0), None);
        assert_eq!(ElementType::from_number(32), None);
    }
}
