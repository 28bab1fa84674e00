//! Two workers that know each other.

use waystation_proto::{
    tensorflow::StatusProto,
    waystation::{
        ExecutableInfo,
        worker::{Attach, Compile, Execute, Load, Peers, Put, op, peers::Peer, reply},
    },
    xla::PrimitiveType,
};

use crate::support::{Session, Worker, program, target};

/// Devices 0 to 7 are the first worker's, 8 to 15 the second's; four of each run the programs.
pub(super) const BOTH: [i32; 8] = [0, 1, 2, 3, 8, 9, 10, 11];
pub(super) const PLACES: [u32; 8] = [4, 4, 4, 4, 9, 9, 9, 9];
pub(super) use crate::support::SECRET;

/// Two workers that know each other, with a session each.
pub(super) struct Pair {
    pub(super) workers: [Worker; 2],
    pub(super) sessions: [Session; 2],
    pub(super) peers: [Peer; 2],
}

pub(super) async fn attach(
    worker: &Worker,
    epoch: u64,
    index: i32,
    secret: [u8; 32],
) -> (Session, Peer) {
    let process = if index == 0 { 4 } else { 9 };
    attach_as(worker, epoch, index, process, secret).await
}

pub(super) async fn attach_as(
    worker: &Worker,
    epoch: u64,
    index: i32,
    process: u32,
    secret: [u8; 32],
) -> (Session, Peer) {
    let attach = Attach {
        epoch,
        device_ids: (8 * index..8 * (index + 1)).collect(),
        process,
        collectives_secret: secret.to_vec().into(),
        ..Attach::default()
    };
    let (session, attached) = Session::attach(worker, attach).await.expect("a session");
    assert_eq!(attached.cannot_span, "");
    let peer = Peer {
        process,
        address: attached.collectives_address,
        life: epoch,
        name: format!("slice 0 task {index}"),
        ..Peer::default()
    };
    (session, peer)
}

impl Pair {
    pub(super) async fn start() -> Pair {
        Pair::with(SECRET).await
    }

    /// The second worker has that secret.
    pub(super) async fn with(secret: [u8; 32]) -> Pair {
        let pair = Pair::strangers(secret).await;
        pair.tell(&pair.peers).await;
        pair
    }

    /// Two that were not told of each other.
    pub(super) async fn unknown() -> Pair {
        Pair::strangers(SECRET).await
    }

    async fn strangers(secret: [u8; 32]) -> Pair {
        let workers = [Worker::start().await, Worker::start().await];
        let (first, first_peer) = attach(&workers[0], 1, 0, SECRET).await;
        let (second, second_peer) = attach(&workers[1], 1, 1, secret).await;
        Pair {
            workers,
            sessions: [first, second],
            peers: [first_peer, second_peer],
        }
    }

    pub(super) async fn tell(&self, peers: &[Peer]) {
        for session in &self.sessions {
            let peers = peers.to_vec();
            session.send(op::Op::Peers(Peers { peers })).await;
        }
    }

    /// Has the first worker expect the bytes of transfer 1, shard 20, on its first device.
    pub(super) async fn announce(&self) {
        let put = Put {
            transfer: 1,
            dtype: PrimitiveType::F32 as i32,
            dims: vec![2, 2],
            targets: vec![target(20, 0)],
            ..Put::default()
        };
        self.sessions[0].send(op::Op::Put(put)).await;
    }

    /// Compiles on the first worker and loads on the second.
    pub(super) async fn compile(&mut self, executable: u64, name: &str) -> ExecutableInfo {
        let devices = BOTH;
        self.compile_on(executable, name, &devices, &PLACES).await
    }

