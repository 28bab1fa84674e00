//! The devices and memories as a client sees them, and questions about the cluster as a whole.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use waystation_proto::{
    waystation::worker::{DefaultLayout, op, reply},
    xla::{
        DeviceAssignmentProto,
        device_assignment_proto::ComputationDevice,
        ifrt::{
            AttributeMapProto, attribute_map_proto,
            proxy::{
                GetDefaultDeviceAssignmentRequest, GetDefaultDeviceAssignmentResponse,
                GetDefaultLayoutRequest, GetDefaultLayoutResponse, InitResponse,
                ifrt_response::Response, init_response,
            },
        },
    },
};

use super::{Handled, Outcome, Session};
use crate::{
    cluster::{Cluster, Device},
    convert,
    status::{self, Status},
};

/// Shown by JAX as `proxy/pathways`; Orbax and pathwaysutils look for exactly that.
const RUNTIME_TYPE: &str = "pathways";
/// XLA's code for "not implemented".
const UNIMPLEMENTED: i32 = 12;

impl Session {
    /// Takes over what has changed of the workers since the last request: one that is lost stays so for arrays and programs that
    /// are there, and one that has come back serves those that come now.
    pub(super) fn renew_cluster(&mut self) {
        let Some(cluster) = &self.cluster else { return };
        if !self.clusters.has_changed().unwrap_or(false) {
            return;
        }
        let Some(newest) = self.clusters.borrow_and_update().0.clone() else {
            return;
        };
        match cluster.renewed(&newest, self.number) {
            Some(renewed) => {
                self.cluster = Some(Arc::new(renewed));
                self.replaced = None;
            }
            None => {
                let (before, now) = (cluster.devices.all.len(), newest.devices.all.len());
                let replaced = format!(
                    "the cluster has other devices now ({now}) than when this client connected ({before})"
                );
                tracing::warn!(session = self.id, %replaced, "a client's lost workers will not come back to it");
                self.replaced = Some(replaced);
            }
        }
    }

    /// What all requests fail with once no worker of the session is there, nor ever will be again. Not with what says that a
    /// slice is lost: who waits for slices would wait for ever.
    pub(super) fn outlived(&self) -> Option<Status> {
        let replaced = self.replaced.as_ref()?;
        let cluster = self.cluster.as_ref()?;
        cluster.is_lost().then(|| {
            status::failed_precondition(format!(
                "{replaced}, and none of its own is left. JAX learns of devices once: start the program anew"
            ))
        })
    }

    /// Answers when every expected worker is there.
    pub(super) fn init(&mut self) -> Handled {
        if self.cluster.is_some() {
            return Err(status::failed_precondition("InitRequest came twice"));
        }
        // `front` starts a session only when a cluster is there.
        let cluster = self.clusters.borrow_and_update().0.clone().ok_or_else(|| {
            status::unavailable("the workers went away while the client connected; connect again")
        })?;
        let response = describe(&cluster, self.id);
        self.cluster = Some(Arc::new(cluster.for_client(self.number)));
        Ok(Outcome::Now(Response::InitResponse(response)))
    }

    pub(super) fn default_device_assignment(
        &self,
        request: &GetDefaultDeviceAssignmentRequest,
    ) -> Handled {
        let cluster = self.cluster()?;
        let (replicas, partitions) = (request.num_replicas, request.num_partitions);
        let available = cluster.devices.all.len() as u64;
        match replicas.checked_mul(partitions) {
            Some(wanted) if (1..=available).contains(&wanted) => {}
            _ => {
                return Err(status::invalid_argument(format!(
                    "{replicas} replicas of {partitions} partitions do not fit {available} devices"
                )));
            }
        }
        // Replica-major: device = replica * partitions + partition.
        let id = |i: u64| {
            cluster
                .devices
                .all
                .get(usize::try_from(i).unwrap_or(usize::MAX))
                .map(|d| i64::from(d.id))
        };
        let computation_devices = (0..partitions)
            .map(|p| ComputationDevice {
                replica_device_ids: (0..replicas)
                    .filter_map(|r| id(r * partitions + p))
                    .collect(),
            })
            .collect();
        Ok(Outcome::Now(Response::GetDefaultDeviceAssignmentResponse(
            GetDefaultDeviceAssignmentResponse {
                device_assignment: Some(DeviceAssignmentProto {
                    replica_count: i32::try_from(replicas).unwrap_or(i32::MAX),
                    computation_count: i32::try_from(partitions).unwrap_or(i32::MAX),
                    computation_devices,
                }),
            },
        )))
    }

    pub(super) async fn default_layout(&mut self, request: GetDefaultLayoutRequest) -> Handled {
        let dtype = convert::primitive_type(request.dtype.as_ref())?;
        convert::check_dims(&request.dims)?;
        let cluster = self.cluster()?;
        let device = cluster.device(request.device_id).ok_or_else(|| {
            status::invalid_argument(format!("unknown device {}", request.device_id))
        })?;
        let id = self.shared.ids.next();
        let rank = request.dims.len();
        let op = op::Op::DefaultLayout(DefaultLayout {
            request: id,
            dtype: dtype as i32,
            dims: request.dims,
            device: device.ordinal,
            memory_kind: request.memory_kind,
        });
        // All workers have the same plugin: a lost one's layouts are those of any other.
        let link = cluster.link(device);
        let alive = || cluster.links.iter().find(|link| !link.is_dead());
        let link = match link.is_dead() {
            true => alive().unwrap_or(link),
            false => link,
        };
        let answer = link.call(id, op).await;
        Ok(Outcome::Later(Box::pin(async move {
            let text = match answer.wait().await {
                Ok(reply::Reply::Answer(answer)) => answer.text,
                // A plugin without the layouts extension lays out row-major.
                Err(status) if status.code == UNIMPLEMENTED => row_major(rank),
                Err(status) => return Err(status),
                Ok(_) => return Err(unexpected("DefaultLayout")),
            };
            Ok(Response::GetDefaultLayoutResponse(
                GetDefaultLayoutResponse {
                    serialized_pjrt_layout: text.into_bytes(),
                },
            ))
        })))
    }
}

