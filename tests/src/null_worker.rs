//! Workers that compute nothing: they register, take the proxy's ops over the real link, answer at once, and remember in which
//! order launches came. Everything in front of the PJRT seam is real, so a test sees what the proxy does with many workers.

use std::{
    collections::HashMap,
    net::TcpListener,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use prost::Message as _;
use tokio::sync::mpsc;
use tokio_stream::{Stream, wrappers::ReceiverStream};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming, transport::server::TcpIncoming};
use waystation_proto::{
    BUILD_ID, LINK_VERSION,
    tensorflow::{StatusProto, error::Code},
    waystation::{
        ExecutableInfo, executable_info,
        scheduler::{
            Beat, Hello, WorkerInventory, WorkerReport,
            resource_manager_client::ResourceManagerClient, worker_inventory, worker_report,
        },
        worker::{
            Answer, Attached, CompileDone, Copied, DataFrame, ExecutableFrame, FetchDataRequest,
            FetchExecutableRequest, LocalPut, LocalPutReply, Op, PutDataReply, ReadDone, Reply,
            Started, Taken, WatchDone, WorkerStatus, WorkerStatusRequest, op, reply,
            worker_server::{Worker, WorkerServer},
        },
    },
    xla::{OpSharding, PrimitiveType, op_sharding},
};

/// An execution, as a worker got it: its number and the first of its results' shards.
pub type Seen = (u64, u64);

/// How fast workers take ops.
#[derive(Clone, Copy, Debug)]
pub enum Pace {
    /// At once.
    Even,
    /// At once, and without a part in programs that span workers.
    Alone,
    /// At once, but executions end on the first worker only.
    OneEnds,
    /// At once, but the first questions about compiler flags, to all together, have no answer.
    Unsure,
    /// With a small window and pauses that follow from the number.
    Random(u64),
}

/// The program that takes over its argument. All others are the same but for that.
pub const TAKES: &[u8] = b"takes";

/// Questions without an answer, of [`Pace::Unsure`].
const UNSURE: u32 = 2;

/// Workers of one device each, of one slice.
#[derive(Debug)]
pub struct NullWorkers {
    seen: Vec<Arc<Mutex<Vec<Seen>>>>,
    largest: Arc<AtomicUsize>,
}

