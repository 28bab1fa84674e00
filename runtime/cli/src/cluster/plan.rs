//! The flags of `run` and `up`, and the command lines of the children that follow from them. Pure but for
//! [`Plan::check`].

use std::{
    ffi::{OsStr, OsString},
    hash::{BuildHasher as _, RandomState},
    net::SocketAddr,
    path::{Path, PathBuf},
};

use clap::ArgAction;
use waystation_cache::config::Disk;

use super::shape::ShapeArgs;
use crate::{
    argv::parse_bool,
    checkpoint_args::CheckpointArgs,
    command::{compile_child::InChild, proxy::MAX_SESSIONS},
    error::Failure,
    large_transfers,
    local_transfers::LocalTransfers,
    location::{self, Opened},
    plugin::{self, PluginCollectives},
    python,
    record::RecordArgs,
    retention::RetentionArgs,
    size::{parse_bytes, parse_some_bytes},
    worker_cache::WorkerCacheArgs,
};

/// What the cluster consists of.
#[derive(Debug, clap::Args)]
pub(crate) struct ClusterArgs {
    /// Workers of each slice
    #[arg(long = "workers", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) workers: u32,
    /// Slices
    #[arg(long = "slices", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) slices: u32,
    #[command(flatten)]
    pub(crate) shape: ShapeArgs,
    /// Slices that may be missing while the command runs
    #[arg(long = "num_elastic_slices", value_name = "N", default_value_t = 0)]
    pub(crate) num_elastic_slices: u32,
    /// Seconds after which a silent worker is missed, and after as many again lost; slices are kept for so long for a proxy that is not heard of
    #[arg(long = "lease_seconds", value_name = "SECONDS", default_value_t = waystation_scheduler::DEFAULT_LEASE.as_secs(),
          value_parser = clap::value_parser!(u64).range(2..=3600))]
    pub(crate) lease_seconds: u64,
    /// Devices of each worker, for CPU plugins [default: the plugin's]
    #[arg(long = "devices_per_worker", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) devices_per_worker: Option<u32>,
    #[command(flatten)]
    pub(crate) cache: WorkerCacheArgs,
    #[command(flatten)]
    pub(crate) retention: RetentionArgs,
    /// PJRT plugin: cpu, cuda, tpu, or the path of a shared library
    #[arg(long = "pjrt_plugin", value_name = "NAME|PATH", default_value = "cpu")]
    pub(crate) pjrt_plugin: String,
    /// Python interpreter whose packages hold the plugin [default: the command's, the virtual environment's, or python3]
    #[arg(long = "python", value_name = "PATH")]
    pub(crate) python: Option<PathBuf>,
    /// Let the plugin join the workers of a slice to one client, and move the data of programs over them: each worker waits for all
    /// others of its slice, and ends with them [auto: never here, where
    /// the workers share the machine's devices]
    #[arg(long = "plugin_collectives", value_name = "auto|true|false", default_value = "auto", value_parser = PluginCollectives::parse)]
    pub(crate) plugin_collectives: PluginCollectives,
    /// LAPACK library for linear algebra with CPU plugins [default: SciPy's, or that of the Python package scipy-openblas32]
    #[arg(long = "lapack", value_name = "PATH")]
    pub(crate) lapack: Option<PathBuf>,
    /// Memory that arrays and executions may take of each device [default: no limit but the device's own]
    #[arg(long = "device_memory_bytes", value_name = "SIZE", value_parser = parse_some_bytes)]
    pub(crate) device_memory_bytes: Option<u64>,
    #[command(flatten)]
    pub(crate) checkpoints: CheckpointArgs,
    /// Compile in a child process, which a program that breaks the compiler ends in the worker's place [auto: with CPU plugins]
    #[arg(long = "compile_in_child", value_name = "auto|true|false", default_value = "auto", value_parser = InChild::parse)]
    pub(crate) compile_in_child: InChild,
    /// Host buffers that the proxy keeps in memory before they go to a temporary file
    #[arg(long = "host_buffer_memory", value_name = "SIZE", default_value = "2GiB", value_parser = parse_bytes)]
    pub(crate) host_buffer_memory: u64,
    /// Clients that the proxy serves at a time; more are refused
    #[arg(long = "max_sessions", value_name = "N", default_value_t = MAX_SESSIONS, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) max_sessions: u32,
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
    /// Directory in which clients leave large host buffers as files for the proxy to take [default: a temporary one]
    #[arg(long = "large_transfer_directory", value_name = "DIR")]
    pub(crate) large_transfer_directory: Option<PathBuf>,
    /// How JAX reaches the proxy: tcp, or an abstract Unix socket, which only processes of this user in this network
    /// namespace can use
    #[arg(
        long = "transport",
        value_name = "tcp|unix",
        default_value = "tcp",
        hide_possible_values = true,
        value_enum
    )]
    pub(crate) transport: Transport,
    #[command(flatten)]
    pub(crate) record: RecordArgs,
    /// Folder for the logs of proxy, resource manager and workers [default: a temporary one]
    #[arg(long = "log_dir", value_name = "FOLDER")]
    pub(crate) log_dir: Option<PathBuf>,
    /// Show those logs on stderr
    #[arg(long = "verbose", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", hide_default_value = true, value_parser = parse_bool, action = ArgAction::Set)]
    pub(crate) verbose: bool,
}

