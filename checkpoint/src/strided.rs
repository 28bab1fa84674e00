//! Byte buffers of arrays, and copies of boxes between them.

/// The strides of a dense row-major array, in bytes, one a dimension; `None` when an extent is negative or they do not fit.
pub fn row_major(dims: &[i64], item_bytes: usize) -> Option<Vec<usize>> {
    let mut strides = vec![item_bytes; dims.len()];
    for d in (1..dims.len()).rev() {
        strides[d - 1] = strides[d].checked_mul(usize::try_from(dims[d]).ok()?)?;
    }
    Some(strides)
}

/// Zeros, or `None` when there is no memory for them.
pub fn zeroed(len: usize) -> Option<Vec<u8>> {
    // Asks first, for what follows would end the process; and takes pages that are zero already rather than filling them.
    // The black box keeps the question from being optimised away.
    let mut asked = Vec::<u8>::new();
    asked.try_reserve_exact(len).ok()?;
    drop(std::hint::black_box(asked));
    Some(vec![0; len])
}

/// One side of a copy: a box inside a buffer.
pub struct Side<'a> {
    /// Bytes to the next element, one a dimension.
    pub strides: &'a [usize],
    /// The first index of the box, relative to the buffer's first element.
    pub origin: &'a [i64],
}

impl Side<'_> {
    fn offset(&self) -> usize {
        // Origins lie inside arrays whose sizes have been counted.
        self.origin
            .iter()
            .zip(self.strides)
            .map(|(&i, &stride)| usize::try_from(i).unwrap_or(0) * stride)
            .sum()
    }
}

/// Copies a box of `extent` elements of `item_bytes` bytes from `source` to `target`.
///
/// The caller has checked that the box lies in both buffers: an index beyond one is a bug and panics.
pub fn copy(
    source: &[u8],
    from: &Side<'_>,
    target: &mut [u8],
    to: &Side<'_>,
    extent: &[i64],
    item_bytes: usize,
) {
    let extent: Vec<usize> = extent
        .iter()
        .map(|&n| usize::try_from(n).unwrap_or(0))
        .collect();
    if extent.contains(&0) {
        return;
    }
    // Trailing dimensions that are dense on both sides are copied as one run.
    let mut run = item_bytes;
    let mut outer = extent.len();
    while outer > 0 {
        let d = outer - 1;
        if extent[d] != 1 && (from.strides[d] != run || to.strides[d] != run) {
            break;
        }
        run *= extent[d];
        outer = d;
    }

    let (mut at, mut to_at) = (from.offset(), to.offset());
    let mut index = vec![0usize; outer];
    loop {
        target[to_at..to_at + run].copy_from_slice(&source[at..at + run]);
        let mut d = outer;
        loop {
            if d == 0 {
                return;
            }
            d -= 1;
            index[d] += 1;
            at += from.strides[d];
            to_at += to.strides[d];
            if index[d] < extent[d] {
                break;
            }
            index[d] = 0;
            at -= from.strides[d] * extent[d];
            to_at -= to.strides[d] * extent[d];
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against the definition: element by element.
        #[test]
        fn copies_each_element_of_the_box(
            dims in proptest::collection::vec((1..5i64, 0..5i64, 0..5i64, 0..5i64), 0..4),
            item_bytes in 1..4usize,
            column_major in any::<bool>(),
        ) {
            // A box that lies in both buffers, which differ in size and origin.
            let extent: Vec<i64> = dims.iter().map(|d| d.0).collect();
            let from: Vec<i64> = dims.iter().map(|d| d.1).collect();
            let to: Vec<i64> = dims.iter().map(|d| d.2).collect();
            let source_dims: Vec<i64> = dims.iter().map(|d| d.0 + d.1 + d.3).collect();
            let target_dims: Vec<i64> = dims.iter().map(|d| d.0 + d.2 + d.3).collect();
            let source_strides = if column_major {
                let mirrored: Vec<i64> = source_dims.iter().rev().copied().collect();
                let mut strides = row_major(&mirrored, item_bytes).unwrap();
                strides.reverse();
                strides
            } else {
                row_major(&source_dims, item_bytes).unwrap()
            };
            let target_strides = row_major(&target_dims, item_bytes).unwrap();
            let len = |dims: &[i64]| dims.iter().product::<i64>() as usize * item_bytes;
            let source: Vec<u8> = (0..len(&source_dims)).map(|i| (i % 251) as u8 + 1).collect();
            let mut target = vec![0; len(&target_dims)];
            let mut expected = target.clone();
            for flat in 0..extent.iter().product::<i64>() {
                let (mut rest, mut a, mut b) = (flat, 0, 0);
                for d in (0..extent.len()).rev() {
                    let i = rest % extent[d];
                    rest /= extent[d];
                    a += (from[d] + i) as usize * source_strides[d];
                    b += (to[d] + i) as usize * target_strides[d];
                }
                expected[b..b + item_bytes].copy_from_slice(&source[a..a + item_bytes]);
            }
            copy(
                &source,
                &Side { strides: &source_strides, origin: &from },
                &mut target,
                &Side { strides: &target_strides, origin: &to },
                &extent,
                item_bytes,
            );
            prop_assert_eq!(target, expected);
        }
    }
}
