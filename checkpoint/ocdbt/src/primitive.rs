//! The numbers that everything is made of: fixed-width ones, and varints (LEB128, unsigned, at most 64 bits).

use bytes::Bytes;

use crate::error::{Error, Result, at_most};

/// A position in a decoded body.
#[derive(Debug)]
pub(crate) struct Cursor<'a> {
    bytes: &'a Bytes,
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a Bytes) -> Self {
        Self { bytes, at: 0 }
    }

    pub(crate) fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub(crate) fn damaged(&self, what: &'static str) -> Error {
        Error::Damaged {
            what,
            offset: self.at,
        }
    }

    fn advance(&mut self, length: usize) -> Result<usize> {
        if length > self.remaining() {
            return Err(self.damaged("unexpected end"));
        }
        let from = self.at;
        self.at += length;
        Ok(from)
    }

    pub(crate) fn take(&mut self, length: usize) -> Result<&'a [u8]> {
        let from = self.advance(length)?;
        Ok(&self.bytes[from..self.at])
    }

    /// A part that shares the body's memory.
    pub(crate) fn share(&mut self, length: usize) -> Result<Bytes> {
        let from = self.advance(length)?;
        Ok(self.bytes.slice(from..self.at))
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(crate) fn byte(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn u64_le(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(crate) fn varint(&mut self) -> Result<u64> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                break;
            }
            value |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(self.damaged("number of more than 64 bits"))
    }

    pub(crate) fn varint_u32(&mut self, what: &'static str) -> Result<u32> {
        let value = at_most(what, self.varint()?, u64::from(u32::MAX))?;
        Ok(value as u32)
    }

    /// A length that the format keeps in 16 bits.
    pub(crate) fn length16(&mut self, what: &'static str) -> Result<usize> {
        Ok(at_most(what, self.varint()?, u64::from(u16::MAX))? as usize)
    }

    /// How many entries follow, each of which takes at least `least` bytes.
    pub(crate) fn count(
        &mut self,
        what: &'static str,
        limit: usize,
        least: usize,
    ) -> Result<usize> {
        let count = at_most(what, self.varint()?, limit as u64)? as usize;
        if count.saturating_mul(least) > self.remaining() {
            return Err(self.damaged("more entries than there are bytes for"));
        }
        Ok(count)
    }

    /// A column of as many fields as `count`, which [`Cursor::count`] has found to have room.
    pub(crate) fn column<T>(
        &mut self,
        count: usize,
        mut field: impl FnMut(&mut Self) -> Result<T>,
    ) -> Result<Vec<T>> {
        let mut column = Vec::with_capacity(count);
        for _ in 0..count {
            column.push(field(self)?);
        }
        Ok(column)
    }

    pub(crate) fn varints(&mut self, count: usize) -> Result<Vec<u64>> {
        self.column(count, Self::varint)
    }

    /// Checks that everything was read.
    pub(crate) fn finish(&self) -> Result<()> {
        if self.remaining() == 0 {
            Ok(())
        } else {
            Err(self.damaged("bytes after the end"))
        }
    }
}

pub(crate) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// The length of what two byte strings have in common at their start.
pub(crate) fn common_prefix(a: &[u8], b: &[u8]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn varint(bytes: &'static [u8]) -> Result<u64> {
        let bytes = Bytes::from_static(bytes);
        let mut cursor = Cursor::new(&bytes);
        let value = cursor.varint()?;
        cursor.finish()?;
        Ok(value)
    }

    #[test]
    fn varints_of_every_width() {
        assert_eq!(varint(&[0]).unwrap(), 0);
        assert_eq!(varint(&[0x7f]).unwrap(), 127);
        assert_eq!(varint(&[0x80, 0x01]).unwrap(), 128);
        assert_eq!(varint(&[0xac, 0x02]).unwrap(), 300);
        let largest = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
        let mut out = Vec::new();
        put_varint(&mut out, u64::MAX);
        assert_eq!(out, largest);
        assert_eq!(
            varint(&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01]).unwrap(),
            u64::MAX
        );
        for shift in 0..64 {
            for value in [1_u64 << shift, (1 << shift) - 1] {
                let mut out = Vec::new();
                put_varint(&mut out, value);
                let bytes = Bytes::from(out);
                assert_eq!(Cursor::new(&bytes).varint().unwrap(), value);
            }
        }
    }

    #[test]
    fn a_varint_that_does_not_end_or_fit_is_damage() {
        for bytes in [
            &[][..],
            &[0x80],
            &[0xff; 9],
            &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02],
            &[
                0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x81, 0x00,
            ],
        ] {
            assert!(
                matches!(varint(bytes), Err(Error::Damaged { .. })),
                "{bytes:?}"
            );
        }
    }

    #[test]
    fn a_count_without_the_bytes_for_it_is_damage() {
        let bytes = Bytes::from_static(&[3, 0, 0, 0, 0, 0]);
        assert_eq!(Cursor::new(&bytes).count("entries", 3, 1).unwrap(), 3);
        assert!(matches!(
            Cursor::new(&bytes).count("entries", 3, 2),
            Err(Error::Damaged { .. })
        ));
        assert!(matches!(
            Cursor::new(&bytes).count("entries", 2, 1),
            Err(Error::TooLarge {
                value: 3,
                limit: 2,
                ..
            })
        ));
    }
}