/// How a client reaches the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Transport {
    /// A loopback port.
    Tcp,
    /// An abstract Unix socket.
    Unix,
}

/// A checked cluster.
#[derive(Debug)]
pub(crate) struct Plan {
    slices: u32,
    workers: u32,
    shape: ShapeArgs,
    num_elastic_slices: u32,
    lease_seconds: u64,
    devices_per_worker: Option<u32>,
    location: Option<String>,
    disk: Option<Disk>,
    cache: WorkerCacheArgs,
    bucket_unwell: bool,
    retention: RetentionArgs,
    plugin: PathBuf,
    lapack: Option<PathBuf>,
    device_memory_bytes: Option<u64>,
    checkpoints: CheckpointArgs,
    plugin_collectives: PluginCollectives,
    compile_in_child: InChild,
    host_buffer_memory: u64,
    max_sessions: u32,
    local_transfers: LocalTransfers,
    /// `None`: a private one.
    large_transfer_directory: Option<PathBuf>,
    /// The abstract Unix socket of the proxy, if clients shall use one.
    unix_socket: Option<String>,
    record: RecordArgs,
    xla_flags: Vec<String>,
}

/// One child's part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    ResourceManager,
    Worker { slice: u32, task: u32 },
    Proxy,
}

impl Role {
    /// Names the child in messages and files.
    pub(super) fn name(self) -> String {
        match self {
            Role::ResourceManager => "resource-manager".to_owned(),
            Role::Worker { slice, task } => format!("worker-{slice}-{task}"),
            Role::Proxy => "proxy".to_owned(),
        }
    }
}

impl Plan {
    /// Looks at everything that the user could have to mend, before anything starts. `command`: first word of the
    /// command to run, whose interpreter may hold the plugin.
    ///
    /// # Errors
    /// [`Failure::usage`] with what to change.
    pub(crate) async fn check(
        args: &ClusterArgs,
        xla_flags: Vec<String>,
        command: Option<&OsStr>,
    ) -> Result<Plan, Failure> {
        let workers = args.shape.workers(args.workers)?;
        let devices_per_worker = args.shape.devices_per_worker(args.devices_per_worker)?;
        let accelerator = matches!(args.pjrt_plugin.as_str(), "cuda" | "tpu");
        let pjrt_plugin = match args.shape.simulate {
            Some(_) if accelerator => "cpu",
            _ => args.pjrt_plugin.as_str(),
        };
        plugin::options(pjrt_plugin, devices_per_worker)?;
        let python = args.python.clone().or_else(|| python::choose(command));
        let plugin = plugin::find(pjrt_plugin, python.as_deref())?;
        let lapack = plugin::lapack(args.lapack.clone(), pjrt_plugin, python.as_deref())?;
        if lapack.is_none() && pjrt_plugin == "cpu" {
            tracing::warn!(
                "no LAPACK: programs with linear algebra will fail; `pip install scipy-openblas32`, or name a library \
                 with --lapack=/path/libopenblas.so"
            );
        }
        if let Some(directory) = &args.large_transfer_directory {
            large_transfers::check(directory)?;
        }
        // What the file holds is the workers' to read again.
        drop(args.cache.sharing.signing_key()?);
        let record = args.record.checked().await?;
        // A bucket that is not well is warned of here, once; the workers begin without it, and do not ask again at once.
        let opened = location::open_and_ask(args.cache.gcs_scratch_location.as_deref()).await?;
        let (bucket, bucket_unwell) = match opened {
            None => (None, false),
            Some(Opened::Well(bucket)) => (Some(bucket), false),
            Some(Opened::Unwell(bucket)) => (Some(bucket), true),
        };
        Ok(Plan {
            slices: args.slices,
            workers,
            shape: args.shape.clone(),
            num_elastic_slices: args.num_elastic_slices,
            lease_seconds: args.lease_seconds,
            devices_per_worker,
            disk: args.cache.disk.disk()?,
            location: bucket.map(|bucket| bucket.location().to_string()),
            cache: args.cache.clone(),
            bucket_unwell,
            retention: args.retention.clone(),
            plugin,
            lapack,
            device_memory_bytes: args.device_memory_bytes,
            checkpoints: args.checkpoints.clone(),
            plugin_collectives: args.plugin_collectives,
            compile_in_child: args.compile_in_child,
            host_buffer_memory: args.host_buffer_memory,
            max_sessions: args.max_sessions,
            local_transfers: args.local_transfers,
            large_transfer_directory: args.large_transfer_directory.clone(),
            unix_socket: (args.transport == Transport::Unix).then(socket_name),
            record,
            xla_flags,
        })
    }

