use futures::{FutureExt as _, StreamExt as _};
use proptest::prelude::*;
use waystation_proto::waystation::worker::{Attach, Op, Watch, op};

use super::*;
use crate::link::queue::Ops;

/// Queues of one gang, their streams, and lanes of so many clients in each: `lanes[client][queue]`.
struct Setup {
    gang: Arc<Gang>,
    queues: Vec<Arc<Queue>>,
    streams: Vec<Option<Ops>>,
    lanes: Vec<Vec<Arc<Lane>>>,
}

fn peer(process: u32) -> Peer {
    Peer {
        process,
        address: format!("host:{process}"),
        life: u64::from(process),
        ..Peer::default()
    }
}

fn setup(queues: usize, clients: u64, window: u32) -> Setup {
    let gang = Gang::new().expect("random numbers");
    let queues: Vec<_> = (0..queues).map(|_| Queue::new(Arc::clone(&gang))).collect();
    let streams = queues.iter().map(|queue| {
        let mut ops = Ops::new(queue, op::Op::Attach(Attach::default()));
        ops.next().now_or_never().flatten().expect("the attach");
        queue.credit(window);
        Some(ops)
    });
    let streams = streams.collect();
    let lanes = (1..=clients).map(|client| {
        queues
            .iter()
            .map(|queue| Arc::new(Lane::open(queue, client)))
            .collect()
    });
    Setup {
        gang,
        streams,
        lanes: lanes.collect(),
        queues,
    }
}

impl Setup {
    /// Queues a launch of a client over some of the queues, or says that there is no room.
    fn launch(&self, client: usize, over: &[usize], tag: u64) -> Option<()> {
        self.launch_needing(client, over, tag, Needs::default())
    }

    fn launch_needing(&self, client: usize, over: &[usize], tag: u64, needs: Needs) -> Option<()> {
        let lanes = || over.iter().map(|&queue| &self.lanes[client][queue]);
        let number = client as u64 + 1;
        let later = self.gang.places_later(number, &needs);
        let rooms = rooms(lanes(), later).now_or_never()?;
        let part = || Execute {
            first_result: tag,
            ..Execute::default()
        };
        let parts = lanes().map(|lane| (lane, part())).zip(rooms);
        self.gang.send(number, needs, parts);
        Some(())
    }

    /// Queues another op, of a client's own.
    fn local(&self, client: usize, queue: usize) -> Option<()> {
        let lane = &self.lanes[client][queue];
        let room = lane.room().now_or_never()?;
        lane.send(op::Op::Watch(Watch::default()), room);
        Some(())
    }

    /// What leaves a queue now.
    fn leaving(&mut self, queue: usize) -> Vec<Op> {
        let Some(ops) = &mut self.streams[queue] else {
            return Vec::new();
        };
        std::iter::from_fn(|| ops.next().now_or_never().flatten()).collect()
    }

    /// The worker says that it has started what was placed with these.
    fn start(&self, queue: usize, ops: &[Op]) {
        for launch in starts(ops) {
            self.gang.started(&self.queues[queue], launch);
        }
    }

    fn credit(&self, queue: usize, ops: usize) {
        self.queues[queue].credit(u32::try_from(ops).expect("few"));
    }
}

/// Number and tag of the launches.
fn launches(ops: &[Op]) -> Vec<(u64, u64)> {
    ops.iter()
        .filter_map(|op| match &op.op {
            Some(op::Op::Execute(execute)) => Some((execute.launch, execute.first_result)),
            _ => None,
        })
        .collect()
}

/// The numbers of the launches that get their place later than they were sent.
fn starts(ops: &[Op]) -> Vec<u64> {
    ops.iter()
        .filter_map(|op| match &op.op {
            Some(op::Op::Start(start)) => Some(start.launch),
            _ => None,
        })
        .collect()
}

fn clients(ops: &[Op]) -> Vec<u64> {
    ops.iter().map(|op| op.client).collect()
}

/// In the first queue the first client has much before its launch, in the second queue the other one has.
#[test]
fn launches_leave_all_queues_in_one_order_whatever_lies_before_them() {
    let mut all = setup(2, 2, 200);
    for _ in 0..50 {
        all.local(0, 0).expect("room");
        all.local(1, 1).expect("room");
    }
    all.launch(0, &[0, 1], 7).expect("room");
    all.launch(1, &[0, 1], 8).expect("room");
    all.launch(0, &[1, 0], 9).expect("room");
    for queue in 0..2 {
        let ops = all.leaving(queue);
        assert_eq!(ops.len(), 53);
        assert_eq!(launches(&ops), [(1, 7), (2, 8), (3, 9)]);
        assert_eq!(all.queues[queue].len(), 0);
    }
}

