//! What a launch costs the proxy by the number of workers that take part in it. The workers are this process's tasks and compute
//! nothing; the link to them is the real one, and so is the proxy, a process of its own. One JSON line.

use std::{
    error::Error,
    io::Write as _,
    net::TcpListener,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use bytes::Bytes;
use clap::Parser;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use waystation_client::{Client, Request, Response, request};
use waystation_proto::xla::ifrt::proxy::{CheckValueReadyRequest, DestructArrayRequest};
use waystation_tests::null_worker::{NullWorkers, Pace};

#[derive(Debug, Parser)]
struct Options {
    /// The waystation binary.
    #[arg(long)]
    binary: PathBuf,
    /// Workers, one device each.
    #[arg(long, value_delimiter = ',', default_value = "1,8,64,256")]
    workers: Vec<u32>,
    /// Parts of launches, over all workers together, that are counted for each number of workers.
    #[arg(long, default_value_t = 100_000)]
    parts: u32,
}

/// Ends with its parent's interest.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// CPU time of a process's threads so far.
fn cpu_seconds(pid: u32) -> Result<f64, Box<dyn Error>> {
    let mut nanos = 0;
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let stat = std::fs::read_to_string(thread?.path().join("schedstat"))?;
        let spent = stat.split(' ').next().ok_or("schedstat of another form")?;
        nanos += spent.parse::<u64>()?;
    }
    Ok(Duration::from_nanos(nanos).as_secs_f64())
}

async fn connect(address: &str) -> Result<Client, Box<dyn Error>> {
    let since = Instant::now();
    loop {
        match Client::connect(address).await {
            Ok(client) => return Ok(client),
            Err(error) if since.elapsed() > Duration::from_secs(60) => return Err(error.into()),
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

/// A chain of launches over all devices, some of them on the way at a time.
async fn launch(
    client: &Client,
    program: u64,
    mut array: u64,
    count: u32,
) -> Result<u64, Box<dyn Error>> {
    for number in 1..=count {
        let result = client.handle();
        drop(
            client
                .send(request::execute(program, &[array], &[result], 1))
                .await,
        );
        let forgotten = DestructArrayRequest {
            array_handle: vec![std::mem::replace(&mut array, result)],
        };
        drop(client.send(Request::DestructArrayRequest(forgotten)).await);
        if number % 32 == 0 || number == count {
            let ready = CheckValueReadyRequest {
                value_handles: vec![array],
            };
            client.call(Request::CheckValueReadyRequest(ready)).await?;
        }
    }
    Ok(array)
}

async fn measure(options: &Options, count: u32) -> Result<serde_json::Value, Box<dyn Error>> {
    let stop = CancellationToken::new();
    let _ends = stop.clone().drop_guard();
    let manager = TcpListener::bind("127.0.0.1:0")?;
    let address = manager.local_addr()?.to_string();
    let mut config = waystation_scheduler::Config::new(manager);
    config.workers_per_slice = Some(count);
    tokio::spawn(waystation_scheduler::serve(config, stop.clone()));
    let workers = NullWorkers::start(count, &address, Pace::Even, &stop);
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let proxy = Command::new(&options.binary)
        .args(["proxy", "--server_port", &port.to_string()])
        .args(["--resource_manager_address", &address])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let proxy = Killed(proxy);
    let client = connect(&format!("127.0.0.1:{port}")).await?;
    let devices: Vec<i32> = (0..i32::try_from(count)?).collect();
    let program = match client.call(request::compile(b"null", &devices)).await? {
        Response::CompileResponse(compiled) => compiled.loaded_executable_handle,
        other => return Err(format!("{other:?}").into()),
    };
    let array = client.handle();
    client.store(array, Bytes::from_static(&[0; 4])).await?;
    client
        .call(request::make_array(array, &[1], &devices, None))
        .await?;
    let launches = (options.parts / count).clamp(32, 20_000);
    let array = launch(&client, program, array, launches / 4).await?;
    let (before, begun) = (cpu_seconds(proxy.0.id())?, Instant::now());
    launch(&client, program, array, launches).await?;
    let seconds = begun.elapsed().as_secs_f64();
    let spent = cpu_seconds(proxy.0.id())? - before;
    Ok(json!({
        "workers": count,
        "launches": launches,
        "proxy_cpu_us": spent / f64::from(launches) * 1e6,
        "launches_per_second": f64::from(launches) / seconds,
        "message_bytes": workers.largest(),
    }))
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse();
    let mut runs = Vec::new();
    for &count in &options.workers {
        runs.push(measure(&options, count).await?);
    }
    writeln!(std::io::stdout().lock(), "{}", json!(runs))?;
    Ok(())
}
