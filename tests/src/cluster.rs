//! A whole cluster inside the test's process: resource manager, workers with the real CPU plugin, proxy. Only sockets on
//! loopback lie between them, so a test sees what separate processes see, without their start-up time.

use std::{
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinHandle,
};
use tokio_util::sync::CancellationToken;
use waystation_pjrt::OptionValue;
use waystation_proto::waystation::worker::{
    WorkerStatus, WorkerStatusRequest, worker_client::WorkerClient,
};

/// A running cluster; it stops when dropped.
pub struct Cluster {
    /// Where clients dial, `host:port`.
    pub proxy: String,
    status: SocketAddr,
    workers: Vec<SocketAddr>,
    manager: Manager,
    /// Stop the workers one by one.
    stops: Vec<CancellationToken>,
    parts: Parts,
    stop: CancellationToken,
}

/// The resource manager.
struct Manager {
    workers: u32,
    slices: u32,
    lease: Duration,
    stop: CancellationToken,
    served: JoinHandle<Result<(), waystation_scheduler::Error>>,
}

impl Manager {
    fn start(
        listener: TcpListener,
        slices: u32,
        workers: u32,
        lease: Duration,
        stop: CancellationToken,
    ) -> Self {
        let mut config = waystation_scheduler::Config::new(listener);
        config.expected_slices = slices;
        config.workers_per_slice = Some(workers);
        config.lease = lease;
        Self {
            workers,
            slices,
            lease,
            served: tokio::spawn(waystation_scheduler::serve(config, stop.clone())),
            stop,
        }
    }
}

/// What workers are made of.
struct Parts {
    manager: String,
    plugin: PathBuf,
    workers: u32,
    devices: i64,
}

impl Parts {
    fn worker(&self, listener: TcpListener, task: u32) -> waystation_worker::Config {
        let devices = OptionValue::Int64(self.devices);
        waystation_worker::Config {
            listener,
            advertise: None,
            resource_manager: Some(self.manager.clone()),
            slice: 0,
            task,
            slice_tasks: self.workers,
            simulated: None,
            plugin: self.plugin.clone(),
            plugin_options: vec![("cpu_device_count".to_owned(), devices)],
            plugin_collectives: false,
            lapack: None,
            cache: waystation_cache::Config::default(),
            environment: Vec::new(),
            compile_child: None,
            limits: waystation_worker::Limits::default(),
        }
    }
}

fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").expect("a free loopback port")
}

/// The Python whose packages hold the CPU plugin.
fn python() -> PathBuf {
    match std::env::var_os("WAYSTATION_TEST_PYTHON") {
        Some(path) => path.into(),
        None => PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../.venv/bin/python")),
    }
}

/// The library of the mock, which lies where the tests' own do.
///
/// # Panics
/// When it is not there.
pub fn mock_plugin() -> PathBuf {
    // So that it is built.
    let _ = waystation_mock_plugin::GetPjrtApi as extern "C" fn() -> _;
    let own = std::env::current_exe().expect("a path");
    let mut folders = own.ancestors().skip(1);
    let found = folders.find_map(|folder| {
        let library = folder.join("libwaystation_mock_plugin.so");
        library.is_file().then_some(library)
    });
    found.expect("the mock's library is built with the tests")
}

impl Cluster {
    /// Starts `workers` workers of one slice with `devices` devices each.
    ///
    /// # Panics
    /// When the CPU plugin is not installed (`make venv` installs it) or a part cannot start.
    pub async fn start(workers: u32, devices: i64) -> Self {
        Self::start_with(workers, devices, |_| {}).await
    }

    /// Like [`Self::start`], with the proxy's configuration changed.
    ///
    /// # Panics
    /// As [`Self::start`].
    pub async fn start_with(
        workers: u32,
        devices: i64,
        change: impl FnOnce(&mut waystation_proxy::Config),
    ) -> Self {
        Self::start_changed(workers, devices, |_| {}, change).await
    }

