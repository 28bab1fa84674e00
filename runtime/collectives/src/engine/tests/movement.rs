//! Every kind of collective, against a plain one.

use super::*;
use crate::op::{Kind, Operand, Reduction};

const F32: i32 = 11;
const U8: i32 = 6;

/// What all partitions have and get.
struct Case {
    op: Op,
    inputs: Vec<Vec<Vec<u8>>>,
    expected: Vec<Vec<Vec<u8>>>,
}

/// Part `index` of `count` along the dimension whose parts are `run` bytes.
fn part(whole: &[u8], run: usize, index: usize, count: usize) -> Vec<u8> {
    whole
        .chunks(run * count)
        .flat_map(|row| row[index * run..(index + 1) * run].to_vec())
        .collect()
}

fn joined(parts: &[&[u8]], run: usize) -> Vec<u8> {
    let rows = parts[0].len() / run;
    (0..rows)
        .flat_map(|row| {
            parts
                .iter()
                .flat_map(move |part| part[row * run..(row + 1) * run].to_vec())
        })
        .collect()
}

/// The sum of small whole numbers as `f32`, or of bytes.
fn sum(parts: &[&[u8]], element: i32) -> Vec<u8> {
    let mut total = parts[0].to_vec();
    for part in &parts[1..] {
        if element == F32 {
            let (into, _) = total.as_chunks_mut::<4>();
            let (from, _) = part.as_chunks::<4>();
            for (into, from) in into.iter_mut().zip(from) {
                *into = (f32::from_le_bytes(*into) + f32::from_le_bytes(*from)).to_le_bytes();
            }
        } else {
            for (into, from) in total.iter_mut().zip(*part) {
                *into = into.wrapping_add(*from);
            }
        }
    }
    total
}

fn values(chance: &mut Chance, bytes: usize, element: i32) -> Vec<u8> {
    if element == F32 {
        (0..bytes / 4)
            .flat_map(|_| {
                let whole = u16::try_from(chance.below(1000)).expect("small");
                f32::from(whole).to_le_bytes()
            })
            .collect()
    } else {
        chance.bytes(bytes)
    }
}

/// A case of `kind` with operands of `rows` times `run` bytes.
fn case(
    kind: Kind,
    groups: &[Vec<u32>],
    partitions: u32,
    element: i32,
    run: usize,
    rows: usize,
    chance: &mut Chance,
) -> Case {
    let size = groups.first().map_or(1, Vec::len);
    let (count, bytes) = match kind {
        Kind::AllToAll => (size, run * rows),
        Kind::AllToAllArray | Kind::ReduceScatter => (1, run * rows * size),
        Kind::AllReduce | Kind::AllGather | Kind::Permute => (2, run * rows),
        _ => (1, run * rows),
    };
    let result = match kind {
        Kind::AllGather => bytes * size,
        Kind::ReduceScatter => bytes / size,
        _ => bytes,
    };
    let by_run = matches!(
        kind,
        Kind::AllGather | Kind::AllToAllArray | Kind::ReduceScatter
    );
    let op = Op {
        number: 3,
        kind,
        groups: groups.to_vec(),
        reduction: kind.reduces().then_some(Reduction::Add),
        operands: vec![
            Operand {
                bytes: bytes as u64,
                run: if by_run { run as u64 } else { 0 },
                element,
            };
            count
        ],
        results: vec![result as u64; count],
    };
    let inputs: Vec<Vec<Vec<u8>>> = (0..partitions)
        .map(|_| (0..count).map(|_| values(chance, bytes, element)).collect())
        .collect();
    let of = |partition: u32| &inputs[usize::try_from(partition).expect("few")];
    let expected = (0..partitions)
        .map(|partition| {
            let group = groups.iter().find(|group| group.contains(&partition));
            let index = group.and_then(|group| group.iter().position(|each| *each == partition));
            (0..count)
                .map(|operand| {
                    let all = || -> Vec<&[u8]> {
                        group
                            .expect("a group")
                            .iter()
                            .map(|member| of(*member)[operand].as_slice())
                            .collect()
                    };
                    match kind {
                        Kind::AllReduce => sum(&all(), element),
                        Kind::AllGather => joined(&all(), run),
                        Kind::ReduceScatter => {
                            part(&sum(&all(), element), run, index.expect("a member"), size)
                        }
                        Kind::AllToAll => {
                            of(group.expect("a group")[operand])[index.expect("a member")].clone()
                        }
                        Kind::AllToAllArray => {
                            let parts: Vec<_> = all()
                                .iter()
                                .map(|whole| part(whole, run, index.expect("a member"), size))
                                .collect();
                            let parts: Vec<_> = parts.iter().map(Vec::as_slice).collect();
                            joined(&parts, run)
                        }
                        Kind::Permute => groups
                            .iter()
                            .find(|pair| pair[1] == partition)
                            .map_or(vec![0; bytes], |pair| of(pair[0])[operand].clone()),
                        Kind::Broadcast => {
                            group.map_or(vec![0; bytes], |group| of(group[0])[operand].clone())
                        }
                        Kind::PartitionId | Kind::ReplicaId => unreachable!("they move nothing"),
                    }
                })
                .collect()
        })
        .collect();
    Case {
        op,
        inputs,
        expected,
    }
}

