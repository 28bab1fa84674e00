//! Programs that are never compiled: their results are known by the program's own signature.

use std::sync::Arc;

use prost::Message;
use waystation_proto::{
    tensorflow::StatusProto,
    xla::{
        LayoutProto, OpSharding,
        ifrt::{
            DTypeProto, ShapeProto,
            d_type_proto::Kind,
            proxy::{
                CompileRequest, CompileResponse, LoadedExecutableMetadataResponse,
                compile_response, loaded_executable_execute_response::Output,
                loaded_executable_metadata_response as metadata,
            },
        },
    },
};
use waystation_stablehlo::{
    compile_options, main_signature,
    signature::{ElementType, Value, ValueType},
};

use super::session::{Spec, failed, unimplemented};

/// What is remembered of a program.
#[derive(Debug)]
pub(super) struct Program {
    name: String,
    devices: Vec<i32>,
    donated: Vec<u32>,
    pub(super) results: Vec<Arc<Spec>>,
}

/// The options with their one message unopened (a message and bytes look alike on the wire).
#[derive(Clone, PartialEq, Message)]
struct RawXlaCompileOptions {
    #[prost(bytes = "bytes", tag = "1")]
    compile_options: bytes::Bytes,
}

impl Program {
    /// Reads a program's signature and devices.
    pub(super) fn read(request: CompileRequest) -> Result<Self, StatusProto> {
        let options =
            RawXlaCompileOptions::decode(request.compile_options.unwrap_or_default().data)
                .map_err(|e| failed(&e))?;
        let devices = compile_options::device_assignment(&options.compile_options)
            .map_err(|e| failed(&e))?
            .device_ids;
        let signature =
            main_signature(&request.program.unwrap_or_default().data).map_err(|e| failed(&e))?;
        let donated = signature
            .parameters
            .iter()
            .zip(0..)
            .filter(|(parameter, _)| parameter.is_donated())
            .map(|(_, index)| index)
            .collect();
        let results = signature
            .results
            .iter()
            .map(|value| spec(value, &devices).map(Arc::new))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            name: signature.module_name,
            devices,
            donated,
            results,
        })
    }

    /// The reply to Compile.
    pub(super) fn compiled(&self, handle: u64, ready: u64) -> CompileResponse {
        CompileResponse {
            loaded_executable_handle: handle,
            name: self.name.clone(),
            num_devices: i32::try_from(self.devices.len()).unwrap_or(i32::MAX),
            device_ids: self.devices.clone(),
            addressable_device_ids: self.devices.clone(),
            fingerprint: Some(compile_response::Fingerprint::FingerprintValue(
                self.name.clone().into_bytes(),
            )),
            ready_future_handle: Some(ready),
            ..Default::default()
        }
    }

    /// The reply to LoadedExecutableMetadata.
    pub(super) fn metadata(&self) -> LoadedExecutableMetadataResponse {
        let row_major = |spec: &Arc<Spec>| LayoutProto {
            minor_to_major: (0_i64..)
                .take(spec.dims.len())
                .collect::<Vec<_>>()
                .into_iter()
                .rev()
                .collect(),
            ..Default::default()
        };
        LoadedExecutableMetadataResponse {
            output_shardings: Some(metadata::ShardingList {
                shardings: vec![OpSharding::default(); self.results.len()],
            }),
            parameter_layouts: Some(metadata::ParameterLayouts::ParameterLayoutsError(
                unimplemented("parameter layouts"),
            )),
            output_layouts: Some(metadata::OutputLayouts::OutputLayoutsList(
                metadata::LayoutList {
                    layouts: self.results.iter().map(row_major).collect(),
                },
            )),
            output_memory_kinds: Some(metadata::OutputMemoryKind {
                status: Some(StatusProto::default()),
                memory_kind_lists: vec![metadata::MemoryKindList {
                    memory_kinds: vec!["device".to_owned(); self.results.len()],
                }],
            }),
            donated_input_indices_oneof: Some(
                metadata::DonatedInputIndicesOneof::DonatedInputIndices(
                    metadata::DonatedInputIndices {
                        donated_input_indices: self.donated.clone(),
                    },
                ),
            ),
            compiled_memory_stats_oneof: Some(
                metadata::CompiledMemoryStatsOneof::CompiledMemoryStatsError(unimplemented(
                    "memory statistics",
                )),
            ),
            ..Default::default()
        }
    }
}

/// A result as the first execution's reply describes it.
pub(super) fn output(spec: &Spec, handle: u64) -> Output {
    Output {
        dtype: Some(DTypeProto {
            version_number: 0,
            kind: spec.kind as i32,
        }),
        shape: Some(ShapeProto {
            version_number: 0,
            dims: spec.dims.clone(),
        }),
        sharding: Some(spec.sharding_proto()),
        array_handle: handle,
    }
}

fn spec(value: &Value, devices: &[i32]) -> Result<Spec, StatusProto> {
    let ValueType::Tensor(tensor) = &value.ty else {
        return Err(unimplemented("a result that is no array"));
    };
    let dims = tensor
        .dims
        .iter()
        .map(|dim| dim.and_then(|dim| i64::try_from(dim).ok()))
        .collect::<Option<_>>()
        .ok_or_else(|| unimplemented("a result without a fixed shape"))?;
    Ok(Spec {
        kind: kind(tensor.element)?,
        dims,
        sharding: OpSharding::default(),
        devices: devices.to_vec(),
    })
}

fn kind(element: ElementType) -> Result<Kind, StatusProto> {
    Ok(match element {
        ElementType::Bool => Kind::Pred,
        ElementType::Si8 => Kind::S8,
        ElementType::Si16 => Kind::S16,
        ElementType::Si32 => Kind::S32,
        ElementType::Si64 => Kind::S64,
        ElementType::Ui8 => Kind::U8,
        ElementType::Ui16 => Kind::U16,
        ElementType::Ui32 => Kind::U32,
        ElementType::Ui64 => Kind::U64,
        ElementType::BF16 => Kind::Bf16,
        ElementType::F16 => Kind::F16,
        ElementType::F32 => Kind::F32,
        ElementType::F64 => Kind::F64,
        other => return Err(unimplemented(&format!("element type {other:?}"))),
    })
}
