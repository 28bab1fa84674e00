//! Small changes at random, the same in every run unless it is a long one.

use proptest::prelude::Rng as _;
use proptest::test_runner::{RngAlgorithm, TestRng};

/// So many rounds, or many more.
pub(crate) fn rounds(short: usize) -> usize {
    match std::env::var_os("WAYSTATION_SOAK") {
        Some(_) => short * 50,
        None => short,
    }
}

pub(crate) fn random() -> TestRng {
    match std::env::var_os("WAYSTATION_SOAK") {
        Some(_) => TestRng::from_seed(RngAlgorithm::ChaCha, &seed()),
        None => TestRng::deterministic_rng(RngAlgorithm::ChaCha),
    }
}

#[allow(clippy::print_stdout, reason = "shown where a run fails, to repeat it")]
fn seed() -> [u8; 32] {
    use std::hash::{BuildHasher as _, RandomState};
    let mut seed = [0; 32];
    for part in seed.chunks_mut(8) {
        part.copy_from_slice(&RandomState::new().hash_one(0).to_le_bytes());
    }
    println!("seed {seed:?}");
    seed
}

/// A number below `count`.
pub(crate) fn pick(random: &mut TestRng, count: usize) -> usize {
    random.next_u32() as usize % count.max(1)
}

/// Bytes that differ in one place: a bit, a byte, some gone, some doubled, the end cut off or grown.
pub(crate) fn bytes(sound: &[u8], random: &mut TestRng) -> Vec<u8> {
    let mut changed = sound.to_vec();
    let at = pick(random, changed.len());
    match random.next_u32() % 6 {
        0 if !changed.is_empty() => changed[at] ^= 1 << (random.next_u32() % 8),
        1 if !changed.is_empty() => changed[at] = [0, 1, 0x7f, 0x80, 0xff][pick(random, 5)],
        2 => changed.truncate(at),
        3 => changed.extend_from_slice(&sound[..at]),
        4 => {
            let end = (at + 1 + pick(random, 8)).min(changed.len());
            changed.drain(at.min(end)..end);
        }
        _ => {
            let end = (at + 9).min(changed.len());
            changed.splice(at.min(end)..end, [0xff; 9]);
        }
    }
    changed
}

/// What numbers, words and texts become.
const TOKENS: &[&str] = &[
    "0",
    "-1",
    "1",
    "7",
    "1073741824",
    "4294967296",
    "9223372036854775807",
    "18446744073709551616",
    "1e999",
    "0.5",
    "null",
    "true",
    "[]",
    "{}",
    "[[[[[[[[[[1]]]]]]]]]]",
    "\"\"",
    "\"Li4vLi4veA==\"",
    "\"Ly8=\"",
    "\"../../x\"",
    "\"<f4\"",
    "\"float8_e4m3\"",
    "\"F\"",
    "\"zstd\"",
    "\"\\u0000\"",
];

/// JSON in which one token is another, or gone, or doubled; or any text, changed in one place.
pub(crate) fn text(sound: &str, random: &mut TestRng) -> String {
    let tokens = tokens(sound);
    if tokens.is_empty() || random.next_u32().is_multiple_of(8) {
        return String::from_utf8_lossy(&bytes(sound.as_bytes(), random)).into_owned();
    }
    let (start, end) = tokens[pick(random, tokens.len())];
    let token = &sound[start..end];
    let other = match random.next_u32() % 8 {
        0 => String::new(),
        1 => format!("{token}, {token}"),
        // One of its own.
        2 => {
            let (start, end) = tokens[pick(random, tokens.len())];
            sound[start..end].to_owned()
        }
        _ => TOKENS[pick(random, TOKENS.len())].to_owned(),
    };
    format!("{}{other}{}", &sound[..start], &sound[end..])
}

/// Where the values of JSON are: texts, numbers, words.
fn tokens(json: &str) -> Vec<(usize, usize)> {
    let (bytes, mut found, mut at) = (json.as_bytes(), Vec::new(), 0);
    while at < bytes.len() {
        let start = at;
        match bytes[at] {
            b'"' => {
                at += 1;
                while at < bytes.len() && bytes[at] != b'"' {
                    at += 1 + usize::from(bytes[at] == b'\\');
                }
                at = (at + 1).min(bytes.len());
            }
            byte if byte.is_ascii_alphanumeric() || byte == b'-' => {
                while at < bytes.len()
                    && (bytes[at].is_ascii_alphanumeric() || b"-+.".contains(&bytes[at]))
                {
                    at += 1;
                }
            }
            _ => {
                at += 1;
                continue;
            }
        }
        // Not in the middle of a character.
        if json.is_char_boundary(start) && json.is_char_boundary(at) {
            found.push((start, at));
        }
    }
    found
}
