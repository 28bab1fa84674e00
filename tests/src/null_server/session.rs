//! One client's session: tables of handles and immediate answers.

use std::{collections::HashMap, sync::Arc};

use bytes::Bytes;
use futures::StreamExt as _;
use prost::Message as _;
use tokio::sync::mpsc;
use waystation_checkpoint::Sharding;
use waystation_proto::{
    tensorflow::StatusProto,
    xla::{
        OpSharding,
        ifrt::{
            AttributeMapProto, DTypeProto, DeviceListProto, HloShardingProto, Serialized,
            ShapeProto, ShardingProto, SingleDeviceShardingProto, attribute_map_proto,
            d_type_proto::Kind,
            proxy::{
                AssembleArrayFromSingleDeviceArraysResponse, CheckFutureResponse,
                CheckValueReadyResponse, CopyArraysRequest, CopyArraysResponse,
                CopyToHostBufferRequest, CopyToHostBufferResponse, DeleteArrayResponse,
                DestructArrayResponse, DisassembleIntoSingleDeviceArraysRequest,
                DisassembleIntoSingleDeviceArraysResponse, FullyReplicatedShardRequest,
                FullyReplicatedShardResponse, GetDefaultLayoutResponse, IfrtRequest, IfrtResponse,
                InitResponse, IsArrayDeletedResponse, LoadedExecutableDestructResponse,
                LoadedExecutableExecuteRequest, LoadedExecutableExecuteResponse,
                LoadedExecutableFetchExecuteResultResponse, MakeArrayFromHostBufferRequest,
                MakeArrayFromHostBufferResponse, MakeArraysFromHostBufferShardsRequest,
                MakeArraysFromHostBufferShardsResponse, ResponseMetadata, ifrt_request::Request,
                ifrt_response::Response, init_response,
            },
        },
    },
};

use super::{
    program::{self, Program},
    store::{self, Buffers, Stored},
};

/// The lowest handle that a server may mint.
const FIRST_SERVER_HANDLE: u64 = 1 << 48;
const HLO_SHARDING: &str = "xla::ifrt::HloSharding";
const SINGLE_DEVICE_SHARDING: &str = "xla::ifrt::SingleDeviceSharding";
/// `absl::StatusCode`s.
const INVALID_ARGUMENT: i32 = 3;
const UNIMPLEMENTED: i32 = 12;

/// A request that went wrong.
pub(super) fn failed(error: &dyn std::fmt::Display) -> StatusProto {
    StatusProto {
        code: INVALID_ARGUMENT,
        message: error.to_string(),
        ..Default::default()
    }
}

/// Something that the bench does not ask for.
pub(super) fn unimplemented(what: &str) -> StatusProto {
    StatusProto {
        code: UNIMPLEMENTED,
        message: format!("the null server does not serve {what}"),
        ..Default::default()
    }
}

/// What an array is.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    pub(super) kind: Kind,
    pub(super) dims: Vec<i64>,
    pub(super) sharding: OpSharding,
    pub(super) devices: Vec<i32>,
}

impl Spec {
    fn read(
        dtype: Option<&DTypeProto>,
        shape: Option<ShapeProto>,
        sharding: Option<ShardingProto>,
    ) -> Result<Self, StatusProto> {
        let serialized = sharding
            .and_then(|s| s.serialized_sharding)
            .unwrap_or_default();
        let sharding = match serialized.type_name.as_str() {
            HLO_SHARDING => HloShardingProto::decode(serialized.data).map_err(|e| failed(&e))?,
            SINGLE_DEVICE_SHARDING => {
                let one =
                    SingleDeviceShardingProto::decode(serialized.data).map_err(|e| failed(&e))?;
                HloShardingProto {
                    devices: Some(DeviceListProto {
                        version_number: 0,
                        device_ids: vec![one.device_id],
                    }),
                    ..Default::default()
                }
            }
            other => return Err(unimplemented(&format!("shardings of type '{other}'"))),
        };
        Ok(Self {
            kind: dtype.map(DTypeProto::kind).unwrap_or_default(),
            dims: shape.unwrap_or_default().dims,
            sharding: sharding.xla_op_sharding.unwrap_or_default(),
            devices: sharding.devices.unwrap_or_default().device_ids,
        })
    }

