//! From a client's program to an executable on this worker's devices: the cache, then the plugin. Runs beside the dispatch
//! thread; compiles and loads take their turns on threads that may block.

mod loaded;
mod optimized;
mod probe;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore};
use waystation_cache::{Cache, Entry, Key, KeyInputs, Origin, Treatment};
use waystation_pjrt::{Client, LoadedExecutable};
use waystation_proto::tensorflow::{StatusProto, error::Code};

pub(crate) use self::loaded::Loaded;
use self::loaded::Source;
use crate::{
    child::{Compilers, Digest},
    counters::{self, Counters},
    hlo::{Hlo, Kept},
    make,
    program::{self, Defaults, Prepared},
    status, topology,
};

/// Entries of one program that are loaded until one does: as many as the cache has room for, what is compiled when none
/// does, and one that another request has put in between.
const LOADS: usize = 6;

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
    compilers: Option<Compilers>,
    cache: Cache,
    identity: Identity,
    hlo: Hlo,
    counters: Arc<Counters>,
    compiles: Arc<Semaphore>,
    loads: Arc<Semaphore>,
    loaded: Mutex<HashMap<Name, Weak<Loaded>>>,
    defaults: OnceCell<Defaults>,
}

impl Compiler {
    pub(crate) fn new(
        client: Client,
        compilers: Option<Compilers>,
        cache: Cache,
        identity: Identity,
        hlo: Hlo,
        counters: Arc<Counters>,
        compiles: usize,
    ) -> Compiler {
        Compiler {
            client,
            compilers,
            cache,
            identity,
            hlo,
            counters,
            compiles: Arc::new(Semaphore::new(compiles.max(1))),
            loads: Arc::new(Semaphore::new(compiles.max(1))),
            loaded: Mutex::default(),
            defaults: OnceCell::new(),
        }
    }

    pub(crate) fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Waits for what is on its way to buckets, at most so long each.
    pub(crate) async fn finish(&self, deadline: Duration) {
        tokio::join!(self.cache.shutdown(deadline), self.hlo.finish(deadline));
    }

    /// Gets ready what the first compile needs.
    pub(crate) async fn warm(&self) {
        if let Some(compilers) = &self.compilers {
            compilers.warm().await;
        }
    }

    /// Starts no more processes, and ends those that are idle.
    pub(crate) fn stop(&self) {
        if let Some(compilers) = &self.compilers {
            compilers.stop();
        }
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
        let (name, source) = self
            .prepare(program, options, device_ids, ordinals, xla_flags)
            .await?;
        let (dump, dumped) = (source.dump.clone(), Arc::clone(&source.dumped));
        let loaded = self.find(name, source).await?;
        if let Some(dump) = dump.filter(|_| !dumped.load(Relaxed)) {
            let (this, hit) = (Arc::clone(self), Arc::clone(&loaded));
            // The client need not wait for it.
            tokio::task::spawn_blocking(move || {
                let kept = hit.kept.as_ref();
                this.hlo
                    .write_hit(&dump, &hit.info.name, &hit.info.key, kept);
            });
        }
        Ok(loaded)
    }

    /// What a request is for the cache and for the plugin.
    async fn prepare(
        self: &Arc<Self>,
        program: Bytes,
        options: &[u8],
        device_ids: &[i32],
        ordinals: &HashMap<i32, u32>,
        xla_flags: &[String],
    ) -> Result<(Name, Source), StatusProto> {
        let local = |global: i32| {
            let ordinal = usize::try_from(*ordinals.get(&global)?).ok()?;
            Some(self.client.devices().get(ordinal)?.id())
        };
        let prepared = program::prepare(options, device_ids, local, xla_flags)
            .map_err(|error| status::invalid(error.to_string()))?;
        let devices: Vec<i32> = device_ids.iter().filter_map(|&id| local(id)).collect();
        let key = self.key(&program, &prepared, &devices).await?;
        let source = Source {
            program,
            options: prepared.plugin_options.into(),
            shape: (prepared.num_replicas, prepared.num_partitions),
            dump: prepared.dump.map(Arc::new),
            dumped: Arc::default(),
        };
        Ok(((key, devices), source))
    }