    /// The resource manager's part in the bucket.
    fn retention(&self) -> Vec<OsString> {
        let Some(location) = &self.location else {
            return Vec::new();
        };
        let retention = &self.retention;
        let mut arguments = vec![flag("gcs_scratch_location", location)];
        arguments.extend(retention.ttl.arguments());
        arguments.push(flag("enable_gcs_olm", retention.enable_gcs_olm.to_string()));
        let rules = retention.max_lifecycle_rules.to_string();
        arguments.push(flag("max_lifecycle_rules", rules));
        let mode = self.cache.sharing.cache_mode.as_str();
        arguments.push(flag("cache_mode", mode));
        arguments
    }

    /// Where clients leave large host buffers: as told, or a folder of the cluster's own.
    pub(super) fn large_transfer_directory(&self, folder: &Path) -> PathBuf {
        let told = self.large_transfer_directory.clone();
        told.unwrap_or_else(|| folder.join("large_transfers"))
    }

    /// The abstract Unix socket that clients shall use, if any.
    pub(super) fn unix_socket(&self) -> Option<&str> {
        self.unix_socket.as_deref()
    }

    /// (slice, task) of every worker.
    pub(super) fn places(&self) -> impl Iterator<Item = (u32, u32)> + use<> {
        let workers = self.workers;
        (0..self.slices).flat_map(move |slice| (0..workers).map(move |task| (slice, task)))
    }

    pub(super) fn workers_in_all(&self) -> usize {
        self.slices as usize * self.workers as usize
    }