    /// Like [`Self::start`], with each worker's configuration changed.
    ///
    /// # Panics
    /// As [`Self::start`].
    pub async fn start_with_workers(
        workers: u32,
        devices: i64,
        change: impl Fn(&mut waystation_worker::Config),
    ) -> Self {
        Self::start_changed(workers, devices, change, |_| {}).await
    }

    /// Like [`Self::start`], with a mock of a plugin that has collectives of its own between the workers.
    ///
    /// # Panics
    /// As [`Self::start`].
    pub async fn start_native(workers: u32, devices: i64) -> Self {
        Self::start_with_workers(workers, devices, |config| {
            config.plugin = mock_plugin();
            config.plugin_collectives = true;
        })
        .await
    }

    /// Like [`Self::start`], with both changed.
    ///
    /// # Panics
    /// As [`Self::start`].
    pub async fn start_changed(
        workers: u32,
        devices: i64,
        change_worker: impl Fn(&mut waystation_worker::Config),
        change_proxy: impl FnOnce(&mut waystation_proxy::Config),
    ) -> Self {
        let lease = waystation_scheduler::DEFAULT_LEASE;
        Self::start_leased(lease, workers, devices, change_worker, change_proxy).await
    }

    /// Like [`Self::start_changed`], with a lease.
    ///
    /// # Panics
    /// As [`Self::start`].
    pub async fn start_leased(
        lease: Duration,
        workers: u32,
        devices: i64,
        change_worker: impl Fn(&mut waystation_worker::Config),
        change_proxy: impl FnOnce(&mut waystation_proxy::Config),
    ) -> Self {
        let stop = CancellationToken::new();
        let manager = listener();
        let manager_address = manager.local_addr().expect("bound").to_string();
        let manager = Manager::start(manager, 1, workers, lease, stop.child_token());

        let python = python();
        let plugin = tokio::task::spawn_blocking(move || {
            waystation_pjrt::discover::resolve("cpu", Some(&python))
        })
        .await
        .expect("no panic")
        .expect("the CPU plugin is installed; run `make venv` or set WAYSTATION_TEST_PYTHON");
        let parts = Parts {
            manager: manager_address.clone(),
            plugin,
            workers,
            devices,
        };
        let mut addresses = Vec::new();
        let mut stops = Vec::new();
        for task in 0..workers {
            let listener = listener();
            addresses.push(listener.local_addr().expect("bound"));
            let mut config = parts.worker(listener, task);
            change_worker(&mut config);
            let own = stop.child_token();
            tokio::spawn(waystation_worker::serve(config, own.clone()));
            stops.push(own);
        }
        let listener = listener();
        let proxy = listener.local_addr().expect("bound").to_string();
        let mut config = waystation_proxy::Config::new(listener, manager_address);
        let page = self::listener();
        let status = page.local_addr().expect("bound");
        config.status_listener = Some(page);
        change_proxy(&mut config);
        tokio::spawn(waystation_proxy::serve(config, stop.clone()));
        Self {
            proxy,
            status,
            workers: addresses,
            manager,
            stops,
            parts,
            stop,
        }
    }

    /// Where the resource manager listens, `host:port`.
    pub fn manager(&self) -> &str {
        &self.parts.manager
    }

    /// Ends the resource manager and starts another one in its place, which knows nothing of it.
    ///
    /// # Panics
    /// When the first one does not end, or its port cannot be had again.
    pub async fn restart_manager(&mut self) {
        self.restart_manager_with_slices(self.manager.slices).await;
    }

    /// Like [`Self::restart_manager`], with another number of slices.
    ///
    /// # Panics
    /// As [`Self::restart_manager`].
    pub async fn restart_manager_with_slices(&mut self, slices: u32) {
        let Manager { workers, lease, .. } = self.manager;
        self.manager.stop.cancel();
        let served = (&mut self.manager.served).await;
        served.expect("no panic").expect("it ends in order");
        let listener = TcpListener::bind(&self.parts.manager).expect("the port is free again");
        self.manager = Manager::start(listener, slices, workers, lease, self.stop.child_token());
    }

