//! Shards: objects that hold several chunks and say in an index where each lies (zarr v3's `sharding_indexed`).
//!
//! A shard is a chunk of the array's grid, cut once more. Its index has two little-endian 64-bit numbers for each inner
//! chunk in row-major order, offset and length in bytes, both all ones for a chunk that is absent; then, as a rule, the
//! CRC-32C of those. It lies at the end of the object or at its start.

use std::ops::Range;

use bytes::Bytes;

use super::{Error, Grid, Result, malformed};

/// The most inner chunks of a shard. Orbax writes one; the index of so many has 16 MiB.
pub const MAX_INNER_CHUNKS: usize = 1 << 20;

const ENTRY_BYTES: usize = 16;
const CHECKSUM_BYTES: usize = 4;

/// How the chunks of an array's grid are cut into inner chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shards {
    grid: Grid,
    /// Whether the index lies before the chunks, not behind them.
    pub index_at_start: bool,
    /// Whether the index ends with its checksum.
    pub checksum: bool,
}

impl Shards {
    /// Inner chunks of shape `inner` in shards of shape `shard`, with a checked index at the end, as Orbax has it.
    ///
    /// # Errors
    /// As [`Grid::new`]; inner chunks that do not fill the shard, or more than [`MAX_INNER_CHUNKS`] of them.
    pub fn new(shard: &[i64], inner: &[i64]) -> Result<Self> {
        let grid = Grid::new(shard, inner)?;
        if shard
            .iter()
            .zip(inner)
            .any(|(shard, inner)| shard % inner != 0)
        {
            return malformed(format!(
                "inner chunks {inner:?} do not fill shards {shard:?}"
            ));
        }
        if grid.count() > MAX_INNER_CHUNKS {
            return Err(Error::Unsupported(format!(
                "a shard of {} inner chunks (more than {MAX_INNER_CHUNKS})",
                grid.count()
            )));
        }
        Ok(Self {
            grid,
            index_at_start: false,
            checksum: true,
        })
    }

    /// The grid of inner chunks over one shard; its origin is the shard's.
    #[must_use]
    pub fn grid(&self) -> &Grid {
        &self.grid
    }

    /// The size of the index in bytes.
    #[must_use]
    pub fn index_bytes(&self) -> usize {
        let checksum = if self.checksum { CHECKSUM_BYTES } else { 0 };
        self.grid.count() * ENTRY_BYTES + checksum
    }

    /// Where the index lies in a shard of `size` bytes; `None` when the shard is too short for one.
    #[must_use]
    pub fn index_range(&self, size: usize) -> Option<Range<usize>> {
        let bytes = self.index_bytes();
        let start = size.checked_sub(bytes)?;
        Some(if self.index_at_start {
            0..bytes
        } else {
            start..size
        })
    }

    /// The index of a shard that holds one chunk of `len` bytes and has its index behind it.
    #[must_use]
    pub fn index_of_one(len: usize) -> [u8; ENTRY_BYTES + CHECKSUM_BYTES] {
        let mut index = [0; ENTRY_BYTES + CHECKSUM_BYTES];
        // The first number, the offset, is zero.
        index[8..ENTRY_BYTES].copy_from_slice(&(len as u64).to_le_bytes());
        let checksum = crc32c(&index[..ENTRY_BYTES]);
        index[ENTRY_BYTES..].copy_from_slice(&checksum.to_le_bytes());
        index
    }

    /// Reads the index of a shard of `size` bytes.
    ///
    /// # Errors
    /// An index of another length than it must have, or with a wrong checksum.
    pub fn read_index(&self, bytes: Bytes, size: u64) -> Result<Index> {
        if bytes.len() != self.index_bytes() || size < bytes.len() as u64 {
            return malformed(format!(
                "a shard index of {} bytes where {} are needed",
                bytes.len(),
                self.index_bytes()
            ));
        }
        let (entries, checksum) = bytes.split_at(self.grid.count() * ENTRY_BYTES);
        if self.checksum && crc32c(entries).to_le_bytes() != checksum {
            return malformed("the checksum of the shard index is wrong");
        }
        // What is left for chunks.
        let index = bytes.len() as u64;
        let room = if self.index_at_start {
            index..size
        } else {
            0..size - index
        };
        Ok(Index {
            shards: self.clone(),
            bytes,
            room,
        })
    }
}

/// Where the inner chunks of one shard lie.
#[derive(Debug, Clone)]
pub struct Index {
    shards: Shards,
    bytes: Bytes,
    room: Range<u64>,
}

impl Index {
    /// The bytes of the shard that hold an inner chunk; `None` when the chunk is absent.
    ///
    /// # Errors
    /// A place that is not in the shard, or in its index.
    pub fn place(&self, inner: &[i64]) -> Result<Option<Range<u64>>> {
        let grid = &self.shards.grid;
        let number = inner
            .iter()
            .zip(grid.shape().iter().zip(grid.chunks()))
            .fold(0, |number, (&i, (&shard, &chunk))| {
                number * (shard / chunk) + i
            });
        let entry = usize::try_from(number)
            .ok()
            .filter(|&number| inner.len() == grid.shape().len() && number < grid.count())
            .and_then(|number| {
                self.bytes
                    .get(number * ENTRY_BYTES..(number + 1) * ENTRY_BYTES)
            });
        let Some((offset, len)) = entry.and_then(numbers) else {
            return malformed(format!("no inner chunk {inner:?} in the shard index"));
        };
        if (offset, len) == (u64::MAX, u64::MAX) {
            return Ok(None);
        }
        match offset.checked_add(len) {
            Some(end) if self.room.start <= offset && end <= self.room.end => Ok(Some(offset..end)),
            _ => malformed(format!(
                "the shard index puts {len} bytes at {offset}, the chunks lie in {} to {}",
                self.room.start, self.room.end
            )),
        }
    }
}

