//! Stacks of matrices.

use crate::scalar::Scalar;
use waystation_pjrt::Code;
use waystation_pjrt::ffi::{Failure, Frame};

/// The shape of a stack of matrices: any number of batch dimensions, then rows and columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Batch {
    /// The batch dimensions.
    dims: Vec<usize>,
    /// Their product: how many matrices.
    pub(crate) count: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
}

impl Batch {
    /// The shape of operand `index`.
    pub(crate) fn of(frame: &Frame<'_>, index: usize) -> Result<Self, Failure> {
        let dims = frame.dims(index)?;
        let [batch @ .., rows, columns] = dims else {
            return Err(Failure::invalid(format!(
                "operand {index} has {} dimensions, and a stack of matrices has 2 or more",
                dims.len()
            )));
        };
        Ok(Self {
            // No overflow unless another dimension is 0: the frame has checked the product of all.
            count: batch
                .iter()
                .try_fold(1_usize, |count, dim| count.checked_mul(*dim))
                .ok_or_else(|| too_large("the batch"))?,
            dims: batch.to_vec(),
            rows: *rows,
            columns: *columns,
        })
    }

    /// The same, of square matrices only.
    pub(crate) fn of_squares(frame: &Frame<'_>, index: usize) -> Result<Self, Failure> {
        let batch = Self::of(frame, index)?;
        if batch.rows == batch.columns {
            return Ok(batch);
        }
        Err(Failure::invalid(format!(
            "operand {index} holds matrices of {} rows and {} columns, and square ones are wanted",
            batch.rows, batch.columns
        )))
    }

    /// Rows or columns, whichever are fewer.
    pub(crate) fn least(&self) -> usize {
        self.rows.min(self.columns)
    }

    /// Elements of a matrix. No overflow: the frame has checked the product of all dimensions, or there is no matrix.
    pub(crate) fn size(&self) -> usize {
        self.rows.saturating_mul(self.columns)
    }

    /// Dimensions of an array that has `rest` for each matrix.
    pub(crate) fn dims(&self, rest: &[usize]) -> Vec<usize> {
        [self.dims.as_slice(), rest].concat()
    }

    /// Checks that operand `index` has `rest` for each matrix.
    pub(crate) fn expect(
        &self,
        frame: &Frame<'_>,
        index: usize,
        rest: &[usize],
    ) -> Result<(), Failure> {
        let (dims, wanted) = (frame.dims(index)?, self.dims(rest));
        if dims == wanted {
            return Ok(());
        }
        Err(Failure::invalid(format!(
            "operand {index} has the dimensions {dims:?}, and {wanted:?} are wanted"
        )))
    }
}

/// A size as LAPACK takes it.
pub(crate) fn int(size: usize) -> Result<i32, Failure> {
    i32::try_from(size).map_err(|_| too_large(&size.to_string()))
}

/// A leading dimension: at least 1, also where there are no rows.
pub(crate) fn leading(rows: usize) -> Result<i32, Failure> {
    int(rows.max(1))
}

fn too_large(what: &str) -> Failure {
    Failure::new(
        Code::InvalidArgument,
        format!("{what} is more than LAPACK's 32-bit integers hold"),
    )
}

/// The part of a stack's array that belongs to matrix `index`, `size` elements long.
pub(crate) fn part<T>(array: &[T], index: usize, size: usize) -> &[T] {
    &array[index * size..][..size]
}

/// As [`part`], to be written.
pub(crate) fn part_mut<T>(array: &mut [T], index: usize, size: usize) -> &mut [T] {
    &mut array[index * size..][..size]
}

/// Whether no element is infinite or NaN.
pub(crate) fn finite<T: Scalar>(array: &[T]) -> bool {
    array.iter().all(|value| value.is_finite())
}
