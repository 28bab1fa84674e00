//! A worker to test against, and a proxy's side of its op stream.

use std::{
    collections::VecDeque,
    net::TcpListener,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    time::Duration,
};

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::{Streaming, transport::Channel};
use waystation_pjrt::OptionValue;
use waystation_proto::{
    tensorflow::{StatusProto, error::Code},
    waystation::{
        ExecutableInfo,
        worker::{
            Answer, Attach, Attached, Compile, DataFrame, DataHeader, Execute, FetchDataRequest,
            Op, Put, Read, Reply, Strides, Target, Watch, WorkerStatus, WorkerStatusRequest, op,
            reply, worker_client::WorkerClient,
        },
    },
    xla::PrimitiveType,
};
use waystation_worker::{Config, Limits};

/// Nothing in these tests takes as long; a wait beyond it is a failure.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// What a lease's proxy and workers know.
pub(crate) const SECRET: [u8; 32] = [7; 32];

/// The interpreter that has JAX and the plugin.
pub(crate) fn python() -> PathBuf {
    if let Some(path) = std::env::var_os("WAYSTATION_TEST_PYTHON") {
        return path.into();
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/bin/python");
    assert!(
        path.exists(),
        "no {}; run `make` or set WAYSTATION_TEST_PYTHON",
        path.display()
    );
    path
}

/// One of the programs of programs.py, and its options.
pub(crate) fn program(name: &str) -> (Bytes, Bytes) {
    static FOLDER: OnceLock<Option<tempfile::TempDir>> = OnceLock::new();
    let made = FOLDER.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/worker/programs.py");
        let done = Command::new(python())
            .arg(script)
            .arg(folder.path())
            .status()
            .expect("Python runs");
        done.success().then_some(folder)
    });
    let folder = made.as_ref().expect("programs.py ran without a failure");
    let read = |end: &str| {
        Bytes::from(
            std::fs::read(folder.path().join(format!("{name}.{end}")))
                .expect("a program of programs.py"),
        )
    };
    (read("mlir"), read("options"))
}

/// A worker in this process.
pub(crate) struct Worker {
    pub(crate) address: String,
    pub(crate) client: WorkerClient<Channel>,
    stop: CancellationToken,
    served: tokio::task::JoinHandle<Result<(), waystation_worker::Error>>,
}

impl Worker {
    /// With eight devices and no bucket.
    pub(crate) async fn start() -> Worker {
        Worker::start_with(waystation_cache::Config::default(), Limits::default()).await
    }

    pub(crate) async fn start_with(cache: waystation_cache::Config, limits: Limits) -> Worker {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("an address").to_string();
        // Another plugin's name or path, to see how it differs.
        let spec = std::env::var("WAYSTATION_TEST_PLUGIN").unwrap_or_else(|_| "cpu".to_owned());
        let plugin =
            waystation_pjrt::discover::resolve(&spec, Some(&python())).expect("the plugin");
        let config = Config {
            listener,
            advertise: None,
            resource_manager: None,
            slice: 0,
            task: 0,
            slice_tasks: 1,
            simulated: None,
            plugin,
            plugin_options: vec![("cpu_device_count".to_owned(), OptionValue::Int64(8))],
            plugin_collectives: false,
            lapack: None,
            cache,
            environment: Vec::new(),
            compile_child: None,
            limits,
        };
        let stop = CancellationToken::new();
        let served = tokio::spawn(waystation_worker::serve(config, stop.clone()));
        // The listener is bound: the first call waits until the worker serves.
        let channel = Channel::from_shared(format!("http://{address}"))
            .expect("an address")
            .connect_lazy();
        let client = WorkerClient::new(channel).max_decoding_message_size(usize::MAX);
        Worker {
            address,
            client,
            stop,
            served,
        }
    }

    pub(crate) async fn status(&self) -> WorkerStatus {
        self.client
            .clone()
            .get_status(WorkerStatusRequest {})
            .await
            .expect("a status")
            .into_inner()
    }