    /// The child's command line. `manager`: where the resource manager listens, for all others, and for one that comes in
    /// its place. `folder`: the cluster's own.
    pub(super) fn arguments(
        &self,
        role: Role,
        manager: Option<SocketAddr>,
        folder: &Path,
    ) -> Vec<OsString> {
        let ready_file = ready_file(folder, role);
        let word = match role {
            Role::ResourceManager => "resource-manager",
            Role::Worker { .. } => "worker",
            Role::Proxy => "proxy",
        };
        let (port, manager) = match role {
            Role::ResourceManager => (manager.map_or(0, |manager| manager.port()), None),
            Role::Worker { .. } | Role::Proxy => (0, manager),
        };
        let mut arguments = vec![
            OsString::from(word),
            "--bind_address=127.0.0.1".into(),
            flag("server_port", port.to_string()),
        ];
        arguments.extend(["--parent_stdin".into(), flag("ready_file", ready_file)]);
        arguments.extend(self.shape.everyone());
        if let Some(manager) = manager {
            arguments.push(flag("resource_manager_address", manager.to_string()));
        }
        match role {
            Role::ResourceManager => {
                arguments.push(flag("slices", self.slices.to_string()));
                arguments.push(flag("workers", self.workers.to_string()));
                arguments.extend(self.shape.manager());
                arguments.push(flag("lease_seconds", self.lease_seconds.to_string()));
                arguments.extend(self.retention());
            }
            Role::Worker { slice, task } => {
                arguments.push(flag("slice", slice.to_string()));
                arguments.push(flag("task", task.to_string()));
                arguments.push(flag("slice_tasks", self.workers.to_string()));
                arguments.push(flag("pjrt_plugin", &self.plugin));
                arguments.extend(self.lapack.as_ref().map(|path| flag("lapack", path)));
                arguments.push(flag("plugin_collectives", self.plugin_collectives.as_str()));
                arguments.push(flag("compile_in_child", self.compile_in_child.as_str()));
                arguments.push(flag("local_transfers", self.local_transfers.as_str()));
                arguments.extend(
                    self.devices_per_worker
                        .map(|count| flag("devices_per_worker", count.to_string())),
                );
                arguments.extend(
                    self.device_memory_bytes
                        .map(|bytes| flag("device_memory_bytes", bytes.to_string())),
                );
                arguments.extend(self.checkpoints.flags());
                arguments.extend(self.retention.ttl.arguments());
                arguments.extend(self.bucket_unwell.then(|| "--bucket_unwell".into()));
                // A worker that is started again is to know what the one before died of; the next cluster is not.
                let state = folder.join("state");
                let (location, disk) = (self.location.as_deref(), self.disk.as_ref());
                arguments.extend(self.cache.flags(location, disk, state));
            }
            Role::Proxy => {
                arguments.push("--status_port=0".into());
                let elastic = self.num_elastic_slices.to_string();
                arguments.push(flag("num_elastic_slices", elastic));
                arguments.extend(self.record.flags());
                arguments.push(flag(
                    "host_buffer_memory",
                    self.host_buffer_memory.to_string(),
                ));
                arguments.push(flag("max_sessions", self.max_sessions.to_string()));
                arguments.push(flag("local_transfers", self.local_transfers.as_str()));
                arguments.push(flag(
                    "large_transfer_directory",
                    self.large_transfer_directory(folder),
                ));
                arguments.extend(
                    self.unix_socket
                        .as_ref()
                        .map(|name| flag("unix_socket", name)),
                );
                arguments.extend(self.xla_flags.iter().map(OsString::from));
            }
        }
        arguments
    }
}

/// Where a child says that it listens.
pub(super) fn ready_file(folder: &Path, role: Role) -> PathBuf {
    folder.join(format!("{}.ready", role.name()))
}

/// A name that no other cluster on this machine has.
fn socket_name() -> String {
    let random = RandomState::new().hash_one(std::process::id());
    format!("waystation-{}-{random:016x}", std::process::id())
}

