//! The Schur form.

use crate::batch::{Batch, int, leading, part_mut};
use crate::library::library;
use crate::scalar::Scalar;
use crate::workspace::{scratch, workspace};
use std::ptr::{null, null_mut};
use waystation_pjrt::Code;
use waystation_pjrt::ffi::{Failure, Frame};

/// `gees`. `x, {mode, sort} -> x_out, vectors, eigenvalues, selected, info`; the eigenvalues of real matrices are two
/// results, real and imaginary parts. Nothing is sorted: JAX has no way to say by what.
pub(crate) fn gees<T: Scalar>(frame: &mut Frame<'_>) -> Result<(), Failure> {
    let lapack = library()?;
    frame.expect(1, if T::COMPLEX { 5 } else { 6 })?;
    let x = Batch::of_squares(frame, 0)?;
    let mode = frame.letter("mode", b"VN")?;
    let sort = frame.letter("sort", b"NS")?;
    if sort != b'N' {
        return Err(Failure::new(
            Code::Unimplemented,
            "sorted Schur forms are not built: the program cannot say which eigenvalues come first",
        ));
    }
    let vector = x.dims(&[x.rows]);
    let a = frame.output_from::<T>(0, 0)?;
    let vs = frame.output::<T>(1, &x.dims(&[x.rows, x.rows]))?;
    // Of the two kinds of eigenvalues only one is there.
    let (w, re, im): (&mut [T], &mut [T::Real], &mut [T::Real]) = if T::COMPLEX {
        (frame.output(2, &vector)?, &mut [], &mut [])
    } else {
        (
            &mut [],
            frame.output(2, &vector)?,
            frame.output(3, &vector)?,
        )
    };
    let last = if T::COMPLEX { 3 } else { 4 };
    let selected = frame.output::<i32>(last, &x.dims(&[]))?;
    let info = frame.output::<i32>(last + 1, &x.dims(&[]))?;
    if x.count == 0 {
        return Ok(());
    }
    let (n, lda) = (int(x.rows)?, leading(x.rows)?);
    let mut rwork: Vec<T::Real> = scratch(x.rows.max(1))?;
    let mut run = |index, work: &mut [T], length: i32| {
        let a = part_mut(a, index, x.size()).as_mut_ptr();
        let vs = part_mut(vs, index, x.size()).as_mut_ptr();
        let (work, rwork) = (work.as_mut_ptr(), rwork.as_mut_ptr());
        let sdim = &mut selected[index];
        let mut info = 0;
        // SAFETY: `a` and `vs` are n by n with `lda` rows, the eigenvalues have n elements, `rwork` has n, and `work` has
        // `length`, or 1 where `length` is -1. `select` and `bwork` are not used, since nothing is sorted.
        unsafe {
            if T::COMPLEX {
                let w = part_mut(w, index, x.rows).as_mut_ptr();
                lapack.gees_complex::<T>(
                    &mode,
                    &sort,
                    null(),
                    &n,
                    a,
                    &lda,
                    sdim,
                    w,
                    vs,
                    &lda,
                    work,
                    &length,
                    rwork,
                    null_mut(),
                    &mut info,
                );
            } else {
                let re = part_mut(re, index, x.rows).as_mut_ptr();
                let im = part_mut(im, index, x.rows).as_mut_ptr();
                lapack.gees_real::<T>(
                    &mode,
                    &sort,
                    null(),
                    &n,
                    a,
                    &lda,
                    sdim,
                    re,
                    im,
                    vs,
                    &lda,
                    work,
                    &length,
                    null_mut(),
                    &mut info,
                );
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
