//! Programs that have killed a compile child, so that they are refused when they come again instead of killing another.

use std::collections::VecDeque;

use waystation_proto::tensorflow::StatusProto;

/// Programs that are remembered; the oldest are forgotten first and cost a child again.
const PROGRAMS: usize = 256;

/// SHA-256 of a cache key.
pub(crate) type Digest = [u8; 32];

/// The record. In the order in which they were last asked for.
#[derive(Debug, Default)]
pub(super) struct Refused {
    programs: VecDeque<(Digest, StatusProto)>,
}

impl Refused {
    /// What a program's compile ended with, if it has killed a child.
    pub(super) fn get(&mut self, digest: &Digest) -> Option<StatusProto> {
        let position = self
            .programs
            .iter()
            .position(|(known, _)| known == digest)?;
        let found = self.programs.remove(position)?;
        let status = found.1.clone();
        self.programs.push_back(found);
        Some(status)
    }

    pub(super) fn add(&mut self, digest: Digest, status: StatusProto) {
        self.programs.retain(|(known, _)| *known != digest);
        if self.programs.len() == PROGRAMS {
            self.programs.pop_front();
        }
        self.programs.push_back((digest, status));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::status;

    fn digest(number: usize) -> Digest {
        let mut digest = [0; 32];
        digest[..8].copy_from_slice(&number.to_le_bytes());
        digest
    }

    #[test]
    fn the_one_not_asked_for_the_longest_is_forgotten() {
        let mut refused = Refused::default();
        for number in 0..PROGRAMS {
            refused.add(digest(number), status::invalid(number.to_string()));
        }
        assert_eq!(refused.get(&digest(0)), Some(status::invalid("0")));
        refused.add(digest(PROGRAMS), status::invalid("new"));
        assert_eq!(refused.get(&digest(1)), None);
        assert!(refused.get(&digest(0)).is_some());
        assert!(refused.get(&digest(PROGRAMS)).is_some());
        assert_eq!(refused.programs.len(), PROGRAMS);
    }
}
