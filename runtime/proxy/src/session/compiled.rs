//! A program once it is compiled: on all its workers, and again on those that come in a lost one's place.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use bytes::Bytes;
use tokio::time::{Instant, timeout_at};
use waystation_proto::waystation::{
    ExecutableInfo,
    worker::{Compile, Load, op, reply},
};

use super::{
    Session,
    init::unexpected,
    lock,
    placement::Placement,
    programs::{Program, ResultSpec, result_spec},
};
use crate::{
    cluster::{Cluster, ClusterWatch},
    link::{Answer, Ids, Link},
    status::{self, Status},
};

/// A compiled program, on all its workers under one number.
pub(super) struct XlaProgram {
    pub(super) id: u64,
    pub(super) placement: Placement,
    pub(super) info: ExecutableInfo,
    pub(super) results: Vec<ResultSpec>,
    pub(super) deleted: AtomicBool,
    source: Source,
}

/// What a client has compiled, kept for workers that come in a lost one's place.
#[derive(Clone)]
pub(super) struct Source {
    pub(super) program: Bytes,
    pub(super) options: Bytes,
}

impl Drop for XlaProgram {
    fn drop(&mut self) {
        for link in self.placement.links() {
            link.unload(self.id);
        }
    }
}

/// An executable that only tells what the program is like: unloaded however the question ends.
struct StandIn {
    link: Arc<Link>,
    executable: u64,
}

impl Drop for StandIn {
    fn drop(&mut self) {
        self.link.unload(self.executable);
    }
}

impl XlaProgram {
    /// # Errors
    /// When the client has deleted it.
    pub(super) fn check_not_deleted(&self) -> Result<(), Status> {
        if !self.deleted.load(Relaxed) {
            return Ok(());
        }
        Err(status::invalid_argument(format!(
            "executable '{}' has been deleted",
            self.info.name
        )))
    }

    /// Takes what a worker has found out by compiling it.
    async fn learn(&mut self, compiled: Answer) -> Result<(), Status> {
        let reply::Reply::CompileDone(done) = compiled.wait().await? else {
            return Err(unexpected("Compile"));
        };
        self.describe(done.info.unwrap_or_default())
    }

    fn describe(&mut self, info: ExecutableInfo) -> Result<(), Status> {
        self.info = info;
        let devices = &self.placement.devices;
        let results = self.info.results.iter();
        self.results = results
            .map(|value| result_spec(value, devices))
            .collect::<Result<_, _>>()?;
        Ok(())
    }

    /// Learns from the compile worker, and has the others load the program from there.
    async fn complete(&mut self, compiled: Answer, ids: &Ids) -> Result<(), Status> {
        self.learn(compiled).await?;
        let devices = &self.placement.devices;
        let compiler = self.placement.first();
        let mut loads = Vec::new();
        for link in self.placement.links().skip(1) {
            let request = ids.next();
            let load = Load {
                request,
                executable: self.id,
                key: self.info.key.clone(),
                device_ids: devices.clone(),
                processes: self.placement.processes(),
                from: compiler.address.to_string(),
                from_epoch: compiler.epoch,
                from_executable: self.id,
                info: Some(self.info.clone()),
            };
            loads.push((link, link.call(request, op::Op::Load(load)).await));
        }
        for (link, load) in loads {
            load.wait()
                .await
                .map_err(|status| status::at_worker(status, &link.name))?;
        }
        Ok(())
    }

