//! Launches that fail, and processes that do not agree.

use super::*;
use crate::call::Code;
use crate::engine::{EARLY, ENDED, lock};
use crate::op::{Kind, Operand, Reduction};
use crate::transport::{Key, Transfer};

fn op(number: u32, partitions: u32, bytes: u64) -> Op {
    Op {
        number,
        kind: Kind::AllReduce,
        groups: vec![(0..partitions).collect()],
        reduction: Some(Reduction::Add),
        operands: vec![Operand {
            bytes,
            run: 0,
            element: 6,
        }],
        results: vec![bytes],
    }
}

fn code(outcome: &Outcome) -> Option<Code> {
    outcome
        .get()
        .expect("it has ended")
        .err()
        .map(|failure| failure.code())
}

fn launch(launches: &[Option<Launch>], process: usize) -> &Launch {
    launches[process].as_ref().expect("open")
}

#[test]
fn a_failure_reaches_all_that_wait_and_all_that_come() {
    let mut world = World::new(3, 1);
    let launches = world.open(4, &[0, 1, 2]);
    let waiting = start(
        launch(&launches, 0),
        0,
        &op(0, 3, 100_000),
        &[vec![1; 100_000]],
    );
    world.run();
    assert_eq!(waiting.get(), None);
    let failure = Failure::new(Code::ResourceExhausted, "no memory");
    launch(&launches, 1).fail(failure.clone());
    world.run();
    assert_eq!(waiting.get(), Some(Err(failure.clone())));
    assert_eq!(waiting.inputs.load(SeqCst), 0);
    let late = start(launch(&launches, 2), 2, &op(0, 3, 10), &[vec![1; 10]]);
    assert_eq!(late.get(), Some(Err(failure.clone())));
    assert_eq!(launch(&launches, 2).failure(), Some(failure.clone()));
    // One that fails before it is open somewhere.
    let placement: Arc<[Process]> = Arc::new([Process(0), Process(1)]);
    let first = world.engines[0]
        .open(5, Arc::clone(&placement))
        .expect("it opens");
    first.fail(failure.clone());
    world.run();
    assert_eq!(
        world.engines[1].open(5, placement).expect_err("failed"),
        failure
    );
    // Others are as they were.
    let next = world.open(6, &[0, 1, 2]);
    let outcomes: Vec<_> = (0..3)
        .map(|partition| {
            let launch = launch(&next, partition as usize);
            start(launch, partition, &op(0, 3, 3), &[vec![2; 3]])
        })
        .collect();
    world.run();
    for outcome in outcomes {
        assert_eq!(outcome.results(), [[6; 3]]);
    }
}

#[test]
fn a_lost_process_fails_what_needs_it() {
    let mut world = World::new(3, 2);
    let with = world.open(1, &[0, 1, 2]);
    let without = world.open(2, &[0, 1]);
    let lost = start(launch(&with, 0), 0, &op(0, 3, 10), &[vec![1; 10]]);
    let lost_too = start(launch(&with, 1), 1, &op(0, 3, 10), &[vec![1; 10]]);
    let kept = start(launch(&without, 0), 0, &op(0, 2, 10), &[vec![1; 10]]);
    world.cut.push(Process(2));
    world.run();
    // Process 1 hears of it from process 0.
    let failure = Failure::new(Code::DataLoss, "worker 2 is gone");
    world.engines[0].lost(Process(2), &failure);
    world.run();
    assert_eq!(code(&lost), Some(Code::DataLoss));
    assert_eq!(code(&lost_too), Some(Code::DataLoss));
    assert_eq!(kept.get(), None);
    let both: Arc<[Process]> = Arc::new([Process(0), Process(2)]);
    let refused = world.engines[0].open(3, Arc::clone(&both));
    assert_eq!(refused.expect_err("gone").code(), Code::DataLoss);
    let other = start(launch(&without, 1), 1, &op(0, 2, 10), &[vec![1; 10]]);
    world.run();
    assert_eq!(kept.results(), other.results());
    world.engines[0].found(Process(2));
    assert!(world.engines[0].open(4, both).is_ok());
}

#[test]
fn who_has_no_part_in_a_launch_has_no_say() {
    let world = World::new(3, 9);
    let launches = world.open(1, &[0, 1]);
    let failure = Failure::new(Code::Cancelled, "enough");
    world.engines[0].receive(Process(2), Message::Fail(1, failure.clone()));
    assert_eq!(launch(&launches, 0).failure(), None);
    world.engines[0].receive(Process(1), Message::Fail(1, failure.clone()));
    assert_eq!(launch(&launches, 0).failure(), Some(failure));
}

