//! Arrays that one worker fetches from another, large ones by connections of their own.

use std::{pin::Pin, sync::Arc};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tonic::{Request, Response, Status, Streaming};
use waystation_proto::{
    tensorflow::{StatusProto, error::Code},
    waystation::worker::{
        DataFrame, DataHeader, ExecutableFrame, FetchDataRequest, FetchExecutableRequest, LocalPut,
        LocalPutReply, Op, Pull, Put, PutDataReply, Read, Region, Reply, Reshard, WorkerStatus,
        WorkerStatusRequest, op, reshard,
        worker_server::{self, WorkerServer},
    },
    xla::{LayoutProto, PrimitiveType},
};

use crate::support::{Session, Worker, target};

fn pattern(len: usize) -> Vec<u8> {
    (0..len)
        .map(|index| (index * 7 + index / 251) as u8)
        .collect()
}

/// Has `sink` make shard `shard` of what `source` has.
async fn pull(
    source: &Session,
    from: &str,
    sink: &mut Session,
    (shard, dtype, dims): (u64, PrimitiveType, &[i64]),
) -> Result<(), StatusProto> {
    let (transfer, request) = (sink.mint(), sink.mint());
    source
        .send(op::Op::Read(Read {
            transfer,
            shard,
            ..Read::default()
        }))
        .await;
    sink.send(op::Op::Pull(Pull {
        transfer,
        from: from.to_owned(),
        from_epoch: source.epoch,
        dtype: dtype as i32,
        dims: dims.to_vec(),
        target: Some(target(shard, 1)),
        user_context: 4,
        request,
    }))
    .await;
    let answer = sink.answer(request).await;
    source
        .send_op(Op {
            releases: vec![transfer],
            ..Op::default()
        })
        .await;
    answer.map(|_| ())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn arrays_of_all_types_sizes_and_layouts_move_unchanged() {
    use PrimitiveType as Type;
    let (from, to) = (Worker::start().await, Worker::start().await);
    let (source, mut sink) = (from.session(3).await, to.session(8).await);
    let mut shard = 0;
    // Small ones, large ones of one and of several connections, and sizes that are no multiple of anything.
    for (dtype, element, lengths) in [
        (Type::U8, 1, &[0, 1, (1 << 20) - 1, 9_000_001][..]),
        (Type::Pred, 1, &[3, 2_000_003]),
        (Type::S4, 1, &[1, 5, 3_000_001]),
        (Type::U4, 1, &[3_000_001]),
        (Type::Bf16, 2, &[5, 1_000_001]),
        (Type::F8e4m3fn, 1, &[2_000_001]),
        (Type::F16, 2, &[700_001]),
        (Type::F32, 4, &[7, 2_500_001]),
        (Type::S64, 8, &[1_300_001]),
        (Type::F64, 8, &[0, 300_001]),
        (Type::C64, 8, &[200_001]),
        (Type::C128, 16, &[600_001]),
    ] {
        for &len in lengths {
            shard += 1;
            let mut bytes = pattern(len * element);
            match dtype {
                Type::Pred => bytes.iter_mut().for_each(|byte| *byte &= 1),
                Type::S4 | Type::U4 => bytes.iter_mut().for_each(|byte| *byte &= 7),
                _ => {}
            }
            let dims = [len as i64];
            source
                .put_bytes(shard, 2, dtype, &dims, None, bytes.clone())
                .await;
            let moved = pull(&source, &from.address, &mut sink, (shard, dtype, &dims)).await;
            moved.unwrap_or_else(|status| panic!("{dtype:?} {len}: {status:?}"));
            let there = sink.read(shard).await.expect("the bytes");
            assert!(there == bytes, "{dtype:?} {len}");
            source.drop_shards(&[shard]).await;
            sink.drop_shards(&[shard]).await;
        }
    }
    // Laid out by columns: the bytes come by rows all the same, and the copy is laid out as the source.
    let (dims, bytes) = ([1500, 1001], pattern(1500 * 1001 * 4));
    source
        .send(op::Op::Put(Put {
            transfer: 900,
            dtype: Type::F32 as i32,
            dims: dims.to_vec(),
            targets: vec![target(900, 0)],
            inline_data: Some(bytes.clone().into()),
            layout: Some(LayoutProto {
                minor_to_major: vec![0, 1],
                ..LayoutProto::default()
            }),
            ..Put::default()
        }))
        .await;
    let array = (900, Type::F32, &dims[..]);
    pull(&source, &from.address, &mut sink, array)
        .await
        .expect("moved");
    assert!(sink.read(900).await.expect("the bytes") == bytes);
    from.stop().await;
    to.stop().await;
}

/// What is fetched is not overwritten by an execution that takes the array over, and not lost when the array is dropped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_array_on_its_way_is_not_taken_over() {
    let (from, to) = (Worker::start().await, Worker::start().await);
    let (mut source, mut sink) = (from.session(3).await, to.session(8).await);
    source.compile(50, "take_over_large", &[0]).await.unwrap();
    let dims = [1 << 20];
    let bytes: Vec<u8> = (0..1 << 20)
        .flat_map(|index| (index as f32).to_le_bytes())
        .collect();
    source
        .put_bytes(1, 0, PrimitiveType::F32, &dims, None, bytes.clone())
        .await;
    // The device's own memory, which the next execution would take.
    source.execute(50, &[1], 2, 1).await;
    let expected: Vec<f32> = (0..1 << 20).map(|index| index as f32 + 1.0).collect();
    source
        .send(op::Op::Read(Read {
            transfer: 70,
            shard: 2,
            ..Read::default()
        }))
        .await;
    for (shard, request) in [(2, 40), (3, 41)] {
        sink.send(op::Op::Pull(Pull {
            transfer: 70,
            from: from.address.clone(),
            from_epoch: 3,
            dtype: PrimitiveType::F32 as i32,
            dims: dims.to_vec(),
            target: Some(target(shard, 6)),
            user_context: 4,
            request,
        }))
        .await;
        sink.answer(request).await.expect("moved");
        assert!(sink.read_f32(shard).await == expected, "{request}");
        if request == 40 {
            // It is not released, so its bytes are still the array's.
            source.execute(50, &[2], 9, 1).await;
            source.watch(&[9]).await.unwrap();
            source.drop_shards(&[1, 2, 9]).await;
        }
    }
    assert_eq!(from.status().await.shards, 1, "held until it is released");
    source
        .send_op(Op {
            releases: vec![70],
            ..Op::default()
        })
        .await;
    from.status_becomes(|status| status.shards == 0).await;
    from.stop().await;
    to.stop().await;
}

