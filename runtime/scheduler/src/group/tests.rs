use super::*;

fn groups() -> Arc<Groups> {
    Groups::new(2, Some(2))
}

fn worker(slice: u32, task: u32, resume: u64) -> Candidate {
    Candidate {
        slice,
        task,
        tasks: 0,
        address: format!("host{task}:1"),
        resume,
    }
}

fn join(groups: &Arc<Groups>, slice: u32, task: u32, resume: u64) -> Member {
    groups
        .join(worker(slice, task, resume), 1000)
        .expect("it may join")
}

fn phase(member: &Member) -> Phase {
    member.phase.borrow().clone()
}

fn entry(value: &'static [u8], task: u32, number: u64) -> Entry {
    Entry {
        value: bytes::Bytes::from_static(value),
        task,
        number,
    }
}

#[test]
fn a_group_forms_when_all_have_come() {
    let groups = groups();
    let first = join(&groups, 0, 1, 0);
    let other = join(&groups, 1, 0, 0);
    assert_eq!(phase(&first), Phase::Gathering);
    let second = join(&groups, 0, 0, 0);
    assert_eq!(
        (phase(&first), phase(&second)),
        (Phase::Formed, Phase::Formed)
    );
    assert_eq!((first.id, first.nodes), (second.id, 2));
    // Slices have nothing in common.
    assert_eq!(phase(&other), Phase::Gathering);
    assert_ne!(other.id, first.id);
    groups
        .put(first.id, b"k", entry(b"v", 1, 1))
        .expect("the first");
    let look = groups.get(second.id, b"k").expect("the group is there");
    assert_eq!(look.value.as_deref(), Some(&b"v"[..]));
    let look = groups.get(other.id, b"k").expect("the group is there");
    assert_eq!(look.value, None);
}

#[test]
fn who_leaves_before_it_forms_can_come_again() {
    let groups = groups();
    let first = join(&groups, 0, 0, 0);
    assert!(first.leave().is_none());
    let again = join(&groups, 0, 0, 0);
    let second = join(&groups, 0, 1, 0);
    assert_eq!(phase(&again), Phase::Formed);
    assert_eq!(again.id, second.id);
}

#[test]
fn two_workers_of_one_place_do_not_end_each_others_groups() {
    let groups = groups();
    let taken = |refused: Result<Member, Refusal>| {
        let refusal = refused.expect_err("its place is taken");
        assert!(matches!(refusal, Refusal::Taken { .. }), "{refusal}");
        assert!(refusal.to_string().contains("host0:1"), "{refusal}");
    };
    let first = join(&groups, 0, 0, 0);
    taken(groups.join(worker(0, 0, 0), 1000));
    let second = join(&groups, 0, 1, 0);
    taken(groups.join(worker(0, 0, 0), 1000));
    assert_eq!(
        (phase(&first), phase(&second)),
        (Phase::Formed, Phase::Formed)
    );
    // Its own stream, which is not known to have ended.
    let same = join(&groups, 0, 0, first.id);
    assert!(first.leave().is_none());
    assert_eq!(phase(&same), Phase::Formed);
}

#[test]
fn a_group_ends_with_a_worker_and_takes_its_store_along() {
    let groups = groups();
    let (first, second) = (join(&groups, 0, 0, 0), join(&groups, 0, 1, 0));
    groups
        .put(first.id, b"k", entry(b"v", 0, 1))
        .expect("the first");
    let look = groups.get(first.id, b"other").expect("it is there");
    let (mut news, is_whole) = (look.news, look.is_whole);
    assert!(is_whole);
    let absent = second.leave().expect("it had formed");
    assert_eq!(phase(&first), Phase::Formed, "it may come back");
    assert_eq!(groups.expire(&absent), Some(first.id));
    assert!(
        matches!(phase(&first), Phase::Gone(why) if why.contains("task 1 at host1:1")),
        "{:?}",
        phase(&first)
    );
    assert!(news.has_changed().is_err(), "who waits is woken");
    news.mark_unchanged();
    let gone = Some(StoreError::Gone(first.id));
    assert_eq!(groups.get(first.id, b"k").err(), gone);
    assert_eq!(groups.put(first.id, b"j", entry(b"", 0, 2)).err(), gone);
    // The next one has nothing of it.
    let third = join(&groups, 0, 1, 0);
    assert!(third.id > first.id);
    let look = groups.get(third.id, b"k").expect("it is there");
    assert_eq!(look.value, None);
    let refused = groups.join(worker(0, 0, first.id), 1000).expect_err("old");
    assert!(matches!(refused, Refusal::Gone(_)), "{refused}");
}

