//! The resource manager over a real socket: workers by a hand-driven stream, proxies by the crate's own client.

#![allow(
    clippy::unwrap_used,
    reason = "clippy does not see that the helpers belong to tests"
)]

use std::{net::TcpListener, time::Duration};

use tokio::{sync::mpsc, task::JoinHandle, time::timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Streaming};
use waystation_proto::waystation::scheduler::{
    AllotRequest, Allotment, Beat, Hello, WorkerInventory, WorkerOrder, WorkerReport,
    allotted_worker::Presence, resource_manager_client::ResourceManagerClient,
    worker_inventory::Device, worker_report::Report,
};
use waystation_scheduler::{Config, client, serve};

const PATIENCE: Duration = Duration::from_secs(20);
/// Where a test waits for its end.
const LEASE: Duration = Duration::from_secs(2);

struct Manager {
    address: String,
    stop: CancellationToken,
    served: JoinHandle<Result<(), waystation_scheduler::Error>>,
}

fn start(slices: u32, listener: TcpListener) -> Manager {
    start_with(slices, listener, waystation_scheduler::DEFAULT_LEASE)
}

fn start_with(slices: u32, listener: TcpListener, lease: Duration) -> Manager {
    let address = listener.local_addr().unwrap().to_string();
    let stop = CancellationToken::new();
    let config = Config {
        expected_slices: slices,
        lease,
        ..Config::new(listener)
    };
    let served = tokio::spawn(serve(config, stop.clone()));
    Manager {
        address,
        stop,
        served,
    }
}

fn any_port() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}

impl Manager {
    async fn stop(self) {
        self.stop.cancel();
        timeout(PATIENCE, self.served)
            .await
            .unwrap()
            .unwrap()
            .unwrap();
    }

    async fn worker(&self, slice: u32) -> Worker {
        self.worker_at(slice, &format!("worker{slice}:1")).await
    }

    async fn worker_at(&self, slice: u32, at: &str) -> Worker {
        let mut client = ResourceManagerClient::connect(format!("http://{}", self.address))
            .await
            .unwrap();
        let (reports, outbound) = mpsc::channel(4);
        let hello = Hello {
            address: at.to_owned(),
            slice,
            slice_tasks: 1,
            link_version: waystation_proto::LINK_VERSION,
            build_id: waystation_proto::BUILD_ID.to_owned(),
            inventory: Some(WorkerInventory {
                platform_name: "cpu".to_owned(),
                devices: vec![Device::default(); 4],
                ..WorkerInventory::default()
            }),
            ..Hello::default()
        };
        let report = WorkerReport {
            report: Some(Report::Hello(hello)),
        };
        reports.send(report).await.unwrap();
        let orders = client
            .register(ReceiverStream::new(outbound))
            .await
            .unwrap()
            .into_inner();
        let beats = tokio::spawn(async move {
            let beat = || WorkerReport {
                report: Some(Report::Beat(Beat::default())),
            };
            while reports.send(beat()).await.is_ok() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        });
        Worker { beats, orders }
    }

    fn proxy(&self, name: &str) -> Proxy {
        self.asking(request(name))
    }

    fn asking(&self, request: AllotRequest) -> Proxy {
        let stop = CancellationToken::new();
        let watch = client::watch(self.address.clone(), request, stop.clone());
        Proxy {
            allotments: watch.allotments,
            ended: watch.ended,
            stop,
        }
    }
}

fn request(proxy: &str) -> AllotRequest {
    AllotRequest {
        link_version: waystation_proto::LINK_VERSION,
        build_id: waystation_proto::BUILD_ID.to_owned(),
        proxy: proxy.to_owned(),
        ..AllotRequest::default()
    }
}

struct Worker {
    beats: JoinHandle<()>,
    orders: Streaming<WorkerOrder>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.beats.abort();
    }
}

struct Proxy {
    allotments: tokio::sync::watch::Receiver<Option<Allotment>>,
    ended: JoinHandle<()>,
    stop: CancellationToken,
}

