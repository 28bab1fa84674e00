//! Wrong, broken and hostile clients against a whole cluster of processes: the same processes live on, other sessions
//! notice nothing, and memory, files and sessions go back to what they were.

use std::{
    env,
    path::{Path, PathBuf},
};

use waystation_tests::{
    abuse,
    fuzz::{
        self, Folders, Plan, Witness,
        scene::{KINDS, VARIANTS},
    },
    processes::{Process, Processes},
};

/// By how much a process may have grown after a run that came after one like it, in KiB.
const GROWTH_KIB: u64 = 64 << 10;

fn python() -> PathBuf {
    match env::var_os("WAYSTATION_TEST_PYTHON") {
        Some(path) => path.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/bin/python"),
    }
}

fn start(folder: &Path, more: &[&str]) -> Processes {
    let mut flags = vec!["--pjrt_plugin=cpu", "--devices_per_worker=2"];
    flags.extend(more);
    Processes::start(
        Path::new(env!("CARGO_BIN_EXE_waystation")),
        &python(),
        folder,
        &flags,
    )
}

/// The same processes, and no larger than before.
fn assert_unharmed(cluster: &Processes, before: &[(String, Process)]) {
    let after = cluster.parts();
    assert_eq!(after.len(), before.len(), "{after:?}");
    for (name, was) in before {
        let is = after[name];
        eprintln!(
            "{name}: {} KiB, before {} KiB; {} files, before {}",
            is.resident_kib, was.resident_kib, is.files, was.files
        );
        assert_eq!(is.pid, was.pid, "{name} is another process");
        assert!(
            is.resident_kib < was.resident_kib + GROWTH_KIB,
            "{name} has grown"
        );
    }
    assert_eq!(cluster.panics(), Vec::<String>::new());
}

fn parts(cluster: &Processes) -> Vec<(String, Process)> {
    cluster.parts().into_iter().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_requests_leave_every_process_as_it_was() {
    let folder = tempfile::tempdir().expect("a folder");
    let shared = tempfile::tempdir().expect("a folder");
    let folders = Folders::new(shared.path());
    let large_transfers = folders.large_transfers().display().to_string();
    let cluster = start(
        folder.path(),
        &["--large_transfer_directory", &large_transfers],
    );
    let plan = Plan::from_environment(1000);
    // What is kept for good (programs, threads, pools) is there after the first run.
    let warm = Plan {
        seed: plan.seed.wrapping_add(1),
        requests: 500.max(plan.requests / 4),
        ..plan
    };
    fuzz::run(&cluster.proxy, &folders, warm)
        .await
        .expect("served");
    cluster.wait_until_empty(0);
    let before = parts(&cluster);
    assert_eq!(before.len(), 3, "{before:?}");

    let witness = Witness::start(&cluster.proxy).await.expect("a witness");
    let report = fuzz::run(&cluster.proxy, &folders, plan).await;
    witness.more(1).await;
    let rounds = witness.end().await;
    let report = report.expect("the server takes sessions and good requests to the end");
    eprintln!("{report}the other session did {rounds:?} rounds meanwhile");
    assert!(rounds.expect("every result of the other session is right") > 0);
    assert!(report.decoded_total() * 2 >= report.sent());
    assert_eq!(
        report.kinds().len(),
        KINDS + VARIANTS,
        "a kind of request is missing: {:?}",
        report.kinds()
    );
    assert_eq!(report.called("a call without an answer", -1), 0);
    folders.untouched().expect("what lies outside");
    assert_eq!(report.with_code(15), 0, "DATA_LOSS: a worker was lost");
    cluster.wait_until_empty(0);
    assert_unharmed(&cluster, &before);
}

/// `n`, or what a variable says.
fn count(variable: &str, n: usize) -> usize {
    env::var(variable)
        .ok()
        .and_then(|text| text.parse().ok())
        .unwrap_or(n)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_clients_leave_every_process_as_it_was() {
    let folder = tempfile::tempdir().expect("a folder");
    let cluster = start(folder.path(), &[]);
    let address = cluster.proxy.as_str();
    let sessions = count("WAYSTATION_ABUSE_SESSIONS", 50);
    let witness = Witness::start(address).await.expect("a witness");
    let mut before = Vec::new();
    // What is kept for good is there after the first round, and the most that is held at a time.
    for _ in 0..2 {
        before = parts(&cluster);
        let rounds = witness.rounds();
        abuse::headers(address).await;
        abuse::claims(address).await;
        abuse::resets(address, 10 * sessions).await;
        abuse::never_used(address, sessions).await;
        abuse::broken_streams(address).await;
        abuse::broken_stores(address).await;
        abuse::raw_messages(address).await;
        abuse::come_and_go(address, sessions).await;
        witness.more(1).await;
        assert!(witness.rounds() > rounds, "the witness has come to a halt");
    }
    abuse::unread_replies(address, 20_000, async {
        for (name, was) in &before {
            let is = cluster.parts()[name];
            eprintln!("{name} with replies unread: {} KiB", is.resident_kib);
            assert!(is.resident_kib < was.resident_kib + GROWTH_KIB, "{name}");
        }
    })
    .await;
    let rounds = witness.end().await.expect("every result of the witness");
    eprintln!("{sessions} sessions of each sort; the other session did {rounds} rounds meanwhile");
    cluster.wait_until_empty(0);
    assert_unharmed(&cluster, &before);
    // Connections are closed a little after their clients.
    for (name, was) in &before {
        cluster.wait_until(&format!("{name} has closed its files"), || {
            cluster.parts()[name].files <= was.files
        });
    }
}
