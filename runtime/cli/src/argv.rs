//! Flags as users spell them, before clap sees them. Pure.
//!
//! Pathways' containers take flags in the way of Abseil: underscores, `--flag=value` or `--flag value`, `--noflag` for
//! booleans. Kubernetes users write hyphens. Both work for every flag: names are brought to underscores here, up to the
//! first bare `--`, behind which stands somebody else's command line.

use std::{collections::BTreeSet, ffi::OsString};

/// Brings flag names to underscores and `--noflag` to `--flag=false` for the booleans named. The first argument is the
/// program's name and stays as it is; so does what is not UTF-8.
pub(crate) fn normalise(argv: Vec<OsString>, booleans: &BTreeSet<String>) -> Vec<OsString> {
    let mut rest_is_foreign = false;
    let mut normalised = Vec::with_capacity(argv.len());
    for (position, arg) in argv.into_iter().enumerate() {
        rest_is_foreign |= position > 0 && arg == "--";
        let flag = arg.to_str().and_then(Flag::read);
        normalised.push(match flag {
            Some(flag) if position > 0 && !rest_is_foreign => {
                flag.positive(booleans).write().into()
            }
            _ => arg,
        });
    }
    normalised
}

/// One `--name` or `--name=value`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Flag {
    /// With underscores.
    pub(crate) name: String,
    /// What stands behind `=`.
    pub(crate) value: Option<String>,
}

impl Flag {
    /// None for what is no long flag.
    pub(crate) fn read(arg: &str) -> Option<Flag> {
        let body = arg.strip_prefix("--").filter(|body| !body.is_empty())?;
        let (name, value) = match body.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (body, None),
        };
        Some(Flag {
            name: name.replace('-', "_"),
            value,
        })
    }

    /// The flag as one argument.
    pub(crate) fn write(&self) -> String {
        match &self.value {
            Some(value) => format!("--{}={value}", self.name),
            None => format!("--{}", self.name),
        }
    }

    fn positive(self, booleans: &BTreeSet<String>) -> Flag {
        if self.value.is_some() || booleans.contains(&self.name) {
            return self;
        }
        let stem = self
            .name
            .strip_prefix("no")
            .map(|stem| stem.strip_prefix('_').unwrap_or(stem));
        match stem.filter(|stem| booleans.contains(*stem)) {
            Some(stem) => Flag {
                name: stem.to_owned(),
                value: Some("false".to_owned()),
            },
            None => self,
        }
    }
}

/// A boolean as Abseil's flags and people write it.
///
/// # Errors
/// A text for the user.
pub(crate) fn parse_bool(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "true" | "t" | "yes" | "y" | "1" | "on" => Ok(true),
        "false" | "f" | "no" | "n" | "0" | "off" => Ok(false),
        _ => Err(format!("{text:?} is neither true nor false")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normalised(line: &str) -> String {
        let argv = line.split(' ').map(OsString::from).collect();
        let booleans = BTreeSet::from(["verbose".to_owned(), "north".to_owned()]);
        let args = normalise(argv, &booleans);
        args.into_iter()
            .map(|arg| arg.into_string().unwrap())
            .collect::<Vec<_>>()
            .join(" ")
    }

    #[test]
    fn hyphens_become_underscores_in_names_only() {
        assert_eq!(
            normalised("waystation resource-manager --server-port 1 --ready-file=a-b --slices 2"),
            "waystation resource-manager --server_port 1 --ready_file=a-b --slices 2"
        );
        assert_eq!(
            normalised("way--station x --mixed_up-name"),
            "way--station x --mixed_up_name"
        );
        assert_eq!(normalised("waystation -v - --"), "waystation -v - --");
    }

    #[test]
    fn nothing_changes_behind_the_bare_dashes() {
        assert_eq!(
            normalised("waystation run --log-dir=d -- prog --some-flag --noverbose -- --x-y"),
            "waystation run --log_dir=d -- prog --some-flag --noverbose -- --x-y"
        );
    }

    #[test]
    fn no_negates_booleans_and_nothing_else() {
        assert_eq!(
            normalised("w --noverbose --no-verbose --no_verbose"),
            "w --verbose=false --verbose=false --verbose=false"
        );
        assert_eq!(
            normalised("w --north --nonorth --node-type=x"),
            "w --north --north=false --node_type=x"
        );
        assert_eq!(normalised("w --noverbose=1"), "w --noverbose=1");
    }

    #[test]
    fn what_is_not_utf8_stays() {
        use std::os::unix::ffi::OsStringExt as _;
        let odd = OsString::from_vec(vec![b'-', b'-', b'a', b'-', 0xff]);
        let argv = vec![OsString::from("w"), odd.clone()];
        assert_eq!(normalise(argv, &BTreeSet::new())[1], odd);
    }

    #[test]
    fn booleans_in_the_spellings_that_occur() {
        for text in ["true", "True", "1", "t", "YES"] {
            assert_eq!(parse_bool(text), Ok(true), "{text}");
        }
        for text in ["false", "0", "No"] {
            assert_eq!(parse_bool(text), Ok(false), "{text}");
        }
        parse_bool("2").unwrap_err();
    }
}