#[test]
fn a_lane_that_waits_for_another_one_s_launch_holds_up_no_third() {
    let mut all = setup(1, 3, 2);
    for _ in 0..100 {
        all.local(0, 0).expect("room");
    }
    all.launch(0, &[0], 1).expect("room");
    all.launch(1, &[0], 2).expect("room");
    // The busy one has had its first turn.
    for _ in 0..10 {
        let ops = all.leaving(0);
        all.credit(0, ops.len());
    }
    for round in 0..20 {
        all.local(2, 0).expect("room");
        let ops = all.leaving(0);
        assert!(
            clients(&ops).contains(&3),
            "in round {round}: {:?}",
            clients(&ops)
        );
        assert!(launches(&ops).is_empty());
        all.credit(0, ops.len());
    }
    // The one that is waited for goes on meanwhile, and the launches leave in their order at last.
    let mut seen = Vec::new();
    while all.queues[0].len() > 0 {
        let ops = all.leaving(0);
        assert!(!ops.is_empty(), "stuck with {} ops", all.queues[0].len());
        seen.extend(launches(&ops));
        all.credit(0, ops.len());
    }
    assert_eq!(seen, [(1, 1), (2, 2)]);
}

#[test]
fn a_launch_without_room_in_all_queues_is_in_none() {
    let mut all = setup(2, 2, 0);
    for tag in 0..GANG_PLACES as u64 {
        all.launch(0, &[1], tag).expect("room");
    }
    assert!(
        all.launch(1, &[0, 1], 99).is_none(),
        "no place in the second"
    );
    assert_eq!(all.queues[0].len(), 0);
    // A place in the first was given back: all of them can be taken.
    for tag in 0..GANG_PLACES as u64 {
        all.launch(1, &[0], tag).expect("room");
    }
    assert!(all.launch(1, &[0], 99).is_none());
    all.credit(1, 1);
    assert_eq!(all.leaving(1).len(), 1);
    all.credit(0, 1);
    assert_eq!(all.leaving(0).len(), 1);
    all.launch(1, &[0, 1], 99)
        .expect("a place each is free again");
}

/// A busy client's launches do not keep a quiet one from its own for longer than those that are queued take.
#[test]
fn clients_take_turns_at_the_places_for_launches() {
    let mut all = setup(1, 2, 0);
    let lanes = std::mem::take(&mut all.lanes);
    let mut busy: Vec<_> = Vec::new();
    for _ in 0..3 * GANG_PLACES {
        busy.push(Box::pin(rooms(std::iter::once(&lanes[0][0]), false)));
    }
    let mut sent = 0;
    // One after the other, as a session does.
    while let Some(rooms) = busy[sent].as_mut().now_or_never() {
        let parts = std::iter::once((&lanes[0][0], Execute::default())).zip(rooms);
        all.gang.send(1, Needs::default(), parts);
        sent += 1;
    }
    assert_eq!(sent, GANG_PLACES);
    let mut quiet = Box::pin(rooms(std::iter::once(&lanes[1][0]), false));
    assert!(quiet.as_mut().now_or_never().is_none());
    all.credit(0, 2);
    assert_eq!(all.leaving(0).len(), 2);
    // The busy one's next launch was waiting first, then it is the quiet one's turn.
    assert!(busy[sent].as_mut().now_or_never().is_some());
    assert!(quiet.as_mut().now_or_never().is_some());
}

#[test]
fn a_client_that_goes_leaves_whole_launches_and_nothing_else() {
    let mut all = setup(2, 2, 0);
    all.local(0, 0).expect("room");
    all.launch(0, &[0, 1], 1).expect("room");
    all.launch(1, &[0, 1], 2).expect("room");
    all.lanes.remove(0);
    for queue in 0..2 {
        all.credit(queue, 10);
        let ops = all.leaving(queue);
        assert_eq!(launches(&ops), [(1, 1), (2, 2)]);
    }
    all.lanes.clear();
    for queue in &all.queues {
        assert_eq!(queue.lanes(), 0);
    }
}

