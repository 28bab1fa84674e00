//! What a compile child prints: its last lines, and the one among them that says why it ended.

use std::collections::VecDeque;

/// Lines that are remembered: a stack trace, and what stands before it.
const LINES: usize = 128;

/// A line is cut here.
pub(super) const LINE_BYTES: usize = 1024;

/// What Rust's runtime prints for a C++ exception that the plugin lets out, and what a reader makes more of.
const THROWN: &str = "Rust cannot catch foreign exceptions";
const THROWN_TOLD: &str = "it threw a C++ exception";

/// How processes that break off begin or mark the line that says why. The last ones of each kind count.
const FATAL: [&str; 8] = [
    "Check failed",
    "LLVM ERROR",
    "terminate called",
    "terminating due to",
    "what():",
    "Assertion",
    "has overflowed its stack",
    "fatal runtime error",
];

/// The last lines of a process.
#[derive(Debug, Default)]
pub(super) struct Words {
    lines: VecDeque<String>,
}

impl Words {
    /// Remembers a line.
    pub(super) fn push(&mut self, line: String) {
        if self.lines.len() == LINES {
            self.lines.pop_front();
        }
        self.lines.push_back(line);
    }

    /// Why the process ended, as far as it said so: the lines that say it, or else the last one. Empty for a silent one.
    pub(super) fn last(&self) -> String {
        let fatal: Vec<&str> = self
            .lines
            .iter()
            .map(|line| line.trim())
            .filter(|line| is_fatal(line))
            .collect();
        if !fatal.is_empty() {
            if fatal.last().is_some_and(|line| line.contains(THROWN)) {
                return THROWN_TOLD.to_owned();
            }
            return fatal[fatal.len().saturating_sub(2)..].join("; ");
        }
        let last = self.lines.iter().rev().map(|line| line.trim());
        let mut last = last.filter(|line| !line.is_empty() && !is_trace(line) && !is_chatter(line));
        last.next().unwrap_or_default().to_owned()
    }
}

fn is_fatal(line: &str) -> bool {
    // glog's fatal lines begin with F and the date.
    let mut letters = line.bytes();
    let glog =
        letters.next() == Some(b'F') && letters.next().is_some_and(|next| next.is_ascii_digit());
    glog || FATAL.iter().any(|mark| line.contains(mark))
}

/// What glog prints of the process's course: such lines begin with I or W and the date.
fn is_chatter(line: &str) -> bool {
    let mut letters = line.bytes();
    matches!(letters.next(), Some(b'I' | b'W'))
        && letters.next().is_some_and(|next| next.is_ascii_digit())
}

/// Part of a stack trace: "*** Check failure stack trace: ***", "@ 0x7f...", "#3 0x7f...".
fn is_trace(line: &str) -> bool {
    ["***", "@ ", "#", "0x", "PC: @"]
        .iter()
        .any(|mark| line.starts_with(mark))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last(text: &str) -> String {
        let mut words = Words::default();
        for line in text.lines() {
            words.push(line.to_owned());
        }
        words.last()
    }

    #[test]
    fn the_line_that_says_why_is_found_above_the_trace() {
        let check = "I0000 00:00:1.0 1 client.cc:1] a client\n\
                     F0000 00:00:2.0 7 hlo.cc:12] Check failed: a == b (1 vs. 2)\n\
                     *** Check failure stack trace: ***\n    @     0x7f0000000000  (unknown)\n";
        assert_eq!(
            last(check),
            "F0000 00:00:2.0 7 hlo.cc:12] Check failed: a == b (1 vs. 2)"
        );
        let thrown = "terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc\n";
        assert_eq!(
            last(thrown),
            "terminate called after throwing an instance of 'std::bad_alloc'; what():  std::bad_alloc"
        );
    }

    #[test]
    fn a_process_that_was_killed_has_said_nothing_of_it() {
        let text = "I0000 00:00:1.0 1 pjrt_c_api_cpu_internal.cc:74] cpu_device_count set via create_options: 8\n";
        assert_eq!(last(text), "");
    }

    #[test]
    fn a_thrown_exception_is_called_one() {
        let text = "fatal runtime error: Rust cannot catch foreign exceptions, aborting\n";
        assert_eq!(last(text), THROWN_TOLD);
    }

    #[test]
    fn without_such_a_line_it_is_the_last_one() {
        assert_eq!(last("one\ntwo\n\n*** SIGSEGV ***\n  @ 0x1 f\n"), "two");
        assert_eq!(last(""), "");
    }

    #[test]
    fn memory_is_bounded() {
        let mut words = Words::default();
        for number in 0..10 * LINES {
            words.push(number.to_string());
        }
        assert_eq!(words.lines.len(), LINES);
        assert_eq!(words.last(), (10 * LINES - 1).to_string());
    }
}