    /// Learns what the program is like although a worker of it is lost: one that lives compiles it. pathwaysutils compiles for
    /// slices that are gone, to see whether they are; it is the execution that fails. Where no worker lives and the program has
    /// not been compiled before, one is waited for, as long as a silent one counts as alive: `lost` is how it ends otherwise.
    async fn learn_elsewhere(
        &mut self,
        compile: Compile,
        mut clusters: ClusterWatch,
        ids: &Ids,
        lost: Status,
    ) -> Result<(), Status> {
        let patience = Instant::now() + waystation_scheduler::DEFAULT_LEASE;
        loop {
            let cluster = clusters.borrow_and_update().0.clone();
            if let Some(link) = cluster.and_then(|cluster| self.stand_in(&cluster)) {
                let (request, executable) = (ids.next(), ids.next());
                let compile = op::Op::Compile(Compile {
                    request,
                    executable,
                    stand_in: true,
                    ..compile.clone()
                });
                let compiled = link.call(request, compile).await;
                // Now that the compile is in the queue: an unload before it would unload nothing.
                let stand_in = StandIn {
                    link: Arc::clone(&link),
                    executable,
                };
                let learnt = self.learn(compiled).await;
                drop(stand_in);
                if learnt.is_ok() || !link.is_dead() {
                    return learnt;
                }
                continue;
            }
            match timeout_at(patience, clusters.changed()).await {
                Ok(Ok(())) => {}
                _ => return Err(lost),
            }
        }
    }

    /// A living worker that can compile the program: any with as many devices; where it spans workers, any that takes part in
    /// such programs, for those are compiled alike everywhere.
    fn stand_in(&self, cluster: &Cluster) -> Option<Arc<Link>> {
        let fits = |index: usize, link: &Link| {
            if self.placement.spans() {
                return link.cannot_span().is_none();
            }
            let all = cluster.devices.all.iter();
            let devices = all.filter(|device| device.link == index).count();
            devices >= self.placement.devices.len()
        };
        let mut links = cluster.links.iter().enumerate();
        links
            .find(|(index, link)| !link.is_dead() && fits(*index, link))
            .map(|(_, link)| Arc::clone(link))
    }
}

impl Session {
    /// Has the program compiled. The compile worker has been told when this returns; what is returned waits. Dropped, it leaves
    /// the program nowhere.
    pub(super) async fn compile_on(
        &self,
        source: Source,
        placement: Placement,
    ) -> impl Future<Output = Result<XlaProgram, Status>> + Send + use<> {
        let ids = Arc::clone(&self.shared.ids);
        let (id, request) = (ids.next(), ids.next());
        let compile = Compile {
            request,
            executable: id,
            program: source.program.clone(),
            options: source.options.clone(),
            device_ids: placement.devices.clone(),
            xla_flags: self.shared.xla_flags.clone(),
            processes: placement.processes(),
            stand_in: false,
        };
        let answer = match placement.lost() {
            None => {
                let compile = op::Op::Compile(compile.clone());
                Ok(placement.first().call(request, compile).await)
            }
            Some(lost) => Err(lost),
        };
        let shared = Arc::clone(&self.shared);
        let mut program = XlaProgram {
            id,
            placement,
            info: ExecutableInfo::default(),
            results: Vec::new(),
            deleted: AtomicBool::new(false),
            source,
        };
        async move {
            let compiled = match answer {
                Ok(answer) => program.complete(answer, &ids).await,
                Err(lost) => Err(lost),
            };
            match (compiled, program.placement.lost()) {
                (Err(_), Some(lost)) => match shared.descriptions.get(&program.source) {
                    Some(info) => program.describe(info)?,
                    None => {
                        let clusters = shared.cluster.clone();
                        program
                            .learn_elsewhere(compile, clusters, &ids, lost)
                            .await?;
                    }
                },
                (compiled, _) => compiled?,
            }
            shared.descriptions.put(&program.source, &program.info);
            Ok(program)
        }
    }

    /// The program on workers that live. Where others have come in the place of those that had it, it is compiled again, and
    /// what the client sends meanwhile waits.
    pub(super) async fn living(
        &mut self,
        handle: u64,
        program: Arc<XlaProgram>,
    ) -> Result<Arc<XlaProgram>, Status> {
        if program.placement.lost().is_none() {
            return Ok(program);
        }
        let placement = Placement::new(self.cluster()?, program.placement.devices.clone())?;
        // The execution then fails as all that the lost worker holds.
        if placement.lost().is_some() {
            return Ok(program);
        }
        placement.check()?;
        tracing::info!(program = %program.info.name, "compiled again for workers that came back");
        let again = self.compile_on(program.source.clone(), placement).await;
        let again = Arc::new(again.await?);
        lock(&self.tables.programs).insert(handle, Program::Xla(Arc::clone(&again)));
        Ok(again)
    }
}