const KINDS: [Kind; 7] = [
    Kind::AllReduce,
    Kind::AllGather,
    Kind::ReduceScatter,
    Kind::AllToAll,
    Kind::AllToAllArray,
    Kind::Permute,
    Kind::Broadcast,
];

fn groups_of(kind: Kind) -> Vec<Vec<Vec<u32>>> {
    match kind {
        Kind::Permute => vec![
            vec![vec![0, 1], vec![1, 2], vec![2, 3], vec![3, 0]],
            vec![vec![0, 3], vec![2, 2]],
            vec![],
        ],
        Kind::Broadcast => vec![vec![vec![2, 0, 1, 3]], vec![vec![3, 1]]],
        _ => vec![
            vec![vec![0, 1, 2, 3]],
            vec![vec![2, 0], vec![1, 3]],
            vec![vec![3, 1, 0, 2]],
            vec![vec![0], vec![1], vec![2], vec![3]],
        ],
    }
}

#[test]
fn every_kind_moves_what_it_should() {
    let mut seed = 0;
    for kind in KINDS {
        for groups in groups_of(kind) {
            for placement in [[0, 0, 1, 1], [2, 0, 1, 0], [0, 0, 0, 0]] {
                // Small; some chunks; runs; single bytes.
                for (element, run, rows) in [
                    (F32, 12, 1),
                    (F32, 20_000, 2),
                    (U8, 3, 13_001),
                    (U8, 1, 1),
                    (F32, 0, 0),
                ] {
                    if run == 0 && kind != Kind::AllReduce && kind != Kind::Permute {
                        continue;
                    }
                    seed += 1;
                    let mut world = World::new(3, seed);
                    let case = case(kind, &groups, 4, element, run, rows, &mut world.chance);
                    let launches = world.open(seed, &placement);
                    let mut waiting: Vec<usize> = (0..4).collect();
                    let mut outcomes = vec![None; 4];
                    // Partitions come in any order, with messages between them.
                    while !waiting.is_empty() {
                        let next = waiting.swap_remove(world.chance.below(waiting.len()));
                        let launch = launches[usize::try_from(placement[next]).expect("few")]
                            .as_ref()
                            .expect("it is open");
                        let partition = u32::try_from(next).expect("few");
                        let outcome = start(launch, partition, &case.op, &case.inputs[next]);
                        outcomes[next] = Some(outcome);
                        for _ in 0..world.chance.below(6) {
                            world.step();
                        }
                    }
                    world.run();
                    for (partition, outcome) in outcomes.iter().enumerate() {
                        let outcome = outcome.as_ref().expect("it was started");
                        assert!(
                            outcome.results() == case.expected[partition],
                            "{kind:?} {groups:?} {placement:?} {element} {run} {rows} {partition}"
                        );
                        assert_eq!(outcome.inputs.load(SeqCst), 0, "operands are let go of");
                    }
                    drop(launches);
                    for engine in &world.engines {
                        assert!(engine.is_idle());
                    }
                }
            }
        }
    }
}

