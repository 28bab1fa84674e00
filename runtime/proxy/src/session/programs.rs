//! Programs: compile, and what is known of a compiled one.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering::Relaxed},
};

use bytes::Bytes;
use prost::Message;
use waystation_proto::{
    tensorflow::StatusProto,
    waystation::{
        ExecutableInfo, executable_info,
        worker::{CostAnalysis, ProgramText, op, reply},
    },
    xla::{
        LayoutProto, OpSharding, PrimitiveType,
        ifrt::{
            AttributeMapProto, Serialized, attribute_map_proto,
            proxy::{
                CompileRequest, CompileResponse, LoadedExecutableCostAnalysisRequest,
                LoadedExecutableCostAnalysisResponse, LoadedExecutableDeleteRequest,
                LoadedExecutableDeleteResponse, LoadedExecutableDestructRequest,
                LoadedExecutableDestructResponse, LoadedExecutableHumanReadableProgramTextRequest,
                LoadedExecutableHumanReadableProgramTextResponse, LoadedExecutableIsDeletedRequest,
                LoadedExecutableIsDeletedResponse, LoadedExecutableMetadataRequest,
                LoadedExecutableMetadataResponse, compile_response, ifrt_response::Response,
                loaded_executable_cost_analysis_response,
                loaded_executable_human_readable_program_text_response,
                loaded_executable_metadata_response as metadata,
            },
        },
    },
};
use waystation_stablehlo::compile_options;

use super::{
    Handled, Outcome, Session, UserContext,
    compiled::{Source, XlaProgram},
    init::unexpected,
    lock,
    placement::Placement,
    plugin_program::PluginProgram,
    record_only,
};
use crate::{
    convert::{Sharding, Tiling},
    counters::Counters,
    status::{self, Status},
};

/// The names under which jaxlib registers its program and option messages.
const XLA_PROGRAM: &str = "xla::ifrt::XlaProgram";
const HLO_PROGRAM: &str = "xla::ifrt::HloProgram";
const XLA_COMPILE_OPTIONS: &str = "xla::ifrt::XlaCompileOptions";
const PLUGIN_PROGRAM: &str = "xla::ifrt::PluginProgram";
const CUSTOM_CALL_PROGRAM: &str = "xla::ifrt::CustomCallProgram";

/// What an executable's handle stands for.
#[derive(Clone)]
pub(super) enum Program {
    Xla(Arc<XlaProgram>),
    Plugin(Arc<PluginProgram>),
    /// Recorded and not compiled.
    Recorded,
}

/// A result as every execution makes it.
pub(super) struct ResultSpec {
    pub(super) dtype: PrimitiveType,
    pub(super) dims: Vec<i64>,
    pub(super) sharding: Sharding,
}

/// `XlaCompileOptionsProto` with its one message kept as the bytes they are: the proxy forwards them unopened, with all
/// fields, declared here or not (a message and bytes look alike on the wire).
#[derive(Clone, PartialEq, Message)]
struct RawXlaCompileOptions {
    #[prost(bytes = "bytes", tag = "1")]
    compile_options: Bytes,
}

impl Session {
    pub(super) async fn compile(&mut self, request: CompileRequest) -> Handled {
        Counters::add(&self.shared.counters.compile_requests, 1);
        if !request.host_callbacks.is_empty() {
            return Err(status::unimplemented(
                "host callbacks are not served: jaxlib's proxy client cannot run them; use colocated Python",
            ));
        }
        let program = request.program.unwrap_or_default();
        match program.type_name.as_str() {
            XLA_PROGRAM | HLO_PROGRAM => {
                self.compile_xla(program, request.compile_options.unwrap_or_default())
                    .await
            }
            PLUGIN_PROGRAM => self.compile_plugin_program(&program),
            CUSTOM_CALL_PROGRAM => Err(status::unimplemented(
                "CustomCallProgram (colocated Python) is not served by this Waystation",
            )),
            other => Err(status::unimplemented(format!(
                "programs of type '{other}' are not served"
            ))),
        }
    }

