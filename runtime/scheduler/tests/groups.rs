//! Groups and their stores, over gRPC.

use std::{net::TcpListener, time::Duration};

use tokio_util::sync::CancellationToken;
use tonic::{Code, Streaming, transport::Channel};
use waystation_proto::waystation::group::{
    GatherRequest, Gathered, GetRequest, PutRequest, groups_client::GroupsClient,
};

struct Manager {
    address: String,
    stop: CancellationToken,
    served: tokio::task::JoinHandle<Result<(), waystation_scheduler::Error>>,
}

fn manager(lease: Duration) -> Manager {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let stop = CancellationToken::new();
    let config = waystation_scheduler::Config {
        workers_per_slice: Some(2),
        lease,
        ..waystation_scheduler::Config::new(listener)
    };
    Manager {
        address,
        served: tokio::spawn(waystation_scheduler::serve(config, stop.clone())),
        stop,
    }
}

impl Manager {
    async fn dial(&self) -> GroupsClient<Channel> {
        GroupsClient::connect(format!("http://{}", self.address))
            .await
            .expect("it listens")
    }

    async fn end(self) {
        self.stop.cancel();
        self.served.await.expect("no panic").expect("it served");
    }
}

async fn gather(client: &mut GroupsClient<Channel>, task: u32) -> Streaming<Gathered> {
    comes(client, task, 0).await
}

async fn comes(client: &mut GroupsClient<Channel>, task: u32, resume: u64) -> Streaming<Gathered> {
    let request = GatherRequest {
        link_version: waystation_proto::LINK_VERSION,
        task,
        address: format!("host{task}:1"),
        resume,
        ..GatherRequest::default()
    };
    client.gather(request).await.expect("admitted").into_inner()
}

async fn gathered(stream: &mut Streaming<Gathered>) -> u64 {
    let gathered = stream.message().await.expect("no error").expect("a group");
    assert_eq!(gathered.nodes, 2);
    gathered.group
}

fn put(group: u64, key: &str, value: &[u8], number: u64) -> PutRequest {
    PutRequest {
        group,
        key: key.as_bytes().to_vec().into(),
        value: value.to_vec().into(),
        task: 0,
        number,
    }
}

fn get(group: u64, key: &str, wait_ms: u32) -> GetRequest {
    GetRequest {
        group,
        key: key.as_bytes().to_vec().into(),
        wait_ms,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_tell_each_other_values() {
    let manager = manager(Duration::from_secs(10));
    let (mut one, mut two) = (manager.dial().await, manager.dial().await);
    let mut first = gather(&mut one, 0).await;
    let mut second = gather(&mut two, 1).await;
    let group = gathered(&mut first).await;
    assert_eq!(gathered(&mut second).await, group);

    let missing = two.get(get(group, "topology/0", 0)).await.expect("asked");
    assert_eq!(missing.into_inner().value, None);
    let missing = two.get(get(group, "topology/0", 20)).await.expect("asked");
    assert_eq!(missing.into_inner().value, None, "after a while, too");
    let waiting = {
        let mut two = two.clone();
        tokio::spawn(async move { two.get(get(group, "topology/0", 60_000)).await })
    };
    one.put(put(group, "topology/1", b"other", 1))
        .await
        .expect("stored");
    one.put(put(group, "topology/0", b"devices", 2))
        .await
        .expect("stored");
    let value = waiting.await.expect("no panic").expect("found");
    assert_eq!(value.into_inner().value.as_deref(), Some(&b"devices"[..]));

    let again = one.put(put(group, "topology/0", b"devices", 2)).await;
    again.expect("the same put, sent again");
    let other = one.put(put(group, "topology/0", b"devices", 3)).await;
    assert_eq!(other.expect_err("a second").code(), Code::AlreadyExists);
    let huge = vec![0; (16 << 20) + 1];
    let huge = one.put(put(group, "huge", &huge, 4)).await;
    assert_eq!(huge.expect_err("bounded").code(), Code::ResourceExhausted);
    let long = "k".repeat((64 << 10) + 1);
    let long = one.get(get(group, &long, 60_000)).await;
    assert_eq!(long.expect_err("bounded").code(), Code::ResourceExhausted);
    drop((first, second, one, two));
    manager.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_value_of_a_worker_that_has_yet_to_come_back_is_not_said_to_be_absent() {
    let manager = manager(Duration::from_secs(10));
    let mut client = manager.dial().await;
    let mut first = comes(&mut client, 0, 7).await;
    assert_eq!(gathered(&mut first).await, 7);
    for wait_ms in [0, 20] {
        let unknown = client.get(get(7, "topology/1", wait_ms)).await;
        let unknown = unknown.expect_err("its worker may have put it");
        assert_eq!(unknown.code(), Code::Unavailable);
    }
    client.put(put(7, "own", b"v", 1)).await.expect("stored");
    let own = client.get(get(7, "own", 0)).await.expect("asked");
    assert_eq!(own.into_inner().value.as_deref(), Some(&b"v"[..]));
    let second = comes(&mut client, 1, 7).await;
    let absent = client.get(get(7, "topology/1", 0)).await.expect("asked");
    assert_eq!(absent.into_inner().value, None);
    drop((first, second, client));
    manager.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_ends_when_one_of_its_workers_has() {
    let manager = manager(Duration::from_millis(200));
    let (mut one, mut two) = (manager.dial().await, manager.dial().await);
    let mut first = gather(&mut one, 0).await;
    let mut second = gather(&mut two, 1).await;
    let group = gathered(&mut first).await;
    gathered(&mut second).await;
    let waiting = {
        let mut one = one.clone();
        tokio::spawn(async move { one.get(get(group, "never", 60_000)).await })
    };
    drop((second, two));
    let gone = first.message().await.expect_err("the group has ended");
    assert_eq!(gone.code(), Code::Aborted);
    assert!(gone.message().contains("task 1 at host1:1"), "{gone}");
    let gone = waiting.await.expect("no panic").expect_err("it has ended");
    assert_eq!(gone.code(), Code::Aborted);
    let gone = one.put(put(group, "late", b"", 1)).await;
    assert_eq!(gone.expect_err("it has ended").code(), Code::Aborted);
    drop((first, one));
    manager.end().await;
}

#[tokio::test]
async fn another_protocol_is_refused() {
    let manager = manager(Duration::from_secs(10));
    let mut client = manager.dial().await;
    let refused = client.gather(GatherRequest::default()).await;
    let refused = refused.expect_err("another link version");
    assert_eq!(refused.code(), Code::FailedPrecondition);
    drop(client);
    manager.end().await;
}