    /// Waits until the status is as `wanted`.
    pub(crate) async fn status_becomes(
        &self,
        wanted: impl Fn(&WorkerStatus) -> bool,
    ) -> WorkerStatus {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            let status = self.status().await;
            if wanted(&status) {
                return status;
            }
            assert!(
                tokio::time::Instant::now() < deadline,
                "the status stays {status:?}"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub(crate) async fn session(&self, epoch: u64) -> Session {
        Session::open(self, epoch).await.expect("a session")
    }

    /// Shuts down in order; what was to be published is.
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        self.served.await.expect("no panic").expect("a clean end");
    }
}

/// A proxy's side of one session.
pub(crate) struct Session {
    pub(crate) epoch: u64,
    pub(crate) client: WorkerClient<Channel>,
    pub(crate) ops: mpsc::Sender<Op>,
    replies: Streaming<Reply>,
    stash: VecDeque<reply::Reply>,
    next: u64,
}

impl Session {
    pub(crate) async fn open(worker: &Worker, epoch: u64) -> Result<Session, tonic::Status> {
        let attach = Attach {
            epoch,
            device_ids: (0..8).collect(),
            collectives_secret: SECRET.to_vec().into(),
            ..Attach::default()
        };
        let (session, _) = Session::attach(worker, attach).await?;
        Ok(session)
    }

    /// Opens a session as `attach` says, but for this build's version.
    pub(crate) async fn attach(
        worker: &Worker,
        attach: Attach,
    ) -> Result<(Session, Attached), tonic::Status> {
        let (ops, receiver) = mpsc::channel(16);
        let attach = Attach {
            link_version: waystation_proto::LINK_VERSION,
            build_id: "test".to_owned(),
            ..attach
        };
        let epoch = attach.epoch;
        ops.send(Op {
            op: Some(op::Op::Attach(attach)),
            ..Op::default()
        })
        .await
        .expect("room");
        let mut client = worker.client.clone();
        let replies = client
            .session(ReceiverStream::new(receiver))
            .await?
            .into_inner();
        let mut session = Session {
            epoch,
            client,
            ops,
            replies,
            stash: VecDeque::new(),
            next: 1_000_000,
        };
        let attached = session
            .reply(|reply| match reply {
                reply::Reply::Attached(attached) => Some(attached.clone()),
                _ => None,
            })
            .await;
        Ok((session, attached))
    }

