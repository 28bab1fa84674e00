//! QR factors, with and without pivoting, and the orthogonal matrix in them.

use crate::batch::{Batch, int, leading, part, part_mut};
use crate::library::library;
use crate::scalar::Scalar;
use crate::workspace::{scratch, workspace};
use waystation_pjrt::ffi::{Failure, Frame};

/// `geqrf`: R above the diagonal, the reflectors of Q below it and in `tau`. `x -> x_out, tau`.
pub(crate) fn geqrf<T: Scalar>(frame: &mut Frame<'_>) -> Result<(), Failure> {
    let lapack = library()?;
    frame.expect(1, 2)?;
    let x = Batch::of(frame, 0)?;
    let a = frame.output_from::<T>(0, 0)?;
    let tau = frame.output::<T>(1, &x.dims(&[x.least()]))?;
    if x.count == 0 {
        return Ok(());
    }
    let (m, n, lda) = (int(x.rows)?, int(x.columns)?, leading(x.rows)?);
    let mut run = |index, work: &mut [T], length: i32| {
        let a = part_mut(a, index, x.size());
        let tau = part_mut(tau, index, x.least());
        let mut info = 0;
        // SAFETY: `a` is m by n with `lda` rows, `tau` has as many elements as the lesser of both, and `work` has
        // `length`, or 1 where `length` is -1.
        unsafe {
            lapack.geqrf::<T>(
                &m,
                &n,
                a.as_mut_ptr(),
                &lda,
                tau.as_mut_ptr(),
                work.as_mut_ptr(),
                &length,
                &mut info,
            );
        }
        info
    };
    let (mut work, length) = workspace(|work, length| run(0, work, length))?;
    for index in 0..x.count {
        run(index, &mut work, length);
    }
    Ok(())
}

/// `geqp3`: as [`geqrf`] of the columns in the order `jpvt`, which counts from 1. `x, jpvt -> x_out, jpvt_out, tau`.
pub(crate) fn geqp3<T: Scalar>(frame: &mut Frame<'_>) -> Result<(), Failure> {
    let lapack = library()?;
    frame.expect(2, 3)?;
    let x = Batch::of(frame, 0)?;
    x.expect(frame, 1, &[x.columns])?;
    let a = frame.output_from::<T>(0, 0)?;
    let jpvt = frame.output_from::<i32>(1, 1)?;
    let tau = frame.output::<T>(2, &x.dims(&[x.least()]))?;
    if x.count == 0 {
        return Ok(());
    }
    let (m, n, lda) = (int(x.rows)?, int(x.columns)?, leading(x.rows)?);
    let mut rwork: Vec<T::Real> = scratch(2 * x.columns)?;
    let mut run = |index, work: &mut [T], length: i32| {
        let a = part_mut(a, index, x.size()).as_mut_ptr();
        let jpvt = part_mut(jpvt, index, x.columns).as_mut_ptr();
        let tau = part_mut(tau, index, x.least()).as_mut_ptr();
        let (work, rwork) = (work.as_mut_ptr(), rwork.as_mut_ptr());
        let mut info = 0;
        // SAFETY: `a` is m by n with `lda` rows, `jpvt` has n elements, of which any value other than 0 only says that
        // the column moves to the front, `tau` has as many as the lesser of both, `rwork` has 2n, and `work` has
        // `length`, or 1 where `length` is -1.
        unsafe {
            if T::COMPLEX {
                lapack.geqp3_complex::<T>(
                    &m, &n, a, &lda, jpvt, tau, work, &length, rwork, &mut info,
                );
            } else {
                lapack.geqp3_real::<T>(&m, &n, a, &lda, jpvt, tau, work, &length, &mut info);
            }
        }
        info
    };
    let (mut work, length) = workspace(|work, length| run(0, work, length))?;
    for index in 0..x.count {
        run(index, &mut work, length);
    }
    Ok(())
}

