//! Executables that are loaded: from what is serialized, and for all who ask for the same.

use std::{
    sync::{Arc, PoisonError},
    time::Instant,
};

use bytes::Bytes;
use waystation_cache::{Entry, Treatment};
use waystation_pjrt::LoadedExecutable;
use waystation_proto::tensorflow::{StatusProto, error::Code};

use super::{
    Compiler, Loaded, Name,
    loaded::{Artifact, Source},
    spanning,
};
use crate::{counters, hlo::Kept, status};

impl Compiler {
    /// Whether anything serialized has been loaded.
    pub(super) fn has_loaded(&self) -> bool {
        counters::get(&self.counters.load_nanos) > 0
    }

    pub(super) fn share(&self, name: &Name) -> Option<Arc<Loaded>> {
        if matches!(name.0.treatment(), Treatment::Uncacheable { .. }) {
            return None;
        }
        self.loaded
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(name)?
            .upgrade()
    }

    /// What has been loaded already of a program that is to be compiled.
    pub(super) fn share_compiled(&self, name: &Name, source: &Source) -> Option<Arc<Loaded>> {
        let loaded = self.share(name)?;
        loaded.source.get_or_init(|| source.clone());
        Some(loaded)
    }

    /// Shares what has been loaded with those who ask for the same.
    pub(super) fn keep(
        &self,
        name: Name,
        executable: LoadedExecutable,
        entry: &Entry,
        source: Option<Source>,
        artifact: Option<Artifact>,
    ) -> Arc<Loaded> {
        let mut info = entry.info.clone();
        info.key = name.0.to_string();
        let digest = *name.0.digest();
        let loaded = Arc::new(Loaded::new(
            executable,
            info,
            entry.text.clone().map(Kept::of),
            source,
            digest,
            artifact,
            &self.client,
            &self.counters,
        ));
        let mut all = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, loaded| loaded.strong_count() > 0);
        all.insert(name, Arc::downgrade(&loaded));
        loaded
    }

    /// Loads an entry with its options; one that spans workers has none, and comes with what the others may ask for.
    pub(super) async fn deserialize(
        self: &Arc<Self>,
        name: &Name,
        entry: &Arc<Entry>,
        options: Option<&Bytes>,
    ) -> Result<(LoadedExecutable, Option<Artifact>), StatusProto> {
        let spanning = options.is_none();
        let options = options.map_or_else(|| Bytes::from(spanning::portable()), Bytes::clone);
        let entry = Arc::clone(entry);
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
            if !spanning && executable.device_ids() != devices {
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
            // Hashes the whole executable.
            let artifact = spanning.then(|| Artifact::new(entry.executable.clone()));
            Ok((executable, artifact))
        })
        .await
    }
}
