//! `XLA_FLAGS` of the proxy's environment. Pure, but that the variable may name a file, as XLA has it.

use std::ffi::OsString;

use crate::{argv::Flag, error::Failure};

/// The flags in the variable, as `--xla_name=value` each.
///
/// # Errors
/// [`Failure::usage`] for what is no XLA flag, and for a file that cannot be read.
pub(crate) fn of_environment(value: Option<OsString>) -> Result<Vec<String>, Failure> {
    let Some(value) = value else {
        return Ok(Vec::new());
    };
    let text = value
        .into_string()
        .map_err(|value| Failure::usage(format!("XLA_FLAGS is not UTF-8: {}", value.display())))?;
    let text = text.trim();
    if text.is_empty() || text.starts_with('-') {
        return read(text);
    }
    let file = std::fs::read_to_string(text).map_err(|error| {
        Failure::usage(format!(
            "XLA_FLAGS is {text:?}, which is neither a flag nor a file that can be read ({error})"
        ))
    })?;
    read(&file)
}

fn read(text: &str) -> Result<Vec<String>, Failure> {
    let flag = |word: String| match Flag::read(&word) {
        Some(flag) if flag.name.starts_with("xla_") => Ok(Flag {
            value: Some(flag.value.unwrap_or_else(|| "true".to_owned())),
            ..flag
        }
        .write()),
        _ => Err(Failure::usage(format!(
            "XLA_FLAGS has {word:?}: write --xla_NAME=VALUE"
        ))),
    };
    words(text).into_iter().map(flag).collect()
}

/// Splits at white space outside quotes, which go.
fn words(text: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in text.chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (None, '"' | '\'') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            _ => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(text: &str) -> Result<Vec<String>, Failure> {
        of_environment(Some(text.into()))
    }

    #[test]
    fn flags_are_split_and_bare_ones_are_true() {
        assert_eq!(of_environment(None), Ok(Vec::new()));
        assert_eq!(flags("  "), Ok(Vec::new()));
        assert_eq!(
            flags(" --xla_a --xla_b=1\n--xla-c='x y' --xla_d=\"\" ").unwrap(),
            ["--xla_a=true", "--xla_b=1", "--xla_c=x y", "--xla_d="]
        );
    }

    #[test]
    fn what_is_no_flag_is_refused_by_name() {
        for (text, part) in [
            ("--xla_a --tpu_b=1", "\"--tpu_b=1\""),
            ("--xla_a b", "\"b\""),
            ("no/such/file", "neither a flag nor a file"),
        ] {
            let failure = flags(text).unwrap_err();
            assert_eq!(failure.status, crate::error::USAGE);
            assert!(failure.message.contains(part), "{failure}");
        }
    }

    #[test]
    fn a_file_may_hold_them() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("flags");
        std::fs::write(&file, "--xla_a=2\n--xla_b\n").unwrap();
        let flags = of_environment(Some(file.into())).unwrap();
        assert_eq!(flags, ["--xla_a=2", "--xla_b=true"]);
    }
}
