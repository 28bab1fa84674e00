//! What a worker is told at its start. The command line reads the environment; nothing here does.

use std::{ffi::OsString, net::TcpListener, path::PathBuf, time::Duration};

use waystation_checkpoint::{Layout, zarr::Codec};
use waystation_pjrt::OptionValue;

/// How to run one worker.
#[derive(Debug)]
pub struct Config {
    /// A bound listener of the worker service.
    pub listener: TcpListener,
    /// "host:port" under which proxies and other workers reach the service; the listener's own address when not given.
    pub advertise: Option<String>,
    /// "host:port" of the resource manager; without one the worker serves whoever dials it.
    pub resource_manager: Option<String>,
    /// The slice that this worker is part of.
    pub slice: u32,
    /// The worker's number in its slice.
    pub task: u32,
    /// Workers of the slice; 0: the resource manager knows.
    pub slice_tasks: u32,
    /// Accelerators that the plugin's devices stand in for.
    pub simulated: Option<Simulated>,
    /// The PJRT plugin's shared library.
    pub plugin: PathBuf,
    /// Options for the plugin's client (`cpu_device_count`, ...).
    pub plugin_options: Vec<(String, OptionValue)>,
    /// Whether the plugin joins the workers of a slice to one client, and has collectives of its own between them, as those for
    /// GPUs do: the worker then waits for all others of its slice before it starts. Without a resource manager, or with one
    /// worker in the slice, nothing is joined.
    pub plugin_collectives: bool,
    /// LAPACK library for the linear algebra of CPU plugins; without one, programs with linear algebra fail on CPU.
    pub lapack: Option<PathBuf>,
    /// Where compiled programs are kept.
    pub cache: waystation_cache::Config,
    /// The variables of the process's environment; those that steer the compiler enter the cache key.
    pub environment: Vec<(String, String)>,
    /// How to start a process that compiles in this one's place; without it, programs are compiled in this process.
    pub compile_child: Option<CompileChild>,
    /// Bounds.
    pub limits: Limits,
}

/// What devices show of accelerators that they stand in for.
#[derive(Clone, Debug)]
pub struct Simulated {
    /// What was asked for, as in `tpuv6e:4x4`.
    pub instance_type: String,
    /// Each device's attributes, beside the plugin's, by ordinal.
    pub attributes: Vec<Vec<(String, OptionValue)>>,
}

/// A process that calls [`crate::compile_child`].
#[derive(Clone, Debug)]
pub struct CompileChild {
    /// The binary to start.
    pub program: PathBuf,
    /// The name that the process shows, in place of the binary's.
    pub name: Option<OsString>,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Only with CPU plugins: a second client would take the memory of an accelerator, or the accelerator itself.
    pub cpu_only: bool,
}

/// Bounds of one worker. The defaults suit a machine with a few accelerators.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Ops that the proxy may have on the way or that are not dispatched yet. All that a client's op waits for behind other
    /// clients' lies here, so it is no more than keeps the dispatch thread busy while the proxy hears that there is room.
    pub queued_ops: usize,
    /// Bytes that arrays and executions may take of each device's default memory; none is no limit but the device's own.
    pub device_memory_bytes: Option<u64>,
    /// Executions handed to the plugin that have not ended. A CPU plugin blocks its caller at about 32 a device.
    pub launches_in_flight: usize,
    /// Ops that wait for bytes or a program at the same time. A client's are refused from when as many of them wait as
    /// there is room left for others', which is half of these for one alone.
    pub waiting_ops: usize,
    /// Replies not taken by the proxy yet; beyond it the stream is not read.
    pub unsent_replies: usize,
    /// Bytes of transfers that came before the op that uses them.
    pub early_put_bytes: u64,
    /// Fetches of transfers that no op has named yet.
    pub early_fetches: usize,
    /// How long such a fetch waits for its op.
    pub early_fetch_wait: Duration,
    /// Pieces of memory shared with a proxy on this machine at a time, in place of sending it bytes; 0: none, and other workers on
    /// this machine are reached by TCP alone.
    pub segments: usize,
    /// Largest result that rides along with `ReadDone`, in bytes.
    pub inline_read_bytes: usize,
    /// Programs compiled at the same time.
    pub compiles: usize,
    /// How long a compile goes on that nobody waits for any more.
    pub unwanted_compile: Duration,
    /// Host bytes of arrays on their way between devices and checkpoints.
    pub checkpoint_host_memory: usize,
    /// How saves lay arrays out; a request does not say.
    pub checkpoint_format: Layout,
    /// How saves compress; `None`: as Orbax does.
    pub checkpoint_codec: Option<Codec>,
    /// How long a shutdown waits for what is under way.
    pub grace: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            queued_ops: 64,
            device_memory_bytes: None,
            launches_in_flight: 24,
            waiting_ops: 1 << 18,
            unsent_replies: 4096,
            early_put_bytes: 256 << 20,
            early_fetches: 4096,
            early_fetch_wait: Duration::from_secs(60),
            segments: 256,
            inline_read_bytes: 64 << 10,
            compiles: std::thread::available_parallelism().map_or(1, std::num::NonZero::get),
            unwanted_compile: Duration::from_secs(60),
            checkpoint_host_memory: 1 << 30,
            checkpoint_format: Layout::default(),
            checkpoint_codec: None,
            grace: Duration::from_secs(5),
        }
    }
}