/// Rows lie together and are sent from where they are, columns are gathered, and a part that is one piece is what came.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pieces_of_large_arrays_move() {
    let (from, to) = (Worker::start().await, Worker::start().await);
    let (source, mut sink) = (from.session(3).await, to.session(8).await);
    let (rows, columns) = (3000_usize, 1000_usize);
    let bytes = pattern(rows * columns * 4);
    let dims = [rows as i64, columns as i64];
    source
        .put_bytes(1, 2, PrimitiveType::F32, &dims, None, bytes.clone())
        .await;
    let region = |offset: [usize; 2], size: [usize; 2]| Region {
        offset: offset.map(|at| at as i64).to_vec(),
        size: size.map(|len| len as i64).to_vec(),
    };
    let cut = |offset: [usize; 2], size: [usize; 2]| -> Vec<u8> {
        let rows = offset[0]..offset[0] + size[0];
        rows.flat_map(|row| {
            let start = (row * columns + offset[1]) * 4;
            bytes[start..start + size[1] * 4].to_vec()
        })
        .collect()
    };
    let mut shard = 10;
    for (offset, size) in [
        ([0, 0], [rows, columns]),
        ([700, 0], [1500, columns]),
        ([5, 300], [2900, 501]),
        ([5, 300], [1, 501]),
        ([5, 3], [0, 501]),
    ] {
        shard += 1;
        let (transfer, request) = (sink.mint(), sink.mint());
        source
            .send(op::Op::Read(Read {
                transfer,
                shard: 1,
                regions: vec![region(offset, size)],
                on_demand: true,
                ..Read::default()
            }))
            .await;
        let piece = reshard::Piece {
            region: Some(region(offset, size)),
            part: 0,
            offset: vec![0, 0],
        };
        sink.send(op::Op::Reshard(Reshard {
            request,
            dtype: PrimitiveType::F32 as i32,
            parts: vec![reshard::Part {
                dims: region(offset, size).size,
                targets: vec![target(shard, 3)],
            }],
            sources: vec![reshard::Source {
                from: Some(reshard::source::From::Remote(reshard::Remote {
                    transfer,
                    from: from.address.clone(),
                    from_epoch: 3,
                })),
                pieces: vec![piece],
            }],
            user_context: 4,
        }))
        .await;
        sink.answer(request).await.expect("made");
        let made = sink.read(shard).await.expect("the bytes");
        assert!(made == cut(offset, size), "{size:?} from {offset:?}");
    }
    // Nothing is held any more.
    source.drop_shards(&[1]).await;
    from.status_becomes(|status| status.shards == 0).await;
    from.stop().await;
    to.stop().await;
}

/// What a worker that is no better than it should be answers to `FetchData`.
struct Liar {
    frames: Vec<DataFrame>,
}

