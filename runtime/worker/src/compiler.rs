//! From a client's program to an executable on this worker's devices: the cache, then the plugin. Runs beside the dispatch
//! thread; compiles and loads take their turns on threads that may block.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, OnceLock, PoisonError, Weak},
    time::Instant,
};

use bytes::Bytes;
use tokio::sync::Semaphore;
use waystation_cache::{Cache, Entry, Key, KeyInputs, Treatment};
use waystation_pjrt::{Buffer, Client, LoadedExecutable, MemoryStats};
use waystation_proto::{
    tensorflow::{StatusProto, error::Code},
    waystation::ExecutableInfo,
    xla::CompiledMemoryStatsProto,
};

use crate::{
    counters::{self, Counters},
    program::{self, PluginFacts, Prepared},
    status, text,
};

/// StableHLO portable artifacts go to the plugin under this name.
const FORMAT: &str = "mlir";

/// An executable on this worker's devices. Sessions share it when program, options and devices are equal.
#[derive(Debug)]
pub(crate) struct Loaded {
    pub(crate) executable: LoadedExecutable,
    pub(crate) info: ExecutableInfo,
    /// What it was made from, for the program's text.
    program: Bytes,
    options: Vec<u8>,
    /// The program's name, which its results carry.
    pub(crate) name: Arc<str>,
    /// Local ordinals of its devices, in logical order.
    pub(crate) ordinals: Vec<usize>,
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
    fn new(
        executable: LoadedExecutable,
        info: ExecutableInfo,
        program: Bytes,
        options: Vec<u8>,
        client: &Client,
        counters: &Arc<Counters>,
    ) -> Loaded {
        counters::add(&counters.executables, 1);
        let default_memory = default_memory_kind(client);
        let accounted = info
            .results
            .iter()
            .map(|result| result.memory_kind.is_empty() || result.memory_kind == default_memory)
            .collect();
        Loaded {
            name: info.name.as_str().into(),
            accounted,
            ordinals: ordinals(client, executable.device_ids()),
            executable,
            info,
            program,
            options,
            sizes: OnceLock::new(),
            counters: Arc::clone(counters),
        }
    }

