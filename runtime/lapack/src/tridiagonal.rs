//! Tridiagonal systems.

use crate::batch::{Batch, int, leading, part, part_mut};
use crate::library::library;
use crate::scalar::{Scalar, reals::Real};
use crate::workspace::scratch;
use num_complex::ComplexFloat;
use waystation_pjrt::ffi::{Complex, Failure, Frame};

/// `gtsv`: by elimination with pivoting. `dl, d, du, b -> dl_out, d_out, du_out, b_out, info`. All diagonals are as long
/// as the matrix is high; the first element of `dl` and the last of `du` do not count.
pub(crate) fn gtsv<T: Scalar>(frame: &mut Frame<'_>) -> Result<(), Failure> {
    let lapack = library()?;
    frame.expect(4, 5)?;
    let x = diagonals(frame)?;
    let n = x.rows;
    let dl = frame.output_from::<T>(0, 0)?;
    let d = frame.output_from::<T>(1, 1)?;
    let du = frame.output_from::<T>(2, 2)?;
    let b = frame.output_from::<T>(3, 3)?;
    let info = frame.output::<i32>(4, &x.dims(&[]))?;
    let (order, nrhs, ldb) = (int(n)?, int(x.columns)?, leading(n)?);
    for (index, info) in info.iter_mut().enumerate() {
        *info = 0;
        let [_, dl @ ..] = part_mut(dl, index, n) else {
            continue;
        };
        let (d, du) = (part_mut(d, index, n), part_mut(du, index, n));
        let b = part_mut(b, index, x.size());
        // SAFETY: `dl` has n - 1 elements, `d` and `du` have n, and `b` is n by nrhs with `ldb` rows.
        unsafe {
            lapack.gtsv::<T>(
                &order,
                &nrhs,
                dl.as_mut_ptr(),
                d.as_mut_ptr(),
                du.as_mut_ptr(),
                b.as_mut_ptr(),
                &ldb,
                info,
            );
        }
    }
    Ok(())
}

/// The shape of operand 3, with which three diagonals agree.
fn diagonals(frame: &Frame<'_>) -> Result<Batch, Failure> {
    let x = Batch::of(frame, 3)?;
    for index in 0..3 {
        x.expect(frame, index, &[x.rows])?;
    }
    Ok(x)
}

/// `tridiagonal_solve_perturbed_ffi`: as [`gtsv`] for matrices that may be singular, whose smallest pivots are moved
/// away from 0. `dl, d, du, b -> x`.
pub(crate) fn perturbed(frame: &mut Frame<'_>) -> Result<(), Failure> {
    frame.expect(4, 1)?;
    if frame.is::<f32>(1)? {
        perturbed_of::<f32>(frame)
    } else if frame.is::<f64>(1)? {
        perturbed_of::<f64>(frame)
    } else if frame.is::<Complex<f32>>(1)? {
        perturbed_of::<Complex<f32>>(frame)
    } else {
        perturbed_of::<Complex<f64>>(frame)
    }
}

fn perturbed_of<T: Scalar>(frame: &mut Frame<'_>) -> Result<(), Failure> {
    let x = diagonals(frame)?;
    let n = x.rows;
    let dl = frame.input::<T>(0)?;
    let d = frame.input::<T>(1)?;
    let du = frame.input::<T>(2)?;
    let out = frame.output_from::<T>(0, 3)?;
    let mut upper = Upper {
        rows: scratch(n)?,
        row: scratch(x.columns)?,
    };
    for index in 0..x.count {
        let diagonals = [part(&dl, index, n), part(&d, index, n), part(&du, index, n)];
        if n > 0 {
            upper.solve(diagonals, part_mut(out, index, x.size()), x.columns);
        }
    }
    Ok(())
}

/// The upper factor and scratch space for one row of the right-hand sides.
struct Upper<T: Scalar> {
    /// The diagonal and the two above it.
    rows: Vec<[T; 3]>,
    row: Vec<T>,
}

impl<T: Scalar> Upper<T> {
    /// Solves in place. The method is that of LAPACK's LAGTF and LAGTS: elimination with a choice of two rows, each
    /// weighed by its own size, then substitution from the end, where a pivot so small that a division by it would
    /// overflow is moved away from 0 by ever more, starting with the rounding error of the factor's largest element.
    fn solve(&mut self, [dl, d, du]: [&[T]; 3], b: &mut [T], columns: usize) {
        let n = d.len();
        let zero = T::default();
        let u = &mut self.rows;
        u.fill([zero; 3]);
        u[0] = [d[0], if n > 1 { du[0] } else { zero }, zero];
        let mut size = u[0][0].abs() + u[0][1].abs();
        for k in 0..n - 1 {
            // The next row as it is, before anything is taken from it.
            let above = if k + 2 < n { du[k + 1] } else { zero };
            let next = [dl[k + 1], d[k + 1], above];
            let next_size = next[0].abs() + next[1].abs() + next[2].abs();
            let weight = |pivot: T, size: T::Real| {
                if pivot == zero {
                    T::Real::default()
                } else {
                    pivot.abs() / size
                }
            };
            if next[0] == zero {
                u[k + 1] = [next[1], next[2], zero];
                size = next_size;
            } else if weight(next[0], next_size) <= weight(u[k][0], size) {
                let factor = next[0] / u[k][0];
                u[k + 1] = [next[1] - factor * u[k][1], next[2], zero];
                size = next_size;
                eliminate(b, n, k, |this, next| (this, next - factor * this));
            } else {
                let factor = u[k][0] / next[0];
                let old = u[k][1];
                u[k] = next;
                u[k + 1] = [old - factor * next[1], -(factor * next[2]), zero];
                size = u[k + 1][0].abs() + u[k + 1][1].abs();
                eliminate(b, n, k, |this, next| (next, this - factor * next));
            }
        }
        let largest = u
            .iter()
            .flatten()
            .fold(T::Real::default(), |most, value| most.larger(value.abs()));
        let perturb = T::Real::EPSILON * largest;
        for k in (0..n).rev() {
            for (column, value) in self.row.iter_mut().enumerate() {
                let x = part(b, column, n);
                let mut sum = x[k];
                if k + 1 < n {
                    sum = sum - u[k][1] * x[k + 1];
                }
                if k + 2 < n {
                    sum = sum - u[k][2] * x[k + 2];
                }
                *value = sum;
            }
            let pivot = tame(u[k][0], perturb, &mut self.row);
            for (column, value) in self.row.iter().take(columns).enumerate() {
                b[column * n + k] = *value / pivot;
            }
        }
    }
}

