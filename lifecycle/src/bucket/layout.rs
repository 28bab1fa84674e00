//! The names of everything that Waystation keeps below a location. No other file makes up an object name.
//!
//! ```text
//! exe/v1/ab/cd/<key>/<slot>     compiled executables; <key> is 64 hex digits, ab and cd its first two bytes
//! claim/v1/ab/cd/<key>/<minute> "I am compiling this", by minute since 1970; <minute>-over: "and nothing came of it"
//! programs/v1/ab/cd/<key>       compile requests as a client sent them, for warming
//! dump/                         XLA's text dumps
//! sweep/v1/<hour>               "I remove what is old", by hour since 1970; only where no rule of the store does it
//! ```
//!
//! The two levels `ab/cd` keep folders of a `file://` location small (a million entries are 16 files a folder); a
//! cloud store does not mind them. An object is written once, by a create that fails where the name is taken, and
//! never written over: so a reader sees all of it or none of it, and `storage.objects.create` alone is right enough.

use object_store::path::Path;

/// The digest that names a program's executable. 32 bytes, SHA-256.
pub type Digest = [u8; 32];

/// How many names an executable's key has. A bad entry is repaired by writing the next one, because nothing may be
/// written over without the right to delete.
pub const SLOTS: u8 = 4;

/// One prefix of the layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prefix {
    /// Object name prefix below the location, ending in '/'.
    pub path: &'static str,
    /// Which part of Waystation creates objects here.
    pub writer: &'static str,
    /// Which parts read them.
    pub reader: &'static str,
    /// The Cloud Storage rights that this takes.
    pub rights: &'static [&'static str],
    /// How long an object is worth keeping, in days after its creation. `None`: until the user removes it.
    pub retention_days: Option<u32>,
}

/// Compiled executables.
pub const EXECUTABLES: Prefix = Prefix {
    path: "exe/v1/",
    writer: "worker, after a compile",
    reader: "worker, before a compile",
    rights: &[
        "storage.objects.get",
        "storage.objects.list",
        "storage.objects.create",
    ],
    retention_days: Some(30),
};

/// Claims, by which jobs that start together compile a program once.
pub const CLAIMS: Prefix = Prefix {
    path: "claim/v1/",
    writer: "worker, before a compile",
    reader: "worker, before a compile",
    rights: &["storage.objects.list", "storage.objects.create"],
    retention_days: Some(1),
};

/// Recorded compile requests.
pub const PROGRAMS: Prefix = Prefix {
    path: "programs/v1/",
    writer: "proxy, when asked to record",
    reader: "cache warm",
    rights: &[
        "storage.objects.get",
        "storage.objects.list",
        "storage.objects.create",
    ],
    retention_days: None,
};

/// XLA's dumps. People asked for them, and the name is one that they may use for things of their own: nothing removes them.
pub const DUMPS: Prefix = Prefix {
    path: "dump/",
    writer: "worker, when dumps are asked for",
    reader: "people",
    rights: &["storage.objects.create"],
    retention_days: None,
};

/// Claims, by which many resource managers sweep a folder once.
pub const SWEEPS: Prefix = Prefix {
    path: "sweep/v1/",
    writer: "resource manager, before it sweeps",
    reader: "resource manager",
    rights: &["storage.objects.create"],
    retention_days: Some(1),
};

/// Every prefix there is.
pub const PREFIXES: [Prefix; 5] = [EXECUTABLES, CLAIMS, PROGRAMS, DUMPS, SWEEPS];

impl Prefix {
    /// Whether objects are worthless long before an entry's time to live is over, whatever that is.
    pub fn is_short_lived(&self) -> bool {
        self.retention_days == Some(1)
    }
}

/// What bears a name of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Objects, or other such folders, lie below it.
    Folder,
    /// An object.
    Object,
}

