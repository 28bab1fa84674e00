//! What the bench asks of the compile cache without Python; each command answers with one JSON line.

use std::{
    hint::black_box,
    io,
    path::PathBuf,
    time::{Duration, Instant},
};

use clap::Parser;
use serde_json::json;
use waystation_cache::{Key, KeyInputs, Treatment, recording};
use waystation_client::{Client, Error, Response, request};

#[derive(Debug, Parser)]
enum Command {
    /// The CPU time that the keys of recorded programs take (`waystation proxy --record_programs`).
    Keys {
        /// How long the keys of one program are made.
        #[arg(long, default_value_t = 1000)]
        milliseconds: u64,
        /// Files of recordings.
        #[arg(required = true)]
        recordings: Vec<PathBuf>,
    },
    /// Sends one program to every device of a cluster at once, from a client for each device.
    Flights {
        /// The proxy, "host:port".
        #[arg(long)]
        address: String,
        /// A file of a recording.
        #[arg(long)]
        recording: PathBuf,
        /// How often it is sent, over all devices.
        #[arg(long, default_value_t = 64)]
        requests: usize,
    },
}

fn read(path: &PathBuf) -> io::Result<waystation_proto::waystation::recording::Recording> {
    let object = std::fs::read(path)?;
    recording::open(&object)
        .map_err(|error| io::Error::other(format!("{}: {error}", path.display())))
}

/// CPU time of this thread so far: on a machine that others load, time by the clock says little of a key.
fn cpu_time() -> io::Result<Duration> {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanos = stat.split(' ').next().and_then(|nanos| nanos.parse().ok());
    nanos
        .map(Duration::from_nanos)
        .ok_or_else(|| io::Error::other(format!("schedstat of another form: {stat}")))
}

/// The mean CPU time of a program's key, taken for so long.
fn key(path: &PathBuf, limit: Duration) -> io::Result<serde_json::Value> {
    let recording = read(path)?;
    let make = || {
        Key::of(black_box(&KeyInputs {
            program: &recording.program,
            options: &recording.compile_options,
            ..KeyInputs::default()
        }))
    };
    let treatment = make().treatment().clone();
    if treatment != Treatment::Structural {
        return Err(io::Error::other(format!(
            "{}: {treatment:?}",
            path.display()
        )));
    }
    // The system counts this time in steps of some milliseconds, so that only many keys together can be timed.
    let mut keys = 0_u32;
    let (begun, before) = (Instant::now(), cpu_time()?);
    while begun.elapsed() < limit || keys == 0 {
        black_box(make());
        keys += 1;
    }
    let seconds = cpu_time()?.saturating_sub(before).as_secs_f64() / f64::from(keys);
    let name = waystation_stablehlo::main_signature(&recording.program)
        .map(|signature| signature.module_name)
        .map_err(io::Error::other)?;
    Ok(json!({
        "name": name,
        "bytes": recording.program.len(),
        "keys": keys,
        "seconds": seconds,
    }))
}

/// Sends the program from all clients before any waits. Gives the time until all have it.
async fn flights(address: &str, program: &[u8], requests: usize) -> Result<Duration, Error> {
    let first = Client::connect(address).await?;
    let devices: Vec<i32> = first
        .init()
        .all_devices
        .iter()
        .map(|device| device.id)
        .collect();
    let mut clients = Vec::new();
    for device in devices {
        clients.push((Client::connect(address).await?, device));
    }
    let begun = Instant::now();
    let mut sent = Vec::new();
    for (client, device) in clients.iter().cycle().take(requests) {
        sent.push(client.send(request::compile(program, &[*device])).await);
    }
    for pending in sent {
        let Response::CompileResponse(_) = pending.wait().await? else {
            return Err(Error::WrongReply);
        };
    }
    Ok(begun.elapsed())
}

#[tokio::main]
async fn main() -> io::Result<()> {
    let answer = match Command::parse() {
        Command::Keys {
            milliseconds,
            recordings,
        } => {
            let limit = Duration::from_millis(milliseconds);
            let keys: io::Result<Vec<_>> = recordings.iter().map(|path| key(path, limit)).collect();
            json!({ "programs": keys? })
        }
        Command::Flights {
            address,
            recording,
            requests,
        } => {
            let program = read(&recording)?.program;
            let took = flights(&address, &program, requests)
                .await
                .map_err(io::Error::other)?;
            json!({ "requests": requests, "seconds": took.as_secs_f64() })
        }
    };
    use io::Write as _;
    writeln!(io::stdout(), "{answer}")
}
