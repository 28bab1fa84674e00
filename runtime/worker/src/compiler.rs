//! From a client's program to an executable on this worker's devices: the cache, then the plugin. Runs beside the dispatch
//! thread; compiles and loads take their turns on threads that may block.

mod compile;
mod loaded;
mod loading;
mod optimized;
mod probe;
mod spanning;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, Weak, atomic::Ordering::Relaxed},
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore};
use waystation_cache::{Cache, Entry, Key, KeyInputs, Origin, Treatment};
use waystation_pjrt::Client;
use waystation_proto::tensorflow::{StatusProto, error::Code};

use self::{
    compile::of_program,
    loaded::{Reach, Source},
};
pub(crate) use self::{
    loaded::{Artifact, Loaded},
    spanning::Elsewhere,
};
use crate::{
    child::Compilers,
    counters::{self, Counters},
    group::Group,
    hlo::Hlo,
    program::{self, Defaults, Prepared},
    status, topology,
    wide::Wide,
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

/// What a client asks to be compiled.
pub(crate) struct Request {
    pub(crate) program: Bytes,
    /// The client's, with global device ids.
    pub(crate) options: Bytes,
    /// Global ids of the devices, in logical order.
    pub(crate) device_ids: Vec<i32>,
    /// Turns global ids into this worker's own.
    pub(crate) ordinals: Arc<HashMap<i32, u32>>,
    /// The proxy's.
    pub(crate) xla_flags: Vec<String>,
    /// Whether other workers have some of the devices.
    pub(crate) spanning: bool,
}

/// A program, and the plugin's ids of the devices it is loaded on, in logical order: also those of other workers where the plugin
/// has collectives of its own. One over several workers with ours is loaded for any device, and names none.
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
    wide: Wide,
    /// Whom the plugin joins to one client.
    group: Option<Arc<Group>>,
}

impl Compiler {
    #[expect(clippy::too_many_arguments, reason = "each is a part of its own")]
    pub(crate) fn new(
        client: Client,
        compilers: Option<Compilers>,
        cache: Cache,
        identity: Identity,
        hlo: Hlo,
        counters: Arc<Counters>,
        compiles: usize,
        wide: Wide,
        group: Option<Arc<Group>>,
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
            wide,
            group,
        }
    }

    pub(crate) fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Programs whose HLO was too large to be kept.
    pub(crate) fn texts_left_out(&self) -> u64 {
        self.hlo.left_out()
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

    /// An executable on the devices that are asked for.
    pub(crate) async fn load(
        self: &Arc<Self>,
        request: Request,
    ) -> Result<Arc<Loaded>, StatusProto> {
        let (name, source) = self.prepare(request).await?;
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
    async fn prepare(self: &Arc<Self>, request: Request) -> Result<(Name, Source), StatusProto> {
        let (options, ids) = (&request.options, &request.device_ids);
        let native = match &self.group {
            Some(group) if request.spanning => Some(spanning::native(group, ids).await?),
            _ => None,
        };
        let reach = match (request.spanning, &native) {
            (false, _) => Reach::Local,
            (true, None) => Reach::Hooked,
            (true, Some(_)) => Reach::Native,
        };
        let places: HashMap<i32, i32> = match (reach, &native) {
            (Reach::Local, _) => HashMap::new(),
            (_, Some(native)) => {
                let known = native.iter().map(|known| known.plugin_id);
                ids.iter().copied().zip(known).collect()
            }
            // A wide client's devices are numbered from zero.
            (_, None) => ids.iter().copied().zip(0..).collect(),
        };
        let local = |global: i32| {
            if reach != Reach::Local {
                return places.get(&global).copied();
            }
            let ordinal = usize::try_from(*request.ordinals.get(&global)?).ok()?;
            Some(self.client.devices().get(ordinal)?.id())
        };
        let mut xla_flags = request.xla_flags;
        if reach == Reach::Native {
            // Those who were asked win over it.
            xla_flags.splice(0..0, spanning::native_flags(self.client.platform_name()));
        }
        let prepared = program::prepare(options, ids, local, &xla_flags)
            .map_err(|error| status::invalid(error.to_string()))?;
        let devices: Vec<i32> = match reach {
            Reach::Hooked => Vec::new(),
            Reach::Local | Reach::Native => ids.iter().filter_map(|&id| local(id)).collect(),
        };
        let facts = match (reach, &native) {
            (Reach::Local, _) => Vec::new(),
            (_, None) => {
                let shape = (prepared.num_replicas, prepared.num_partitions);
                spanning::facts(shape).into()
            }
            (_, Some(native)) => vec![spanning::native_fact(native)],
        };
        let key = self
            .key(&request.program, &prepared, &devices, facts)
            .await?;
        let source = Source {
            program: request.program,
            options: prepared.plugin_options.into(),
            shape: (prepared.num_replicas, prepared.num_partitions),
            dump: prepared.dump.map(Arc::new),
            dumped: Arc::default(),
            reach,
        };
        Ok(((key, devices), source))
    }

    /// Has the cache hold a program's entry, as [`Self::load`] does, and loads nothing. Dumps nothing either.
    pub(crate) async fn fill(
        self: &Arc<Self>,
        request: Request,
    ) -> Result<(Key, Arc<Entry>, Origin), StatusProto> {
        let ((key, _), source) = self.prepare(request).await?;
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
        if let Some(loaded) = self.share_compiled(&name, &source) {
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
                let artifact = self
                    .fresh_artifact(&name, &executable, &entry, &source)
                    .await?;
                return Ok(self.keep(name, executable, &entry, Some(source), artifact));
            }
            // Another request for the same program may have loaded it while this one waited.
            if let Some(loaded) = self.share_compiled(&name, &source) {
                return Ok(loaded);
            }
            let error = match self.deserialize(&name, &entry, source.how()).await {
                Ok((executable, artifact)) => {
                    return Ok(self.keep(name, executable, &entry, Some(source), artifact));
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
                if source.reach == Reach::Hooked {
                    // There is no other way to run it.
                    return Err(error);
                }
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
        let entry = Arc::new(entry);
        let (executable, artifact) = match executable {
            Some(executable) => {
                let artifact = self
                    .fresh_artifact(&name, &executable, &entry, &source)
                    .await?;
                (executable, artifact)
            }
            None => self.deserialize(&name, &entry, source.how()).await?,
        };
        Ok(self.keep(name, executable, &entry, Some(source), artifact))
    }

    async fn key(
        self: &Arc<Self>,
        program: &Bytes,
        prepared: &Prepared,
        devices: &[i32],
        facts: Vec<(String, String)>,
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
        platform.extend(facts);
        // Hashes the whole program.
        blocking(move || {
            let begun = Instant::now();
            let key = Key::of(&KeyInputs {
                program: &program,
                options: &options,
                flags: &flags,
                platform: &platform,
                environment: &this.identity.environment,
            });
            counters::add_time(&this.counters.key_nanos, begun.elapsed());
            key
        })
        .await
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
