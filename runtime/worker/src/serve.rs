//! Brings a worker up, serves until the token is cancelled, and takes it down.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::sync::OnceCell;
use tokio_util::sync::CancellationToken;
use waystation_cache::{Cache, platform};
use waystation_pjrt::Client;
use waystation_proto::waystation::{scheduler::Hello, worker::worker_server::WorkerServer};

use crate::{
    child::Compilers,
    collectives::Collectives,
    compiler::{Compiler, Identity},
    config::Config,
    core::{Core, Event},
    counters::Counters,
    dispatch,
    error::{Error, chain},
    group::{Group, Place},
    heap,
    hlo::Hlo,
    incoming,
    lease::Lease,
    ledger::Ledger,
    linalg,
    peers::{CONNECTION_WINDOW_BYTES, Peers, STREAM_WINDOW_BYTES},
    plugin::{self, Opened, Spec},
    register,
    report::Report,
    segments::Segments,
    service::Service,
    slabs::{EngineSlabs, Slabs},
    spanning::Spanning,
    usage::Clients,
    wide::Wide,
};

/// Runs a worker until `stop` is cancelled. Loads the plugin first, then serves, then registers with the resource manager.
///
/// # Errors
///
/// When the plugin, its client or the listener cannot be used, or the worker breaks while it runs.
pub async fn serve(config: Config, stop: CancellationToken) -> Result<(), Error> {
    let listens = config.listener.local_addr().map_err(Error::Listener)?;
    let address = config
        .advertise
        .clone()
        .unwrap_or_else(|| listens.to_string());
    let group = tokio::select! {
        group = group(&config, &address) => group?,
        () = stop.cancelled() => return Ok(()),
    };
    let spec = Spec {
        path: config.plugin.clone(),
        options: config.plugin_options.clone(),
        lapack: config.lapack.clone(),
        group: group.clone(),
    };
    let environment = config.environment.clone();
    let opening = move || {
        let (mut opened, digest, spec) = open(spec, &environment)?;
        if let Collectives::Hooked = opened.collectives
            && let Err(error) = opened.client.plugin().check_spanning()
        {
            opened.collectives = Collectives::None(error.to_string());
        }
        Ok::<_, Error>((opened, digest, spec))
    };
    let mut opening = tokio::task::spawn_blocking(opening);
    let opened = tokio::select! {
        opened = &mut opening => opened,
        () = stop.cancelled() => {
            if let Some(group) = &group {
                // The plugin may wait for the others.
                group.end("it has been told to end");
            }
            opening.await
        }
    };
    let opened = opened.map_err(|error| Error::Dispatch {
        what: format!("lost the plugin while it was loaded: {error}"),
    })?;
    if let (Err(error), Some(group)) = (&opened, &group) {
        if stop.is_cancelled() {
            return Ok(());
        }
        group.end(&chain(error));
    }
    let (opened, digest, spec) = opened?;
    let counters = Arc::new(Counters::default());
    // A child would be one process more than the plugin joins.
    let child = config.compile_child.filter(|_| group.is_none());
    let compilers = Compilers::new(child, &spec, &opened, &counters);
    let Opened {
        client,
        targets,
        collectives,
    } = opened;
    let devices = client.devices().len();
    let local = config.limits.segments > 0;
    let spanning = Spanning::new(collectives, listens, &address, devices, local);
    let wide = Wide::new(Arc::clone(client.plugin()), &spec.options);
    let identity = identity(&client, &digest, targets, config.environment.clone());
    let hlo = Hlo::new(config.cache.keep_hlo_text, place(config.slice, config.task));
    let cache = Cache::open(config.cache);
    let report = Report {
        plugin_path: config.plugin.display().to_string(),
        platform: format!("{} {}", client.platform_name(), client.platform_version()),
        cache_location: cache.location().to_owned(),
    };
    let hello = Hello {
        address: address.clone(),
        slice: config.slice,
        task: config.task,
        link_version: waystation_proto::LINK_VERSION,
        build_id: waystation_proto::BUILD_ID.to_owned(),
        inventory: Some(register::inventory(&client, digest, config.simulated)),
        slice_tasks: config.slice_tasks,
        cpu_features: register::cpu_features(&client),
        lease_epoch: 0,
        last_epoch: 0,
        again: false,
    };

    let compiler = Compiler::new(
        client.clone(),
        compilers,
        cache,
        identity,
        hlo,
        Arc::clone(&counters),
        config.limits.compiles,
        wide,
        group.clone(),
    );
    // Unbounded for the plugin's threads, which must not wait; what fills it is bounded by the ops taken off the stream.
    let (events, receiver) = crossbeam_channel::unbounded();
    let slabs = Slabs::new(config.limits.checkpoint_host_memory);
    let checkpoints = waystation_checkpoint::Engine::new(waystation_checkpoint::Config {
        host_memory_bytes: config.limits.checkpoint_host_memory,
        format: config.limits.checkpoint_format,
        process: process(config.slice, config.task),
        buffers: Some(Arc::new(EngineSlabs(Arc::clone(&slabs)))),
        ..waystation_checkpoint::Config::default()
    });
    let ledger = Ledger::new(client.devices().len(), config.limits.device_memory_bytes);
    let segments = Segments::new(config.limits.segments);
    let lease = Arc::new(Lease::new());
    let core = Arc::new(Core {
        client,
        counters,
        ledger,
        clients: Clients::default(),
        limits: config.limits,
        runtime: tokio::runtime::Handle::current(),
        events,
        compiler: Arc::new(compiler),
        peers: Peers::new(Arc::clone(&slabs)),
        offers: Arc::default(),
        segments,
        checkpoints,
        slabs,
        spanning,
        lease,
        place: format!("slice {} task {}", config.slice, config.task),
        reads_parts: OnceCell::new(),
        writing: Arc::default(),
    });
    let thread = dispatch::start(Arc::clone(&core), receiver).map_err(|error| Error::Dispatch {
        what: format!("could not be started: {error}"),
    })?;

    config
        .listener
        .set_nonblocking(true)
        .map_err(Error::Listener)?;
    let listener = tokio::net::TcpListener::from_std(config.listener).map_err(Error::Listener)?;
    let (incoming, _arrays) = incoming::split(listener, Arc::clone(&core.offers));
    let service = Service {
        core: Arc::clone(&core),
        report,
        stop: stop.clone(),
    };
    let (told, draining, limit) = (stop.clone(), Arc::clone(&core), core.limits.grace);
    // What a proxy still waits for may take new connections.
    let drained = async move {
        told.cancelled().await;
        let _ = tokio::time::timeout(limit, draining.lease.no_streams()).await;
    };
    let server = tonic::transport::Server::builder()
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .http2_keepalive_interval(Some(Duration::from_secs(10)))
        .http2_keepalive_timeout(Some(Duration::from_secs(20)))
        .add_service(
            WorkerServer::new(service)
                .max_decoding_message_size(usize::MAX)
                .max_encoding_message_size(usize::MAX),
        )
        .serve_with_incoming_shutdown(incoming, drained);
    tracing::info!(
        address,
        devices = core.client.devices().len(),
        "the worker serves"
    );
    let registration = config.resource_manager.map(|manager| {
        let (epochs, stop) = (Arc::clone(core.lease.epochs()), stop.clone());
        let publish = publish(group.clone(), core.client.clone());
        tokio::spawn(register::stay_registered(
            manager, hello, epochs, stop, publish,
        ))
    });

    tokio::spawn(heap::watch(
        Arc::clone(&core.counters),
        core.checkpoints.clone(),
        Arc::clone(&core.slabs),
        Arc::clone(&core.segments),
        stop.clone(),
    ));
    let compiler = Arc::clone(&core.compiler);
    tokio::spawn(async move { compiler.warm().await });

    let grace = core.limits.grace;
    let mut died = std::pin::pin!(watch_thread(thread));
    let ended = tokio::select! {
        ended = server => ended.map_err(Error::Server),
        what = &mut died => return Err(Error::Dispatch { what }),
        why = gone(group.as_deref()) => {
            // What runs on the devices may never end, and the client's end would wait for it.
            std::mem::forget(core.client.clone());
            Err(Error::Group { why })
        }
        // Calls that do not end by themselves are dropped with the server.
        () = async { stop.cancelled().await; tokio::time::sleep(grace).await } => Ok(()),
    };
    stop.cancel();
    if let Some(group) = &group {
        group.end("it has been told to end");
    }
    if let Some(registration) = registration {
        registration.abort();
    }
    // Only a thread that is gone takes no event.
    let _ = core.events.send(Event::Stop);
    core.compiler.stop();
    core.compiler.finish(grace).await;
    // The process must not end inside a call of the plugin.
    if tokio::time::timeout(grace, died).await.is_err() {
        tracing::warn!("the plugin still works on the last op; the worker ends without it");
    }
    ended
}