/// Replaces rows `k` and `k + 1` of every right-hand side.
fn eliminate<T: Copy>(b: &mut [T], n: usize, k: usize, step: impl Fn(T, T) -> (T, T)) {
    for column in b.chunks_exact_mut(n) {
        (column[k], column[k + 1]) = step(column[k], column[k + 1]);
    }
}

/// A pivot by which `row` can be divided without overflow, and `row` scaled along where that is the better way.
fn tame<T: Scalar>(mut pivot: T, perturb: T::Real, row: &mut [T]) -> T {
    let one = T::Real::ONE;
    let two = one + one;
    // The smallest number whose reciprocal does not overflow.
    let least = T::Real::TINY.larger(one / T::Real::HUGE);
    let largest = one / least;
    let mut step = perturb.abs().larger(least).with_sign(pivot.re());
    let most = row
        .iter()
        .fold(T::Real::default(), |most, value| most.larger(value.abs()));
    loop {
        let size = pivot.abs();
        // A NaN is as good as it gets.
        if size >= one || size.is_nan() {
            return pivot;
        }
        if size < least {
            if size == T::Real::default() || most * least > size {
                pivot = pivot + T::of_real(step);
                step = step * two;
            } else {
                let scale = T::of_real(largest);
                row.iter_mut().for_each(|value| *value = *value * scale);
                return pivot * scale;
            }
        } else if most > size * largest {
            pivot = pivot + T::of_real(step);
            step = step * two;
        } else {
            return pivot;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn solve(dl: &[f64], d: &[f64], du: &[f64], b: &[f64]) -> Vec<f64> {
        let mut x = b.to_vec();
        let mut upper = Upper {
            rows: vec![[0.0; 3]; d.len()],
            row: vec![0.0; b.len() / d.len()],
        };
        let columns = upper.row.len();
        upper.solve([dl, d, du], &mut x, columns);
        x
    }

    fn residual(dl: &[f64], d: &[f64], du: &[f64], x: &[f64], b: &[f64]) -> f64 {
        let n = d.len();
        (0..n)
            .map(|i| {
                let below = if i > 0 { dl[i] * x[i - 1] } else { 0.0 };
                let above = if i + 1 < n { du[i] * x[i + 1] } else { 0.0 };
                (below + d[i] * x[i] + above - b[i]).abs()
            })
            .fold(0.0, f64::max)
    }

    #[test]
    fn regular_systems_are_solved() {
        // Rows are swapped in some steps and not in others; one element below the diagonal is 0.
        let dl = [9.0, 4.0, 0.5, 0.0, 7.0];
        let d = [1.0, 3.0, 5.0, 2.0, 1.0];
        let du = [2.0, 1.0, 6.0, 1.0, 9.0];
        let b = [1.0, -2.0, 3.0, 0.25, 5.0];
        let x = solve(&dl, &d, &du, &b);
        assert!(residual(&dl, &d, &du, &x, &b) < 1e-12, "{x:?}");
        let two = [b, [0.0, 1.0, 0.0, 0.0, 2.0]].concat();
        let x2 = solve(&dl, &d, &du, &two);
        assert_eq!(x2[..5], x);
        assert!(residual(&dl, &d, &du, &x2[5..], &two[5..]) < 1e-12);
        assert_eq!(solve(&[0.0], &[4.0], &[0.0], &[2.0]), [0.5]);
    }

    #[test]
    fn singular_systems_give_large_but_finite_answers() {
        // The constant vector is mapped to 0: inverse iteration finds it.
        let dl = [0.0, -1.0, -1.0, -1.0];
        let d = [1.0, 2.0, 2.0, 1.0];
        let du = [-1.0, -1.0, -1.0, 0.0];
        let x = solve(&dl, &d, &du, &[1.0, 2.0, 0.5, 1.0]);
        assert!(x.iter().all(|value| value.is_finite()), "{x:?}");
        let scale = x[0];
        assert!(scale.abs() > 1e10, "{x:?}");
        assert!(
            x.iter().all(|value| (value / scale - 1.0).abs() < 1e-9),
            "{x:?}"
        );
        let zeros = solve(&[0.0; 3], &[0.0; 3], &[0.0; 3], &[1.0, 1.0, 1.0]);
        assert!(zeros.iter().all(|value| value.is_finite()), "{zeros:?}");
    }
}
