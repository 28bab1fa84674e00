//! The table of targets.

use crate::scalar::Scalar;
use crate::{eigen, linear, qr, reduce, schur, sparse, svd, tridiagonal};
use std::marker::PhantomData;
use waystation_pjrt::ffi::{Complex, Failure, Frame, Target};
use waystation_pjrt::{Error, Plugin};

/// Registers a target with a plugin, under a name, for a platform.
type Register = fn(&Plugin, &str, &str) -> Result<(), Error>;

/// Targets that come for four types of elements, and their names for S, D, C and Z.
macro_rules! families {
    ($($family:ident = $module:ident::$function:ident: $s:literal $d:literal $c:literal $z:literal;)*) => {
        $(
            struct $family<T>(PhantomData<T>);

            impl<T: Scalar> Target for $family<T> {
                fn call(frame: &mut Frame<'_>) -> Result<(), Failure> {
                    $module::$function::<T>(frame)
                }
            }
        )*

        /// Names and how to register them.
        const FAMILIES: &[(&str, Register)] = &[
            $(
                (concat!("lapack_", $s, "_ffi"), Plugin::register_ffi::<$family<f32>>),
                (concat!("lapack_", $d, "_ffi"), Plugin::register_ffi::<$family<f64>>),
                (concat!("lapack_", $c, "_ffi"), Plugin::register_ffi::<$family<Complex<f32>>>),
                (concat!("lapack_", $z, "_ffi"), Plugin::register_ffi::<$family<Complex<f64>>>),
            )*
        ];
    };
}

families! {
    Gees = schur::gees: "sgees" "dgees" "cgees" "zgees";
    Geev = eigen::geev: "sgeev" "dgeev" "cgeev" "zgeev";
    Gehrd = reduce::gehrd: "sgehrd" "dgehrd" "cgehrd" "zgehrd";
    Geqp3 = qr::geqp3: "sgeqp3" "dgeqp3" "cgeqp3" "zgeqp3";
    Geqrf = qr::geqrf: "sgeqrf" "dgeqrf" "cgeqrf" "zgeqrf";
    Gesdd = svd::gesdd: "sgesdd" "dgesdd" "cgesdd" "zgesdd";
    Gesvd = svd::gesvd: "sgesvd" "dgesvd" "cgesvd" "zgesvd";
    Getrf = linear::getrf: "sgetrf" "dgetrf" "cgetrf" "zgetrf";
    Gtsv = tridiagonal::gtsv: "sgtsv" "dgtsv" "cgtsv" "zgtsv";
    Orgqr = qr::orgqr: "sorgqr" "dorgqr" "cungqr" "zungqr";
    Ormqr = qr::ormqr: "sormqr" "dormqr" "cunmqr" "zunmqr";
    Potrf = linear::potrf: "spotrf" "dpotrf" "cpotrf" "zpotrf";
    Syevd = eigen::syevd: "ssyevd" "dsyevd" "cheevd" "zheevd";
    Sytrd = reduce::sytrd: "ssytrd" "dsytrd" "chetrd" "zhetrd";
    Trsm = linear::trsm: "strsm" "dtrsm" "ctrsm" "ztrsm";
}

struct TridiagonalSolvePerturbed;

impl Target for TridiagonalSolvePerturbed {
    fn call(frame: &mut Frame<'_>) -> Result<(), Failure> {
        tridiagonal::perturbed(frame)
    }
}

struct CsrSparseDense;

impl Target for CsrSparseDense {
    fn call(frame: &mut Frame<'_>) -> Result<(), Failure> {
        sparse::csr_times_dense(frame)
    }
}

/// Targets that take their type of elements from the call.
const OTHERS: &[(&str, Register)] = &[
    (
        "tridiagonal_solve_perturbed_ffi",
        Plugin::register_ffi::<TridiagonalSolvePerturbed>,
    ),
    (
        "cpu_csr_sparse_dense_ffi",
        Plugin::register_ffi::<CsrSparseDense>,
    ),
];

/// Every target.
pub(crate) fn all() -> impl Iterator<Item = (&'static str, Register)> {
    FAMILIES.iter().chain(OTHERS).copied()
}