impl Proxy {
    async fn until(&mut self, wanted: impl Fn(&Allotment) -> bool) -> Allotment {
        let seen = self
            .allotments
            .wait_for(|now| now.as_ref().is_some_and(&wanted));
        timeout(PATIENCE, seen)
            .await
            .expect("the allotment never came")
            .unwrap()
            .clone()
            .unwrap()
    }
}

#[tokio::test]
async fn a_proxy_sees_workers_come_go_and_come_back_under_one_epoch() {
    let manager = start(2, any_port());
    let mut proxy = manager.proxy("p");
    let empty = proxy.until(|_| true).await;
    assert!(!empty.complete);
    assert_eq!(empty.progress, "no worker yet of 2 slice(s)");
    assert_eq!(empty.epoch, 0, "somebody may have the slices");

    let mut first = manager.worker(0).await;
    assert_eq!(
        first
            .orders
            .message()
            .await
            .unwrap()
            .unwrap()
            .first_device_id,
        0
    );
    proxy
        .until(|now| now.progress == "1 of 2 slices (1 of 2 workers)")
        .await;
    let mut second = manager.worker(1).await;
    assert_eq!(
        second
            .orders
            .message()
            .await
            .unwrap()
            .unwrap()
            .first_device_id,
        4
    );
    let full = proxy.until(|now| now.complete).await;
    let ids: Vec<_> = full
        .workers
        .iter()
        .map(|w| (w.address.as_str(), w.slice, w.first_device_id))
        .collect();
    assert_eq!(ids, [("worker0:1", 0, 0), ("worker1:1", 1, 4)]);
    assert!(full.epoch > 0);

    drop(first);
    let less = proxy.until(|now| now.progress != full.progress).await;
    assert!(less.complete, "it may be back");
    let places: Vec<_> = less
        .workers
        .iter()
        .map(|w| (w.presence(), w.first_device_id, w.reason.as_str()))
        .collect();
    let ended = "its stream to the resource manager ended";
    assert_eq!(
        places,
        [(Presence::Missed, 0, ended), (Presence::Here, 4, "")]
    );
    let mut back = manager.worker(0).await;
    assert_eq!(
        back.orders
            .message()
            .await
            .unwrap()
            .unwrap()
            .first_device_id,
        0
    );
    let again = proxy.until(|now| now.progress == full.progress).await;
    assert_eq!(again.epoch, full.epoch);
    let status = client::status(&manager.address).await.unwrap();
    assert_eq!((status.expected_workers, status.workers.len()), (2, 2));
    manager.stop().await;
}