    /// Devices it runs on.
    pub(crate) fn devices(&self) -> usize {
        self.executable.device_ids().len()
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
            let first = outputs.first().map(Vec::as_slice).unwrap_or_default();
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

/// What this process is to the cache key, besides program and options.
#[derive(Debug, Default)]
pub(crate) struct Identity {
    pub(crate) platform: Vec<(String, String)>,
    pub(crate) environment: Vec<(String, String)>,
}

/// A program, and the plugin's ids of the devices it is loaded on, in logical order.
type Name = (Key, Vec<i32>);

/// See the module.
pub(crate) struct Compiler {
    client: Client,
    cache: Cache,
    identity: Identity,
    counters: Arc<Counters>,
    compiles: Semaphore,
    loads: Semaphore,
    loaded: Mutex<HashMap<Name, Weak<Loaded>>>,
}

impl Compiler {
    pub(crate) fn new(
        client: Client,
        cache: Cache,
        identity: Identity,
        counters: Arc<Counters>,
        compiles: usize,
    ) -> Compiler {
        Compiler {
            client,
            cache,
            identity,
            counters,
            compiles: Semaphore::new(compiles.max(1)),
            loads: Semaphore::new(compiles.max(1)),
            loaded: Mutex::default(),
        }
    }

    pub(crate) fn cache(&self) -> &Cache {
        &self.cache
    }

    /// An executable of `program` on the devices with the global ids `device_ids`, which `ordinals` turns into local ones.
    pub(crate) async fn load(
        self: &Arc<Self>,
        program: Bytes,
        options: &[u8],
        device_ids: &[i32],
        ordinals: &HashMap<i32, u32>,
        xla_flags: &[String],
    ) -> Result<Arc<Loaded>, StatusProto> {
        let local = |global: i32| {
            let ordinal = usize::try_from(*ordinals.get(&global)?).ok()?;
            Some(self.client.devices().get(ordinal)?.id())
        };
        let prepared = program::prepare(options, device_ids, local, xla_flags)
            .map_err(|error| status::invalid(error.to_string()))?;
        let devices: Vec<i32> = device_ids.iter().filter_map(|&id| local(id)).collect();
        let shape = (prepared.num_replicas, prepared.num_partitions);
        let key = self.key(&program, &prepared).await?;
        let name = (key, devices);
        if let Some(loaded) = self.share(&name) {
            counters::add(&self.counters.shared_loads, 1);
            return Ok(loaded);
        }
        let fresh = Arc::new(Mutex::new(None));
        let (entry, origin) = self
            .cache
            .get_or_compile(&name.0, || {
                let (this, fresh) = (Arc::clone(self), Arc::clone(&fresh));
                let (program, options) = (program.clone(), prepared.plugin_options.clone());
                async move {
                    let compile = move |this: &Compiler| this.compile(&program, &options, shape);
                    let (executable, entry) = this.in_turn(&this.compiles, compile).await?;
                    *fresh.lock().unwrap_or_else(PoisonError::into_inner) = Some(executable);
                    Ok::<Entry, StatusProto>(entry)
                }
            })
            .await?;
        let fresh = fresh.lock().unwrap_or_else(PoisonError::into_inner).take();
        let options = prepared.plugin_options;
        if let Some(executable) = fresh {
            return Ok(self.keep(name, executable, entry.info.clone(), program, options));
        }
        // Another request for the same program may have loaded it while this one waited.
        if let Some(loaded) = self.share(&name) {
            return Ok(loaded);
        }
        let error = match self.deserialize(&entry, &options, &name.1).await {
            Ok(executable) => {
                return Ok(self.keep(name, executable, entry.info.clone(), program, options));
            }
            Err(error) => error,
        };
        tracing::warn!(
            key = %name.0,
            error = error.message,
            origin = origin.as_str(),
            "a cached executable does not load; compiling"
        );
        // A plugin that cannot load at all says nothing about the entry.
        if error.code != Code::Unimplemented as i32 {
            self.cache.reject(&name.0);
        }
        let (source, with) = (program.clone(), options.clone());
        let (executable, entry) = self
            .in_turn(&self.compiles, move |this| {
                this.compile(&source, &with, shape)
            })
            .await?;
        Ok(self.keep(name, executable, entry.info, program, options))
    }

    async fn key(
        self: &Arc<Self>,
        program: &Bytes,
        prepared: &Prepared,
    ) -> Result<Key, StatusProto> {
        let (this, program, options) = (
            Arc::clone(self),
            program.clone(),
            prepared.key_options.clone(),
        );
        // Hashes the whole program.
        blocking(move || {
            Key::of(&KeyInputs {
                program: &program,
                options: &options,
                platform: &this.identity.platform,
                environment: &this.identity.environment,
            })
        })
        .await
    }

    fn share(&self, name: &Name) -> Option<Arc<Loaded>> {
        if matches!(name.0.treatment(), Treatment::Uncacheable { .. }) {
            return None;
        }
        self.loaded
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(name)?
            .upgrade()
    }

    fn keep(
        &self,
        name: Name,
        executable: LoadedExecutable,
        mut info: ExecutableInfo,
        program: Bytes,
        options: Vec<u8>,
    ) -> Arc<Loaded> {
        info.key = name.0.to_string();
        let loaded = Arc::new(Loaded::new(
            executable,
            info,
            program,
            options,
            &self.client,
            &self.counters,
        ));
        let mut all = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, loaded| loaded.strong_count() > 0);
        all.insert(name, Arc::downgrade(&loaded));
        loaded
    }

    /// Runs `work` on a thread that may block, when it has its turn.
    async fn in_turn<T: Send + 'static>(
        self: &Arc<Self>,
        turns: &Semaphore,
        work: impl FnOnce(&Compiler) -> Result<T, StatusProto> + Send + 'static,
    ) -> Result<T, StatusProto> {
        let _turn = turns
            .acquire()
            .await
            .map_err(|_| status::of(Code::Cancelled, "the worker is going down"))?;
        let this = Arc::clone(self);
        blocking(move || work(&this)).await?
    }

    fn compile(
        &self,
        program: &[u8],
        options: &[u8],
        shape: (u32, u32),
    ) -> Result<(LoadedExecutable, Entry), StatusProto> {
        if let Some(dims) = waystation_stablehlo::oversized_array(program) {
            return Err(status::invalid(format!(
                "the program has an array of shape {dims:?}, which has more bytes than 64 bits can count"
            )));
        }
        let begun = Instant::now();
        let failed = |error: waystation_pjrt::Error| status::of_plugin(&error, 0);
        let executable = self
            .client
            .compile(program, FORMAT, options)
            .map_err(failed)?;
        counters::add(&self.counters.compiles, 1);
        counters::add_time(&self.counters.compile_nanos, begun.elapsed());
        let optimized = executable.optimized_program().map_err(failed)?;
        let info = program::describe(
            program,
            &optimized,
            &facts(&self.client, &executable, shape),
        )
        .map_err(|error| {
            status::of(
                Code::FailedPrecondition,
                format!("the compiled program cannot be described: {error}"),
            )
        })?;
        // A plugin that does not serialize has entries without an executable, which the cache does not keep.
        let serialized = executable.serialize().unwrap_or_else(|error| {
            tracing::debug!(%error, "the plugin does not serialize this executable; it is not cached");
            Vec::new()
        });
        let entry = Entry {
            info,
            executable: Bytes::from(serialized),
            text: None,
        };
        Ok((executable, entry))
    }