    async fn compile_xla(&mut self, program: Serialized, options: Serialized) -> Handled {
        if options.type_name != XLA_COMPILE_OPTIONS {
            return Err(status::unimplemented(format!(
                "compile options of type '{}' are not served",
                options.type_name
            )));
        }
        let options = RawXlaCompileOptions::decode(options.data)
            .map_err(|e| status::invalid_argument(format!("malformed compile options: {e}")))?
            .compile_options;
        let assignment = compile_options::device_assignment(&options)
            .map_err(|e| status::invalid_argument(format!("malformed compile options: {e}")))?;
        let placement = Placement::new(self.cluster()?, assignment.device_ids)?;
        if let Some(recording) = &self.shared.recording {
            let request = self.recording(&program.data, &options, &placement)?;
            if recording.only {
                return Ok(self.record_only(Arc::clone(&recording.recorder), request));
            }
            recording.recorder.record(request);
        }
        placement.check()?;
        let source = Source {
            program: program.data,
            options,
        };
        let compiled = self.compile_on(source, placement).await;
        let tables = Arc::clone(&self.tables);
        let (handle, ready) = (self.mint(), self.ready_future());
        Ok(Outcome::Later(Box::pin(async move {
            let compiled = compiled.await?;
            let response = compile_response(handle, ready, &compiled);
            // Before the reply: the client may use the handle from then on.
            lock(&tables.programs).insert(handle, Program::Xla(Arc::new(compiled)));
            Ok(Response::CompileResponse(response))
        })))
    }

    pub(super) fn program(&self, handle: u64) -> Result<Program, Status> {
        lock(&self.tables.programs)
            .get(&handle)
            .cloned()
            .ok_or_else(|| status::invalid_argument(format!("unknown executable handle {handle}")))
    }

    fn xla_program(&self, handle: u64, request: &str) -> Result<Arc<XlaProgram>, Status> {
        match self.program(handle)? {
            Program::Xla(program) => Ok(program),
            Program::Plugin(_) => Err(status::unimplemented(format!(
                "{request} of a plugin program"
            ))),
            Program::Recorded => Err(record_only::refusal(request)),
        }
    }

    pub(super) fn metadata(&self, request: &LoadedExecutableMetadataRequest) -> Handled {
        let response = match self.program(request.loaded_executable_handle)? {
            Program::Xla(program) => describe(&program.info),
            Program::Plugin(_) => describe_nothing(status::unimplemented(
                "a plugin program has no such metadata",
            )),
            Program::Recorded => describe_nothing(record_only::refusal("metadata")),
        };
        Ok(Outcome::Now(Response::LoadedExecutableMetadataResponse(
            Box::new(response),
        )))
    }

    pub(super) async fn cost_analysis(
        &mut self,
        context: &UserContext,
        request: &LoadedExecutableCostAnalysisRequest,
    ) -> Handled {
        let context = context.clone();
        let program = self.xla_program(request.loaded_executable_handle, "cost analysis")?;
        let id = self.shared.ids.next();
        let op = op::Op::CostAnalysis(CostAnalysis {
            request: id,
            executable: program.id,
        });
        let answer = program.placement.first().call(id, op).await;
        Ok(Outcome::Later(Box::pin(async move {
            use loaded_executable_cost_analysis_response::Result as Cost;
            let result = match answer.wait().await {
                Ok(reply::Reply::Answer(answer)) => Cost::Attributes(attributes(answer.numbers)),
                Ok(_) => return Err(unexpected("CostAnalysis")),
                // In the body: of a failed reply, jaxlib would say "Bad StatusOr access" and not what failed.
                Err(status) => Cost::Status(status::with_user_context(status, context.id())),
            };
            Ok(Response::LoadedExecutableCostAnalysisResponse(
                LoadedExecutableCostAnalysisResponse {
                    result: Some(result),
                },
            ))
        })))
    }

