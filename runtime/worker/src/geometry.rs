//! Sizes and strides of host bytes. Nothing here trusts its input: all arithmetic is checked.

use std::ops::Range;

use waystation_proto::tensorflow::StatusProto;

use crate::status;

/// Bytes of a dense array of `dims` with `element` bytes an element.
pub(crate) fn dense_bytes(dims: &[i64], element: usize) -> Result<usize, StatusProto> {
    let mut bytes = element;
    let mut empty = false;
    for &dim in dims {
        let dim = usize::try_from(dim)
            .map_err(|_| status::invalid(format!("dimension {dim} in {dims:?} is negative")))?;
        empty |= dim == 0;
        // A zero must not hide an overflow of the others, so it is left out of the product.
        bytes = bytes
            .checked_mul(dim.max(1))
            .filter(|&bytes| i64::try_from(bytes).is_ok())
            .ok_or_else(|| {
                status::invalid(format!(
                    "an array of {dims:?} is larger than an address space"
                ))
            })?;
    }
    Ok(if empty { 0 } else { bytes })
}

/// Bytes of the minimal region from the first to the last element of a strided array. Refuses strides that make elements
/// overlap as far as the sizes show it, so that a small region never unfolds into a large array.
pub(crate) fn region_bytes(
    dims: &[i64],
    strides: &[i64],
    element: usize,
) -> Result<usize, StatusProto> {
    let dense = dense_bytes(dims, element)?;
    if strides.len() != dims.len() {
        return Err(status::invalid(format!(
            "{} byte strides for {} dimensions",
            strides.len(),
            dims.len()
        )));
    }
    if dense == 0 {
        return Ok(0);
    }
    let mut last = 0usize;
    for (&dim, &stride) in dims.iter().zip(strides) {
        let stride = usize::try_from(stride).map_err(|_| {
            status::invalid(format!("byte strides {strides:?} have a negative entry"))
        })?;
        let steps = usize::try_from(dim - 1).unwrap_or(0);
        last = steps
            .checked_mul(stride)
            .and_then(|span| last.checked_add(span))
            .ok_or_else(|| {
                status::invalid(format!(
                    "byte strides {strides:?} over {dims:?} leave the address space"
                ))
            })?;
    }
    let region = last.checked_add(element).ok_or_else(|| {
        status::invalid(format!(
            "byte strides {strides:?} over {dims:?} leave the address space"
        ))
    })?;
    if region < dense {
        return Err(status::invalid(format!(
            "byte strides {strides:?} over {dims:?} make elements overlap"
        )));
    }
    Ok(region)
}

/// Whether the strides are those of a dense row-major array. Strides of dimensions with fewer than two entries say nothing.
pub(crate) fn is_dense(dims: &[i64], strides: &[i64], element: usize) -> bool {
    if dims.len() != strides.len() {
        return false;
    }
    let mut expected = i64::try_from(element).unwrap_or(i64::MAX);
    for (&dim, &stride) in dims.iter().zip(strides).rev() {
        if dim > 1 && stride != expected {
            return false;
        }
        expected = expected.saturating_mul(dim.max(1));
    }
    true
}

/// Copies a strided region into a dense row-major one. The sizes are those of [`region_bytes`] and [`dense_bytes`]; other
/// sizes are an error.
pub(crate) fn gather(
    region: &[u8],
    dense: &mut [u8],
    dims: &[i64],
    strides: &[i64],
    element: usize,
) -> Result<(), StatusProto> {
    check(region.len(), dense.len(), dims, strides, element)?;
    Walk::new(dims, strides, element).runs(|in_region, in_dense| {
        dense[in_dense].copy_from_slice(&region[in_region]);
    });
    Ok(())
}

/// Copies a dense row-major array into a strided region; bytes in the gaps stay as they are.
pub(crate) fn scatter(
    dense: &[u8],
    region: &mut [u8],
    dims: &[i64],
    strides: &[i64],
    element: usize,
) -> Result<(), StatusProto> {
    check(region.len(), dense.len(), dims, strides, element)?;
    Walk::new(dims, strides, element).runs(|in_region, in_dense| {
        region[in_region].copy_from_slice(&dense[in_dense]);
    });
    Ok(())
}

fn check(
    region: usize,
    dense: usize,
    dims: &[i64],
    strides: &[i64],
    element: usize,
) -> Result<(), StatusProto> {
    let expected = region_bytes(dims, strides, element)?;
    if region != expected {
        return Err(status::invalid(format!(
            "{region} bytes came for an array of {dims:?} with byte strides {strides:?}, which spans {expected}"
        )));
    }
    let expected = dense_bytes(dims, element)?;
    if dense != expected {
        return Err(status::invalid(format!(
            "{dense} bytes are no dense array of {dims:?}, which has {expected}"
        )));
    }
    Ok(())
}

/// The runs of contiguous bytes of a strided array, in row-major order.
struct Walk {
    run: usize,
    /// Outer dimensions, (extent, byte stride).
    outer: Vec<(usize, usize)>,
}

