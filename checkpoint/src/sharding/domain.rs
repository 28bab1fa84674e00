//! A box of indices inside a global array.

/// A box of indices: `origin[d] .. origin[d] + shape[d]` in every dimension `d`. Of rank 0, it is one element.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IndexDomain {
    /// The first index of each dimension, in elements.
    pub origin: Vec<i64>,
    /// The extent of each dimension, in elements. The same length as `origin`; a zero makes the domain empty.
    pub shape: Vec<i64>,
}

impl IndexDomain {
    /// The domain of a whole array of dimensions `dims`.
    #[must_use]
    pub fn whole(dims: &[i64]) -> Self {
        Self {
            origin: vec![0; dims.len()],
            shape: dims.to_vec(),
        }
    }

    /// The number of dimensions.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.shape.len()
    }

    /// Whether there is no index in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.shape.iter().any(|&extent| extent <= 0)
    }

    /// The number of elements, or `None` when it does not fit or an extent is negative.
    #[must_use]
    pub fn num_elements(&self) -> Option<usize> {
        num_elements(&self.shape)
    }

    /// What this domain and `other` share; `None` when they share nothing or differ in rank.
    #[must_use]
    pub fn intersect(&self, other: &Self) -> Option<Self> {
        if self.rank() != other.rank() {
            return None;
        }
        let mut shared = Self {
            origin: Vec::with_capacity(self.rank()),
            shape: Vec::with_capacity(self.rank()),
        };
        for d in 0..self.rank() {
            let start = self.origin[d].max(other.origin[d]);
            let end = self.origin[d]
                .saturating_add(self.shape[d])
                .min(other.origin[d].saturating_add(other.shape[d]));
            if end <= start {
                return None;
            }
            shared.origin.push(start);
            shared.shape.push(end - start);
        }
        Some(shared)
    }

    /// Whether it is a box with origin and shape of equal length that lies inside an array of dimensions `dims`.
    #[must_use]
    pub fn lies_in(&self, dims: &[i64]) -> bool {
        self.origin.len() == dims.len()
            && self.shape.len() == dims.len()
            && self
                .origin
                .iter()
                .zip(&self.shape)
                .zip(dims)
                .all(|((&origin, &extent), &dim)| {
                    origin >= 0
                        && extent >= 0
                        && origin.checked_add(extent).is_some_and(|end| end <= dim)
                })
    }
}

/// The product of `dims`; `None` when an extent is negative or the product of the other extents does not fit.
pub(crate) fn num_elements(dims: &[i64]) -> Option<usize> {
    // A zero must not hide an overflow of the rest: strides are computed from partial products.
    let mut product = 1usize;
    let mut empty = false;
    for &dim in dims {
        let dim = usize::try_from(dim).ok()?;
        if dim == 0 {
            empty = true;
        } else {
            product = product.checked_mul(dim)?;
        }
    }
    Some(if empty { 0 } else { product })
}
