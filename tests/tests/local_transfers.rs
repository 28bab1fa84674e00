//! Array bytes between proxy and worker through memory that both see, and the same through the socket.

use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Mutex;
use waystation_client::{Client, Request, request};
use waystation_proto::xla::ifrt::proxy::DestructArrayRequest;
use waystation_tests::cluster::Cluster;

/// Segments are counted in the process that all tests here share.
static ONE_AT_A_TIME: Mutex<()> = Mutex::const_new(());
const LIMIT: Duration = Duration::from_secs(30);

/// No two places of it look alike, nor do two `seed`s.
fn pattern(elements: usize, seed: u32) -> Bytes {
    let values = (0..elements as u32).map(|i| i.wrapping_mul(2_654_435_761) ^ seed);
    let bytes: Vec<u8> = values.flat_map(u32::to_le_bytes).collect();
    bytes.into()
}

async fn put(client: &Client, bytes: &Bytes, dims: &[i64], devices: &[i32]) -> u64 {
    let handle = client.handle();
    // The array's request before the bytes and at the same time as them, as a client sends it.
    let made = client
        .send(request::make_array(handle, dims, devices, None))
        .await;
    client.store(handle, bytes.clone()).await.expect("stored");
    made.wait().await.expect("made");
    handle
}

async fn fetch(client: &Client, array: u64) -> Bytes {
    let buffer = client.handle();
    client
        .call(request::copy_to_host(array, buffer))
        .await
        .expect("read");
    let bytes = client.lookup(buffer).await.expect("looked up");
    client.delete(buffer).await.expect("deleted");
    bytes
}

async fn destruct(client: &Client, arrays: Vec<u64>) {
    let request = DestructArrayRequest {
        array_handle: arrays,
    };
    client
        .call(Request::DestructArrayRequest(request))
        .await
        .expect("destructed");
}

/// (bytes that went by segments, bytes of segments) of all workers.
async fn segments(cluster: &Cluster) -> (u64, u64) {
    let status = cluster.worker_status().await;
    status.iter().fold((0, 0), |(moved, held), worker| {
        (moved + worker.local_bytes, held + worker.segment_bytes)
    })
}

/// Files of segments that this process has open: those of the workers, which are in it, and of the proxy. Without those in
/// which workers keep their secrets.
fn open_segments() -> usize {
    let files = std::fs::read_dir("/proc/self/fd").expect("Linux has it");
    files
        .filter_map(|file| {
            let path = file.ok()?.path();
            let target = std::fs::read_link(&path).ok()?;
            let large = std::fs::metadata(&path).ok()?.len() > 4096;
            (large && target.to_string_lossy().contains("waystation-segment")).then_some(())
        })
        .count()
}

