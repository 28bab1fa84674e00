//! Protobuf messages as trees of numbered fields, without their schema: what is taken apart here, changed and put
//! together again still decodes, and serialized messages inside `bytes` fields are taken apart as well.

/// How deep messages are taken apart.
const MAX_DEPTH: usize = 12;

/// One field.
#[derive(Clone, Debug, PartialEq)]
pub struct Field {
    /// Its number.
    pub number: u64,
    /// What it holds.
    pub value: Value,
}

/// What a field holds.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Integers, enums, booleans.
    Varint(u64),
    /// Handles, mostly.
    Fixed64(u64),
    /// As its name says.
    Fixed32(u32),
    /// Text, bytes, packed numbers.
    Bytes(Vec<u8>),
    /// Bytes that can be read as a message.
    Message(Vec<Field>),
}

/// Takes a message apart; `None` where the bytes are none.
pub fn parse(bytes: &[u8]) -> Option<Vec<Field>> {
    parse_at(bytes, 0)
}

fn parse_at(mut bytes: &[u8], depth: usize) -> Option<Vec<Field>> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let tag = varint(&mut bytes)?;
        let number = tag >> 3;
        // Field numbers of real messages are small; what looks otherwise is text or packed numbers.
        if number == 0 || number > 4096 {
            return None;
        }
        let value = match tag & 7 {
            0 => Value::Varint(varint(&mut bytes)?),
            1 => Value::Fixed64(u64::from_le_bytes(take(&mut bytes, 8)?.try_into().ok()?)),
            2 => {
                let length = usize::try_from(varint(&mut bytes)?).ok()?;
                let inner = take(&mut bytes, length)?;
                match parse_at(inner, depth + 1).filter(|fields| !fields.is_empty()) {
                    Some(fields) if depth < MAX_DEPTH => Value::Message(fields),
                    _ => Value::Bytes(inner.to_vec()),
                }
            }
            5 => Value::Fixed32(u32::from_le_bytes(take(&mut bytes, 4)?.try_into().ok()?)),
            _ => return None,
        };
        fields.push(Field { number, value });
    }
    Some(fields)
}

fn take<'a>(bytes: &mut &'a [u8], length: usize) -> Option<&'a [u8]> {
    let (taken, rest) = bytes.split_at_checked(length)?;
    *bytes = rest;
    Some(taken)
}

fn varint(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let byte = take(bytes, 1)?[0];
        value |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(value);
        }
    }
    None
}

/// Puts a message together.
pub fn encode(fields: &[Field]) -> Vec<u8> {
    let mut out = Vec::new();
    for field in fields {
        let kind = match &field.value {
            Value::Varint(_) => 0,
            Value::Fixed64(_) => 1,
            Value::Bytes(_) | Value::Message(_) => 2,
            Value::Fixed32(_) => 5,
        };
        put_varint(&mut out, field.number << 3 | kind);
        match &field.value {
            Value::Varint(value) => put_varint(&mut out, *value),
            Value::Fixed64(value) => out.extend(value.to_le_bytes()),
            Value::Fixed32(value) => out.extend(value.to_le_bytes()),
            Value::Bytes(bytes) => put_bytes(&mut out, bytes),
            Value::Message(fields) => put_bytes(&mut out, &encode(fields)),
        }
    }
    out
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push((value & 0x7f) as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_apart_goes_together_again() {
        let fields = vec![
            Field {
                number: 1,
                value: Value::Varint(u64::MAX),
            },
            Field {
                number: 2,
                value: Value::Message(vec![Field {
                    number: 300,
                    value: Value::Fixed64(7),
                }]),
            },
            Field {
                number: 3,
                value: Value::Bytes(b"text".to_vec()),
            },
            Field {
                number: 4,
                value: Value::Fixed32(9),
            },
        ];
        let bytes = encode(&fields);
        assert_eq!(parse(&bytes).expect("well formed"), fields);
        assert_eq!(parse(&bytes[..bytes.len() - 1]), None);
    }
}
