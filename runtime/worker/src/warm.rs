//! Fills the compile cache without a client: a worker's compiler without the worker around it.

mod place;

use std::{
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
    /// Workers of the cluster that is to run the programs, each with as many devices as this plugin makes here. `None`: each
    /// program is spread as it was when it was recorded.
    pub workers: Option<u32>,
}

/// See the module.
pub struct Warmer {
    compiler: Arc<Compiler>,
    devices: usize,
    workers: Option<u32>,
    platform: String,
    /// Why programs over several workers cannot be compiled, if so.
    cannot_span: Option<String>,
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
            group: None,
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
            client,
            targets,
            collectives,
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
            None,
        );
        Ok(Warmer {
            compiler: Arc::new(compiler),
            devices,
            workers: config.workers,
            platform,
            cannot_span: collectives.cannot().map(str::to_owned),
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
        let ordinals = place::ordinals(&recording, self.workers, self.devices)?;
        let spanning = ordinals.is_none();
        if let (true, Some(why)) = (spanning, &self.cannot_span) {
            return Err(format!("it spans workers: {why}"));
        }
        let Recording {
            program,
            compile_options,
            device_ids,
            xla_flags,
            ..
        } = recording;
        let begun = Instant::now();
        let request = Request {
            program,
            options: compile_options,
            device_ids,
            ordinals: Arc::new(ordinals.unwrap_or_default()),
            xla_flags,
            spanning,
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
