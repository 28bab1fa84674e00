//! Many workers and clients, over the real link, with workers that compute nothing and take ops when they like.
//!
//! `WAYSTATION_SOAK=1` (set by `make soak`) runs it at full length.

use std::collections::{HashMap, HashSet};

use bytes::Bytes;
use tokio_util::sync::CancellationToken;
use waystation_client::{Client, Request, Response, request};
use waystation_proto::xla::ifrt::proxy::{
    CheckValueReadyRequest, DestructArrayRequest, DisassembleIntoSingleDeviceArraysRequest,
};
use waystation_tests::{
    null_worker::{NullWorkers, Pace, TAKES},
    persist::persist,
};

const WORKERS: u32 = 4;
const CLIENTS: u64 = 4;
const LAUNCHES: u64 = 200;

async fn compile(client: &Client, devices: &[i32]) -> u64 {
    match client.call(request::compile(b"null", devices)).await {
        Ok(Response::CompileResponse(compiled)) => compiled.loaded_executable_handle,
        other => panic!("{other:?}"),
    }
}

/// Executes programs over all sorts of workers in turn, without waiting, each on the result before; then waits for all.
async fn use_workers(client: Client, number: u64) {
    let sets: [&[i32]; 6] = [&[0, 1], &[1, 2, 3], &[3, 0], &[2], &[3, 2, 1, 0], &[0]];
    let mut chains = Vec::new();
    for devices in sets {
        let program = compile(&client, devices).await;
        let array = client.handle();
        client
            .store(array, Bytes::from_static(&[0; 4]))
            .await
            .expect("stored");
        // Its shape is not what the program takes, but nobody looks.
        let made = request::make_array(array, &[1], devices, None);
        client.call(made).await.expect("made");
        chains.push((program, array));
    }
    for launch in 0..LAUNCHES {
        // Each client in an order of its own.
        let pick = (launch * (2 * number + 1) + launch / 7) % 6;
        let (program, array) = &mut chains[usize::try_from(pick).expect("few")];
        let result = client.handle();
        drop(
            client
                .send(request::execute(*program, &[*array], &[result], 1))
                .await,
        );
        let forgotten = DestructArrayRequest {
            array_handle: vec![std::mem::replace(array, result)],
        };
        drop(client.send(Request::DestructArrayRequest(forgotten)).await);
    }
    let all = CheckValueReadyRequest {
        value_handles: chains.into_iter().map(|(_, array)| array).collect(),
    };
    client
        .call(Request::CheckValueReadyRequest(all))
        .await
        .expect("ready");
}

/// Such workers, and the address of a proxy that has them.
fn start(count: u32, pace: Pace, stop: &CancellationToken) -> (NullWorkers, String) {
    start_with(count, pace, &[], stop)
}

