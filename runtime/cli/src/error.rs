//! What the user is told when a command fails: one line and an exit status.

use std::{error::Error, fmt, io::Write as _};

/// Exit status of what the user can mend: a bad flag, a missing plugin, a port in use (`EX_USAGE` of sysexits).
pub(crate) const USAGE: u8 = 64;
/// Exit status of everything else that goes wrong in Waystation itself.
pub(crate) const INTERNAL: u8 = 1;
/// Exit status of a command that is not there, as shells have it.
pub(crate) const NOT_FOUND: u8 = 127;

/// The end of a command that did not succeed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The process's exit status.
    pub(crate) status: u8,
    /// Shown after "waystation: ".
    pub(crate) message: String,
}

impl Failure {
    /// Something the user can mend; `message` says how.
    pub(crate) fn usage(message: impl Into<String>) -> Failure {
        Failure {
            status: USAGE,
            message: message.into(),
        }
    }

    /// Something that should not have happened.
    pub(crate) fn internal(message: impl Into<String>) -> Failure {
        Failure {
            status: INTERNAL,
            message: message.into(),
        }
    }

    /// `doing`, then the error and its sources, on one line.
    pub(crate) fn because(doing: &str, error: &dyn Error) -> Failure {
        Failure::internal(format!("{doing}: {}", chain(error)))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "waystation: {}", self.message)
    }
}

/// Tells the user.
pub(crate) fn show(failure: &Failure) {
    // When stderr is closed the exit status still tells.
    let _ = writeln!(std::io::stderr().lock(), "{failure}");
}

/// An error with its sources on one line.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        // Some libraries repeat the source in their own text.
        if !text.contains(&cause_text) {
            text = format!("{}: {cause_text}", text.trim_end().trim_end_matches(':'));
        }
        source = cause.source();
    }
    one_line(&text)
}

/// Lines of a text as one, with semicolons where there is no other mark between them.
pub(crate) fn one_line(text: &str) -> String {
    let mut line = String::new();
    for part in text.lines().map(str::trim).filter(|part| !part.is_empty()) {
        let joint = match line.chars().last() {
            None => "",
            Some(':' | ';' | ',' | '.') => " ",
            Some(_) => "; ",
        };
        line = line + joint + part;
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Layer(&'static str, Option<Box<Layer>>);

    impl fmt::Display for Layer {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Layer {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|layer| layer as _)
        }
    }

    #[test]
    fn a_chain_is_one_line_and_says_nothing_twice() {
        let inner = Layer("cause", None);
        let middle = Layer("middle: cause", Some(Box::new(inner)));
        let outer = Layer("outer\n  text:\n", Some(Box::new(middle)));
        assert_eq!(chain(&outer), "outer; text: middle: cause");
        assert_eq!(
            Failure::because("doing", &outer).to_string(),
            "waystation: doing: outer; text: middle: cause"
        );
    }
}
