//! The four types of elements that LAPACK has.

use num_complex::{Complex, ComplexFloat};
use waystation_pjrt::ffi::Element;

/// A type of elements that LAPACK has routines for.
pub(crate) trait Scalar:
    Element + Default + ComplexFloat<Real: Element + Default + Into<f64> + reals::Real>
{
    /// Which of a routine's four symbols is this type's: S, D, C or Z.
    const INDEX: usize;
    /// Whether it is complex.
    const COMPLEX: bool;
    /// The complex type over the same reals.
    type Complex: Element + Default;

    /// A complex number of its parts.
    fn complex(re: Self::Real, im: Self::Real) -> Self::Complex;
    /// A number without imaginary part.
    fn of_real(re: Self::Real) -> Self;
}

/// What is asked of the two types of reals.
pub(crate) mod reals {
    /// `f32` or `f64`, with its limits.
    pub(crate) trait Real: num_complex::ComplexFloat<Real = Self> + PartialOrd {
        /// 1.
        const ONE: Self;
        /// Distance from 1 to the next number.
        const EPSILON: Self;
        /// Smallest normal number.
        const TINY: Self;
        /// Largest number.
        const HUGE: Self;
        /// The magnitude of `self` with the sign of `sign`.
        fn with_sign(self, sign: Self) -> Self;
        /// The larger of two; a NaN loses.
        fn larger(self, other: Self) -> Self;
    }

    macro_rules! reals {
        ($($real:ident)*) => {
            $(impl Real for $real {
                const ONE: Self = 1.0;
                const EPSILON: Self = $real::EPSILON;
                const TINY: Self = $real::MIN_POSITIVE;
                const HUGE: Self = $real::MAX;
                fn with_sign(self, sign: Self) -> Self {
                    self.copysign(sign)
                }
                fn larger(self, other: Self) -> Self {
                    self.max(other)
                }
            })*
        };
    }

    reals! { f32 f64 }
}

macro_rules! scalars {
    ($($real:ident $index:literal $complex_index:literal;)*) => {
        $(
            impl Scalar for $real {
                const INDEX: usize = $index;
                const COMPLEX: bool = false;
                type Complex = Complex<$real>;

                fn complex(re: $real, im: $real) -> Complex<$real> {
                    Complex::new(re, im)
                }
                fn of_real(re: $real) -> Self {
                    re
                }
            }

            impl Scalar for Complex<$real> {
                const INDEX: usize = $complex_index;
                const COMPLEX: bool = true;
                type Complex = Self;

                fn complex(re: $real, im: $real) -> Self {
                    Complex::new(re, im)
                }
                fn of_real(re: $real) -> Self {
                    Complex::new(re, 0.0)
                }
            }
        )*
    };
}

scalars! {
    f32 0 2;
    f64 1 3;
}
