//! The name of an executable: a SHA-256 over everything it depends on, and nothing else.
//!
//! Each component is hashed by itself, and the key is the hash of the named component digests. So a key comes with a
//! [`Record`] of what it is made of: of two keys that differ one can say *what* differs without having either program.
//! Everything that enters a hash is preceded by its length, so no two lists of components run together.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use sha2::{Digest as _, Sha256};
use waystation_lifecycle::bucket::layout::Digest;

mod program;

/// Number of the rules by which Waystation turns a request into what the compiler sees (rewriting, calls into its own
/// libraries). Raised when they change, so that no executable made by other rules is taken for one made by these; a test
/// of the worker holds what the rules make of one request against this number.
///
/// 2: of the client's debug options only a few reach the compiler.
pub const RULES: u64 = 2;

/// Stands before everything in the key's hash, so that no other hash of Waystation is taken for a key.
const DOMAIN: &[u8] = b"waystation executable key 1";

/// What an executable depends on.
#[derive(Debug, Clone, Copy, Default)]
pub struct KeyInputs<'a> {
    /// The program as the client sent it: a StableHLO portable artifact, or any other format.
    pub program: &'a [u8],
    /// Compile options in a normal form, flags left out: equal options, equal bytes.
    pub options: &'a [u8],
    /// Flags that come with the program, by name, in a normal form and without those that do not matter
    /// ([`crate::harmless`]). Order does not matter.
    pub flags: &'a [(String, String)],
    /// The compiler and what it compiles for, by name: digest of the plugin file, platform, CPU features, device
    /// kind. See [`crate::platform`]. Order does not matter.
    pub platform: &'a [(String, String)],
    /// Variables that the compiler reads, by name. See [`crate::platform::environment`]. Order does not matter.
    pub environment: &'a [(String, String)],
}

/// How a program could be keyed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Treatment {
    /// By its structure: locations and debug info do not count.
    Structural,
    /// By its structure, but for a part that is not understood and stands by its bytes. A needless miss at worst.
    Opaque {
        /// Which part.
        construct: String,
    },
    /// By its bytes, since something in it is not understood. A needless miss at worst.
    Raw {
        /// What is not understood.
        construct: String,
    },
    /// Not to be kept at all: it calls into the process that made it, and its bytes do not say what.
    Uncacheable {
        /// Which construct does.
        reason: String,
    },
}

/// What a key is made of: component names and their digests, in the order in which they are hashed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Record {
    components: Vec<(String, Digest)>,
}

impl Record {
    /// Names and digests.
    pub fn components(&self) -> &[(String, Digest)] {
        &self.components
    }

    /// Names of the components by which two records differ, those that only one of them has included. Sorted.
    pub fn differences<'a>(&'a self, other: &'a Record) -> Vec<&'a str> {
        let only = |a: &'a Record, b: &'a Record| {
            a.components
                .iter()
                .filter(|component| !b.components.contains(component))
                .map(|(name, _)| name.as_str())
                .collect::<Vec<_>>()
        };
        let mut names = only(self, other);
        names.extend(only(other, self));
        names.sort_unstable();
        names.dedup();
        names
    }

    fn add(&mut self, name: impl Into<String>, digest: Digest) {
        self.components.push((name.into(), digest));
    }

    fn digest(&self) -> Digest {
        let mut hash = Framed::new(DOMAIN);
        hash.number(self.components.len() as u64);
        for (name, digest) in &self.components {
            hash.bytes(name.as_bytes());
            hash.bytes(digest);
        }
        hash.finish()
    }
}

/// The name of an executable. Equal and hashed by its digest alone; clones are cheap.
#[derive(Clone)]
pub struct Key {
    digest: Digest,
    record: Arc<Record>,
    treatment: Treatment,
}

impl Key {
    /// Makes the key. Reads and hashes the whole program: tens of microseconds for a small one, about a millisecond a
    /// megabyte, so call it where blocking that long is allowed.
    pub fn of(inputs: &KeyInputs<'_>) -> Key {
        Key::by_rules(RULES, inputs)
    }

    fn by_rules(rules: u64, inputs: &KeyInputs<'_>) -> Key {
        let (program, treatment) = program::digest(inputs.program);
        let mut record = Record::default();
        record.add("rules", number_digest(rules));
        record.add("program", program);
        record.add("options", bytes_digest(b"options", inputs.options));
        for (group, pairs) in [
            ("flag", inputs.flags),
            ("platform", inputs.platform),
            ("environment", inputs.environment),
        ] {
            let mut pairs: Vec<_> = pairs.iter().collect();
            pairs.sort();
            for (name, value) in pairs {
                record.add(
                    format!("{group}/{name}"),
                    bytes_digest(b"value", value.as_bytes()),
                );
            }
        }
        Key {
            digest: record.digest(),
            record: Arc::new(record),
            treatment,
        }
    }

    /// Reads a key from its 64 hex digits, as [`fmt::Display`] writes them. Such a key finds entries; it has no record.
    pub fn parse(text: &str) -> Option<Key> {
        let mut digest = [0; 32];
        hex::decode_to_slice(text, &mut digest).ok()?;
        Some(Key::from_digest(digest))
    }

    /// The key with a known digest and no record.
    pub fn from_digest(digest: Digest) -> Key {
        Key {
            digest,
            record: Arc::default(),
            treatment: Treatment::Structural,
        }
    }

