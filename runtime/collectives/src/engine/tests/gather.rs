//! Launches that wait for all their processes.

use super::*;
use crate::call::Code;

/// What a process hears of a launch.
type Heard = Arc<Mutex<Option<Result<(), Failure>>>>;

fn wait(launch: &Launch) -> Heard {
    let heard = Heard::default();
    let told = Arc::clone(&heard);
    launch.when_all_here(move |outcome| {
        assert!(told.lock().expect("no panic").replace(outcome).is_none());
    });
    heard
}

fn heard(heard: &Heard) -> Option<Result<(), Failure>> {
    heard.lock().expect("no panic").clone()
}

fn open(world: &World, process: usize, number: u64, placement: &[u32]) -> Launch {
    let all: Arc<[Process]> = placement.iter().map(|each| Process(*each)).collect();
    world.engines[process].open(number, all).expect("it opens")
}

#[test]
fn a_launch_starts_when_all_its_processes_can() {
    for seed in 0..20 {
        let mut world = World::new(4, seed);
        let placement = [2, 0, 0, 1, 2];
        let first = open(&world, 0, 7, &placement);
        let heard_first = wait(&first);
        first.here();
        world.run();
        // One that has no part in it has no say in it.
        world.engines[0].receive(Process(3), Message::Here(7));
        let second = open(&world, 1, 7, &placement);
        let heard_second = wait(&second);
        let third = open(&world, 2, 7, &placement);
        let heard_third = wait(&third);
        third.here();
        world.run();
        assert!(world.engines.iter().all(Engine::is_idle), "nothing runs");
        for each in [&heard_first, &heard_second, &heard_third] {
            assert_eq!(heard(each), None);
        }
        second.here();
        world.run();
        for each in [&heard_first, &heard_second, &heard_third] {
            assert_eq!(heard(each), Some(Ok(())));
        }
        assert!(!world.engines[0].is_idle(), "it runs");
        drop((first, second, third));
        assert!(world.engines.iter().all(Engine::is_idle));
    }
}

#[test]
fn who_waits_hears_of_a_failure() {
    let mut world = World::new(2, 3);
    let launches: Vec<_> = (0..2).map(|each| open(&world, each, 1, &[0, 1])).collect();
    let waiting: Vec<_> = launches.iter().map(wait).collect();
    launches[0].here();
    let failure = Failure::new(Code::Internal, "no input");
    launches[1].fail(failure.clone());
    world.run();
    for each in &waiting {
        assert_eq!(heard(each), Some(Err(failure.clone())));
    }
    // One that is known to have failed before anybody waits.
    let late = open(&world, 0, 2, &[0, 1]);
    late.fail(failure.clone());
    assert_eq!(heard(&wait(&late)), Some(Err(failure.clone())));
    // One that is given up by a process.
    let launches: Vec<_> = (0..2).map(|each| open(&world, each, 3, &[0, 1])).collect();
    let waiting: Vec<_> = launches.iter().map(wait).collect();
    let mut launches = launches.into_iter();
    drop(launches.next());
    world.run();
    for each in &waiting {
        let code = heard(each).and_then(Result::err).map(|each| each.code());
        assert_eq!(code, Some(Code::Aborted));
    }
    // One whose placement a process does not know.
    world.engines[0].refuse(4, [Process(1)], &failure);
    world.run();
    let all: Arc<[Process]> = Arc::new([Process(0), Process(1)]);
    assert_eq!(world.engines[1].open(4, all).expect_err("refused"), failure);
}

#[test]
fn who_waits_hears_of_a_lost_process() {
    let mut world = World::new(2, 3);
    let launch = open(&world, 0, 1, &[0, 1]);
    let waiting = wait(&launch);
    launch.here();
    let gone = Failure::new(Code::DataLoss, "gone");
    world.engines[0].lost(Process(1), &gone);
    assert_eq!(heard(&waiting), Some(Err(gone)));
    // What it could start before, it cannot after it was lost.
    world.engines[0].receive(Process(1), Message::Here(2));
    world.engines[0].lost(Process(1), &Failure::new(Code::DataLoss, "gone"));
    world.engines[0].found(Process(1));
    let launch = open(&world, 0, 2, &[0, 1]);
    let waiting = wait(&launch);
    launch.here();
    world.run();
    assert_eq!(heard(&waiting), None);
}