impl NullWorkers {
    /// Starts so many, until the token is cancelled.
    ///
    /// # Panics
    /// When there is no free port.
    pub fn start(count: u32, manager: &str, pace: Pace, stop: &CancellationToken) -> Self {
        let mut seen = Vec::new();
        let largest = Arc::new(AtomicUsize::new(0));
        let unsure = match pace {
            Pace::Unsure => UNSURE,
            _ => 0,
        };
        let unsure = Arc::new(AtomicU32::new(unsure));
        for task in 0..count {
            let listener = TcpListener::bind("127.0.0.1:0").expect("a free loopback port");
            let address = listener.local_addr().expect("bound").to_string();
            let launches = Arc::new(Mutex::default());
            let worker = NullWorker {
                pace,
                task,
                seen: Arc::clone(&launches),
                largest: Arc::clone(&largest),
                unsure: Arc::clone(&unsure),
            };
            listener.set_nonblocking(true).expect("a socket");
            let listener = tokio::net::TcpListener::from_std(listener).expect("in a runtime");
            let server = tonic::transport::Server::builder()
                .add_service(WorkerServer::new(worker))
                .serve_with_incoming_shutdown(
                    TcpIncoming::from(listener).with_nodelay(Some(true)),
                    stop.clone().cancelled_owned(),
                );
            tokio::spawn(server);
            let (manager, stop) = (manager.to_owned(), stop.clone());
            tokio::spawn(async move {
                while !stop.is_cancelled() {
                    // The resource manager may not listen yet.
                    let _ = register(&manager, hello(address.clone(), task, count), &stop).await;
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            });
            seen.push(launches);
        }
        Self { seen, largest }
    }

    /// Bytes of the largest execution's message to a worker.
    pub fn largest(&self) -> usize {
        self.largest.load(Relaxed)
    }

    /// The executions that each worker has got, in order.
    pub fn seen(&self) -> Vec<Vec<Seen>> {
        let seen = self.seen.iter();
        seen.map(|seen| seen.lock().unwrap_or_else(PoisonError::into_inner).clone())
            .collect()
    }
}

fn hello(address: String, task: u32, count: u32) -> Hello {
    let memory = worker_inventory::Memory {
        kind: "device".to_owned(),
        ..Default::default()
    };
    let device = worker_inventory::Device {
        device_kind: "null".to_owned(),
        to_string: "NullDevice(id=0)".to_owned(),
        memories: vec![memory],
        ..Default::default()
    };
    Hello {
        address,
        task,
        slice_tasks: count,
        link_version: LINK_VERSION,
        build_id: BUILD_ID.to_owned(),
        inventory: Some(WorkerInventory {
            platform_name: "cpu".to_owned(),
            devices: vec![device],
            ..Default::default()
        }),
        ..Default::default()
    }
}

async fn register(
    manager: &str,
    hello: Hello,
    stop: &CancellationToken,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let mut client = ResourceManagerClient::connect(format!("http://{manager}")).await?;
    let (reports, receiver) = mpsc::channel(4);
    let report = |report| WorkerReport {
        report: Some(report),
    };
    reports
        .send(report(worker_report::Report::Hello(hello)))
        .await?;
    let mut orders = client
        .register(ReceiverStream::new(receiver))
        .await?
        .into_inner();
    let mut beats = tokio::time::interval(Duration::from_secs(1));
    loop {
        tokio::select! {
            order = orders.message() => if order?.is_none() { return Ok(()) },
            _ = beats.tick() => reports.send(report(worker_report::Report::Beat(Beat::default()))).await?,
            () = stop.cancelled() => return Ok(()),
        }
    }
}

struct NullWorker {
    pace: Pace,
    task: u32,
    seen: Arc<Mutex<Vec<Seen>>>,
    largest: Arc<AtomicUsize>,
    /// So many questions about flags will have no answer.
    unsure: Arc<AtomicU32>,
}

/// One argument and one result, cut over all devices.
fn info(devices: usize) -> ExecutableInfo {
    let count = i64::try_from(devices).unwrap_or(i64::MAX);
    let sharding = OpSharding {
        r#type: op_sharding::Type::Other as i32,
        tile_assignment_dimensions: vec![count],
        tile_assignment_devices: (0..count).collect(),
        ..Default::default()
    };
    let value = executable_info::Value {
        dtype: PrimitiveType::F32 as i32,
        dims: vec![count],
        sharding: (devices > 1).then_some(sharding),
        ..Default::default()
    };
    ExecutableInfo {
        name: "null".to_owned(),
        num_replicas: 1,
        num_partitions: u32::try_from(devices).unwrap_or(u32::MAX),
        parameters: vec![value.clone()],
        results: vec![value],
        key: "0".repeat(64),
        ..Default::default()
    }
}

fn ended(watch: u64) -> reply::Reply {
    reply::Reply::WatchDone(WatchDone {
        watch,
        ..Default::default()
    })
}

fn answer(op: op::Op) -> Option<reply::Reply> {
    let compiled = |request, info| {
        reply::Reply::CompileDone(CompileDone {
            request,
            info,
            ..Default::default()
        })
    };
    let answered = |request| {
        reply::Reply::Answer(Answer {
            request,
            ..Default::default()
        })
    };
    Some(match op {
        op::Op::Compile(op) => {
            let mut info = info(op.device_ids.len());
            if op.program == TAKES {
                info.donated_parameters = vec![0];
            }
            compiled(op.request, Some(info))
        }
        op::Op::Load(op) => compiled(op.request, None),
        op::Op::Watch(op) => ended(op.watch),
        op::Op::Read(op) if op.notify => reply::Reply::ReadDone(ReadDone {
            transfer: op.transfer,
            size_bytes: 4,
            inline_data: Some(vec![0; 4].into()),
            ..Default::default()
        }),
        op::Op::Pull(op) => answered(op.request),
        op::Op::Reshard(op) => answered(op.request),
        _ => return None,
    })
}

/// All flags are fine, but for the first questions: there the compiler has ended.
fn verdict(request: u64, unsure: &AtomicU32) -> reply::Reply {
    let less = unsure.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
    reply::Reply::Answer(Answer {
        request,
        status: less.ok().map(|_| StatusProto {
            code: Code::Unavailable.into(),
            message: "the compiler has ended".to_owned(),
            ..Default::default()
        }),
        ..Default::default()
    })
}

/// A sequence without pattern (xorshift).
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

#[tonic::async_trait]
impl Worker for NullWorker {
    type SessionStream = ReceiverStream<Result<Reply, Status>>;
    type FetchDataStream = Pin<Box<dyn Stream<Item = Result<DataFrame, Status>> + Send>>;
    type FetchExecutableStream =
        Pin<Box<dyn Stream<Item = Result<ExecutableFrame, Status>> + Send>>;
    type PutLocalStream = Pin<Box<dyn Stream<Item = Result<LocalPutReply, Status>> + Send>>;

