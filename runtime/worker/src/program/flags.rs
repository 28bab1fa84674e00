//! XLA flags as option overrides.
//!
//! `CompileOptionsProto.env_option_overrides` maps the name of any XLA debug option to a value. The plugin sets them last, over
//! the debug options, and answers INVALID_ARGUMENT naming an option that it does not have. A string is parsed as the option's
//! own type, except that booleans are then only `True` and `False`, so those go as booleans.

use waystation_stablehlo::wire::{self, Message, Value};

use super::Error;

/// `OptionOverrideProto`'s and a map entry's fields.
const KEY: u32 = 1;
const VALUE: u32 = 2;
const STRING_FIELD: u32 = 1;
const BOOL_FIELD: u32 = 2;

/// An override made of a flag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Override {
    pub(super) name: String,
    value: String,
}

impl Override {
    pub(super) fn new(name: &str, value: &str) -> Self {
        Self {
            name: name.to_owned(),
            value: value.to_owned(),
        }
    }

    /// Reads `--xla_name=value`, `--xla-name=value` or, for `true`, `--xla_name`.
    pub(super) fn parse(flag: &str) -> Result<Self, Error> {
        let invalid = || Error::Flag {
            flag: flag.to_owned(),
        };
        let text = flag.strip_prefix("--").ok_or_else(invalid)?;
        let (name, value) = text.split_once('=').unwrap_or((text, "true"));
        let name = name.replace('-', "_");
        let known = name.starts_with("xla_")
            && name
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if known {
            Ok(Self {
                name,
                value: value.to_owned(),
            })
        } else {
            Err(invalid())
        }
    }

    /// The map entry.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut value = Message::default();
        match self.value.to_ascii_lowercase().as_str() {
            "true" => value.push_varint(BOOL_FIELD, 1),
            "false" => value.push_varint(BOOL_FIELD, 0),
            _ => value.push_bytes(STRING_FIELD, self.value.as_bytes()),
        }
        let mut entry = Message::default();
        entry.push_bytes(KEY, self.name.as_bytes());
        entry.push_bytes(VALUE, &value.encode());
        entry.encode()
    }
}

/// The option that a map entry overrides. An entry that names none overrides the option with the empty name.
pub(super) fn name_of(entry: &[u8]) -> Result<Vec<u8>, wire::Error> {
    let entry = Message::parse(entry)?;
    let name = entry.repeated(KEY)?.pop().unwrap_or_default().to_vec();
    Ok(name)
}

/// The order of map entries on the wire says nothing; this is one to sort them by.
pub(super) fn map_key(entry: Value<'_>) -> Vec<u8> {
    match entry {
        Value::Bytes(entry) => name_of(entry).unwrap_or_default(),
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_become_typed_overrides() {
        for (flag, entry) in [
            ("--xla_a=true", &b"\x0a\x05xla_a\x12\x02\x10\x01"[..]),
            ("--xla_a", b"\x0a\x05xla_a\x12\x02\x10\x01"),
            ("--xla_a=False", b"\x0a\x05xla_a\x12\x02\x10\x00"),
            ("--xla-a=12", b"\x0a\x05xla_a\x12\x04\x0a\x0212"),
            ("--xla_a=", b"\x0a\x05xla_a\x12\x02\x0a\x00"),
            ("--xla_a=b=c", b"\x0a\x05xla_a\x12\x05\x0a\x03b=c"),
        ] {
            let parsed = Override::parse(flag).expect(flag);
            assert_eq!(parsed.encode(), entry, "{flag}");
            assert_eq!(name_of(entry), Ok(b"xla_a".to_vec()));
        }
    }

    #[test]
    fn what_is_no_xla_flag_is_refused() {
        for flag in [
            "xla_a=1",
            "-xla_a",
            "--tpu_a=1",
            "--",
            "--xla_ä=1",
            "--xla a=1",
        ] {
            assert!(
                matches!(Override::parse(flag), Err(Error::Flag { .. })),
                "{flag}"
            );
        }
    }
}