/// All messages between the two are lost, as with a connection, which is then made again.
fn breaks(world: &mut World, meanwhile: impl FnOnce()) {
    let broken = Failure::new(Code::DataLoss, "the connection has ended");
    world.cut = vec![Process(0)];
    world.run();
    world.engines[0].broke(Process(1), &broken);
    meanwhile();
    world.engines[1].broke(Process(0), &broken);
    world.run();
    world.cut.clear();
    world.engines[0].connected(Process(1));
    world.engines[1].connected(Process(0));
    world.run();
}

#[test]
fn a_launch_that_waits_outlives_a_connection() {
    let mut world = World::new(2, 7);
    let launches: Vec<_> = (0..2).map(|each| open(&world, each, 1, &[0, 1])).collect();
    let waiting: Vec<_> = launches.iter().map(wait).collect();
    launches[0].here();
    breaks(&mut world, || launches[1].here());
    for each in &waiting {
        assert_eq!(heard(each), Some(Ok(())));
    }
    // It has begun: bytes may be lost.
    breaks(&mut world, || {});
    for launch in &launches {
        let failure = launch.failure().map(|failure| failure.code());
        assert_eq!(failure, Some(Code::DataLoss));
    }
    // One side had begun, the other waits for word that was lost.
    let launches: Vec<_> = (0..2).map(|each| open(&world, each, 2, &[0, 1])).collect();
    let waiting: Vec<_> = launches.iter().map(wait).collect();
    launches[1].here();
    world.run();
    launches[0].here();
    assert_eq!(heard(&waiting[0]), Some(Ok(())));
    breaks(&mut world, || {});
    let code = heard(&waiting[1])
        .and_then(Result::err)
        .map(|each| each.code());
    assert_eq!(code, Some(Code::DataLoss));
    // One side fails it while there is none.
    let launches: Vec<_> = (0..2).map(|each| open(&world, each, 3, &[0, 1])).collect();
    let waiting: Vec<_> = launches.iter().map(wait).collect();
    launches[1].here();
    let failure = Failure::new(Code::Internal, "no input");
    breaks(&mut world, || launches[0].fail(failure.clone()));
    for each in &waiting {
        assert_eq!(heard(each), Some(Err(failure.clone())));
    }
    // What one could start before is not taken for what it can now.
    let first = open(&world, 0, 4, &[0, 1]);
    let waiting = wait(&first);
    world.engines[0].receive(Process(1), Message::Here(4));
    breaks(&mut world, || {});
    first.here();
    world.run();
    assert_eq!(heard(&waiting), None);
    let second = open(&world, 1, 4, &[0, 1]);
    let other = wait(&second);
    second.here();
    world.run();
    assert_eq!(
        [heard(&waiting), heard(&other)],
        [Some(Ok(())), Some(Ok(()))]
    );
}

/// The connection between the two was lost while one had the launch and the other had not, and has been made again.
#[test]
fn who_missed_word_of_a_failure_gets_it_again() {
    let lost = Failure::new(Code::DataLoss, "the connection has ended");
    for calls in [false, true] {
        let mut world = World::new(2, 5);
        let first = open(&world, 0, 7, &[0, 1]);
        first.here();
        world.run();
        world.engines[0].lost(Process(1), &lost);
        world.engines[1].lost(Process(0), &lost);
        world.cut = vec![Process(0)];
        world.run();
        world.cut.clear();
        world.engines[0].found(Process(1));
        world.engines[1].found(Process(0));
        let second = open(&world, 1, 7, &[0, 1]);
        let waits = wait(&second);
        if calls {
            // Something asks for a piece, as a part would that has been started.
            let key = crate::transport::Key {
                launch: 7,
                execution: 0,
                op: 0,
                lane: 0,
                source: 0,
                target: 1,
            };
            world.engines[0].receive(Process(1), Message::Ready(key));
        } else {
            second.here();
        }
        world.run();
        assert_eq!(heard(&waits), Some(Err(lost.clone())), "calls: {calls}");
    }
}
