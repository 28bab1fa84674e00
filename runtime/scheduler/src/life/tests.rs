//! A worker's life on a paused clock.

use tokio_stream::wrappers::ReceiverStream;
use waystation_proto::waystation::scheduler::{
    Beat, Leaving, WorkerInventory, worker_inventory::Device,
};

use super::*;
use crate::cluster::Cluster;

const LEASE: Duration = Duration::from_secs(10);

struct Worker {
    reports: mpsc::Sender<Result<WorkerReport, Status>>,
    orders: mpsc::Receiver<Result<WorkerOrder, Status>>,
    stop: CancellationToken,
}

fn start(state: &Arc<State>) -> Worker {
    let (reports, inbound) = mpsc::channel(4);
    let (outbound, orders) = mpsc::channel(2);
    let stop = CancellationToken::new();
    tokio::spawn(watch(
        Arc::clone(state),
        ReceiverStream::new(inbound),
        outbound,
        LEASE,
        stop.clone(),
    ));
    Worker {
        reports,
        orders,
        stop,
    }
}

impl Worker {
    async fn hello(&self, slice: u32) {
        let hello = Hello {
            address: format!("host{slice}:1"),
            slice,
            slice_tasks: 1,
            link_version: waystation_proto::LINK_VERSION,
            build_id: waystation_proto::BUILD_ID.to_owned(),
            inventory: Some(WorkerInventory {
                devices: vec![Device::default(); 4],
                ..WorkerInventory::default()
            }),
            ..Hello::default()
        };
        self.report(Report::Hello(hello)).await;
    }

    async fn report(&self, report: Report) {
        self.reports
            .send(Ok(WorkerReport {
                report: Some(report),
            }))
            .await
            .unwrap();
    }

    async fn farewell(&mut self) -> Status {
        self.orders.recv().await.unwrap().unwrap_err()
    }
}

#[tokio::test(start_paused = true)]
async fn beats_keep_a_worker_alive_and_silence_for_the_lease_kills_it() {
    let state = State::new(Cluster::new(1, None, None), LEASE);
    let mut worker = start(&state);
    worker.hello(0).await;
    assert_eq!(
        worker.orders.recv().await.unwrap().unwrap().first_device_id,
        0
    );
    for _ in 0..5 {
        tokio::time::sleep(LEASE - Duration::from_secs(1)).await;
        worker.report(Report::Beat(Beat::default())).await;
    }
    tokio::time::sleep(LEASE - Duration::from_secs(1)).await;
    assert_eq!(state.status().workers.len(), 1);
    let since = tokio::time::Instant::now();
    let status = worker.farewell().await;
    assert_eq!(status.code(), tonic::Code::Unavailable);
    assert!(status.message().contains("no beat"), "{status}");
    assert!(since.elapsed() <= Duration::from_secs(2));
    assert!(state.status().workers.is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_order_waits_until_the_size_of_the_slices_before_it_is_known() {
    let state = State::new(Cluster::new(2, None, None), LEASE);
    let mut second = start(&state);
    second.hello(1).await;
    let mut first = start(&state);
    first.hello(0).await;
    assert_eq!(
        first.orders.recv().await.unwrap().unwrap().first_device_id,
        0
    );
    let told = WorkerOrder {
        first_device_id: 4,
        lease_ms: 10_000,
    };
    assert_eq!(second.orders.recv().await.unwrap().unwrap(), told);
}

#[tokio::test(start_paused = true)]
async fn a_worker_whose_stream_ends_counts_as_there_for_a_lease() {
    let state = State::new(Cluster::new(1, None, None), LEASE);
    let here = async |worker: Option<Worker>| {
        drop(worker);
        tokio::time::sleep(Duration::from_millis(1)).await;
        (state.status().workers.len(), state.progress())
    };
    let missed = (0, "1 of 1 workers, 1 of them not heard of".to_owned());
    let there = (1, "1 of 1 workers".to_owned());
    let worker = start(&state);
    worker.hello(0).await;
    assert_eq!(here(None).await, there);
    assert_eq!(here(Some(worker)).await, missed);
    // It comes back: what was told of its first stream is void, then and later.
    tokio::time::sleep(LEASE / 2).await;
    let worker = start(&state);
    worker.hello(0).await;
    assert_eq!(here(None).await, there);
    tokio::time::sleep(LEASE * 2 / 3).await;
    assert_eq!(here(None).await, there);
    // Away for too long.
    assert_eq!(here(Some(worker)).await, missed);
    tokio::time::sleep(LEASE).await;
    assert_eq!(here(None).await, (0, "0 of 1 workers".to_owned()));
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_leaves_says_so_and_its_place_is_free_at_once() {
    let state = State::new(Cluster::new(1, None, None), LEASE);
    let mut worker = start(&state);
    worker.hello(0).await;
    worker.orders.recv().await.unwrap().unwrap();
    worker.report(Report::Leaving(Leaving {})).await;
    let status = worker.farewell().await;
    assert!(status.message().contains("told to end"), "{status}");
    assert!(state.status().workers.is_empty());
}

#[tokio::test(start_paused = true)]
async fn silence_or_a_beat_before_hello_is_refused() {
    let state = State::new(Cluster::new(1, None, None), LEASE);
    let mut silent = start(&state);
    assert_eq!(silent.farewell().await.code(), tonic::Code::InvalidArgument);
    let mut hasty = start(&state);
    hasty.report(Report::Beat(Beat::default())).await;
    assert_eq!(hasty.farewell().await.code(), tonic::Code::InvalidArgument);
}

#[tokio::test(start_paused = true)]
async fn a_second_hello_ends_the_worker() {
    let state = State::new(Cluster::new(1, None, None), LEASE);
    let mut worker = start(&state);
    worker.hello(0).await;
    worker.orders.recv().await.unwrap().unwrap();
    worker.hello(0).await;
    assert_eq!(worker.farewell().await.code(), tonic::Code::InvalidArgument);
    assert!(state.status().workers.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_stopping_resource_manager_says_so() {
    let state = State::new(Cluster::new(1, None, None), LEASE);
    let mut worker = start(&state);
    worker.hello(0).await;
    worker.orders.recv().await.unwrap().unwrap();
    worker.stop.cancel();
    assert_eq!(worker.farewell().await.code(), tonic::Code::Unavailable);
}