    /// A number that is not in use.
    pub(crate) fn mint(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub(crate) async fn send(&self, op: op::Op) {
        self.send_op(Op {
            op: Some(op),
            ..Op::default()
        })
        .await;
    }

    pub(crate) async fn send_op(&self, op: Op) {
        self.ops.send(op).await.expect("the stream is open");
    }

    /// The next reply that `take` wants; others are kept for later.
    pub(crate) async fn reply<T>(&mut self, take: impl Fn(&reply::Reply) -> Option<T>) -> T {
        if let Some(index) = self.stash.iter().position(|reply| take(reply).is_some()) {
            let reply = self.stash.remove(index).expect("just found");
            return take(&reply).expect("just taken");
        }
        loop {
            let reply = tokio::time::timeout(PATIENCE, self.replies.message())
                .await
                .expect("a reply in time");
            let reply = reply
                .expect("no error")
                .expect("a reply")
                .reply
                .expect("a known reply");
            if let Some(taken) = take(&reply) {
                return taken;
            }
            self.stash.push_back(reply);
        }
    }

    /// Whether the worker has ended the stream.
    pub(crate) async fn ended(&mut self) -> bool {
        loop {
            match tokio::time::timeout(PATIENCE, self.replies.message())
                .await
                .expect("an end in time")
            {
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return true,
            }
        }
    }

    pub(crate) async fn put(&self, shard: u64, device: u32, values: &[f32]) {
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        self.put_bytes(
            shard,
            device,
            PrimitiveType::F32,
            &[values.len() as i64],
            None,
            bytes,
        )
        .await;
    }

    pub(crate) async fn put_bytes(
        &self,
        shard: u64,
        device: u32,
        dtype: PrimitiveType,
        dims: &[i64],
        strides: Option<&[i64]>,
        bytes: Vec<u8>,
    ) {
        self.send(op::Op::Put(Put {
            transfer: shard,
            dtype: dtype as i32,
            dims: dims.to_vec(),
            byte_strides: strides.map(|strides| Strides {
                strides: strides.to_vec(),
            }),
            targets: vec![target(shard, device)],
            inline_data: Some(bytes.into()),
            user_context: 77,
            layout: None,
        }))
        .await;
    }

    /// Asks for a shard's bytes, which come inline or by FetchData.
    pub(crate) async fn start_read(&mut self, shard: u64) -> u64 {
        let transfer = self.mint();
        self.send(op::Op::Read(Read {
            transfer,
            shard,
            byte_strides: None,
            notify: true,
            ..Read::default()
        }))
        .await;
        transfer
    }

    pub(crate) async fn end_read(&mut self, transfer: u64) -> Result<Vec<u8>, StatusProto> {
        let done = self
            .reply(|reply| match reply {
                reply::Reply::ReadDone(done) if done.transfer == transfer => Some(done.clone()),
                _ => None,
            })
            .await;
        match (done.status, done.inline_data) {
            (Some(status), _) => Err(status),
            (None, Some(data)) => Ok(data.to_vec()),
            (None, None) => {
                let data = self
                    .fetch(transfer)
                    .await
                    .expect("the bytes that ReadDone announced");
                assert_eq!(data.len() as u64, done.size_bytes);
                Ok(data)
            }
        }
    }

    pub(crate) async fn read(&mut self, shard: u64) -> Result<Vec<u8>, StatusProto> {
        let transfer = self.start_read(shard).await;
        self.end_read(transfer).await
    }

    pub(crate) async fn read_f32(&mut self, shard: u64) -> Vec<f32> {
        floats(&self.read(shard).await.expect("a readable shard"))
    }

    pub(crate) async fn fetch(&mut self, transfer: u64) -> Result<Vec<u8>, tonic::Status> {
        let request = FetchDataRequest {
            epoch: self.epoch,
            transfer,
            by_connection: false,
            secret: SECRET.to_vec().into(),
        };
        let mut frames = self.client.fetch_data(request).await?.into_inner();
        let mut data = Vec::new();
        while let Some(frame) = frames.message().await? {
            data.extend_from_slice(&frame.data);
        }
        Ok(data)
    }

    /// Sends a transfer's bytes in frames of `frame` bytes, saying that they are `announced` ones.
    pub(crate) async fn put_data(
        &self,
        transfer: u64,
        bytes: &[u8],
        frame: usize,
        announced: u64,
    ) -> Result<(), tonic::Status> {
        let mut header = Some(DataHeader {
            epoch: self.epoch,
            transfer,
            size_bytes: announced,
            secret: SECRET.to_vec().into(),
            ..DataHeader::default()
        });
        let mut frames: Vec<DataFrame> = bytes
            .chunks(frame)
            .map(|chunk| DataFrame {
                header: header.take(),
                data: Bytes::copy_from_slice(chunk),
                given_up: false,
            })
            .collect();
        if frames.is_empty() {
            frames.push(DataFrame {
                header,
                data: Bytes::new(),
                given_up: false,
            });
        }
        self.client
            .clone()
            .put_data(tokio_stream::iter(frames))
            .await
            .map(|_| ())
    }

    /// Begins a transfer of `announced` bytes, sends `bytes` and gives up.
    pub(crate) async fn give_up(
        &self,
        transfer: u64,
        bytes: &[u8],
        announced: u64,
    ) -> Result<(), tonic::Status> {
        let first = DataFrame {
            header: Some(DataHeader {
                epoch: self.epoch,
                transfer,
                size_bytes: announced,
                secret: SECRET.to_vec().into(),
                ..DataHeader::default()
            }),
            data: Bytes::copy_from_slice(bytes),
            given_up: false,
        };
        let last = DataFrame {
            given_up: true,
            ..DataFrame::default()
        };
        self.client
            .clone()
            .put_data(tokio_stream::iter([first, last]))
            .await
            .map(|_| ())
    }

    pub(crate) async fn watch(&mut self, shards: &[u64]) -> Result<(), StatusProto> {
        let watch = self.mint();
        self.send(op::Op::Watch(Watch {
            watch,
            shards: shards.to_vec(),
        }))
        .await;
        self.watched(watch).await
    }

    pub(crate) async fn watched(&mut self, watch: u64) -> Result<(), StatusProto> {
        let status = self
            .reply(|reply| match reply {
                reply::Reply::WatchDone(done) if done.watch == watch => Some(done.status.clone()),
                _ => None,
            })
            .await;
        status.map_or(Ok(()), Err)
    }

    /// The launch of the next word that a part has started.
    pub(crate) async fn started(&mut self) -> u64 {
        self.reply(|reply| match reply {
            reply::Reply::Started(started) => Some(started.launch),
            _ => None,
        })
        .await
    }

    pub(crate) async fn drop_shards(&self, shards: &[u64]) {
        self.send_op(Op {
            drops: shards.to_vec(),
            ..Op::default()
        })
        .await;
    }

    /// Compiles a program of programs.py as `executable`.
    pub(crate) async fn compile(
        &mut self,
        executable: u64,
        name: &str,
        device_ids: &[i32],
    ) -> Result<ExecutableInfo, StatusProto> {
        self.start_compile(executable, name, device_ids).await;
        self.compiled(executable).await
    }

    pub(crate) async fn start_compile(&mut self, executable: u64, name: &str, device_ids: &[i32]) {
        let (program, options) = program(name);
        self.send(op::Op::Compile(Compile {
            request: executable,
            executable,
            program,
            options,
            device_ids: device_ids.to_vec(),
            xla_flags: Vec::new(),
            processes: Vec::new(),
            stand_in: false,
        }))
        .await;
    }

    pub(crate) async fn compiled(&mut self, request: u64) -> Result<ExecutableInfo, StatusProto> {
        let done = self
            .reply(|reply| match reply {
                reply::Reply::CompileDone(done) if done.request == request => Some(done.clone()),
                _ => None,
            })
            .await;
        match done.status {
            Some(status) => Err(status),
            None => Ok(done.info.expect("a description")),
        }
    }

    pub(crate) async fn answer(&mut self, request: u64) -> Result<Answer, StatusProto> {
        let answer = self
            .reply(|reply| match reply {
                reply::Reply::Answer(answer) if answer.request == request => Some(answer.clone()),
                _ => None,
            })
            .await;
        match answer.status.clone() {
            Some(status) => Err(status),
            None => Ok(answer),
        }
    }

    pub(crate) async fn execute(
        &self,
        executable: u64,
        args: &[u64],
        first_result: u64,
        num_results: u32,
    ) {
        self.send(op::Op::Execute(Execute {
            executable,
            launch: first_result,
            args: args.to_vec(),
            first_result,
            user_context: 99,
            num_results,
            ..Execute::default()
        }))
        .await;
    }
}

pub(crate) fn target(shard: u64, device: u32) -> Target {
    Target {
        shard,
        device,
        memory_kind: String::new(),
    }
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes
        .chunks_exact(4)
        .map(|four| f32::from_le_bytes(four.try_into().expect("four bytes")))
        .collect()
}

pub(crate) fn failure(code: Code, message: &str) -> StatusProto {
    StatusProto {
        code: code as i32,
        message: message.to_owned(),
        ..StatusProto::default()
    }
}

/// The id under which the client finds the Python stack, as the status carries it.
pub(crate) fn user_context(status: &StatusProto) -> Option<&str> {
    let payload = status.payload.get("type.googleapis.com/ifrt.UserContext")?;
    std::str::from_utf8(payload).ok()
}
