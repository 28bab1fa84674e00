//! Eigenvalues and eigenvectors.

use crate::batch::{Batch, finite, int, leading, part, part_mut};
use crate::library::library;
use crate::scalar::Scalar;
use crate::workspace::{scratch, workspace};
use num_complex::ComplexFloat;
use waystation_pjrt::ffi::{Failure, Frame};

/// The `info` for a matrix with infinities or NaNs: argument 4, as LAPACK counts.
const NOT_FINITE: i32 = -4;

/// `syevd`, `heevd`: of symmetric and Hermitian matrices. `x, {uplo, mode} -> x_out, eigenvalues, info`.
pub(crate) fn syevd<T: Scalar>(frame: &mut Frame<'_>) -> Result<(), Failure> {
    let lapack = library()?;
    frame.expect(1, 3)?;
    let x = Batch::of_squares(frame, 0)?;
    let uplo = frame.letter("uplo", b"LU")?;
    let mode = frame.letter("mode", b"VN")?;
    let a = frame.output_from::<T>(0, 0)?;
    let w = frame.output::<T::Real>(1, &x.dims(&[x.rows]))?;
    let info = frame.output::<i32>(2, &x.dims(&[]))?;
    let (n, lda) = (int(x.rows)?, leading(x.rows)?);
    if x.count == 0 {
        return Ok(());
    }
    let [work_size, rwork_size, iwork_size] = syevd_scratch::<T>(x.rows, mode == b'V');
    let (lwork, lrwork, liwork) = (int(work_size)?, int(rwork_size)?, int(iwork_size)?);
    let mut work: Vec<T> = scratch(work_size)?;
    let mut rwork: Vec<T::Real> = scratch(if T::COMPLEX { rwork_size } else { 0 })?;
    let mut iwork: Vec<i32> = scratch(iwork_size)?;
    for (index, info) in info.iter_mut().enumerate() {
        let a = part_mut(a, index, x.size()).as_mut_ptr();
        let w = part_mut(w, index, x.rows).as_mut_ptr();
        let (work, rwork, iwork) = (work.as_mut_ptr(), rwork.as_mut_ptr(), iwork.as_mut_ptr());
        // SAFETY: `a` is n by n with `lda` rows, `w` has n elements, and the scratch spaces have the lengths that are
        // passed, which are those that LAPACK asks for.
        unsafe {
            if T::COMPLEX {
                lapack.heevd::<T>(
                    &mode, &uplo, &n, a, &lda, w, work, &lwork, rwork, &lrwork, iwork, &liwork,
                    info,
                );
            } else {
                lapack.syevd::<T>(
                    &mode, &uplo, &n, a, &lda, w, work, &lwork, iwork, &liwork, info,
                );
            }
        }
    }
    Ok(())
}

/// Lengths of `work`, `rwork` (used by complex types only) and `iwork`, from the routines' documentation. A size that
/// overflows is too large for LAPACK's integers and refused as such.
fn syevd_scratch<T: Scalar>(n: usize, vectors: bool) -> [usize; 3] {
    let square = n.saturating_mul(n);
    let sum = |constant: usize, linear: usize, quadratic: usize| {
        square
            .saturating_mul(quadratic)
            .saturating_add(n.saturating_mul(linear))
            .saturating_add(constant)
            .max(1)
    };
    match (T::COMPLEX, vectors) {
        (false, false) => [sum(1, 2, 0), 1, 1],
        (false, true) => [sum(1, 6, 2), 1, sum(3, 5, 0)],
        (true, false) => [sum(1, 1, 0), sum(0, 1, 0), 1],
        (true, true) => [sum(0, 2, 1), sum(1, 5, 2), sum(3, 5, 0)],
    }
}

/// `geev`: of any square matrix. `x, {compute_left, compute_right} -> eigenvalues, left, right, info`; the eigenvalues
/// of real matrices are two results, real and imaginary parts. Matrices that are not finite get an `info` of
/// [`NOT_FINITE`], since LAPACK may never end on them.
pub(crate) fn geev<T: Scalar>(frame: &mut Frame<'_>) -> Result<(), Failure> {
    if T::COMPLEX {
        geev_complex::<T>(frame)
    } else {
        geev_real::<T>(frame)
    }
}

fn geev_complex<T: Scalar>(frame: &mut Frame<'_>) -> Result<(), Failure> {
    let lapack = library()?;
    frame.expect(1, 4)?;
    let x = Batch::of_squares(frame, 0)?;
    let left = frame.letter("compute_left", b"VN")?;
    let right = frame.letter("compute_right", b"VN")?;
    let source = frame.input::<T>(0)?;
    let square = x.dims(&[x.rows, x.rows]);
    let w = frame.output::<T>(0, &x.dims(&[x.rows]))?;
    let vl = frame.output::<T>(1, &square)?;
    let vr = frame.output::<T>(2, &square)?;
    let info = frame.output::<i32>(3, &x.dims(&[]))?;
    if x.count == 0 {
        return Ok(());
    }
    let (n, lda) = (int(x.rows)?, leading(x.rows)?);
    let mut a: Vec<T> = scratch(x.size())?;
    let mut rwork: Vec<T::Real> = scratch(2 * x.rows.max(1))?;
    let mut run = |index, work: &mut [T], length: i32| {
        let source = part(&source, index, x.size());
        if length >= 0 && !finite(source) {
            return NOT_FINITE;
        }
        a.copy_from_slice(source);
        let w = part_mut(w, index, x.rows).as_mut_ptr();
        let vl = part_mut(vl, index, x.size()).as_mut_ptr();
        let vr = part_mut(vr, index, x.size()).as_mut_ptr();
        let (a, work, rwork) = (a.as_mut_ptr(), work.as_mut_ptr(), rwork.as_mut_ptr());
        let mut info = 0;
        // SAFETY: `a`, `vl` and `vr` are n by n with `lda` rows, `w` has n elements, `rwork` 2n, and `work` has `length`,
        // or 1 where `length` is -1.
        unsafe {
            lapack.geev_complex::<T>(
                &left, &right, &n, a, &lda, w, vl, &lda, vr, &lda, work, &length, rwork, &mut info,
            );
        }
        info
    };
    let (mut work, length) = workspace(|work, length| run(0, work, length))?;
    for (index, info) in info.iter_mut().enumerate() {
        *info = run(index, &mut work, length);
    }
    Ok(())
}

