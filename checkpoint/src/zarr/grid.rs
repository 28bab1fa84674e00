//! The chunk grid: which chunk holds which box of the array.

use super::{Result, malformed};
use crate::sharding::{IndexDomain, MAX_RANK, num_elements};

/// The place of a chunk in the grid, one number a dimension.
pub type ChunkIndex = Vec<i64>;

/// A regular grid of chunks over an array, anchored at its first element. Chunks at the far edge may run over it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grid {
    shape: Vec<i64>,
    chunks: Vec<i64>,
}

impl Grid {
    /// A grid of chunks of shape `chunks` over an array of shape `shape`, both in elements.
    ///
    /// # Errors
    /// Different ranks, a rank above [`MAX_RANK`], a negative dimension, a chunk extent below 1, or a number of elements
    /// (of the array or of a chunk) that cannot be counted.
    pub fn new(shape: &[i64], chunks: &[i64]) -> Result<Self> {
        if shape.len() != chunks.len() {
            return malformed(format!(
                "shape of rank {} with chunks of rank {}",
                shape.len(),
                chunks.len()
            ));
        }
        if shape.len() > MAX_RANK {
            return malformed(format!("rank {}, at most {MAX_RANK} is taken", shape.len()));
        }
        if chunks.iter().any(|&extent| extent < 1) {
            return malformed(format!("chunks {chunks:?} with an extent below 1"));
        }
        for dims in [shape, chunks] {
            if num_elements(dims).is_none_or(|elements| i64::try_from(elements).is_err()) {
                return malformed(format!("impossible dimensions {dims:?}"));
            }
        }
        Ok(Self {
            shape: shape.to_vec(),
            chunks: chunks.to_vec(),
        })
    }

    /// The shape of the array.
    #[must_use]
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// The number of chunks.
    #[must_use]
    pub fn count(&self) -> usize {
        // No more than elements, which have been counted.
        self.shape
            .iter()
            .zip(&self.chunks)
            .map(|(&dim, &chunk)| {
                usize::try_from(dim.div_euclid(chunk) + i64::from(dim % chunk != 0)).unwrap_or(0)
            })
            .product()
    }

    /// The shape of every chunk.
    #[must_use]
    pub fn chunks(&self) -> &[i64] {
        &self.chunks
    }

    /// The number of elements of a chunk, with those beyond the edge.
    #[must_use]
    pub fn chunk_elements(&self) -> usize {
        num_elements(&self.chunks).unwrap_or(0)
    }

    /// The box of the array that a chunk holds, clipped at the edge.
    ///
    /// `index` is one that [`Grid::chunks_of`] gave.
    #[must_use]
    pub fn domain(&self, index: &[i64]) -> IndexDomain {
        let mut domain = IndexDomain {
            origin: Vec::with_capacity(index.len()),
            shape: Vec::with_capacity(index.len()),
        };
        for ((&i, &chunk), &dim) in index.iter().zip(&self.chunks).zip(&self.shape) {
            let start = i.saturating_mul(chunk).min(dim);
            domain.origin.push(start);
            domain.shape.push(chunk.min(dim - start));
        }
        domain
    }

    /// The chunks that hold elements of `domain`, a box inside the array, in row-major order. None for an empty box.
    #[must_use]
    pub fn chunks_of(&self, domain: &IndexDomain) -> Chunks {
        let mut first = Vec::with_capacity(self.chunks.len());
        let mut last = Vec::with_capacity(self.chunks.len());
        for ((&origin, &extent), &chunk) in
            domain.origin.iter().zip(&domain.shape).zip(&self.chunks)
        {
            first.push(origin / chunk);
            last.push((origin + extent - 1).max(0) / chunk);
        }
        let nonempty = !domain.is_empty();
        let next = nonempty.then(|| first.clone());
        Chunks {
            first,
            last,
            nonempty,
            next,
        }
    }
}

/// The chunks of a box, in row-major order.
#[derive(Debug, Clone)]
pub struct Chunks {
    first: ChunkIndex,
    last: ChunkIndex,
    nonempty: bool,
    next: Option<ChunkIndex>,
}

impl Chunks {
    /// Whether a chunk is one of those that this began with.
    #[must_use]
    pub fn contains(&self, index: &[i64]) -> bool {
        self.nonempty
            && index
                .iter()
                .zip(self.first.iter().zip(&self.last))
                .all(|(i, (first, last))| first <= i && i <= last)
    }
}

impl Iterator for Chunks {
    type Item = ChunkIndex;

    fn next(&mut self) -> Option<ChunkIndex> {
        let current = self.next.take()?;
        let mut following = current.clone();
        for d in (0..following.len()).rev() {
            if following[d] < self.last[d] {
                following[d] += 1;
                self.next = Some(following);
                break;
            }
            following[d] = self.first[d];
        }
        Some(current)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn domain(origin: &[i64], shape: &[i64]) -> IndexDomain {
        IndexDomain {
            origin: origin.to_vec(),
            shape: shape.to_vec(),
        }
    }

    #[test]
    fn a_box_is_covered_by_the_chunks_it_touches() {
        let grid = Grid::new(&[10, 7], &[4, 3]).unwrap();
        let found: Vec<_> = grid.chunks_of(&domain(&[3, 3], &[6, 3])).collect();
        assert_eq!(found, [[0, 1], [1, 1], [2, 1]]);
        assert_eq!(grid.chunks_of(&IndexDomain::whole(&[10, 7])).count(), 9);
        assert_eq!(grid.domain(&[2, 2]), domain(&[8, 6], &[2, 1]));
        assert_eq!(grid.chunks_of(&domain(&[3, 3], &[0, 3])).count(), 0);
    }

    #[test]
    fn rank_0_has_one_chunk() {
        let grid = Grid::new(&[], &[]).unwrap();
        let found: Vec<_> = grid.chunks_of(&IndexDomain::whole(&[])).collect();
        assert_eq!(found, [Vec::<i64>::new()]);
        assert_eq!(grid.chunk_elements(), 1);
    }

    #[test]
    fn chunks_are_counted() {
        for (shape, chunks, count) in [
            (&[10, 7][..], &[4, 3][..], 9),
            (&[8, 6], &[4, 3], 4),
            (&[0, 3], &[1, 1], 0),
            (&[], &[], 1),
        ] {
            assert_eq!(Grid::new(shape, chunks).unwrap().count(), count);
        }
    }

    #[test]
    fn impossible_grids_are_refused() {
        for (shape, chunks) in [
            (&[4][..], &[4, 4][..]),
            (&[4], &[0]),
            (&[4], &[-1]),
            (&[-4], &[1]),
            (&[4, 4], &[i64::MAX, 2]),
            (&[i64::MAX, 2], &[1, 1]),
            (&[1; 65], &[1; 65]),
        ] {
            assert!(Grid::new(shape, chunks).is_err(), "{shape:?} {chunks:?}");
        }
    }
}
