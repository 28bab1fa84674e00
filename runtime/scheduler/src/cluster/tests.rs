//! Places and device ids.

use waystation_proto::waystation::scheduler::{WorkerInventory, worker_inventory::Device};

use super::*;

fn hello(slice: u32, task: u32, slice_tasks: u32, devices: usize) -> Hello {
    Hello {
        address: format!("host-{slice}-{task}:1"),
        slice,
        task,
        slice_tasks,
        link_version: waystation_proto::LINK_VERSION,
        build_id: waystation_proto::BUILD_ID.to_owned(),
        inventory: Some(WorkerInventory {
            platform_name: "cpu".to_owned(),
            devices: vec![Device::default(); devices],
            ..WorkerInventory::default()
        }),
        ..Hello::default()
    }
}

/// The workers that are there.
fn workers(cluster: &Cluster) -> Vec<AllottedWorker> {
    let all: Vec<u32> = (0..cluster.slices()).collect();
    let here = |worker: &AllottedWorker| worker.presence() == Presence::Here;
    cluster.places(&all).into_iter().filter(here).collect()
}

fn firsts(cluster: &Cluster) -> Vec<(u32, u32, i32)> {
    workers(cluster)
        .iter()
        .map(|w| (w.slice, w.task, w.first_device_id))
        .collect()
}

fn progress(cluster: &Cluster) -> String {
    let all: Vec<u32> = (0..cluster.slices()).collect();
    cluster.progress(&all)
}

#[test]
fn ids_follow_places_whatever_the_order_of_arrival() {
    let mut cluster = Cluster::new(2, Some(2), None);
    let last = cluster.join(hello(1, 1, 2, 4)).unwrap();
    assert_eq!(
        cluster.first_device_id(last),
        None,
        "nobody knows how many devices task 0 has"
    );
    let first = cluster.join(hello(0, 0, 2, 3)).unwrap();
    assert_eq!(cluster.first_device_id(first), Some(0));
    // Slices are alike: what slice 0 will have in task 1 is known from slice 1.
    assert_eq!(cluster.first_device_id(last), Some(10));
    cluster.join(hello(1, 0, 2, 3)).unwrap();
    assert_eq!(firsts(&cluster), [(0, 0, 0), (1, 0, 7), (1, 1, 10)]);
    assert_eq!(progress(&cluster), "1 of 2 slices (3 of 4 workers)");
    assert_eq!(cluster.whole(), [1]);
    cluster.join(hello(0, 1, 2, 4)).unwrap();
    assert_eq!(
        firsts(&cluster),
        [(0, 0, 0), (0, 1, 3), (1, 0, 7), (1, 1, 10)]
    );
    assert_eq!(cluster.whole(), [0, 1]);
}

#[test]
fn missing_places_show_what_their_like_has_and_why_they_are_gone() {
    let mut cluster = Cluster::new(3, Some(1), None);
    assert!(cluster.places(&[0, 1, 2]).is_empty());
    cluster.join(hello(1, 0, 1, 4)).unwrap();
    let gone = cluster.join(hello(2, 0, 1, 4)).unwrap();
    cluster.leave(gone, "pulled the plug", false);
    let places = cluster.places(&[1, 2, 0]);
    let seen: Vec<_> = places
        .iter()
        .map(|w| (w.presence(), w.virtual_slice, w.first_device_id, &*w.reason))
        .collect();
    assert_eq!(
        seen,
        [
            (Presence::Here, 0, 4, ""),
            (Presence::Gone, 1, 8, "pulled the plug"),
            (Presence::NotSeen, 2, 0, "")
        ]
    );
    assert!(
        places
            .iter()
            .all(|w| w.inventory.as_ref().unwrap().devices.len() == 4)
    );
}

