//! Types of array elements.

use super::Complex;

/// A type of array elements that targets read and write.
pub trait Element: sealed::Element {}

impl<T: sealed::Element> Element for T {}

pub(super) mod sealed {
    use super::Complex;

    /// # Safety
    ///
    /// `Self` looks in memory like XLA's type of the number `TYPE` (`xla::PrimitiveType`), and any bits make a valid one.
    pub unsafe trait Element: Copy + Send + Sync + 'static {
        const TYPE: i32;
    }

    macro_rules! elements {
        ($($element:ty = $number:literal;)*) => {
            $(
                // SAFETY: the language and XLA agree on this type, and it has no invalid bits.
                unsafe impl Element for $element {
                    const TYPE: i32 = $number;
                }
            )*
        };
    }

    elements! {
        i32 = 4;
        i64 = 5;
        u8 = 6;
        f32 = 11;
        f64 = 12;
        Complex<f32> = 15;
        Complex<f64> = 18;
    }
}

/// The number of `bool`. Not an [`Element`]: not any bits make one.
pub(super) const PRED: i32 = 1;

/// Bytes of an element of XLA's type `number`, and the type's name; `None` for what is less than a byte or not known.
pub(super) fn describe(number: i32) -> Option<(usize, &'static str)> {
    Some(match number {
        PRED => (1, "pred"),
        2 => (1, "s8"),
        3 => (2, "s16"),
        4 => (4, "s32"),
        5 => (8, "s64"),
        6 => (1, "u8"),
        7 => (2, "u16"),
        8 => (4, "u32"),
        9 => (8, "u64"),
        10 => (2, "f16"),
        11 => (4, "f32"),
        12 => (8, "f64"),
        15 => (8, "c64"),
        16 => (2, "bf16"),
        18 => (16, "c128"),
        _ => return None,
    })
}

/// Bits of an element of a type that [`describe`] knows.
pub(super) fn bits(number: i32) -> Option<usize> {
    describe(number).map(|(bytes, _)| 8 * bytes)
}

/// Bits of an element of any type, those of less than a byte packed, which is the least that XLA has for them.
pub(super) fn packed_bits(number: i32) -> Option<usize> {
    match number {
        21 | 22 | 32 => Some(4),
        26 | 27 => Some(2),
        30 | 31 => Some(1),
        19 | 20 | 23 | 24 | 25 | 28 | 29 | 33 => Some(8),
        other => bits(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_agree() {
        fn check<T: Element>() {
            assert_eq!(
                describe(T::TYPE).map(|(size, _)| size),
                Some(size_of::<T>())
            );
        }
        check::<i32>();
        check::<i64>();
        check::<u8>();
        check::<f32>();
        check::<f64>();
        check::<Complex<f32>>();
        check::<Complex<f64>>();
    }
}
