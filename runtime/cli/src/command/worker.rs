//! `worker`.

use std::path::PathBuf;

use clap::ArgAction;

use crate::{
    anew,
    args::RoleArgs,
    argv::parse_bool,
    checkpoint_args::CheckpointArgs,
    command::compile_child::InChild,
    error::Failure,
    flag_files,
    health::{self, Part},
    lifetime, listen,
    local_transfers::LocalTransfers,
    location,
    plugin::{self, PluginCollectives},
    python,
    retention::TtlArgs,
    sharing, simulate,
    size::parse_some_bytes,
    threads, tpu,
    worker_cache::WorkerCacheArgs,
};

/// Port of Pathways' workers.
const DEFAULT_PORT: u16 = 29005;

/// Own the devices of one machine: compile, run, and move arrays between devices and the bucket
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Port to listen on; 0 takes a free one
    #[arg(long = "server_port", value_name = "PORT", default_value_t = DEFAULT_PORT)]
    pub(crate) server_port: u16,
    /// The resource manager to register with
    #[arg(
        long = "resource_manager_address",
        value_name = "HOST:PORT",
        required = true, value_parser = listen::parse_host_port
    )]
    pub(crate) resource_manager_address: String,
    /// The slice that this worker is part of, from 0
    #[arg(long = "slice", value_name = "N", default_value_t = 0)]
    pub(crate) slice: u32,
    /// The number of this worker in its slice, from 0
    #[arg(long = "task", value_name = "N", default_value_t = 0)]
    pub(crate) task: u32,
    /// Workers of the slice [default: as many as TPU_WORKER_HOSTNAMES has, or as the resource manager says]
    #[arg(long = "slice_tasks", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) slice_tasks: Option<u32>,
    /// PJRT plugin: cpu, cuda, tpu, or the path of a shared library
    #[arg(long = "pjrt_plugin", value_name = "NAME|PATH", default_value = "cpu")]
    pub(crate) pjrt_plugin: String,
    /// Python interpreter whose packages hold the plugin [default: the virtual environment's, or python3]
    #[arg(long = "python", value_name = "PATH")]
    pub(crate) python: Option<PathBuf>,
    /// Devices to make, for CPU plugins
    #[arg(long = "devices_per_worker", alias = "devices", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) devices_per_worker: Option<u32>,
    /// Let the plugin join the workers of a slice to one client, and move the data of programs over them: each worker waits for all
    /// others of its slice, and ends with them [auto: with --pjrt_plugin=cuda]
    #[arg(long = "plugin_collectives", value_name = "auto|true|false", default_value = "auto", value_parser = PluginCollectives::parse)]
    pub(crate) plugin_collectives: PluginCollectives,
    /// LAPACK library for linear algebra with CPU plugins [default: SciPy's, or that of the Python package scipy-openblas32]
    #[arg(long = "lapack", value_name = "PATH")]
    pub(crate) lapack: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) cache: WorkerCacheArgs,
    #[command(flatten)]
    pub(crate) ttl: TtlArgs,
    /// Memory that arrays and executions may take of each device [default: no limit but the device's own]
    #[arg(long = "device_memory_bytes", value_name = "SIZE", value_parser = parse_some_bytes)]
    pub(crate) device_memory_bytes: Option<u64>,
    #[command(flatten)]
    pub(crate) checkpoints: CheckpointArgs,
    /// Compile in a child process, which a program that breaks the compiler ends in the worker's place [auto: with CPU plugins]
    #[arg(long = "compile_in_child", value_name = "auto|true|false", default_value = "auto", value_parser = InChild::parse)]
    pub(crate) compile_in_child: InChild,
    /// auto: array bytes go between a proxy and workers on one machine through memory that both see, and collectives between such
    /// workers through a Unix socket; off: all go by TCP
    #[arg(
        long = "local_transfers",
        value_name = "auto|off",
        default_value = "auto",
        hide_possible_values = true,
        value_enum
    )]
    pub(crate) local_transfers: LocalTransfers,
    /// The bucket was found unwell just now; set by the parent process
    #[arg(long = "bucket_unwell", hide = true, num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    pub(crate) bucket_unwell: bool,
    #[command(flatten)]
    pub(crate) role: RoleArgs,
}

