//! Systems of equations: Cholesky and LU factors, triangular solves.

use crate::batch::{Batch, int, leading, part, part_mut};
use crate::library::library;
use crate::scalar::Scalar;
use waystation_pjrt::ffi::{Failure, Frame};

/// `potrf`: the Cholesky factor. `x, {uplo} -> x_out, info`.
pub(crate) fn potrf<T: Scalar>(frame: &mut Frame<'_>) -> Result<(), Failure> {
    let lapack = library()?;
    frame.expect(1, 2)?;
    let x = Batch::of_squares(frame, 0)?;
    let uplo = frame.letter("uplo", b"LU")?;
    let a = frame.output_from::<T>(0, 0)?;
    let info = frame.output::<i32>(1, &x.dims(&[]))?;
    let (n, lda) = (int(x.rows)?, leading(x.rows)?);
    for (index, info) in info.iter_mut().enumerate() {
        let a = part_mut(a, index, x.size());
        // SAFETY: `a` is n by n with `lda` rows, `uplo` is L or U.
        unsafe { lapack.potrf::<T>(&uplo, &n, a.as_mut_ptr(), &lda, info) };
    }
    Ok(())
}

/// `getrf`: the LU factors with partial pivoting. `x -> x_out, ipiv, info`; pivots count from 1.
pub(crate) fn getrf<T: Scalar>(frame: &mut Frame<'_>) -> Result<(), Failure> {
    let lapack = library()?;
    frame.expect(1, 3)?;
    let x = Batch::of(frame, 0)?;
    let a = frame.output_from::<T>(0, 0)?;
    let ipiv = frame.output::<i32>(1, &x.dims(&[x.least()]))?;
    let info = frame.output::<i32>(2, &x.dims(&[]))?;
    let (m, n, lda) = (int(x.rows)?, int(x.columns)?, leading(x.rows)?);
    for (index, info) in info.iter_mut().enumerate() {
        let a = part_mut(a, index, x.size());
        let ipiv = part_mut(ipiv, index, x.least());
        // SAFETY: `a` is m by n with `lda` rows, `ipiv` has as many elements as the lesser of both.
        unsafe { lapack.getrf::<T>(&m, &n, a.as_mut_ptr(), &lda, ipiv.as_mut_ptr(), info) };
    }
    Ok(())
}

/// `trsm`: solves with a triangular matrix `x` on either side. `x, y, {side, uplo, trans_x, diag} -> y_out`.
pub(crate) fn trsm<T: Scalar>(frame: &mut Frame<'_>) -> Result<(), Failure> {
    let lapack = library()?;
    frame.expect(2, 1)?;
    let y = Batch::of(frame, 1)?;
    let side = frame.letter("side", b"LR")?;
    let uplo = frame.letter("uplo", b"LU")?;
    let trans = frame.letter("trans_x", b"NTC")?;
    let diag = frame.letter("diag", b"NU")?;
    let order = if side == b'L' { y.rows } else { y.columns };
    y.expect(frame, 0, &[order, order])?;
    let a = frame.input::<T>(0)?;
    let b = frame.output_from::<T>(0, 1)?;
    let (m, n) = (int(y.rows)?, int(y.columns)?);
    let (lda, ldb) = (leading(order)?, leading(y.rows)?);
    for index in 0..y.count {
        let a = part(&a, index, order * order);
        let b = part_mut(b, index, y.size());
        // SAFETY: `a` is square of the order that `side` asks for with `lda` rows, `b` is m by n with `ldb` rows, and
        // the letters are among those that BLAS knows.
        unsafe {
            lapack.trsm::<T>(
                &side,
                &uplo,
                &trans,
                &diag,
                &m,
                &n,
                &T::one(),
                a.as_ptr(),
                &lda,
                b.as_mut_ptr(),
                &ldb,
            );
        }
    }
    Ok(())
}