impl Walk {
    /// `dims` and `strides` have passed [`region_bytes`].
    fn new(dims: &[i64], strides: &[i64], element: usize) -> Walk {
        let axes: Vec<(usize, usize)> = dims
            .iter()
            .zip(strides)
            .map(|(&dim, &stride)| {
                (
                    usize::try_from(dim).unwrap_or(0),
                    usize::try_from(stride).unwrap_or(0),
                )
            })
            .collect();
        if axes.iter().any(|&(extent, _)| extent == 0) {
            return Walk {
                run: 0,
                outer: Vec::new(),
            };
        }
        let mut axes: Vec<(usize, usize)> =
            axes.into_iter().filter(|&(extent, _)| extent > 1).collect();
        let mut run = element;
        while let Some(&(extent, stride)) = axes.last() {
            if stride != run {
                break;
            }
            run *= extent;
            axes.pop();
        }
        Walk { run, outer: axes }
    }

    /// Calls `each` with where each run lies: in the strided region, and in the dense array.
    fn runs(&self, mut each: impl FnMut(Range<usize>, Range<usize>)) {
        let mut done = 0;
        self.offsets(|offset| {
            each(offset..offset + self.run, done..done + self.run);
            done += self.run;
        });
    }

    fn offsets(&self, mut each: impl FnMut(usize)) {
        if self.run == 0 {
            return;
        }
        let Some((&(extent, stride), outer)) = self.outer.split_last() else {
            each(0);
            return;
        };
        let mut index = vec![0usize; outer.len()];
        let mut base = 0usize;
        loop {
            for step in 0..extent {
                each(base + step * stride);
            }
            // The next index of the outer dimensions, last one fastest.
            let mut axis = outer.len();
            loop {
                if axis == 0 {
                    return;
                }
                axis -= 1;
                index[axis] += 1;
                base += outer[axis].1;
                if index[axis] < outer[axis].0 {
                    break;
                }
                base -= index[axis] * outer[axis].1;
                index[axis] = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transposed_array_becomes_dense() {
        // 2 x 3 of one-byte elements in Fortran order.
        let region = [1, 4, 2, 5, 3, 6];
        let mut dense = [0; 6];
        gather(&region, &mut dense, &[2, 3], &[1, 2], 1).unwrap();
        assert_eq!(dense, [1, 2, 3, 4, 5, 6]);
        let mut back = [0; 6];
        scatter(&dense, &mut back, &[2, 3], &[1, 2], 1).unwrap();
        assert_eq!(back, region);
    }

    #[test]
    fn gaps_are_left_out() {
        // Rows of 2 elements of 2 bytes, 6 bytes apart: the region ends with the last element.
        let region: Vec<u8> = (0..10).collect();
        assert_eq!(region_bytes(&[2, 2], &[6, 2], 2).unwrap(), 10);
        let mut dense = [0; 8];
        gather(&region, &mut dense, &[2, 2], &[6, 2], 2).unwrap();
        assert_eq!(dense, [0, 1, 2, 3, 6, 7, 8, 9]);
    }

    #[test]
    fn three_dimensions_walk_in_order() {
        // (2, 2, 2) taken from a (2, 3, 4) array of bytes.
        let region: Vec<u8> = (0..18).collect();
        let mut dense = [0; 8];
        gather(&region, &mut dense, &[2, 2, 2], &[12, 4, 1], 1).unwrap();
        assert_eq!(dense, [0, 1, 4, 5, 12, 13, 16, 17]);
    }

    #[test]
    fn scalars_and_empty_arrays_have_their_sizes() {
        assert_eq!(dense_bytes(&[], 4).unwrap(), 4);
        assert_eq!(region_bytes(&[], &[], 4).unwrap(), 4);
        assert_eq!(dense_bytes(&[3, 0], 4).unwrap(), 0);
        assert_eq!(region_bytes(&[3, 0], &[4, 4], 4).unwrap(), 0);
        gather(&[], &mut [], &[3, 0], &[4, 4], 4).unwrap();
        assert!(
            is_dense(&[], &[], 4)
                && is_dense(&[1, 3], &[999, 4], 4)
                && !is_dense(&[2, 3], &[4, 8], 4)
        );
        assert!(!is_dense(&[2, 3], &[1], 1), "a stride a dimension");
    }

    #[test]
    fn lying_sizes_are_refused() {
        assert!(dense_bytes(&[-1], 4).is_err());
        assert!(dense_bytes(&[i64::MAX, 2], 4).is_err());
        assert!(
            dense_bytes(&[i64::MAX, i64::MAX, 0], 1).is_err(),
            "a zero does not hide an overflow"
        );
        assert!(
            region_bytes(&[2, 2], &[8], 4).is_err(),
            "a stride a dimension"
        );
        assert!(region_bytes(&[2], &[-4], 4).is_err());
        assert!(region_bytes(&[3], &[i64::MAX], 4).is_err());
        assert!(
            region_bytes(&[1 << 20, 1 << 20], &[1, 1], 4).is_err(),
            "a bomb: 2 MiB that unfold into 4 TiB"
        );
        assert!(gather(&[0; 3], &mut [0; 4], &[4], &[1], 1).is_err());
        assert!(gather(&[0; 4], &mut [0; 3], &[4], &[1], 1).is_err());
    }
}