fn flag(name: &str, value: impl AsRef<OsStr>) -> OsString {
    let mut flag = OsString::from(format!("--{name}="));
    flag.push(value);
    flag
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{self, Command};
    use crate::retention::{RenewBy, TtlArgs};
    use crate::sharing::CacheMode;

    fn retention() -> RetentionArgs {
        RetentionArgs {
            ttl: TtlArgs {
                cache_ttl: "12h".parse().unwrap(),
                cache_ttl_renew: RenewBy::CustomTime,
            },
            enable_gcs_olm: false,
            max_lifecycle_rules: 9,
        }
    }

    fn cache() -> WorkerCacheArgs {
        let flags = "--nocache_keep_hlo_text --cache_history=/h --cache_mode=read-only";
        let line = format!("waystation run {flags} -- true");
        match args::parse(line.split(' ').map(OsString::from).collect())
            .unwrap()
            .command
        {
            Command::Run(run) => run.cluster.cache,
            other => panic!("{other:?}"),
        }
    }

    fn record() -> RecordArgs {
        RecordArgs {
            record_programs: Some("file:///r".to_owned()),
            record_only: true,
        }
    }

    fn plan() -> Plan {
        Plan {
            slices: 2,
            workers: 3,
            shape: ShapeArgs::default(),
            num_elastic_slices: 1,
            lease_seconds: 5,
            devices_per_worker: Some(4),
            location: Some("file:///b".to_owned()),
            disk: Some(Disk {
                bytes: 8,
                ..Disk::new("/d")
            }),
            cache: cache(),
            bucket_unwell: true,
            retention: retention(),
            plugin: "/p.so".into(),
            lapack: Some("/l.so".into()),
            device_memory_bytes: Some(9),
            checkpoints: CheckpointArgs {
                checkpoint_host_memory: 11,
                checkpoint_format: waystation_checkpoint::Layout::OcdbtZarr2,
                checkpoint_compression: Some(waystation_checkpoint::zarr::Codec::Raw),
            },
            plugin_collectives: PluginCollectives::Yes,
            compile_in_child: InChild::No,
            host_buffer_memory: 7,
            max_sessions: 9,
            local_transfers: LocalTransfers::Off,
            large_transfer_directory: None,
            unix_socket: Some("s".to_owned()),
            record: record(),
            xla_flags: vec!["--xla_a=1".to_owned()],
        }
    }

    fn parsed(role: Role) -> args::Parsed {
        let mut line = vec![OsString::from("waystation")];
        line.extend(plan().arguments(role, Some("127.0.0.1:9".parse().unwrap()), Path::new("/r")));
        args::parse(line).unwrap()
    }

    #[test]
    fn the_children_understand_their_command_lines() {
        let Command::Worker(worker) = parsed(Role::Worker { slice: 1, task: 2 }).command else {
            panic!("not a worker");
        };
        assert_eq!(
            (
                worker.slice,
                worker.task,
                worker.slice_tasks,
                worker.server_port
            ),
            (1, 2, Some(3), 0)
        );
        assert_eq!(worker.resource_manager_address, "127.0.0.1:9");
        assert_eq!(
            (worker.pjrt_plugin.as_str(), worker.devices_per_worker),
            ("/p.so", Some(4))
        );
        assert_eq!(
            worker.cache.gcs_scratch_location.as_deref(),
            Some("file:///b")
        );
        let disk = worker.cache.disk.disk().unwrap().unwrap();
        assert_eq!((disk.folder.as_path(), disk.bytes), (Path::new("/d"), 8));
        assert_eq!(worker.cache.cache, cache().cache);
        assert!(!worker.cache.cache.cache_keep_hlo_text);
        assert!(worker.bucket_unwell);
        assert_eq!(worker.ttl, retention().ttl);
        assert_eq!(worker.cache.sharing.cache_mode, CacheMode::ReadOnly);
        assert_eq!(
            worker.cache.sharing.state_dir.as_deref(),
            Some(Path::new("/r/state"))
        );
        assert_eq!(worker.lapack.as_deref(), Some(Path::new("/l.so")));
        assert_eq!(worker.device_memory_bytes, Some(9));
        assert_eq!(worker.checkpoints, plan().checkpoints);
        assert_eq!(worker.plugin_collectives, PluginCollectives::Yes);
        assert_eq!(worker.compile_in_child, InChild::No);
        assert_eq!(worker.local_transfers, LocalTransfers::Off);
        assert!(worker.role.parent_stdin);

        let proxy = parsed(Role::Proxy);
        assert_eq!(proxy.xla_flags, ["--xla_a=1"]);
        assert!(proxy.warnings.is_empty());
        let Command::Proxy(proxy) = proxy.command else {
            panic!("not a proxy");
        };
        assert_eq!(
            (proxy.role.status_port, proxy.host_buffer_memory),
            (Some(0), 7)
        );
        assert_eq!(proxy.max_sessions, 9);
        assert_eq!(proxy.num_elastic_slices, 1);
        assert_eq!(proxy.local_transfers, LocalTransfers::Off);
        assert_eq!(
            proxy.large_transfer_directory.as_deref(),
            Some(Path::new("/r/large_transfers"))
        );
        assert_eq!(proxy.unix_socket.as_deref(), Some("s"));
        assert_eq!(proxy.record, record());

        let line = plan().arguments(Role::ResourceManager, None, Path::new("/r"));
        let line = std::iter::once("w".into()).chain(line).collect();
        let Command::ResourceManager(manager) = args::parse(line).unwrap().command else {
            panic!("not a resource manager");
        };
        assert_eq!(manager.server_port, 0);
        assert_eq!((manager.slices, manager.workers), (2, Some(3)));
        assert_eq!(manager.lease_seconds, 5);
        assert!(manager.role.bind_address.is_loopback());
        assert_eq!(manager.retention, retention());
        assert_eq!(manager.cache_mode, CacheMode::ReadOnly);
        assert_eq!(manager.gcs_scratch_location.as_deref(), Some("file:///b"));
        let Command::ResourceManager(again) = parsed(Role::ResourceManager).command else {
            panic!("not a resource manager");
        };
        assert_eq!(again.server_port, 9);
    }

    #[test]
    fn every_place_has_a_worker() {
        let places: Vec<_> = plan().places().collect();
        assert_eq!(places, [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]);
        assert_eq!(plan().workers_in_all(), places.len());
    }
}