    /// The sharding as a reply carries it.
    pub(super) fn sharding_proto(&self) -> ShardingProto {
        let proto = HloShardingProto {
            devices: Some(DeviceListProto {
                version_number: 0,
                device_ids: self.devices.clone(),
            }),
            xla_op_sharding: Some(self.sharding.clone()),
            ..Default::default()
        };
        ShardingProto {
            serialized_sharding: Some(Serialized {
                type_name: HLO_SHARDING.to_owned(),
                data: proto.encode_to_vec().into(),
            }),
        }
    }

    /// The piece at each position, alone on its device.
    fn pieces(&self) -> Result<Vec<Self>, StatusProto> {
        let domains = Sharding::new(&self.sharding, self.devices.len())
            .and_then(|sharding| sharding.domains(&self.dims))
            .map_err(|e| failed(&e))?;
        Ok(self
            .devices
            .iter()
            .zip(domains)
            .map(|(&device, domain)| self.on_one(domain.shape, device))
            .collect())
    }

    fn on_one(&self, dims: Vec<i64>, device: i32) -> Self {
        Self {
            kind: self.kind,
            dims,
            sharding: OpSharding::default(),
            devices: vec![device],
        }
    }

    fn size_bytes(&self) -> Result<usize, StatusProto> {
        let element = match self.kind {
            Kind::Pred | Kind::S8 | Kind::U8 => 1,
            Kind::S16 | Kind::U16 | Kind::F16 | Kind::Bf16 => 2,
            Kind::S32 | Kind::U32 | Kind::F32 => 4,
            Kind::S64 | Kind::U64 | Kind::F64 => 8,
            other => return Err(unimplemented(&format!("arrays of {other:?}"))),
        };
        self.dims
            .iter()
            .try_fold(element, |size: usize, &dim| {
                size.checked_mul(usize::try_from(dim).ok()?)
            })
            .ok_or_else(|| failed(&"an array of impossible size"))
    }
}

/// The bytes of a piece.
#[derive(Clone, Debug)]
enum Piece {
    /// Of a computed array.
    Zeros,
    /// Of one that the client put.
    Stored(Stored),
}

#[derive(Clone, Debug)]
struct Array {
    spec: Arc<Spec>,
    /// By position; empty for a computed array.
    pieces: Vec<Piece>,
}

impl Array {
    fn piece(&self, position: usize) -> Piece {
        self.pieces.get(position).cloned().unwrap_or(Piece::Zeros)
    }
}

/// One client.
pub(super) struct Session {
    id: u64,
    devices: i32,
    buffers: Arc<Buffers>,
    replies: mpsc::Sender<Result<IfrtResponse, tonic::Status>>,
    arrays: HashMap<u64, Array>,
    programs: HashMap<u64, Program>,
    next_handle: u64,
    zeros: Bytes,
}

impl Session {
    pub(super) fn new(
        id: u64,
        devices: i32,
        buffers: Arc<Buffers>,
        replies: mpsc::Sender<Result<IfrtResponse, tonic::Status>>,
    ) -> Self {
        Self {
            id,
            devices,
            buffers,
            replies,
            arrays: HashMap::new(),
            programs: HashMap::new(),
            next_handle: FIRST_SERVER_HANDLE,
            zeros: Bytes::new(),
        }
    }

    /// Serves the stream to its end.
    pub(super) async fn run(mut self, mut requests: tonic::Streaming<IfrtRequest>) {
        while let Some(Ok(request)) = requests.next().await {
            let op_id = request.request_metadata.unwrap_or_default().op_id;
            let Some(request) = request.request else {
                self.reply(op_id, Err(unimplemented("an unknown request")))
                    .await;
                continue;
            };
            let waits_for = self.waits_for(&request);
            if waits_for.is_empty() {
                let result = self.handle(request);
                self.reply(op_id, result).await;
            } else {
                // Bytes still under way: only the answer waits, the stream goes on.
                self.answer_when_there(op_id, request, waits_for);
            }
        }
    }

    async fn reply(&self, op_id: u64, result: Result<Response, StatusProto>) {
        let _ = self.replies.send(Ok(response(op_id, result))).await;
    }

    /// The stored bytes without which a request has no honest answer.
    fn waits_for(&self, request: &Request) -> Vec<Stored> {
        let handles = match request {
            Request::CheckValueReadyRequest(r) => r.value_handles.as_slice(),
            Request::CopyToHostBufferRequest(r) => std::slice::from_ref(&r.array_handle),
            _ => return Vec::new(),
        };
        let pieces = handles
            .iter()
            .filter_map(|handle| self.arrays.get(handle))
            .flat_map(|array| &array.pieces);
        pieces
            .filter_map(|piece| match piece {
                Piece::Stored(stored) if stored.borrow().is_none() => Some(stored.clone()),
                _ => None,
            })
            .collect()
    }

