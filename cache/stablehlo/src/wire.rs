//! A protobuf message as its fields on the wire, for reading and changing single fields of messages that are larger than
//! what we declare.
//!
//! Decoding with prost drops every field that our `.proto` files do not name, and the options of a compile must reach the
//! plugin whole. Here a field that nobody touches is written back byte for byte.
//!
//! Format: <https://protobuf.dev/programming-guides/encoding/>. A field is a tag varint (number << 3 | wire type) and a payload.
//! Two occurrences of a singular message field count as their merge, which on the wire is their concatenation; of a
//! singular scalar the last one counts.

use std::borrow::Cow;

/// Why bytes are not a protobuf message (or not the one expected).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The bytes end inside a tag, a varint or a payload.
    #[error("protobuf message ends inside a field, at byte {offset} of {length}")]
    Truncated {
        /// Where the field's unfinished part starts.
        offset: usize,
        /// Length of the message in bytes.
        length: usize,
    },
    /// A varint of more than ten bytes, a field number outside 1 to 2^29 - 1, or a wire type that does not exist. Groups,
    /// long out of use, count as such.
    #[error("protobuf message has an invalid {what} at byte {offset}")]
    Invalid {
        /// "varint", "field number" or "wire type".
        what: &'static str,
        /// Byte offset in the message.
        offset: usize,
    },
    /// A known field has another wire type than its declaration.
    #[error("protobuf field {number} is not {expected}")]
    WireType {
        /// Field number.
        number: u32,
        /// What it should be: "a varint" or "length-delimited".
        expected: &'static str,
    },
}

/// The payload of one field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value<'a> {
    /// Wire type 0.
    Varint(u64),
    /// Wire type 1.
    Fixed64(u64),
    /// Wire type 2: bytes, string, message or packed scalars.
    Bytes(&'a [u8]),
    /// Wire type 5.
    Fixed32(u32),
}

/// One field with the bytes it is written as.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Field<'a> {
    number: u32,
    /// Tag and payload.
    encoded: Cow<'a, [u8]>,
    /// Where in `encoded` the payload starts; behind the length for wire type 2.
    payload: usize,
    kind: u8,
}

impl Field<'_> {
    fn value(&self) -> Value<'_> {
        let payload = self.encoded.get(self.payload..).unwrap_or_default();
        match self.kind {
            0 => Value::Varint(read_varint(payload, &mut 0).unwrap_or_default()),
            1 => Value::Fixed64(
                payload
                    .try_into()
                    .map(u64::from_le_bytes)
                    .unwrap_or_default(),
            ),
            5 => Value::Fixed32(
                payload
                    .try_into()
                    .map(u32::from_le_bytes)
                    .unwrap_or_default(),
            ),
            _ => Value::Bytes(payload),
        }
    }
}

/// A message as a list of fields, in wire order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Message<'a> {
    fields: Vec<Field<'a>>,
}

