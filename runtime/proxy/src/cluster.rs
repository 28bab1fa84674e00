//! The devices that a client sees, and the workers behind them.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;
use waystation_proto::{
    BUILD_ID, LINK_VERSION,
    waystation::scheduler::{
        AllotRequest, Allotment, AllottedWorker, WorkerInventory, worker_inventory,
    },
};

use crate::{
    flags::{Flags, Verdict},
    link::{Gang, Ids, Link},
    status::Status,
};

/// One device.
#[derive(Debug)]
pub(crate) struct Device {
    /// Global id, as clients know it.
    pub(crate) id: i32,
    /// Index into [`Cluster::links`].
    pub(crate) link: usize,
    /// Index among the worker's devices.
    pub(crate) ordinal: u32,
    /// The slice that the worker belongs to.
    pub(crate) slice: u32,
    /// The worker's number in its slice.
    pub(crate) task: u32,
    /// What the plugin says of it.
    pub(crate) info: worker_inventory::Device,
}

/// The workers of one lease. A new lease, or a worker that came back, makes a new cluster; sessions keep theirs, each with
/// links of its own.
#[derive(Debug)]
pub(crate) struct Cluster {
    pub(crate) devices: Arc<Vec<Device>>,
    by_id: Arc<HashMap<i32, usize>>,
    pub(crate) links: Vec<Arc<Link>>,
    pub(crate) platform_name: String,
    pub(crate) platform_version: String,
    /// The accelerators that the devices stand in for; empty: they are what they are.
    pub(crate) simulated: String,
}

impl Cluster {
    /// Dials every worker of an allotment.
    async fn connect(
        allotment: &Allotment,
        gang: &Arc<Gang>,
        local_transfers: bool,
    ) -> Result<Self, Status> {
        let mut links = Vec::new();
        let mut devices = Vec::new();
        for (index, worker) in allotment.workers.iter().enumerate() {
            let inventory = worker.inventory.clone().unwrap_or_default();
            let ids = device_ids(worker, &inventory);
            let name = format!(
                "slice {} task {} at {}",
                worker.slice, worker.task, worker.address
            );
            links.push(
                Link::connect(
                    name,
                    worker.address.clone(),
                    allotment.epoch,
                    ids.clone(),
                    gang,
                    local_transfers,
                )
                .await?,
            );
            for ((ordinal, id), info) in (0u32..).zip(ids).zip(inventory.devices) {
                devices.push(Device {
                    id,
                    link: index,
                    ordinal,
                    slice: worker.slice,
                    task: worker.task,
                    info: renumber(info, ordinal, id),
                });
            }
        }
        gang.tell();
        let first = allotment
            .workers
            .first()
            .and_then(|w| w.inventory.clone())
            .unwrap_or_default();
        Ok(Self {
            by_id: Arc::new(devices.iter().enumerate().map(|(i, d)| (d.id, i)).collect()),
            devices: Arc::new(devices),
            links,
            platform_name: first.platform_name,
            platform_version: first.platform_version,
            simulated: first.simulated,
        })
    }

    /// The same cluster with links for one client.
    pub(crate) fn for_client(&self, client: u64) -> Self {
        Self {
            devices: Arc::clone(&self.devices),
            by_id: Arc::clone(&self.by_id),
            links: self
                .links
                .iter()
                .map(|link| link.for_client(client))
                .collect(),
            platform_name: self.platform_name.clone(),
            platform_version: self.platform_version.clone(),
            simulated: self.simulated.clone(),
        }
    }

    /// The device with a global id.
    pub(crate) fn device(&self, id: i32) -> Option<&Device> {
        self.by_id.get(&id).and_then(|&i| self.devices.get(i))
    }

    /// The worker that owns a device.
    pub(crate) fn link(&self, device: &Device) -> &Arc<Link> {
        // `connect` pushes a device only after its link.
        &self.links[device.link]
    }

    fn serves(&self, allotment: &Allotment) -> bool {
        self.links.len() == allotment.workers.len()
            && self
                .links
                .iter()
                .zip(&allotment.workers)
                .all(|(link, worker)| {
                    *link.address == *worker.address
                        && link.epoch == allotment.epoch
                        && !link.is_dead()
                })
    }
}

fn device_ids(worker: &AllottedWorker, inventory: &WorkerInventory) -> Vec<i32> {
    (worker.first_device_id..)
        .take(inventory.devices.len())
        .collect()
}