#[test]
fn a_worker_that_is_lost_keeps_nothing_of_the_others_waiting() {
    let mut all = setup(3, 2, 0);
    for tag in 0..GANG_PLACES as u64 {
        all.launch(0, &[0, 1], tag).expect("room");
    }
    assert!(all.launch(1, &[1, 2], 99).is_none());
    all.streams[0] = None;
    // Closed, it swallows what comes.
    all.credit(1, 4);
    assert_eq!(launches(&all.leaving(1)).len(), 4);
    all.launch(1, &[0, 1], 50).expect("room");
    all.launch(1, &[1, 2], 51).expect("room");
    all.credit(1, 100);
    all.credit(2, 100);
    let ended = launches(&all.leaving(1));
    assert_eq!(ended.len(), GANG_PLACES - 4 + 2);
    assert_eq!(launches(&all.leaving(2)), ended[ended.len() - 1..]);
}

/// The numbers of the launches, in the order in which they are placed.
fn placed(ops: &[Op]) -> Vec<u64> {
    ops.iter()
        .filter_map(|op| match &op.op {
            Some(op::Op::Execute(execute)) if !execute.placed_later => Some(execute.launch),
            Some(op::Op::Start(start)) => Some(start.launch),
            _ => None,
        })
        .collect()
}

#[test]
fn a_launch_that_waits_for_a_client_s_bytes_holds_up_no_other_client_s() {
    let mut all = setup(2, 2, 100);
    let (needs, unmet) = Needs::one();
    all.launch_needing(0, &[0, 1], 7, needs.clone())
        .expect("room");
    // It may need what the first one makes.
    all.launch(0, &[1, 0], 8).expect("room");
    all.launch(1, &[0, 1], 9).expect("room");
    for queue in 0..2 {
        let ops = all.leaving(queue);
        assert_eq!(launches(&ops), [(1, 7), (2, 8), (3, 9)]);
        assert_eq!(placed(&ops), [3]);
    }
    all.launch(1, &[0, 1], 10).expect("room");
    drop(unmet);
    all.launch(0, &[0], 11).expect("room");
    let left = [all.leaving(0), all.leaving(1)];
    assert_eq!(placed(&left[0]), [4, 1, 2, 5]);
    assert_eq!(placed(&left[1]), [4, 1, 2]);
    for (queue, left) in left.iter().enumerate() {
        all.start(queue, left);
    }
    let order = lock(&all.gang.order);
    assert!(order.clients.is_empty() && order.placed.is_empty());
}

/// It fails with the worker, and what it needs may never come.
#[test]
fn a_launch_whose_worker_is_lost_is_waited_for_no_more() {
    let mut all = setup(3, 1, 100);
    let processes: Vec<u32> = all.queues.iter().map(|_| all.gang.next_process()).collect();
    for (queue, &process) in all.queues.iter().zip(&processes) {
        all.gang.join(peer(process), queue);
    }
    let (first, _never) = Needs::one();
    let (second, later) = Needs::one();
    all.launch_needing(0, &[0, 2], 1, first).expect("room");
    all.launch_needing(0, &[0, 1], 2, second).expect("room");
    all.launch(0, &[0, 1], 3).expect("room");
    assert!(placed(&all.leaving(0)).is_empty());
    all.streams[2] = None;
    all.gang.leave(processes[2]);
    assert_eq!(placed(&all.leaving(0)), [1]);
    drop(later);
    assert_eq!(placed(&all.leaving(0)), [2, 3]);
    assert_eq!(placed(&all.leaving(1)), [2, 3]);
}

#[test]
fn a_client_has_a_bounded_number_of_launches_without_a_place() {
    let mut all = setup(1, 1, 4);
    let (needs, unmet) = Needs::one();
    for tag in 0..LATER_PLACES as u64 {
        all.launch_needing(0, &[0], tag, needs.clone())
            .expect("room");
        assert_eq!(all.leaving(0).len(), 1);
        all.credit(0, 1);
    }
    assert!(all.launch_needing(0, &[0], 0, needs).is_none());
    drop(unmet);
    let mut starts = 0;
    while all.queues[0].len() > 0 {
        let ops = all.leaving(0);
        starts += placed(&ops).len();
        all.credit(0, ops.len());
        all.start(0, &ops);
    }
    assert_eq!(starts, LATER_PLACES);
    all.launch(0, &[0], 1).expect("room");
}

