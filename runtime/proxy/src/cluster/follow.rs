//! Keeps the links to the workers as the resource manager names them.

use std::{sync::Arc, time::Duration};

use futures::{FutureExt as _, StreamExt as _, future::BoxFuture, stream::FuturesUnordered};
use tokio::{
    sync::{Notify, oneshot, watch},
    task::JoinHandle,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;
use waystation_proto::{
    BUILD_ID, LINK_VERSION,
    waystation::scheduler::{AllotRequest, Allotment, AllottedWorker, allotted_worker::Presence},
};

use super::{Cluster, ClusterWatch, Devices, device_ids};
use crate::{
    flags::{Flags, Verdict},
    link::{Dial, Gang, Ids, Link},
    status::{self, Status},
};

/// Between two attempts at a worker that does not take the proxy, or cannot say whether it takes the flags.
const RETRY: Duration = Duration::from_secs(1);

/// What a proxy tells its follower.
pub(crate) struct Follow {
    /// `host:port`.
    pub(crate) resource_manager: String,
    /// Names the proxy to others.
    pub(crate) proxy: String,
    /// Types of the slices wanted; empty: all there are.
    pub(crate) virtual_slices: Vec<String>,
    /// So many slices may be missing.
    pub(crate) elastic_slices: u32,
    /// All workers of the proxy, to each other.
    pub(crate) gang: Arc<Gang>,
    pub(crate) ids: Arc<Ids>,
    /// Asked about at the first cluster, before any session hears of it.
    pub(crate) flags: Flags,
    pub(crate) verdict: oneshot::Sender<Verdict>,
    pub(crate) local_transfers: bool,
    pub(crate) shutdown: CancellationToken,
}

/// Follows the resource manager's allotments and keeps the newest cluster connected, until the shutdown. The task has ended
/// when the resource manager has been told of that.
pub(crate) fn follow(follow: Follow) -> (ClusterWatch, JoinHandle<()>) {
    let (sender, receiver) = watch::channel((None, "waiting for the resource manager".to_owned()));
    let request = AllotRequest {
        link_version: LINK_VERSION,
        build_id: BUILD_ID.to_owned(),
        proxy: follow.proxy,
        virtual_slices: follow.virtual_slices,
        elastic_slices: follow.elastic_slices,
        ..AllotRequest::default()
    };
    let shutdown = follow.shutdown;
    let watch =
        waystation_scheduler::client::watch(follow.resource_manager, request, shutdown.clone());
    let follower = Follower {
        gang: follow.gang,
        ids: follow.ids,
        flags: follow.flags,
        verdict: Some(follow.verdict),
        dial: Dial {
            lease: waystation_scheduler::DEFAULT_LEASE,
            local_transfers: follow.local_transfers,
            deaths: Arc::new(Notify::new()),
        },
        sender,
        progress: String::new(),
        epoch: 0,
        complete: false,
        places: Vec::new(),
        ask: None,
        devices: None,
        dialling: FuturesUnordered::new(),
    };
    tokio::spawn(async move {
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = follower.run(watch.allotments) => {}
        }
    });
    (receiver, watch.ended)
}

/// One place of the cluster, and the way to its worker.
struct Place {
    worker: AllottedWorker,
    link: Option<Arc<Link>>,
    dialled: bool,
    /// Not before it is the worker dialled again.
    retry: Option<Instant>,
}

impl Place {
    fn new(worker: AllottedWorker) -> Self {
        Self {
            worker,
            link: None,
            dialled: false,
            retry: None,
        }
    }

    fn is_alive(&self) -> bool {
        self.link.as_ref().is_some_and(|link| !link.is_dead())
    }

    /// Whether there is a link, dead or not, to the worker at an address.
    fn is_linked_to(&self, address: &str) -> bool {
        self.link
            .as_ref()
            .is_some_and(|link| *link.address == *address)
    }

    /// There is a worker, and no way to it.
    fn wants_link(&self) -> bool {
        self.worker.presence() == Presence::Here && !self.is_alive() && !self.dialled
    }