/// A plugin numbers its own devices from 0; where the strings carry that number they get the global one.
fn renumber(
    mut device: worker_inventory::Device,
    ordinal: u32,
    id: i32,
) -> worker_inventory::Device {
    if i64::from(ordinal) != i64::from(id) {
        device.to_string = replace_number(&device.to_string, ordinal, id);
        device.debug_string = replace_number(&device.debug_string, ordinal, id);
    }
    device
}

/// Replaces each run of digits that reads `from`.
fn replace_number(text: &str, from: u32, to: i32) -> String {
    let (from, to) = (from.to_string(), to.to_string());
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(|c: char| c.is_ascii_digit()) {
        let (before, digits) = rest.split_at(start);
        let end = digits
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(digits.len());
        out.push_str(before);
        out.push_str(if digits[..end] == from {
            &to
        } else {
            &digits[..end]
        });
        rest = &digits[end..];
    }
    out.push_str(rest);
    out
}

/// The newest cluster, `None` until every expected worker is there, and how far it is.
pub(crate) type ClusterWatch = watch::Receiver<(Option<Arc<Cluster>>, String)>;

/// Follows the resource manager's allotments and keeps the newest cluster connected, in one `gang`. `flags` are asked about
/// at the first cluster, before any session hears of it.
#[expect(
    clippy::too_many_arguments,
    reason = "what a proxy tells its one follower at its start"
)]
pub(crate) fn follow(
    resource_manager: String,
    proxy: String,
    gang: Arc<Gang>,
    ids: Arc<Ids>,
    flags: Flags,
    verdict: oneshot::Sender<Verdict>,
    local_transfers: bool,
    shutdown: CancellationToken,
) -> ClusterWatch {
    let (sender, receiver) = watch::channel((
        None::<Arc<Cluster>>,
        "waiting for the resource manager".to_owned(),
    ));
    let mut allotments = waystation_scheduler::client::watch(
        resource_manager,
        AllotRequest {
            link_version: LINK_VERSION,
            build_id: BUILD_ID.to_owned(),
            proxy,
            ..AllotRequest::default()
        },
        shutdown.clone(),
    );
    tokio::spawn(async move {
        let mut verdict = Some(verdict);
        loop {
            let allotment = allotments.borrow_and_update().clone();
            let mut retry = false;
            if let Some(allotment) = allotment {
                if !allotment.complete {
                    tracing::info!(progress = %allotment.progress, "waiting for workers");
                    sender.send_modify(|state| state.1.clone_from(&allotment.progress));
                } else if !sender
                    .borrow()
                    .0
                    .as_ref()
                    .is_some_and(|c| c.serves(&allotment))
                {
                    let connected = Cluster::connect(&allotment, &gang, local_transfers).await;
                    let checked = match connected {
                        Ok(cluster) if verdict.is_some() => {
                            let link = cluster.links.first();
                            match flags.check(link, &ids).await {
                                Ok(said) => {
                                    let refused = matches!(said, Verdict::Refused(_));
                                    if let Some(verdict) = verdict.take() {
                                        // Nobody listens any more when the proxy is going down.
                                        let _ = verdict.send(said);
                                    }
                                    if refused {
                                        return;
                                    }
                                    Ok(cluster)
                                }
                                Err(status) => Err(status),
                            }
                        }
                        connected => connected,
                    };
                    match checked {
                        Ok(cluster) => {
                            tracing::info!(
                                devices = cluster.devices.len(),
                                workers = cluster.links.len(),
                                "cluster ready"
                            );
                            sender.send_replace((Some(Arc::new(cluster)), allotment.progress));
                        }
                        Err(e) => {
                            tracing::warn!(error = %e.message, "could not attach to a worker, retrying");
                            sender.send_modify(|state| state.1 = e.message);
                            retry = true;
                        }
                    }
                }
            }
            let pause = async {
                if retry {
                    tokio::time::sleep(Duration::from_secs(1)).await;
                } else {
                    std::future::pending::<()>().await;
                }
            };
            tokio::select! {
                () = shutdown.cancelled() => return,
                changed = allotments.changed() => if changed.is_err() { return },
                () = pause => {}
            }
        }
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::replace_number;

    #[test]
    fn the_local_number_becomes_the_global_one() {
        assert_eq!(replace_number("TFRT_CPU_3", 3, 11), "TFRT_CPU_11");
        assert_eq!(replace_number("CpuDevice(id=3)", 3, 11), "CpuDevice(id=11)");
        assert_eq!(
            replace_number("TFRT_CPU_13 of 3x", 3, 5),
            "TFRT_CPU_13 of 5x"
        );
    }
}
