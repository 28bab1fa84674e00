//! Whose op leaves next.
//!
//! A lane that has had nothing to send goes first: its client most likely waits for the answer, and asks for little. With a
//! few ops sent in a row the lane joins the round, where the busy ones take turns of several ops each: what one client's
//! requests cost together (a packet, a wake-up) they cost once a turn. The round moves on however many lanes go first.

use std::collections::VecDeque;

/// Ops of one lane in a row: an execution, what it needs, and the wait for its result are fewer.
pub(super) const TURN_OPS: usize = 8;
/// Ops of lanes that go first between two of the round.
pub(super) const FAVOURS: usize = 8;

/// The lanes that have something to send, each once.
#[derive(Debug, Default)]
pub(super) struct Turns {
    first: VecDeque<Turn>,
    round: VecDeque<Turn>,
    /// Ops of lanes that go first since the round last moved.
    favours: usize,
}

/// A lane's turn.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) lane: u64,
    /// Ops that it may send still.
    left: usize,
    goes_first: bool,
}

impl Turns {
    /// A lane that had nothing to send has something now.
    pub(super) fn join(&mut self, lane: u64) {
        self.first.push_back(Turn {
            lane,
            left: TURN_OPS,
            goes_first: true,
        });
    }

    /// The next turn, taken out. `round`: whether there is room for the busy lanes; when they have waited for enough others,
    /// one of them sends all the same.
    pub(super) fn take(&mut self, round: bool) -> Option<Turn> {
        let owed = self.owed();
        if !owed && let Some(turn) = self.first.pop_front() {
            // With nobody in the round, nobody waits for it.
            self.favours = if self.round.is_empty() {
                0
            } else {
                self.favours + 1
            };
            return Some(turn);
        }
        if !owed && !round {
            return None;
        }
        self.favours = 0;
        self.round.pop_front()
    }

    fn owed(&self) -> bool {
        self.favours >= FAVOURS && !self.round.is_empty()
    }

    /// The lane has sent an op and has more.
    pub(super) fn go_on(&mut self, mut turn: Turn) {
        turn.left = turn.left.saturating_sub(1);
        if turn.left == 0 {
            self.round.push_back(Turn {
                left: TURN_OPS,
                goes_first: false,
                ..turn
            });
        } else {
            self.resume(turn);
        }
    }

    /// A turn that was taken, and could not be used then, is the next one.
    pub(super) fn resume(&mut self, turn: Turn) {
        if turn.goes_first {
            self.first.push_front(turn);
        } else {
            self.round.push_front(turn);
        }
    }

    /// Whether [`Self::take`] has a turn to give.
    pub(super) fn any(&self, round: bool) -> bool {
        !self.first.is_empty() || self.owed() || (round && !self.round.is_empty())
    }

    /// Whether more than one lane has something to send.
    pub(super) fn several(&self) -> bool {
        self.first.len() + self.round.len() > 1
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lanes of the next `count` ops, of lanes that all have more.
    fn busy(turns: &mut Turns, count: usize) -> Vec<u64> {
        let next = || {
            let turn = turns.take(true)?;
            let lane = turn.lane;
            turns.go_on(turn);
            Some(lane)
        };
        std::iter::from_fn(next).take(count).collect()
    }

    #[test]
    fn busy_lanes_take_turns_of_several_ops() {
        let mut turns = Turns::default();
        turns.join(1);
        turns.join(2);
        let mut wanted = Vec::new();
        for lane in [1, 2, 1, 2] {
            wanted.extend([lane; TURN_OPS]);
        }
        assert_eq!(busy(&mut turns, wanted.len()), wanted);
        assert!(turns.several());
    }

    #[test]
    fn a_lane_that_comes_goes_before_the_round_even_amid_a_turn() {
        let mut turns = Turns::default();
        turns.join(1);
        turns.join(2);
        busy(&mut turns, 2 * TURN_OPS + 3);
        turns.join(9);
        let quiet = turns.take(true).expect("there");
        assert_eq!(quiet.lane, 9);
        // It has no more: the turn that it broke into goes on.
        let wanted = [[1; TURN_OPS - 3].as_slice(), &[2; TURN_OPS]].concat();
        assert_eq!(busy(&mut turns, wanted.len()), wanted);
    }

    /// Whether there is room for the round or those that go first fill it all.
    #[test]
    fn the_round_moves_on_however_many_lanes_go_first() {
        for room in [true, false] {
            let mut turns = Turns::default();
            turns.join(1);
            busy(&mut turns, TURN_OPS);
            let (mut since, mut moved) = (0, 0);
            for lane in 100..1100 {
                // Always another one that waits for its answer.
                turns.join(lane);
                let turn = turns.take(room).expect("there");
                if turn.lane == 1 {
                    turns.go_on(turn);
                    (since, moved) = (0, moved + 1);
                } else {
                    since += 1;
                }
                assert!(since <= FAVOURS, "at {lane}");
            }
            assert!(moved > 0);
        }
    }

    #[test]
    fn where_the_round_must_wait_lanes_that_come_need_not() {
        let mut turns = Turns::default();
        turns.join(1);
        busy(&mut turns, TURN_OPS + 1);
        assert!(!turns.any(false) && turns.any(true));
        assert!(turns.take(false).is_none());
        turns.join(2);
        assert!(turns.any(false));
        assert_eq!(turns.take(false).map(|turn| turn.lane), Some(2));
        assert_eq!(turns.take(true).map(|turn| turn.lane), Some(1));
    }
}
