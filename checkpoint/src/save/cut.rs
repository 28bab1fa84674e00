//! How a shard is cut into chunks, and a piece into what is read of it at a time.

use std::ops::Range;

use super::SaveArray;
use crate::sharding::IndexDomain;
use crate::zarr::DType;

/// Larger shards are cut into several chunks: so all cores compress a large array, several workers share one that they all
/// hold, a reader on another mesh does not read much more than it needs, and a chunk fits into any budget.
pub(super) const MAX_CHUNK_BYTES: usize = 64 << 20;

/// Chunks are at most so many times smaller than they might be, for the sake of equal parts.
const MAX_SMALLER: i64 = 8;

/// A part of a piece that is written on its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cut {
    /// The box of the array.
    pub domain: IndexDomain,
    /// Its bytes among those of the piece.
    pub bytes: Range<usize>,
}

impl SaveArray {
    /// Cuts a piece along the chunks, where each is one run of the piece's bytes; else the piece is one cut. What is empty is
    /// cut into nothing. `None` for pieces that are no box of the array.
    #[must_use]
    pub fn cut(&self, piece: &IndexDomain) -> Option<Vec<Cut>> {
        let item_bytes = DType::of(self.dtype).map_or(1, |dtype| dtype.item_bytes());
        let total = piece.num_elements()?.checked_mul(item_bytes)?;
        let rank = self.dims.len();
        if !piece.lies_in(&self.dims) || self.chunks.len() != rank {
            return None;
        }
        if total == 0 {
            return Some(Vec::new());
        }
        let whole = || {
            vec![Cut {
                domain: piece.clone(),
                bytes: 0..total,
            }]
        };
        // The last dimension along which there are several chunks. Along those before it chunks must be one element deep.
        let counts = |d: usize| piece.shape[d] > self.chunks[d].max(1);
        let Some(last) = (0..rank).rev().find(|&d| counts(d)) else {
            return Some(whole());
        };
        if (0..last).any(|d| piece.shape[d] > 1 && self.chunks[d].max(1) != 1) {
            return Some(whole());
        }
        let chunk = self.chunks[last].max(1);
        let run: i64 = piece.shape[last + 1..].iter().product();
        let mut cuts = Vec::new();
        let mut at = 0usize;
        let mut origin = piece.origin[..=last].to_vec();
        while at < total {
            let mut domain = piece.clone();
            domain.origin[..=last].copy_from_slice(&origin);
            domain.shape[..last].fill(1);
            // Chunks begin at multiples of their size, pieces at one of those.
            let left = piece.origin[last] + piece.shape[last] - origin[last];
            domain.shape[last] = chunk.min(left);
            let elements = usize::try_from(domain.shape[last].checked_mul(run)?).ok()?;
            let end = at.checked_add(elements.checked_mul(item_bytes)?)?;
            origin[last] += domain.shape[last];
            for d in (0..=last).rev() {
                if d > 0 && origin[d] >= piece.origin[d] + piece.shape[d] {
                    origin[d] = piece.origin[d];
                    origin[d - 1] += 1;
                }
            }
            cuts.push(Cut {
                domain,
                bytes: at..end,
            });
            at = end;
        }
        Some(cuts)
    }
}

/// The chunks of a shard: the shard itself, or where that is large, parts of it along its first dimensions. `tiles`: how many
/// shards there are along each dimension; none is one.
pub(super) fn chunks_of(shard: &[i64], tiles: Option<&[i64]>, item_bytes: usize) -> Vec<i64> {
    let mut chunks: Vec<i64> = shard.iter().map(|&dim| dim.max(1)).collect();
    let most = i64::try_from(MAX_CHUNK_BYTES / item_bytes.max(1)).unwrap_or(i64::MAX);
    for d in 0..chunks.len() {
        let (dim, run) = (chunks[d], product(&chunks[d + 1..]));
        if run.saturating_mul(dim) <= most {
            break;
        }
        if run > most {
            // One row is too large itself.
            chunks[d] = 1;
            continue;
        }
        let wanted = (most / run).max(1);
        let parts = ceil_div(dim, wanted);
        let is_alone = tiles.is_none_or(|tiles| tiles.get(d) == Some(&1));
        // Chunks must end where shards do; so a shard of a prime number of rows stays whole.
        let found = (parts..=parts.saturating_mul(MAX_SMALLER))
            .find(|parts| dim % parts == 0)
            .map(|parts| dim / parts);
        let uneven = is_alone.then(|| ceil_div(dim, parts));
        chunks[d] = found.or(uneven).unwrap_or(dim);
        break;
    }
    chunks
}

