//! Sparse matrices times dense ones.

use crate::batch::{int, part, part_mut};
use std::ops::{Add, Mul};
use waystation_pjrt::ffi::{Complex, Element, Failure, Frame};

/// What an element of a sparse matrix can be.
pub(crate) trait Number:
    Element + Default + Add<Output = Self> + Mul<Output = Self>
{
    /// `self + a * b`; integers wrap around, as XLA's do.
    fn add_product(self, a: Self, b: Self) -> Self;
}

macro_rules! numbers {
    ($($number:ty: |$sum:ident, $a:ident, $b:ident| $value:expr;)*) => {
        $(impl Number for $number {
            fn add_product(self, $a: Self, $b: Self) -> Self {
                let $sum = self;
                $value
            }
        })*
    };
}

numbers! {
    i32: |sum, a, b| sum.wrapping_add(a.wrapping_mul(b));
    i64: |sum, a, b| sum.wrapping_add(a.wrapping_mul(b));
    f32: |sum, a, b| sum + a * b;
    f64: |sum, a, b| sum + a * b;
    Complex<f32>: |sum, a, b| sum + a * b;
    Complex<f64>: |sum, a, b| sum + a * b;
}

/// `cpu_csr_sparse_dense_ffi`: a matrix in compressed rows times a vector or a matrix, row by row.
/// `values, row_starts, columns, rhs -> out`; elements are of one type of six, indices all `s32` or all `s64`.
pub(crate) fn csr_times_dense(frame: &mut Frame<'_>) -> Result<(), Failure> {
    if frame.is::<i32>(0)? {
        indexed::<i32>(frame)
    } else if frame.is::<i64>(0)? {
        indexed::<i64>(frame)
    } else if frame.is::<f32>(0)? {
        indexed::<f32>(frame)
    } else if frame.is::<f64>(0)? {
        indexed::<f64>(frame)
    } else if frame.is::<Complex<f32>>(0)? {
        indexed::<Complex<f32>>(frame)
    } else {
        indexed::<Complex<f64>>(frame)
    }
}

fn indexed<T: Number>(frame: &mut Frame<'_>) -> Result<(), Failure> {
    if frame.is::<i32>(1)? {
        product::<T, i32>(frame)
    } else {
        product::<T, i64>(frame)
    }
}

fn product<T: Number, I: Element + TryInto<usize>>(frame: &mut Frame<'_>) -> Result<(), Failure> {
    frame.expect(4, 1)?;
    let values = frame.input::<T>(0)?;
    let starts = frame.input::<I>(1)?;
    let columns = frame.input::<I>(2)?;
    let rhs = frame.input::<T>(3)?;
    let (inner, width) = match *frame.dims(3)? {
        [inner] => (inner, None),
        [inner, width] => (inner, Some(width)),
        ref other => {
            return Err(Failure::invalid(format!(
                "operand 3 is a vector or a matrix, and has the dimensions {other:?}"
            )));
        }
    };
    let rows = frame.output_dims(0)?.first().copied().unwrap_or_default();
    let dims = [Some(rows), width];
    let dims: Vec<usize> = dims.into_iter().flatten().collect();
    let out = frame.output::<T>(0, &dims)?;
    let width = width.unwrap_or(1);
    int(rows)?;
    if starts.len() != rows + 1 || columns.len() != values.len() {
        return Err(Failure::invalid(format!(
            "{} row starts for {rows} rows, {} columns for {} values",
            starts.len(),
            columns.len(),
            values.len()
        )));
    }
    let index = |value: I, limit: usize| {
        value
            .try_into()
            .ok()
            .filter(|value: &usize| *value <= limit)
            .ok_or_else(|| {
                Failure::invalid(format!(
                    "an index of the sparse matrix is not within {limit}"
                ))
            })
    };
    out.fill(T::default());
    for row in 0..rows {
        let (start, end) = (
            index(starts[row], values.len())?,
            index(starts[row + 1], values.len())?,
        );
        let out = part_mut(out, row, width);
        // An end before its start makes an empty row.
        for entry in start..end {
            let column = index(columns[entry], inner)?;
            if column == inner {
                return Err(Failure::invalid(format!(
                    "column {column} of the sparse matrix is beyond its {inner} columns"
                )));
            }
            for (sum, factor) in out.iter_mut().zip(part(&rhs, column, width)) {
                *sum = sum.add_product(values[entry], *factor);
            }
        }
    }
    Ok(())
}