    fn answer_when_there(&self, op_id: u64, request: Request, waits_for: Vec<Stored>) {
        let replies = self.replies.clone();
        let buffers = Arc::clone(&self.buffers);
        tokio::spawn(async move {
            let mut last = Bytes::new();
            for stored in waits_for {
                last = store::complete(stored).await;
            }
            let answer = match request {
                Request::CopyToHostBufferRequest(r) => {
                    buffers.offer(r.host_buffer_handle, last);
                    Response::CopyToHostBufferResponse(CopyToHostBufferResponse {})
                }
                _ => Response::CheckValueReadyResponse(CheckValueReadyResponse {}),
            };
            let _ = replies.send(Ok(response(op_id, Ok(answer)))).await;
        });
    }

    fn handle(&mut self, request: Request) -> Result<Response, StatusProto> {
        Ok(match request {
            Request::InitRequest(_) => Response::InitResponse(self.init()),
            Request::CheckFutureRequest(_) => Response::CheckFutureResponse(CheckFutureResponse {}),
            Request::CheckValueReadyRequest(_) => {
                Response::CheckValueReadyResponse(CheckValueReadyResponse {})
            }
            Request::MakeArrayFromHostBufferRequest(r) => self.make_array(r)?,
            Request::MakeArraysFromHostBufferShardsRequest(r) => self.make_arrays(r)?,
            Request::AssembleArrayFromSingleDeviceArraysRequest(r) => {
                let first = self.array(*r.single_device_array_handles.first().unwrap_or(&0))?;
                let mut spec = Spec::read(r.dtype.as_ref(), r.shape, r.sharding)?;
                spec.kind = first.spec.kind;
                let pieces = r
                    .single_device_array_handles
                    .iter()
                    .map(|&handle| Ok(self.array(handle)?.piece(0)))
                    .collect::<Result<_, StatusProto>>()?;
                let array_handle = self.insert(r.result_handle, spec, pieces);
                Response::AssembleArrayFromSingleDeviceArraysResponse(
                    AssembleArrayFromSingleDeviceArraysResponse { array_handle },
                )
            }
            Request::DisassembleIntoSingleDeviceArraysRequest(r) => self.disassemble(&r)?,
            Request::FullyReplicatedShardRequest(r) => self.one_shard(&r)?,
            Request::CopyArraysRequest(r) => self.copy_arrays(&r)?,
            Request::CopyToHostBufferRequest(r) => self.copy_to_host(&r)?,
            Request::DeleteArrayRequest(_) => Response::DeleteArrayResponse(DeleteArrayResponse {
                deletion_future_handle: self.mint(),
            }),
            Request::DestructArrayRequest(r) => {
                for handle in r.array_handle {
                    self.arrays.remove(&handle);
                }
                Response::DestructArrayResponse(DestructArrayResponse {})
            }
            Request::IsArrayDeletedRequest(r) => {
                Response::IsArrayDeletedResponse(IsArrayDeletedResponse {
                    deleted: !self.arrays.contains_key(&r.array_handle),
                })
            }
            Request::CompileRequest(r) => {
                let program = Program::read(r)?;
                let (handle, ready) = (self.mint(), self.mint());
                let compiled = program.compiled(handle, ready);
                self.programs.insert(handle, program);
                Response::CompileResponse(compiled)
            }
            Request::LoadedExecutableMetadataRequest(r) => {
                let program = self.program(r.loaded_executable_handle)?;
                Response::LoadedExecutableMetadataResponse(Box::new(program.metadata()))
            }
            Request::LoadedExecutableExecuteRequest(r) => self.execute(&r)?,
            Request::LoadedExecutableFetchExecuteResultRequest(_) => {
                Response::LoadedExecutableFetchExecuteResultResponse(
                    LoadedExecutableFetchExecuteResultResponse::default(),
                )
            }
            Request::LoadedExecutableDestructRequest(r) => {
                self.programs.remove(&r.loaded_executable_handle);
                Response::LoadedExecutableDestructResponse(LoadedExecutableDestructResponse {})
            }
            Request::GetDefaultLayoutRequest(r) => {
                let order: Vec<_> = (0..r.dims.len()).rev().map(|d| d.to_string()).collect();
                Response::GetDefaultLayoutResponse(GetDefaultLayoutResponse {
                    serialized_pjrt_layout: format!("{{{}}}", order.join(",")).into_bytes(),
                })
            }
            _ => return Err(unimplemented("a request that the bench does not send")),
        })
    }

