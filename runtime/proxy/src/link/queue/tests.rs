use std::{future::Future as _, pin::pin};

use futures::{FutureExt as _, StreamExt as _, task::noop_waker_ref};
use waystation_proto::waystation::worker::{
    Attach, Cancel, CancelPut, Execute, Put, SaveArrays, Watch, peers::Peer,
};

use super::{super::turns::TURN_OPS, *};

fn execute(first_result: u64) -> op::Op {
    op::Op::Execute(Execute {
        first_result,
        ..Execute::default()
    })
}

/// A queue and its stream, with so much credit.
fn queue(window: u32) -> (Arc<Queue>, Ops) {
    let queue = Queue::new(Gang::new().expect("random numbers"));
    let mut ops = Ops::new(&queue, op::Op::Attach(Attach::default()));
    let first = ops.next().now_or_never().flatten().expect("without credit");
    assert!(matches!(first.op, Some(op::Op::Attach(_))));
    queue.credit(window);
    (queue, ops)
}

/// Queues an op, or says that the lane is full.
fn send(lane: &Lane, op: op::Op) -> Option<()> {
    let room = lane.room().now_or_never()?;
    lane.send(op, room);
    Some(())
}

/// All that leaves now.
fn leaving(ops: &mut Ops) -> Vec<Op> {
    std::iter::from_fn(|| ops.next().now_or_never().flatten()).collect()
}

/// Sends until the lane is full; how many that were.
fn fill(lane: &Lane) -> usize {
    (0..)
        .take_while(|&n| send(lane, execute(n)).is_some())
        .count()
}

/// The promise of the module: whatever others have sent, the op of a client that had nothing waiting leaves next, and half
/// of the window at most is before it.
#[test]
fn the_op_of_a_quiet_session_leaves_next_among_floods() {
    let (queue, mut ops) = queue(8);
    let flooders: Vec<Lane> = (1..=15).map(|number| Lane::open(&queue, number)).collect();
    for lane in &flooders {
        assert_eq!(fill(lane), LANE_OPS, "a lane is bounded");
    }
    // The first ops of each go first, as all that come do. After that they are in the round.
    for _ in 0..3 * TURN_OPS * flooders.len() / 8 {
        let left = leaving(&mut ops).len();
        assert!((1..=8).contains(&left), "{left} ops in a window of 8");
        queue.credit(u32::try_from(left).expect("few"));
    }
    let mut left = leaving(&mut ops);
    let quiet = Lane::open(&queue, 99);
    for round in 0..100 {
        for lane in &flooders {
            fill(lane);
        }
        // The worker stands still: three quarters of its window is all that the others get.
        assert!(
            left.len() <= 6,
            "{} on the way in round {round}",
            left.len()
        );
        send(&quiet, op::Op::Execute(Execute::default())).expect("its lane is empty");
        send(&quiet, op::Op::Watch(Watch::default())).expect("its lane is empty");
        let next = leaving(&mut ops);
        let clients: Vec<u64> = next.iter().map(|op| op.client).collect();
        assert_eq!(clients, [99, 99], "in round {round}");
        queue.credit(u32::try_from(left.len() + next.len()).expect("few"));
        left = leaving(&mut ops);
        assert!(!left.is_empty(), "the others go on in round {round}");
    }
}

#[test]
fn a_client_that_is_alone_has_the_whole_window() {
    let (queue, mut ops) = queue(40);
    let lane = Lane::open(&queue, 1);
    fill(&lane);
    assert_eq!(leaving(&mut ops).len(), 40);
    queue.credit(16);
    assert_eq!(leaving(&mut ops).len(), 16);
}

#[test]
fn a_session_whose_lane_was_full_goes_on_when_half_of_it_has_left() {
    let (queue, mut ops) = queue(1);
    let lane = Lane::open(&queue, 1);
    fill(&lane);
    let mut context = Context::from_waker(noop_waker_ref());
    let mut waiting = pin!(lane.room());
    for left in 1..=LANE_OPS - REFILL_OPS {
        assert!(waiting.as_mut().poll(&mut context).is_pending(), "{left}");
        assert_eq!(leaving(&mut ops).len(), 1);
        queue.credit(1);
    }
    assert!(waiting.as_mut().poll(&mut context).is_ready());
    // Below that each place is free at once.
    assert_eq!(fill(&lane), LANE_OPS - REFILL_OPS);
}