    fn name(&self) -> String {
        let AllottedWorker {
            slice,
            task,
            address,
            ..
        } = &self.worker;
        match address.as_str() {
            "" => format!("slice {slice} task {task}"),
            address => format!("slice {slice} task {task} at {address}"),
        }
    }

    fn is_at(&self, other: &AllottedWorker) -> bool {
        (self.worker.slice, self.worker.task) == (other.slice, other.task)
    }

    fn has_devices_of(&self, other: &AllottedWorker) -> bool {
        device_ids(&self.worker) == device_ids(other)
            && self.worker.virtual_slice == other.virtual_slice
    }
}

/// A dialled link, with the place and the epoch that it is for.
type Dialled = BoxFuture<'static, (usize, u64, Result<Arc<Link>, Status>)>;

struct Follower {
    gang: Arc<Gang>,
    ids: Arc<Ids>,
    flags: Flags,
    verdict: Option<oneshot::Sender<Verdict>>,
    dial: Dial,
    sender: watch::Sender<(Option<Arc<Cluster>>, String)>,
    /// As the resource manager says; until the first cluster, what goes wrong is told in its stead.
    progress: String,
    epoch: u64,
    /// As many slices are there as the proxy wants.
    complete: bool,
    places: Vec<Place>,
    /// When the flags are asked about again, after a question that nobody has answered.
    ask: Option<Instant>,
    /// Those of `places`, once a cluster has been published.
    devices: Option<Arc<Devices>>,
    dialling: FuturesUnordered<Dialled>,
}

impl Follower {
    async fn run(mut self, mut allotments: watch::Receiver<Option<Allotment>>) {
        loop {
            let allotment = allotments.borrow_and_update().clone();
            if let Some(allotment) = allotment {
                self.take(allotment);
            }
            // Until the next allotment.
            loop {
                self.dial_workers();
                if self.publish().await.is_break() {
                    return;
                }
                let retry = self.places.iter().filter(|place| place.wants_link());
                let retry = retry.filter_map(|place| place.retry);
                let next = retry.chain(self.ask).min();
                let deaths = Arc::clone(&self.dial.deaths);
                tokio::select! {
                    changed = allotments.changed() => match changed {
                        Ok(()) => break,
                        Err(_) => return,
                    },
                    Some((place, epoch, dialled)) = self.dialling.next() => {
                        self.dialled(place, epoch, dialled);
                    }
                    () = deaths.notified() => self.hear_workers(),
                    () = async { sleep_until(next.unwrap_or_else(Instant::now)).await }, if next.is_some() => {}
                }
            }
        }
    }