/// Waits until no segment is left.
async fn wait_until_gone(cluster: &Cluster) {
    let deadline = tokio::time::Instant::now() + LIMIT;
    loop {
        let ((_, held), open) = (segments(cluster).await, open_segments());
        if (held, open) == (0, 0) {
            return;
        }
        assert!(
            tokio::time::Instant::now() < deadline,
            "{held} bytes of segments, {open} files of them"
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Puts and fetches arrays of many sizes, whole, on several devices of two workers, and with strides.
async fn round_trips(cluster: &Cluster) {
    let client = cluster.client().await;
    let mut arrays = Vec::new();
    for (seed, elements) in (0..).zip([0, 1, 20_000, 262_143, 262_144, 600_001, 3 << 20]) {
        let bytes = pattern(elements, seed);
        let dims = [i64::try_from(elements).expect("small")];
        let one = put(&client, &bytes, &dims, &[3]).await;
        assert_eq!(fetch(&client, one).await, bytes, "{elements}");
        let everywhere = put(&client, &bytes, &dims, &[0, 1, 2, 3]).await;
        assert_eq!(fetch(&client, everywhere).await, bytes, "{elements}");
        arrays.extend([one, everywhere]);
    }
    // Every second of so many columns, and back again.
    let (rows, columns) = (700, 1000);
    let bytes = pattern(rows * columns * 2, 77);
    let handle = client.handle();
    client
        .store(handle, bytes.slice(..bytes.len() - 4))
        .await
        .expect("stored");
    let strides = vec![8000, 8];
    let dims = [700, 1000];
    client
        .call(request::make_array(handle, &dims, &[1], Some(strides)))
        .await
        .expect("made");
    let expected: Vec<u8> = bytes
        .chunks(8)
        .flat_map(|pair| &pair[..4])
        .copied()
        .collect();
    assert_eq!(fetch(&client, handle).await, expected);
    arrays.push(handle);
    // The memory of these goes to those that follow.
    destruct(&client, arrays).await;
    for seed in 100..104 {
        let bytes = pattern(1 << 20, seed);
        let array = put(&client, &bytes, &[1 << 20], &[2]).await;
        assert_eq!(fetch(&client, array).await, bytes);
        assert_eq!(fetch(&client, array).await, bytes);
        destruct(&client, vec![array]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_arrays_go_through_memory_and_small_ones_do_not() {
    let _one = ONE_AT_A_TIME.lock().await;
    let cluster = Cluster::start(2, 2).await;
    round_trips(&cluster).await;
    let (moved, _) = segments(&cluster).await;
    assert!(moved > 50 << 20, "only {moved} bytes");
    cluster.wait_until_empty(LIMIT).await;
    // The sessions have ended, and what they left was kept for nobody.
    wait_until_gone(&cluster).await;
}

/// Large enough to be read in pieces, the last of which is odd.
const IN_PIECES: usize = (27 << 18) + 1;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_arrays_are_read_in_pieces() {
    let _one = ONE_AT_A_TIME.lock().await;
    let cluster = Cluster::start(1, 2).await;
    let client = cluster.client().await;
    let dims = [i64::try_from(IN_PIECES).expect("small")];
    for (seed, elements) in (0..).zip([IN_PIECES, 1 << 22, (3 << 21) + 5, IN_PIECES]) {
        let bytes = pattern(elements, seed);
        let array = put(&client, &bytes, &[elements as i64], &[0]).await;
        let reads = cluster.worker_status().await[0].reads;
        let buffer = client.handle();
        let read = request::copy_to_host(array, buffer);
        client.call(read).await.expect("read");
        // Its bytes stay what they are, whatever becomes of the array.
        destruct(&client, vec![array]).await;
        for _ in 0..2 {
            assert_eq!(client.lookup(buffer).await.expect("looked up"), bytes);
        }
        client.delete(buffer).await.expect("deleted");
        let size = 4 * elements as u64;
        let pieces = size.div_ceil((size / 4).next_multiple_of(4096).min(8 << 20));
        let read = cluster.worker_status().await[0].reads - reads;
        assert_eq!(read, 2 * pieces - 1, "the first piece stays where it is");
    }
    // Read and never looked up, by a session that ends.
    {
        let other = cluster.client().await;
        let bytes = pattern(IN_PIECES, 9);
        let array = put(&other, &bytes, &dims, &[1]).await;
        let buffer = other.handle();
        let read = request::copy_to_host(array, buffer);
        other.call(read).await.expect("read");
        // Another one ends while it is looked up.
        let lookup = other.lookup(buffer);
        tokio::pin!(lookup);
        let begun = futures::poll!(lookup.as_mut());
        assert!(begun.is_pending());
    }
    drop(client);
    cluster.wait_until_empty(LIMIT).await;
    wait_until_gone(&cluster).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn either_side_can_refuse() {
    let _one = ONE_AT_A_TIME.lock().await;
    {
        let cluster = Cluster::start_with(2, 2, |proxy| proxy.local_transfers = false).await;
        round_trips(&cluster).await;
        assert_eq!(segments(&cluster).await, (0, 0));
    }
    let cluster = Cluster::start_with_workers(2, 2, |worker| worker.limits.segments = 0).await;
    round_trips(&cluster).await;
    assert_eq!(segments(&cluster).await, (0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_finds_no_segment_is_sent() {
    let _one = ONE_AT_A_TIME.lock().await;
    let cluster = Cluster::start_with_workers(2, 2, |worker| worker.limits.segments = 1).await;
    let client = cluster.client().await;
    // The first takes the worker's one segment for as long as it lives.
    let bytes: Vec<Bytes> = (0..3).map(|seed| pattern(1 << 19, seed)).collect();
    let mut arrays = Vec::new();
    for bytes in &bytes {
        arrays.push(put(&client, bytes, &[1 << 19], &[0]).await);
    }
    for (array, bytes) in arrays.into_iter().zip(&bytes) {
        assert_eq!(fetch(&client, array).await, bytes);
    }
    let (moved, held) = segments(&cluster).await;
    assert_eq!((moved, held), (2 << 20, 2 << 20));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_ends_midway_leaves_nothing() {
    let _one = ONE_AT_A_TIME.lock().await;
    let cluster = Cluster::start(1, 2).await;
    let other = cluster.client().await;
    let kept = pattern(1 << 20, 5);
    let array = put(&other, &kept, &[1 << 20], &[0]).await;
    {
        let client = cluster.client().await;
        let whole = put(&client, &kept, &[1 << 20], &[1]).await;
        // Read and never looked up.
        let buffer = client.handle();
        let read = request::copy_to_host(whole, buffer);
        client.call(read).await.expect("read");
        // Half of what was announced, over a stream that stays open until the session ends.
        let half = client.handle();
        let made = request::make_array(half, &[4 << 20], &[0], None);
        client.call(made).await.expect("made");
        let bytes = pattern(2 << 20, 6);
        let refused = client.store_as(half, 16 << 20, bytes).await;
        assert!(refused.is_err(), "half of it is not it");
        // One that nobody stores at all.
        let missing = client.handle();
        let made = request::make_array(missing, &[4 << 20], &[0], None);
        client.call(made).await.expect("made");
    }
    let deadline = tokio::time::Instant::now() + LIMIT;
    while cluster.worker_status().await[0].shards > 1 {
        assert!(tokio::time::Instant::now() < deadline, "shards are left");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    // The other client's array is what it was, and lies in the one segment that is left.
    assert_eq!(fetch(&other, array).await, kept);
    drop(other);
    cluster.wait_until_empty(LIMIT).await;
    wait_until_gone(&cluster).await;
}