#[test]
fn launches_are_numbered_as_they_leave_and_lanes_keep_their_order() {
    let (queue, mut ops) = queue(100);
    let (one, two) = (Lane::open(&queue, 1), Lane::open(&queue, 2));
    let turn = TURN_OPS as u64;
    for first in 0..turn + 2 {
        send(&one, execute(first)).expect("room");
    }
    send(&two, execute(99)).expect("room");
    let left: Vec<_> = leaving(&mut ops)
        .into_iter()
        .map(|op| match op.op {
            Some(op::Op::Execute(e)) => (e.launch, op.client, e.first_result),
            other => panic!("{other:?}"),
        })
        .collect();
    let mut wanted: Vec<_> = (0..turn).map(|n| (n + 1, 1, n)).collect();
    wanted.push((turn + 1, 2, 99));
    wanted.extend([(turn + 2, 1, turn), (turn + 3, 1, turn + 1)]);
    assert_eq!(left, wanted);
}

/// A shard's room must be free for the op that the client sends next, and still be there for those it sent before.
#[test]
fn clean_up_rides_between_the_ops_before_and_after_it() {
    let (queue, mut ops) = queue(100);
    let lane = Lane::open(&queue, 1);
    send(&lane, execute(0)).expect("room");
    lane.drop_shard(7);
    lane.release(8);
    send(&lane, execute(1)).expect("room");
    lane.drop_shard(9);
    let mut left = leaving(&mut ops);
    assert_eq!(left.len(), 2, "the last drop waits for an op to ride on");
    queue.send_cleanup();
    left.extend(leaving(&mut ops));
    let shape: Vec<_> = left
        .iter()
        .map(|op| (op.op.is_some(), op.drops.clone(), op.releases.clone()))
        .collect();
    assert_eq!(
        shape,
        [
            (true, vec![], vec![]),
            (true, vec![7], vec![8]),
            (false, vec![9], vec![])
        ]
    );
}

#[test]
fn much_clean_up_leaves_in_pieces_and_a_lane_goes_when_its_session_has() {
    let (queue, mut ops) = queue(100);
    let lane = Lane::open(&queue, 1);
    let count = CLEANUP_IDS as u64 * 2 + 5;
    for shard in 0..count {
        lane.drop_shard(shard);
    }
    send(&lane, execute(1)).expect("room");
    drop(lane);
    let left = leaving(&mut ops);
    assert!(left.iter().all(|op| op.drops.len() <= CLEANUP_IDS));
    assert!(left.last().is_some_and(|op| op.op.is_some()));
    let mut dropped: Vec<u64> = left.into_iter().flat_map(|op| op.drops).collect();
    dropped.sort_unstable();
    assert_eq!(dropped, (0..count).collect::<Vec<_>>());
    assert!(queue.lock().lanes.is_empty());
}

/// However the sweep falls between ops, what is dropped is sent once.
#[test]
fn a_sweep_sends_what_no_op_took_along() {
    let (queue, mut ops) = queue(100);
    let lane = Lane::open(&queue, 1);
    send(&lane, execute(0)).expect("room");
    lane.drop_shard(1);
    // The lane has an op still: the drop must follow it without another sweep.
    queue.send_cleanup();
    let left: Vec<_> = leaving(&mut ops).into_iter().map(|op| op.drops).collect();
    assert_eq!(left, [vec![], vec![1]]);
    // An op takes along what the sweep was for.
    lane.drop_shard(2);
    queue.send_cleanup();
    send(&lane, execute(1)).expect("room");
    let left: Vec<_> = leaving(&mut ops).into_iter().map(|op| op.drops).collect();
    assert_eq!(left, [vec![2]]);
    lane.drop_shard(3);
    drop(lane);
    assert!(leaving(&mut ops).is_empty());
    queue.send_cleanup();
    let left: Vec<_> = leaving(&mut ops).into_iter().map(|op| op.drops).collect();
    assert_eq!(left, [vec![3]]);
    assert!(queue.lock().lanes.is_empty());
}

