//! What a session does beside the requests that are changed: calls outside the stream, and short sequences in which a
//! file, a host buffer or a program is wrong.

use std::{fs, io, os::unix::fs::symlink};

use bytes::Bytes;
use waystation_client::{Client, Error, Request, Response, request};
use waystation_proto::xla::ifrt::proxy::{
    CheckFutureRequest, CheckValueReadyRequest, GrpcHostBufferReadFromDiskRequest,
    GrpcHostBufferStoreMetadata,
};

use super::{
    Scene, UNKNOWN,
    parts::{floats, words},
    persistence,
};
use crate::fuzz::{
    folders::make_fifo,
    mutate::{self, EDGES},
    random::Random,
};

impl Scene {
    /// One call or sequence, good or bad; gives its name and code.
    pub async fn call(&mut self, random: &mut Random) -> (&'static str, i32) {
        let (call, result) = match random.below(8) {
            0 => self.strings(random).await,
            1 | 2 => self.disk(random).await,
            3 | 4 => self.persistence(random).await,
            _ => self.buffer(random).await,
        };
        (call, result.err().map_or(0, |e| e.code().unwrap_or(-1)))
    }

    /// A handle that hardly any changed request names. One that did would take the host buffer that is stored under it,
    /// and the call would wait for another one, as it should, for ever.
    fn own_handle(&mut self) -> u64 {
        let handle = self.client.handle() + 0x2a5c_0000;
        self.offer(handle)
    }

    async fn fetch(&self, array: u64) -> Result<Bytes, Error> {
        let buffer = self.client.handle();
        self.client
            .call(request::copy_to_host(array, buffer))
            .await?;
        self.client.lookup(buffer).await
    }

    async fn buffer(&mut self, random: &mut Random) -> (&'static str, Result<(), Error>) {
        let handle = match random.below(3) {
            0 => self.handle(),
            1 => UNKNOWN,
            _ => *random.pick(&self.pool.handles),
        };
        match random.below(5) {
            4 => (
                "CopyToHostBuffer and HostBufferLookup",
                self.fetch(self.one).await.map(drop),
            ),
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
        }
    }

    /// Strings that are too many or too few, or none.
    async fn strings(&mut self, random: &mut Random) -> (&'static str, Result<(), Error>) {
        let mut contents = words(&["one", "", "drei"]).to_vec();
        let (mut dims, mut strides) = (vec![3], None);
        match random.below(8) {
            0 => dims = vec![*random.pick(&EDGES)],
            1 => dims = vec![*random.pick(&EDGES), *random.pick(&EDGES)],
            // A length far beyond the end.
            2 => contents.extend([0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]),
            3 => contents = vec![0x0b; random.below(5000)],
            4 => contents.extend([0x0a, 0].repeat(random.below(100_000))),
            5 => strides = Some(vec![*random.pick(&EDGES)]),
            _ => mutate::damage(&mut contents, random),
        }
        let handle = self.own_handle();
        let mut make = request::make_strings(handle, &dims, &self.devices);
        if let Request::MakeArrayFromHostBufferRequest(make) = &mut make {
            make.byte_strides =
                strides.map(|strides| waystation_proto::xla::ifrt::proto::ByteStrides { strides });
        }
        let sequence = async {
            self.client.store(handle, contents.into()).await?;
            self.client.call(make).await?;
            self.client.call(ready(handle)).await?;
            self.fetch(handle).await.map(drop)
        };
        ("an array of damaged strings", sequence.await)
    }