    /// The key itself.
    pub fn digest(&self) -> &Digest {
        &self.digest
    }

    /// What it is made of; empty for a key that was read.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// False where nothing compiled under this key may serve another request, not even one of this process.
    pub fn is_cacheable(&self) -> bool {
        !matches!(self.treatment, Treatment::Uncacheable { .. })
    }

    /// How the program could be keyed.
    pub fn treatment(&self) -> &Treatment {
        &self.treatment
    }
}

impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        self.digest == other.digest
    }
}

impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.digest.hash(state);
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(self.digest))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}

/// SHA-256 over parts that are each preceded by their length.
struct Framed(Sha256);

impl Framed {
    fn new(domain: &[u8]) -> Framed {
        let mut framed = Framed(Sha256::new());
        framed.bytes(domain);
        framed
    }

    fn number(&mut self, number: u64) {
        self.0.update(number.to_le_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.update(bytes);
    }

    fn finish(self) -> Digest {
        self.0.finalize().into()
    }
}

fn bytes_digest(domain: &[u8], bytes: &[u8]) -> Digest {
    let mut hash = Framed::new(domain);
    hash.bytes(bytes);
    hash.finish()
}

fn number_digest(number: u64) -> Digest {
    let mut hash = Framed::new(b"number");
    hash.number(number);
    hash.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pairs(of: &[(&str, &str)]) -> Vec<(String, String)> {
        of.iter()
            .map(|(a, b)| (a.to_string(), b.to_string()))
            .collect()
    }

    #[test]
    fn every_input_counts_and_is_named() {
        let platform = pairs(&[("plugin", "aa"), ("features", "avx2")]);
        let environment = pairs(&[("XLA_FLAGS", "--a")]);
        let flags = pairs(&[("xla_a", "int 1"), ("xla_b", "bool true")]);
        let other_flags = pairs(&[("xla_a", "int 2"), ("xla_b", "bool true")]);
        let base = KeyInputs {
            program: b"program",
            options: b"options",
            flags: &flags,
            platform: &platform,
            environment: &environment,
        };
        let key = Key::of(&base);
        assert_eq!(key, Key::of(&base));
        let other_platform = pairs(&[("plugin", "ab"), ("features", "avx2")]);
        let more_environment = pairs(&[("XLA_FLAGS", "--a"), ("X", "")]);
        let cases = [
            (
                KeyInputs {
                    program: b"programs",
                    ..base
                },
                vec!["program"],
            ),
            (
                KeyInputs {
                    options: b"option",
                    ..base
                },
                vec!["options"],
            ),
            (
                KeyInputs {
                    flags: &other_flags,
                    ..base
                },
                vec!["flag/xla_a"],
            ),
            (
                KeyInputs { flags: &[], ..base },
                vec!["flag/xla_a", "flag/xla_b"],
            ),
            (
                KeyInputs {
                    platform: &other_platform,
                    ..base
                },
                vec!["platform/plugin"],
            ),
            (
                KeyInputs {
                    environment: &more_environment,
                    ..base
                },
                vec!["environment/X"],
            ),
            (
                KeyInputs {
                    environment: &[],
                    ..base
                },
                vec!["environment/XLA_FLAGS"],
            ),
        ];
        for (inputs, names) in cases {
            let other = Key::of(&inputs);
            assert_ne!(key, other, "{names:?}");
            assert_eq!(key.record().differences(other.record()), names);
        }
        let older = Key::by_rules(RULES - 1, &base);
        assert_ne!(key, older);
        assert_eq!(key.record().differences(older.record()), ["rules"]);
        let turned = pairs(&[("features", "avx2"), ("plugin", "aa")]);
        assert_eq!(
            key,
            Key::of(&KeyInputs {
                platform: &turned,
                ..base
            }),
            "order does not count"
        );
    }

    #[test]
    fn nothing_runs_together() {
        let a = pairs(&[("ab", "c")]);
        let b = pairs(&[("a", "bc")]);
        let of = |platform: &[(String, String)], environment: &[(String, String)]| {
            Key::of(&KeyInputs {
                program: b"p",
                platform,
                environment,
                ..KeyInputs::default()
            })
        };
        assert_ne!(of(&a, &[]), of(&b, &[]));
        assert_ne!(of(&a, &[]), of(&[], &a));
        let program_or_options = |program: &[u8], options: &[u8]| {
            Key::of(&KeyInputs {
                program,
                options,
                ..KeyInputs::default()
            })
        };
        assert_ne!(
            program_or_options(b"ab", b""),
            program_or_options(b"a", b"b")
        );
        assert_ne!(program_or_options(b"", b"x"), program_or_options(b"x", b""));
    }

    #[test]
    fn is_read_back_from_its_text() {
        let key = Key::of(&KeyInputs {
            program: b"p",
            ..KeyInputs::default()
        });
        let text = key.to_string();
        assert_eq!(text.len(), 64);
        assert_eq!(Key::parse(&text), Some(key));
        for bad in [
            "",
            "ab",
            &text[1..],
            &format!("{text}0"),
            &text.replace(&text[..1], "g"),
        ] {
            assert_eq!(Key::parse(bad), None, "{bad}");
        }
    }
}