#[test]
fn executions_of_one_operation_are_told_apart() {
    let mut world = World::new(2, 5);
    let placement = [0, 1];
    let launches = world.open(9, &placement);
    let launch = |partition: usize| launches[partition].as_ref().expect("open");
    let op = case(
        Kind::Permute,
        &[vec![0, 1]],
        2,
        U8,
        5,
        1,
        &mut Chance::new(1),
    )
    .op;
    // The source runs ahead; nothing of it is lost or mixed up.
    let sent: Vec<_> = (0..10_u8)
        .map(|round| start(launch(0), 0, &op, &[vec![round; 5], vec![round + 100; 5]]))
        .collect();
    world.run();
    assert!(sent.iter().all(|each| each.get() == Some(Ok(()))));
    assert_eq!(sent[9].inputs.load(SeqCst), 2, "not asked for yet");
    for round in 0..10_u8 {
        let got = start(launch(1), 1, &op, &[vec![0; 5], vec![0; 5]]);
        world.run();
        assert_eq!(got.results(), [vec![round; 5], vec![round + 100; 5]]);
    }
    assert_eq!(sent[9].inputs.load(SeqCst), 0);
}

#[test]
fn a_partition_learns_its_number() {
    let world = World::new(1, 1);
    let launches = world.open(1, &[0, 0, 0, 0]);
    let of = |kind, groups: &[Vec<u32>]| Op {
        number: 0,
        kind,
        groups: groups.to_vec(),
        reduction: None,
        operands: vec![],
        results: vec![4],
    };
    let op = |kind| of(kind, &[]);
    let launch = launches[0].as_ref().expect("open");
    assert_eq!(
        start(launch, 2, &op(Kind::PartitionId), &[]).results(),
        [[2, 0, 0, 0]]
    );
    assert_eq!(
        start(launch, 2, &op(Kind::ReplicaId), &[]).results(),
        [[0; 4]]
    );
    // Of two replicas.
    let replicas = [vec![0, 1], vec![2, 3]];
    for (kind, wanted) in [
        (Kind::PartitionId, [0, 1, 0, 1]),
        (Kind::ReplicaId, [0, 0, 1, 1]),
    ] {
        for (partition, wanted) in (0..).zip(wanted) {
            assert_eq!(
                start(launch, partition, &of(kind, &replicas), &[]).results(),
                [[wanted, 0, 0, 0]]
            );
        }
    }
    let outside = start(launch, 3, &of(Kind::ReplicaId, &replicas[..1]), &[]);
    assert!(
        matches!(outside.get(), Some(Err(error)) if error.code() == crate::Code::InvalidArgument)
    );
}

#[test]
fn sums_are_the_same_bits_wherever_partitions_lie() {
    // Numbers whose sum depends on the order.
    let mut seen = None;
    for (seed, placement) in [[0, 0, 0, 0], [0, 1, 2, 0], [2, 2, 1, 1]]
        .iter()
        .enumerate()
    {
        for bytes in [4 * 100, 4 * 20_000] {
            let mut world = World::new(3, seed as u64);
            let mut chance = Chance::new(7);
            let inputs: Vec<Vec<u8>> = (0..4)
                .map(|_| {
                    (0..bytes / 4)
                        .flat_map(|_| {
                            let value = chance.below(1 << 24) as f32 / 1e3;
                            value.to_le_bytes()
                        })
                        .collect()
                })
                .collect();
            let op = Op {
                number: 0,
                kind: Kind::AllReduce,
                groups: vec![vec![0, 1, 2, 3]],
                reduction: Some(Reduction::Add),
                operands: vec![Operand {
                    bytes: bytes as u64,
                    run: 0,
                    element: F32,
                }],
                results: vec![bytes as u64],
            };
            let launches = world.open(1, placement);
            let outcomes: Vec<_> = (0..4_u32)
                .map(|partition| {
                    let process = placement[partition as usize] as usize;
                    let launch = launches[process].as_ref().expect("open");
                    start(launch, partition, &op, &inputs[partition as usize..][..1])
                })
                .collect();
            world.run();
            let first = outcomes[0].results();
            for outcome in &outcomes {
                assert!(outcome.results() == first);
            }
            let all: Vec<_> = inputs.iter().map(Vec::as_slice).collect();
            assert!(first[0] == sum(&all, F32), "in the order of the group");
            if bytes == 400 {
                assert_eq!(seen.get_or_insert_with(|| first.clone()), &first);
            }
        }
    }
}
