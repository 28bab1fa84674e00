//! `compile-child`: compiles for the worker that has started it. Hidden.

use std::ffi::OsString;

use waystation_worker::CompileChild;

use crate::{argv::parse_bool, error::Failure};

/// The command's word.
const WORD: &str = "compile-child";

/// Compile programs for the worker that has started this process; its socket is this process's stdin
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// Returns only when it was not a worker that started it.
pub(crate) fn run() -> Failure {
    match waystation_worker::compile_child() {
        Ok(never) => match never {},
        Err(error) => Failure::usage(error.to_string()),
    }
}

/// Whether a worker compiles in a child process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum InChild {
    /// With CPU plugins.
    #[default]
    Auto,
    /// With every plugin.
    Yes,
    /// Never.
    No,
}

impl InChild {
    /// Reads the flag's value.
    ///
    /// # Errors
    /// A text for the user.
    pub(crate) fn parse(text: &str) -> Result<InChild, String> {
        if text.eq_ignore_ascii_case("auto") {
            return Ok(InChild::Auto);
        }
        match parse_bool(text) {
            Ok(true) => Ok(InChild::Yes),
            Ok(false) => Ok(InChild::No),
            Err(_) => Err(format!("{text:?} is neither auto nor true nor false")),
        }
    }

    /// As the flag has it.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            InChild::Auto => "auto",
            InChild::Yes => "true",
            InChild::No => "false",
        }
    }

    /// How a worker starts its child.
    pub(crate) fn child(self) -> Option<CompileChild> {
        Some(CompileChild {
            // Whatever lies in the place of the binary by now, it is this build that the worker must speak with.
            program: "/proc/self/exe".into(),
            name: std::env::args_os().next(),
            arguments: vec![OsString::from(WORD)],
            cpu_only: match self {
                InChild::Auto => true,
                InChild::Yes => false,
                InChild::No => return None,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{self, Command};

    #[test]
    fn the_flag_has_three_values() {
        for value in [InChild::Auto, InChild::Yes, InChild::No] {
            assert_eq!(InChild::parse(value.as_str()), Ok(value));
        }
        assert_eq!(InChild::parse("0"), Ok(InChild::No));
        InChild::parse("sometimes").unwrap_err();
        assert!(InChild::No.child().is_none());
        assert!(InChild::Auto.child().is_some_and(|child| child.cpu_only));
    }

    #[test]
    fn the_child_understands_its_command_line() {
        let child = InChild::Yes.child().unwrap();
        let line = std::iter::once("waystation".into()).chain(child.arguments);
        let parsed = args::parse(line.collect()).unwrap();
        assert!(matches!(parsed.command, Command::CompileChild(_)));
    }
}
