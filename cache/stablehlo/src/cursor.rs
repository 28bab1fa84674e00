//! A bounds-checked reader of MLIR bytecode's primitives.
//!
//! Facts of the encoding: MLIR's bytecode format page (<https://mlir.llvm.org/docs/BytecodeFormat/>), and what jaxlib writes.

use crate::error::Error;

/// A position in a part of the program.
#[derive(Debug, Clone)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    /// Absolute offset of `bytes[0]`: for messages, and for the alignment of sections.
    base: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8], base: usize) -> Self {
        Self { bytes, at: 0, base }
    }

    pub(crate) fn remaining(&self) -> usize {
        self.bytes.len() - self.at
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.remaining() == 0
    }

    /// Absolute offset of the next byte.
    pub(crate) fn offset(&self) -> usize {
        self.base + self.at
    }

    pub(crate) fn damaged(&self, what: &'static str) -> Error {
        Error::Damaged {
            what,
            offset: self.offset(),
        }
    }

    pub(crate) fn take(&mut self, length: usize, what: &'static str) -> Result<&'a [u8], Error> {
        let end = self
            .at
            .checked_add(length)
            .filter(|end| *end <= self.bytes.len());
        let end = end.ok_or_else(|| self.damaged(what))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    pub(crate) fn rest(&mut self) -> &'a [u8] {
        let rest = &self.bytes[self.at..];
        self.at = self.bytes.len();
        rest
    }

    pub(crate) fn byte(&mut self) -> Result<u8, Error> {
        Ok(self.take(1, "unexpected end")?[0])
    }

    /// A string up to its NUL, which is consumed and not returned.
    pub(crate) fn terminated(&mut self) -> Result<&'a [u8], Error> {
        let length = self.bytes[self.at..].iter().position(|byte| *byte == 0);
        let length = length.ok_or_else(|| self.damaged("string without an end"))?;
        let text = self.take(length, "unexpected end")?;
        self.byte()?;
        Ok(text)
    }

    /// A prefix varint: the trailing zero bits of the first byte count the bytes that follow; a first byte of 0 means eight.
    pub(crate) fn varint(&mut self) -> Result<u64, Error> {
        let first = self.byte()?;
        if first == 0 {
            let word = self.take(8, "number cut short")?;
            return Ok(word
                .iter()
                .rev()
                .fold(0, |value, byte| value << 8 | u64::from(*byte)));
        }
        let extra = first.trailing_zeros();
        let more = self.take(extra as usize, "number cut short")?;
        let high = more
            .iter()
            .rev()
            .fold(0, |value, byte| value << 8 | u64::from(*byte));
        Ok((high << 8 | u64::from(first)) >> (extra + 1))
    }

    /// A varint whose lowest bit is a flag of its own.
    pub(crate) fn flagged(&mut self) -> Result<(u64, bool), Error> {
        let value = self.varint()?;
        Ok((value >> 1, value & 1 == 1))
    }

    /// A zigzag-coded varint.
    pub(crate) fn signed(&mut self) -> Result<i64, Error> {
        let value = self.varint()?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    /// The length of a list whose elements take at least one byte each, so it cannot be longer than what is left.
    pub(crate) fn count(&mut self) -> Result<usize, Error> {
        let offset = self.offset();
        let count = self.varint()?;
        usize::try_from(count)
            .ok()
            .filter(|count| *count <= self.remaining())
            .ok_or(Error::Damaged {
                what: "list longer than the bytes that hold it",
                offset,
            })
    }

    /// A varint followed by that many bytes.
    pub(crate) fn sized(&mut self) -> Result<&'a [u8], Error> {
        let length = self.count()?;
        self.take(length, "unexpected end")
    }

    /// Checks that everything was read.
    pub(crate) fn finish(&self, what: &'static str) -> Result<(), Error> {
        if self.is_empty() {
            Ok(())
        } else {
            Err(self.damaged(what))
        }
    }

    /// A section: its id and its content.
    pub(crate) fn section(&mut self) -> Result<(u8, Cursor<'a>), Error> {
        let head = self.byte()?;
        let length = self.varint()?;
        if head & 0x80 != 0 {
            let alignment = usize::try_from(self.varint()?)
                .ok()
                .filter(|a| a.is_power_of_two());
            let alignment =
                alignment.ok_or_else(|| self.damaged("section with an invalid alignment"))?;
            while !self.offset().is_multiple_of(alignment) {
                if self.byte()? != 0xcb {
                    return Err(self.damaged("section with wrong padding"));
                }
            }
        }
        let base = self.offset();
        let length =
            usize::try_from(length).map_err(|_| self.damaged("section longer than the program"))?;
        let content = self.take(length, "section longer than the program")?;
        Ok((head & 0x7f, Cursor::new(content, base)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn varint(bytes: &[u8]) -> Result<u64, Error> {
        Cursor::new(bytes, 0).varint()
    }

    #[test]
    fn varints_of_every_width() {
        assert_eq!(varint(&[0x0d]), Ok(6));
        assert_eq!(varint(&[0xff]), Ok(127));
        assert_eq!(varint(&[0x02, 0x02]), Ok(128));
        assert_eq!(varint(&[0x80, 1, 0, 0, 0, 0, 0, 0]), Ok(1));
        assert_eq!(
            varint(&[0x00, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]),
            Ok(u64::MAX)
        );
        assert!(varint(&[0x00, 1]).is_err());
        assert!(varint(&[0x02]).is_err());
    }

    #[test]
    fn signed_numbers_are_zigzag_coded() {
        for (byte, value) in [(0x01, 0), (0x03, -1), (0x05, 1), (0x07, -2)] {
            assert_eq!(Cursor::new(&[byte], 0).signed(), Ok(value));
        }
    }

    #[test]
    fn a_list_longer_than_its_bytes_is_damage() {
        assert!(Cursor::new(&[0x07, 1, 2], 0).count().is_err());
        assert_eq!(Cursor::new(&[0x07, 1, 2, 3], 0).count(), Ok(3));
    }

    #[test]
    fn an_aligned_section_skips_its_padding() {
        let bytes = [0x83, 0x05, 0x11, 0xcb, 0xcb, 7, 8, 9];
        let mut cursor = Cursor::new(&bytes, 3);
        let (id, mut content) = cursor.section().expect("valid");
        assert_eq!((id, content.offset(), content.rest()), (3, 8, &[7, 8][..]));
        assert_eq!(cursor.remaining(), 1);
    }
}