#[test]
fn a_worker_that_comes_back_in_time_is_not_missed() {
    let groups = groups();
    let (first, second) = (join(&groups, 0, 0, 0), join(&groups, 0, 1, 0));
    let absent = second.leave().expect("it had formed");
    let back = join(&groups, 0, 1, first.id);
    assert_eq!(groups.expire(&absent), None);
    assert_eq!(
        (phase(&first), phase(&back)),
        (Phase::Formed, Phase::Formed)
    );
    assert_eq!(back.id, first.id);
}

#[test]
fn a_worker_that_starts_anew_ends_the_group_at_once() {
    let groups = groups();
    let (first, second) = (join(&groups, 0, 0, 0), join(&groups, 0, 1, 0));
    groups
        .put(first.id, b"k", entry(b"v", 1, 1))
        .expect("the first");
    let absent = second.leave().expect("it had formed");
    let anew = join(&groups, 0, 1, 0);
    assert!(matches!(phase(&first), Phase::Gone(_)));
    assert!(matches!(phase(&second), Phase::Gone(_)));
    assert_eq!(groups.expire(&absent), None);
    assert_eq!(phase(&anew), Phase::Gathering);
    // The streams of the old one end, and mean nothing to the new one.
    assert!(first.leave().is_none() && second.leave().is_none());
    assert_eq!(phase(&anew), Phase::Gathering);
}

#[test]
fn workers_bring_their_group_to_a_new_resource_manager() {
    let groups = groups();
    let first = join(&groups, 0, 0, 5000);
    assert_eq!((first.id, phase(&first)), (5000, Phase::Formed));
    groups
        .put(5000, b"k", entry(b"v", 0, 7))
        .expect("what it had put");
    let look = groups.get(5000, b"of the other").expect("it is there");
    assert!(!look.is_whole, "the other may have put it");
    let second = join(&groups, 0, 1, 5000);
    assert_eq!(second.id, 5000);
    let look = groups.get(5000, b"k").expect("it is there");
    assert_eq!(look.value.as_deref(), Some(&b"v"[..]));
    assert!(look.is_whole);
    assert!(!groups.expire_incomplete(5000), "all have come");
    // Ids go on growing, also behind those of before.
    assert!(second.leave().is_some());
    let anew = join(&groups, 0, 1, 0);
    assert!(anew.id > 5000);
    assert!(matches!(phase(&first), Phase::Gone(_)));
}

#[test]
fn wrong_workers_are_refused() {
    let refused = |groups: &Arc<Groups>, who| {
        let refusal = groups.join(who, 1000).expect_err("it is wrong");
        assert!(matches!(refusal, Refusal::Wrong(_)));
        refusal.to_string()
    };
    assert!(refused(&groups(), worker(2, 0, 0)).contains("no slice 2"));
    assert!(refused(&groups(), worker(0, 2, 0)).contains("task 2"));
    let who = Candidate {
        tasks: 3,
        ..worker(0, 0, 0)
    };
    let message = refused(&groups(), who);
    assert!(
        message.contains('3') && message.contains("has 2"),
        "{message}"
    );
    let nobody = Groups::new(1, None);
    assert!(refused(&nobody, worker(0, 1, 0)).contains("--slice_tasks"));
    let who = Candidate {
        tasks: 1,
        ..worker(0, 0, 0)
    };
    assert_eq!(nobody.join(who, 1000).expect("alone").nodes, 1);
}