#[test]
fn an_instance_type_gives_ids_before_anybody_comes_and_refuses_others() {
    let topology = Topology {
        name: "cpu:8".to_owned(),
        hosts: 2,
        devices_per_host: 4,
    };
    let mut cluster = Cluster::new(2, None, Some(topology));
    assert_eq!(cluster.expected(), Some(4));
    let member = cluster.join(hello(1, 1, 2, 4)).unwrap();
    assert_eq!(cluster.first_device_id(member), Some(12));
    for (tasks, devices) in [(2, 8), (4, 4)] {
        let refusal = cluster.join(hello(0, 0, tasks, devices)).unwrap_err();
        let text = refusal.to_string();
        assert!(
            text.starts_with(
                "wrong topology: the resource manager expects slices of cpu:8, which are 2 worker(s) with 4 device(s) each; \
                 found a worker at host-0-0:1"
            ),
            "{text}"
        );
        assert!(
            text.contains(&format!("{devices} device(s), one of {tasks}:")),
            "{text}"
        );
    }
    // A worker that was not told the size of its slice goes by the cluster's.
    cluster.join(hello(0, 0, 0, 4)).unwrap();
}

#[test]
fn workers_that_cannot_run_each_others_programs_are_refused_naming_both() {
    let mut cluster = Cluster::new(1, Some(2), None);
    let with = |task, digest: &str, features: &str, build: &str| {
        let mut hello = hello(0, task, 2, 4);
        hello.cpu_features = features.to_owned();
        hello.build_id = build.to_owned();
        hello.inventory.as_mut().unwrap().plugin_digest = digest.to_owned();
        hello
    };
    let ours = waystation_proto::BUILD_ID;
    let first = cluster
        .join(with(0, "aaaa", "x86_64,avx2,amx", ours))
        .unwrap();
    let refusal = |cluster: &mut Cluster, hello| cluster.join(hello).unwrap_err().to_string();
    let text = refusal(&mut cluster, with(1, "bbbb", "x86_64,avx2,amx", ours));
    assert!(
        text.starts_with("wrong plugin build: the worker at host-0-0:1 has cpu"),
        "{text}"
    );
    assert!(
        text.contains("sha256 aaaa") && text.contains("sha256 bbbb"),
        "{text}"
    );
    let text = refusal(&mut cluster, with(1, "aaaa", "x86_64,avx2,sse9", ours));
    assert!(text.starts_with("wrong processor"), "{text}");
    assert!(
        text.contains("first alone has amx, the second alone sse9"),
        "{text}"
    );
    let text = refusal(
        &mut cluster,
        with(1, "aaaa", "x86_64,avx2,amx", "waystation 9"),
    );
    assert!(
        text.contains(ours) && text.contains("waystation 9"),
        "{text}"
    );
    // One that is missed may be back, and proxies may never have lost it.
    assert!(cluster.miss(first, "its stream ended"));
    let text = refusal(&mut cluster, with(1, "bbbb", "x86_64,avx2,amx", ours));
    assert!(text.starts_with("wrong plugin build"), "{text}");
    // All of a cluster may be replaced by others, one after the other, when none of the old is left.
    cluster.leave(first, "replaced", false);
    cluster.join(with(1, "bbbb", "x86_64", ours)).unwrap();
}

#[test]
fn a_worker_that_registers_again_takes_its_own_place() {
    let mut cluster = Cluster::new(1, None, None);
    let broken = cluster.join(hello(0, 0, 1, 4)).unwrap();
    let again = cluster.join(hello(0, 0, 1, 4)).unwrap();
    cluster.leave(broken, "its stream broke", false);
    assert_eq!(workers(&cluster).len(), 1);
    assert_eq!(cluster.first_device_id(again), Some(0));
}