    /// Host buffers that come as files, and what is no such file.
    async fn disk(&mut self, random: &mut Random) -> (&'static str, Result<(), Error>) {
        let mut handle = self.own_handle();
        if random.one_in(8) {
            // The file's name has no more than the lower half.
            handle += (*random.pick(&EDGES) as u64) << 32;
        }
        let path = self.folders.large_transfer(handle);
        let bytes = floats(4);
        let good = random.one_in(3);
        let mut size = 16;
        let prepared: io::Result<()> = if good {
            fs::write(&path, &bytes)
        } else {
            let beside = self.folders.large_transfers().join("beside");
            match random.below(9) {
                0 => Ok(()),
                1 => symlink(self.folders.secret(), &path),
                2 => symlink("../outside/secret", &path),
                3 => fs::write(&beside, &bytes).and_then(|()| fs::hard_link(&beside, &path)),
                4 => fs::create_dir(&path),
                5 => make_fifo(&path),
                6 => {
                    // As large as it says, and empty.
                    size = 1 << 40;
                    fs::File::create(&path).and_then(|file| file.set_len(1 << 40))
                }
                _ => {
                    size = *random.pick(&EDGES);
                    fs::write(&path, &bytes)
                }
            }
        };
        prepared.expect("the large-transfer directory can be written to");
        let sequence = async {
            if good || random.one_in(2) {
                self.client.read_from_disk(handle, size).await?;
            } else {
                self.read_from_disk_of(random, handle, size).await?;
            }
            let make = request::make_array(handle, &[4], &self.devices[..1], None);
            self.client.call(make).await?;
            self.fetch(handle).await
        };
        let result = sequence.await;
        if let Ok(fetched) = &result {
            // Nothing that lies elsewhere comes back.
            assert_ne!(fetched.as_ref(), [7; 16], "a link was followed");
        }
        for left in [path, self.folders.large_transfers().join("beside")] {
            let _ = fs::remove_file(&left);
            let _ = fs::remove_dir(&left);
        }
        let name = if good {
            "HostBufferReadFromDisk"
        } else {
            "HostBufferReadFromDisk, damaged"
        };
        (name, result.map(drop))
    }

    /// The call with metadata that are wrong or absent.
    async fn read_from_disk_of(
        &self,
        random: &mut Random,
        handle: u64,
        buffer_size: i64,
    ) -> Result<(), Error> {
        let own = self.client.init().session_id;
        let session_id = *random.pick(&[own, own ^ 1, 0, u64::MAX]);
        let metadata = GrpcHostBufferStoreMetadata {
            session_id,
            handle,
            buffer_size,
        };
        let request = GrpcHostBufferReadFromDiskRequest {
            metadata: (!random.one_in(4)).then_some(metadata),
        };
        let called = self
            .client
            .service()
            .host_buffer_read_from_disk(request)
            .await;
        called.map(drop).map_err(|status| Error::Call {
            call: "HostBufferReadFromDisk",
            status: Box::new(status),
        })
    }

    /// Plugin programs that write and read, executed to the end.
    async fn persistence(&mut self, random: &mut Random) -> (&'static str, Result<(), Error>) {
        let location = self.folders.bucket().display().to_string();
        let (write, good) = (random.one_in(2), random.one_in(3));
        let mut program = if write {
            persistence::write(&location, "called", self.devices[0])
        } else {
            persistence::read(&location, &self.saved, self.devices[0])
        };
        let (mut args, mut results) = if write {
            (vec![self.one], Vec::new())
        } else {
            (Vec::new(), vec![self.handle()])
        };
        if !good {
            persistence::damage(&mut program, &self.folders, random);
            match random.below(4) {
                0 => args = vec![self.halves; random.below(3)],
                1 => results = (0..random.below(3)).map(|_| self.handle()).collect(),
                _ => {}
            }
        }
        let name = match (write, good) {
            (true, true) => "a persistence write",
            (true, false) => "a persistence write, damaged",
            (false, true) => "a persistence read",
            (false, false) => "a persistence read, damaged",
        };
        let compiled = compile(&self.client, persistence::compile(&program)).await;
        let result = match compiled {
            Ok(handle) => execute(&self.client, handle, &args, &results).await,
            Err(error) => Err(error),
        };
        (name, result)
    }
}

fn ready(array: u64) -> Request {
    Request::CheckValueReadyRequest(CheckValueReadyRequest {
        value_handles: vec![array],
    })
}

/// Compiles, and gives the handle.
pub(super) async fn compile(client: &Client, request: Request) -> Result<u64, Error> {
    match client.call(request).await? {
        Response::CompileResponse(compiled) => Ok(compiled.loaded_executable_handle),
        _ => Err(Error::WrongReply),
    }
}

/// Executes and waits until that is done.
pub(super) async fn execute(
    client: &Client,
    program: u64,
    args: &[u64],
    results: &[u64],
) -> Result<(), Error> {
    let mut request = request::execute(program, args, results, 1);
    if let Request::LoadedExecutableExecuteRequest(execute) = &mut request
        && let Some(options) = &mut execute.execute_options
    {
        options.fill_status = true;
    }
    let Response::LoadedExecutableExecuteResponse(executed) = client.call(request).await? else {
        return Err(Error::WrongReply);
    };
    client
        .call(Request::CheckFutureRequest(CheckFutureRequest {
            future_handle: executed.status_handle,
        }))
        .await?;
    Ok(())
}
