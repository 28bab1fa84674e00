//! The same with a process of its own for the other side.

use crate::compile::{Artifact, compile};
use crate::programs::{Program, program};
use crate::run::{Site, compare_partition, ready};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use waystation_collectives::Process;

/// Says to a process that it is the other side: the folder with the programs, and the address of this one.
const FOLDER: &str = "WAYSTATION_TEST_SITE";
const ADDRESS: &str = "WAYSTATION_TEST_SITE_ADDRESS";
const CONNECTED: &str = "the other side is connected";

const PROGRAMS: [&str; 7] = [
    "psum_float32",
    "exchange_float32",
    "scatter_bfloat16",
    "large",
    "while",
    "nested",
    "train",
];
/// Each program as often, one launch behind the other.
const ROUNDS: usize = 5;

/// Ends with the test, whatever becomes of it.
struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs both partitions of a site in all programs, and compares.
fn run(site: &Site, folder: &Path, partitions: [u32; 2]) {
    let processes = [0, 0, 1, 1].map(Process);
    let mut number = 0;
    for name in PROGRAMS {
        let bytes = std::fs::read(folder.join(name)).expect("an executable");
        let json = std::fs::read(folder.join(format!("{name}.json"))).expect("a program");
        let program: Program = serde_json::from_slice(&json).expect("a program");
        let artifact = Artifact {
            bytes,
            kinds: Vec::new(),
        };
        let running: Vec<_> = (0..ROUNDS)
            .map(|_| {
                number += 1;
                let mine = partitions
                    .iter()
                    .enumerate()
                    .map(|(device, partition)| {
                        let inputs = program.inputs[*partition as usize].clone();
                        (*partition, device, inputs)
                    })
                    .collect();
                site.start(&artifact, number, &processes, mine)
            })
            .collect();
        for (partition, result) in running.into_iter().flat_map(ready) {
            let result = result.unwrap_or_else(|error| panic!("{name}: {error}"));
            compare_partition(&program, partition as usize, &result);
        }
    }
}

#[test]
fn programs_run_over_two_processes_of_the_system() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in PROGRAMS {
        let program = program(name);
        std::fs::write(folder.path().join(name), compile(program).bytes).expect("written");
        let json = serde_json::to_vec(program).expect("JSON");
        std::fs::write(folder.path().join(format!("{name}.json")), json).expect("written");
    }
    let site = Site::new(Process(0));
    let mut other = Other(
        Command::new(std::env::current_exe().expect("this test"))
            .args(["two::the_other_side", "--exact", "--ignored", "--nocapture"])
            .env(FOLDER, folder.path())
            .env(ADDRESS, site.address().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts"),
    );
    let mut lines = BufReader::new(other.0.stdout.take().expect("a pipe")).lines();
    // The name of the test may stand before it.
    let connected = lines.any(|line| line.is_ok_and(|line| line.ends_with(CONNECTED)));
    assert!(connected, "the other side has ended");
    run(&site, folder.path(), [0, 1]);
    // It has all it needs; now it may go.
    drop(other.0.stdin.take());
    // Read on, so that it is not held up by a full pipe.
    lines.for_each(drop);
    assert!(other.0.wait().expect("it ends").success());
}

#[test]
#[ignore = "the other side of programs_run_over_two_processes_of_the_system, which starts it"]
#[expect(clippy::print_stdout, reason = "it is what the other side waits for")]
fn the_other_side() {
    let Some(folder) = std::env::var_os(FOLDER) else {
        return;
    };
    let address = std::env::var(ADDRESS).expect("an address");
    let site = Site::new(Process(1));
    site.connect_to(Process(0), address.parse().expect("an address"));
    println!("{CONNECTED}");
    run(&site, Path::new(&folder), [2, 3]);
    // What this side has done may be on its way to the other.
    std::io::stdin().lines().for_each(drop);
}