#[test]
fn a_launch_that_is_dropped_under_way_is_given_up_everywhere() {
    let mut world = World::new(2, 3);
    let mut launches = world.open(1, &[0, 1]);
    let here = start(launch(&launches, 0), 0, &op(0, 2, 10), &[vec![1; 10]]);
    launches[0] = None;
    assert_eq!(code(&here), Some(Code::Aborted));
    world.run();
    let there = start(launch(&launches, 1), 1, &op(0, 2, 10), &[vec![1; 10]]);
    assert_eq!(code(&there), Some(Code::Aborted));
    // What is done is not given up, also if the others have not got all of it.
    let mut launches = world.open(2, &[0, 1]);
    let bytes = 100_000;
    let first = start(
        launch(&launches, 0),
        0,
        &op(0, 2, bytes),
        &[vec![1; 100_000]],
    );
    let second = start(
        launch(&launches, 1),
        1,
        &op(0, 2, bytes),
        &[vec![1; 100_000]],
    );
    while first.get().is_none() && world.step() {}
    launches[0] = None;
    world.run();
    assert_eq!(second.results(), first.results());
    let again = world.engines[0].open(2, [Process(0)]);
    assert_eq!(again.expect_err("used").code(), Code::InvalidArgument);
}

/// The end of its last call may be the end of a launch, at once and from within.
#[test]
fn a_launch_that_ends_with_its_last_call_is_not_given_up() {
    for seed in 0..50 {
        let mut world = World::new(3, seed);
        let launches = world.open(1, &[0, 1, 2]);
        let mut outcomes = Vec::new();
        for (partition, launch) in (0..).zip(launches) {
            let launch = Arc::new(Mutex::new(launch));
            let (kept, outcome) = (Arc::clone(&launch), Outcome::default());
            let ended = outcome.clone();
            let call = Call {
                inputs: vec![Bytes::from(vec![1; 10_000])],
                outputs: Box::new(Kept(vec![vec![0; 10_000]], outcome.clone())),
                done: Box::new(move |how| {
                    kept.lock().expect("no panic").take();
                    *ended.ended.lock().expect("no panic") = Some(how);
                }),
            };
            let member = launch
                .lock()
                .expect("no panic")
                .as_ref()
                .map(|launch| launch.member(partition).expect("it runs here"));
            member.expect("open").start(&op(0, 3, 10_000), call);
            outcomes.push(outcome);
        }
        world.run();
        for outcome in outcomes {
            assert_eq!(outcome.results(), [vec![3; 10_000]], "seed {seed}");
        }
    }
}

#[test]
fn programs_that_differ_are_found_out() {
    let mut world = World::new(2, 4);
    let launches = world.open(1, &[0, 1]);
    let first = start(launch(&launches, 0), 0, &op(0, 2, 10), &[vec![1; 10]]);
    let second = start(launch(&launches, 1), 1, &op(0, 2, 11), &[vec![1; 11]]);
    world.run();
    assert_eq!(code(&first), Some(Code::FailedPrecondition));
    assert_eq!(code(&second), Some(Code::FailedPrecondition));
}

#[test]
fn data_that_nobody_asked_for_fails_the_launch() {
    let key = Key {
        launch: 1,
        execution: 0,
        op: 0,
        lane: 0,
        source: 1,
        target: 0,
    };
    let data = |key: Key, offset, len: usize| {
        Message::Data(Transfer {
            key,
            offset,
            bytes: vec![0; len].into(),
            failed: Arc::default(),
        })
    };
    for (from, message) in [
        // At no chunk; too long; of another operation; of another partition; from where the partition is not.
        (1, data(key, 3, 7)),
        (1, data(key, 0, 11)),
        (1, data(key, u64::MAX, 1)),
        (1, data(Key { op: 1, ..key }, 0, 10)),
        (1, data(Key { source: 0, ..key }, 0, 10)),
        (2, data(key, 0, 10)),
        (2, Message::Ready(key)),
        (1, Message::Ready(key)),
        (1, Message::Ready(Key { source: 9, ..key })),
    ] {
        let world = World::new(3, 5);
        let launches = world.open(1, &[0, 1, 2]);
        let waiting = start(launch(&launches, 0), 0, &op(0, 3, 10), &[vec![1; 10]]);
        let text = format!("{message:?}");
        world.engines[0].receive(Process(from), message);
        assert_eq!(code(&waiting), Some(Code::FailedPrecondition), "{text}");
    }
    // Twice the same.
    let world = World::new(3, 5);
    let launches = world.open(1, &[0, 1, 2]);
    let waiting = start(launch(&launches, 0), 0, &op(0, 3, 10), &[vec![1; 10]]);
    world.engines[0].receive(Process(1), data(key, 0, 10));
    assert_eq!(waiting.get(), None);
    world.engines[0].receive(Process(1), data(key, 0, 10));
    assert_eq!(code(&waiting), Some(Code::FailedPrecondition));
    // Of launches that are not open, or were.
    world.engines[0].receive(Process(1), data(key, 0, 10));
    world.engines[0].receive(Process(1), data(Key { launch: 77, ..key }, 0, 10));
}

