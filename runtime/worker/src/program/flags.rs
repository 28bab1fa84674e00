//! XLA flags as option overrides.
//!
//! `CompileOptionsProto.env_option_overrides` maps the name of any XLA debug option to a value. The plugin sets them last, over
//! the debug options, and answers INVALID_ARGUMENT naming an option that it does not have. A string is parsed as the option's
//! own type, except that booleans are then only `True` and `False`, so those go as booleans.

use std::borrow::Cow;

use waystation_stablehlo::wire::{Message, Value};

use super::{
    Error,
    known::{self, Kind},
    options::{part, read},
};

/// `OptionOverrideProto`'s and a map entry's fields.
const KEY: u32 = 1;
const VALUE: u32 = 2;
const STRING_FIELD: u32 = 1;
const BOOL_FIELD: u32 = 2;
const INT_FIELD: u32 = 3;

/// A debug option that comes with a program, and its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Override {
    pub(super) name: String,
    setting: Setting,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Setting {
    Text(String),
    Truth(bool),
    Number(i64),
    /// An `OptionOverrideProto` with something else in it.
    Raw(Vec<u8>),
}

impl Override {
    pub(super) fn text(name: &str, value: impl Into<String>) -> Self {
        Self {
            name: name.to_owned(),
            setting: Setting::Text(value.into()),
        }
    }

    pub(super) fn truth(name: &str, value: bool) -> Self {
        Self {
            name: name.to_owned(),
            setting: Setting::Truth(value),
        }
    }

    pub(super) fn number(name: &str, value: i64) -> Self {
        Self {
            name: name.to_owned(),
            setting: Setting::Number(value),
        }
    }

    /// Reads `--xla_name=value`, `--xla-name=value` or, for `true`, `--xla_name`. Of an option that is known to be a boolean
    /// every usual spelling is taken.
    pub(super) fn parse(flag: &str) -> Result<Self, Error> {
        let invalid = || Error::Flag {
            flag: flag.to_owned(),
        };
        let text = flag.strip_prefix("--").ok_or_else(invalid)?;
        let (name, value) = text.split_once('=').unwrap_or((text, "true"));
        let name = name.replace('-', "_");
        let is_flag = name.starts_with("xla_")
            && name
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
        if !is_flag {
            return Err(invalid());
        }
        let kind = known::find(&name).map(|known| known.kind);
        let truth = match (value.to_ascii_lowercase().as_str(), kind) {
            (_, Some(Kind::Int | Kind::Text | Kind::Other)) => None,
            ("true", _) | ("1" | "t" | "yes" | "y" | "on", Some(Kind::Bool)) => Some(true),
            ("false", _) | ("0" | "f" | "no" | "n" | "off", Some(Kind::Bool)) => Some(false),
            _ => None,
        };
        let setting = truth.map_or_else(|| Setting::Text(value.to_owned()), Setting::Truth);
        Ok(Self { name, setting })
    }

    /// Reads a map entry. The name of an entry that names none is empty.
    pub(super) fn decode(entry: &[u8]) -> Result<Self, Error> {
        let entry = read("env_option_overrides", entry)?;
        let name = part(&entry, KEY, "env_option_overrides")?;
        let name = String::from_utf8_lossy(&name).into_owned();
        let value = part(&entry, VALUE, "env_option_overrides")?;
        let content = read("env_option_overrides", &value)?;
        let fields: Vec<_> = content.fields().collect();
        let setting = match fields[..] {
            [(STRING_FIELD, Value::Bytes(text))] => std::str::from_utf8(text)
                .ok()
                .map(|text| Setting::Text(text.to_owned())),
            [(BOOL_FIELD, Value::Varint(truth))] => Some(Setting::Truth(truth != 0)),
            [(INT_FIELD, Value::Varint(number))] => Some(Setting::Number(number as i64)),
            _ => None,
        };
        let setting = setting.unwrap_or_else(|| Setting::Raw(value.to_vec()));
        Ok(Self { name, setting })
    }

    /// The map entry.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut value = Message::default();
        match &self.setting {
            Setting::Text(text) => value.push_bytes(STRING_FIELD, text.as_bytes()),
            Setting::Truth(truth) => value.push_varint(BOOL_FIELD, u64::from(*truth)),
            Setting::Number(number) => value.push_varint(INT_FIELD, *number as u64),
            Setting::Raw(_) => {}
        }
        let mut value = value.encode();
        if let Setting::Raw(raw) = &self.setting {
            value.clone_from(raw);
        }
        let mut entry = Message::default();
        entry.push_bytes(KEY, self.name.as_bytes());
        entry.push_bytes(VALUE, &value);
        entry.encode()
    }

    /// The value as words, where it is words.
    pub(super) fn words(&self) -> Option<&str> {
        match &self.setting {
            Setting::Text(text) => Some(text),
            _ => None,
        }
    }

    /// The value as the plugin understands it, whatever the spelling.
    fn meaning(&self) -> Cow<'_, Setting> {
        let kind = known::find(&self.name).map(|known| known.kind);
        let meaning = match (kind, &self.setting) {
            (Some(Kind::Bool), Setting::Text(text)) => match text.as_str() {
                "True" => Some(Setting::Truth(true)),
                "False" => Some(Setting::Truth(false)),
                _ => None,
            },
            (Some(Kind::Int), Setting::Text(text)) => text
                .parse()
                .ok()
                .filter(|_| !text.starts_with('+'))
                .map(Setting::Number),
            _ => None,
        };
        meaning.map_or(Cow::Borrowed(&self.setting), Cow::Owned)
    }

    /// Name and value for a key: equal for all spellings of one value.
    pub(super) fn canonical(&self) -> (String, String) {
        let value = match &*self.meaning() {
            Setting::Text(text) => format!("text {text}"),
            Setting::Truth(truth) => format!("bool {truth}"),
            Setting::Number(number) => format!("int {number}"),
            Setting::Raw(raw) => format!("raw {raw:02x?}"),
        };
        (self.name.clone(), value)
    }
}