    /// Starts another proxy, which ends with its token or the cluster; gives where clients dial it.
    ///
    /// # Panics
    /// When there is no free port.
    pub fn another_proxy(&self) -> (String, CancellationToken) {
        let listener = listener();
        let address = listener.local_addr().expect("bound").to_string();
        let config = waystation_proxy::Config::new(listener, self.parts.manager.clone());
        let stop = self.stop.child_token();
        tokio::spawn(waystation_proxy::serve(config, stop.clone()));
        (address, stop)
    }

    /// Ends a worker, by its task.
    pub fn lose(&mut self, task: usize) {
        self.stops[task].cancel();
    }

    /// Starts another worker in a lost one's place.
    ///
    /// # Panics
    /// Where there was none.
    pub fn replace(&mut self, task: usize) {
        self.replace_changed(task, |_| {});
    }

    /// Like [`Self::replace`], with the worker's configuration changed.
    ///
    /// # Panics
    /// As [`Self::replace`].
    pub fn replace_changed(
        &mut self,
        task: usize,
        change: impl FnOnce(&mut waystation_worker::Config),
    ) {
        (self.workers[task], self.stops[task]) = self.launch(task, change);
    }

    /// Starts one more worker, which is in no place of those that there were.
    ///
    /// # Panics
    /// When there is no free port.
    pub fn add(&mut self, change: impl FnOnce(&mut waystation_worker::Config)) {
        let (address, stop) = self.launch(0, change);
        self.workers.push(address);
        self.stops.push(stop);
    }

    fn launch(
        &self,
        task: usize,
        change: impl FnOnce(&mut waystation_worker::Config),
    ) -> (SocketAddr, CancellationToken) {
        let listener = listener();
        let address = listener.local_addr().expect("bound");
        let number = u32::try_from(task).expect("few");
        let own = self.stop.child_token();
        let mut config = self.parts.worker(listener, number);
        change(&mut config);
        tokio::spawn(waystation_worker::serve(config, own.clone()));
        (address, own)
    }

    /// Connects a client.
    ///
    /// # Panics
    /// When the proxy refuses.
    pub async fn client(&self) -> waystation_client::Client {
        waystation_client::Client::connect(&self.proxy)
            .await
            .expect("the proxy takes clients")
    }

    /// The proxy's status page.
    ///
    /// # Panics
    /// When there is none.
    pub async fn status(&self) -> serde_json::Value {
        let ask = async {
            let mut page = TcpStream::connect(self.status).await?;
            page.write_all(b"GET /status HTTP/1.0\r\n\r\n").await?;
            let mut answer = String::new();
            page.read_to_string(&mut answer).await?;
            Ok::<_, std::io::Error>(answer)
        };
        let answer = ask.await.expect("the page answers");
        let (_, body) = answer.split_once("\r\n\r\n").expect("an HTTP answer");
        serde_json::from_str(body).expect("JSON")
    }

    /// The counters of each worker.
    ///
    /// # Panics
    /// When a worker does not answer.
    pub async fn worker_status(&self) -> Vec<WorkerStatus> {
        let mut all = Vec::new();
        for address in &self.workers {
            let mut client = WorkerClient::connect(format!("http://{address}"))
                .await
                .expect("the worker listens");
            all.push(
                client
                    .get_status(WorkerStatusRequest {})
                    .await
                    .expect("the worker answers")
                    .into_inner(),
            );
        }
        all
    }

    /// Waits until the workers hold no array any more.
    ///
    /// # Panics
    /// When they still do after `limit`.
    pub async fn wait_until_empty(&self, limit: Duration) {
        let deadline = tokio::time::Instant::now() + limit;
        loop {
            let (mut bytes, mut shards, mut taken) = (0, 0, 0);
            for status in self.worker_status().await {
                bytes += status.array_bytes;
                shards += status.shards;
                taken += status.device_memory_bytes.iter().sum::<u64>();
            }
            if (bytes, shards, taken) == (0, 0, 0) {
                return;
            }
            assert!(
                tokio::time::Instant::now() < deadline,
                "the workers still hold {bytes} bytes in {shards} shards, and {taken} bytes of devices, after {limit:?}"
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}
