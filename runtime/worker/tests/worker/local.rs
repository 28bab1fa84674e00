//! Puts by segments, as a proxy on the worker's machine makes them. The worker runs in this process.

use std::{fs::File, os::unix::fs::FileExt as _};

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use waystation_proto::{
    waystation::worker::{DataHeader, LocalPut, LocalPutReply, Put, Segment, local_put::Step, op},
    xla::PrimitiveType,
};

use crate::support::{SECRET, Session, Worker, target};

const SIZE: usize = (2 << 20) + 3;

/// A put under way.
struct Under {
    steps: mpsc::Sender<LocalPut>,
    replies: tonic::Streaming<LocalPutReply>,
}

impl Under {
    async fn begin(
        worker: &Worker,
        epoch: u64,
        transfer: u64,
        size: u64,
    ) -> Result<(Under, Segment), tonic::Status> {
        let (steps, queue) = mpsc::channel(2);
        let header = DataHeader {
            epoch,
            transfer,
            size_bytes: size,
            secret: SECRET.to_vec().into(),
            ..DataHeader::default()
        };
        let first = LocalPut {
            step: Some(Step::Header(header)),
        };
        steps.send(first).await.expect("room");
        let mut client = worker.client.clone();
        let mut replies = client
            .put_local(ReceiverStream::new(queue))
            .await?
            .into_inner();
        let segment = replies.message().await?.and_then(|reply| reply.segment);
        Ok((Under { steps, replies }, segment.expect("a segment")))
    }

    /// Says the last word and waits until the worker has heard it.
    async fn end(mut self, step: Step) {
        let last = LocalPut { step: Some(step) };
        self.steps.send(last).await.expect("room");
        assert!(self.replies.message().await.expect("an end").is_none());
    }
}

fn write(segment: &Segment, bytes: &[u8]) {
    let path = format!("/proc/self/fd/{}", segment.fd);
    let file = File::options().write(true).open(path).expect("open");
    file.write_all_at(bytes, 0).expect("written");
}

async fn expect_bytes(session: &Session, transfer: u64, shard: u64) {
    let put = Put {
        transfer,
        dtype: PrimitiveType::U8 as i32,
        dims: vec![SIZE as i64],
        targets: vec![target(shard, 0)],
        ..Put::default()
    };
    session.send(op::Op::Put(put)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_comes_by_a_segment_before_its_op_or_after_it() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    expect_bytes(&session, 1, 10).await;
    for (transfer, shard, byte) in [(1, 10, 3), (2, 11, 4)] {
        let (put, segment) = Under::begin(&worker, 1, transfer, SIZE as u64)
            .await
            .unwrap();
        write(&segment, &vec![byte; SIZE]);
        put.end(Step::Written(true)).await;
        if transfer == 2 {
            expect_bytes(&session, 2, 11).await;
        }
        assert_eq!(session.read(shard).await.unwrap(), vec![byte; SIZE]);
    }
    let status = worker.status().await;
    assert_eq!(status.segment_bytes, 2 * SIZE as u64);
    session.drop_shards(&[10, 11]).await;
    worker
        .status_becomes(|status| status.segment_bytes == 0)
        .await;
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_put_that_breaks_off_leaves_its_memory_to_nobody() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    expect_bytes(&session, 1, 10).await;
    let (put, first) = Under::begin(&worker, 1, 1, SIZE as u64).await.unwrap();
    drop(put);
    worker
        .status_becomes(|status| status.segment_bytes == 0)
        .await;
    // It may come again; given up in order, it leaves its memory to the next.
    let (put, second) = Under::begin(&worker, 1, 1, SIZE as u64).await.unwrap();
    assert_ne!(second.inode, first.inode);
    put.end(Step::GivenUp(true)).await;
    let (put, third) = Under::begin(&worker, 1, 1, SIZE as u64).await.unwrap();
    assert_eq!(third, second);
    write(&third, &vec![9; SIZE]);
    put.end(Step::Written(true)).await;
    assert_eq!(session.read(10).await.unwrap(), vec![9; SIZE]);
    worker.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn liars_and_strangers_get_no_segment() {
    let worker = Worker::start().await;
    let mut session = worker.session(1).await;
    expect_bytes(&session, 1, 10).await;
    // Something behind it, so that its op has been applied.
    session.put(11, 0, &[1.0]).await;
    session.watch(&[11]).await.unwrap();
    for (epoch, transfer, size) in [(1, 1, 1 << 20), (1, 2, u64::MAX), (9, 1, SIZE as u64)] {
        let refused = Under::begin(&worker, epoch, transfer, size).await;
        assert_eq!(
            refused.err().map(|status| status.code()),
            Some(tonic::Code::InvalidArgument),
            "{epoch} {transfer} {size}"
        );
    }
    // The first of them has failed the shard.
    assert!(session.read(10).await.is_err());
    worker.stop().await;
}