#[test]
fn a_worker_that_comes_back_gets_the_same_ids_and_others_keep_theirs() {
    let mut cluster = Cluster::new(1, Some(2), None);
    let gone = cluster.join(hello(0, 0, 2, 4)).unwrap();
    let stays = cluster.join(hello(0, 1, 2, 4)).unwrap();
    cluster.leave(gone, "", false);
    assert_eq!(firsts(&cluster), [(0, 1, 4)]);
    assert_eq!(progress(&cluster), "1 of 2 workers");
    let back = cluster.join(hello(0, 0, 2, 4)).unwrap();
    assert_ne!(back, gone);
    assert_eq!(cluster.first_device_id(back), Some(0));
    assert_eq!(cluster.first_device_id(stays), Some(4));
    // The old registration's late end must not unseat the new worker.
    cluster.leave(gone, "", false);
    assert_eq!(workers(&cluster).len(), 2);
}

#[test]
fn the_first_worker_tells_the_size_of_a_slice() {
    let mut cluster = Cluster::new(2, None, None);
    assert_eq!(cluster.expected(), None);
    assert!(cluster.whole().is_empty());
    cluster.join(hello(0, 0, 3, 1)).unwrap();
    assert_eq!(cluster.expected(), Some(6));
    assert_eq!(
        cluster.join(hello(1, 0, 2, 1)),
        Err(Refusal::SliceTasks { theirs: 2, ours: 3 })
    );
}

#[test]
fn the_size_of_a_slice_is_learned_anew_when_all_workers_have_gone() {
    let mut cluster = Cluster::new(2, None, None);
    // One that was not told of the others.
    let first = cluster.join(hello(0, 0, 0, 1)).unwrap();
    let other = hello(0, 1, 2, 1);
    let refusal = Err(Refusal::SliceTasks { theirs: 2, ours: 1 });
    assert_eq!(cluster.join(other.clone()), refusal);
    assert!(cluster.miss(first, "silent"));
    assert_eq!(cluster.join(other.clone()), refusal, "it may be back");
    assert!(cluster.leave(first, "gone", false));
    // One that is refused for another reason changes nothing.
    assert!(cluster.join(hello(0, 3, 2, 1)).is_err());
    assert_eq!(cluster.expected(), Some(2));
    cluster.join(other).unwrap();
    cluster.join(hello(0, 0, 2, 1)).unwrap();
    assert_eq!(cluster.expected(), Some(4));
    assert_eq!(firsts(&cluster), [(0, 0, 0), (0, 1, 1)]);

    // What the operator has said stays.
    let mut cluster = Cluster::new(1, Some(1), None);
    let only = cluster.join(hello(0, 0, 0, 1)).unwrap();
    assert!(cluster.leave(only, "gone", false));
    assert_eq!(cluster.join(hello(0, 0, 2, 1)), refusal);
}

#[test]
fn a_place_whose_worker_was_refused_says_so_until_one_has_come() {
    let mut cluster = Cluster::new(1, Some(2), None);
    cluster.join(hello(0, 0, 2, 1)).unwrap();
    let place = |task| Place { slice: 0, task };
    let refuse = |cluster: &mut Cluster, hello: Hello| {
        let place = place(hello.task);
        let refusal = cluster.join(hello).unwrap_err();
        cluster.note(place, &refusal)
    };
    let other = || Hello {
        build_id: "another".to_owned(),
        ..hello(0, 1, 2, 1)
    };
    assert!(refuse(&mut cluster, other()));
    assert!(!refuse(&mut cluster, other()), "the same again");
    let said = progress(&cluster);
    let begin = "1 of 2 workers; a worker for slice 0 task 1 was refused: wrong waystation build";
    assert!(said.starts_with(begin), "{said}");
    // A place that has its worker lacks nothing, and one that there is not is nobody's business.
    let second = Hello {
        address: "host-again:1".to_owned(),
        ..hello(0, 0, 2, 1)
    };
    assert!(!refuse(&mut cluster, second));
    assert!(refuse(&mut cluster, hello(0, 7, 2, 1)));
    let refused: Vec<_> = cluster.refusals().map(|(place, _)| place).collect();
    assert_eq!(refused, [place(1), place(7)]);
    cluster.join(hello(0, 1, 2, 1)).unwrap();
    assert_eq!(progress(&cluster), "2 of 2 workers");
    assert_eq!(cluster.refusals().count(), 1);
    for task in 8..u32::MAX {
        if !refuse(&mut cluster, hello(0, task, 2, 1)) {
            break;
        }
    }
    assert_eq!(cluster.refusals().count(), MAX_REFUSALS);
}