impl Prefix {
    /// What of ours a name means in the folder that `above` leads to from the prefix's own; each of those is a folder of
    /// ours. `None`: nothing of ours is called so there. Whatever lies below [`DUMPS`] has names that XLA made up.
    pub fn place(&self, above: &[impl AsRef<str>], name: &str) -> Option<Place> {
        if *self == SWEEPS {
            return (above.is_empty() && number(name).is_some()).then_some(Place::Object);
        }
        let is_object = match *self {
            EXECUTABLES => |name: &str| slot_of_name(name).is_some(),
            CLAIMS => |name: &str| claim_of_name(name).is_some(),
            PROGRAMS => |_: &str| false,
            _ => return None,
        };
        match above {
            [] | [_] => is_hex(name, 2).then_some(Place::Folder),
            [first, second] => {
                let rest = name.strip_prefix(first.as_ref())?;
                let is_key = is_hex(name, 64) && rest.starts_with(second.as_ref());
                let place = match *self {
                    PROGRAMS => Place::Object,
                    _ => Place::Folder,
                };
                is_key.then_some(place)
            }
            [_, _, _] => is_object(name).then_some(Place::Object),
            _ => None,
        }
    }

    /// Whether an object's name is one that we give below the prefix.
    pub fn is_of_ours(&self, path: &Path) -> bool {
        let Some(below) = path.as_ref().strip_prefix(self.path) else {
            return false;
        };
        let parts: Vec<&str> = below.split('/').collect();
        let last = parts.len() - 1;
        (0..=last).all(|at| {
            let wanted = if at < last {
                Place::Folder
            } else {
                Place::Object
            };
            self.place(&parts[..at], parts[at]) == Some(wanted)
        })
    }
}

/// The folder of all entries of a key.
pub fn executable_folder(key: &Digest) -> Path {
    fanned(EXECUTABLES, key)
}

/// The entry of a key in a slot (0 to [`SLOTS`] - 1).
pub fn executable(key: &Digest, slot: u8) -> Path {
    executable_folder(key).join(slot.to_string())
}

/// The slot that an object of [`executable_folder`] is in. `None` where the name is not one of ours.
pub fn slot_of(path: &Path) -> Option<u8> {
    slot_of_name(path.filename()?)
}

/// A name beside the executables that is given to nothing, to learn what the store says of such a one. Another for each
/// `number`, so that nobody sees to it that something is there.
pub fn nothing(number: u128) -> Path {
    Path::from(format!("{}none-{number:x}", EXECUTABLES.path))
}

fn slot_of_name(name: &str) -> Option<u8> {
    let slot: u8 = name.parse().ok()?;
    (slot < SLOTS && name.len() == 1).then_some(slot)
}

/// The claim on a key in a minute (whole minutes since 1970 UTC).
pub fn claim(key: &Digest, minute: u64) -> Path {
    fanned(CLAIMS, key).join(minute.to_string())
}

/// The claim on a sweep in an hour (whole hours since 1970 UTC).
pub fn sweep(hour: u64) -> Path {
    Path::from(format!("{}{hour}", SWEEPS.path))
}

/// Says beside a claim that nothing comes of it: the compile failed, or what it gave is not kept.
pub fn claim_over(key: &Digest, minute: u64) -> Path {
    fanned(CLAIMS, key).join(format!("{minute}{OVER}"))
}

/// The folder of all claims on a key.
pub fn claims_folder(key: &Digest) -> Path {
    fanned(CLAIMS, key)
}

/// The minute of a claim, and whether the object is the claim itself or says that it is over. `None` where the name is
/// not one of ours.
pub fn claim_of(path: &Path) -> Option<(u64, Claim)> {
    claim_of_name(path.filename()?)
}

fn claim_of_name(name: &str) -> Option<(u64, Claim)> {
    let (text, claim) = match name.strip_suffix(OVER) {
        Some(text) => (text, Claim::Over),
        None => (name, Claim::Made),
    };
    Some((number(text)?, claim))
}

/// A number by its own text: no sign, no zeros before it.
fn number(text: &str) -> Option<u64> {
    let number: u64 = text.parse().ok()?;
    (number.to_string() == text).then_some(number)
}

/// So many hexadecimal digits as we write them.
fn is_hex(text: &str, digits: usize) -> bool {
    let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    text.len() == digits && text.bytes().all(is_digit)
}

/// What an object below [`claims_folder`] says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Claim {
    /// Somebody compiles the program.
    Made,
    /// Whoever did has nothing to publish.
    Over,
}

/// End of the names of [`claim_over`].
const OVER: &str = "-over";

/// A recorded compile request.
pub fn program(key: &Digest) -> Path {
    fanned(PROGRAMS, key)
}

