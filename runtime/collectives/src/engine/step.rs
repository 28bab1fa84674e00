//! What a partition has to do in a collective, one step each, and where bytes lie.

/// Where the bytes of a piece lie in an array: runs of `run` bytes, `stride` bytes apart, `len` bytes in all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct View {
    pub(super) start: usize,
    pub(super) run: usize,
    pub(super) stride: usize,
    pub(super) len: usize,
}

impl View {
    pub(super) fn whole(start: usize, len: usize) -> Self {
        Self {
            start,
            run: len,
            stride: len,
            len,
        }
    }

    /// Whether the bytes lie together.
    pub(super) fn is_whole(&self) -> bool {
        self.run >= self.len || self.run == self.stride
    }

    /// Calls `each` with the place in the array and in the piece, and the length, of every run of the piece's bytes from
    /// `offset` on.
    pub(super) fn runs(
        &self,
        offset: usize,
        len: usize,
        mut each: impl FnMut(usize, usize, usize),
    ) {
        let mut at = offset;
        let end = offset.saturating_add(len).min(self.len);
        while at < end {
            let (place, count) = if self.is_whole() {
                (self.start + at, end - at)
            } else {
                let (run, within) = (at / self.run, at % self.run);
                let count = (self.run - within).min(end - at);
                (self.start + run * self.stride + within, count)
            };
            each(place, at - offset, count);
            at += count;
        }
    }

    /// Whether all of it lies within an array of `bytes` bytes.
    pub(super) fn fits(&self, bytes: usize) -> bool {
        if self.len == 0 {
            return true;
        }
        if self.is_whole() {
            return self
                .start
                .checked_add(self.len)
                .is_some_and(|end| end <= bytes);
        }
        if self.run == 0 || !self.len.is_multiple_of(self.run) || self.stride < self.run {
            return false;
        }
        (self.len / self.run - 1)
            .checked_mul(self.stride)
            .and_then(|last| last.checked_add(self.start)?.checked_add(self.run))
            .is_some_and(|end| end <= bytes)
    }
}

/// One thing to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Part of an operand becomes part of a result.
    Copy {
        input: usize,
        from: View,
        output: usize,
        to: View,
    },
    /// A result of zeros.
    Zero { output: usize },
    /// A result that is a number.
    Number { output: usize, value: u32 },
    /// A piece for another partition.
    Send {
        lane: u32,
        target: u32,
        input: usize,
        from: View,
    },
    /// A piece from another partition.
    Receive {
        lane: u32,
        source: u32,
        output: usize,
        to: View,
    },
    /// A piece from each member is reduced, in their order, into a result.
    Reduce(Reduce),
}

/// See [`Step::Reduce`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reduce {
    pub(super) lane: u32,
    pub(super) input: usize,
    /// This partition's own piece.
    pub(super) from: View,
    pub(super) output: usize,
    /// Where the result begins in the output.
    pub(super) at: usize,
    pub(super) len: usize,
    pub(super) element: i32,
    /// The group.
    pub(super) members: Vec<u32>,
    /// The result goes to the other members in this lane.
    pub(super) publish: Option<u32>,
}
