//! Singular values and vectors.

use crate::batch::{Batch, int, leading, part_mut};
use crate::library::library;
use crate::scalar::Scalar;
use crate::workspace::{scratch, workspace};
use waystation_pjrt::ffi::{Failure, Frame};

/// `gesdd`: by divide and conquer. `x, {mode} -> x_out, s, u, vt, info`.
///
/// `mode` is `A` for all vectors, `S` for as many as there are values, `N` for none; `u` and `vt` then hold anything.
pub(crate) fn gesdd<T: Scalar>(frame: &mut Frame<'_>) -> Result<(), Failure> {
    svd::<T>(frame, Algorithm::DivideAndConquer)
}

/// `gesvd`: by QR iteration. As [`gesdd`].
pub(crate) fn gesvd<T: Scalar>(frame: &mut Frame<'_>) -> Result<(), Failure> {
    svd::<T>(frame, Algorithm::Qr)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Algorithm {
    DivideAndConquer,
    Qr,
}

fn svd<T: Scalar>(frame: &mut Frame<'_>, algorithm: Algorithm) -> Result<(), Failure> {
    let lapack = library()?;
    frame.expect(1, 5)?;
    let x = Batch::of(frame, 0)?;
    let mode = frame.letter("mode", b"ASN")?;
    let least = x.least();
    // How many left and right vectors the results have. Without vectors either is fine, LAPACK does not look at them.
    let vectors = match mode {
        b'A' => (x.rows, x.columns),
        b'S' => (least, least),
        _ => {
            let all_left = frame.output_dims(2)? == x.dims(&[x.rows, x.rows]);
            let all_right = frame.output_dims(3)? == x.dims(&[x.columns, x.columns]);
            (
                if all_left { x.rows } else { least },
                if all_right { x.columns } else { least },
            )
        }
    };
    let a = frame.output_from::<T>(0, 0)?;
    let s = frame.output::<T::Real>(1, &x.dims(&[least]))?;
    let u = frame.output::<T>(2, &x.dims(&[x.rows, vectors.0]))?;
    let vt = frame.output::<T>(3, &x.dims(&[vectors.1, x.columns]))?;
    let info = frame.output::<i32>(4, &x.dims(&[]))?;
    if x.count == 0 {
        return Ok(());
    }
    let (m, n, lda) = (int(x.rows)?, int(x.columns)?, leading(x.rows)?);
    let (ldu, ldvt) = (lda, leading(vectors.1)?);
    let mut iwork: Vec<i32> = scratch(least.saturating_mul(8))?;
    let mut rwork: Vec<T::Real> = scratch(real_scratch::<T>(&x, mode, algorithm))?;
    let mut run = |index, work: &mut [T], length: i32| {
        let a = part_mut(a, index, x.size()).as_mut_ptr();
        let s = part_mut(s, index, least).as_mut_ptr();
        let u = part_mut(u, index, x.rows * vectors.0).as_mut_ptr();
        let vt = part_mut(vt, index, vectors.1 * x.columns).as_mut_ptr();
        let (work, rwork, iwork) = (work.as_mut_ptr(), rwork.as_mut_ptr(), iwork.as_mut_ptr());
        let mut info = 0;
        // SAFETY: `a` is m by n with `lda` rows, `s` has as many elements as the lesser of both, `u` has `ldu` rows and
        // `vt` has `ldvt`, with the columns that the mode asks for; `iwork` has 8 for each singular value, `rwork` what
        // LAPACK asks for, `work` has `length`, or 1 where `length` is -1.
        unsafe {
            match (algorithm, T::COMPLEX) {
                (Algorithm::DivideAndConquer, false) => lapack.gesdd_real::<T>(
                    &mode, &m, &n, a, &lda, s, u, &ldu, vt, &ldvt, work, &length, iwork, &mut info,
                ),
                (Algorithm::DivideAndConquer, true) => lapack.gesdd_complex::<T>(
                    &mode, &m, &n, a, &lda, s, u, &ldu, vt, &ldvt, work, &length, rwork, iwork,
                    &mut info,
                ),
                (Algorithm::Qr, false) => lapack.gesvd_real::<T>(
                    &mode, &mode, &m, &n, a, &lda, s, u, &ldu, vt, &ldvt, work, &length, &mut info,
                ),
                (Algorithm::Qr, true) => lapack.gesvd_complex::<T>(
                    &mode, &mode, &m, &n, a, &lda, s, u, &ldu, vt, &ldvt, work, &length, rwork,
                    &mut info,
                ),
            }
        }
        info
    };
    let (mut work, length) = workspace(|work, length| run(0, work, length))?;
    for (index, info) in info.iter_mut().enumerate() {
        *info = run(index, &mut work, length);
    }
    Ok(())
}

/// Reals of scratch space that the routines ask for in their documentation. A size that overflows finds no memory.
fn real_scratch<T: Scalar>(x: &Batch, mode: u8, algorithm: Algorithm) -> usize {
    let (least, most) = (x.least(), x.rows.max(x.columns));
    if !T::COMPLEX {
        return 0;
    }
    match (algorithm, mode) {
        (Algorithm::Qr, _) => least.saturating_mul(5),
        (Algorithm::DivideAndConquer, b'N') => least.saturating_mul(7),
        (Algorithm::DivideAndConquer, _) => {
            let square = least.saturating_mul(least);
            let tall = square
                .saturating_mul(5)
                .saturating_add(least.saturating_mul(5));
            let wide = most
                .saturating_mul(least)
                .saturating_add(square)
                .saturating_mul(2)
                .saturating_add(least);
            tall.max(wide)
        }
    }
}