/// The debug options that a plugin compiles with when nothing is asked of it, as it says itself: its own defaults under its
/// process's environment.
#[derive(Debug, Clone, Default)]
pub struct Defaults(Vec<u8>);

impl Defaults {
    /// Takes the bytes of an `xla.DebugOptions`.
    pub fn new(debug_options: Vec<u8>) -> Self {
        Self(debug_options)
    }

    /// True when the override changes nothing.
    pub(super) fn has(&self, setting: &Override) -> bool {
        let Some(known) = known::find(&setting.name) else {
            return false;
        };
        let Ok(options) = Message::parse(&self.0) else {
            return false;
        };
        match (known.kind, &*setting.meaning()) {
            (Kind::Bool, Setting::Truth(truth)) => {
                options.varint(known.number) == Ok(Some(u64::from(*truth)))
            }
            (Kind::Int, Setting::Number(number)) => {
                options.varint(known.number) == Ok(Some(*number as u64))
            }
            (Kind::Text, Setting::Text(text)) => {
                options.repeated(known.number).as_deref() == Ok(&[text.as_bytes()])
            }
            _ => false,
        }
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
            ("--xla_a=1", b"\x0a\x05xla_a\x12\x03\x0a\x011"),
            ("--xla_a=", b"\x0a\x05xla_a\x12\x02\x0a\x00"),
            ("--xla_a=b=c", b"\x0a\x05xla_a\x12\x05\x0a\x03b=c"),
            (
                "--xla_dump_to=true",
                b"\x0a\x0bxla_dump_to\x12\x06\x0a\x04true",
            ),
        ] {
            let parsed = Override::parse(flag).expect(flag);
            assert_eq!(parsed.encode(), entry, "{flag}");
            assert_eq!(Override::decode(entry).expect(flag), parsed);
        }
    }

    #[test]
    fn booleans_that_are_known_may_be_spelled_in_every_way() {
        for text in ["", "=true", "=1", "=True", "=yes"] {
            let flag = Override::parse(&format!("--xla_cpu_enable_fast_math{text}"));
            assert_eq!(
                flag.expect(text),
                Override::truth("xla_cpu_enable_fast_math", true)
            );
        }
        let number = Override::parse("--xla_backend_optimization_level=1").expect("a flag");
        assert_eq!(number.words(), Some("1"), "no boolean");
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

    #[test]
    fn spellings_of_one_value_are_one_in_a_key() {
        let level = "xla_backend_optimization_level";
        let math = "xla_cpu_enable_fast_math";
        let same = [
            (Override::text(level, "2"), Override::number(level, 2)),
            (Override::text(math, "True"), Override::truth(math, true)),
        ];
        for (a, b) in same {
            assert_eq!(a.canonical(), b.canonical());
        }
        let different = [
            (Override::text(level, "2"), Override::text(level, "3")),
            (Override::text(math, "1"), Override::truth(math, true)),
            (
                Override::text("xla_new", "2"),
                Override::number("xla_new", 2),
            ),
            (
                Override::text("xla_dump_to", "2"),
                Override::number("xla_dump_to", 2),
            ),
        ];
        for (a, b) in different {
            assert_ne!(a.canonical(), b.canonical());
        }
    }

    #[test]
    fn the_plugins_own_values_change_nothing() {
        let mut options = Message::default();
        options.push_varint(31, 3);
        options.push_varint(99, 0);
        options.push_varint(107, u64::MAX);
        options.push_bytes(109, b"/d");
        let defaults = Defaults::new(options.encode());
        for flag in [
            "--xla_backend_optimization_level=3",
            "--xla_cpu_enable_fast_math=false",
            "--xla_dump_to=/d",
        ] {
            assert!(defaults.has(&Override::parse(flag).expect(flag)), "{flag}");
        }
        for flag in [
            "--xla_backend_optimization_level=2",
            "--xla_backend_optimization_level=x",
            "--xla_cpu_enable_fast_math",
            "--xla_dump_to=/e",
            // Not among what the plugin says: nobody knows.
            "--xla_llvm_disable_expensive_passes=false",
            "--xla_unheard_of=3",
        ] {
            assert!(!defaults.has(&Override::parse(flag).expect(flag)), "{flag}");
        }
        let broken = Defaults::new(vec![0x0a]);
        assert!(!broken.has(&Override::number("xla_backend_optimization_level", 3)));
    }

    #[test]
    fn any_entry_reaches_the_plugin_as_it_came() {
        // A real number, which is none of the kinds above, and a field that nobody knows.
        for value in [
            &b"\x21\x00\x00\x00\x00\x00\x00\xf0\x3f"[..],
            b"\x48\x01",
            b"",
        ] {
            let mut entry = Message::default();
            entry.push_bytes(KEY, b"xla_r");
            entry.push_bytes(VALUE, value);
            let entry = entry.encode();
            assert_eq!(Override::decode(&entry).expect("read").encode(), entry);
        }
    }
}
