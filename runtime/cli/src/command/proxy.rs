//! `proxy`.

use std::path::PathBuf;

use tokio::sync::oneshot;
use waystation_proxy::Error;
use waystation_scheduler::InstanceType;

use crate::{
    args::RoleArgs, error::Failure, health, large_transfers, lifetime, listen,
    local_transfers::LocalTransfers, record::RecordArgs, simulate, size::parse_bytes, xla_flags,
};

/// Port of Pathways' proxy.
const DEFAULT_PORT: u16 = 29000;

/// Clients at a time, unless told otherwise.
#[expect(clippy::cast_possible_truncation, reason = "some thousand")]
pub(crate) const MAX_SESSIONS: u32 = waystation_proxy::DEFAULT_MAX_SESSIONS as u32;

/// Serve JAX processes: the IFRT proxy service in front of a cluster's workers
///
/// Flags named --xla_... and those in the variable XLA_FLAGS go to the compiler with every program; its plugin is asked
/// about them before a client is served. Flags that launchers of Pathways add and that have no meaning here are taken with
/// a warning.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Port to listen on; 0 takes a free one
    #[arg(long = "server_port", value_name = "PORT", default_value_t = DEFAULT_PORT)]
    pub(crate) server_port: u16,
    /// Also listen on the abstract Unix socket of this name, for JAX processes of the same user on this machine
    /// (JAX_BACKEND_TARGET=grpc://unix-abstract:NAME)
    #[arg(long = "unix_socket", value_name = "NAME", value_parser = listen::parse_socket_name)]
    pub(crate) unix_socket: Option<String>,
    /// The resource manager that gives this proxy its workers
    #[arg(
        long = "resource_manager_address",
        value_name = "HOST:PORT",
        required = true, value_parser = listen::parse_host_port
    )]
    pub(crate) resource_manager_address: String,
    /// Slices that may be missing, from the start on; what needs them fails with DATA_LOSS until they are there
    #[arg(long = "num_elastic_slices", value_name = "N", default_value_t = 0)]
    pub(crate) num_elastic_slices: u32,
    /// Slices to take out of the resource manager's, by their types, as in tpuv6e:2x2,tpuv6e:2x2; other proxies may take
    /// others [default: all of them]
    #[arg(
        long = "virtual_slices",
        value_name = "TYPE:TOPOLOGY,...",
        value_delimiter = ','
    )]
    pub(crate) virtual_slices: Vec<InstanceType>,
    /// Host buffers kept in memory before they go to a temporary file
    #[arg(long = "host_buffer_memory", value_name = "SIZE", default_value = "2GiB", value_parser = parse_bytes)]
    pub(crate) host_buffer_memory: u64,
    /// Clients served at a time; more are refused
    #[arg(long = "max_sessions", value_name = "N", default_value_t = MAX_SESSIONS, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_sessions: u32,
    /// Directory in which clients leave large host buffers as files for this proxy to take [default: none]
    #[arg(long = "large_transfer_directory", value_name = "DIR")]
    pub(crate) large_transfer_directory: Option<PathBuf>,
    /// auto: array bytes go between a proxy and workers on one machine through memory that both see; off: they are sent
    #[arg(
        long = "local_transfers",
        value_name = "auto|off",
        default_value = "auto",
        hide_possible_values = true,
        value_enum
    )]
    pub(crate) local_transfers: LocalTransfers,
    #[command(flatten)]
    pub(crate) record: RecordArgs,
    #[command(flatten)]
    pub(crate) role: RoleArgs,
}

/// Serves until told to end.
pub(crate) fn run(args: Args, own_flags: Vec<String>) -> Result<(), Failure> {
    simulate::announce(args.role.simulate);
    // The command line wins.
    let mut flags = xla_flags::of_environment(std::env::var_os("XLA_FLAGS"))?;
    flags.extend(own_flags);
    let flags = simulate::known_flags(args.role.simulate, flags);
    let listener = listen::bind(args.role.bind_address, args.server_port, "--server_port")?;
    let mut addresses = vec![listen::address(&listener)?];
    let mut config = waystation_proxy::Config::new(listener, args.resource_manager_address);
    config.status_listener = health::bind(&args.role, &mut addresses)?;
    if let Some(name) = &args.unix_socket {
        config.unix_listener = Some(listen::bind_abstract(name, "--unix_socket")?);
    }
    config.elastic_slices = args.num_elastic_slices;
    config.virtual_slices = args
        .virtual_slices
        .iter()
        .map(ToString::to_string)
        .collect();
    config.host_buffer_memory_bytes = args.host_buffer_memory;
    config.max_sessions = args.max_sessions as usize;
    if let Some(directory) = &args.large_transfer_directory {
        large_transfers::check(directory)?;
    }
    config.large_transfer_directory = args.large_transfer_directory;
    config.local_transfers = args.local_transfers == LocalTransfers::Auto;
    let asks = !flags.is_empty();
    config.xla_flags = flags;
    let (sender, taken) = oneshot::channel();
    config.flags_taken = Some(sender);
    config.release_memory = waystation_pjrt::release_free_heap;
    lifetime::run(args.role.parent_stdin, async |stop| {
        config.recording = args.record.recording().await?;
        // A proxy whose flags may yet be refused is not ready.
        let ready = async {
            if asks && taken.await.is_err() {
                return Ok(());
            }
            match &args.role.ready_file {
                Some(file) => listen::write_ready_file(file, &addresses),
                None => Ok(()),
            }
        };
        let served = async {
            let served = waystation_proxy::serve(config, stop).await;
            served.map_err(|error| match error {
                Error::Flags(why) => Failure::usage(why),
                error => Failure::because("the proxy failed", &error),
            })
        };
        tokio::try_join!(ready, served).map(|_| ())
    })
}
