//! This worker's part in its slice's group, where the plugin joins the workers of a slice to one client and has collectives of
//! its own: the stream that says who is of it, and the key-value store that the plugin is lent.
//!
//! A client cannot lose a process and go on, nor can what it runs then be ended. So when the group is gone the worker ends, with
//! all others of the group; a new group forms of those that start in their places.

mod link;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    time::Duration,
};

use prost::Message as _;
use tokio::sync::watch;
use waystation_pjrt::{Client, KeyValueStore, OptionValue};
use waystation_proto::waystation::group::NodeDevices;

pub(crate) use self::link::Place;
use self::link::{Link, Shared, State, Stream};

/// Ours among the keys of the plugin.
const DEVICES: &str = "waystation/devices/";

/// How long the devices of another worker are waited for. It has registered before a proxy gets its slice.
const REGISTERS: Duration = Duration::from_secs(20);

/// A group that has formed. Shared by reference count.
pub(crate) struct Group {
    link: Shared,
    stream: Mutex<Option<Stream>>,
    node: u32,
    nodes: u32,
    state: watch::Receiver<State>,
    /// The plugin's id and node of each device that clients know.
    devices: OnceLock<HashMap<i32, Known>>,
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Group")
            .field("node", &self.node)
            .field("nodes", &self.nodes)
            .finish_non_exhaustive()
    }
}

/// A device of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) plugin_id: i32,
    pub(crate) node: u32,
}

impl Group {
    /// Waits until all workers of the slice have come. `None` for a slice of one, whose plugin needs nobody.
    ///
    /// # Errors
    /// Why the worker cannot be of a group.
    pub(crate) async fn form(place: Place) -> Result<Option<Arc<Group>>, String> {
        let node = place.task;
        let (link, mut state, stream) = Link::start(place)?;
        let formed = state
            .wait_for(|state| !matches!(state, State::Gathering))
            .await
            .map_err(|_| "its connection to the resource manager was given up".to_owned())?
            .clone();
        match formed {
            State::Formed { nodes: 1, .. } => Ok(None),
            State::Formed { nodes, .. } => Ok(Some(Arc::new(Group {
                link: Shared(link),
                stream: Mutex::new(Some(stream)),
                node,
                nodes,
                state,
                devices: OnceLock::new(),
            }))),
            State::Gathering => Err("the group has not formed".to_owned()),
            State::Gone(why) => Err(why),
        }
    }

    /// The options by which a plugin's client is one of several, as XLA's plugin for GPUs calls them.
    pub(crate) fn options(&self) -> [(String, OptionValue); 2] {
        [
            ("node_id".to_owned(), OptionValue::Int64(self.node.into())),
            (
                "num_nodes".to_owned(),
                OptionValue::Int64(self.nodes.into()),
            ),
        ]
    }

    /// What the plugin is lent.
    pub(crate) fn store(&self) -> Arc<dyn KeyValueStore> {
        Arc::new(self.link.clone())
    }

    /// Whether the plugin has joined the processes to one client, as a plugin that does not know how would not.
    ///
    /// # Errors
    /// What it has done instead.
    pub(crate) fn check(&self, client: &Client) -> Result<(), String> {
        let told = |error: waystation_pjrt::Error| error.to_string();
        let index = client.process_index().map_err(told)?;
        if u32::try_from(index) != Ok(self.node) {
            return Err(format!(
                "the plugin takes this worker for process {index}, and it is number {} of its slice",
                self.node
            ));
        }
        let all = client.global_devices().map_err(told)?;
        for node in 0..self.nodes {
            if !all
                .iter()
                .any(|device| u32::try_from(device.process_index) == Ok(node))
            {
                return Err(format!(
                    "the plugin shows {} devices, and none of worker {node} of the slice",
                    all.len()
                ));
            }
        }
        Ok(())
    }

    /// Tells the others how this worker's devices are called. Blocks.
    ///
    /// # Errors
    /// Why the others will not know.
    pub(crate) fn publish(&self, client: &Client, first_device_id: i32) -> Result<(), String> {
        let devices = NodeDevices {
            first_device_id,
            plugin_ids: client
                .devices()
                .iter()
                .map(waystation_pjrt::Device::id)
                .collect(),
        };
        let (key, value) = (key_of(self.node), devices.encode_to_vec());
        let put = self.link.put(key.as_bytes(), &value);
        let Err(failure) = put else {
            return Ok(());
        };
        // A worker registers again when the resource manager has started anew.
        match self.link.try_get(key.as_bytes()) {
            Ok(Some(known)) if known == value => Ok(()),
            Ok(Some(_)) => Err(
                "its devices have other numbers than those that its group was told of".to_owned(),
            ),
            _ => Err(failure.message().to_owned()),
        }
    }

    /// The plugin's names of devices, which may be other workers'. Blocks until all workers of the group have registered.
    ///
    /// # Errors
    /// Which device is not of this group.
    pub(crate) fn devices(&self, ids: &[i32]) -> Result<Vec<Known>, String> {
        let all = match self.devices.get() {
            Some(all) => all,
            None => {
                let all = self.collect()?;
                self.devices.get_or_init(|| all)
            }
        };
        ids.iter()
            .map(|id| {
                all.get(id).copied().ok_or_else(|| {
                    format!(
                        "device {id} is of another slice, and the plugin's collectives reach the workers of one"
                    )
                })
            })
            .collect()
    }

    fn collect(&self) -> Result<HashMap<i32, Known>, String> {
        let mut all = HashMap::new();
        for node in 0..self.nodes {
            let known = self
                .link
                .get(key_of(node).as_bytes(), REGISTERS)
                .map_err(|failure| {
                    format!(
                        "the devices of worker {node} of the slice are not known: {}",
                        failure.message()
                    )
                })?;
            let known = NodeDevices::decode(&known[..])
                .map_err(|error| format!("the devices of worker {node} are damaged: {error}"))?;
            for (id, plugin_id) in (known.first_device_id..).zip(known.plugin_ids) {
                all.insert(id, Known { plugin_id, node });
            }
        }
        Ok(all)
    }

    /// Ends the group: something runs on its workers that nothing else will end.
    pub(crate) fn end(&self, why: &str) {
        self.link.0.leave(why);
        let stream = self.stream.lock();
        drop(stream.unwrap_or_else(PoisonError::into_inner).take());
    }

    /// Why the group is gone, when it is.
    pub(crate) async fn gone(&self) -> String {
        let mut state = self.state.clone();
        let gone = state
            .wait_for(|state| matches!(state, State::Gone(_)))
            .await;
        match gone.as_deref() {
            Ok(State::Gone(why)) => why.clone(),
            // The sender lives as long as the link, which this keeps.
            _ => "its connection to the resource manager was given up".to_owned(),
        }
    }
}

fn key_of(node: u32) -> String {
    format!("{DEVICES}{node}")
}