impl<'a> Message<'a> {
    /// Splits a message into its fields. Nested messages stay bytes.
    ///
    /// # Errors
    /// When the bytes are not a protobuf message.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Error> {
        let mut fields = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            let start = at;
            let tag = read_varint(bytes, &mut at)?;
            let number = u32::try_from(tag >> 3)
                .ok()
                .filter(|n| (1..1 << 29).contains(n));
            let number = number.ok_or(Error::Invalid {
                what: "field number",
                offset: start,
            })?;
            let kind = (tag & 7) as u8;
            let length = match kind {
                0 => {
                    let mut end = at;
                    read_varint(bytes, &mut end)?;
                    end - at
                }
                1 => 8,
                2 => {
                    let length = read_varint(bytes, &mut at)?;
                    usize::try_from(length).map_err(|_| Error::Truncated {
                        offset: at,
                        length: bytes.len(),
                    })?
                }
                5 => 4,
                _ => {
                    return Err(Error::Invalid {
                        what: "wire type",
                        offset: start,
                    });
                }
            };
            let end = at.checked_add(length).filter(|end| *end <= bytes.len());
            let end = end.ok_or(Error::Truncated {
                offset: at,
                length: bytes.len(),
            })?;
            fields.push(Field {
                number,
                encoded: Cow::Borrowed(&bytes[start..end]),
                payload: at - start,
                kind,
            });
            at = end;
        }
        Ok(Self { fields })
    }

    /// All fields in wire order, repeated ones as often as they stand there.
    pub fn fields(&self) -> impl Iterator<Item = (u32, Value<'_>)> {
        self.fields
            .iter()
            .map(|field| (field.number, field.value()))
    }

    /// The payloads of a repeated string, bytes or message field, in order.
    ///
    /// # Errors
    /// When an occurrence has another wire type.
    pub fn repeated(&self, number: u32) -> Result<Vec<&[u8]>, Error> {
        self.occurrences(number)
            .map(|value| match value {
                Value::Bytes(bytes) => Ok(bytes),
                _ => Err(Error::WireType {
                    number,
                    expected: "length-delimited",
                }),
            })
            .collect()
    }

    /// The bytes of a singular message field, occurrences merged; `None` when it is absent.
    ///
    /// # Errors
    /// When an occurrence has another wire type.
    pub fn message(&self, number: u32) -> Result<Option<Cow<'_, [u8]>>, Error> {
        let occurrences = self.repeated(number)?;
        Ok(match occurrences.as_slice() {
            [] => None,
            [one] => Some(Cow::Borrowed(*one)),
            many => Some(Cow::Owned(many.concat())),
        })
    }

    /// A singular integer, bool or enum field; `None` when it is absent.
    ///
    /// # Errors
    /// When an occurrence has another wire type.
    pub fn varint(&self, number: u32) -> Result<Option<u64>, Error> {
        self.occurrences(number)
            .map(|value| match value {
                Value::Varint(value) => Ok(value),
                _ => Err(Error::WireType {
                    number,
                    expected: "a varint",
                }),
            })
            .try_fold(None, |_, value| value.map(Some))
    }

    /// A repeated integer field, packed or not.
    ///
    /// # Errors
    /// When an occurrence has another wire type or a packed run is cut.
    pub fn varints(&self, number: u32) -> Result<Vec<u64>, Error> {
        let mut values = Vec::new();
        for value in self.occurrences(number) {
            match value {
                Value::Varint(value) => values.push(value),
                Value::Bytes(packed) => {
                    let mut at = 0;
                    while at < packed.len() {
                        values.push(read_varint(packed, &mut at)?);
                    }
                }
                _ => {
                    return Err(Error::WireType {
                        number,
                        expected: "a varint",
                    });
                }
            }
        }
        Ok(values)
    }

    /// Takes out every occurrence of a field.
    pub fn remove(&mut self, number: u32) {
        self.fields.retain(|field| field.number != number);
    }

    /// Takes out the occurrences of a field for which `out` says so.
    pub fn remove_where(&mut self, number: u32, out: impl Fn(Value<'_>) -> bool) {
        self.fields
            .retain(|field| field.number != number || !out(field.value()));
    }

    /// Changes string, bytes and message fields where they stand, to what `change` makes of number and payload; those for
    /// which it gives `None` stay as they are.
    pub fn change_bytes(&mut self, mut change: impl FnMut(u32, &[u8]) -> Option<Vec<u8>>) {
        for field in &mut self.fields {
            if let Value::Bytes(payload) = field.value()
                && let Some(changed) = change(field.number, payload)
            {
                *field = bytes_field(field.number, &changed);
            }
        }
    }

    /// Puts a string, bytes or message field in the place of the first occurrence and takes out the others; at the end when
    /// there was none.
    pub fn set_bytes(&mut self, number: u32, bytes: &[u8]) {
        self.set(bytes_field(number, bytes));
    }

    /// Puts an integer, bool or enum field in the place of the first occurrence and takes out the others; at the end when
    /// there was none.
    pub fn set_varint(&mut self, number: u32, value: u64) {
        self.set(varint_field(number, value));
    }

    /// Appends an occurrence of a string, bytes or message field.
    pub fn push_bytes(&mut self, number: u32, bytes: &[u8]) {
        self.fields.push(bytes_field(number, bytes));
    }

    /// Appends an occurrence of an integer, bool or enum field.
    pub fn push_varint(&mut self, number: u32, value: u64) {
        self.fields.push(varint_field(number, value));
    }

    /// Orders the fields by number. Occurrences of one field keep their order, so the message means the same.
    pub fn sort_by_number(&mut self) {
        self.fields.sort_by_key(|field| field.number);
    }

    /// Orders the occurrences of one repeated field by what `key` makes of them, keeping the places they take. For map
    /// fields, whose order on the wire says nothing.
    pub fn sort_occurrences<K: Ord>(&mut self, number: u32, key: impl Fn(Value<'_>) -> K) {
        let (mut chosen, rest): (Vec<_>, Vec<_>) = std::mem::take(&mut self.fields)
            .into_iter()
            .enumerate()
            .partition(|(_, field)| field.number == number);
        let places: Vec<usize> = chosen.iter().map(|(place, _)| *place).collect();
        chosen.sort_by_key(|(_, field)| key(field.value()));
        let chosen = places
            .into_iter()
            .zip(chosen.into_iter().map(|(_, field)| field));
        let mut all: Vec<_> = rest.into_iter().chain(chosen).collect();
        all.sort_by_key(|(place, _)| *place);
        self.fields = all.into_iter().map(|(_, field)| field).collect();
    }

    /// The message's bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.fields.iter().map(|field| field.encoded.len()).sum());
        for field in &self.fields {
            out.extend_from_slice(&field.encoded);
        }
        out
    }

    fn occurrences(&self, number: u32) -> impl Iterator<Item = Value<'_>> {
        self.fields()
            .filter(move |(n, _)| *n == number)
            .map(|(_, value)| value)
    }

    fn set(&mut self, field: Field<'a>) {
        match self
            .fields
            .iter()
            .position(|old| old.number == field.number)
        {
            None => self.fields.push(field),
            Some(first) => {
                let number = field.number;
                let mut place = 0..;
                self.fields
                    .retain(|old| place.next() == Some(first) || old.number != number);
                self.fields[first] = field;
            }
        }
    }
}

