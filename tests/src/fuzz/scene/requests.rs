//! A good request of every kind.

use waystation_client::{Error, Request, request};
use waystation_proto::{
    tensorflow::StatusProto,
    xla::{
        OpSharding,
        ifrt::{
            ArraySpecProto, DTypeProto,
            d_type_proto::Kind,
            proto::{ArrayCopySemantics, ByteStrides},
            proxy::{
                AssembleArrayFromSingleDeviceArraysRequest, BitcastArraysRequest,
                CheckFutureRequest, CheckValueReadyRequest, CopyArraysRequest,
                CopyToHostBufferRequest, DeleteArrayRequest, DestructArrayRequest,
                DisassembleIntoSingleDeviceArraysRequest, FullyReplicatedShardRequest,
                GetDefaultDeviceAssignmentRequest, GetDefaultLayoutRequest, InitRequest,
                IsArrayDeletedRequest, LoadedExecutableCostAnalysisRequest,
                LoadedExecutableDeleteRequest, LoadedExecutableDestructRequest,
                LoadedExecutableFetchExecuteResultRequest,
                LoadedExecutableHumanReadableProgramTextRequest, LoadedExecutableIsDeletedRequest,
                LoadedExecutableMetadataRequest, LoadedExecutableMpmdCostAnalysisRequest,
                LoadedExecutableMpmdMetadataRequest, LoadedHostCallbackPollRequest,
                LoadedHostCallbackReturnRequest, MakeErrorArraysRequest, RemapArraysRequest,
                ReshardArraysRequest, loaded_host_callback_return_request,
            },
        },
    },
};

use super::{
    COMPILE, Scene, UNKNOWN,
    parts::{REUSE, cut, f32_type, row_major, shape, spec},
};
use crate::fuzz::{random::Random, witness::DOUBLE};

