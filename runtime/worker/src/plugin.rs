//! Opens the plugin: in the worker, and in its compile child in the same way.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use waystation_pjrt::{Client, OptionValue, Plugin};

use crate::{collectives::Collectives, error::Error, fault, group::Group, linalg};

/// What to open.
#[derive(Debug, Clone)]
pub(crate) struct Spec {
    pub(crate) path: PathBuf,
    pub(crate) options: Vec<(String, OptionValue)>,
    pub(crate) lapack: Option<PathBuf>,
    /// Whom the plugin joins to one client.
    pub(crate) group: Option<Arc<Group>>,
}

/// A client of the plugin, with our FFI targets.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) client: Client,
    pub(crate) targets: linalg::Facts,
    pub(crate) collectives: Collectives,
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
    let created = match &spec.group {
        Some(group) => {
            let mut options = spec.options.clone();
            options.extend(group.options());
            Client::create_shared(&plugin, &options, group.store())
        }
        None => Client::create(&plugin, &spec.options),
    };
    let client = created.map_err(|source| Error::Client {
        path: path.to_owned(),
        source,
    })?;
    if client.devices().is_empty() {
        return Err(Error::NoDevices {
            path: path.to_owned(),
        });
    }
    let targets = linalg::register(&plugin, &client, spec.lapack.as_deref());
    let collectives = match &spec.group {
        Some(group) => {
            group.check(&client).map_err(|why| Error::Group { why })?;
            Collectives::Native(Arc::clone(group))
        }
        None => match take_collectives(&plugin, &client) {
            Ok(()) => Collectives::Hooked,
            Err(why) => Collectives::None(why),
        },
    };
    Ok(Opened {
        client,
        targets,
        collectives,
    })
}

/// Gives the plugin the target of collectives between workers, or says why that is of no use. Such programs are neither compiled
/// nor loaded without.
fn take_collectives(plugin: &Arc<Plugin>, client: &Client) -> Result<(), String> {
    let platform = client.platform_name();
    if platform != "cpu" {
        return Err(format!(
            "collectives between workers are made for CPU plugins, and this one is for {platform}: its own are used with \
             --plugin_collectives, by the workers of one slice"
        ));
    }
    plugin
        .register_async_ffi::<fault::Collective>(waystation_collectives::TARGET, "Host")
        .map_err(|error| error.to_string())
}
