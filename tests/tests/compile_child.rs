//! Programs that end the process that compiles them, and processes that end under a compile: the worker, its arrays and all
//! other compiles go on.

use std::{fs, time::Duration};

use bytes::Bytes;
use rustix::process::{Pid, Signal, kill_process};
use waystation_client::{Client, Error, Request, Response, request};
use waystation_proto::{
    waystation::worker::WorkerStatus,
    xla::ifrt::proxy::LoadedExecutableHumanReadableProgramTextRequest,
};
use waystation_tests::cluster::Cluster;
use waystation_worker::CompileChild;

const INVALID_ARGUMENT: Option<i32> = Some(3);

/// Nothing here takes as long.
const PATIENCE: Duration = Duration::from_secs(120);

/// A cluster whose worker compiles in a child that is found by `mark`.
async fn cluster(mark: &'static str, unwanted_compile: Duration) -> Cluster {
    Cluster::start_with_workers(1, 2, |config| {
        config.limits.unwanted_compile = unwanted_compile;
        config.limits.compiles = 8;
        config.compile_child = Some(CompileChild {
            program: env!("CARGO_BIN_EXE_compile_child").into(),
            name: None,
            arguments: vec![mark.into()],
            cpu_only: true,
        });
    })
    .await
}

/// y = x + ... + x over four f32. `name` and `terms` tell one program from the other.
fn sum(name: &str, terms: usize) -> Vec<u8> {
    let mut text = format!(
        "module @{name} {{ func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {{\n  %0 = stablehlo.add %x, %x : tensor<4xf32>\n"
    );
    for term in 2..terms {
        let before = term - 2;
        let next = term - 1;
        text += &format!("  %{next} = stablehlo.add %{before}, %x : tensor<4xf32>\n");
    }
    let last = terms - 2;
    text += &format!("  return %{last} : tensor<4xf32> }} }}");
    text.into_bytes()
}

/// Attributes nested deeper than any stack: the parser recurses.
fn deep() -> Vec<u8> {
    const LEVELS: usize = 400_000;
    let (open, close) = ("[".repeat(LEVELS), "]".repeat(LEVELS));
    format!(
        "module @deep attributes {{a = {open}{close}}} {{ func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {{\n  return %x : tensor<4xf32> }} }}"
    )
    .into_bytes()
}

/// A result of 2^64 bytes, at which XLA throws. The worker's own look at sizes does not read programs that are text.
fn oversized() -> Vec<u8> {
    b"module @oversized { func.func public @main() -> tensor<4611686018427387904xf32> {
  %0 = stablehlo.iota dim = 0 : tensor<4611686018427387904xf32>
  return %0 : tensor<4611686018427387904xf32> } }"
        .to_vec()
}

/// A program of jaxlib's with one byte changed.
fn damaged() -> Vec<u8> {
    let mut program = include_bytes!("../../cache/stablehlo/tests/golden/donated.mlirbc").to_vec();
    program[737] = b'a';
    program
}

async fn compile(client: &Client, program: &[u8]) -> Result<u64, Error> {
    match client.call(request::compile(program, &[0])).await? {
        Response::CompileResponse(compiled) => Ok(compiled.loaded_executable_handle),
        _ => Err(Error::WrongReply),
    }
}

async fn put(client: &Client) -> u64 {
    let handle = client.handle();
    let bytes: Vec<u8> = [1.0_f32, 2.0, 3.0, 4.0]
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    client
        .store(handle, Bytes::from(bytes))
        .await
        .expect("stored");
    client
        .call(request::make_array(handle, &[4], &[0], None))
        .await
        .expect("made");
    handle
}

async fn fetch(client: &Client, array: u64) -> Vec<f32> {
    let buffer = client.handle();
    client
        .call(request::copy_to_host(array, buffer))
        .await
        .expect("copied");
    let bytes = client.lookup(buffer).await.expect("fetched");
    bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect()
}

async fn status(cluster: &Cluster) -> WorkerStatus {
    cluster.worker_status().await.remove(0)
}

/// The processes with this argument, but for those that only wait to be reaped.
fn children(mark: &str) -> Vec<Pid> {
    let processes = fs::read_dir("/proc").expect("/proc");
    let found = processes.flatten().filter_map(|process| {
        let words = fs::read(process.path().join("cmdline")).ok()?;
        let marked = words.split(|byte| *byte == 0).nth(1) == Some(mark.as_bytes());
        marked
            .then(|| process.file_name().to_str()?.parse().ok())
            .flatten()
    });
    found.filter_map(Pid::from_raw).collect()
}