/// Answers every `FetchData` with these frames, and hands out the connections that are made for bytes.
pub(crate) fn serve(
    listener: TcpListener,
    frames: Vec<DataFrame>,
    plain: tokio::sync::mpsc::Sender<TcpStream>,
) {
    let (calls, taken) = tokio::sync::mpsc::channel::<std::io::Result<TcpStream>>(8);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.expect("one");
            let mut first = [0];
            let _ = stream.peek(&mut first).await;
            if first == *b"W" {
                let _ = plain.send(stream).await;
            } else {
                let _ = calls.send(Ok(stream)).await;
            }
        }
    });
    tokio::spawn(
        tonic::transport::Server::builder()
            .add_service(WorkerServer::new(Liar { frames }))
            .serve_with_incoming(ReceiverStream::new(taken)),
    );
}

fn not_here<T>() -> Result<T, Status> {
    Err(Status::unimplemented("not here"))
}

type Streamed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl worker_server::Worker for Liar {
    type SessionStream = Streamed<Reply>;
    type FetchDataStream = Streamed<DataFrame>;
    type FetchExecutableStream = Streamed<ExecutableFrame>;
    type PutLocalStream = Streamed<LocalPutReply>;

    async fn fetch_data(
        &self,
        _: Request<FetchDataRequest>,
    ) -> Result<Response<Self::FetchDataStream>, Status> {
        let frames = self.frames.clone().into_iter().map(Ok);
        let then = tokio_stream::pending();
        let all = tokio_stream::StreamExt::chain(tokio_stream::iter(frames), then);
        Ok(Response::new(Box::pin(all)))
    }

    async fn session(
        &self,
        _: Request<Streaming<Op>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        not_here()
    }

    async fn put_data(
        &self,
        _: Request<Streaming<DataFrame>>,
    ) -> Result<Response<PutDataReply>, Status> {
        not_here()
    }

    async fn put_local(
        &self,
        _: Request<Streaming<LocalPut>>,
    ) -> Result<Response<Self::PutLocalStream>, Status> {
        not_here()
    }

    async fn fetch_executable(
        &self,
        _: Request<FetchExecutableRequest>,
    ) -> Result<Response<Self::FetchExecutableStream>, Status> {
        not_here()
    }

    async fn get_status(
        &self,
        _: Request<WorkerStatusRequest>,
    ) -> Result<Response<WorkerStatus>, Status> {
        not_here()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_lie_or_break_off_in_the_middle_fail_what_is_fetched_alone() {
    const LEN: usize = 10 << 20;
    let to = Worker::start().await;
    let sink = Arc::new(tokio::sync::Mutex::new(to.session(8).await));
    let fetched = async |size_bytes: u64, ticket: usize, data: usize, sends: usize| {
        let header = DataHeader {
            size_bytes,
            ticket: vec![7; ticket].into(),
            ..DataHeader::default()
        };
        let frame = DataFrame {
            header: Some(header),
            data: vec![0; data].into(),
            given_up: false,
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let from = listener.local_addr().expect("an address").to_string();
        let (plain, mut connections) = tokio::sync::mpsc::channel::<TcpStream>(8);
        serve(listener, vec![frame], plain);
        tokio::spawn(async move {
            while let Some(mut stream) = connections.recv().await {
                let mut asked = [0; 56];
                stream.read_exact(&mut asked).await.expect("a request");
                let _ = stream.write_all(&vec![1; sends]).await;
            }
        });
        let mut sink = sink.lock().await;
        let (shard, request) = (sink.mint(), sink.mint());
        sink.send(op::Op::Pull(Pull {
            transfer: 5,
            from: from.clone(),
            from_epoch: 3,
            dtype: PrimitiveType::U8 as i32,
            dims: vec![LEN as i64],
            target: Some(target(shard, 1)),
            request,
            ..Pull::default()
        }))
        .await;
        let answer = sink.answer(request).await.map(|_| ());
        (answer.map_err(|status| (status.code, status.message)), from)
    };
    // What breaks is a connection, not the worker.
    let (invalid, broken) = (Code::InvalidArgument as i32, Code::Unavailable as i32);
    let size = LEN as u64;
    for (what, code, (answer, from)) in [
        ("more", invalid, fetched(u64::MAX, 32, 0, 0).await),
        ("fewer", invalid, fetched(size - 1, 32, 0, 0).await),
        ("no ticket", invalid, fetched(size, 31, 0, 0).await),
        ("fewer in a frame", invalid, fetched(size, 0, 1000, 0).await),
        (
            "gone in the middle",
            broken,
            fetched(size, 32, 0, 1 << 20).await,
        ),
        ("gone at once", broken, fetched(size, 32, 0, 0).await),
    ] {
        let (found, message) = answer.expect_err(what);
        assert_eq!(found, code, "{what}: {message}");
        assert!(message.contains(&from), "{what}: {message}");
    }
    // The worker serves on.
    let mut sink = sink.lock().await;
    sink.put(1, 0, &[4.0]).await;
    assert_eq!(sink.read_f32(1).await, [4.0]);
    to.stop().await;
}