    pub(super) async fn program_text(
        &mut self,
        request: &LoadedExecutableHumanReadableProgramTextRequest,
    ) -> Handled {
        let program = self.xla_program(request.loaded_executable_handle, "program text")?;
        let id = self.shared.ids.next();
        let op = op::Op::ProgramText(ProgramText {
            request: id,
            executable: program.id,
        });
        let answer = program.placement.first().call(id, op).await;
        Ok(Outcome::Later(Box::pin(async move {
            let reply::Reply::Answer(answer) = answer.wait().await? else {
                return Err(unexpected("ProgramText"));
            };
            use loaded_executable_human_readable_program_text_response::Result as Text;
            Ok(Response::LoadedExecutableHumanReadableProgramTextResponse(
                LoadedExecutableHumanReadableProgramTextResponse {
                    result: Some(Text::HumanReadableProgramText(answer.text)),
                },
            ))
        })))
    }

    pub(super) fn delete_program(&mut self, request: &LoadedExecutableDeleteRequest) -> Handled {
        if let Program::Xla(program) = self.program(request.loaded_executable_handle)? {
            program.deleted.store(true, Relaxed);
        }
        let future_handle = self.ready_future();
        Ok(Outcome::Now(Response::LoadedExecutableDeleteResponse(
            LoadedExecutableDeleteResponse { future_handle },
        )))
    }

    pub(super) fn is_program_deleted(&self, request: &LoadedExecutableIsDeletedRequest) -> Handled {
        let is_deleted = match self.program(request.loaded_executable_handle)? {
            Program::Xla(program) => program.deleted.load(Relaxed),
            Program::Plugin(_) | Program::Recorded => false,
        };
        Ok(Outcome::Now(Response::LoadedExecutableIsDeletedResponse(
            LoadedExecutableIsDeletedResponse { is_deleted },
        )))
    }

    pub(super) fn destruct_program(
        &mut self,
        request: &LoadedExecutableDestructRequest,
    ) -> Handled {
        let handle = request.loaded_executable_handle;
        lock(&self.tables.programs).remove(&handle).ok_or_else(|| {
            status::invalid_argument(format!("unknown executable handle {handle}"))
        })?;
        Ok(Outcome::Now(Response::LoadedExecutableDestructResponse(
            LoadedExecutableDestructResponse {},
        )))
    }
}

fn attributes(numbers: HashMap<String, f64>) -> AttributeMapProto {
    use attribute_map_proto::value::Value;
    let attributes = numbers
        .into_iter()
        .map(|(name, number)| {
            // The message has no double.
            let value = Some(Value::FloatValue(number as f32));
            (name, attribute_map_proto::Value { value })
        })
        .collect();
    AttributeMapProto {
        version_number: 0,
        attributes,
    }
}

pub(super) fn result_spec(
    value: &executable_info::Value,
    devices: &[i32],
) -> Result<ResultSpec, Status> {
    let dtype = PrimitiveType::try_from(value.dtype).map_err(|_| {
        status::unavailable(format!(
            "the worker named an unknown element type {}",
            value.dtype
        ))
    })?;
    Ok(ResultSpec {
        dtype,
        dims: value.dims.clone(),
        sharding: Sharding {
            devices: devices.to_vec(),
            memory_kind: Some(value.memory_kind.clone()).filter(|kind| !kind.is_empty()),
            tiling: Tiling::Op(Box::new(value.sharding.clone().unwrap_or_default())),
        },
    })
}

// `mpmd_addressable_devices_oneof` stays unset in both answers: whatever is put there makes jaxlib take the program for an
// MPMD one and ask for metadata that it does not have.
fn compile_response(handle: u64, ready: u64, program: &XlaProgram) -> CompileResponse {
    CompileResponse {
        loaded_executable_handle: handle,
        name: program.info.name.clone(),
        num_devices: i32::try_from(program.placement.devices.len()).unwrap_or(i32::MAX),
        device_ids: program.placement.devices.clone(),
        // As many as each argument has shards, or the client refuses to execute.
        addressable_device_ids: program.placement.devices.clone(),
        fingerprint: Some(compile_response::Fingerprint::FingerprintValue(
            program.info.fingerprint.clone(),
        )),
        ready_future_handle: Some(ready),
        ..Default::default()
    }
}