    pub(super) async fn compile_on(
        &mut self,
        executable: u64,
        name: &str,
        devices: &[i32],
        places: &[u32],
    ) -> ExecutableInfo {
        let (program, options) = program(name);
        let from = usize::from(places[0] == 9);
        let [first, second] = &mut self.sessions;
        let (compiler, other) = if from == 0 {
            (first, second)
        } else {
            (second, first)
        };
        compiler
            .send(op::Op::Compile(Compile {
                request: executable,
                executable,
                program,
                options,
                device_ids: devices.to_vec(),
                processes: places.to_vec(),
                ..Compile::default()
            }))
            .await;
        let info = compiler.compiled(executable).await.expect("it compiles");
        let load = Load {
            request: executable,
            executable,
            key: info.key.clone(),
            device_ids: devices.to_vec(),
            processes: places.to_vec(),
            from: self.workers[from].address.clone(),
            from_epoch: compiler.epoch,
            from_executable: executable,
            info: Some(info.clone()),
        };
        assert_eq!(loaded(other, load).await, None);
        info
    }

    /// Puts shards `first` and so on, one a device, each of `len` elements of a value: the number of the shard, counted from 1.
    pub(super) async fn put(&self, first: u64, len: usize, dims: &[i64]) {
        for (number, shard) in (0_u8..8).zip(first..) {
            let device = u32::from(number % 4);
            let value = f32::from(number + 1).to_le_bytes();
            let session = &self.sessions[usize::from(number / 4)];
            session
                .put_bytes(
                    shard,
                    device,
                    PrimitiveType::F32,
                    dims,
                    None,
                    value.repeat(len),
                )
                .await;
        }
    }

    /// Launches a program of one argument and one result on all of shards `arg` and so on.
    pub(super) async fn execute(&self, executable: u64, launch: u64, arg: u64, result: u64) {
        for (session, own) in self.sessions.iter().zip([arg, arg + 4]) {
            session
                .send(launched(executable, launch, own, result))
                .await;
        }
    }

    /// Reads the results, one a device.
    pub(super) async fn read(&mut self, first: u64) -> Vec<Vec<f32>> {
        let mut all = Vec::new();
        for shard in first..first + 8 {
            let session = &mut self.sessions[usize::from(shard >= first + 4)];
            all.push(session.read_f32(shard).await);
        }
        all
    }

    /// How the results fail, one a device.
    pub(super) async fn failures(&mut self, first: u64) -> Vec<StatusProto> {
        let mut all = Vec::new();
        for shard in first..first + 8 {
            let session = &mut self.sessions[usize::from(shard >= first + 4)];
            all.push(session.read(shard).await.expect_err("a failure"));
        }
        all
    }

    pub(super) async fn stop(self) {
        drop(self.sessions);
        for worker in self.workers {
            worker.stop().await;
        }
    }
}

/// Has a worker load a program. How it fails, if it does.
pub(super) async fn loaded(session: &mut Session, load: Load) -> Option<StatusProto> {
    let executable = load.request;
    session.send(op::Op::Load(load)).await;
    session
        .reply(|reply| match reply {
            reply::Reply::CompileDone(done) if done.request == executable => {
                assert_eq!(done.info, None);
                Some(done.status.clone())
            }
            _ => None,
        })
        .await
}

/// Compiles a program on the devices of both.
pub(super) fn compiled(executable: u64, name: &str) -> op::Op {
    let (program, options) = program(name);
    op::Op::Compile(Compile {
        request: executable,
        executable,
        program,
        options,
        device_ids: BOTH.to_vec(),
        processes: PLACES.to_vec(),
        ..Compile::default()
    })
}

pub(super) fn launched(executable: u64, launch: u64, arg: u64, result: u64) -> op::Op {
    op::Op::Execute(Execute {
        executable,
        launch,
        args: (arg..arg + 4).collect(),
        first_result: result,
        num_results: 1,
        user_context: 99,
        ..Execute::default()
    })
}

/// Shards of four elements: each the number of its device, and the sum of all.
pub(super) fn sums(found: &[Vec<f32>]) {
    for (value, found) in (1_u8..).zip(found) {
        let wanted = f32::from(value) + 4.0 * 36.0;
        assert_eq!(found, &vec![wanted; 4]);
    }
}