/// A reply of the wrong kind: a worker of another build, which registration should have refused.
pub(super) fn unexpected(request: &str) -> Status {
    status::unavailable(format!(
        "the worker answered {request} with another kind of reply"
    ))
}

/// Layout text, minor dimension first: `{1,0}`.
fn row_major(rank: usize) -> String {
    let order: Vec<String> = (0..rank).rev().map(|d| d.to_string()).collect();
    format!("{{{}}}", order.join(","))
}

fn describe(cluster: &Cluster, session_id: u64) -> InitResponse {
    // A memory kind has one number, whatever the device.
    let mut kinds = BTreeMap::new();
    let mut memories = Vec::new();
    let mut devices = Vec::new();
    for device in cluster.devices.all.iter() {
        let first = memories.len();
        for memory in &device.info.memories {
            let next = kinds.len();
            let kind_id = *kinds.entry(memory.kind.clone()).or_insert(next);
            memories.push(init_response::Memory {
                id: int(memories.len()),
                memory_space_kind: memory.kind.clone(),
                kind_id: int(kind_id),
                device_ids: vec![device.id],
                debug_string: memory.debug_string.clone(),
                to_string: memory.to_string.clone(),
            });
        }
        devices.push(describe_device(cluster, device, first, memories.len()));
    }
    let ids: Vec<i32> = cluster.devices.all.iter().map(|d| d.id).collect();
    InitResponse {
        session_id,
        platform_name: cluster.devices.platform_name.clone(),
        platform_version: cluster.devices.platform_version.clone(),
        platform_id: platform_id(&cluster.devices.platform_name),
        process_index: 0,
        runtime_type: RUNTIME_TYPE.to_owned(),
        all_devices: devices,
        primary_device_ids: ids.clone(),
        // Every device: JAX fails with fewer.
        addressable_device_ids: ids,
        memories,
        // jax.export asks for it.
        client_attributes: Some(attributes([(
            "serialize_with_sdy".to_owned(),
            bool_value(true),
        )])),
    }
}

/// What devices that stand in for others say of themselves.
pub(crate) const SIMULATED: &str = "SIMULATED";

fn describe_device(
    cluster: &Cluster,
    device: &Device,
    first: usize,
    end: usize,
) -> init_response::Device {
    let mut map = device.info.attributes.clone().unwrap_or_default();
    // Orbax tells workers apart by these two.
    for (name, value) in [
        ("slice_index", device.slice),
        ("virtual_task_index", device.task),
    ] {
        map.attributes
            .insert(name.to_owned(), int_value(i64::from(value)));
    }
    let place = place(device, &map, &cluster.devices.simulated);
    let default = first + device.info.default_memory as usize;
    init_response::Device {
        id: device.id,
        // All devices are local to the one process there is.
        local_device_id: device.id,
        local_hardware_id: -1,
        platform_name: cluster.devices.platform_name.clone(),
        device_kind: device.info.device_kind.clone(),
        default_memory_id: (default < end).then(|| int(default)),
        memory_ids: (first..end).map(int).collect(),
        debug_string: match cluster.devices.simulated.as_str() {
            "" => device.info.debug_string.clone(),
            _ => with_place(&device.info.debug_string, SIMULATED),
        },
        to_string: with_place(&device.info.to_string, &place),
        attributes: Some(map),
    }
}

/// Where a device lies, as Pathways' devices say it: `vtask=0, slice=1`. Older Orbax reads the task from there.
fn place(device: &Device, attributes: &AttributeMapProto, simulated: &str) -> String {
    use attribute_map_proto::value::Value;
    let mut place = format!("vtask={}, slice={}", device.task, device.slice);
    if simulated.is_empty() {
        // What a plugin says of coordinates stands in its own text.
        return place;
    }
    let value = |name: &str| attributes.attributes.get(name)?.value.as_ref();
    if let Some(Value::Int64ListValue(coords)) = value("coords") {
        let coords: Vec<String> = coords.elements.iter().map(i64::to_string).collect();
        place += &format!(", coords=({})", coords.join(","));
    }
    if let Some(Value::Int64Value(core)) = value("core_on_chip") {
        place += &format!(", core_on_chip={core}");
    }
    place + &format!(", {SIMULATED} {simulated}")
}

/// Puts the place into a device's text: `CpuDevice(id=0)` becomes `CpuDevice(id=0, vtask=0, slice=0)`.
fn with_place(text: &str, place: &str) -> String {
    match text.strip_suffix(')') {
        Some(open) => format!("{open}, {place})"),
        None => format!("{text} ({place})"),
    }
}

fn int(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

fn attributes(
    entries: impl IntoIterator<Item = (String, attribute_map_proto::Value)>,
) -> AttributeMapProto {
    AttributeMapProto {
        version_number: 0,
        attributes: entries.into_iter().collect::<HashMap<_, _>>(),
    }
}

fn bool_value(value: bool) -> attribute_map_proto::Value {
    attribute_map_proto::Value {
        value: Some(attribute_map_proto::value::Value::BoolValue(value)),
    }
}

fn int_value(value: i64) -> attribute_map_proto::Value {
    attribute_map_proto::Value {
        value: Some(attribute_map_proto::value::Value::Int64Value(value)),
    }
}

/// A number that is the same for the same platform name (FNV-1a); clients only compare it.
fn platform_id(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}
