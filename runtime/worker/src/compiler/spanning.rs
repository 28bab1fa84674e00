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

use super::{
    Compiler, Loaded,
    loaded::{Artifact, Reach},
};
use crate::{
    counters,
    group::{Group, Known},
    make::Shape,
    peers::Peers,
    status,
};

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

/// The devices of a program with the plugin's own collectives.
pub(super) async fn native(group: &Arc<Group>, ids: &[i32]) -> Result<Vec<Known>, StatusProto> {
    let (group, ids) = (Arc::clone(group), ids.to_vec());
    let known = super::blocking(move || group.devices(&ids)).await?;
    known.map_err(|why| status::unimplemented(format!("programs over several workers: {why}")))
}

/// As [`facts`], with the plugin's own collectives: what is compiled may depend on which devices are neighbours.
pub(super) fn native_fact(devices: &[Known]) -> (String, String) {
    let mut seen = Vec::new();
    let places = devices.iter().map(|device| {
        let known = seen.iter().position(|node| *node == device.node);
        known.unwrap_or_else(|| {
            seen.push(device.node);
            seen.len() - 1
        })
    });
    let places: Vec<String> = places.map(|place| place.to_string()).collect();
    (
        "spanning".to_owned(),
        format!("by the plugin, on workers {}", places.join(" ")),
    )
}

/// Flags for a program that one worker compiles for all. XLA for GPUs would have all of them compile at the same time, and share
/// out among them what it tries.
pub(super) fn native_flags(platform: &str) -> Option<String> {
    matches!(platform, "cuda" | "rocm").then(|| "--xla_gpu_shard_autotuning=false".to_owned())
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
        let native = artifact.native.as_ref();
        ExecutableHeader {
            size_bytes: artifact.bytes.len() as u64,
            digest: Bytes::copy_from_slice(&artifact.digest),
            platform: facts
                .map(|(name, value)| Fact {
                    name: name.clone(),
                    value: value.clone(),
                })
                .collect(),
            options: native.map_or_else(Bytes::new, |native| native.options.clone()),
            plugin_devices: native.map_or_else(Vec::new, |native| native.devices.clone()),
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
        let fatal = self.cache.admit(&key);
        fatal.map_err(|fatal| status::invalid(fatal.to_string()))?;
        let coming = peers
            .executable(&from.address, from.epoch, from.executable, from.secret)
            .await?;
        self.check_platform(&coming.header, &from.address)?;
        let reach = match &self.group {
            Some(_) => Reach::Native,
            None => Reach::Hooked,
        };
        if (reach == Reach::Native) == coming.header.plugin_devices.is_empty() {
            return Err(status::of(
                Code::FailedPrecondition,
                format!(
                    "of this worker and the one at {} one has the plugin's collectives and the other ours; give both \
                     --plugin_collectives, or none",
                    from.address
                ),
            ));
        }
        let name = (key, coming.header.plugin_devices.clone());
        let options = coming.header.options.clone();
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
        let (executable, artifact) = self.deserialize(&name, &entry, (reach, &options)).await?;
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
    fn the_key_tells_neighbours_from_others() {
        let on = |nodes: &[u32]| {
            let known = nodes.iter().map(|node| Known {
                plugin_id: 0,
                node: *node,
            });
            native_fact(&known.collect::<Vec<_>>())
        };
        assert_ne!(on(&[0, 0, 1, 1]), on(&[0, 1, 0, 1]));
        assert_eq!(on(&[0, 0, 1, 1]), on(&[3, 3, 2, 2]));
        assert!(!facts((1, 2)).contains(&on(&[0, 1])));
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
