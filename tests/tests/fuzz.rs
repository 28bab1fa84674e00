//! Damaged requests against a proxy and workers in this process. `runtime/cli/tests/abuse.rs` does the same to processes.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use waystation_worker::CompileChild;

use waystation_tests::{
    cluster::Cluster,
    fuzz::{
        self, Folders, Plan, Scene, Witness,
        random::Random,
        scene::{KINDS, VARIANTS},
    },
};

/// What is answered UNIMPLEMENTED or, since only one is allowed, refused.
const NOT_SERVED: [&str; 6] = [
    "InitRequest",
    "LoadedExecutableCostAnalysisRequest",
    "LoadedExecutableMpmdMetadataRequest",
    "LoadedExecutableMpmdCostAnalysisRequest",
    "LoadedHostCallbackPollRequest",
    "LoadedHostCallbackReturnRequest",
];

/// Calls outside the stream that must also have gone well.
const GOOD_CALLS: [&str; 3] = [
    "HostBufferReadFromDisk",
    "a persistence write",
    "a persistence read",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_good_request_of_every_kind_is_served() {
    let cluster = Cluster::start(1, 2).await;
    let folder = tempfile::tempdir().expect("a folder");
    let folders = Folders::new(folder.path());
    let mut scene = Scene::open(&cluster.proxy, &folders)
        .await
        .expect("a scene");
    let mut random = Random::new(1);
    let (mut kinds, mut variants) = (BTreeSet::new(), BTreeSet::new());
    for kind in 0..KINDS {
        // Each kind has variants.
        for _ in 0..12 {
            let request = scene
                .request(kind, &mut random)
                .await
                .expect("the scene makes it");
            let name = fuzz::scene::name(&request);
            kinds.insert(name);
            variants.insert(scene.label(&request));
            let answer = scene.client.call(request).await;
            if !NOT_SERVED.contains(&name) {
                answer.unwrap_or_else(|e| panic!("{name}: {e}"));
            }
        }
    }
    assert_eq!(kinds.len(), KINDS);
    assert_eq!(variants.len(), KINDS + VARIANTS, "{variants:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_requests_end_nothing_but_their_own_session() {
    // Tasks that panic take their session with them and nobody else; they must not panic at all.
    let panics = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&panics);
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        count.fetch_add(1, Relaxed);
        before(info);
    }));
    // Programs are damaged too, and would end this process if they were compiled in it.
    let folder = tempfile::tempdir().expect("a folder");
    let folders = Folders::new(folder.path());
    let worker = |config: &mut waystation_worker::Config| {
        config.compile_child = Some(CompileChild {
            program: env!("CARGO_BIN_EXE_compile_child").into(),
            name: None,
            arguments: vec!["fuzz".into()],
            cpu_only: true,
        });
    };
    let large_transfers = folders.large_transfers();
    let proxy = |config: &mut waystation_proxy::Config| {
        config.large_transfer_directory = Some(large_transfers);
    };
    let cluster = Cluster::start_changed(1, 2, worker, proxy).await;
    let witness = Witness::start(&cluster.proxy).await.expect("a witness");
    let plan = Plan::from_environment(2000);
    let report = fuzz::run(&cluster.proxy, &folders, plan).await;
    witness.more(1).await;
    let rounds = witness.end().await;
    let report = report.expect("the server takes sessions and good requests to the end");
    eprintln!("{report}the other session did {rounds:?} rounds meanwhile");
    assert_eq!(panics.load(Relaxed), 0, "something panicked");
    assert!(rounds.expect("every result of the other session is right") > 0);
    assert!(
        report.decoded_total() * 2 >= report.sent(),
        "fewer than half of the requests decode"
    );
    assert_eq!(
        report.kinds().len(),
        KINDS + VARIANTS,
        "a kind of request is missing: {:?}",
        report.kinds()
    );
    for call in GOOD_CALLS {
        assert!(report.called(call, 0) > 0, "{call} never succeeds");
    }
    assert_eq!(report.called("a call without an answer", -1), 0);
    folders.untouched().expect("what lies outside");
    assert_eq!(report.with_code(15), 0, "DATA_LOSS: a worker was lost");
    cluster.wait_until_empty(Duration::from_secs(10)).await;
}