    fn mint(&mut self) -> u64 {
        self.next_handle += 1;
        self.next_handle
    }

    fn array(&self, handle: u64) -> Result<&Array, StatusProto> {
        self.arrays
            .get(&handle)
            .ok_or_else(|| failed(&format!("unknown array {handle}")))
    }

    fn program(&self, handle: u64) -> Result<&Program, StatusProto> {
        self.programs
            .get(&handle)
            .ok_or_else(|| failed(&format!("unknown executable {handle}")))
    }

    fn insert(&mut self, handle: u64, spec: Spec, pieces: Vec<Piece>) -> u64 {
        let handle = if handle == 0 { self.mint() } else { handle };
        let spec = Arc::new(spec);
        self.arrays.insert(handle, Array { spec, pieces });
        handle
    }

    fn init(&self) -> InitResponse {
        let ids: Vec<i32> = (0..self.devices).collect();
        let value = |value| attribute_map_proto::Value { value: Some(value) };
        let map = |name: &str, one| AttributeMapProto {
            version_number: 0,
            attributes: [(name.to_owned(), value(one))].into(),
        };
        let device = |&id: &i32| init_response::Device {
            id,
            local_device_id: id,
            local_hardware_id: -1,
            platform_name: "cpu".to_owned(),
            device_kind: "cpu".to_owned(),
            default_memory_id: Some(id),
            memory_ids: vec![id],
            debug_string: format!("null device {id}"),
            to_string: format!("NullDevice(id={id})"),
            attributes: Some(map(
                "slice_index",
                attribute_map_proto::value::Value::Int64Value(0),
            )),
        };
        let memory = |&id: &i32| init_response::Memory {
            id,
            memory_space_kind: "device".to_owned(),
            kind_id: 0,
            device_ids: vec![id],
            debug_string: format!("null memory {id}"),
            to_string: format!("NullMemory(id={id})"),
        };
        InitResponse {
            session_id: self.id,
            platform_name: "cpu".to_owned(),
            platform_version: "null".to_owned(),
            platform_id: 1,
            process_index: 0,
            runtime_type: "null".to_owned(),
            all_devices: ids.iter().map(device).collect(),
            memories: ids.iter().map(memory).collect(),
            primary_device_ids: ids.clone(),
            addressable_device_ids: ids,
            client_attributes: Some(map(
                "serialize_with_sdy",
                attribute_map_proto::value::Value::BoolValue(true),
            )),
        }
    }

    fn make_array(&mut self, r: MakeArrayFromHostBufferRequest) -> Result<Response, StatusProto> {
        let spec = Spec::read(r.dtype.as_ref(), r.shape, r.sharding)?;
        let stored = self.buffers.consume(r.host_buffer_handle);
        let pieces = vec![Piece::Stored(stored); spec.devices.len()];
        let array_handle = self.insert(r.array_handle.unwrap_or(0), spec, pieces);
        Ok(Response::MakeArrayFromHostBufferResponse(
            MakeArrayFromHostBufferResponse { array_handle },
        ))
    }

    fn make_arrays(
        &mut self,
        request: MakeArraysFromHostBufferShardsRequest,
    ) -> Result<Response, StatusProto> {
        let mut array_handles = Vec::with_capacity(request.specs.len());
        for (index, arrays) in request.specs.into_iter().enumerate() {
            let array = arrays.array_spec.unwrap_or_default();
            let spec = Spec::read(array.dtype.as_ref(), array.shape, array.sharding)?;
            let mut pieces = vec![Piece::Zeros; spec.devices.len()];
            for (buffer, places) in arrays
                .host_buffers
                .iter()
                .zip(arrays.addressable_shard_indices)
            {
                let stored = self.buffers.consume(buffer.host_buffer_handle);
                for place in places.indices {
                    let piece = usize::try_from(place).ok().and_then(|p| pieces.get_mut(p));
                    *piece.ok_or_else(|| failed(&"a shard index too many"))? =
                        Piece::Stored(stored.clone());
                }
            }
            let handle = request.array_handles.get(index).copied().unwrap_or(0);
            array_handles.push(self.insert(handle, spec, pieces));
        }
        Ok(Response::MakeArraysFromHostBufferShardsResponse(
            MakeArraysFromHostBufferShardsResponse { array_handles },
        ))
    }

