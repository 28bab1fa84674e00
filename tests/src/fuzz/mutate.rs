//! Changes to messages.

use super::{
    random::Random,
    wire::{Field, Value},
};

/// The most times that a field is repeated.
const MAX_COPIES: usize = 4096;
/// Numbers at which sizes, shapes, strides and enums go wrong.
pub(super) const EDGES: [i64; 24] = [
    0,
    1,
    -1,
    2,
    3,
    4,
    7,
    8,
    16,
    64,
    255,
    4096,
    65_537,
    i32::MAX as i64,
    i32::MIN as i64,
    1 << 31,
    1 << 32,
    1 << 40,
    1 << 48,
    i64::MAX,
    i64::MIN,
    i64::MAX / 4,
    i64::MAX / 8 + 1,
    -4,
];

/// Handles that a session knows, and pieces of other messages.
#[derive(Clone, Debug, Default)]
pub struct Pool {
    /// Handles of every kind.
    pub handles: Vec<u64>,
    /// Fields of other requests.
    pub fields: Vec<Field>,
}

/// Changes a message in one to four places. Fields for which `keep` says so stay as they are.
pub fn mutate(fields: &mut Vec<Field>, pool: &Pool, random: &mut Random, keep: fn(&[u64]) -> bool) {
    for _ in 0..=random.below(4) {
        change(fields, &mut Vec::new(), pool, random, keep);
    }
}

fn change(
    fields: &mut Vec<Field>,
    path: &mut Vec<u64>,
    pool: &Pool,
    random: &mut Random,
    keep: fn(&[u64]) -> bool,
) {
    if fields.is_empty() || random.one_in(6) {
        rearrange(fields, path, pool, random, keep);
        return;
    }
    let at = random.below(fields.len());
    path.push(fields[at].number);
    if !keep(path) {
        match &mut fields[at].value {
            Value::Varint(value) => *value = number(*value, random),
            Value::Fixed64(value) => *value = handle(*value, pool, random),
            Value::Fixed32(value) => *value = number(u64::from(*value), random) as u32,
            Value::Bytes(bytes) => damage(bytes, random),
            Value::Message(inner) if random.one_in(12) => {
                let mut bytes = super::wire::encode(inner);
                damage(&mut bytes, random);
                fields[at].value = Value::Bytes(bytes);
            }
            Value::Message(inner) => change(inner, path, pool, random, keep),
        }
    }
    path.pop();
}

/// Removes, repeats, swaps or adds fields.
fn rearrange(
    fields: &mut Vec<Field>,
    path: &[u64],
    pool: &Pool,
    random: &mut Random,
    keep: fn(&[u64]) -> bool,
) {
    let kept = |field: &Field| {
        let path: Vec<u64> = path.iter().copied().chain([field.number]).collect();
        keep(&path)
    };
    let at = random.below(fields.len());
    match random.below(5) {
        0 if !fields.is_empty() && !kept(&fields[at]) => {
            fields.remove(at);
        }
        1 if !fields.is_empty() && !kept(&fields[at]) => {
            let copies = match random.below(8) {
                0 => MAX_COPIES,
                1 => 64,
                _ => 1,
            };
            let field = fields[at].clone();
            fields.extend(std::iter::repeat_n(field, copies));
        }
        2 if fields.len() > 1 => {
            let other = random.below(fields.len());
            fields.swap(at, other);
        }
        3 if fields.len() > 1 => {
            // One field's contents under another's number.
            let other = random.below(fields.len());
            if !kept(&fields[at]) && !kept(&fields[other]) {
                fields[at].value = fields[other].value.clone();
            }
        }
        _ if !pool.fields.is_empty() => {
            let mut field = random.pick(&pool.fields).clone();
            if !fields.is_empty() && random.one_in(2) {
                field.number = fields[at].number;
            }
            if !kept(&field) {
                fields.push(field);
            }
        }
        _ => {}
    }
}

fn number(value: u64, random: &mut Random) -> u64 {
    match random.below(8) {
        0 => value.wrapping_add(1),
        1 => value.wrapping_sub(1),
        2 => value ^ (1 << random.below(64)),
        3 => value.wrapping_mul(2),
        4 => random.any(),
        _ => random.pick(&EDGES).cast_unsigned(),
    }
}

fn handle(value: u64, pool: &Pool, random: &mut Random) -> u64 {
    match random.below(8) {
        0 => value.wrapping_add(1),
        1 => 0,
        2 => u64::MAX,
        // The range from which servers mint.
        3 => (1 << 48) + random.below(64) as u64,
        4 => 1_000_000 + random.below(1000) as u64,
        _ if pool.handles.is_empty() => random.any(),
        _ => *random.pick(&pool.handles),
    }
}

/// Damages bytes: flips, cuts, grows, or replaces them.
pub fn damage(bytes: &mut Vec<u8>, random: &mut Random) {
    match random.below(6) {
        0 => bytes.truncate(random.below(bytes.len())),
        1 => bytes.extend((0..=random.below(16)).map(|_| random.any() as u8)),
        2 => bytes.clear(),
        3 => {
            let at = random.below(bytes.len() + 1);
            bytes.insert(at, random.any() as u8);
        }
        _ => {
            for _ in 0..=random.below(3) {
                let at = random.below(bytes.len());
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 1 << random.below(8);
                }
            }
        }
    }
}