#[tokio::test]
async fn the_sweep_comes_by_itself_and_ends_with_the_queue() {
    let (queue, mut ops) = queue(100);
    let sweeping = tokio::spawn(sweep(Arc::clone(&queue)));
    let lane = Lane::open(&queue, 1);
    for shard in 0..3 {
        lane.drop_shard(shard);
        let op = ops.next().await.expect("open");
        assert_eq!((op.op, op.drops), (None, vec![shard]));
    }
    drop(ops);
    sweeping.await.expect("no panic");
}

#[test]
fn a_lost_worker_lets_waiting_senders_go() {
    let (queue, ops) = queue(1);
    let lane = Lane::open(&queue, 1);
    fill(&lane);
    let mut waiting = pin!(lane.room());
    let mut context = Context::from_waker(noop_waker_ref());
    assert!(waiting.as_mut().poll(&mut context).is_pending());
    drop(ops);
    assert!(waiting.as_mut().poll(&mut context).is_ready());
    send(&lane, execute(1)).expect("a closed queue swallows");
    assert!(queue.lock().lanes.is_empty());
}

/// A worker whose window is full of launches that wait for a lost worker must hear that it is lost.
#[test]
fn word_of_other_workers_takes_no_credit_and_the_last_one_counts() {
    let (queue, mut ops) = queue(2);
    let lane = Lane::open(&queue, 1);
    fill(&lane);
    assert_eq!(leaving(&mut ops).len(), 2, "the window is full");
    let word = |process| Peers {
        peers: vec![Peer {
            process,
            ..Peer::default()
        }],
    };
    let mut context = Context::from_waker(noop_waker_ref());
    assert!(ops.poll_next_unpin(&mut context).is_pending());
    queue.tell(word(1));
    assert!(queue.lock().writer.is_none(), "the writer is woken");
    queue.tell(word(2));
    let left = leaving(&mut ops);
    assert_eq!(left.len(), 1);
    assert_eq!(
        (&left[0].op, left[0].client),
        (&Some(op::Op::Peers(word(2))), 0)
    );
    // The credit is what the worker gives, no more and no less.
    queue.credit(1);
    queue.tell(word(3));
    let left = leaving(&mut ops);
    assert_eq!(left.len(), 2);
    assert!(matches!(left[0].op, Some(op::Op::Peers(_))));
    assert!(matches!(left[1].op, Some(op::Op::Execute(_))));
}

/// A worker whose window is full of launches that wait for bytes must hear that these will not come.
#[test]
fn a_cancellation_takes_no_credit_and_follows_what_it_is_about() {
    let (queue, mut ops) = queue(2);
    let lane = Lane::open(&queue, 1);
    let put = |transfer| {
        op::Op::Put(Put {
            transfer,
            ..Put::default()
        })
    };
    let cancel_put = |transfer| {
        op::Op::CancelPut(CancelPut {
            transfer,
            ..CancelPut::default()
        })
    };
    let save = op::Op::SaveArrays(SaveArrays {
        request: 9,
        ..SaveArrays::default()
    });
    let cancel = op::Op::Cancel(Cancel { request: 9 });
    for op in [put(1), execute(1), put(2), save.clone(), execute(2)] {
        send(&lane, op).expect("room");
    }
    let left = |ops: &mut Ops| -> Vec<op::Op> {
        let left = leaving(ops).into_iter();
        left.map(|op| {
            assert_eq!(op.client, 1);
            op.op.expect("no clean-up")
        })
        .collect()
    };
    assert_eq!(left(&mut ops).len(), 2, "the window is full");
    let mut context = Context::from_waker(noop_waker_ref());
    assert!(ops.poll_next_unpin(&mut context).is_pending());
    lane.cancel(cancel_put(2));
    lane.cancel(cancel.clone());
    assert!(
        leaving(&mut ops).is_empty(),
        "not before what they are about"
    );
    assert!(ops.poll_next_unpin(&mut context).is_pending());
    lane.cancel(cancel_put(1));
    assert!(queue.lock().writer.is_none(), "the writer is woken");
    assert_eq!(left(&mut ops), [cancel_put(1)]);
    queue.credit(1);
    assert_eq!(left(&mut ops), [put(2), cancel_put(2)]);
    queue.credit(1);
    // Its session may be over by then.
    drop(lane);
    assert_eq!(left(&mut ops), [save, cancel]);
    queue.credit(1);
    let last = left(&mut ops);
    assert!(matches!(last[..], [op::Op::Execute(_)]));
    assert_eq!(queue.lanes(), 0);
}