impl Scene {
    /// A good request of kind `kind` (0 to [`super::KINDS`]), after what it needs.
    ///
    /// # Errors
    /// When the session has lost what the request needs.
    #[allow(
        clippy::too_many_lines,
        reason = "one arm for each request of the protocol"
    )]
    pub async fn request(&mut self, kind: usize, random: &mut Random) -> Result<Request, Error> {
        Ok(match kind {
            0 => Request::InitRequest(InitRequest {}),
            1 => Request::CheckFutureRequest(CheckFutureRequest {
                future_handle: self.future().await?,
            }),
            2 => Request::CheckValueReadyRequest(CheckValueReadyRequest {
                value_handles: vec![self.one, self.halves, self.words],
            }),
            3 => {
                let handle = self.handle();
                if random.one_in(3) {
                    return self.make_words(handle).await;
                }
                let strides = random.one_in(2).then(|| vec![4]);
                let mut request = self.make_array(handle, strides).await?;
                if let Request::MakeArrayFromHostBufferRequest(make) = &mut request
                    && random.one_in(2)
                {
                    make.layout = Some(row_major());
                }
                request
            }
            4 => self.make_arrays().await?,
            5 => Request::MakeErrorArraysRequest(MakeErrorArraysRequest {
                error: Some(StatusProto {
                    code: 8,
                    message: "made".to_owned(),
                    ..Default::default()
                }),
                array_specs: vec![spec(&[4], &self.devices[..1], OpSharding::default())],
                array_handles: vec![self.handle()],
            }),
            6 => {
                let parts = [self.handle(), self.handle()];
                let (array, dim, dtype) = if random.one_in(3) {
                    (self.words, 4, request::string_type())
                } else {
                    (self.halves, 8, f32_type())
                };
                let apart = DisassembleIntoSingleDeviceArraysRequest {
                    array_handle: array,
                    copy_semantics: REUSE,
                    result_handles: parts.to_vec(),
                    ..Default::default()
                };
                self.client
                    .call(Request::DisassembleIntoSingleDeviceArraysRequest(apart))
                    .await?;
                Request::AssembleArrayFromSingleDeviceArraysRequest(
                    AssembleArrayFromSingleDeviceArraysRequest {
                        shape: shape(&[dim]),
                        sharding: Some(request::sharding(&self.devices, cut())),
                        single_device_array_handles: parts.to_vec(),
                        copy_semantics: REUSE,
                        result_handle: self.handle(),
                        dtype,
                        ..Default::default()
                    },
                )
            }
            7 => Request::RemapArraysRequest(RemapArraysRequest {
                plan: Some(self.remap_plan(random)),
                array_handles: vec![self.halves],
                copy_semantics: REUSE,
                result_handles: vec![self.handle()],
            }),
            8 => Request::BitcastArraysRequest(BitcastArraysRequest {
                array_handles: vec![self.one],
                array_specs: vec![ArraySpecProto {
                    dtype: Some(DTypeProto {
                        version_number: 0,
                        kind: Kind::S32 as i32,
                    }),
                    ..spec(&[4], &self.devices[..1], OpSharding::default())
                }],
                copy_semantics: REUSE,
                result_handles: vec![self.handle()],
            }),
            9 => {
                let array = self.pick(self.halves, random);
                let mut to = spec(&[8], &self.devices, OpSharding::default());
                if array == self.words {
                    (to.shape, to.dtype) = (shape(&[2]), request::string_type());
                }
                Request::ReshardArraysRequest(ReshardArraysRequest {
                    array_handles: vec![array],
                    array_specs: vec![to],
                    copy_semantics: ArrayCopySemantics::AlwaysCopy as i32,
                    result_handles: vec![self.handle()],
                })
            }
            10 => Request::CopyToHostBufferRequest(CopyToHostBufferRequest {
                array_handle: self.pick(self.one, random),
                byte_strides: random.one_in(2).then(|| ByteStrides { strides: vec![4] }),
                host_buffer_handle: self.handle(),
            }),
            11 => Request::DisassembleIntoSingleDeviceArraysRequest(
                DisassembleIntoSingleDeviceArraysRequest {
                    array_handle: self.pick(self.halves, random),
                    copy_semantics: REUSE,
                    result_handles: vec![self.handle(), self.handle()],
                    ..Default::default()
                },
            ),
            12 => Request::DeleteArrayRequest(DeleteArrayRequest {
                array_handle: vec![self.spare().await?],
            }),
            13 => Request::CopyArraysRequest(CopyArraysRequest {
                array_handles: vec![self.pick(self.halves, random)],
                device_ids: vec![self.devices[1], self.devices[0]],
                memory_kind: random.one_in(2).then(String::new),
                copy_semantics: ArrayCopySemantics::AlwaysCopy as i32,
                result_handles: vec![self.handle()],
            }),
            14 => Request::FullyReplicatedShardRequest(FullyReplicatedShardRequest {
                array_handle: self.pick(self.one, random),
                copy_semantics: REUSE,
                result_handle: self.handle(),
            }),
            15 => Request::IsArrayDeletedRequest(IsArrayDeletedRequest {
                array_handle: self.pick(self.one, random),
            }),
            16 => Request::DestructArrayRequest(DestructArrayRequest {
                array_handle: vec![self.spare().await?, self.spare().await?],
            }),
            COMPILE => self.compile_request(random),
            18 => Request::LoadedExecutableMetadataRequest(LoadedExecutableMetadataRequest {
                loaded_executable_handle: self.wide,
            }),
            19 => self.execute(random).await,
            20 => Request::LoadedExecutableFetchExecuteResultRequest(
                LoadedExecutableFetchExecuteResultRequest {
                    result_status_handle: self.status().await?,
                },
            ),
            21 => {
                Request::LoadedExecutableCostAnalysisRequest(LoadedExecutableCostAnalysisRequest {
                    loaded_executable_handle: self.program,
                })
            }
            22 => Request::LoadedExecutableHumanReadableProgramTextRequest(
                LoadedExecutableHumanReadableProgramTextRequest {
                    loaded_executable_handle: self.program,
                },
            ),
            23 => {
                let devices = self.devices;
                Request::LoadedExecutableDeleteRequest(LoadedExecutableDeleteRequest {
                    loaded_executable_handle: self.compile(DOUBLE, &devices[..1]).await?,
                })
            }
            24 => Request::LoadedExecutableIsDeletedRequest(LoadedExecutableIsDeletedRequest {
                loaded_executable_handle: self.program,
            }),
            25 => {
                let devices = self.devices;
                Request::LoadedExecutableDestructRequest(LoadedExecutableDestructRequest {
                    loaded_executable_handle: self.compile(DOUBLE, &devices[..1]).await?,
                    delete_options: None,
                })
            }
            26 => {
                Request::LoadedExecutableMpmdMetadataRequest(LoadedExecutableMpmdMetadataRequest {
                    mpmd_loaded_executable_handle: self.program,
                })
            }
            27 => Request::LoadedExecutableMpmdCostAnalysisRequest(
                LoadedExecutableMpmdCostAnalysisRequest {
                    loaded_executable_handle: self.program,
                },
            ),
            28 => Request::LoadedHostCallbackPollRequest(LoadedHostCallbackPollRequest {
                loaded_host_callback_handle: UNKNOWN,
                operand_host_buffer_handle: self.handle(),
            }),
            29 => Request::LoadedHostCallbackReturnRequest(LoadedHostCallbackReturnRequest {
                host_callback_execution_handle: UNKNOWN,
                result: Some(
                    loaded_host_callback_return_request::Result::ResultHostBufferHandle(UNKNOWN),
                ),
            }),
            30 => Request::GetDefaultDeviceAssignmentRequest(GetDefaultDeviceAssignmentRequest {
                num_replicas: 1,
                num_partitions: 2,
            }),
            _ => Request::GetDefaultLayoutRequest(GetDefaultLayoutRequest {
                dtype: f32_type(),
                dims: vec![4, 8],
                device_id: self.devices[0],
                memory_kind: String::new(),
            }),
        })
    }
}
