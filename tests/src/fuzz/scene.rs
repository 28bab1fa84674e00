//! A session with something of everything in it, and a good request of every kind.

mod parts;

use waystation_client::{Client, Error, Request, Response, request};
use waystation_proto::{
    tensorflow::StatusProto,
    xla::{
        OpSharding,
        ifrt::{
            ArraySpecProto, DTypeProto, RemapPlanProto,
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
                LoadedHostCallbackReturnRequest, MakeArrayFromHostBufferRequest,
                MakeArraysFromHostBufferShardsRequest, MakeErrorArraysRequest, RemapArraysRequest,
                ReshardArraysRequest, loaded_host_callback_return_request,
                make_arrays_from_host_buffer_shards_request::{
                    HostBuffer, MakeArraysFromHostBufferShardsSpec, ShardIndices,
                },
            },
            remap_plan_proto::{InputDevices, InputDevicesForOutput, MappingProto},
        },
    },
};

pub use self::parts::name;
use self::parts::{
    DONATED, REUSE, STEP, WIDE, cut, f32_type, floats, list, plugin_program, row_major, shape, spec,
};
use super::{mutate::Pool, random::Random, wire::Field, witness::DOUBLE};

/// Kinds of requests there are.
pub const KINDS: usize = 32;
/// The number of CompileRequest among them.
pub const COMPILE: usize = 17;
/// Handles and fields remembered for later requests.
const REMEMBERED: usize = 256;
/// A handle that nobody minted.
const UNKNOWN: u64 = 0x7fff_0000;

/// See the module.
#[derive(Debug)]
pub struct Scene {
    /// The session.
    pub client: Client,
    /// What changed requests are made of.
    pub pool: Pool,
    /// Two devices of one worker.
    devices: [i32; 2],
    /// f32[4] on the first device.
    one: u64,
    /// f32[8], half on each device.
    halves: u64,
    /// Takes `one`.
    program: u64,
    /// Takes `halves`.
    wide: u64,
}

impl Scene {
    /// Opens a session and makes its arrays and programs.
    ///
    /// # Errors
    /// When the server refuses any of it.
    pub async fn open(address: &str) -> Result<Self, Error> {
        let client = Client::connect(address).await?;
        let ids = &client.init().primary_device_ids;
        let devices = match ids.as_slice() {
            [first, second, ..] => [*first, *second],
            [only] => [*only, *only],
            [] => return Err(Error::WrongReply),
        };
        let mut scene = Self {
            client,
            pool: Pool::default(),
            devices,
            one: 0,
            halves: 0,
            program: 0,
            wide: 0,
        };
        scene.program = scene.compile(DOUBLE, &devices[..1]).await?;
        scene.wide = scene.compile(WIDE, &devices).await?;
        scene.one = scene.handle();
        let put = scene.make_array(scene.one, None).await?;
        scene.client.call(put).await?;
        let put = scene.make_arrays().await?;
        match scene.client.call(put).await? {
            Response::MakeArraysFromHostBufferShardsResponse(made) => {
                scene.halves = made.array_handles.first().copied().unwrap_or(0);
            }
            _ => return Err(Error::WrongReply),
        }
        scene.pool.handles.push(scene.wide);
        Ok(scene)
    }

    /// A new handle; later requests may be given it by mistake.
    fn handle(&mut self) -> u64 {
        let handle = self.client.handle();
        if self.pool.handles.len() >= REMEMBERED {
            self.pool.handles.remove(0);
        }
        self.pool.handles.push(handle);
        handle
    }

    /// Keeps some fields of a request, for later requests to be given by mistake.
    pub fn remember(&mut self, fields: &[Field], random: &mut Random) {
        for field in fields.iter().filter(|field| field.number != 1) {
            if let super::wire::Value::Message(inner) = &field.value
                && !inner.is_empty()
                && field.number != 13
            {
                if self.pool.fields.len() >= REMEMBERED {
                    let place = random.below(REMEMBERED);
                    self.pool.fields.remove(place);
                }
                self.pool.fields.push(random.pick(inner).clone());
            }
        }
    }

    /// A request that is answered at once, whatever the session has been through.
    pub fn fence(&self) -> Request {
        Request::IsArrayDeletedRequest(IsArrayDeletedRequest {
            array_handle: UNKNOWN,
        })
    }

