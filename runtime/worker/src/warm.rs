//! Fills the compile cache without a client: a worker's compiler without the worker around it.

use std::{
    collections::HashMap,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use waystation_cache::{Cache, Counts, Origin};
use waystation_pjrt::OptionValue;
use waystation_proto::waystation::recording::Recording;

use crate::{
    child::Compilers,
    compiler::{Compiler, Request},
    config::CompileChild,
    counters::Counters,
    error::Error,
    hlo::Hlo,
    plugin::{Opened, Spec},
    serve::{identity, open},
    wide::Wide,
};

/// How long a program that was compiled waits to be written before the next one is taken.
const PUBLISH: Duration = Duration::from_secs(900);

/// What a [`Warmer`] is told. All of it as a worker's, whose keys its own have to be.
#[derive(Debug)]
pub struct WarmerConfig {
    /// The PJRT plugin's shared library.
    pub plugin: PathBuf,
    /// Options for the plugin's client.
    pub plugin_options: Vec<(String, OptionValue)>,
    /// LAPACK library for the linear algebra of CPU plugins.
    pub lapack: Option<PathBuf>,
    /// Where compiled programs are kept.
    pub cache: waystation_cache::Config,
    /// The variables of the process's environment.
    pub environment: Vec<(String, String)>,
    /// How to start a process that compiles in this one's place.
    pub compile_child: Option<CompileChild>,
    /// Programs compiled at the same time.
    pub compiles: usize,
}

/// See the module.
pub struct Warmer {
    compiler: Arc<Compiler>,
    devices: usize,
    platform: String,
}

impl std::fmt::Debug for Warmer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Warmer").finish_non_exhaustive()
    }
}

/// A program that the cache holds.
#[derive(Debug)]
pub struct Warmed {
    /// The entry's key.
    pub key: String,
    /// The module's name.
    pub name: String,
    /// Where the entry came from: compiled just now, or found.
    pub origin: Origin,
    /// How long it took.
    pub took: Duration,
}

impl Warmer {
    /// Loads the plugin and opens the cache.
    ///
    /// # Errors
    /// When the plugin or its client cannot be used.
    pub async fn open(config: WarmerConfig) -> Result<Warmer, Error> {
        let spec = Spec {
            path: config.plugin,
            options: config.plugin_options,
            lapack: config.lapack,
        };
        let opened = tokio::task::spawn_blocking(move || {
            let opened = open(spec, &config.environment)?;
            Ok((opened, config.environment))
        })
        .await;
        let opened: Result<_, Error> = opened.map_err(|error| Error::Dispatch {
            what: format!("lost the plugin while it was loaded: {error}"),
        })?;
        let ((opened, digest, spec), environment) = opened?;
        let counters = Arc::new(Counters::default());
        let compilers = Compilers::new(config.compile_child, &spec, &opened, &counters);
        let Opened {
            client, targets, ..
        } = opened;
        let identity = identity(&client, &digest, targets, environment);
        // Nothing is dumped, so the folder's name is of no matter.
        let hlo = Hlo::new(config.cache.keep_hlo_text, "warm".to_owned());
        let wide = Wide::new(Arc::clone(client.plugin()), &spec.options);
        let devices = client.devices().len();
        let platform = format!("{} {}", client.platform_name(), client.platform_version());
        let compiler = Compiler::new(
            client,
            compilers,
            Cache::open(config.cache),
            identity,
            hlo,
            counters,
            config.compiles,
            wide,
        );
        Ok(Warmer {
            compiler: Arc::new(compiler),
            devices,
            platform,
        })
    }

    /// What the plugin says it is.
    pub fn platform(&self) -> &str {
        &self.platform
    }

    /// Has the cache hold what a client has asked for, and waits until it is written.
    ///
    /// # Errors
    /// Why the program cannot be compiled or kept.
    pub async fn warm(&self, recording: Recording) -> Result<Warmed, String> {
        let Recording {
            program,
            compile_options,
            device_ids,
            device_ordinals,
            xla_flags,
            workers,
        } = recording;
        if let Some(last) = workers.iter().max() {
            return Err(format!(
                "it spans {} workers; such programs are compiled where they run, and are not warmed",
                u64::from(*last) + 1
            ));
        }
        let missing = device_ordinals
            .iter()
            .find(|&&ordinal| usize::try_from(ordinal).is_ok_and(|at| at >= self.devices));
        if let Some(&missing) = missing {
            return Err(format!(
                "it is for device {missing} of a worker, and here are {}: give --devices as many as a worker has",
                self.devices
            ));
        }
        if device_ids.len() != device_ordinals.len() {
            return Err("the recording contradicts itself about its devices".to_owned());
        }
        let ordinals: HashMap<i32, u32> = device_ids.iter().copied().zip(device_ordinals).collect();
        let begun = Instant::now();
        let request = Request {
            program,
            options: compile_options,
            device_ids,
            ordinals: Arc::new(ordinals),
            xla_flags,
            spanning: false,
        };
        let filled = self.compiler.fill(request).await;
        let (key, entry, origin) = filled.map_err(|status| status.message)?;
        let took = begun.elapsed();
        if origin == Origin::Compiled {
            // Without a client nothing slows the compiles down, and the queue drops what it has no room for.
            self.compiler.cache().flush(PUBLISH).await;
        }
        Ok(Warmed {
            key: key.to_string(),
            name: entry.info.name.clone(),
            origin,
            took,
        })
    }

    /// The cache's counters.
    pub fn counts(&self) -> Counts {
        self.compiler.cache().counters()
    }

    /// Ends the compile child, and waits for what is on its way to the bucket, at most so long.
    pub async fn finish(&self, deadline: Duration) {
        self.compiler.stop();
        self.compiler.finish(deadline).await;
    }
}