/// However far a client has sent ahead, others come behind a few of its launches.
#[test]
fn a_client_has_a_bounded_number_of_launches_that_are_placed_later_and_have_not_started() {
    let mut all = setup(3, 2, 1000);
    let (needs, unmet) = Needs::one();
    let many = 3 * PLACED as u64;
    for tag in 0..many {
        let over: &[usize] = if tag % 2 == 0 { &[0, 1] } else { &[0, 1, 2] };
        all.launch_needing(0, over, tag, needs.clone())
            .expect("room");
    }
    drop(unmet);
    all.launch(1, &[0, 1], 99).expect("room");
    let ops = [all.leaving(0), all.leaving(1)];
    let first: Vec<u64> = (1..=PLACED as u64).collect();
    assert_eq!(starts(&ops[0]), first);
    assert_eq!(placed(&ops[0]).last(), Some(&(many + 1)), "behind those");
    // Not all workers have started any of them.
    all.start(0, &ops[0]);
    assert!(starts(&all.leaving(0)).is_empty());
    // The last one that the first launch was waited for at, and one that is no part of it says nothing.
    all.gang.started(&all.queues[2], 1);
    assert!(starts(&all.leaving(0)).is_empty());
    all.gang.started(&all.queues[1], 1);
    assert_eq!(starts(&all.leaving(0)), [PLACED as u64 + 1]);
    // Those that wait for nobody else go on when a worker is lost, and what comes later fails with it.
    all.streams[1] = None;
    all.gang.lost();
    let mut left = PLACED + 1;
    loop {
        let ops = [all.leaving(0), all.leaving(2)];
        if ops.iter().all(Vec::is_empty) {
            break;
        }
        left += starts(&ops[0]).len();
        all.start(0, &ops[0]);
        all.start(2, &ops[1]);
    }
    assert_eq!(left, 3 * PLACED);
    all.start(0, &[]);
    all.launch(0, &[0, 2], 1).expect("room");
}