/// The group that the plugin is to join to one client, when it has formed.
async fn group(config: &Config, address: &str) -> Result<Option<Arc<Group>>, Error> {
    let Some(manager) = config
        .resource_manager
        .as_ref()
        .filter(|_| config.plugin_collectives)
    else {
        return Ok(None);
    };
    tracing::info!(
        slice = config.slice,
        task = config.task,
        "waiting for the other workers of the slice, which the plugin joins to one client"
    );
    let place = Place {
        manager: manager.clone(),
        slice: config.slice,
        task: config.task,
        slice_tasks: config.slice_tasks,
        address: address.to_owned(),
    };
    Group::form(place).await.map_err(|why| Error::Group { why })
}

/// Tells the group under which numbers clients know this worker's devices, whenever the resource manager has said it.
fn publish(group: Option<Arc<Group>>, client: Client) -> impl Fn(i32) + Send + 'static {
    move |first_device_id| {
        let Some(group) = group.clone() else {
            return;
        };
        let client = client.clone();
        tokio::task::spawn_blocking(move || {
            if let Err(why) = group.publish(&client, first_device_id) {
                group.end(&format!(
                    "the other workers were not told of this one's devices: {why}"
                ));
            }
        });
    }
}

/// Why the group is gone, when it is; never without one.
async fn gone(group: Option<&Group>) -> String {
    match group {
        Some(group) => group.gone().await,
        None => std::future::pending().await,
    }
}