fn bytes_field<'a>(number: u32, bytes: &[u8]) -> Field<'a> {
    let mut encoded = Vec::with_capacity(bytes.len() + 15);
    write_varint(&mut encoded, u64::from(number) << 3 | 2);
    write_varint(&mut encoded, bytes.len() as u64);
    let payload = encoded.len();
    encoded.extend_from_slice(bytes);
    Field {
        number,
        encoded: Cow::Owned(encoded),
        payload,
        kind: 2,
    }
}

fn varint_field<'a>(number: u32, value: u64) -> Field<'a> {
    let mut encoded = Vec::with_capacity(15);
    write_varint(&mut encoded, u64::from(number) << 3);
    let payload = encoded.len();
    write_varint(&mut encoded, value);
    Field {
        number,
        encoded: Cow::Owned(encoded),
        payload,
        kind: 0,
    }
}

/// Appends a varint: seven bits a byte, low ones first, the high bit saying that more follow.
pub fn write_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn read_varint(bytes: &[u8], at: &mut usize) -> Result<u64, Error> {
    let start = *at;
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = *bytes.get(*at).ok_or(Error::Truncated {
            offset: start,
            length: bytes.len(),
        })?;
        *at += 1;
        // In the tenth byte only one bit is left; protobuf's own readers drop the others as well.
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err(Error::Invalid {
        what: "varint",
        offset: start,
    })
}

#[cfg(test)]
mod tests;
