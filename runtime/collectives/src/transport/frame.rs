//! Messages as bytes.

use super::{CHUNK, Key};
use crate::call::{Code, Failure};

/// Bytes of a frame's head; what follows is as long as the head says.
pub(super) const HEAD: usize = 56;

/// Bytes of a failure's text at most.
const MOST_TEXT: usize = 4096;

/// A frame's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Head {
    Ready(Key),
    /// Offset and length.
    Data(Key, u64, usize),
    Here(u64),
    /// Launch, code and length of the text.
    Fail(u64, Code, usize),
}

const READY: u32 = 1;
const DATA: u32 = 2;
const FAIL: u32 = 3;
const HERE: u32 = 4;

impl Head {
    pub(super) fn write(&self) -> [u8; HEAD] {
        let none = |launch| Key {
            launch,
            execution: 0,
            op: 0,
            lane: 0,
            source: 0,
            target: 0,
        };
        let (kind, key, offset, length) = match *self {
            Self::Ready(key) => (READY, key, 0, 0),
            Self::Data(key, offset, length) => (DATA, key, offset, length),
            Self::Here(launch) => (HERE, none(launch), 0, 0),
            Self::Fail(launch, code, length) => {
                let code = u64::from(code.number().unsigned_abs());
                (FAIL, none(launch), code, length)
            }
        };
        let mut out = [0; HEAD];
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            out[at..at + bytes.len()].copy_from_slice(bytes);
            at += bytes.len();
        };
        put(&kind.to_le_bytes());
        put(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
        put(&key.launch.to_le_bytes());
        put(&key.execution.to_le_bytes());
        put(&key.op.to_le_bytes());
        put(&key.lane.to_le_bytes());
        put(&key.source.to_le_bytes());
        put(&key.target.to_le_bytes());
        put(&offset.to_le_bytes());
        out
    }

    /// `None` for what is not written.
    pub(super) fn read(head: &[u8; HEAD]) -> Option<Self> {
        let four = |at: usize| {
            let mut bytes = [0; 4];
            bytes.copy_from_slice(&head[at..at + 4]);
            u32::from_le_bytes(bytes)
        };
        let eight = |at: usize| u64::from(four(at)) | u64::from(four(at + 4)) << 32;
        let length = usize::try_from(four(4)).ok()?;
        let key = Key {
            launch: eight(8),
            execution: eight(16),
            op: four(24),
            lane: four(28),
            source: four(32),
            target: four(36),
        };
        let offset = eight(40);
        match four(0) {
            READY if length == 0 => Some(Self::Ready(key)),
            HERE if length == 0 => Some(Self::Here(key.launch)),
            DATA if (1..=CHUNK).contains(&length) => Some(Self::Data(key, offset, length)),
            FAIL if length <= MOST_TEXT => {
                let code = Code::from_number(i32::try_from(offset).ok()?);
                Some(Self::Fail(key.launch, code, length))
            }
            _ => None,
        }
    }
}

/// A failure's text, cut to what is taken.
pub(super) fn text(failure: &Failure) -> &[u8] {
    let text = failure.message();
    &text.as_bytes()[..text.floor_char_boundary(MOST_TEXT)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_read_as_written() {
        let key = Key {
            launch: 1 << 60 | 5,
            execution: 1 << 40,
            op: 3,
            lane: 4,
            source: 5,
            target: 0xffff_ffff,
        };
        for head in [
            Head::Ready(key),
            Head::Data(key, 1 << 40, CHUNK),
            Head::Here(1 << 50),
            Head::Fail(7, Code::DataLoss, 12),
        ] {
            assert_eq!(Head::read(&head.write()), Some(head));
        }
        for wrong in [
            Head::Data(key, 0, CHUNK + 1),
            Head::Data(key, 0, 0),
            Head::Fail(7, Code::DataLoss, MOST_TEXT + 1),
        ] {
            assert_eq!(Head::read(&wrong.write()), None);
        }
        assert_eq!(Head::read(&[0; HEAD]), None);
        assert_eq!(Head::read(&[0xff; HEAD]), None);
    }

    #[test]
    fn long_texts_are_cut_between_characters() {
        let long = "ü".repeat(3000);
        assert_eq!(text(&Failure::new(Code::Unknown, long)).len(), MOST_TEXT);
        let odd = format!("a{}", "ü".repeat(3000));
        assert_eq!(text(&Failure::new(Code::Unknown, odd)).len(), MOST_TEXT - 1);
    }
}
