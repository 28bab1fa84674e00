//! `resource-manager`.

use std::time::Duration;

use waystation_scheduler::InstanceType;

use crate::{
    args::RoleArgs,
    error::Failure,
    health::{self, Part},
    lifetime, listen,
    retention::{Retention, RetentionArgs},
    sharing::CacheMode,
    simulate,
};

/// Port of Pathways' resource manager.
const DEFAULT_PORT: u16 = 29001;

/// Register workers, watch them, and give them to a proxy
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Port to listen on; 0 takes a free one
    #[arg(long = "server_port", value_name = "PORT", default_value_t = DEFAULT_PORT)]
    pub(crate) server_port: u16,
    /// Slices of a full cluster
    #[arg(long = "slices", visible_alias = "instance_count", value_name = "N", default_value_t = 1,
          value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) slices: u32,
    /// What each slice is: cpu:DEVICES, or a type of TPU slices such as tpuv6e:4x4
    #[arg(long = "instance_type", value_name = "TYPE:TOPOLOGY")]
    pub(crate) instance_type: Option<InstanceType>,
    /// Workers of each slice [default: the machines of --instance_type]; without either the first worker's --slice_tasks decides when not given
    #[arg(long = "workers", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65536))]
    pub(crate) workers: Option<u32>,
    /// Seconds after which a silent worker is missed, and after as many again lost; slices are kept for so long for a proxy that is not heard of
    #[arg(long = "lease_seconds", value_name = "SECONDS", default_value_t = waystation_scheduler::DEFAULT_LEASE.as_secs(),
          value_parser = clap::value_parser!(u64).range(2..=3600))]
    pub(crate) lease_seconds: u64,
    /// Bucket of the compiled programs, whose lifecycle is seen to
    #[arg(long = "gcs_scratch_location", value_name = "LOCATION")]
    pub(crate) gcs_scratch_location: Option<String>,
    /// What the workers do with the bucket: unless it is read-write, nothing in it is removed or changed
    #[arg(
        long = "cache_mode",
        value_name = "MODE",
        default_value = "read-write",
        hide_possible_values = true,
        value_enum
    )]
    pub(crate) cache_mode: CacheMode,
    #[command(flatten)]
    pub(crate) retention: RetentionArgs,
    #[command(flatten)]
    pub(crate) role: RoleArgs,
}

/// Serves until told to end.
pub(crate) fn run(args: Args) -> Result<(), Failure> {
    simulate::announce(args.role.simulate);
    let location = args.gcs_scratch_location.as_deref();
    let retention = Retention::new(location, args.cache_mode, &args.retention)?;
    let listener = listen::bind(args.role.bind_address, args.server_port, "--server_port")?;
    let address = listen::address(&listener)?;
    let mut addresses = vec![address];
    let page = health::bind(&args.role, &mut addresses)?;
    let config = waystation_scheduler::Config {
        expected_slices: args.slices,
        instance_type: args.instance_type,
        workers_per_slice: args.workers,
        lease: Duration::from_secs(args.lease_seconds),
        ..waystation_scheduler::Config::new(listener)
    };
    lifetime::run(args.role.parent_stdin, async |stop| {
        if let Some(file) = &args.role.ready_file {
            listen::write_ready_file(file, &addresses)?;
        }
        health::start(page, Part::ResourceManager(address), stop.clone())?;
        // Beside serving, which waits for none of it.
        let retention = retention.map(|retention| tokio::spawn(retention.keep()));
        let served = waystation_scheduler::serve(config, stop).await;
        if let Some(task) = retention {
            task.abort();
        }
        served.map_err(|error| Failure::because("the resource manager failed", &error))
    })
}
