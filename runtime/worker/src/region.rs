//! Boxes of elements inside dense row-major arrays, and their copies. Nothing here trusts its input.

use std::ops::Range;

use waystation_proto::{tensorflow::StatusProto, waystation::worker};

use crate::{geometry, status};

/// A box of elements inside an array.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    pub(crate) offset: Vec<i64>,
    pub(crate) size: Vec<i64>,
}

impl From<worker::Region> for Region {
    fn from(region: worker::Region) -> Region {
        Region {
            offset: region.offset,
            size: region.size,
        }
    }
}

impl Region {
    /// Bytes of its elements, dense.
    pub(crate) fn bytes(&self, element: usize) -> Result<usize, StatusProto> {
        geometry::dense_bytes(&self.size, element)
    }

    /// Whether it is all of an array.
    pub(crate) fn is_whole(&self, dims: &[i64]) -> bool {
        self.size == dims && self.offset.iter().all(|&offset| offset == 0)
    }
}

/// Bytes of several regions, one behind the other.
pub(crate) fn total_bytes<'a>(
    regions: impl IntoIterator<Item = &'a Region>,
    element: usize,
) -> Result<usize, StatusProto> {
    regions.into_iter().try_fold(0usize, |sum, region| {
        sum.checked_add(region.bytes(element)?)
            .ok_or_else(|| status::invalid("the pieces are larger than an address space"))
    })
}

/// An array's dense host bytes.
pub(crate) struct Dense<'a, B> {
    pub(crate) bytes: B,
    pub(crate) dims: &'a [i64],
}

/// Where a box's elements lie in a dense array, if they lie one behind the other.
pub(crate) fn together(
    region: &Region,
    dims: &[i64],
    element: usize,
) -> Result<Option<Range<usize>>, StatusProto> {
    let all = geometry::dense_bytes(dims, element)?;
    let start = axes(all, dims, &region.offset, &region.size, element)?.start;
    let len = region.bytes(element)?;
    // All but one index of the dimensions before, anything of the next one, and all of those behind it.
    let mut behind = region
        .size
        .iter()
        .zip(dims)
        .skip_while(|(size, _)| **size == 1);
    behind.next();
    let together = len == 0 || behind.all(|(size, dim)| size == dim);
    // Nothing lies anywhere.
    let start = start.min(all - len);
    Ok(together.then(|| start..start + len))
}

/// Copies `size` elements in each dimension from `from`, at `from_offset`, to `to`, at `to_offset`.
pub(crate) fn copy(
    from: &Dense<'_, &[u8]>,
    from_offset: &[i64],
    to: &mut Dense<'_, &mut [u8]>,
    to_offset: &[i64],
    size: &[i64],
    element: usize,
) -> Result<(), StatusProto> {
    let (mut source, mut target) = (
        axes(from.bytes.len(), from.dims, from_offset, size, element)?,
        axes(to.bytes.len(), to.dims, to_offset, size, element)?,
    );
    let mut extents = size
        .iter()
        .map(|&extent| usize::try_from(extent).unwrap_or(0))
        .collect::<Vec<_>>();
    if extents.contains(&0) {
        return Ok(());
    }
    let (mut at, mut put) = (source.start, target.start);
    // What lies together on both sides is copied at once.
    let mut run = element;
    while let Some(&extent) = extents.last() {
        let together = |axes: &Axes| axes.strides.last() == Some(&run);
        if extent > 1 && !(together(&source) && together(&target)) {
            break;
        }
        run *= extent;
        extents.pop();
        source.strides.pop();
        target.strides.pop();
    }
    let mut index = vec![0usize; extents.len()];
    loop {
        to.bytes[put..put + run].copy_from_slice(&from.bytes[at..at + run]);
        // The next index, last dimension fastest.
        let mut axis = extents.len();
        loop {
            if axis == 0 {
                return Ok(());
            }
            axis -= 1;
            index[axis] += 1;
            at += source.strides[axis];
            put += target.strides[axis];
            if index[axis] < extents[axis] {
                break;
            }
            at -= source.strides[axis] * index[axis];
            put -= target.strides[axis] * index[axis];
            index[axis] = 0;
        }
    }
}

struct Axes {
    /// Bytes from one index to the next.
    strides: Vec<usize>,
    /// Byte of the box's first element.
    start: usize,
}