    fn disassemble(
        &mut self,
        request: &DisassembleIntoSingleDeviceArraysRequest,
    ) -> Result<Response, StatusProto> {
        let array = self.array(request.array_handle)?.clone();
        let mut array_handles = Vec::with_capacity(array.spec.devices.len());
        for (index, spec) in array.spec.pieces()?.into_iter().enumerate() {
            let handle = request.result_handles.get(index).copied().unwrap_or(0);
            array_handles.push(self.insert(handle, spec, vec![array.piece(index)]));
        }
        Ok(Response::DisassembleIntoSingleDeviceArraysResponse(
            DisassembleIntoSingleDeviceArraysResponse { array_handles },
        ))
    }

    fn one_shard(
        &mut self,
        request: &FullyReplicatedShardRequest,
    ) -> Result<Response, StatusProto> {
        let array = self.array(request.array_handle)?;
        let device = array.spec.devices.first().copied().unwrap_or_default();
        let spec = array.spec.on_one(array.spec.dims.clone(), device);
        let piece = array.piece(0);
        let array_handle = self.insert(request.result_handle, spec, vec![piece]);
        Ok(Response::FullyReplicatedShardResponse(
            FullyReplicatedShardResponse { array_handle },
        ))
    }

    fn copy_arrays(&mut self, request: &CopyArraysRequest) -> Result<Response, StatusProto> {
        let mut array_handles = Vec::with_capacity(request.array_handles.len());
        for (index, &source) in request.array_handles.iter().enumerate() {
            let array = self.array(source)?.clone();
            let mut spec = (*array.spec).clone();
            if !request.device_ids.is_empty() {
                spec.devices.clone_from(&request.device_ids);
            }
            let handle = request.result_handles.get(index).copied().unwrap_or(0);
            array_handles.push(self.insert(handle, spec, array.pieces));
        }
        Ok(Response::CopyArraysResponse(CopyArraysResponse {
            array_handles,
        }))
    }

    fn copy_to_host(&mut self, request: &CopyToHostBufferRequest) -> Result<Response, StatusProto> {
        let array = self.array(request.array_handle)?;
        let bytes = match array.piece(0) {
            // `waits_for` has seen that they are there.
            Piece::Stored(stored) => stored.borrow().clone().unwrap_or_default(),
            Piece::Zeros => {
                let size = array.spec.size_bytes()?;
                if self.zeros.len() < size {
                    self.zeros = vec![0; size].into();
                }
                self.zeros.slice(..size)
            }
        };
        self.buffers.offer(request.host_buffer_handle, bytes);
        Ok(Response::CopyToHostBufferResponse(
            CopyToHostBufferResponse {},
        ))
    }

    fn execute(&mut self, r: &LoadedExecutableExecuteRequest) -> Result<Response, StatusProto> {
        let results = self.program(r.loaded_executable_handle)?.results.clone();
        let describe = r.result_array_handle.is_empty();
        let mut outputs = Vec::new();
        for (index, spec) in results.into_iter().enumerate() {
            let handle = match r.result_array_handle.get(index) {
                Some(&handle) => handle,
                None => self.mint(),
            };
            if describe {
                outputs.push(program::output(&spec, handle));
            }
            let pieces = Vec::new();
            self.arrays.insert(handle, Array { spec, pieces });
        }
        let fill_status = r.execute_options.as_ref().is_some_and(|o| o.fill_status);
        let status_handle = match (fill_status, r.result_status_handle) {
            // Otherwise a first execution aborts the client.
            (false, _) => 0,
            (true, 0) => self.mint(),
            (true, handle) => handle,
        };
        Ok(Response::LoadedExecutableExecuteResponse(
            LoadedExecutableExecuteResponse {
                status_handle,
                outputs,
            },
        ))
    }
}

/// A reply: a body, or a status and no body.
fn response(op_id: u64, result: Result<Response, StatusProto>) -> IfrtResponse {
    let (status, response) = match result {
        Ok(response) => (StatusProto::default(), Some(response)),
        Err(status) => (status, None),
    };
    IfrtResponse {
        response_metadata: Some(ResponseMetadata {
            op_id,
            status: Some(status),
            ..Default::default()
        }),
        response,
    }
}