fn geev_real<T: Scalar>(frame: &mut Frame<'_>) -> Result<(), Failure> {
    let lapack = library()?;
    frame.expect(1, 5)?;
    let x = Batch::of_squares(frame, 0)?;
    let left = frame.letter("compute_left", b"VN")?;
    let right = frame.letter("compute_right", b"VN")?;
    let source = frame.input::<T>(0)?;
    let (vector, square) = (x.dims(&[x.rows]), x.dims(&[x.rows, x.rows]));
    let re = frame.output::<T::Real>(0, &vector)?;
    let im = frame.output::<T::Real>(1, &vector)?;
    let left_out = frame.output::<T::Complex>(2, &square)?;
    let right_out = frame.output::<T::Complex>(3, &square)?;
    let info = frame.output::<i32>(4, &x.dims(&[]))?;
    if x.count == 0 {
        return Ok(());
    }
    let (n, lda) = (int(x.rows)?, leading(x.rows)?);
    let mut a: Vec<T> = scratch(x.size())?;
    let mut vl: Vec<T> = scratch(x.size())?;
    let mut vr: Vec<T> = scratch(x.size())?;
    // One matrix, into `re`, `im`, `vl` and `vr`.
    let mut run = |index: usize, work: &mut [T], length: i32, to: &mut Packed<'_, T>| {
        let source = part(&source, index, x.size());
        if length >= 0 && !finite(source) {
            return NOT_FINITE;
        }
        a.copy_from_slice(source);
        let (re, im) = (to.re.as_mut_ptr(), to.im.as_mut_ptr());
        let (vl, vr) = (to.vl.as_mut_ptr(), to.vr.as_mut_ptr());
        let (a, work) = (a.as_mut_ptr(), work.as_mut_ptr());
        let mut info = 0;
        // SAFETY: `a`, `vl` and `vr` are n by n with `lda` rows, `re` and `im` have n elements, and `work` has `length`,
        // or 1 where `length` is -1.
        unsafe {
            lapack.geev_real::<T>(
                &left, &right, &n, a, &lda, re, im, vl, &lda, vr, &lda, work, &length, &mut info,
            );
        }
        info
    };
    let (mut work, length) = workspace(|work, length| {
        let mut to = Packed {
            re: part_mut(re, 0, x.rows),
            im: part_mut(im, 0, x.rows),
            vl: &mut vl,
            vr: &mut vr,
        };
        run(0, work, length, &mut to)
    })?;
    for (index, info) in info.iter_mut().enumerate() {
        let mut to = Packed {
            re: part_mut(re, index, x.rows),
            im: part_mut(im, index, x.rows),
            vl: &mut vl,
            vr: &mut vr,
        };
        *info = run(index, &mut work, length, &mut to);
        if *info == 0 {
            unpack(to.im, to.vl, part_mut(left_out, index, x.size()));
            unpack(to.im, to.vr, part_mut(right_out, index, x.size()));
        }
    }
    Ok(())
}

/// Where the routine for real matrices puts its results.
struct Packed<'a, T: Scalar> {
    re: &'a mut [T::Real],
    im: &'a mut [T::Real],
    vl: &'a mut [T],
    vr: &'a mut [T],
}

/// Writes out eigenvectors of a real matrix. Conjugate pairs of eigenvalues stand side by side; of their vectors LAPACK
/// stores the first, as a column of real parts and one of imaginary parts.
fn unpack<T: Scalar>(im: &[T::Real], packed: &[T], out: &mut [T::Complex]) {
    let n = im.len();
    let zero = T::Real::default();
    let mut column = 0;
    while column < n {
        // Without a neighbour there is no pair, whatever the routine says.
        let pair = im[column] != zero && !im[column].is_nan() && column + 1 < n;
        let first = part(packed, column, n);
        if pair {
            let second = part(packed, column + 1, n);
            for row in 0..n {
                let (re, im) = (first[row].re(), second[row].re());
                out[column * n + row] = T::complex(re, im);
                out[(column + 1) * n + row] = T::complex(re, -im);
            }
            column += 2;
        } else {
            for row in 0..n {
                out[column * n + row] = T::complex(first[row].re(), zero);
            }
            column += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use num_complex::Complex;

    #[test]
    fn pairs_of_eigenvectors_are_conjugates() {
        // A real value, then a pair.
        let im = [0.0_f64, 2.0, -2.0];
        let packed = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0];
        let mut out = [Complex::new(0.0, 0.0); 9];
        unpack::<f64>(&im, &packed, &mut out);
        let c = Complex::new;
        let wanted = [
            [c(1.0, 0.0), c(2.0, 0.0), c(3.0, 0.0)],
            [c(4.0, 7.0), c(5.0, 8.0), c(6.0, 9.0)],
            [c(4.0, -7.0), c(5.0, -8.0), c(6.0, -9.0)],
        ];
        assert_eq!(out.as_slice(), wanted.concat());
    }
}