#[tokio::test]
async fn an_instance_type_says_how_many_workers_a_slice_has() {
    let listener = any_port();
    let address = listener.local_addr().unwrap().to_string();
    let stop = CancellationToken::new();
    let config = Config {
        expected_slices: 2,
        instance_type: Some("tpuv6e:2x4".parse().unwrap()),
        ..Config::new(listener)
    };
    let served = tokio::spawn(serve(config, stop.clone()));
    let status = client::status(&address).await.unwrap();
    assert_eq!(status.instance_type, "tpuv6e:2x4");
    assert_eq!(status.expected_workers, 4);
    stop.cancel();
    timeout(PATIENCE, served).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn a_second_proxy_is_told_to_wait_and_gets_the_workers_under_a_greater_epoch() {
    let manager = start(1, any_port());
    let _worker = manager.worker(0).await;
    let mut first = manager.proxy("first");
    let held = first.until(|now| now.complete).await;
    let mut second = manager.proxy("second");
    let waiting = second.until(|_| true).await;
    assert_eq!(
        waiting.progress,
        "waiting for the only slice: proxy first holds 1, 0 free with all workers"
    );
    assert!(!waiting.complete && waiting.workers.is_empty() && waiting.epoch == 0);
    first.stop.cancel();
    let given = second.until(|now| now.complete).await;
    assert!(
        given.epoch > held.epoch,
        "{} after {}",
        given.epoch,
        held.epoch
    );
    // Dropping every receiver gives the workers back too.
    drop(second);
    let mut third = manager.proxy("third");
    assert!(third.until(|now| now.complete).await.epoch > given.epoch);
    manager.stop().await;
}

#[tokio::test]
async fn proxies_share_a_resource_manager_and_no_slice() {
    let manager = start(3, any_port());
    let mut workers = Vec::new();
    for slice in 0..3 {
        workers.push(manager.worker(slice).await);
    }
    let of = |name: &str, types: &[&str]| {
        manager.asking(AllotRequest {
            virtual_slices: types.iter().map(|&kind| kind.to_owned()).collect(),
            ..request(name)
        })
    };
    let mut one = of("one", &["cpu:4"]);
    let had = one.until(|now| now.complete).await;
    let mut two = of("two", &["cpu:4", "cpu:4"]);
    let has = two.until(|now| now.complete).await;
    assert_eq!((&had.slices[..], &has.slices[..]), (&[0][..], &[1, 2][..]));
    let devices: Vec<_> = has
        .workers
        .iter()
        .map(|w| (w.virtual_slice, w.slice, w.first_device_id))
        .collect();
    assert_eq!(devices, [(0, 1, 4), (1, 2, 8)]);
    // The third waits behind the second, although fewer would do for it, until one is free.
    let mut big = of("big", &["cpu:4", "cpu:4"]);
    big.until(|now| now.epoch == 0).await;
    let mut small = of("small", &["cpu:4"]);
    let waiting = small.until(|now| now.epoch == 0).await;
    assert_eq!(
        waiting.progress,
        "waiting for 1 slice of cpu:4: proxy one holds 1, proxy two holds 2, 0 free with all workers; place 2 in the queue"
    );
    one.stop.cancel();
    let still = big.until(|now| now.progress.contains("1 free")).await;
    assert_eq!(still.epoch, 0);
    two.stop.cancel();
    assert_eq!(big.until(|now| now.complete).await.slices, [0, 1]);
    assert_eq!(small.until(|now| now.complete).await.slices, [2]);
    let proxies = client::status(&manager.address).await.unwrap().proxies;
    let has: Vec<_> = proxies
        .iter()
        .map(|p| (p.name.as_str(), p.slices.len()))
        .collect();
    assert_eq!(has, [("big", 2), ("small", 1)]);
    manager.stop().await;
}

#[tokio::test]
async fn slices_may_be_missing_from_the_start_and_their_devices_are_shown() {
    let manager = start_with(2, any_port(), LEASE);
    let _worker = manager.worker(1).await;
    let mut proxy = manager.asking(AllotRequest {
        elastic_slices: 1,
        ..request("p")
    });
    let allotment = proxy.until(|now| now.complete).await;
    let places: Vec<_> = allotment
        .workers
        .iter()
        .map(|w| (w.presence(), w.first_device_id))
        .collect();
    assert_eq!(places, [(Presence::NotSeen, 0), (Presence::Here, 4)]);
    let missing = allotment.workers[0].inventory.as_ref().unwrap();
    assert_eq!(missing.devices.len(), 4);
    manager.stop().await;
}

#[tokio::test]
async fn slices_that_can_never_be_had_are_refused() {
    let manager = start(1, any_port());
    let mut client = ResourceManagerClient::connect(format!("http://{}", manager.address))
        .await
        .unwrap();
    for (types, said) in [
        (vec!["cpu:4", "cpu:4"], "2 slices"),
        (vec!["tpuv9:2x2"], "tpuv9"),
    ] {
        let wanted = AllotRequest {
            virtual_slices: types.into_iter().map(str::to_owned).collect(),
            ..request("p")
        };
        let refusal = client.allot(wanted).await.unwrap_err();
        assert_eq!(refusal.code(), Code::InvalidArgument);
        assert!(refusal.message().contains(said), "{refusal}");
    }
    manager.stop().await;
}

#[tokio::test]
async fn a_worker_for_a_taken_place_is_refused() {
    let manager = start(1, any_port());
    let mut first = manager.worker(0).await;
    first.orders.message().await.unwrap().unwrap();
    let mut second = manager.worker_at(0, "elsewhere:1").await;
    let refusal = second.orders.message().await.unwrap_err();
    assert_eq!(refusal.code(), Code::FailedPrecondition);
    assert!(
        refusal
            .message()
            .contains("taken by the live worker at worker0:1"),
        "{refusal}"
    );
    manager.stop().await;
    assert_eq!(
        first.orders.message().await.unwrap_err().code(),
        Code::Unavailable
    );
}

#[tokio::test]
async fn a_proxy_of_another_link_version_is_refused_naming_both() {
    let manager = start(1, any_port());
    let mut client = ResourceManagerClient::connect(format!("http://{}", manager.address))
        .await
        .unwrap();
    let old = AllotRequest {
        link_version: 77,
        build_id: "waystation 0.0.1".to_owned(),
        ..request("old")
    };
    let refusal = client.allot(old).await.unwrap_err();
    assert_eq!(refusal.code(), Code::FailedPrecondition);
    assert!(
        refusal
            .message()
            .contains("link version 77 (waystation 0.0.1)"),
        "{refusal}"
    );
    assert!(
        refusal.message().contains(waystation_proto::BUILD_ID),
        "{refusal}"
    );
    manager.stop().await;
}

#[tokio::test]
async fn a_proxy_outlives_the_resource_manager_with_its_epoch_and_its_ids() {
    let manager = start_with(1, any_port(), LEASE);
    let worker = manager.worker(0).await;
    let mut proxy = manager.proxy("p");
    let before = proxy.until(|now| now.complete).await;
    let address = manager.address.clone();
    manager.stop().await;
    drop(worker);
    let seen = proxy.allotments.borrow_and_update().clone();
    assert_eq!(seen, Some(before.clone()), "the last allotment stays");

    let manager = start_with(1, TcpListener::bind(&address).unwrap(), LEASE);
    // The new resource manager knows no worker at first.
    proxy.until(|now| !now.complete).await;
    let _worker = manager.worker(0).await;
    let after = proxy.until(|now| now.complete).await;
    assert_eq!(
        after,
        Allotment {
            ticket: after.ticket,
            ..before.clone()
        }
    );
    // A proxy that comes later gets a greater epoch all the same.
    proxy.stop.cancel();
    let mut next = manager.proxy("next");
    assert!(next.until(|now| now.complete).await.epoch > before.epoch);
    manager.stop().await;
}

#[tokio::test]
async fn what_is_no_address_ends_the_watch() {
    let stop = CancellationToken::new();
    let mut watch = client::watch("not an address".to_owned(), request("p"), stop);
    assert!(
        timeout(PATIENCE, watch.allotments.changed())
            .await
            .unwrap()
            .is_err()
    );
    let error = client::status("not an address").await.unwrap_err();
    assert!(matches!(error, client::Error::Address { .. }), "{error}");
}

#[tokio::test]
async fn a_proxy_that_ends_without_a_goodbye_is_waited_for() {
    let manager = start_with(1, any_port(), LEASE);
    let _worker = manager.worker(0).await;
    let mut first = manager.proxy("first");
    let held = first.until(|now| now.complete).await;
    let mut second = manager.proxy("second");
    second.until(|_| true).await;
    // As with a connection that is reset: the task that would say goodbye is no more.
    first.ended.abort();
    let kept = second
        .until(|now| now.progress.contains("not heard of"))
        .await;
    assert_eq!(kept.epoch, 0);
    assert!(second.until(|now| now.complete).await.epoch > held.epoch);
    manager.stop().await;
}