/// Like [`start`], with compiler flags.
fn start_with(
    count: u32,
    pace: Pace,
    xla_flags: &[&str],
    stop: &CancellationToken,
) -> (NullWorkers, String) {
    let listener = || std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    let manager = listener();
    let address = manager.local_addr().expect("bound").to_string();
    let mut config = waystation_scheduler::Config::new(manager);
    config.workers_per_slice = Some(count);
    tokio::spawn(waystation_scheduler::serve(config, stop.clone()));
    let workers = NullWorkers::start(count, &address, pace, stop);
    let front = listener();
    let proxy = front.local_addr().expect("bound").to_string();
    let mut config = waystation_proxy::Config::new(front, address);
    config.xla_flags = xla_flags.iter().map(|&flag| flag.to_owned()).collect();
    tokio::spawn(waystation_proxy::serve(config, stop.clone()));
    (workers, proxy)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_take_no_part_in_spanning_programs_are_named() {
    let stop = CancellationToken::new();
    let _ends = stop.clone().drop_guard();
    let (_workers, proxy) = start(2, Pace::Alone, &stop);
    let client = Client::connect(&proxy).await.expect("served");
    let error = client.call(request::compile(b"null", &[0, 1])).await;
    let error = error.expect_err("refused");
    assert_eq!(error.code(), Some(12), "{error}");
    for part in ["task 0", "task 1", "it is alone"] {
        assert!(error.to_string().contains(part), "{error}");
    }
    compile(&client, &[1]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flags_that_nobody_could_be_asked_about_are_asked_about_again() {
    let stop = CancellationToken::new();
    let _ends = stop.clone().drop_guard();
    let (_workers, proxy) = start_with(1, Pace::Unsure, &["--xla_some=1"], &stop);
    let served = async {
        let client = Client::connect(&proxy).await.expect("served");
        compile(&client, &[0]).await
    };
    let limit = std::time::Duration::from_secs(300);
    let served = tokio::time::timeout(limit, served).await;
    served.expect("the proxy goes on");
}

/// A save may have to wait for host memory before it copies, behind others' saves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_launch_gets_its_place_when_what_it_takes_over_has_been_copied() {
    let stop = CancellationToken::new();
    let _ends = stop.clone().drop_guard();
    let (workers, proxy) = start(WORKERS, Pace::Even, &stop);
    let client = Client::connect(&proxy).await.expect("served");
    let (all, folder) = ([0, 1, 2, 3], std::path::Path::new("/nowhere"));
    let program = match client.call(request::compile(TAKES, &all)).await {
        Ok(Response::CompileResponse(compiled)) => compiled.loaded_executable_handle,
        other => panic!("{other:?}"),
    };
    let mut arrays = Vec::new();
    for _ in 0..2 {
        let array = client.handle();
        let stored = client.store(array, Bytes::from_static(&[0; 16])).await;
        stored.expect("stored");
        let made = request::make_array(array, &[4], &all, None);
        client.call(made).await.expect("made");
        arrays.push(array);
    }
    let save = async |array: u64| {
        let save = persist(&client, folder, &["array"], false).await;
        let saved = request::execute(save, &[array], &[], 1);
        client.call(saved).await.expect("begun");
    };
    save(arrays[0]).await;
    let taken = client.handle();
    let execute = request::execute(program, &[arrays[0]], &[taken], 1);
    client.call(execute).await.expect("sent");
    // It has come to the workers before this is asked.
    let ready = CheckValueReadyRequest {
        value_handles: vec![arrays[1]],
    };
    let ready = client.call(Request::CheckValueReadyRequest(ready));
    ready.await.expect("ready");
    let seen = workers.seen();
    assert!(seen.iter().all(Vec::is_empty), "{seen:?}");
    save(arrays[1]).await;
    let placed = async {
        while workers.seen().iter().any(Vec::is_empty) {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    let limit = std::time::Duration::from_secs(60);
    let placed = tokio::time::timeout(limit, placed).await;
    placed.expect("the launch has its place");
}

/// The first worker's part of each execution ends, the second's does not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_piece_is_there_when_its_own_worker_has_it() {
    let stop = CancellationToken::new();
    let _ends = stop.clone().drop_guard();
    let (_workers, proxy) = start(2, Pace::OneEnds, &stop);
    let client = Client::connect(&proxy).await.expect("served");
    let program = compile(&client, &[0, 1]).await;
    let array = client.handle();
    let stored = client.store(array, Bytes::from_static(&[0; 4])).await;
    stored.expect("stored");
    let made = request::make_array(array, &[1], &[0, 1], None);
    client.call(made).await.expect("made");
    // From the second time on the proxy foresees that the client waits.
    for _ in 0..3 {
        let (result, pieces) = (client.handle(), [client.handle(), client.handle()]);
        let execute = request::execute(program, &[array], &[result], 1);
        client.call(execute).await.expect("sent");
        let split = DisassembleIntoSingleDeviceArraysRequest {
            array_handle: result,
            result_handles: pieces.to_vec(),
            ..Default::default()
        };
        let split = Request::DisassembleIntoSingleDeviceArraysRequest(split);
        client.call(split).await.expect("split");
        let ready = CheckValueReadyRequest {
            value_handles: vec![pieces[0]],
        };
        let ready = client.call(Request::CheckValueReadyRequest(ready));
        let limit = std::time::Duration::from_secs(60);
        let ready = tokio::time::timeout(limit, ready).await;
        ready.expect("it waits for the other one").expect("ready");
    }
}

/// Reversed order on two workers would let two launches wait for each other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_workers_get_the_launches_that_they_share_in_one_order() {
    let seeds = match std::env::var_os("WAYSTATION_SOAK") {
        Some(_) => 50,
        None => 2,
    };
    for seed in 0..seeds {
        let stop = CancellationToken::new();
        let _ends = stop.clone().drop_guard();
        let (workers, proxy) = start(WORKERS, Pace::Random(seed), &stop);
        let mut clients = Vec::new();
        for number in 0..CLIENTS {
            let client = Client::connect(&proxy).await.expect("served");
            clients.push(tokio::spawn(use_workers(client, number)));
        }
        for client in clients {
            client.await.expect("no panic");
        }
        // However many workers there are, each hears of its own devices.
        assert!(workers.largest() < 64, "{} bytes", workers.largest());
        let seen = workers.seen();
        let mut by_worker: Vec<Vec<u64>> = Vec::new();
        let mut parts: HashMap<u64, usize> = HashMap::new();
        for launches in &seen {
            by_worker.push(launches.iter().map(|(launch, _)| *launch).collect());
            for (launch, _) in launches {
                *parts.entry(*launch).or_default() += 1;
            }
        }
        assert_eq!(
            parts.len() as u64,
            CLIENTS * LAUNCHES,
            "each has a number of its own"
        );
        for one in &by_worker {
            let here: HashSet<u64> = one.iter().copied().collect();
            assert_eq!(here.len(), one.len(), "each came once");
            for other in &by_worker {
                let there: HashSet<u64> = other.iter().copied().collect();
                let shared = |launches: &[u64], with: &HashSet<u64>| -> Vec<u64> {
                    launches
                        .iter()
                        .copied()
                        .filter(|n| with.contains(n))
                        .collect()
                };
                assert_eq!(shared(one, &there), shared(other, &here));
            }
        }
        // Two, three, two, one, four and one worker each time round.
        let whole: usize = parts.values().sum();
        assert!(whole > parts.len() * 2 && parts.values().all(|&n| (1..=4).contains(&n)));
    }
}