    /// Has the cache hold a program's entry, as [`Self::load`] does, and loads nothing. Dumps nothing either.
    pub(crate) async fn fill(
        self: &Arc<Self>,
        program: Bytes,
        options: &[u8],
        device_ids: &[i32],
        ordinals: &HashMap<i32, u32>,
        xla_flags: &[String],
    ) -> Result<(Key, Arc<Entry>, Origin), StatusProto> {
        let ((key, _), source) = self
            .prepare(program, options, device_ids, ordinals, xla_flags)
            .await?;
        if let Treatment::Uncacheable { reason } = key.treatment() {
            return Err(status::unimplemented(format!(
                "the program is never kept: {reason}"
            )));
        }
        let source = Source {
            dump: None,
            ..source
        };
        let compile = || {
            let (this, digest, source) = (Arc::clone(self), *key.digest(), source.clone());
            async move { Ok(this.compile(&digest, &source).await?.1) }
        };
        let (entry, origin) = self.cache.get_or_compile(&key, compile).await?;
        if entry.executable.is_empty() {
            return Err(status::unimplemented(
                "the plugin does not serialize this executable",
            ));
        }
        Ok((key, entry, origin))
    }

    /// The executable of a name: loaded already, from the cache, or compiled.
    async fn find(
        self: &Arc<Self>,
        name: Name,
        source: Source,
    ) -> Result<Arc<Loaded>, StatusProto> {
        if let Some(loaded) = self.share(&name) {
            counters::add(&self.counters.shared_loads, 1);
            return Ok(loaded);
        }
        let fatal = self.cache.admit(&name.0);
        fatal.map_err(|fatal| status::invalid(fatal.to_string()))?;
        let fresh = Arc::new(Mutex::new(None));
        let compile = || {
            let (this, fresh) = (Arc::clone(self), Arc::clone(&fresh));
            let (digest, source) = (*name.0.digest(), source.clone());
            async move {
                let (executable, entry) = this.compile(&digest, &source).await?;
                *fresh.lock().unwrap_or_else(PoisonError::into_inner) = executable;
                Ok::<Entry, StatusProto>(entry)
            }
        };
        for _ in 0..LOADS {
            let (entry, origin) = self.cache.get_or_compile(&name.0, compile).await?;
            let fresh = fresh.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(executable) = fresh {
                return Ok(self.keep(name, executable, &entry, source));
            }
            // Another request for the same program may have loaded it while this one waited.
            if let Some(loaded) = self.share(&name) {
                return Ok(loaded);
            }
            let error = match self.deserialize(&name, &entry, &source.options).await {
                Ok(executable) => {
                    return Ok(self.keep(name, executable, &entry, source));
                }
                Err(error) => error,
            };
            tracing::warn!(
                key = %name.0,
                error = error.message,
                origin = origin.as_str(),
                "a serialized executable does not load"
            );
            // A plugin that cannot load at all says nothing about the entry.
            let unable = error.code == Code::Unimplemented as i32;
            if !unable {
                self.cache.reject(&name.0, &entry);
            }
            if let (Origin::Compiled, Some(compilers)) = (origin, &self.compilers) {
                // A child has compiled it.
                if of_program(&error, self.has_loaded()) {
                    return Err(error);
                }
                compilers.give_up("the plugin does not load what it has serialized");
            }
            if unable {
                break;
            }
        }
        let (executable, entry) = self.compile(name.0.digest(), &source).await?;
        let executable = match executable {
            Some(executable) => executable,
            None => {
                let entry = Arc::new(entry.clone());
                self.deserialize(&name, &entry, &source.options).await?
            }
        };
        Ok(self.keep(name, executable, &entry, source))
    }

