//! The elements of a piece, in parts.

use bytes::{Bytes, BytesMut};

/// Elements of a piece, dense and row-major, in one part or several. Whoever has no more use for a part lets it go, so a
/// piece in small parts never lies in memory twice while it is compressed.
#[derive(Debug, Clone, Default)]
pub struct Elements(Vec<Bytes>);

impl Elements {
    /// The bytes of all parts.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.iter().map(Bytes::len).sum()
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of the largest part.
    #[must_use]
    pub(crate) fn largest(&self) -> usize {
        self.0.iter().map(Bytes::len).max().unwrap_or(0)
    }

    pub(crate) fn into_parts(self) -> Vec<Bytes> {
        self.0
    }

    /// All in one part: a copy where there are several.
    #[must_use]
    pub fn joined(mut self) -> Bytes {
        if self.0.len() == 1 {
            return self.0.remove(0);
        }
        let mut all = BytesMut::with_capacity(self.len());
        for part in self.0 {
            all.extend_from_slice(&part);
        }
        all.freeze()
    }
}

impl From<Bytes> for Elements {
    fn from(bytes: Bytes) -> Self {
        Self(vec![bytes])
    }
}

impl FromIterator<Bytes> for Elements {
    fn from_iter<I: IntoIterator<Item = Bytes>>(parts: I) -> Self {
        Self(parts.into_iter().collect())
    }
}