    /// What the resource manager says now.
    fn take(&mut self, allotment: Allotment) {
        let published = self.devices.is_some();
        if !allotment.complete {
            tracing::info!(progress = %allotment.progress, "waiting for workers");
        }
        self.sender
            .send_modify(|state| state.1.clone_from(&allotment.progress));
        self.progress.clone_from(&allotment.progress);
        if allotment.epoch == 0 {
            self.lose_slices();
            return;
        }
        if allotment.lease_ms > 0 {
            self.dial.lease = Duration::from_millis(allotment.lease_ms.into());
        }
        self.complete = allotment.complete;
        // A resource manager that has started anew learns of the workers bit by bit; what it does not know is as it was.
        let known = |worker: &AllottedWorker| {
            let mut places = self.places.iter();
            places.any(|place| place.is_at(worker) && place.has_devices_of(worker))
        };
        let same = published && allotment.workers.iter().all(known);
        if allotment.epoch != self.epoch {
            for place in &self.places {
                if let Some(link) = &place.link {
                    link.lose("another proxy has had the worker");
                }
            }
            self.epoch = allotment.epoch;
            // Clients that come now wait for the new links. That nothing was this proxy's meanwhile it need not have heard.
            self.sender.send_modify(|state| state.0 = None);
        }
        // Of a cluster that is to have other places, what it says of those that are known is taken until it is complete.
        if !same && (!published || allotment.complete) {
            self.devices = None;
            // Clients that come now wait for the new places.
            self.sender.send_modify(|state| state.0 = None);
            let workers = allotment.workers.into_iter();
            let mut places: Vec<Place> = workers.map(Place::new).collect();
            for place in &mut places {
                let before = self
                    .places
                    .iter_mut()
                    .find(|before| before.is_at(&place.worker));
                let keeps = |before: &&mut Place| {
                    before.is_linked_to(&place.worker.address)
                        && before.has_devices_of(&place.worker)
                };
                if let Some(before) = before.filter(keeps) {
                    place.link = before.link.take();
                }
            }
            self.places = places;
            // What is being dialled is for places of before.
            self.dialling = FuturesUnordered::new();
            return;
        }
        for worker in allotment.workers {
            let mut places = self.places.iter_mut();
            let known = places.find(|place| place.is_at(&worker) && place.has_devices_of(&worker));
            let Some(place) = known else {
                continue;
            };
            match worker.presence() {
                Presence::NotSeen => continue,
                // The resource manager may have been paused, or one connection have broken. A worker that is dead the link's
                // own pings find within a lease.
                Presence::Missed => {}
                // It has been missed for a lease.
                Presence::Gone => {
                    if let Some(link) = &place.link {
                        link.lose(&worker.reason);
                    }
                }
                Presence::Leaving => {
                    if let Some(link) = &place.link {
                        link.leave();
                    }
                }
                Presence::Here if !place.is_linked_to(&worker.address) => {
                    if let Some(link) = &place.link {
                        link.lose("another worker has its place");
                    }
                    if worker.address != place.worker.address {
                        place.retry = None;
                    }
                }
                Presence::Here => {}
            }
            place.worker = worker;
        }
    }

    /// A worker knows of another lease sooner than this proxy, which may have lost the resource manager.
    fn hear_workers(&mut self) {
        let links = self.places.iter().filter_map(|place| place.link.as_ref());
        if links
            .filter(|link| link.epoch == self.epoch)
            .any(|link| link.is_given_away())
        {
            "its slices were given to another proxy, and the resource manager has not answered since"
                .clone_into(&mut self.progress);
            self.sender
                .send_modify(|state| state.1.clone_from(&self.progress));
            self.lose_slices();
        }
    }

    /// The lease is over: others may have the slices, and there is nothing left to go back to. Clients that come now wait.
    fn lose_slices(&mut self) {
        self.complete = false;
        if self.epoch == 0 {
            return;
        }
        tracing::warn!(
            epoch = self.epoch,
            "the proxy's slices were given to others, or may be: all that was on them is lost"
        );
        self.epoch = 0;
        self.dialling = FuturesUnordered::new();
        for place in &mut self.places {
            let why = format!(
                "the resource manager has given slice {} away, having heard nothing of this proxy for its lease",
                place.worker.slice
            );
            if let Some(link) = &place.link {
                link.lose(&why);
            }
            place.dialled = false;
            place.retry = None;
            place.worker.set_presence(Presence::Gone);
            place.worker.reason = why;
        }
        self.sender.send_modify(|state| state.0 = None);
    }

    /// Dials the workers that have no link.
    fn dial_workers(&mut self) {
        let now = Instant::now();
        for (index, place) in self.places.iter_mut().enumerate() {
            if !place.wants_link() || place.retry.is_some_and(|at| at > now) {
                continue;
            }
            place.dialled = true;
            let epoch = self.epoch;
            let lease = self.dial.lease;
            let name = place.name();
            let (address, ids) = (place.worker.address.clone(), device_ids(&place.worker));
            let (attempt, gang, dial) =
                (self.ids.next(), Arc::clone(&self.gang), self.dial.clone());
            self.dialling.push(
                async move {
                    let connect =
                        Link::connect(name.clone(), address, epoch, ids, attempt, &gang, dial);
                    // A worker that has hung takes the connection and says nothing.
                    let link = timeout(lease, connect).await.unwrap_or_else(|_| {
                        Err(status::worker_lost(&name, "it does not take the proxy"))
                    });
                    (index, epoch, link)
                }
                .boxed(),
            );
        }
    }

