use std::os::unix::fs::FileExt as _;

use super::*;

fn buffers(memory_bytes: u64) -> (Arc<HostBuffers>, Arc<Counters>) {
    let counters = Arc::new(Counters::default());
    let memory = Arc::new(HostMemory::new(memory_bytes, Arc::clone(&counters)));
    (Arc::new(HostBuffers::new(memory)), counters)
}

async fn all(incoming: &Incoming) -> Result<Vec<u8>, Status> {
    let (mut out, mut index) = (Vec::new(), 0);
    while let Some(chunk) = incoming.chunk(index).await? {
        out.extend_from_slice(&chunk);
        index += 1;
    }
    Ok(out)
}

#[tokio::test]
async fn a_buffer_reads_the_same_from_memory_and_from_the_file() {
    // Two of the three chunks fit in memory.
    let (buffers, counters) = buffers(8192);
    let store = buffers.store(1, 12_000).expect("free");
    for value in 0..3u8 {
        store
            .push(Bytes::from(vec![value; 4000]))
            .await
            .expect("room");
    }
    store.finish().expect("complete");
    assert_eq!(counters.host_buffer_spilled_bytes.load(Relaxed), 4000);
    let incoming = buffers.consume(1).expect("there");
    let want: Vec<u8> = (0..3u8).flat_map(|v| vec![v; 4000]).collect();
    assert_eq!(all(&incoming).await.expect("readable"), want);
    drop(incoming);
    assert_eq!(
        counters.host_buffer_memory_bytes.load(Relaxed),
        0,
        "memory is given back"
    );
    assert!(lock(&buffers.entries).is_empty());
}

#[tokio::test]
async fn a_small_buffer_is_whole_however_the_transport_cut_it() {
    let (buffers, _) = buffers(1 << 20);
    for (handle, cuts) in [&[9][..], &[4, 5], &[1, 0, 7, 1]].into_iter().enumerate() {
        let handle = handle as u64;
        let store = buffers.store(handle, 9).expect("free");
        let mut bytes = Bytes::from_static(b"in pieces");
        for &cut in cuts {
            store.push(bytes.split_to(cut)).await.expect("room");
        }
        store.finish().expect("complete");
        let incoming = buffers.consume(handle).expect("there");
        assert_eq!(incoming.small(9).as_deref(), Some(&b"in pieces"[..]));
        assert!(incoming.small(8).is_none());
    }
}

#[tokio::test]
async fn a_clients_file_of_any_length_is_cut_only_as_it_is_read() {
    let size = (1 << 40) + 3;
    let file = tempfile::tempfile().expect("a file");
    file.set_len(size).expect("sparse");
    file.write_all_at(b"end", size - 3).expect("written");
    let (buffers, _) = buffers(8192);
    let store = buffers.store(3, size).expect("free");
    store.adopt(file).expect("complete");
    let incoming = buffers.consume(3).expect("there");
    assert!(lock(&incoming.contents).chunks.is_empty());
    assert!(incoming.small(u64::MAX).is_none());
    let first = incoming.chunk(0).await.expect("readable").expect("bytes");
    assert_eq!(first.len(), FRAME_BYTES);
    let frames = usize::try_from(size).expect("64 bits") / FRAME_BYTES;
    let last = incoming.chunk(frames).await.expect("readable");
    assert_eq!(last.as_deref(), Some(&b"end"[..]));
    assert_eq!(incoming.chunk(frames + 1).await, Ok(None));
    incoming.is_read(frames);
}

#[tokio::test]
async fn a_reader_that_came_first_follows_the_store() {
    let (buffers, _) = buffers(1 << 20);
    let incoming = buffers.consume(5).expect("registers");
    let reader = tokio::spawn(async move { (incoming.size().await, all(&incoming).await) });
    tokio::task::yield_now().await;
    let store = buffers.store(5, 6).expect("awaited");
    store.push(Bytes::from_static(b"abc")).await.expect("room");
    tokio::task::yield_now().await;
    store.push(Bytes::from_static(b"def")).await.expect("room");
    store.finish().expect("complete");
    let (size, bytes) = reader.await.expect("no panic");
    assert_eq!(size, Ok(6));
    assert_eq!(bytes, Ok(b"abcdef".to_vec()));
    assert!(lock(&buffers.entries).is_empty());
}

#[tokio::test]
async fn sizes_that_lie_and_stores_that_break_off_fail_the_reader() {
    let (buffers, _) = buffers(1 << 20);
    let store = buffers.store(1, 4).expect("free");
    assert_eq!(
        store
            .push(Bytes::from_static(b"12345"))
            .await
            .expect_err("too much")
            .code,
        3
    );
    assert_eq!(store.finish().expect_err("too little").code, 3);
    let incoming = buffers.consume(1).expect("known");
    assert!(all(&incoming).await.is_err());

    let incoming = buffers.consume(2).expect("registers");
    drop(buffers.store(2, 4).expect("awaited"));
    assert!(all(&incoming).await.is_err());
    assert!(lock(&buffers.entries).is_empty());
}

#[tokio::test]
async fn handles_are_used_once() {
    let (buffers, _) = buffers(1 << 20);
    let _first = buffers.store(1, 4).expect("free");
    assert_eq!(buffers.store(1, 4).expect_err("stored twice").code, 3);
    let _one = buffers.consume(1).expect("there");
    assert_eq!(buffers.consume(1).expect_err("used twice").code, 3);
    assert_eq!(buffers.lookup(1).expect_err("not fetched").code, 3);
    assert_eq!(buffers.delete(9).expect_err("unknown").code, 3);
}

#[tokio::test]
async fn what_lies_fetched_at_workers_has_a_bound() {
    let (buffers, _) = buffers(8192);
    let most = buffers.room_to_fetch(u64::MAX).await;
    let small = buffers.room_to_fetch(1000).await;
    let mut next = Box::pin(buffers.room_to_fetch(1 << 30));
    assert!(
        futures::poll!(&mut next).is_pending(),
        "an array of any size has all the room"
    );
    drop(most);
    let _next = next.await;
    drop(small);
}