fn numbers(entry: &[u8]) -> Option<(u64, u64)> {
    let (offset, len) = entry.split_first_chunk::<8>()?;
    Some((
        u64::from_le_bytes(*offset),
        u64::from_le_bytes(*len.first_chunk::<8>()?),
    ))
}

/// CRC-32C (Castagnoli), which fits 32 bits.
fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The bytes of an index.
    fn index(shards: &Shards, entries: &[(u64, u64)]) -> Bytes {
        let mut bytes: Vec<u8> = entries
            .iter()
            .flat_map(|(offset, len)| [offset.to_le_bytes(), len.to_le_bytes()])
            .flatten()
            .collect();
        if shards.checksum {
            bytes.extend(crc32c(&bytes).to_le_bytes());
        }
        bytes.into()
    }

    #[test]
    fn an_index_of_one_is_as_orbax_writes_it() {
        let shards = Shards::new(&[6, 4], &[6, 4]).unwrap();
        let bytes = Bytes::copy_from_slice(&Shards::index_of_one(55));
        assert_eq!(bytes, index(&shards, &[(0, 55)]));
        // The check value of CRC-32C.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        let read = shards.read_index(bytes, 75).unwrap();
        assert_eq!(read.place(&[0, 0]).unwrap(), Some(0..55));
    }

    #[test]
    fn inner_chunks_are_found_in_row_major_order() {
        let mut shards = Shards::new(&[4, 6], &[2, 2]).unwrap();
        let absent = (u64::MAX, u64::MAX);
        let entries = [(0, 1), (1, 2), (3, 3), (6, 4), absent, (10, 0)];
        let bytes = index(&shards, &entries);
        assert_eq!(shards.index_range(120), Some(20..120));
        assert_eq!(shards.index_range(99), None);
        let read = shards.read_index(bytes.clone(), 110).unwrap();
        assert_eq!(read.place(&[0, 2]).unwrap(), Some(3..6));
        assert_eq!(read.place(&[1, 0]).unwrap(), Some(6..10));
        assert_eq!(read.place(&[1, 1]).unwrap(), None);
        assert_eq!(read.place(&[1, 2]).unwrap(), Some(10..10));
        for outside in [&[2, 0][..], &[0, -1], &[0], &[i64::MAX / 4, 0]] {
            assert!(read.place(outside).is_err(), "{outside:?}");
        }
        // With the index before the chunks, nothing lies at 0.
        shards.index_at_start = true;
        assert_eq!(shards.index_range(120), Some(0..100));
        let read = shards.read_index(bytes, 110).unwrap();
        assert!(read.place(&[0, 0]).is_err());
    }

    #[test]
    fn places_outside_the_shard_are_refused() {
        let shards = Shards::new(&[2], &[2]).unwrap();
        for entry in [
            (0, 11),
            (11, 0),
            (u64::MAX, 1),
            (u64::MAX, 0),
            (0, u64::MAX),
            (5, 6),
            (1 << 63, 1 << 63),
        ] {
            let read = shards.read_index(index(&shards, &[entry]), 30).unwrap();
            assert!(read.place(&[0]).is_err(), "{entry:?}");
        }
        let good = index(&shards, &[(0, 10)]);
        assert!(shards.read_index(good.slice(1..), 30).is_err());
        assert!(shards.read_index(good.clone(), 19).is_err());
        for bit in 0..good.len() * 8 {
            let mut damaged = good.to_vec();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(shards.read_index(damaged.into(), 30).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn impossible_shards_are_refused() {
        for (shard, inner) in [
            (&[4][..], &[3][..]),
            (&[4], &[8]),
            (&[4], &[0]),
            (&[4], &[2, 2]),
            (&[1 << 21], &[1]),
            (&[1 << 62], &[1]),
        ] {
            assert!(Shards::new(shard, inner).is_err(), "{shard:?} {inner:?}");
        }
    }

    proptest! {
        #[test]
        fn no_index_panics_or_points_outside(
            bytes in proptest::collection::vec(any::<u8>(), 0..100),
            size in prop_oneof![0..200u64, any::<u64>()],
            at_start in any::<bool>(),
        ) {
            let mut shards = Shards::new(&[2, 4], &[1, 2]).unwrap();
            (shards.index_at_start, shards.checksum) = (at_start, false);
            for bytes in [bytes.clone(), bytes.iter().copied().cycle().take(if bytes.is_empty() { 0 } else { 64 }).collect()] {
                let Ok(index) = shards.read_index(bytes.into(), size) else { continue };
                for inner in shards.grid().chunks_of(&crate::IndexDomain::whole(&[2, 4])) {
                    if let Ok(Some(place)) = index.place(&inner) {
                        prop_assert!(place.start <= place.end && place.end <= size);
                    }
                }
            }
        }
    }
}
