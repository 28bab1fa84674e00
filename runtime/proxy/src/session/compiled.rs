//! A program once it is compiled: on all its workers, and again on those that come in a lost one's place.

use std::sync::{Arc, atomic::AtomicBool};

use bytes::Bytes;
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
    link::{Answer, Ids},
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

impl XlaProgram {
    /// Takes what the compile worker has found out, and has the others load the program from there.
    async fn complete(mut self, compiled: Answer, ids: &Ids) -> Result<Self, Status> {
        let reply::Reply::CompileDone(done) = compiled.wait().await? else {
            return Err(unexpected("Compile"));
        };
        self.info = done.info.unwrap_or_default();
        let devices = &self.placement.devices;
        let results = self.info.results.iter();
        self.results = results
            .map(|value| result_spec(value, devices))
            .collect::<Result<_, _>>()?;
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
        Ok(self)
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
        };
        let answer = placement
            .first()
            .call(request, op::Op::Compile(compile))
            .await;
        let program = XlaProgram {
            id,
            placement,
            info: ExecutableInfo::default(),
            results: Vec::new(),
            deleted: AtomicBool::new(false),
            source,
        };
        async move { program.complete(answer, &ids).await }
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
