//! Recording compile requests; and, with `--record_only`, nothing else: a program is stored and not compiled, and none is
//! executed.

use std::sync::Arc;

use bytes::Bytes;
use waystation_cache::recording::{NotRecorded, Recorder};
use waystation_proto::{
    waystation::recording::Recording, xla::ifrt::proxy::ifrt_response::Response,
};

use super::{
    Outcome, Session, Shared, lock,
    placement::Placement,
    programs::{Program, plain_compile_response},
};
use crate::status::{self, Status};

/// Why this proxy does not do what needs a compiled program.
pub(super) fn refusal(what: &str) -> Status {
    status::failed_precondition(format!(
        "{what} is refused: this proxy runs with --record_only, which records programs and neither compiles nor executes \
         them; lower with shapes (jax.eval_shape, jax.ShapeDtypeStruct) in place of values"
    ))
}

impl Shared {
    /// Whether programs are recorded in place of being compiled.
    pub(super) fn records_only(&self) -> bool {
        self.recording
            .as_ref()
            .is_some_and(|recording| recording.only)
    }
}

impl Session {
    /// A compile request as it is recorded.
    pub(super) fn recording(
        &self,
        program: &Bytes,
        options: &Bytes,
        placement: &Placement,
    ) -> Result<Recording, Status> {
        let cluster = self.cluster()?;
        let devices = &placement.devices;
        let ordinals = devices
            .iter()
            .filter_map(|&id| Some(cluster.device(id)?.ordinal));
        let workers = placement.owners().iter();
        let workers = workers.map(|&worker| u32::try_from(worker).unwrap_or(u32::MAX));
        Ok(Recording {
            program: program.clone(),
            compile_options: options.clone(),
            device_ids: devices.clone(),
            device_ordinals: ordinals.collect(),
            workers: workers.filter(|_| placement.spans()).collect(),
            xla_flags: self.shared.xla_flags.clone(),
        })
    }

    /// Answers a compile when the request is stored: whoever asked is to know that it is. What compiling would have found
    /// out stays unsaid; JAX then takes what the program's own text says.
    pub(super) fn record_only(&mut self, recorder: Arc<Recorder>, recording: Recording) -> Outcome {
        let (handle, ready) = (self.mint(), self.ready_future());
        let tables = Arc::clone(&self.tables);
        Outcome::Later(Box::pin(async move {
            let devices = recording.device_ids.clone();
            let signature = waystation_stablehlo::main_signature(&recording.program);
            let name = signature.map(|signature| signature.module_name);
            recorder
                .record_now(recording)
                .await
                .map_err(|error| match error {
                    NotRecorded::Uncacheable => {
                        status::unimplemented(format!("not recorded: {error}"))
                    }
                    error => status::unavailable(format!("not recorded: {error}")),
                })?;
            lock(&tables.programs).insert(handle, Program::Recorded);
            let name = name.unwrap_or_else(|_| "recorded".to_owned());
            let response = plain_compile_response(handle, ready, name, &devices);
            Ok(Response::CompileResponse(response))
        }))
    }
}
