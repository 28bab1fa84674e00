//! An executable that is loaded, and what it was made from.

use std::sync::{Arc, OnceLock, atomic::AtomicBool};

use bytes::Bytes;
use sha2::{Digest as _, Sha256};
use waystation_pjrt::{Buffer, Client, LoadedExecutable};
use waystation_proto::waystation::{ExecutableInfo, compile::Job};

use crate::{
    child::Digest,
    counters::{self, Counters},
    hlo::Kept,
    make::{self, Shape},
    program::Dump,
};

/// Whose devices a program is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// This worker's.
    Local,
    /// Those of several, with collectives of ours.
    Hooked,
    /// Those of several, with the plugin's own.
    Native,
}

/// What an executable is made from.
#[derive(Debug, Clone)]
pub(super) struct Source {
    pub(super) program: Bytes,
    /// The plugin's.
    pub(super) options: Bytes,
    pub(super) shape: Shape,
    /// What the request asks to be dumped.
    pub(super) dump: Option<Arc<Dump>>,
    /// Set when a compile for the request has dumped it.
    pub(super) dumped: Arc<AtomicBool>,
    pub(super) reach: Reach,
}

/// A serialized executable, and how to tell it from others.
#[derive(Debug, Clone)]
pub(crate) struct Artifact {
    pub(crate) bytes: Bytes,
    /// SHA-256.
    pub(crate) digest: [u8; 32],
    /// Of one with the plugin's own collectives.
    pub(super) native: Option<Native>,
}

/// How an executable with the plugin's own collectives is loaded: alike on all its workers.
#[derive(Debug, Clone)]
pub(super) struct Native {
    /// The plugin's.
    pub(super) options: Bytes,
    /// The plugin's ids of all its devices, in logical order.
    pub(super) devices: Vec<i32>,
}

impl Artifact {
    /// Hashes the bytes.
    pub(crate) fn new(bytes: Bytes) -> Artifact {
        let digest = Sha256::digest(&bytes).into();
        Artifact {
            bytes,
            digest,
            native: None,
        }
    }
}

impl Source {
    /// How it is loaded.
    pub(super) fn how(&self) -> (Reach, &Bytes) {
        (self.reach, &self.options)
    }

    pub(super) fn job(&self) -> Job {
        Job {
            program: self.program.clone(),
            options: self.options.clone(),
            num_replicas: self.shape.0,
            num_partitions: self.shape.1,
            spanning: self.reach == Reach::Hooked,
            ..Job::default()
        }
    }
}

/// An executable on this worker's devices. Sessions share it when program, options and devices are equal.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) executable: LoadedExecutable,
    pub(crate) info: ExecutableInfo,
    /// The program's text, where it was kept.
    pub(super) kept: Option<Kept>,
    /// What it was made from, for the program's text. Unknown of one that another worker has given, until this one is asked to
    /// compile the same.
    pub(super) source: OnceLock<Source>,
    pub(super) digest: Digest,
    /// Of a program over several workers, for the others.
    pub(crate) artifact: Option<Artifact>,
    /// The program's name, which its results carry.
    pub(crate) name: Arc<str>,
    /// Local ordinals of its devices, in logical order; none for one that is loaded for any device.
    pub(crate) ordinals: Arc<[usize]>,
    /// Which results lie in their device's default memory.
    accounted: Vec<bool>,
    /// What each result takes, from the first execution.
    sizes: OnceLock<Sizes>,
    counters: Arc<Counters>,
}

/// What the results of a program take on a device.
#[derive(Debug)]
struct Sizes {
    each: Vec<u64>,
    /// In the default memory.
    sum: u64,
}

impl Loaded {
    #[expect(clippy::too_many_arguments, reason = "each is a part of its own")]
    pub(super) fn new(
        executable: LoadedExecutable,
        info: ExecutableInfo,
        kept: Option<Kept>,
        source: Option<Source>,
        digest: Digest,
        artifact: Option<Artifact>,
        client: &Client,
        counters: &Arc<Counters>,
    ) -> Loaded {
        counters::add(&counters.executables, 1);
        let default_memory = make::default_memory_kind(client);
        let accounted = info
            .results
            .iter()
            .map(|result| result.memory_kind.is_empty() || result.memory_kind == default_memory)
            .collect();
        Loaded {
            name: info.name.as_str().into(),
            accounted,
            ordinals: if artifact.is_some() {
                Arc::new([])
            } else {
                ordinals(client, executable.device_ids())
            },
            artifact,
            executable,
            info,
            kept,
            source: source.map_or_else(OnceLock::new, OnceLock::from),
            digest,
            sizes: OnceLock::new(),
            counters: Arc::clone(counters),
        }
    }

    /// Parameters that an execution takes over, but for those that its caller keeps.
    pub(crate) fn donated<'a>(&'a self, kept: &'a [i32]) -> impl Iterator<Item = usize> + 'a {
        self.info
            .donated_parameters
            .iter()
            .filter(|&&parameter| {
                !kept
                    .iter()
                    .any(|&kept| u32::try_from(kept) == Ok(parameter))
            })
            .filter_map(|&parameter| usize::try_from(parameter).ok())
    }

    /// Bytes of a device's default memory that the results take: what the compiler says, until an execution has shown it.
    pub(crate) fn results_need(&self) -> u64 {
        match (self.sizes.get(), &self.info.memory_stats) {
            (Some(sizes), _) => sizes.sum,
            (None, Some(stats)) => u64::try_from(stats.output_size_in_bytes).unwrap_or(0),
            (None, None) => 0,
        }
    }

    /// Bytes of a device's default memory that an execution needs while it runs, beside arguments and results.
    pub(crate) fn temporaries_need(&self) -> u64 {
        let stats = self.info.memory_stats.as_ref();
        stats.map_or(0, |stats| {
            u64::try_from(stats.temp_size_in_bytes).unwrap_or(0)
        })
    }

    /// Bytes that each result takes on a device. Shapes are static, so the first execution's buffers say it for all.
    pub(crate) fn result_bytes(&self, outputs: &[Vec<Buffer>]) -> &[u64] {
        let sizes = self.sizes.get_or_init(|| {
            // A device that did not start has none.
            let first = outputs.iter().find(|buffers| !buffers.is_empty());
            let first = first.map(Vec::as_slice).unwrap_or_default();
            let each: Vec<u64> = first
                .iter()
                .map(|buffer| buffer.on_device_bytes().unwrap_or_default())
                .collect();
            let accounted = each.iter().zip(&self.accounted);
            let sum = accounted
                .filter(|(_, accounted)| **accounted)
                .map(|(bytes, _)| *bytes)
                .sum();
            Sizes { each, sum }
        });
        &sizes.each
    }

    /// Whether a result lies in its device's default memory.
    pub(crate) fn is_accounted(&self, result: usize) -> bool {
        self.accounted.get(result).copied().unwrap_or(true)
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        counters::sub(&self.counters.executables, 1);
    }
}

/// The places of the plugin's ids among the devices.
fn ordinals(client: &Client, ids: &[i32]) -> Arc<[usize]> {
    let place = |id: &i32| {
        client
            .devices()
            .iter()
            .position(|device| device.id() == *id)
    };
    ids.iter().filter_map(place).collect()
}