/// Checks a box against an array and its bytes; after this, plain arithmetic inside the box cannot overflow.
fn axes(
    bytes: usize,
    dims: &[i64],
    offset: &[i64],
    size: &[i64],
    element: usize,
) -> Result<Axes, StatusProto> {
    let expected = geometry::dense_bytes(dims, element)?;
    if bytes != expected {
        return Err(status::invalid(format!(
            "{bytes} bytes are no dense array of {dims:?}, which has {expected}"
        )));
    }
    let inside = offset.len() == dims.len()
        && size.len() == dims.len()
        && dims
            .iter()
            .zip(offset)
            .zip(size)
            .all(|((&dim, &offset), &size)| {
                offset >= 0 && size >= 0 && offset.checked_add(size).is_some_and(|end| end <= dim)
            });
    if !inside {
        return Err(status::invalid(format!(
            "elements {size:?} from {offset:?} on do not lie in an array of {dims:?}"
        )));
    }
    let mut strides = vec![0usize; dims.len()];
    let (mut stride, mut start) = (element, 0usize);
    for axis in (0..dims.len()).rev() {
        strides[axis] = stride;
        // Inside the array, whose bytes are counted; an empty array has no box to walk.
        start =
            start.saturating_add(stride.saturating_mul(usize::try_from(offset[axis]).unwrap_or(0)));
        stride = stride.saturating_mul(usize::try_from(dims[axis]).unwrap_or(0));
    }
    Ok(Axes { strides, start })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pattern(dims: &[i64], element: usize) -> Vec<u8> {
        let bytes = geometry::dense_bytes(dims, element).unwrap();
        (0..bytes).map(|i| (i % 251) as u8).collect()
    }

    /// Element by element, as the definition has it.
    fn slowly(
        from: (&[u8], &[i64], &[i64]),
        to: (&mut [u8], &[i64], &[i64]),
        size: &[i64],
        element: usize,
    ) {
        let at = |dims: &[i64], offset: &[i64], index: &[i64]| {
            dims.iter()
                .zip(offset)
                .zip(index)
                .fold(0, |at, ((dim, offset), index)| at * dim + offset + index)
                as usize
                * element
        };
        let count: i64 = size.iter().product();
        for mut number in 0..count {
            let mut index = vec![0; size.len()];
            for axis in (0..size.len()).rev() {
                index[axis] = number % size[axis];
                number /= size[axis];
            }
            let (a, b) = (at(from.1, from.2, &index), at(to.1, to.2, &index));
            to.0[b..b + element].copy_from_slice(&from.0[a..a + element]);
        }
    }

    #[test]
    fn boxes_go_where_the_definition_says() {
        type Case<'a> = [&'a [i64]; 5];
        let cases: &[Case<'_>] = &[
            [&[], &[], &[], &[], &[]],
            [&[7], &[2], &[5], &[1], &[4]],
            [&[4, 6], &[0, 0], &[4, 6], &[0, 0], &[4, 6]],
            [&[4, 6], &[1, 0], &[8, 6], &[5, 0], &[3, 6]],
            [&[4, 6], &[1, 2], &[3, 5], &[0, 1], &[2, 4]],
            [&[3, 4, 5], &[1, 0, 2], &[2, 6, 3], &[0, 1, 0], &[2, 4, 3]],
            [&[3, 1, 5], &[1, 0, 2], &[2, 1, 3], &[0, 0, 0], &[2, 1, 3]],
            [&[3, 4], &[1, 0], &[2, 4], &[0, 0], &[0, 4]],
        ];
        for &[from_dims, from_offset, to_dims, to_offset, size] in cases {
            for element in [1, 4] {
                let from = pattern(from_dims, element);
                let mut quick = vec![255; geometry::dense_bytes(to_dims, element).unwrap()];
                let mut slow = quick.clone();
                let source = Dense {
                    bytes: &from[..],
                    dims: from_dims,
                };
                let mut target = Dense {
                    bytes: &mut quick[..],
                    dims: to_dims,
                };
                copy(&source, from_offset, &mut target, to_offset, size, element).unwrap();
                slowly(
                    (&from, from_dims, from_offset),
                    (&mut slow, to_dims, to_offset),
                    size,
                    element,
                );
                assert_eq!(
                    quick, slow,
                    "{from_dims:?} {from_offset:?} -> {to_dims:?} {to_offset:?}: {size:?}"
                );
            }
        }
    }

    #[test]
    fn boxes_that_lie_together_are_known() {
        let known = |dims: &[i64], offset: &[i64], size: &[i64]| {
            let region = Region {
                offset: offset.to_vec(),
                size: size.to_vec(),
            };
            together(&region, dims, 4).map_err(|status| status.code)
        };
        assert_eq!(known(&[4, 6], &[1, 0], &[2, 6]), Ok(Some(24..72)));
        assert_eq!(known(&[4, 6], &[1, 2], &[1, 3]), Ok(Some(32..44)));
        assert_eq!(known(&[4, 6], &[1, 2], &[2, 3]), Ok(None));
        assert_eq!(known(&[4, 6], &[0, 0], &[4, 6]), Ok(Some(0..96)));
        assert_eq!(known(&[2, 3, 4], &[1, 1, 0], &[1, 2, 4]), Ok(Some(64..96)));
        assert_eq!(known(&[2, 3, 4], &[0, 1, 0], &[2, 2, 4]), Ok(None));
        assert_eq!(known(&[4, 6], &[4, 0], &[0, 6]), Ok(Some(96..96)));
        assert_eq!(known(&[], &[], &[]), Ok(Some(0..4)));
        assert!(known(&[4, 6], &[3, 0], &[2, 6]).is_err());
    }

    #[test]
    fn boxes_that_lie_outside_are_refused() {
        let bytes = [0u8; 12];
        let cases: &[(&[i64], &[i64], &[i64])] = &[
            (&[3, 4], &[0, 0], &[3, 5]),
            (&[3, 4], &[1, 0], &[3, 1]),
            (&[3, 4], &[-1, 0], &[1, 1]),
            (&[3, 4], &[0, 0], &[-1, 1]),
            (&[3, 4], &[0, i64::MAX], &[1, 1]),
            (&[3, 4], &[0], &[1, 1]),
            (&[3, 5], &[0, 0], &[1, 1]),
        ];
        for &(dims, offset, size) in cases {
            let mut to = [0u8; 1];
            let source = Dense {
                bytes: &bytes[..],
                dims,
            };
            let mut target = Dense {
                bytes: &mut to[..],
                dims: &[1, 1],
            };
            assert!(
                copy(&source, offset, &mut target, &[0, 0], size, 1).is_err(),
                "{dims:?} {offset:?} {size:?}"
            );
        }
    }
}