#[test]
fn a_group_of_which_not_all_come_back_ends() {
    let groups = groups();
    let first = join(&groups, 0, 0, 5000);
    assert!(groups.expire_incomplete(5000));
    assert!(matches!(phase(&first), Phase::Gone(_)));
    assert!(!groups.expire_incomplete(5000));
}

#[test]
fn a_worker_that_says_that_it_ends_is_not_waited_for() {
    let groups = groups();
    let (first, _second) = (join(&groups, 0, 0, 0), join(&groups, 0, 1, 0));
    let gone = Err(StoreError::Gone(first.id + 1));
    assert_eq!(groups.leave(first.id + 1, 1, "?"), gone);
    groups
        .leave(first.id, 1, "out of luck")
        .expect("it is of it");
    let Phase::Gone(why) = phase(&first) else {
        panic!("{:?}", phase(&first));
    };
    assert!(
        why.contains("task 1 at host1:1") && why.ends_with("out of luck"),
        "{why}"
    );
    assert_eq!(
        groups.leave(first.id, 0, "late"),
        Err(StoreError::Gone(first.id))
    );
}

#[test]
fn a_worker_that_has_not_heard_that_the_group_has_formed_is_of_it() {
    let groups = groups();
    let (first, second) = (join(&groups, 0, 0, 0), join(&groups, 0, 1, 0));
    let absent = second.leave().expect("it had formed");
    let back = join(&groups, 0, 1, 0);
    assert_eq!((back.id, phase(&back)), (first.id, Phase::Formed));
    assert_eq!(phase(&first), Phase::Formed);
    assert_eq!(groups.expire(&absent), None);
    // Not one at another address.
    assert!(back.leave().is_some());
    let other = Candidate {
        address: "elsewhere:1".to_owned(),
        ..worker(0, 1, 0)
    };
    let other = groups.join(other, 1000).expect("a new group");
    assert_ne!(other.id, first.id);
    assert!(matches!(phase(&first), Phase::Gone(_)));
}

#[test]
fn a_worker_that_others_have_heard_of_does_not_start_anew_in_its_group() {
    let groups = groups();
    let (first, second) = (join(&groups, 0, 0, 0), join(&groups, 0, 1, 0));
    groups
        .put(first.id, b"k", entry(b"v", 1, 1))
        .expect("the first");
    assert!(second.leave().is_some());
    assert_ne!(join(&groups, 0, 1, 0).id, first.id);
    assert!(matches!(phase(&first), Phase::Gone(_)));

    // It has come back to a new resource manager, and has not put again what it had put.
    let back = join(&groups, 1, 1, 5000);
    assert!(back.leave().is_some());
    assert_ne!(join(&groups, 1, 1, 0).id, 5000);
    assert!(matches!(phase(&back), Phase::Gone(_)));
}

#[test]
fn workers_that_disagree_on_the_size_of_the_slice_do_not_end_each_others_groups() {
    let groups = Groups::new(1, None);
    let of = |task, tasks| Candidate {
        tasks,
        ..worker(0, task, 0)
    };
    let first = groups.join(of(0, 2), 1000).expect("of two");
    let refused = groups.join(of(1, 3), 1000).expect_err("of three");
    assert!(matches!(refused, Refusal::Wrong(_)), "{refused}");
    let text = refused.to_string();
    assert!(text.contains("has 3") && text.contains("host0:1"), "{text}");
    assert_eq!(phase(&first), Phase::Gathering);
    // Nobody is left who says otherwise.
    assert!(first.leave().is_none());
    assert_eq!(groups.join(of(1, 3), 1000).expect("of three").nodes, 3);
}
