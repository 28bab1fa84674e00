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
    loaded::{Artifact, Native, Reach, Source},
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

    /// Loads an entry with its options, which one with collectives of ours does without. One that spans workers comes with what the
    /// others may ask for.
    pub(super) async fn deserialize(
        self: &Arc<Self>,
        name: &Name,
        entry: &Arc<Entry>,
        how: (Reach, &Bytes),
    ) -> Result<(LoadedExecutable, Option<Artifact>), StatusProto> {
        let (reach, options) = how;
        let options = match reach {
            Reach::Hooked => Bytes::from(spanning::portable()),
            Reach::Local | Reach::Native => options.clone(),
        };
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
            if reach != Reach::Hooked {
                this.check_devices(&executable, &devices)?;
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
            let artifact = (reach != Reach::Local).then(|| {
                let native = (reach == Reach::Native).then(|| Native { options, devices });
                Artifact {
                    native,
                    ..Artifact::new(entry.executable.clone())
                }
            });
            Ok((executable, artifact))
        })
        .await
    }

    /// Whether an executable runs on those devices, as far as they are this worker's, and in that order.
    fn check_devices(
        &self,
        executable: &LoadedExecutable,
        devices: &[i32],
    ) -> Result<(), StatusProto> {
        let own = |id: &i32| {
            self.client
                .devices()
                .iter()
                .any(|device| device.id() == *id)
        };
        let asked: Vec<i32> = devices.iter().copied().filter(own).collect();
        if executable.device_ids() == asked {
            return Ok(());
        }
        Err(status::unimplemented(format!(
            "the plugin loads for devices {:?} where {asked:?} are asked for",
            executable.device_ids()
        )))
    }

    /// What the other workers may ask for of a program that was just compiled, and is not loaded once more; none for one within
    /// this worker. With collectives of ours such a program is always loaded.
    pub(super) async fn fresh_artifact(
        self: &Arc<Self>,
        name: &Name,
        executable: &LoadedExecutable,
        entry: &Entry,
        source: &Source,
    ) -> Result<Option<Artifact>, StatusProto> {
        if source.reach != Reach::Native {
            return Ok(None);
        }
        self.check_devices(executable, &name.1)?;
        if entry.executable.is_empty() {
            return Err(status::unimplemented(
                "the plugin does not serialize this executable, and the other workers of the program have to load it",
            ));
        }
        let native = Native {
            options: source.options.clone(),
            devices: name.1.clone(),
        };
        let bytes = entry.executable.clone();
        // Hashes the whole executable.
        super::blocking(move || {
            Some(Artifact {
                native: Some(native),
                ..Artifact::new(bytes)
            })
        })
        .await
    }
}