fn fanned(prefix: Prefix, key: &Digest) -> Path {
    let hex = hex(key);
    let mut text = String::with_capacity(prefix.path.len() + 6 + hex.len());
    text.push_str(prefix.path);
    text.push_str(&hex[0..2]);
    text.push('/');
    text.push_str(&hex[2..4]);
    text.push('/');
    text.push_str(&hex);
    Path::from(text)
}

fn hex(digest: &Digest) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    digest
        .iter()
        .flat_map(|byte| {
            [
                char::from(DIGITS[usize::from(byte >> 4)]),
                char::from(DIGITS[usize::from(byte & 15)]),
            ]
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> Digest {
        let mut key = [0; 32];
        key[0] = 0xab;
        key[1] = 0x0c;
        key[31] = 0xff;
        key
    }

    #[test]
    fn names_are_fanned_out_by_the_first_two_bytes() {
        let hex = format!("ab0c{}ff", "00".repeat(29));
        assert_eq!(
            executable(&key(), 3).as_ref(),
            format!("exe/v1/ab/0c/{hex}/3")
        );
        assert_eq!(
            claim(&key(), 29_000_000).as_ref(),
            format!("claim/v1/ab/0c/{hex}/29000000")
        );
        assert_eq!(program(&key()).as_ref(), format!("programs/v1/ab/0c/{hex}"));
    }

    #[test]
    fn a_slot_is_read_back_and_foreign_names_are_not() {
        for slot in 0..SLOTS {
            assert_eq!(slot_of(&executable(&key(), slot)), Some(slot));
        }
        for name in ["4", "00", "x", "-1", "+1", "0.tmp"] {
            assert_eq!(
                slot_of(&executable_folder(&key()).join(name)),
                None,
                "{name}"
            );
        }
    }

    #[test]
    fn a_claim_is_read_back_and_foreign_names_are_not() {
        let read = |path: Path| claim_of(&path);
        assert_eq!(
            read(claim(&key(), 29_000_000)),
            Some((29_000_000, Claim::Made))
        );
        assert_eq!(read(claim_over(&key(), 7)), Some((7, Claim::Over)));
        for name in ["x", "-over", "+7", "07", "7-", "7-overs", "7#1"] {
            assert_eq!(read(claims_folder(&key()).join(name)), None, "{name}");
        }
    }

    #[test]
    fn names_of_ours_are_told_from_others_by_prefix_and_place() {
        let hex = format!("ab0c{}ff", "00".repeat(29));
        let ours = [
            (EXECUTABLES, executable(&key(), 0)),
            (EXECUTABLES, executable(&key(), SLOTS - 1)),
            (CLAIMS, claim(&key(), 29_000_000)),
            (CLAIMS, claim_over(&key(), 7)),
            (PROGRAMS, program(&key())),
            (SWEEPS, sweep(489_000)),
        ];
        for (prefix, path) in &ours {
            for other in PREFIXES {
                assert_eq!(other.is_of_ours(path), other == *prefix, "{path}");
            }
        }
        for name in [
            "".to_owned(),
            "README".to_owned(),
            "ab".to_owned(),
            format!("ab/0c/{hex}"),
            format!("ab/0c/{hex}/4"),
            format!("ab/0c/{hex}/0/0"),
            format!("ab/0d/{hex}/0"),
            format!("aa/0c/{hex}/0"),
            format!("AB/0C/{}/0", hex.to_uppercase()),
            format!("ab/0c/{}/0", &hex[1..]),
            "ab/0c/k/0".to_owned(),
        ] {
            let path = Path::from(format!("exe/v1/{name}"));
            assert!(!EXECUTABLES.is_of_ours(&path), "{path}");
        }
        assert!(!SWEEPS.is_of_ours(&Path::from("sweep/v1/07")));
        assert!(!DUMPS.is_of_ours(&Path::from("dump/7")));
        assert!(!EXECUTABLES.is_of_ours(&Path::from("exe/v1")));
    }

    #[test]
    fn the_table_has_no_prefix_inside_another() {
        for a in PREFIXES {
            assert!(a.path.ends_with('/'));
            for b in PREFIXES {
                assert!(a == b || !a.path.starts_with(b.path));
            }
        }
    }
}