    async fn compile(&mut self, program: &[u8], devices: &[i32]) -> Result<u64, Error> {
        match self.client.call(request::compile(program, devices)).await? {
            Response::CompileResponse(compiled) => {
                self.pool.handles.push(compiled.loaded_executable_handle);
                Ok(compiled.loaded_executable_handle)
            }
            _ => Err(Error::WrongReply),
        }
    }

    /// An array of its own that shares the bytes of `one`.
    async fn spare(&mut self) -> Result<u64, Error> {
        let result_handle = self.handle();
        self.client
            .call(Request::FullyReplicatedShardRequest(
                FullyReplicatedShardRequest {
                    array_handle: self.one,
                    copy_semantics: REUSE,
                    result_handle,
                },
            ))
            .await?;
        Ok(result_handle)
    }

    async fn make_array(
        &mut self,
        handle: u64,
        strides: Option<Vec<i64>>,
    ) -> Result<Request, Error> {
        self.client.store(handle, floats(4)).await?;
        Ok(Request::MakeArrayFromHostBufferRequest(
            MakeArrayFromHostBufferRequest {
                dtype: f32_type(),
                shape: shape(&[4]),
                sharding: Some(request::sharding(&self.devices[..1], OpSharding::default())),
                layout: None,
                host_buffer_handle: handle,
                byte_strides: strides.map(|strides| ByteStrides { strides }),
                array_handle: Some(handle),
            },
        ))
    }

    async fn make_arrays(&mut self) -> Result<Request, Error> {
        let buffers = [self.handle(), self.handle()];
        for handle in buffers {
            self.client.store(handle, floats(4)).await?;
        }
        let spec = MakeArraysFromHostBufferShardsSpec {
            addressable_shard_indices: (0..2).map(|i| ShardIndices { indices: vec![i] }).collect(),
            host_buffers: buffers
                .iter()
                .map(|&host_buffer_handle| HostBuffer {
                    dtype: f32_type(),
                    shape: shape(&[4]),
                    host_buffer_handle,
                    byte_strides: Some(ByteStrides { strides: vec![4] }),
                })
                .collect(),
            array_spec: Some(spec(&[8], &self.devices, cut())),
        };
        Ok(Request::MakeArraysFromHostBufferShardsRequest(
            MakeArraysFromHostBufferShardsRequest {
                specs: vec![spec],
                array_handles: vec![buffers[0]],
            },
        ))
    }

    async fn future(&mut self) -> Result<u64, Error> {
        let array_handle = vec![self.spare().await?];
        let delete = Request::DeleteArrayRequest(DeleteArrayRequest { array_handle });
        match self.client.call(delete).await? {
            Response::DeleteArrayResponse(deleted) => {
                self.pool.handles.push(deleted.deletion_future_handle);
                Ok(deleted.deletion_future_handle)
            }
            _ => Err(Error::WrongReply),
        }
    }

    fn remap_plan(&self, random: &mut Random) -> RemapPlanProto {
        let mut plan = RemapPlanProto {
            version_number: 0,
            input_specs: vec![spec(&[8], &self.devices, cut())],
            output_specs: vec![spec(&[8], &self.devices, cut())],
            ..Default::default()
        };
        if random.one_in(2) {
            plan.mappings = vec![MappingProto {
                in_array: 0,
                out_array: 0,
                from_start: vec![0],
                from_end: vec![2],
                from_step: vec![1],
                to_start: vec![0],
                to_end: vec![2],
                to_step: vec![1],
            }];
        } else {
            plan.input_devices_for_output = vec![InputDevicesForOutput {
                out_array: 0,
                input_devices: vec![InputDevices {
                    in_array: 0,
                    device_list: list(&self.devices),
                }],
            }];
        }
        plan
    }

    async fn execute(&mut self, random: &mut Random) -> Request {
        let (program, array) = if random.one_in(2) {
            (self.program, self.one)
        } else {
            (self.wide, self.halves)
        };
        let results = if random.one_in(2) {
            vec![self.handle()]
        } else {
            Vec::new()
        };
        request::execute(program, &[array], &results, 1)
    }

    /// An execution's status.
    async fn status(&mut self) -> Result<u64, Error> {
        let result_status_handle = self.handle();
        let result = self.handle();
        let Request::LoadedExecutableExecuteRequest(mut execute) =
            request::execute(self.program, &[self.one], &[result], 1)
        else {
            return Err(Error::WrongReply);
        };
        execute.result_status_handle = result_status_handle;
        if let Some(options) = &mut execute.execute_options {
            options.fill_status = true;
        }
        self.client
            .call(Request::LoadedExecutableExecuteRequest(execute))
            .await?;
        Ok(result_status_handle)
    }