/// Takes the digest of the plugin's file and opens it, in an environment that can be described. Blocks.
pub(crate) fn open(
    spec: Spec,
    environment: &[(String, String)],
) -> Result<(Opened, String, Spec), Error> {
    if let Some(variable) = platform::flag_file(environment) {
        return Err(Error::FlagFile {
            variable: variable.to_owned(),
        });
    }
    let digest = platform::file_digest(&spec.path).map_err(|source| Error::Digest {
        path: spec.path.clone(),
        source,
    })?;
    Ok((plugin::open(&spec)?, digest, spec))
}

/// What an executable made here depends on, besides program and options.
pub(crate) fn identity(
    client: &Client,
    digest: &str,
    targets: linalg::Facts,
    environment: Vec<(String, String)>,
) -> Identity {
    let mut kinds: Vec<&str> = client
        .devices()
        .iter()
        .map(waystation_pjrt::Device::kind)
        .collect();
    kinds.sort_unstable();
    kinds.dedup();
    let mut platform = vec![
        ("plugin".to_owned(), digest.to_owned()),
        ("platform".to_owned(), client.platform_name().to_owned()),
        (
            "platform_version".to_owned(),
            client.platform_version().to_owned(),
        ),
        ("device_kinds".to_owned(), kinds.join(",")),
    ];
    if client.platform_name() == "cpu" {
        platform.extend(platform::cpu());
    }
    platform.extend(targets);
    Identity {
        platform,
        environment: platform::environment(environment),
    }
}

/// The worker among those that save with it, in the name of its part of an OCDBT checkpoint.
fn process(slice: u32, task: u32) -> String {
    match slice {
        0 => format!("w{task}"),
        _ => format!("s{slice}w{task}"),
    }
}

/// The folder of this process's dumps: no other process writes to it, not one that comes after this one in its place either.
fn place(slice: u32, task: u32) -> String {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let seconds = since.map_or(0, |time| time.as_secs());
    format!("worker-{slice}-{task}-{seconds}-{}", std::process::id())
}

/// Ends when the thread ends before it is told to.
async fn watch_thread(thread: std::thread::JoinHandle<()>) -> String {
    loop {
        if thread.is_finished() {
            return match thread.join() {
                Ok(()) => "has ended".to_owned(),
                Err(_) => "has panicked; this is a defect of waystation".to_owned(),
            };
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
