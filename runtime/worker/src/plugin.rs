//! Opens the plugin: in the worker, and in its compile child in the same way.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use waystation_pjrt::{Client, OptionValue, Plugin};

use crate::{error::Error, fault, linalg};

/// What to open.
#[derive(Debug, Clone)]
pub(crate) struct Spec {
    pub(crate) path: PathBuf,
    pub(crate) options: Vec<(String, OptionValue)>,
    pub(crate) lapack: Option<PathBuf>,
}

/// A client of the plugin, with our FFI targets.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) client: Client,
    pub(crate) targets: linalg::Facts,
    /// Why there can be no programs over several workers, if so.
    pub(crate) cannot_span: Option<String>,
}

impl Opened {
    /// What compiled programs depend on: two processes may exchange them when this is equal.
    pub(crate) fn likeness(&self) -> Vec<String> {
        let client = &self.client;
        let kinds = client
            .devices()
            .iter()
            .map(|device| format!("device {} {}", device.id(), device.kind()));
        let targets = self
            .targets
            .iter()
            .map(|(name, value)| format!("{name} {value}"));
        [client.platform_name(), client.platform_version()]
            .into_iter()
            .map(str::to_owned)
            .chain(kinds)
            .chain(targets)
            .collect()
    }
}

/// Loads the plugin, creates its client, and gives it our FFI targets. Blocks.
pub(crate) fn open(spec: &Spec) -> Result<Opened, Error> {
    let path: &Path = &spec.path;
    let plugin = Plugin::load(path).map_err(|source| Error::Plugin {
        path: path.to_owned(),
        source,
    })?;
    let client = Client::create(&plugin, &spec.options).map_err(|source| Error::Client {
        path: path.to_owned(),
        source,
    })?;
    if client.devices().is_empty() {
        return Err(Error::NoDevices {
            path: path.to_owned(),
        });
    }
    let targets = linalg::register(&plugin, &client, spec.lapack.as_deref());
    let cannot_span = take_collectives(&plugin, &client).err();
    Ok(Opened {
        client,
        targets,
        cannot_span,
    })
}

/// Gives the plugin the target of collectives between workers, or says why that is of no use. Such programs are neither compiled
/// nor loaded without.
fn take_collectives(plugin: &Arc<Plugin>, client: &Client) -> Result<(), String> {
    let platform = client.platform_name();
    if platform != "cpu" {
        return Err(format!(
            "collectives between workers are made for CPU plugins, and this one is for {platform}"
        ));
    }
    plugin
        .register_async_ffi::<fault::Collective>(waystation_collectives::TARGET, "Host")
        .map_err(|error| error.to_string())
}