    fn compile_request(&self, random: &mut Random) -> Request {
        match random.below(8) {
            0 => plugin_program(),
            1 | 2 => request::compile(WIDE, &self.devices),
            3 => request::compile(STEP, &self.devices[..1]),
            4 => request::compile(DONATED, &self.devices[..1]),
            _ => request::compile(DOUBLE, &self.devices[..1]),
        }
    }

    /// A good request of kind `kind` (0 to [`KINDS`]), after what it needs.
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
                value_handles: vec![self.one, self.halves],
            }),
            3 => {
                let handle = self.handle();
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
                let apart = DisassembleIntoSingleDeviceArraysRequest {
                    array_handle: self.halves,
                    copy_semantics: REUSE,
                    result_handles: parts.to_vec(),
                    ..Default::default()
                };
                self.client
                    .call(Request::DisassembleIntoSingleDeviceArraysRequest(apart))
                    .await?;
                Request::AssembleArrayFromSingleDeviceArraysRequest(
                    AssembleArrayFromSingleDeviceArraysRequest {
                        shape: shape(&[8]),
                        sharding: Some(request::sharding(&self.devices, cut())),
                        single_device_array_handles: parts.to_vec(),
                        copy_semantics: REUSE,
                        result_handle: self.handle(),
                        dtype: f32_type(),
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
            9 => Request::ReshardArraysRequest(ReshardArraysRequest {
                array_handles: vec![self.halves],
                array_specs: vec![spec(&[8], &self.devices, OpSharding::default())],
                copy_semantics: ArrayCopySemantics::AlwaysCopy as i32,
                result_handles: vec![self.handle()],
            }),
            10 => Request::CopyToHostBufferRequest(CopyToHostBufferRequest {
                array_handle: self.one,
                byte_strides: random.one_in(2).then(|| ByteStrides { strides: vec![4] }),
                host_buffer_handle: self.handle(),
            }),
            11 => Request::DisassembleIntoSingleDeviceArraysRequest(
                DisassembleIntoSingleDeviceArraysRequest {
                    array_handle: self.halves,
                    copy_semantics: REUSE,
                    result_handles: vec![self.handle(), self.handle()],
                    ..Default::default()
                },
            ),
            12 => Request::DeleteArrayRequest(DeleteArrayRequest {
                array_handle: vec![self.spare().await?],
            }),
            13 => Request::CopyArraysRequest(CopyArraysRequest {
                array_handles: vec![self.halves],
                device_ids: vec![self.devices[1], self.devices[0]],
                memory_kind: random.one_in(2).then(String::new),
                copy_semantics: ArrayCopySemantics::AlwaysCopy as i32,
                result_handles: vec![self.handle()],
            }),
            14 => Request::FullyReplicatedShardRequest(FullyReplicatedShardRequest {
                array_handle: self.one,
                copy_semantics: REUSE,
                result_handle: self.handle(),
            }),
            15 => Request::IsArrayDeletedRequest(IsArrayDeletedRequest {
                array_handle: self.one,
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

    async fn fetch(&mut self) -> Result<(), Error> {
        let buffer = self.handle();
        self.client
            .call(request::copy_to_host(self.one, buffer))
            .await?;
        self.client.lookup(buffer).await.map(drop)
    }

    /// A call outside the stream, good or bad; gives its name and code.
    pub async fn data_call(&mut self, random: &mut Random) -> (&'static str, i32) {
        let handle = match random.below(3) {
            0 => self.handle(),
            1 => UNKNOWN,
            _ => *random.pick(&self.pool.handles),
        };
        let (call, result) = match random.below(5) {
            4 => ("CopyToHostBuffer and HostBufferLookup", self.fetch().await),
            0 => (
                "HostBufferStore",
                self.client.store(handle, floats(4)).await,
            ),
            1 => {
                let size = *random.pick(&[-1, 0, 15, 17, i64::MAX, 1 << 40]);
                (
                    "HostBufferStore, wrong size",
                    self.client.store_as(handle, size, floats(4)).await,
                )
            }
            2 => (
                "HostBufferLookup",
                self.client.lookup(handle).await.map(drop),
            ),
            _ => ("HostBufferDelete", self.client.delete(handle).await),
        };
        (call, result.err().map_or(0, |e| e.code().unwrap_or(-1)))
    }
}
