//! Programs of JAX over two processes with a real CPU plugin, against JAX on four devices of one process.
//!
//! The plugin and JAX come from the Python environment of `WAYSTATION_TEST_PYTHON`, or else of `.venv` at the top of the
//! repository. What is not there fails the tests.

mod compile;
/// What a worker calls collectives by.
#[path = "../../../worker/src/collective.rs"]
mod glue;
mod programs;
mod run;
mod two;

use compile::{Artifact, compile, plugin};
use programs::{Array, program, programs};
use run::{Site, compare, ready};
use waystation_collectives::{Kind, Process};

/// Two sites of two devices each, in this process, that speak over loopback.
fn sites() -> [Site; 2] {
    let [a, b] = [0, 1].map(|process| Site::new(Process(process)));
    a.connect(&b);
    [a, b]
}

/// Runs an artifact on both sites, each partition where `placement` says, and gives what each partition gets.
fn run(
    sites: &[Site; 2],
    artifact: &Artifact,
    number: u64,
    placement: [(u32, usize); 4],
    inputs: &[Vec<Array>],
) -> Vec<Result<Vec<Array>, String>> {
    let processes: Vec<Process> = placement
        .iter()
        .map(|(process, _)| Process(*process))
        .collect();
    let running: Vec<_> = sites
        .iter()
        .map(|site| {
            let mine = placement
                .iter()
                .enumerate()
                .filter(|(_, (process, _))| Process(*process) == site.process())
                .map(|(partition, (_, device))| {
                    (
                        u32::try_from(partition).expect("few"),
                        *device,
                        inputs[partition].clone(),
                    )
                })
                .collect();
            site.start(artifact, number, &processes, mine)
        })
        .collect();
    let mut results = vec![Err("nothing".to_owned()); 4];
    for (partition, result) in running.into_iter().flat_map(ready) {
        results[usize::try_from(partition).expect("few")] = result;
    }
    results
}

/// Partitions on devices in order, and in another.
const PLACEMENTS: [[(u32, usize); 4]; 3] = [
    [(0, 0), (0, 1), (1, 0), (1, 1)],
    [(1, 1), (0, 0), (1, 0), (0, 1)],
    [(0, 1), (1, 1), (0, 0), (1, 0)],
];

#[test]
fn programs_of_jax_run_over_two_processes() {
    let sites = sites();
    let mut seen = std::collections::HashSet::new();
    let mut number = 0;
    for program in programs() {
        let artifact = compile(program);
        assert!(
            artifact.kinds.iter().any(|kind| kind.communicates()) || program.name == "number",
            "{} has no collective",
            program.name
        );
        seen.extend(artifact.kinds.iter().copied());
        let mut bits = None;
        for placement in PLACEMENTS {
            number += 1;
            let results = run(&sites, &artifact, number, placement, &program.inputs);
            let results: Vec<_> = results
                .into_iter()
                .map(|result| result.unwrap_or_else(|error| panic!("{}: {error}", program.name)))
                .collect();
            compare(program, &results);
            // The same bits wherever the partitions lie.
            assert!(
                *bits.get_or_insert_with(|| results.clone()) == results,
                "{} on {placement:?}",
                program.name
            );
        }
    }
    for kind in [
        Kind::AllReduce,
        Kind::AllGather,
        Kind::ReduceScatter,
        Kind::AllToAll,
        Kind::Permute,
        Kind::Broadcast,
        Kind::PartitionId,
    ] {
        assert!(seen.contains(&kind), "no program has {kind:?}: {seen:?}");
    }
}

#[test]
fn many_launches_are_under_way_at_a_time() {
    let program = program("nested");
    let artifact = compile(program);
    let sites = sites();
    let processes: Vec<Process> = PLACEMENTS[1]
        .iter()
        .map(|(process, _)| Process(*process))
        .collect();
    // The devices' threads take them in this order, which is the same on both sides.
    let running: Vec<_> = (1..=40_u64)
        .map(|number| {
            sites.each_ref().map(|site| {
                let mine = PLACEMENTS[1]
                    .iter()
                    .enumerate()
                    .filter(|(_, (process, _))| Process(*process) == site.process())
                    .map(|(partition, (_, device))| {
                        let inputs = program.inputs[partition].clone();
                        (u32::try_from(partition).expect("few"), *device, inputs)
                    })
                    .collect();
                site.start(&artifact, number, &processes, mine)
            })
        })
        .collect();
    for launches in running {
        let mut results = vec![Vec::new(); 4];
        for (partition, result) in launches.into_iter().flat_map(ready) {
            results[usize::try_from(partition).expect("few")] = result.expect("it runs");
        }
        compare(program, &results);
    }
}

#[test]
fn a_site_that_goes_fails_what_waits_for_it_and_nothing_else() {
    let program = program("scan");
    let artifact = compile(program);
    let [a, b] = sites();
    let processes = [0, 0, 1, 1].map(Process);
    let mine = vec![
        (0, 0, program.inputs[0].clone()),
        (1, 1, program.inputs[1].clone()),
    ];
    // The other side never starts, and goes.
    let running = a.start(&artifact, 1, &processes, mine);
    drop(b);
    for (_, result) in ready(running) {
        let error = result.expect_err("it cannot end");
        assert!(error.contains("DataLoss"), "{error}");
    }
    // The devices are as good as before.
    let again = Site::new(Process(1));
    a.connect(&again);
    let results = run(&[a, again], &artifact, 2, PLACEMENTS[0], &program.inputs);
    let results: Vec<_> = results
        .into_iter()
        .map(|each| each.expect("it runs"))
        .collect();
    compare(program, &results);
}

#[test]
fn a_program_that_cannot_be_rewritten_is_refused_by_name() {
    let text = "module @replicas attributes {mhlo.num_partitions = 2 : i32, mhlo.num_replicas = 1 : i32} {
      func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
        %0 = \"stablehlo.all_reduce\"(%x) <{replica_groups = dense<[[0, 1]]> : tensor<1x2xi64>,
               channel_handle = #stablehlo.channel_handle<handle = 1, type = 0>, use_global_device_ids}> ({
          ^bb0(%a: tensor<f32>, %b: tensor<f32>):
            %s = stablehlo.subtract %a, %b : tensor<f32>
            stablehlo.return %s : tensor<f32>
        }) : (tensor<4xf32>) -> tensor<4xf32>
        return %0 : tensor<4xf32>
      }
    }";
    let client = compile::wide(&plugin(), 2);
    let error = compile::hooked(&client, text, 2).expect_err("refused");
    assert_eq!(error.code(), waystation_pjrt::Code::Unimplemented);
    assert!(
        error.message().contains("the reduction of all-reduce"),
        "{error}"
    );
}