#[test]
fn a_slice_of_more_workers_than_there_can_be_is_refused_by_its_number() {
    for (slices, tasks) in [(1, 65_537), (1, u32::MAX), (65_536, 32_768)] {
        let mut cluster = Cluster::new(slices, None, None);
        let refusal = cluster.join(hello(0, 0, tasks, 1)).unwrap_err().to_string();
        assert!(
            refusal.contains(&format!("--slice_tasks={tasks}:")),
            "{refusal}"
        );
        assert_eq!(cluster.expected(), None);
        cluster.join(hello(0, 0, 32_767, 1)).unwrap();
    }
}

#[test]
fn a_second_worker_in_a_place_is_refused_and_the_first_stays() {
    let mut cluster = Cluster::new(1, None, None);
    cluster.join(hello(0, 0, 1, 1)).unwrap();
    let mut second = hello(0, 0, 1, 1);
    second.address = "elsewhere:2".to_owned();
    let refusal = cluster.join(second).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "slice 0 task 0 is taken by the live worker at host-0-0:1: give this worker another --slice or --task, or stop \
         that one"
    );
    assert_eq!(workers(&cluster)[0].address, "host-0-0:1");
}

#[test]
fn places_outside_the_cluster_are_refused() {
    let mut cluster = Cluster::new(1, Some(2), None);
    assert!(matches!(
        cluster.join(hello(1, 0, 2, 1)),
        Err(Refusal::NoSuchSlice {
            slices: 1,
            needed: 2,
            ..
        })
    ));
    assert!(matches!(
        cluster.join(hello(0, 2, 2, 1)),
        Err(Refusal::NoSuchTask { task: 2, tasks: 2 })
    ));
    assert!(matches!(
        cluster.join(hello(u32::MAX, 0, 2, 1)),
        Err(Refusal::NoSuchSlice { .. })
    ));
    assert!(workers(&cluster).is_empty());
}

#[test]
fn another_link_version_is_refused_naming_both() {
    let mut cluster = Cluster::new(1, None, None);
    let mut old = hello(0, 0, 1, 1);
    old.link_version = 99;
    old.build_id = "waystation 0.0.9".to_owned();
    let text = cluster.join(old).unwrap_err().to_string();
    assert!(
        text.contains("link version 99 (waystation 0.0.9)"),
        "{text}"
    );
    assert!(text.contains(waystation_proto::BUILD_ID), "{text}");
    assert_eq!(
        cluster.expected(),
        None,
        "a refused worker must not decide the size of a slice"
    );
}

#[test]
fn devices_must_exist_and_stay_the_same_in_number_and_platform() {
    let mut cluster = Cluster::new(1, Some(2), None);
    assert!(matches!(
        cluster.join(hello(0, 0, 2, 0)),
        Err(Refusal::NoDevices { .. })
    ));
    let member = cluster.join(hello(0, 0, 2, 4)).unwrap();
    cluster.leave(member, "", false);
    assert!(matches!(
        cluster.join(hello(0, 0, 2, 8)),
        Err(Refusal::DeviceCount {
            expected: 4,
            found: 8,
            ..
        })
    ));
    cluster.join(hello(0, 0, 2, 4)).unwrap();
    let mut other = hello(0, 1, 2, 4);
    other.inventory.as_mut().unwrap().platform_name = "cuda".to_owned();
    assert!(matches!(cluster.join(other), Err(Refusal::Platform { .. })));
}