    /// Whether anything serialized has been loaded.
    fn has_loaded(&self) -> bool {
        counters::get(&self.counters.load_nanos) > 0
    }

    async fn key(
        self: &Arc<Self>,
        program: &Bytes,
        prepared: &Prepared,
        devices: &[i32],
    ) -> Result<Key, StatusProto> {
        let (this, program, options) = (
            Arc::clone(self),
            program.clone(),
            prepared.key_options.clone(),
        );
        let flags = if prepared.has_flags() {
            prepared.key_flags(Some(self.defaults().await))
        } else {
            Vec::new()
        };
        let mut platform = self.identity.platform.clone();
        platform.extend(topology::of_program(&self.client, devices));
        // Hashes the whole program.
        blocking(move || {
            Key::of(&KeyInputs {
                program: &program,
                options: &options,
                flags: &flags,
                platform: &platform,
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
        entry: &Entry,
        source: Source,
    ) -> Arc<Loaded> {
        let mut info = entry.info.clone();
        info.key = name.0.to_string();
        let digest = *name.0.digest();
        let loaded = Arc::new(Loaded::new(
            executable,
            info,
            entry.text.as_deref().and_then(Kept::read),
            source,
            digest,
            &self.client,
            &self.counters,
        ));
        let mut all = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, loaded| loaded.strong_count() > 0);
        all.insert(name, Arc::downgrade(&loaded));
        loaded
    }

    /// Runs `work` on a thread that may block, when it has its turn. Given up, the work keeps its turn to its end.
    async fn in_turn<T: Send + 'static>(
        self: &Arc<Self>,
        turns: &Arc<Semaphore>,
        work: impl FnOnce(&Compiler) -> Result<T, StatusProto> + Send + 'static,
    ) -> Result<T, StatusProto> {
        let turn = turn(turns).await?;
        let this = Arc::clone(self);
        blocking(move || {
            let _turn = turn;
            work(&this)
        })
        .await?
    }

    /// Compiles: in the child where there is one, which leaves the executable still to be loaded, else here.
    async fn compile(
        self: &Arc<Self>,
        digest: &Digest,
        source: &Source,
    ) -> Result<(Option<LoadedExecutable>, Entry), StatusProto> {
        let program = source.program.clone();
        let oversized = blocking(move || waystation_stablehlo::oversized_array(&program));
        if let Some(dims) = oversized.await? {
            return Err(status::invalid(format!(
                "the program has an array of shape {dims:?}, which has more bytes than 64 bits can count"
            )));
        }
        let dump = source.dump.as_deref();
        let Some(watched) = self.hlo.watch(&source.options, dump) else {
            return self.compile_plainly(digest, source).await;
        };
        let dumping = Source {
            options: watched.options.clone(),
            ..source.clone()
        };
        let compiled = self.compile_plainly(digest, &dumping).await;
        let (executable, entry) = match compiled {
            Err(error) if self.hlo.is_to_blame(&error) => {
                return self.compile_plainly(digest, source).await;
            }
            compiled => compiled?,
        };
        let (this, asked) = (Arc::clone(self), source.dump.clone());
        let collect = move || {
            let kept = this.hlo.collect(&watched, asked.as_deref());
            kept.map(|kept| kept.write())
        };
        let text = blocking(collect).await?;
        source.dumped.store(dump.is_some(), Relaxed);
        Ok((executable, Entry { text, ..entry }))
    }

    async fn compile_plainly(
        self: &Arc<Self>,
        digest: &Digest,
        source: &Source,
    ) -> Result<(Option<LoadedExecutable>, Entry), StatusProto> {
        if let Some(entry) = self.compile_in_child(digest, source).await? {
            return Ok((None, entry));
        }
        let (executable, entry) = self.compile_here(source.clone()).await?;
        Ok((Some(executable), entry))
    }

    /// `None` when there is no child, or the plugin cannot hand over what it has made.
    async fn compile_in_child(
        &self,
        digest: &Digest,
        source: &Source,
    ) -> Result<Option<Entry>, StatusProto> {
        let Some(compilers) = &self.compilers else {
            return Ok(None);
        };
        let _turn = turn(&self.compiles).await?;
        let Some(done) = compilers.compile(digest, source.job()).await? else {
            return Ok(None);
        };
        if let Some(error) = done.not_serialized {
            if of_program(&error, self.has_loaded()) {
                return Err(status::of(
                    Code::Unimplemented,
                    format!(
                        "the program was compiled, but the plugin does not serialize it, as it has to be to come from the \
                         child process that compiles (--compile_in_child=false compiles in the worker): {}",
                        error.message
                    ),
                ));
            }
            compilers.give_up("the plugin does not serialize executables");
            return Ok(None);
        }
        counters::add(&self.counters.compiles, 1);
        counters::add(&self.counters.compile_nanos, done.compile_nanos);
        Ok(Some(Entry {
            info: done.info.unwrap_or_default(),
            executable: done.executable,
            text: None,
            object: None,
        }))
    }

    async fn compile_here(
        self: &Arc<Self>,
        source: Source,
    ) -> Result<(LoadedExecutable, Entry), StatusProto> {
        let made = self.in_turn(&self.compiles, move |this| {
            make::make(&this.client, &source.program, &source.options, source.shape)
        });
        let made = made.await?;
        counters::add(&self.counters.compiles, 1);
        counters::add_time(&self.counters.compile_nanos, made.took);
        // A plugin that does not serialize has entries without an executable, which the cache does not keep.
        let serialized = made.serialized.unwrap_or_else(|error| {
            tracing::debug!(
                error = error.message,
                "the plugin does not serialize this executable; it is not cached"
            );
            Vec::new()
        });
        let entry = Entry {
            info: made.info,
            executable: Bytes::from(serialized),
            text: None,
            object: None,
        };
        Ok((made.executable, entry))
    }

    async fn deserialize(
        self: &Arc<Self>,
        name: &Name,
        entry: &Arc<Entry>,
        options: &[u8],
    ) -> Result<LoadedExecutable, StatusProto> {
        let (entry, options) = (Arc::clone(entry), options.to_vec());
        let (key, devices) = name.clone();
        self.in_turn(&self.loads, move |this| {
            // Should the plugin end this process, the next one knows of what.
            let loading = this.cache.loading(&key, &entry);
            let loading = loading.map_err(|fatal| status::invalid(fatal.to_string()))?;
            let begun = Instant::now();
            let executable = this
                .client
                .deserialize(&entry.executable, Some(&options))
                .map_err(|error| status::of_plugin(&error, 0))?;
            drop(loading);
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
}

/// Whether a plugin's refusal to serialize or to load speaks of one program, or a client's options for it, and not of the
/// plugin: another reason than UNIMPLEMENTED, or others have been loaded. Such a program fails. To compile it in this
/// process, which it may end, is nothing that a client can bring about.
fn of_program(error: &StatusProto, others_loaded: bool) -> bool {
    others_loaded || error.code != Code::Unimplemented as i32
}

async fn turn(turns: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, StatusProto> {
    let turn = Arc::clone(turns).acquire_owned().await;
    turn.map_err(|_| status::of(Code::Cancelled, "the worker is going down"))
}

/// Runs `work` on a thread that may block.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, StatusProto> {
    tokio::task::spawn_blocking(work).await.map_err(|error| {
        status::of(
            Code::Unknown,
            format!("the worker broke off a compile: {error}"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_plugin_that_has_handed_over_nothing_is_unable_to() {
        let unimplemented = status::unimplemented("no serialization");
        assert!(!of_program(&unimplemented, false));
        assert!(of_program(&unimplemented, true));
        let broken = status::of(Code::Unknown, "this one is too large");
        assert!(of_program(&broken, false) && of_program(&broken, true));
    }
}
