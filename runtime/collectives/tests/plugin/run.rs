//! A process of two devices, and launches on it.

use crate::compile::{Artifact, plugin, portable, wide};
use crate::programs::{Array, Program};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use waystation_collectives::transport::{Config, Secret, Tcp};
use waystation_collectives::{Code, Engine, Failure, Launch, Process};
use waystation_pjrt::{AlignedBytes, Client, Error, ExecuteContext, ExecuteOptions};

const SECRET: [u8; 32] = [9; 32];

/// The outcome of a partition.
type Result<T, E = String> = std::result::Result<T, E>;
type Outcome = (u32, Result<Vec<Array>>);
/// A launch under way: its partitions' outcomes.
type Running = Vec<Receiver<Outcome>>;

/// One process: a client of two devices with a thread each, and an engine.
pub(crate) struct Site {
    client: Client,
    engine: Engine,
    tcp: Tcp,
    address: SocketAddr,
    devices: Vec<Sender<Box<dyn FnOnce() + Send>>>,
    runtime: Runtime,
}

impl Site {
    pub(crate) fn new(process: Process) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .expect("a runtime");
        let tcp = Tcp::new(process, Secret::new(SECRET), Config::default());
        let engine = Engine::new(process, Arc::new(tcp.clone()));
        let address = runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let address = listener.local_addr().expect("an address");
            tcp.listen(listener, engine.clone());
            address
        });
        // A cheap program runs on the thread that starts it, so each device has one.
        let devices = (0..2)
            .map(|_| {
                let (sender, receiver) = channel::<Box<dyn FnOnce() + Send>>();
                std::thread::spawn(move || receiver.into_iter().for_each(|job| job()));
                sender
            })
            .collect();
        Self {
            client: wide(&plugin(), 2),
            engine,
            tcp,
            address,
            devices,
            runtime,
        }
    }

    pub(crate) fn process(&self) -> Process {
        self.engine.process()
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn connect(&self, other: &Self) {
        self.connect_to(other.process(), other.address);
    }

    pub(crate) fn connect_to(&self, process: Process, address: SocketAddr) {
        let connected = self.tcp.connect(process, address, self.engine.clone());
        self.runtime.block_on(connected).expect("it connects");
    }

    /// Starts the partitions of a launch that are here, given with their devices and inputs.
    pub(crate) fn start(
        &self,
        artifact: &Artifact,
        number: u64,
        processes: &[Process],
        mine: Vec<(u32, usize, Vec<Array>)>,
    ) -> Running {
        let executable = self
            .client
            .deserialize(&artifact.bytes, Some(&portable()))
            .expect("it loads");
        let launch = Arc::new(self.engine.open(number, processes).expect("it opens"));
        mine.into_iter()
            .map(|(partition, device, inputs)| {
                let (sender, receiver) = channel();
                let (client, executable, launch) =
                    (self.client.clone(), executable.clone(), Arc::clone(&launch));
                let job = move || {
                    let result = execute(&client, &executable, &launch, partition, device, &inputs);
                    if let Err(error) = &result {
                        // All of the launch fails, not only what runs here.
                        launch.fail(Failure::new(Code::Aborted, error.to_string()));
                    }
                    let result = result.map_err(|error| format!("{:?}: {error}", error.code()));
                    // The test may have ended.
                    let _ = sender.send((partition, result));
                };
                self.devices[device]
                    .send(Box::new(job))
                    .expect("its thread");
                receiver
            })
            .collect()
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        // As if the process had ended.
        self.tcp.shutdown();
    }
}

fn execute(
    client: &Client,
    executable: &waystation_pjrt::LoadedExecutable,
    launch: &Launch,
    partition: u32,
    device: usize,
    inputs: &[Array],
) -> Result<Vec<Array>, Error> {
    let device = &client.devices()[device];
    let memory = &device.memories()[device.default_memory()];
    let inputs = inputs
        .iter()
        .map(|array| {
            let mut host = AlignedBytes::zeroed(array.bytes.len())?;
            host.copy_from_slice(&array.bytes);
            client.buffer_from_host(Arc::new(host), array.element(), &array.dims, None, memory)
        })
        .collect::<Result<Vec<_>, Error>>()?;
    let inputs: Vec<_> = inputs.iter().collect();
    let member = launch.member(partition).expect("it runs here");
    let context = ExecuteContext::new(client.plugin(), Arc::new(member))?;
    let options = ExecuteOptions {
        launch_id: i32::try_from(launch.number()).expect("few"),
        ..Default::default()
    };
    let execution = executable.execute_on(device, &inputs, &options, Some(&context))?;
    execution.done.wait()?;
    execution
        .outputs
        .iter()
        .map(|output| {
            let (sender, receiver) = channel();
            let memory = AlignedBytes::zeroed(output.host_bytes()?)?;
            output.to_host(memory)?.on_ready(move |bytes| {
                let _ = sender.send(bytes);
            });
            let bytes = receiver.recv().expect("an outcome")?;
            Ok(Array {
                ty: format!("{:?}", output.element_type()),
                dims: output.dims().to_vec(),
                bytes: bytes.to_vec(),
            })
        })
        .collect()
}

/// Waits for a launch.
pub(crate) fn ready(running: Running) -> Vec<Outcome> {
    running
        .into_iter()
        .map(|each| each.recv().expect("an outcome"))
        .collect()
}

/// Compares with what JAX made.
pub(crate) fn compare(program: &Program, results: &[Vec<Array>]) {
    assert_eq!(results.len(), program.outputs.len());
    for (partition, results) in results.iter().enumerate() {
        compare_partition(program, partition, results);
    }
}

pub(crate) fn compare_partition(program: &Program, partition: usize, results: &[Array]) {
    let expected = &program.outputs[partition];
    assert_eq!(results.len(), expected.len(), "{}", program.name);
    for (index, (result, expected)) in results.iter().zip(expected).enumerate() {
        let name = format!("{}, partition {partition}, result {index}", program.name);
        assert_eq!(result.ty, format!("{:?}", expected.element()), "{name}");
        assert_eq!(result.dims, expected.dims, "{name}");
        if program.exact {
            let start = |array: &Array| array.bytes[..array.bytes.len().min(64)].to_vec();
            assert!(
                result.bytes == expected.bytes,
                "{name}: {:?} is not {:?}",
                start(result),
                start(expected)
            );
            continue;
        }
        let result = Array {
            ty: expected.ty.clone(),
            ..result.clone()
        };
        for (a, b) in result.as_floats().iter().zip(expected.as_floats()) {
            assert!(
                (a - b).abs() <= 1e-5 * b.abs().max(1.0),
                "{name}: {a} is not {b}"
            );
        }
    }
}