    async fn deserialize(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        options: &[u8],
        devices: &[i32],
    ) -> Result<LoadedExecutable, StatusProto> {
        let (entry, options, devices) = (Arc::clone(entry), options.to_vec(), devices.to_vec());
        self.in_turn(&self.loads, move |this| {
            let begun = Instant::now();
            let executable = this
                .client
                .deserialize(&entry.executable, Some(&options))
                .map_err(|error| status::of_plugin(&error, 0))?;
            counters::add_time(&this.counters.load_nanos, begun.elapsed());
            // What follows trusts these two, and a plugin might take the entry and pass over the options.
            if executable.device_ids() != devices {
                return Err(status::unimplemented(format!(
                    "the plugin loads for devices {:?} where {devices:?} are asked for",
                    executable.device_ids()
                )));
            }
            if executable.num_outputs() != entry.info.results.len() {
                return Err(status::of(
                    Code::FailedPrecondition,
                    format!(
                        "the entry describes {} results and holds {}",
                        entry.info.results.len(),
                        executable.num_outputs()
                    ),
                ));
            }
            Ok(executable)
        })
        .await
    }

    /// XLA's text of the optimized program. Blocks: the program is compiled once more for it.
    pub(crate) fn text(&self, loaded: &Loaded) -> Result<String, StatusProto> {
        text::optimized(&self.client, &loaded.program, FORMAT, &loaded.options)
    }
}

/// The places of the plugin's ids among the devices.
fn ordinals(client: &Client, ids: &[i32]) -> Vec<usize> {
    let place = |id: &i32| {
        client
            .devices()
            .iter()
            .position(|device| device.id() == *id)
    };
    ids.iter().filter_map(place).collect()
}

/// The kind of the devices' default memory; empty where the plugin names none.
fn default_memory_kind(client: &Client) -> &str {
    let device = client.devices().first();
    device
        .and_then(|device| device.memories().get(device.default_memory()))
        .map_or("", |memory| memory.kind())
}

/// What the plugin says about an executable; what it does not say stays empty.
fn facts(client: &Client, executable: &LoadedExecutable, shape: (u32, u32)) -> PluginFacts {
    PluginFacts {
        name: executable.name().to_owned(),
        fingerprint: executable.fingerprint().unwrap_or_default(),
        num_replicas: shape.0,
        num_partitions: shape.1,
        default_memory_kind: default_memory_kind(client).to_owned(),
        result_memory_kinds: executable.output_memory_kinds().unwrap_or_default(),
        memory_stats: executable
            .memory_stats()
            .ok()
            .map(|stats| memory_stats(&stats)),
        generated_code_bytes: executable.generated_code_bytes().unwrap_or(-1),
    }
}

fn memory_stats(stats: &MemoryStats) -> CompiledMemoryStatsProto {
    CompiledMemoryStatsProto {
        generated_code_size_in_bytes: stats.generated_code_size_in_bytes,
        argument_size_in_bytes: stats.argument_size_in_bytes,
        output_size_in_bytes: stats.output_size_in_bytes,
        alias_size_in_bytes: stats.alias_size_in_bytes,
        temp_size_in_bytes: stats.temp_size_in_bytes,
        peak_memory_in_bytes: stats.peak_memory_in_bytes,
        total_size_in_bytes: stats.total_size_in_bytes,
        total_allocation_bytes: stats.total_allocation_bytes,
        indefinite_allocations: stats.indefinite_allocations,
        peak_unpadded_heap_bytes: stats.peak_unpadded_heap_bytes,
        host_generated_code_size_in_bytes: stats.host_generated_code_size_in_bytes,
        host_argument_size_in_bytes: stats.host_argument_size_in_bytes,
        host_output_size_in_bytes: stats.host_output_size_in_bytes,
        host_alias_size_in_bytes: stats.host_alias_size_in_bytes,
        host_temp_size_in_bytes: stats.host_temp_size_in_bytes,
        serialized_buffer_assignment: Vec::new(),
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, StatusProto> {
    tokio::task::spawn_blocking(work).await.map_err(|error| {
        status::of(
            Code::Unknown,
            format!("the worker broke off a compile: {error}"),
        )
    })
}