    async fn session(
        &self,
        request: Request<Streaming<Op>>,
    ) -> Result<Response<Self::SessionStream>, Status> {
        let mut ops = request.into_inner();
        let (replies, receiver) = mpsc::channel(1024);
        let (seen, largest) = (Arc::clone(&self.seen), Arc::clone(&self.largest));
        let unsure = Arc::clone(&self.unsure);
        let (window, mut chaos) = match self.pace {
            Pace::Even | Pace::Alone | Pace::OneEnds | Pace::Unsure => (64, None),
            // Never zero, and another one for each worker.
            Pace::Random(seed) => (4, Some((seed + 1) << 8 | u64::from(self.task + 1))),
        };
        let ends = !matches!(self.pace, Pace::OneEnds) || self.task == 0;
        let (address, cannot_span) = match self.pace {
            Pace::Alone => ("", "it is alone"),
            _ => ("nowhere:1", ""),
        };
        tokio::spawn(async move {
            let reply = |reply| Ok(Reply { reply: Some(reply) });
            let attached = Attached {
                window,
                collectives_address: address.to_owned(),
                cannot_span: cannot_span.to_owned(),
                ..Default::default()
            };
            let _ = replies.send(reply(reply::Reply::Attached(attached))).await;
            // The attach takes no place in the window, and word of the other workers none.
            let _ = ops.message().await;
            let mut untold = 0;
            // Launches without a place among the others.
            let mut unplaced = HashMap::new();
            // Each save copies its arrays when the next one comes, and never ends.
            let mut save = None;
            while let Ok(Some(op)) = ops.message().await {
                if let Some(state) = &mut chaos
                    && next(state).is_multiple_of(4)
                {
                    tokio::time::sleep(Duration::from_micros(next(state) % 500)).await;
                }
                // Those without credit.
                let free = matches!(
                    op.op,
                    Some(
                        op::Op::Peers(_)
                            | op::Op::CancelPut(_)
                            | op::Op::Cancel(_)
                            | op::Op::ClientEnded(_)
                    )
                );
                untold += u32::from(!free);
                if let Some(op::Op::Execute(_)) = &op.op {
                    largest.fetch_max(op.encoded_len(), Relaxed);
                }
                let answer = match op.op {
                    Some(op::Op::CheckFlags(op)) => Some(verdict(op.request, &unsure)),
                    Some(op::Op::Execute(op)) => {
                        let one = (op.launch, op.first_result);
                        if op.placed_later {
                            unplaced.insert(op.launch, one);
                        } else {
                            let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
                            seen.push(one);
                        }
                        (op.watch != 0 && ends).then(|| ended(op.watch))
                    }
                    Some(op::Op::Start(op)) => {
                        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
                        seen.extend(unplaced.remove(&op.launch));
                        let launch = op.launch;
                        Some(reply::Reply::Started(Started { launch }))
                    }
                    Some(op::Op::SaveArrays(op)) => {
                        let before = save.replace(op.request);
                        before.map(|request| reply::Reply::Copied(Copied { request }))
                    }
                    op => op.and_then(answer),
                };
                let taken = (untold * 4 >= window).then(|| {
                    reply::Reply::Taken(Taken {
                        ops: std::mem::take(&mut untold),
                    })
                });
                for each in answer.into_iter().chain(taken) {
                    if replies.send(reply(each)).await.is_err() {
                        return;
                    }
                }
            }
        });
        Ok(Response::new(ReceiverStream::new(receiver)))
    }

    async fn put_data(
        &self,
        request: Request<Streaming<DataFrame>>,
    ) -> Result<Response<PutDataReply>, Status> {
        let mut frames = request.into_inner();
        while frames.message().await?.is_some() {}
        Ok(Response::new(PutDataReply {}))
    }

    async fn put_local(
        &self,
        _: Request<Streaming<LocalPut>>,
    ) -> Result<Response<Self::PutLocalStream>, Status> {
        Err(Status::unimplemented("it shares no memory"))
    }

    async fn fetch_data(
        &self,
        _: Request<FetchDataRequest>,
    ) -> Result<Response<Self::FetchDataStream>, Status> {
        Err(Status::unimplemented("it holds no data"))
    }

    async fn fetch_executable(
        &self,
        _: Request<FetchExecutableRequest>,
    ) -> Result<Response<Self::FetchExecutableStream>, Status> {
        Err(Status::unimplemented("it holds no executables"))
    }

    async fn get_status(
        &self,
        _: Request<WorkerStatusRequest>,
    ) -> Result<Response<WorkerStatus>, Status> {
        Ok(Response::new(WorkerStatus::default()))
    }
}
