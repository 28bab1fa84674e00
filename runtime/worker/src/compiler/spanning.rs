//! Programs over several workers: what they are keyed on and loaded with, and getting one from the worker that compiled it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use bytes::Bytes;
use prost::Message as _;
use waystation_cache::{Entry, Key, platform::CPU_PARALLELISM};
use waystation_proto::{
    tensorflow::{StatusProto, error::Code},
    waystation::{
        ExecutableInfo,
        worker::{ExecutableHeader, executable_header::Fact},
    },
    xla::{CompileOptionsProto, ExecutableBuildOptionsProto},
};

use super::{Compiler, Loaded, loaded::Artifact};
use crate::{counters, make::Shape, peers::Peers, status};

/// What tells the key of such a program from that of one within a worker, and from that of other builds. Where its partitions
/// lie does not count.
pub(super) fn facts((replicas, partitions): Shape) -> [(String, String); 2] {
    let version = waystation_collectives::VERSION;
    let target = waystation_collectives::TARGET;
    let named = |name: &str, value| (name.to_owned(), value);
    [
        named(
            "spanning",
            format!("{replicas} replicas of {partitions} partitions"),
        ),
        named("collectives", format!("{version} by {target}")),
    ]
}

/// The options under which an executable runs on any one device.
pub(super) fn portable() -> Vec<u8> {
    CompileOptionsProto {
        executable_build_options: Some(ExecutableBuildOptionsProto {
            device_ordinal: -1,
            num_replicas: 1,
            num_partitions: 1,
            ..ExecutableBuildOptionsProto::default()
        }),
        compile_portable_executable: true,
        ..CompileOptionsProto::default()
    }
    .encode_to_vec()
}

/// Where another worker has an executable, and what is known of it.
pub(crate) struct Elsewhere {
    /// The worker's data service.
    pub(crate) address: String,
    pub(crate) epoch: u64,
    /// What the lease's workers know each other by.
    pub(crate) secret: Bytes,
    pub(crate) executable: u64,
    pub(crate) key: String,
    pub(crate) info: ExecutableInfo,
}

impl Compiler {
    /// What another worker must know to load an artifact of this one.
    pub(crate) fn header(&self, artifact: &Artifact) -> ExecutableHeader {
        let facts = self.identity.platform.iter();
        ExecutableHeader {
            size_bytes: artifact.bytes.len() as u64,
            digest: Bytes::copy_from_slice(&artifact.digest),
            platform: facts
                .map(|(name, value)| Fact {
                    name: name.clone(),
                    value: value.clone(),
                })
                .collect(),
        }
    }

    /// Gets a program from the worker that has compiled it, and loads it. Only that very executable will do: another one of the
    /// same program may differ in what it sends, and when.
    pub(crate) async fn fetch(
        self: &Arc<Self>,
        peers: &Peers,
        from: Elsewhere,
    ) -> Result<Arc<Loaded>, StatusProto> {
        let key = Key::parse(&from.key)
            .ok_or_else(|| status::invalid(format!("{:?} is no key of a program", from.key)))?;
        let name = (key, Vec::new());
        let fatal = self.cache.admit(&name.0);
        fatal.map_err(|fatal| status::invalid(fatal.to_string()))?;
        let coming = peers
            .executable(&from.address, from.epoch, from.executable, from.secret)
            .await?;
        self.check_platform(&coming.header, &from.address)?;
        if let Some(loaded) = self.share(&name)
            && let Some(artifact) = &loaded.artifact
            && artifact.digest[..] == coming.header.digest[..]
        {
            counters::add(&self.counters.shared_loads, 1);
            return Ok(loaded);
        }
        let announced = coming.header.digest.clone();
        let bytes = coming.bytes().await?;
        let artifact = super::blocking(move || Artifact::new(bytes)).await?;
        if artifact.digest[..] != announced[..] {
            return Err(status::of(
                Code::Unavailable,
                format!(
                    "the executable of the worker at {} came damaged",
                    from.address
                ),
            ));
        }
        let entry = Arc::new(Entry {
            info: from.info,
            executable: artifact.bytes,
            text: None,
            object: None,
        });
        let (executable, artifact) = self.deserialize(&name, &entry, None).await?;
        Ok(self.keep(name, executable, &entry, None, artifact))
    }

    /// Whether what another worker compiles runs here.
    fn check_platform(&self, header: &ExecutableHeader, address: &str) -> Result<(), StatusProto> {
        let theirs = header.platform.iter();
        let theirs = theirs.map(|fact| (fact.name.as_str(), fact.value.as_str()));
        let ours = self.identity.platform.iter();
        let ours = ours.map(|(name, value)| (name.as_str(), value.as_str()));
        let differ = differences(ours, theirs);
        if differ.is_empty() {
            return Ok(());
        }
        Err(status::of(
            Code::FailedPrecondition,
            format!(
                "this worker cannot run what the worker at {address} compiles, the two differ in {}",
                differ.join("; ")
            ),
        ))
    }
}

/// In what two workers differ so that one cannot run what the other compiles. Machines with more CPUs divide loops into more parts,
/// which others run as well.
fn differences<'a>(
    ours: impl Iterator<Item = (&'a str, &'a str)>,
    theirs: impl Iterator<Item = (&'a str, &'a str)>,
) -> Vec<String> {
    let (ours, theirs): (BTreeMap<_, _>, BTreeMap<_, _>) = (ours.collect(), theirs.collect());
    let names: BTreeSet<&str> = ours.keys().chain(theirs.keys()).copied().collect();
    let told = |value: Option<&&str>| {
        value.map_or_else(|| "nothing".to_owned(), |value| format!("{value:?}"))
    };
    let differ = names
        .into_iter()
        .filter(|&name| name != CPU_PARALLELISM && ours.get(name) != theirs.get(name));
    differ
        .map(|name| {
            let (here, there) = (told(ours.get(name)), told(theirs.get(name)));
            format!("{name}: {here} here, {there} there")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_may_differ_in_how_many_cpus_they_have_and_in_nothing_else() {
        let one = [
            ("plugin", "a"),
            ("cpu_features", "avx"),
            (CPU_PARALLELISM, "2"),
        ];
        let large = [
            ("plugin", "a"),
            ("cpu_features", "avx"),
            (CPU_PARALLELISM, "64"),
        ];
        let other = [("plugin", "b"), ("cpu_features", "avx"), ("more", "x")];
        let between = |ours: &[(&'static str, &'static str)], theirs: &[_]| {
            differences(ours.iter().copied(), theirs.iter().copied())
        };
        assert!(between(&one, &one).is_empty());
        assert!(between(&one, &large).is_empty() && between(&large, &one).is_empty());
        assert_eq!(
            between(&one, &other),
            [
                "more: nothing here, \"x\" there",
                "plugin: \"a\" here, \"b\" there"
            ]
        );
    }

    #[test]
    fn the_key_tells_widths_apart() {
        assert_ne!(facts((1, 4)), facts((1, 8)));
        assert_ne!(facts((1, 4)), facts((4, 1)));
        assert_eq!(
            facts((1, 4)).map(|fact| fact.0),
            ["spanning", "collectives"]
        );
    }
}