/// The answer to the compile of what is no compiled program.
pub(super) fn plain_compile_response(
    handle: u64,
    ready: u64,
    name: String,
    devices: &[i32],
) -> CompileResponse {
    CompileResponse {
        loaded_executable_handle: handle,
        name,
        num_devices: i32::try_from(devices.len()).unwrap_or(i32::MAX),
        device_ids: devices.to_vec(),
        addressable_device_ids: devices.to_vec(),
        ready_future_handle: Some(ready),
        ..Default::default()
    }
}

fn describe(info: &ExecutableInfo) -> LoadedExecutableMetadataResponse {
    let shardings = |values: &[executable_info::Value]| -> Vec<OpSharding> {
        values
            .iter()
            .map(|v| v.sharding.clone().unwrap_or_default())
            .collect()
    };
    let layouts = |values: &[executable_info::Value]| -> Vec<LayoutProto> {
        values
            .iter()
            .map(|v| v.layout.clone().unwrap_or_default())
            .collect()
    };
    let missing = || status::unimplemented("the plugin gives no compiled memory statistics");
    LoadedExecutableMetadataResponse {
        parameter_shardings: Some(metadata::ShardingList {
            shardings: shardings(&info.parameters),
        }),
        output_shardings: Some(metadata::ShardingList {
            shardings: shardings(&info.results),
        }),
        parameter_layouts: Some(metadata::ParameterLayouts::ParameterLayoutsList(
            metadata::LayoutList {
                layouts: layouts(&info.parameters),
            },
        )),
        output_layouts: Some(metadata::OutputLayouts::OutputLayoutsList(
            metadata::LayoutList {
                layouts: layouts(&info.results),
            },
        )),
        output_memory_kinds: Some(metadata::OutputMemoryKind {
            status: Some(StatusProto::default()),
            memory_kind_lists: vec![metadata::MemoryKindList {
                memory_kinds: info.results.iter().map(|v| v.memory_kind.clone()).collect(),
            }],
        }),
        donated_input_indices_oneof: Some(metadata::DonatedInputIndicesOneof::DonatedInputIndices(
            metadata::DonatedInputIndices {
                donated_input_indices: info.donated_parameters.clone(),
            },
        )),
        compiled_memory_stats_oneof: Some(match &info.memory_stats {
            Some(stats) => metadata::CompiledMemoryStatsOneof::CompiledMemoryStats(stats.clone()),
            None => metadata::CompiledMemoryStatsOneof::CompiledMemoryStatsError(missing()),
        }),
        mpmd_compiled_memory_stats_oneof: None,
        size_of_generated_code_in_bytes: info.generated_code_bytes,
    }
}

/// What is asked of every executable, where there is nothing to say and why.
fn describe_nothing(why: Status) -> LoadedExecutableMetadataResponse {
    let none = || why.clone();
    LoadedExecutableMetadataResponse {
        parameter_layouts: Some(metadata::ParameterLayouts::ParameterLayoutsError(none())),
        output_layouts: Some(metadata::OutputLayouts::OutputLayoutsError(none())),
        output_memory_kinds: Some(metadata::OutputMemoryKind {
            status: Some(none()),
            memory_kind_lists: Vec::new(),
        }),
        donated_input_indices_oneof: Some(
            metadata::DonatedInputIndicesOneof::DonatedInputIndicesError(none()),
        ),
        compiled_memory_stats_oneof: Some(
            metadata::CompiledMemoryStatsOneof::CompiledMemoryStatsError(none()),
        ),
        ..Default::default()
    }
}