#[test]
fn another_worker_may_take_the_place_of_one_that_is_missed() {
    let mut cluster = Cluster::new(1, Some(1), None);
    let first = cluster.join(hello(0, 0, 1, 4)).unwrap();
    let at = |address: &str| Hello {
        address: address.to_owned(),
        build_id: "another build".to_owned(),
        ..hello(0, 0, 1, 4)
    };
    assert!(matches!(
        cluster.join(at("elsewhere:1")),
        Err(Refusal::Taken { .. })
    ));
    assert!(cluster.miss(first, "its stream ended"));
    let presence = |cluster: &Cluster| cluster.places(&[0])[0].presence();
    assert_eq!(presence(&cluster), Presence::Missed);
    assert_eq!((cluster.whole(), cluster.complete()), (vec![], vec![0]));
    cluster.join(at("elsewhere:1")).unwrap();
    assert_eq!(presence(&cluster), Presence::Here);
    // Of the one before nothing is left.
    assert!(!cluster.miss(first, "late"));
    assert!(!cluster.leave(first, "late", false));
    assert_eq!(presence(&cluster), Presence::Here);
}

#[test]
fn the_host_of_a_worker_that_is_gone_is_forgotten() {
    let place = Place { slice: 0, task: 0 };
    let mut cluster = Cluster::new(1, Some(1), None);
    cluster.introduce(place, "first".to_owned());
    let first = cluster.join(hello(0, 0, 1, 4)).unwrap();
    // Its stream may come again, without an introduction.
    assert!(cluster.miss(first, "silent"));
    let again = cluster.join(hello(0, 0, 1, 4)).unwrap();
    assert!(!cluster.leave(first, "silent", false));
    assert_eq!(cluster.host(place), Host::Introduced("first"));
    assert!(cluster.leave(again, "silent", false));
    assert_eq!(cluster.host(place), Host::Unknown);

    cluster.introduce(place, "second".to_owned());
    let second = cluster.join(hello(0, 0, 1, 4)).unwrap();
    // The next one may be there before the lease of this one is over.
    cluster.introduce(place, "third".to_owned());
    assert!(cluster.leave(second, "silent", false));
    assert_eq!(cluster.host(place), Host::Introduced("third"));
}

#[test]
fn progress_names_the_hosts_that_workers_wait_for() {
    let of = |slice, task| Place { slice, task };
    let mut cluster = Cluster::new(2, Some(2), None);
    cluster.introduce(of(1, 0), "a".to_owned());
    assert_eq!(progress(&cluster), "0 of 2 slices (0 of 4 workers)");
    let others = BTreeSet::from([of(0, 0), of(1, 1)]);
    assert!(cluster.waits(of(1, 0), others.clone()));
    assert_eq!(
        progress(&cluster),
        "0 of 2 slices (0 of 4 workers, 1 more waits for the host of slice 0 task 0 and 1 more)"
    );
    assert_eq!(cluster.progress(&[0]), "0 of 2 workers");
    // It asks again, and another one comes.
    cluster.introduce(of(1, 0), "a".to_owned());
    assert!(!cluster.waits(of(1, 0), others));
    cluster.introduce(of(1, 1), "b".to_owned());
    assert!(cluster.waits(of(1, 1), BTreeSet::from([of(0, 0)])));
    let waiting = "0 of 2 slices (0 of 4 workers, 2 more wait for the host of slice 0 task 0)";
    assert_eq!(progress(&cluster), waiting);
    // Its coming is known before they have asked again.
    cluster.introduce(of(0, 0), "c".to_owned());
    assert_eq!(progress(&cluster), "0 of 2 slices (0 of 4 workers)");
    assert!(cluster.waits(of(1, 0), BTreeSet::new()));
    let member = cluster.join(hello(1, 1, 2, 4)).unwrap();
    assert!(cluster.leave(member, "silent", false));
    assert_eq!(progress(&cluster), "0 of 2 slices (0 of 4 workers)");
}
