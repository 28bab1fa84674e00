//! A session with something of everything in it, and a good request of every kind.

mod calls;
mod parts;
mod persistence;
mod requests;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use waystation_client::{Client, Error, Request, Response, request};
use waystation_proto::xla::{
    OpSharding,
    ifrt::{
        RemapPlanProto,
        proto::ByteStrides,
        proxy::{
            DeleteArrayRequest, FullyReplicatedShardRequest, IsArrayDeletedRequest,
            MakeArrayFromHostBufferRequest, MakeArraysFromHostBufferShardsRequest,
            make_arrays_from_host_buffer_shards_request::{
                HostBuffer, MakeArraysFromHostBufferShardsSpec, ShardIndices,
            },
        },
        remap_plan_proto::{InputDevices, InputDevicesForOutput, MappingProto},
    },
};

pub use self::parts::name;
use self::parts::{
    DONATED, REUSE, STEP, Sort, WIDE, cut, f32_type, floats, list, names, shape, spec, words,
};
use super::{folders::Folders, mutate::Pool, random::Random, wire::Field, witness::DOUBLE};

/// Kinds of requests there are.
pub const KINDS: usize = 32;
/// Of which so many are also sent for arrays of strings and plugin programs.
pub const VARIANTS: usize = 10;
/// The number of CompileRequest among them.
pub const COMPILE: usize = 17;
/// Handles and fields remembered for later requests.
const REMEMBERED: usize = 256;
/// A handle that nobody minted.
const UNKNOWN: u64 = 0x7fff_0000;

/// Scenes that there were.
static SCENES: AtomicU64 = AtomicU64::new(0);

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
    /// Two strings, on both devices.
    words: u64,
    /// Plugin programs that write `one` to the bucket and read it.
    writer: u64,
    reader: u64,
    /// The name that it is written under: of its own, since a save of a session that is over may still be writing.
    saved: String,
    folders: Folders,
}

impl Scene {
    /// Opens a session and makes its arrays and programs.
    ///
    /// # Errors
    /// When the server refuses any of it.
    pub async fn open(address: &str, folders: &Folders) -> Result<Self, Error> {
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
            words: 0,
            writer: 0,
            reader: 0,
            saved: format!("array{}", SCENES.fetch_add(1, Relaxed)),
            folders: folders.clone(),
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
        scene.words = scene.handle();
        let put = scene.make_words(scene.words).await?;
        scene.client.call(put).await?;
        let bucket = folders.bucket().display().to_string();
        let write = persistence::write(&bucket, &scene.saved, devices[0]);
        scene.writer = calls::compile(&scene.client, persistence::compile(&write)).await?;
        let read = persistence::read(&bucket, &scene.saved, devices[0]);
        scene.reader = calls::compile(&scene.client, persistence::compile(&read)).await?;
        // What is read later is there.
        let (write, args) = (scene.writer, [scene.one]);
        calls::execute(&scene.client, write, &args, &[]).await?;
        scene.pool.handles.extend([scene.writer, scene.reader]);
        Ok(scene)
    }

    /// A new handle; later requests may be given it by mistake.
    fn handle(&mut self) -> u64 {
        let handle = self.client.handle();
        self.offer(handle)
    }

    /// Has later requests be given the handle by mistake.
    fn offer(&mut self, handle: u64) -> u64 {
        if self.pool.handles.len() >= REMEMBERED {
            self.pool.handles.remove(0);
        }
        self.pool.handles.push(handle);
        handle
    }

    /// The kind of a request, and what it is about.
    pub fn label(&self, request: &Request) -> &'static str {
        let strings = match request {
            Request::MakeArrayFromHostBufferRequest(make) => make.dtype == request::string_type(),
            Request::CopyToHostBufferRequest(copy) => copy.array_handle == self.words,
            Request::DisassembleIntoSingleDeviceArraysRequest(apart) => {
                apart.array_handle == self.words
            }
            Request::CopyArraysRequest(copy) => copy.array_handles == [self.words],
            Request::FullyReplicatedShardRequest(shard) => shard.array_handle == self.words,
            Request::IsArrayDeletedRequest(deleted) => deleted.array_handle == self.words,
            Request::ReshardArraysRequest(reshard) => reshard.array_handles == [self.words],
            Request::AssembleArrayFromSingleDeviceArraysRequest(assemble) => {
                assemble.dtype == request::string_type()
            }
            _ => false,
        };
        let plugin = match request {
            Request::CompileRequest(compile) => compile
                .program
                .as_ref()
                .is_some_and(|program| program.type_name == persistence::PLUGIN_PROGRAM),
            Request::LoadedExecutableExecuteRequest(execute) => {
                [self.writer, self.reader].contains(&execute.loaded_executable_handle)
            }
            _ => false,
        };
        names(
            request,
            match (strings, plugin) {
                (true, _) => Sort::Strings,
                (_, true) => Sort::Plugin,
                _ => Sort::Usual,
            },
        )
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

    async fn make_words(&mut self, handle: u64) -> Result<Request, Error> {
        self.client.store(handle, words(&["one", "zwei"])).await?;
        Ok(request::make_strings(handle, &[2], &self.devices))
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

    /// An array of numbers, or that of strings.
    fn pick(&self, numbers: u64, random: &mut Random) -> u64 {
        if random.one_in(3) {
            self.words
        } else {
            numbers
        }
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
        let (program, args) = match random.below(4) {
            0 => return request::execute(self.writer, &[self.one], &[], 1),
            1 => (self.reader, Vec::new()),
            2 => (self.program, vec![self.one]),
            _ => (self.wide, vec![self.halves]),
        };
        let results = if random.one_in(2) {
            vec![self.handle()]
        } else {
            Vec::new()
        };
        request::execute(program, &args, &results, 1)
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
            0 => {
                // Where nothing is kept: what becomes of this text may not say where to write.
                let program = if random.one_in(2) {
                    persistence::write("memory://", "array", self.devices[0])
                } else {
                    persistence::read("memory://", "array", self.devices[0])
                };
                persistence::compile(&program)
            }
            1 | 2 => request::compile(WIDE, &self.devices),
            3 => request::compile(STEP, &self.devices[..1]),
            4 => request::compile(DONATED, &self.devices[..1]),
            _ => request::compile(DOUBLE, &self.devices[..1]),
        }
    }
}
