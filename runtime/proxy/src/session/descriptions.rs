//! What programs were like that have been compiled, for clients that compile them again while no worker is left to say it.
//!
//! pathwaysutils finds out which slices live by a small program for each, and takes an error of its compile for the end of the
//! job: only its execution may fail.

use std::{
    collections::{HashMap, VecDeque},
    sync::Mutex,
};

use prost::Message as _;
use sha2::{Digest as _, Sha256};
use waystation_proto::waystation::ExecutableInfo;
use waystation_stablehlo::{
    compile_options::{
        DEBUG_OPTIONS, DEVICE_ASSIGNMENT, ENV_OPTION_OVERRIDES, EXECUTABLE_BUILD_OPTIONS,
    },
    wire::{Message, Value},
};

use super::{compiled::Source, lock};

/// Programs that are kept: as many, with their options and what they are like no larger than this, each.
const PROGRAMS: usize = 256;
const BYTES: usize = 64 << 10;

type Name = [u8; 32];

/// What the last programs of all sessions are like.
#[derive(Debug, Default)]
pub(crate) struct Descriptions {
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    infos: HashMap<Name, ExecutableInfo>,
    /// The oldest first.
    order: VecDeque<Name>,
}

impl Descriptions {
    pub(super) fn put(&self, source: &Source, info: &ExecutableInfo) {
        let Some(name) = name(source).filter(|_| info.encoded_len() <= BYTES) else {
            return;
        };
        let mut kept = lock(&self.kept);
        if kept.infos.insert(name, info.clone()).is_some() {
            return;
        }
        kept.order.push_back(name);
        if kept.order.len() > PROGRAMS
            && let Some(oldest) = kept.order.pop_front()
        {
            kept.infos.remove(&oldest);
        }
    }

    pub(super) fn get(&self, source: &Source) -> Option<ExecutableInfo> {
        lock(&self.kept).infos.get(&name(source)?).cloned()
    }
}

/// What makes a program what it is: not on which devices it lies, and neither the client's debug options, which come in another
/// order each time and leave no trace in what is kept here. The flags are the proxy's, alike for all.
fn name(source: &Source) -> Option<Name> {
    if source.program.len() + source.options.len() > BYTES {
        return None;
    }
    let mut options = Message::parse(&source.options).ok()?;
    let build = options
        .message(EXECUTABLE_BUILD_OPTIONS)
        .ok()??
        .into_owned();
    let mut build = Message::parse(&build).ok()?;
    build.remove(DEBUG_OPTIONS);
    build.remove(DEVICE_ASSIGNMENT);
    options.set_bytes(EXECUTABLE_BUILD_OPTIONS, &build.encode());
    options.sort_occurrences(ENV_OPTION_OVERRIDES, |entry| match entry {
        Value::Bytes(entry) => entry.to_vec(),
        _ => Vec::new(),
    });
    let mut hash = Sha256::new();
    hash.update(source.program.len().to_le_bytes());
    hash.update(&source.program);
    hash.update(options.encode());
    Some(hash.finalize().into())
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use waystation_stablehlo::compile_options::NUM_PARTITIONS;

    use super::*;

    /// Options for so many partitions, with debug options, devices and overrides as they come.
    fn options(partitions: u64, debug: &[u8], devices: &[u8], overrides: &[&[u8]]) -> Bytes {
        let mut build = Message::default();
        build.push_bytes(DEBUG_OPTIONS, debug);
        build.push_varint(NUM_PARTITIONS, partitions);
        build.push_bytes(DEVICE_ASSIGNMENT, devices);
        let mut options = Message::default();
        options.push_bytes(EXECUTABLE_BUILD_OPTIONS, &build.encode());
        for entry in overrides {
            options.push_bytes(ENV_OPTION_OVERRIDES, entry);
        }
        options.encode().into()
    }

    fn source(program: &[u8], options: Bytes) -> Source {
        Source {
            program: Bytes::copy_from_slice(program),
            options,
        }
    }

    fn plain(program: &[u8]) -> Source {
        source(program, options(1, b"", b"", &[]))
    }

    fn info(name: &str) -> ExecutableInfo {
        ExecutableInfo {
            name: name.to_owned(),
            ..ExecutableInfo::default()
        }
    }

    #[test]
    fn a_program_is_known_by_what_it_is() {
        let all = Descriptions::default();
        let first = options(2, b"one order", b"slice 0", &[b"a", b"b"]);
        all.put(&source(b"program", first), &info("one"));
        let again = options(2, b"another order", b"slice 1", &[b"b", b"a"]);
        assert_eq!(
            all.get(&source(b"program", again.clone())),
            Some(info("one"))
        );
        for (program, options) in [
            (&b"another"[..], again),
            (
                b"program",
                options(1, b"one order", b"slice 0", &[b"a", b"b"]),
            ),
            (b"program", options(2, b"one order", b"slice 0", &[b"a"])),
            (b"program", Bytes::from_static(b"no options")),
        ] {
            assert_eq!(all.get(&source(program, options)), None);
        }
        all.put(&plain(b"program"), &info("two"));
        all.put(&plain(b"program"), &info("three"));
        assert_eq!(all.get(&plain(b"program")), Some(info("three")));
    }

    #[test]
    fn only_so_many_and_so_large_ones_are_kept() {
        let all = Descriptions::default();
        all.put(&plain(&[0; BYTES]), &info("large"));
        all.put(&plain(b"program"), &info(&"n".repeat(BYTES)));
        assert!(lock(&all.kept).infos.is_empty());
        let numbered = |n: usize| plain(&n.to_le_bytes());
        for n in 0..=PROGRAMS {
            all.put(&numbered(n), &info("small"));
        }
        assert_eq!(all.get(&numbered(0)), None);
        assert_eq!(all.get(&numbered(1)), Some(info("small")));
        assert_eq!(lock(&all.kept).infos.len(), PROGRAMS);
        assert_eq!(lock(&all.kept).order.len(), PROGRAMS);
    }
}