/// What the random test does.
#[derive(Clone, Debug)]
enum Step {
    Launch {
        client: usize,
        over: Vec<usize>,
        needs: bool,
    },
    Meet {
        need: usize,
    },
    Local {
        client: usize,
        queue: usize,
    },
    Drop {
        client: usize,
        queue: usize,
    },
    Run {
        queue: usize,
        ops: usize,
    },
    Leave {
        client: usize,
    },
    Lose {
        queue: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let client = 0..4usize;
    let queue = 0..3usize;
    prop_oneof![
        5 => (client.clone(), proptest::sample::subsequence(vec![0, 1, 2], 2..=3), proptest::bool::weighted(0.2))
            .prop_map(|(client, over, needs)| Step::Launch { client, over, needs }),
        1 => (0..1000usize).prop_map(|need| Step::Meet { need }),
        6 => (client.clone(), queue.clone()).prop_map(|(client, queue)| Step::Local { client, queue }),
        2 => (client.clone(), queue.clone()).prop_map(|(client, queue)| Step::Drop { client, queue }),
        6 => (queue.clone(), 1..20usize).prop_map(|(queue, ops)| Step::Run { queue, ops }),
        1 => client.prop_map(|client| Step::Leave { client }),
        1 => queue.prop_map(|queue| Step::Lose { queue }),
    ]
}

proptest! {
    /// Whatever clients send and workers take when, and when what launches need is there: no two launches are placed in different
    /// orders on two workers, a client's are in its own, each is on all its workers that live, and in the end nothing is left.
    #[test]
    fn no_schedule_reverses_two_launches_or_keeps_one(
        window in 1..9u32,
        steps in prop::collection::vec(step(), 1..300),
    ) {
        let mut all = setup(3, 4, window);
        let mut left: Vec<Vec<u64>> = vec![Vec::new(); 3];
        let mut sent: Vec<Vec<u64>> = vec![Vec::new(); 3];
        let mut locals = vec![vec![(0u64, 0u64); 3]; 4];
        let mut gone = [false; 4];
        let mut on_the_way = [0usize; 3];
        let mut unmet = Vec::new();
        let mut of_client = vec![Vec::new(); 4];
        let run = |all: &mut Setup, left: &mut Vec<Vec<u64>>, locals: &mut Vec<Vec<(u64, u64)>>, on_the_way: &mut [usize; 3], queue: usize, ops: usize| {
            let ops = ops.min(on_the_way[queue]);
            all.credit(queue, ops);
            on_the_way[queue] -= ops;
            let leaving = all.leaving(queue);
            all.start(queue, &leaving);
            on_the_way[queue] += leaving.len();
            left[queue].extend(placed(&leaving));
            for op in &leaving {
                if matches!(op.op, Some(op::Op::Watch(_))) {
                    locals[usize::try_from(op.client - 1).expect("few")][queue].1 += 1;
                }
            }
            leaving.len()
        };
        for step in steps {
            match step {
                Step::Launch { client, over, needs } if !gone[client] => {
                    let number = all.gang.launches.load(Relaxed);
                    let needs = match needs {
                        true => {
                            let (needs, need) = Needs::one();
                            unmet.push(need);
                            needs
                        }
                        false => Needs::default(),
                    };
                    if all.launch_needing(client, &over, number, needs).is_some() {
                        for queue in over {
                            sent[queue].push(number);
                        }
                        of_client[client].push(number);
                    }
                }
                Step::Meet { need } if !unmet.is_empty() => drop(unmet.swap_remove(need % unmet.len())),
                Step::Local { client, queue } if !gone[client] => {
                    let sent = all.local(client, queue).is_some();
                    locals[client][queue].0 += u64::from(sent);
                }
                Step::Drop { client, queue } if !gone[client] => all.lanes[client][queue].drop_shard(1),
                Step::Run { queue, ops } => {
                    run(&mut all, &mut left, &mut locals, &mut on_the_way, queue, ops);
                }
                Step::Leave { client } if !gone[client] && gone.iter().filter(|gone| !**gone).count() > 1 => {
                    gone[client] = true;
                    all.lanes[client].clear();
                }
                Step::Lose { queue } if all.streams.iter().flatten().count() > 2 => {
                    all.streams[queue] = None;
                    all.gang.lost();
                }
                _ => {}
            }
        }
        unmet.clear();
        let open: Vec<usize> = (0..3).filter(|&queue| all.streams[queue].is_some()).collect();
        loop {
            let mut some = 0;
            for &queue in &open {
                some += run(&mut all, &mut left, &mut locals, &mut on_the_way, queue, 8);
            }
            if some == 0 && open.iter().all(|&queue| on_the_way[queue] == 0) {
                break;
            }
        }
        for &queue in &open {
            prop_assert_eq!(all.queues[queue].len(), 0, "queue {} is stuck", queue);
            let mut sorted = left[queue].clone();
            sorted.sort_unstable();
            prop_assert_eq!(&sorted, &sent[queue]);
            for own in &of_client {
                prop_assert!(left[queue].iter().filter(|number| own.contains(number)).is_sorted());
            }
            for other in &open {
                let shared = |one: usize, two: usize| -> Vec<u64> {
                    left[one].iter().filter(|number| left[two].contains(number)).copied().collect()
                };
                prop_assert_eq!(shared(queue, *other), shared(*other, queue));
            }
            for client in &locals {
                prop_assert_eq!(client[queue].0, client[queue].1);
            }
        }
        all.lanes.clear();
        for &queue in &open {
            all.queues[queue].send_cleanup();
            all.credit(queue, 100);
            all.leaving(queue);
            prop_assert_eq!(all.queues[queue].lanes(), 0);
        }
    }
}

/// What was sent to a lane of the proxy's own.
fn told(ops: Vec<Op>) -> Vec<Vec<(u32, String)>> {
    ops.into_iter()
        .map(|op| match op.op {
            Some(op::Op::Peers(peers)) => {
                assert_eq!(op.client, 0);
                let peers = peers.peers.into_iter();
                peers.map(|peer| (peer.process, peer.address)).collect()
            }
            other => panic!("{other:?}"),
        })
        .collect()
}

#[test]
fn workers_hear_who_the_others_are_whenever_that_changes() {
    let mut all = setup(3, 0, 50);
    let process: Vec<u32> = all.queues.iter().map(|_| all.gang.next_process()).collect();
    for (queue, &process) in all.queues.iter().zip(&process) {
        all.gang.join(peer(process), queue);
    }
    all.gang.tell();
    all.gang.tell();
    let named = |process: u32| (process, format!("host:{process}"));
    assert_eq!(told(all.leaving(0)), [[named(1), named(2)]], "told once");
    assert_eq!(told(all.leaving(1)), [[named(0), named(2)]]);
    all.leaving(2);
    all.streams[1] = None;
    all.gang.leave(1);
    all.gang.leave(1);
    assert_eq!(told(all.leaving(0)), [[named(2)]]);
    assert_eq!(told(all.leaving(2)), [[named(0)]]);
    // One that comes back is another process.
    assert_eq!(all.gang.next_process(), 3);
}