#[test]
fn pieces_asked_for_too_early_are_bounded() {
    let world = World::new(2, 6);
    let key = |launch: u64| Key {
        launch,
        execution: 0,
        op: 0,
        lane: 0,
        source: 0,
        target: 1,
    };
    for launch in 0..=EARLY as u64 {
        world.engines[0].receive(Process(1), Message::Ready(key(launch)));
    }
    let table = lock(&world.engines[0].0.table);
    assert_eq!(table.early_count, EARLY);
    assert!(matches!(table.ended.get(&(EARLY as u64)), Some(Some(_))));
    drop(table);
    let told = world.queue.lock().expect("no panic").pop_front();
    assert!(matches!(told, Some((_, Process(1), Message::Fail(_, _)))));
    world.engines[0].lost(Process(1), &Failure::new(Code::DataLoss, "gone"));
    assert_eq!(lock(&world.engines[0].0.table).early_count, 0);
}

#[test]
fn ended_launches_are_forgotten_in_the_end() {
    let world = World::new(1, 7);
    for number in 0..2 * ENDED as u64 {
        drop(
            world.engines[0]
                .open(number, [Process(0)])
                .expect("it opens"),
        );
    }
    let table = lock(&world.engines[0].0.table);
    assert_eq!(table.ended.len(), ENDED);
}

#[test]
fn what_comes_for_a_launch_that_is_forgotten_is_known_to_be_late() {
    let world = World::new(2, 7);
    let engine = &world.engines[0];
    let both = [Process(0), Process(1)];
    let failure = Failure::new(Code::ResourceExhausted, "no memory");
    let first = engine.open(1, both).expect("it opens");
    first.fail(failure.clone());
    // One that is to come.
    let coming = 1_000_000;
    engine.receive(Process(1), Message::Fail(coming, failure.clone()));
    // One that is open for long.
    let long = engine.open(2, both).expect("it opens");
    for number in 3..2 * ENDED as u64 {
        drop(engine.open(number, [Process(0)]).expect("it opens"));
    }
    long.fail(failure.clone());
    drop((first, long));
    world.queue.lock().expect("no panic").clear();
    for launch in [1, 2] {
        let key = Key {
            launch,
            execution: 0,
            op: 0,
            lane: 0,
            source: 0,
            target: 1,
        };
        for late in [Message::Here(launch), Message::Ready(key)] {
            engine.receive(Process(1), late);
            let told = world.queue.lock().expect("no panic").pop_front();
            let is_told = matches!(&told, Some((_, Process(1), Message::Fail(number, _))) if *number == launch);
            assert!(is_told, "{told:?}");
        }
        engine.receive(Process(1), Message::Fail(launch, failure.clone()));
        let table = lock(&engine.0.table);
        assert_eq!((table.early_count, table.here_count), (0, 0));
        assert_eq!(table.ended.len(), ENDED);
        drop(table);
        assert!(engine.is_idle());
        assert!(engine.open(launch, both).is_err());
        world.queue.lock().expect("no panic").clear();
    }
    assert_eq!(engine.open(coming, both).expect_err("failed"), failure);
}

#[test]
fn wrong_operations_are_refused() {
    let world = World::new(1, 8);
    let launches = world.open(1, &[0, 0]);
    let refused = |change: fn(&mut Op), inputs: &[Vec<u8>]| {
        let mut op = op(0, 2, 8);
        change(&mut op);
        let outcome = start(launch(&launches, 0), 0, &op, inputs);
        code(&outcome).expect("refused")
    };
    let good = [vec![0; 8]];
    assert_eq!(refused(|_| (), &[vec![0; 9]]), Code::InvalidArgument);
    assert_eq!(refused(|_| (), &[]), Code::InvalidArgument);
    let wrong: [fn(&mut Op); 9] = [
        |op| op.reduction = None,
        |op| op.groups = vec![vec![1]],
        |op| op.groups = vec![],
        |op| op.results = vec![4],
        |op| op.results = vec![8, 8],
        |op| op.kind = Kind::AllToAll,
        |op| op.kind = Kind::PartitionId,
        |op| {
            op.kind = Kind::AllGather;
            op.operands[0].run = 3;
            op.results = vec![16];
        },
        |op| {
            op.kind = Kind::Permute;
            op.groups = vec![vec![0, 1, 2]];
        },
    ];
    for change in wrong {
        assert_eq!(refused(change, &good), Code::InvalidArgument);
    }
    assert_eq!(
        refused(|op| op.operands[0].element = 21, &good),
        Code::Unimplemented
    );
    assert!(launch(&launches, 0).member(2).is_err());
    assert!(world.engines[0].open(9, [Process(3)]).is_err());
    assert!(world.engines[0].open(9, []).is_err());
}
