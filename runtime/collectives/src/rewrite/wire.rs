//! Protocol buffers on the wire: fields one after the other, each with the bytes that it came as.
//!
//! What is not looked at is copied as it is, so that fields that we do not know survive.

use super::Refusal;

/// What a field holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Value<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    /// Fixed widths, of which none is looked at.
    Other,
}

/// One field of a message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field<'a> {
    pub(super) number: u64,
    pub(super) value: Value<'a>,
    /// Tag and value.
    pub(super) raw: &'a [u8],
}

/// The fields of a message.
pub(super) struct Fields<'a>(&'a [u8]);

pub(super) fn fields(message: &[u8]) -> Fields<'_> {
    Fields(message)
}

const CUT: Refusal = Refusal::Malformed("a message that ends within a field");

fn varint(rest: &mut &[u8]) -> Result<u64, Refusal> {
    let mut value = 0_u64;
    for shift in 0..10 {
        let (byte, after) = rest.split_first().ok_or(CUT)?;
        *rest = after;
        value |= u64::from(byte & 0x7f) << (7 * shift);
        if byte & 0x80 == 0 {
            return Ok(value);
        }
    }
    Err(Refusal::Malformed("a number of more than ten bytes"))
}

impl<'a> Fields<'a> {
    fn read(&mut self) -> Result<Field<'a>, Refusal> {
        let start = self.0;
        let mut rest = start;
        let tag = varint(&mut rest)?;
        let mut skip = |count: usize| -> Result<&'a [u8], Refusal> {
            let (skipped, after) = rest.split_at_checked(count).ok_or(CUT)?;
            rest = after;
            Ok(skipped)
        };
        let value = match tag & 7 {
            0 => Value::Varint(varint(&mut rest)?),
            1 => skip(8).map(|_| Value::Other)?,
            5 => skip(4).map(|_| Value::Other)?,
            2 => {
                let length = varint(&mut rest)?;
                let length = usize::try_from(length).map_err(|_| CUT)?;
                let (bytes, after) = rest.split_at_checked(length).ok_or(CUT)?;
                rest = after;
                Value::Bytes(bytes)
            }
            _ => return Err(Refusal::Malformed("a field of a kind that is not in use")),
        };
        self.0 = rest;
        Ok(Field {
            number: tag >> 3,
            value,
            raw: &start[..start.len() - rest.len()],
        })
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<Field<'a>, Refusal>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.read();
        if field.is_err() {
            self.0 = &[];
        }
        Some(field)
    }
}

impl<'a> Field<'a> {
    pub(super) fn int(&self) -> Result<i64, Refusal> {
        match self.value {
            // Negative numbers are sent as their two's complement.
            Value::Varint(value) => Ok(value.cast_signed()),
            _ => Err(Refusal::Malformed("a number that is none")),
        }
    }

    pub(super) fn bytes(&self) -> Result<&'a [u8], Refusal> {
        match self.value {
            Value::Bytes(bytes) => Ok(bytes),
            _ => Err(Refusal::Malformed("a message that is a number")),
        }
    }

    pub(super) fn text(&self) -> Result<&'a str, Refusal> {
        std::str::from_utf8(self.bytes()?).map_err(|_| Refusal::Malformed("a text not in UTF-8"))
    }

    /// Adds the numbers of a repeated field, packed or not.
    pub(super) fn ints(&self, into: &mut Vec<i64>) -> Result<(), Refusal> {
        match self.value {
            Value::Varint(value) => into.push(value.cast_signed()),
            Value::Bytes(mut rest) => {
                while !rest.is_empty() {
                    into.push(varint(&mut rest)?.cast_signed());
                }
            }
            Value::Other => return Err(Refusal::Malformed("a list of numbers that is none")),
        }
        Ok(())
    }
}

fn put_varint(into: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        into.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    into.push(value as u8);
}

pub(super) fn put_int(into: &mut Vec<u8>, number: u64, value: u64) {
    put_varint(into, number << 3);
    put_varint(into, value);
}

pub(super) fn put_bytes(into: &mut Vec<u8>, number: u64, bytes: &[u8]) {
    put_varint(into, number << 3 | 2);
    put_varint(into, bytes.len() as u64);
    into.extend_from_slice(bytes);
}