/// Serves until told to end.
pub(crate) fn run(args: Args) -> Result<(), Failure> {
    let hostnames = std::env::var("TPU_WORKER_HOSTNAMES").unwrap_or_default();
    let slice_tasks = args.slice_tasks.or_else(|| hosts(&hostnames));
    if slice_tasks.is_some_and(|tasks| args.task >= tasks) {
        return Err(Failure::usage(format!(
            "--task={} needs --slice_tasks={} or more: a slice's workers are numbered from 0",
            args.task,
            u64::from(args.task) + 1
        )));
    }
    flag_files::take_in()?;
    arm_fault_point()?;
    let mut args = args;
    let mut simulated = None;
    if args.role.simulate.is_some() {
        simulate::announce(args.role.simulate);
        if matches!(args.pjrt_plugin.as_str(), "cuda" | "tpu") {
            // As an image for accelerators has it in its environment.
            tracing::warn!(plugin = args.pjrt_plugin, "SIMULATED: by the CPU plugin");
            args.pjrt_plugin = "cpu".to_owned();
        }
        let manager = &args.resource_manager_address;
        let Some(part) = simulate::part(manager, args.task, args.role.parent_stdin)? else {
            return Ok(());
        };
        args.devices_per_worker = Some(part.devices);
        simulated = part.simulated;
    }
    if args.pjrt_plugin == "tpu" {
        let changes = tpu::changes(
            &args.resource_manager_address,
            args.slice,
            args.task,
            args.role.bind_address,
            args.role.parent_stdin,
        )?;
        let Some(changes) = changes else {
            return Ok(());
        };
        anew::with(changes)?;
    }
    if !matches!(args.pjrt_plugin.as_str(), "cuda" | "tpu") {
        threads::ensure(args.devices_per_worker)?;
    }
    let plugin_collectives = args.plugin_collectives.with(&args.pjrt_plugin);
    let plugin_options = plugin::options(&args.pjrt_plugin, args.devices_per_worker)?;
    let python = args.python.clone().or_else(|| python::choose(None));
    let plugin = plugin::find(&args.pjrt_plugin, python.as_deref())?;
    let lapack = plugin::lapack(args.lapack, &args.pjrt_plugin, python.as_deref())?;
    let disk = args.cache.disk.disk()?;
    let listener = listen::bind(args.role.bind_address, args.server_port, "--server_port")?;
    let address = listen::address(&listener)?;
    let mut addresses = vec![address];
    let page = health::bind(&args.role, &mut addresses)?;
    let advertise = listen::reachable(address, &args.resource_manager_address);
    let mut limits = waystation_worker::Limits {
        device_memory_bytes: args.device_memory_bytes,
        ..waystation_worker::Limits::default()
    };
    if args.local_transfers == LocalTransfers::Off {
        limits.segments = 0;
    }
    args.checkpoints.apply(&mut limits);
    lifetime::run(args.role.parent_stdin, async |stop| {
        let location = args.cache.gcs_scratch_location.as_deref();
        let bucket = if args.bucket_unwell {
            location::open_unwell(location).await?
        } else {
            location::open(location).await?
        };
        let mut cache = args.cache.config(bucket, disk, sharing::state_dir())?;
        args.ttl.apply(&mut cache);
        let config = waystation_worker::Config {
            listener,
            advertise: Some(advertise.to_string()),
            resource_manager: Some(args.resource_manager_address),
            slice: args.slice,
            task: args.task,
            slice_tasks: slice_tasks.unwrap_or_default(),
            simulated,
            plugin,
            plugin_options,
            plugin_collectives,
            lapack,
            cache,
            environment: environment(),
            compile_child: args.compile_in_child.child(),
            limits,
        };
        if let Some(file) = &args.role.ready_file {
            listen::write_ready_file(file, &addresses)?;
        }
        health::start(page, Part::Worker(address), stop.clone())?;
        let served = waystation_worker::serve(config, stop).await;
        served.map_err(|error| Failure::because("the worker failed", &error))
    })
}

/// Tests have a worker end where they like, in builds that are made for it.
fn arm_fault_point() -> Result<(), Failure> {
    #[cfg(any(debug_assertions, feature = "fault-points"))]
    if let Ok(point) = std::env::var("WAYSTATION_FAULT") {
        waystation_worker::fault::arm(&point).map_err(Failure::usage)?;
    }
    Ok(())
}

/// This process's environment. What is not UTF-8 keeps its place with replacement characters: it must still tell two
/// environments apart.
pub(crate) fn environment() -> Vec<(String, String)> {
    let text = |raw: std::ffi::OsString| raw.to_string_lossy().into_owned();
    std::env::vars_os()
        .map(|(name, value)| (text(name), text(value)))
        .collect()
}

/// Hosts of a TPU slice, from the list of their names that TPU machines have in the environment.
fn hosts(list: &str) -> Option<u32> {
    let names = list
        .split(',')
        .filter(|name| !name.trim().is_empty())
        .count();
    u32::try_from(names).ok().filter(|names| *names > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tpu_slice_has_as_many_workers_as_hosts() {
        assert_eq!(hosts(""), None);
        assert_eq!(hosts("t1v-n-0"), Some(1));
        assert_eq!(hosts("a,b, c,d,"), Some(4));
    }
}
