//! Clients of as many devices as a program over several workers has. Such a program is compiled for all its partitions at
//! once, on a client that runs nothing.

use std::sync::{Arc, Mutex, PoisonError};

use waystation_pjrt::{Client, OptionValue, Plugin};
use waystation_proto::tensorflow::StatusProto;

use crate::{make::Shape, status};

/// The CPU plugin's option for the number of devices.
const COUNT: &str = "cpu_device_count";

/// A client has about a thread and a half for each device.
const MOST_DEVICES: u32 = 2048;

/// Makes wide clients, and keeps the last one, since programs of one job mostly have one width.
pub(crate) struct Wide {
    plugin: Arc<Plugin>,
    /// The options of the worker's own client.
    options: Vec<(String, OptionValue)>,
    last: Mutex<Option<(u32, Client)>>,
}

impl std::fmt::Debug for Wide {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wide").finish_non_exhaustive()
    }
}

impl Wide {
    pub(crate) fn new(plugin: Arc<Plugin>, options: &[(String, OptionValue)]) -> Wide {
        let options = options.iter().filter(|(name, _)| name != COUNT);
        Wide {
            plugin,
            options: options.cloned().collect(),
            last: Mutex::new(None),
        }
    }

    /// A client of as many devices as a program has partitions in all replicas. Blocks while it is made.
    pub(crate) fn client(&self, (replicas, partitions): Shape) -> Result<Client, StatusProto> {
        let devices = replicas
            .checked_mul(partitions)
            .filter(|devices| *devices <= MOST_DEVICES);
        let Some(devices) = devices else {
            return Err(status::unimplemented(format!(
                "a program over several workers with {replicas} replicas of {partitions} partitions; at most {MOST_DEVICES} in all are \
                 served"
            )));
        };
        if let Some((width, client)) = &*self.last()
            && *width == devices
        {
            return Ok(client.clone());
        }
        let mut options = self.options.clone();
        options.push((COUNT.to_owned(), OptionValue::Int64(devices.into())));
        let client =
            Client::create(&self.plugin, &options).map_err(|error| status::of_plugin(&error, 0))?;
        let before = self.last().replace((devices, client.clone()));
        // Its end takes a while, and others may wait for the lock.
        drop(before);
        Ok(client)
    }

    fn last(&self) -> std::sync::MutexGuard<'_, Option<(u32, Client)>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
