//! Reductions to forms with few diagonals.

use crate::batch::{Batch, int, leading, part_mut};
use crate::library::library;
use crate::scalar::Scalar;
use crate::workspace::workspace;
use waystation_pjrt::ffi::{Failure, Frame};

/// `gehrd`: to Hessenberg form. `x, {low, high} -> x_out, tau, info`; rows and columns before `low` and after `high`,
/// counted from 1, have that form already.
pub(crate) fn gehrd<T: Scalar>(frame: &mut Frame<'_>) -> Result<(), Failure> {
    let lapack = library()?;
    frame.expect(1, 3)?;
    let x = Batch::of_squares(frame, 0)?;
    let (low, high) = (frame.number("low")?, frame.number("high")?);
    let (n, lda) = (int(x.rows)?, leading(x.rows)?);
    if low < 1 || low > n.max(1) || high < low.min(n) || high > n {
        return Err(Failure::invalid(format!(
            "rows {low} to {high} are not rows of a matrix of {n}"
        )));
    }
    let reflectors = x.rows.saturating_sub(1);
    let a = frame.output_from::<T>(0, 0)?;
    let tau = frame.output::<T>(1, &x.dims(&[reflectors]))?;
    let info = frame.output::<i32>(2, &x.dims(&[]))?;
    if x.count == 0 {
        return Ok(());
    }
    let mut run = |index, work: &mut [T], length: i32| {
        let a = part_mut(a, index, x.size()).as_mut_ptr();
        let tau = part_mut(tau, index, reflectors).as_mut_ptr();
        let work = work.as_mut_ptr();
        let mut info = 0;
        // SAFETY: `a` is n by n with `lda` rows, `tau` has n - 1 elements, `low` and `high` are in range, and `work` has
        // `length`, or 1 where `length` is -1.
        unsafe {
            lapack.gehrd::<T>(&n, &low, &high, a, &lda, tau, work, &length, &mut info);
        }
        info
    };
    let (mut work, length) = workspace(|work, length| run(0, work, length))?;
    for (index, info) in info.iter_mut().enumerate() {
        *info = run(index, &mut work, length);
    }
    Ok(())
}

/// `sytrd`, `hetrd`: symmetric or Hermitian to tridiagonal. `x, {uplo} -> x_out, diagonal, off_diagonal, tau, info`.
pub(crate) fn sytrd<T: Scalar>(frame: &mut Frame<'_>) -> Result<(), Failure> {
    let lapack = library()?;
    frame.expect(1, 5)?;
    let x = Batch::of_squares(frame, 0)?;
    let uplo = frame.letter("uplo", b"LU")?;
    let (n, lda) = (int(x.rows)?, leading(x.rows)?);
    let reflectors = x.rows.saturating_sub(1);
    let a = frame.output_from::<T>(0, 0)?;
    let d = frame.output::<T::Real>(1, &x.dims(&[x.rows]))?;
    let e = frame.output::<T::Real>(2, &x.dims(&[reflectors]))?;
    let tau = frame.output::<T>(3, &x.dims(&[reflectors]))?;
    let info = frame.output::<i32>(4, &x.dims(&[]))?;
    if x.count == 0 {
        return Ok(());
    }
    let mut run = |index, work: &mut [T], length: i32| {
        let a = part_mut(a, index, x.size()).as_mut_ptr();
        let d = part_mut(d, index, x.rows).as_mut_ptr();
        let e = part_mut(e, index, reflectors).as_mut_ptr();
        let tau = part_mut(tau, index, reflectors).as_mut_ptr();
        let work = work.as_mut_ptr();
        let mut info = 0;
        // SAFETY: `a` is n by n with `lda` rows, `d` has n elements, `e` and `tau` have n - 1, and `work` has `length`, or
        // 1 where `length` is -1.
        unsafe {
            lapack.sytrd::<T>(&uplo, &n, a, &lda, d, e, tau, work, &length, &mut info);
        }
        info
    };
    let (mut work, length) = workspace(|work, length| run(0, work, length))?;
    for (index, info) in info.iter_mut().enumerate() {
        *info = run(index, &mut work, length);
    }
    Ok(())
}