/// `orgqr`, `ungqr`: Q from its reflectors. `x, tau -> x_out`.
pub(crate) fn orgqr<T: Scalar>(frame: &mut Frame<'_>) -> Result<(), Failure> {
    let lapack = library()?;
    frame.expect(2, 1)?;
    let x = Batch::of(frame, 0)?;
    let reflectors = reflectors(frame, &x, x.columns)?;
    if x.columns > x.rows {
        return Err(Failure::invalid(format!(
            "Q of {} rows cannot have {} columns",
            x.rows, x.columns
        )));
    }
    let tau = frame.input::<T>(1)?;
    let a = frame.output_from::<T>(0, 0)?;
    if x.count == 0 {
        return Ok(());
    }
    let (m, n, k, lda) = (
        int(x.rows)?,
        int(x.columns)?,
        int(reflectors)?,
        leading(x.rows)?,
    );
    let mut run = |index, work: &mut [T], length: i32| {
        let a = part_mut(a, index, x.size());
        let tau = part(&tau, index, reflectors);
        let mut info = 0;
        // SAFETY: `a` is m by n with `lda` rows, `tau` has k elements, k <= n <= m, and `work` has `length`, or 1 where
        // `length` is -1.
        unsafe {
            lapack.orgqr::<T>(
                &m,
                &n,
                &k,
                a.as_mut_ptr(),
                &lda,
                tau.as_ptr(),
                work.as_mut_ptr(),
                &length,
                &mut info,
            );
        }
        info
    };
    let (mut work, length) = workspace(|work, length| run(0, work, length))?;
    for index in 0..x.count {
        run(index, &mut work, length);
    }
    Ok(())
}

/// `ormqr`, `unmqr`: a product with Q, from its reflectors. `a, tau, c, {left, transpose} -> c_out`.
pub(crate) fn ormqr<T: Scalar>(frame: &mut Frame<'_>) -> Result<(), Failure> {
    let lapack = library()?;
    frame.expect(3, 1)?;
    let a = Batch::of(frame, 0)?;
    let c = Batch::of(frame, 2)?;
    let reflectors = reflectors(frame, &a, a.columns)?;
    let left = frame.flag("left")?;
    let transpose = frame.flag("transpose")?;
    let order = if left { c.rows } else { c.columns };
    c.expect(frame, 0, &[order, a.columns])?;
    if reflectors > order {
        return Err(Failure::invalid(format!(
            "Q of order {order} cannot have {reflectors} reflectors"
        )));
    }
    // LAPACK writes to the factors while it works.
    let mut factors = frame.input::<T>(0)?.into_owned();
    let tau = frame.input::<T>(1)?;
    let out = frame.output_from::<T>(0, 2)?;
    if c.count == 0 {
        return Ok(());
    }
    let side = if left { b'L' } else { b'R' };
    let trans = match (transpose, T::COMPLEX) {
        (false, _) => b'N',
        (true, false) => b'T',
        (true, true) => b'C',
    };
    let (m, n, k) = (int(c.rows)?, int(c.columns)?, int(reflectors)?);
    let (lda, ldc) = (leading(order)?, leading(c.rows)?);
    let mut run = |index, work: &mut [T], length: i32| {
        let factors = part_mut(&mut factors, index, a.size());
        let tau = part(&tau, index, reflectors);
        let out = part_mut(out, index, c.size());
        let mut info = 0;
        // SAFETY: `factors` has `lda` rows, as many as the order of Q on this side, and at least k columns; `tau` has k
        // elements, k is no more than the order; `out` is m by n with `ldc` rows; `work` has `length`, or 1 where
        // `length` is -1.
        unsafe {
            lapack.ormqr::<T>(
                &side,
                &trans,
                &m,
                &n,
                &k,
                factors.as_mut_ptr(),
                &lda,
                tau.as_ptr(),
                out.as_mut_ptr(),
                &ldc,
                work.as_mut_ptr(),
                &length,
                &mut info,
            );
        }
        info
    };
    let (mut work, length) = workspace(|work, length| run(0, work, length))?;
    for index in 0..c.count {
        run(index, &mut work, length);
    }
    Ok(())
}

/// How many reflectors operand 1 has for each matrix of `x`; at most `columns`.
fn reflectors(frame: &Frame<'_>, x: &Batch, columns: usize) -> Result<usize, Failure> {
    let count = frame.dims(1)?.last().copied().unwrap_or_default();
    x.expect(frame, 1, &[count])?;
    if count > columns {
        return Err(Failure::invalid(format!(
            "operand 1 has {count} reflectors for {columns} columns"
        )));
    }
    Ok(count)
}
