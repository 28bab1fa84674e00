//! What waits to be sent to one process.
//!
//! Short messages go before data. Pieces take turns, chunk by chunk, so that no piece waits for the end of another one: neither
//! for a long one, nor for one of which many parts are queued. The latter keeps both directions of a connection busy: what
//! a process has reduced is queued part by part, and must not go before all that the other one needs to reduce its share.

use super::{CHUNK, Key, Message, Transfer};
use bytes::Buf;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

#[derive(Default)]
pub(super) struct Queue {
    pub(super) short: VecDeque<Message>,
    pub(super) data: Pieces,
    pub(super) closed: bool,
}

/// Data, piece by piece.
#[derive(Default)]
pub(super) struct Pieces {
    /// Whose turn it is.
    turns: VecDeque<Key>,
    /// None of them is empty.
    parts: HashMap<Key, VecDeque<Transfer>>,
}

impl Pieces {
    pub(super) fn push(&mut self, transfer: Transfer) {
        let parts = self.parts.entry(transfer.key).or_default();
        if parts.is_empty() {
            self.turns.push_back(transfer.key);
        }
        parts.push_back(transfer);
    }

    /// A chunk of the piece whose turn it is; the rest of the piece goes behind the others.
    pub(super) fn next_chunk(&mut self) -> Option<Transfer> {
        loop {
            let key = self.turns.pop_front()?;
            let Some(parts) = self.parts.get_mut(&key) else {
                continue;
            };
            let chunk = next_of(parts);
            if parts.is_empty() {
                self.parts.remove(&key);
            } else {
                self.turns.push_back(key);
            }
            if chunk.is_some() {
                return chunk;
            }
        }
    }
}

/// The next chunk of a piece. Parts that nobody wants any more are dropped.
fn next_of(parts: &mut VecDeque<Transfer>) -> Option<Transfer> {
    loop {
        let part = parts.front_mut()?;
        if part.is_void() || part.bytes.is_empty() {
            parts.pop_front();
            continue;
        }
        let chunk = Transfer {
            key: part.key,
            offset: part.offset,
            bytes: part.bytes.split_to(part.bytes.len().min(CHUNK)),
            failed: Arc::clone(&part.failed),
        };
        if part.bytes.has_remaining() {
            part.offset += CHUNK as u64;
        } else {
            parts.pop_front();
        }
        return Some(chunk);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;
    use std::sync::atomic::Ordering::Release;

    fn transfer(launch: u64, lane: u32, offset: usize, len: usize) -> Transfer {
        let key = Key {
            launch,
            execution: 0,
            op: 0,
            lane,
            source: 0,
            target: 1,
        };
        Transfer {
            key,
            offset: offset as u64,
            bytes: Bytes::from(vec![0; len]),
            failed: Arc::default(),
        }
    }

    fn rest(pieces: &mut Pieces) -> Vec<(u64, u32, u64, usize)> {
        std::iter::from_fn(|| pieces.next_chunk())
            .map(|chunk| {
                let Key { launch, lane, .. } = chunk.key;
                (launch, lane, chunk.offset, chunk.bytes.len())
            })
            .collect()
    }

    #[test]
    fn pieces_take_turns_however_many_parts_they_have() {
        let mut pieces = Pieces::default();
        let chunk = CHUNK as u64;
        pieces.push(transfer(1, 0, 0, 2 * CHUNK + 1));
        for part in 0..3 {
            pieces.push(transfer(1, 1, part * CHUNK, CHUNK));
        }
        pieces.push(transfer(2, 0, 0, 1));
        let wanted = [
            (1, 0, 0, CHUNK),
            (1, 1, 0, CHUNK),
            (2, 0, 0, 1),
            (1, 0, chunk, CHUNK),
            (1, 1, chunk, CHUNK),
            (1, 0, 2 * chunk, 1),
            (1, 1, 2 * chunk, CHUNK),
        ];
        assert_eq!(rest(&mut pieces), wanted);
        assert!(pieces.turns.is_empty() && pieces.parts.is_empty());
    }

    #[test]
    fn what_nobody_wants_is_dropped() {
        let mut pieces = Pieces::default();
        let failed = transfer(1, 0, 0, 10);
        failed.failed.store(true, Release);
        pieces.push(failed);
        pieces.push(transfer(1, 0, 0, 20));
        pieces.push(transfer(2, 0, 0, 30));
        assert_eq!(rest(&mut pieces), [(1, 0, 0, 20), (2, 0, 0, 30)]);
        assert!(pieces.turns.is_empty() && pieces.parts.is_empty());
    }
}