/// Waits until the condition gives something, and gives that.
async fn until<T>(what: &str, mut condition: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        if let Some(value) = condition().await {
            return value;
        }
        assert!(tokio::time::Instant::now() < deadline, "still not: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn the_child(mark: &str) -> Pid {
    until("there is a compile child", async || {
        children(mark).first().copied()
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn programs_that_end_their_compiler_are_refused_and_all_else_goes_on() {
    let cluster = cluster("--test=deadly", Duration::from_secs(60)).await;
    let client = cluster.client().await;
    let array = put(&client).await;
    for (round, (deadly, last_words)) in [
        (deep(), "overflowed its stack"),
        (oversized(), "threw a C++ exception"),
        (damaged(), "LLVM ERROR: Property conversion failed"),
    ]
    .into_iter()
    .enumerate()
    {
        let deaths = status(&cluster).await.compiler_deaths;
        let good: Vec<Vec<u8>> = (0..4)
            .map(|number| sum(&format!("good_{round}_{number}"), 40 + number))
            .collect();
        // All at the same time: whichever is in the process when it ends is compiled again.
        let (refused, compiled) = tokio::join!(
            compile(&client, &deadly),
            futures::future::join_all(good.iter().map(|program| compile(&client, program))),
        );
        let error = refused.expect_err("no compiler survives this one");
        assert_eq!(error.code(), INVALID_ARGUMENT, "{error}");
        let text = error.to_string();
        assert!(
            text.contains("SIGABRT") && text.contains(last_words),
            "{text}"
        );
        for compiled in compiled {
            compiled.expect("a good program compiles whatever others do");
        }
        assert!(status(&cluster).await.compiler_deaths >= deaths + 2);

        // Known by now: no process ends for it.
        let deaths = status(&cluster).await.compiler_deaths;
        let again = compile(&client, &deadly).await.expect_err("refused");
        assert_eq!(again.to_string(), text);
        assert_eq!(status(&cluster).await.compiler_deaths, deaths);
    }
    assert_eq!(fetch(&client, array).await, [1.0, 2.0, 3.0, 4.0]);
    let executable = compile(&client, &sum("after", 3)).await.expect("compiled");
    let result = client.handle();
    client
        .call(request::execute(executable, &[array], &[result], 1))
        .await
        .expect("executed");
    assert_eq!(fetch(&client, result).await, [3.0, 6.0, 9.0, 12.0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_compile_whose_process_is_killed_is_done_again() {
    let mark = "--test=killed";
    let cluster = cluster(mark, Duration::from_secs(60)).await;
    let client = cluster.client().await;
    compile(&client, &sum("before", 5)).await.expect("compiled");
    let child = the_child(mark).await;
    // It stands still, so that the compile is certainly in it when it is killed.
    kill_process(child, Signal::STOP).expect("stopped");
    let program = sum("killed", 6);
    let killed = async {
        until("the compile is in the child", async || {
            (status(&cluster).await.compiling_in_child == 1).then_some(())
        })
        .await;
        kill_process(child, Signal::KILL).expect("killed");
    };
    let (compiled, ()) = tokio::join!(compile(&client, &program), killed);
    compiled.expect("compiled by another process");
    let status = status(&cluster).await;
    assert_eq!((status.compiler_deaths, status.compiles), (1, 2));
    assert_eq!(status.compiling_in_child, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_compile_that_does_not_end_goes_with_its_client() {
    let mark = "--test=unwanted";
    let cluster = cluster(mark, Duration::from_millis(100)).await;
    let client = cluster.client().await;
    compile(&client, &sum("before", 7)).await.expect("compiled");
    let child = the_child(mark).await;
    kill_process(child, Signal::STOP).expect("stopped");
    let program = sum("unwanted", 8);
    let gone = cluster.client().await;
    tokio::select! {
        _ = compile(&gone, &program) => panic!("a process that stands still compiles nothing"),
        () = until("the compile is in the child", async || {
            (status(&cluster).await.compiling_in_child == 1).then_some(())
        }) => {}
    }
    drop(gone);
    until("the child that stands still is gone", async || {
        (!children(mark).contains(&child)).then_some(())
    })
    .await;
    compile(&client, &program)
        .await
        .expect("compiled by another process");
    assert_eq!(status(&cluster).await.compiler_deaths, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_program_has_its_text_from_the_child() {
    let cluster = cluster("--test=text", Duration::from_secs(60)).await;
    let client = cluster.client().await;
    let executable = compile(&client, &sum("shown", 9)).await.expect("compiled");
    let asked = Request::LoadedExecutableHumanReadableProgramTextRequest(
        LoadedExecutableHumanReadableProgramTextRequest {
            loaded_executable_handle: executable,
        },
    );
    let answer = client.call(asked).await.expect("a text");
    let Response::LoadedExecutableHumanReadableProgramTextResponse(answer) = answer else {
        panic!("not an answer to a question for a text");
    };
    let text = format!("{answer:?}");
    assert!(text.contains("HloModule shown"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_child_ends_with_its_worker() {
    let mark = "--test=ends";
    let cluster = cluster(mark, Duration::from_secs(60)).await;
    let child = the_child(mark).await;
    drop(cluster);
    until("the child has ended", async || {
        (!children(mark).contains(&child)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_child_the_worker_compiles() {
    let cluster = Cluster::start_with_workers(1, 2, |config| {
        config.compile_child = Some(CompileChild {
            program: "/bin/false".into(),
            name: None,
            arguments: Vec::new(),
            cpu_only: true,
        });
    })
    .await;
    let client = cluster.client().await;
    compile(&client, &sum("alone", 10)).await.expect("compiled");
    let status = status(&cluster).await;
    assert_eq!((status.compiles, status.compiling_in_child), (1, 0));
}