fn product(dims: &[i64]) -> i64 {
    dims.iter().fold(1, |all, &dim| all.saturating_mul(dim))
}

fn ceil_div(dim: i64, parts: i64) -> i64 {
    dim / parts + i64::from(dim % parts != 0)
}

#[cfg(test)]
mod tests {
    use waystation_proto::xla::PrimitiveType;

    use super::*;

    const MIB: i64 = 1 << 20;

    #[test]
    fn small_shards_are_one_chunk_and_large_ones_equal_parts() {
        let sharded = |shard: &[i64]| chunks_of(shard, Some(&vec![2; shard.len()]), 4);
        assert_eq!(sharded(&[]), [0; 0]);
        assert_eq!(sharded(&[0, 5]), [1, 5]);
        assert_eq!(sharded(&[16 * MIB]), [16 * MIB]);
        assert_eq!(sharded(&[32 * MIB]), [16 * MIB]);
        assert_eq!(sharded(&[96, MIB]), [16, MIB]);
        assert_eq!(sharded(&[90, MIB]), [15, MIB]);
        // Rows that are too large themselves.
        assert_eq!(sharded(&[3, 32, MIB]), [1, 16, MIB]);
        // A prime number of rows cannot be cut where other shards follow, nor into crumbs.
        assert_eq!(sharded(&[97, MIB]), [97, MIB]);
        assert_eq!(sharded(&[1_000_003, 100]), [1_000_003, 100]);
        // Where none does, the last chunk is a little smaller.
        assert_eq!(chunks_of(&[97, MIB], Some(&[1, 4]), 4), [14, MIB]);
        assert_eq!(chunks_of(&[97, MIB], None, 4), [14, MIB]);
    }

    #[test]
    fn cuts_are_the_chunks_of_a_piece_in_order() {
        let array = |dims: &[i64], chunks: &[i64]| SaveArray {
            location: String::new(),
            name: String::new(),
            dtype: PrimitiveType::F32,
            dims: dims.to_vec(),
            chunks: chunks.to_vec(),
            codec: None,
        };
        let cut = |array: &SaveArray, origin: &[i64], shape: &[i64]| {
            let (origin, shape) = (origin.to_vec(), shape.to_vec());
            let cuts = array.cut(&IndexDomain { origin, shape }).unwrap();
            cuts.into_iter()
                .map(|cut| (cut.domain.origin, cut.domain.shape, cut.bytes))
                .collect::<Vec<_>>()
        };
        let rows = array(&[8, 10], &[2, 10]);
        assert_eq!(
            cut(&rows, &[4, 0], &[4, 10]),
            [
                (vec![4, 0], vec![2, 10], 0..80),
                (vec![6, 0], vec![2, 10], 80..160)
            ]
        );
        // Clipped at the array's edge, along both dimensions.
        let edge = array(&[7, 10], &[2, 8]);
        assert_eq!(
            cut(&edge, &[4, 8], &[3, 2]),
            [
                (vec![4, 8], vec![2, 2], 0..16),
                (vec![6, 8], vec![1, 2], 16..24)
            ]
        );
        let deep = array(&[2, 6, 3], &[1, 4, 3]);
        assert_eq!(
            cut(&deep, &[0, 0, 0], &[2, 6, 3]),
            [
                (vec![0, 0, 0], vec![1, 4, 3], 0..48),
                (vec![0, 4, 0], vec![1, 2, 3], 48..72),
                (vec![1, 0, 0], vec![1, 4, 3], 72..120),
                (vec![1, 4, 0], vec![1, 2, 3], 120..144)
            ]
        );
        // Chunks that are no runs of bytes.
        let blocks = array(&[4, 4], &[2, 2]);
        assert_eq!(cut(&blocks, &[0, 0], &[4, 4]).len(), 1);
        assert_eq!(cut(&array(&[], &[]), &[], &[]), [(vec![], vec![], 0..4)]);
        assert!(cut(&array(&[0, 3], &[1, 3]), &[0, 0], &[0, 3]).is_empty());
        let outside = IndexDomain {
            origin: vec![7, 0],
            shape: vec![2, 10],
        };
        assert_eq!(rows.cut(&outside), None);
    }
}