    fn dialled(&mut self, index: usize, epoch: u64, link: Result<Arc<Link>, Status>) {
        let Some(place) = self.places.get_mut(index) else {
            return;
        };
        place.dialled = false;
        match link {
            Ok(link) if epoch == self.epoch && *link.address == *place.worker.address => {
                tracing::info!(worker = %link.name, "attached");
                place.link = Some(link);
                place.retry = None;
            }
            // Of before; it is dialled again.
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(error = %error.message, "could not attach to a worker, trying again");
                place.retry = Some(Instant::now() + RETRY);
                if self.devices.is_none() {
                    self.sender.send_modify(|state| state.1 = error.message);
                }
            }
        }
    }

    /// Tells sessions of links that have changed. The first time it waits until all workers that are there are attached.
    async fn publish(&mut self) -> std::ops::ControlFlow<()> {
        use std::ops::ControlFlow::{Break, Continue};

        let now = self.sender.borrow().0.clone();
        let first = now.is_none();
        let waits = |place: &Place| {
            let is_there = matches!(place.worker.presence(), Presence::Here | Presence::Missed);
            is_there && !place.is_alive()
        };
        if first && (!self.complete || self.places.iter().any(waits)) {
            return Continue(());
        }
        let unchanged = now.is_some_and(|now| {
            let mut links = self.places.iter().zip(&now.links);
            // A dead link stays until there is another.
            links.all(|(place, link)| {
                let dead = place.link.is_none() && link.is_dead();
                dead || place
                    .link
                    .as_ref()
                    .is_some_and(|new| new.is_same_wire(link))
            })
        });
        if unchanged {
            return Continue(());
        }
        self.ask = None;
        if self.verdict.is_some() {
            let alive = self.places.iter().find(|place| place.is_alive());
            match self
                .flags
                .check(alive.and_then(|place| place.link.as_ref()), &self.ids)
                .await
            {
                Ok(said) => {
                    let refused = matches!(said, Verdict::Refused(_));
                    if let Some(verdict) = self.verdict.take() {
                        // Nobody listens any more when the proxy is going down.
                        let _ = verdict.send(said);
                    }
                    if refused {
                        return Break(());
                    }
                }
                // The worker is gone, and dialled again, or missed; or its compiler failed, which says nothing of the flags.
                Err(error) => {
                    tracing::warn!(error = %error.message, "no worker could be asked about the flags, trying again");
                    self.ask = Some(Instant::now() + RETRY);
                    self.sender.send_modify(|state| {
                        state.1 =
                            format!("asking about the compiler flags again: {}", error.message);
                    });
                    return Continue(());
                }
            }
        }
        let workers: Vec<AllottedWorker> = self.places.iter().map(|p| p.worker.clone()).collect();
        let devices = self
            .devices
            .get_or_insert_with(|| Arc::new(Devices::new(&workers)));
        let mut links = Vec::with_capacity(self.places.len());
        for place in &self.places {
            let link = match &place.link {
                Some(link) => Ok(Arc::clone(link)),
                None => Link::to_nobody(
                    place.name(),
                    self.epoch,
                    "it has not come yet",
                    &self.gang,
                    self.dial.clone(),
                ),
            };
            match link {
                Ok(link) => links.push(link),
                Err(error) => {
                    tracing::error!(error = %error.message, "no link for a place without a worker");
                    return Break(());
                }
            }
        }
        tracing::info!(
            devices = devices.all.len(),
            workers = links.iter().filter(|link| !link.is_dead()).count(),
            places = links.len(),
            "cluster ready"
        );
        let cluster = Cluster {
            devices: Arc::clone(devices),
            links,
        };
        self.gang.tell();
        let progress = self.progress.clone();
        self.sender
            .send_modify(|state| *state = (Some(Arc::new(cluster)), progress));
        Continue(())
    }
}
