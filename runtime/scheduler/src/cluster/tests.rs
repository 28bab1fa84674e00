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
    }
}

fn firsts(cluster: &Cluster) -> Vec<(u32, u32, i32)> {
    let workers = cluster.workers();
    workers
        .iter()
        .map(|w| (w.slice, w.task, w.first_device_id))
        .collect()
}

#[test]
fn ids_follow_places_whatever_the_order_of_arrival() {
    let mut cluster = Cluster::new(2, Some(2));
    let last = cluster.join(hello(1, 1, 2, 4)).unwrap();
    assert_eq!(
        cluster.first_device_id(last),
        None,
        "three places before it are unseen"
    );
    let first = cluster.join(hello(0, 0, 2, 1)).unwrap();
    assert_eq!(cluster.first_device_id(first), Some(0));
    cluster.join(hello(1, 0, 2, 8)).unwrap();
    assert_eq!(firsts(&cluster), [(0, 0, 0)]);
    assert_eq!(cluster.progress(), "3 of 4 workers");
    assert!(!cluster.is_complete());
    cluster.join(hello(0, 1, 2, 2)).unwrap();
    assert_eq!(
        firsts(&cluster),
        [(0, 0, 0), (0, 1, 1), (1, 0, 3), (1, 1, 11)]
    );
    assert_eq!(cluster.first_device_id(last), Some(11));
    assert!(cluster.is_complete());
}

#[test]
fn a_worker_that_comes_back_gets_the_same_ids_and_others_keep_theirs() {
    let mut cluster = Cluster::new(1, Some(2));
    let gone = cluster.join(hello(0, 0, 2, 4)).unwrap();
    let stays = cluster.join(hello(0, 1, 2, 4)).unwrap();
    cluster.leave(gone);
    assert_eq!(firsts(&cluster), [(0, 1, 4)]);
    assert_eq!(cluster.progress(), "1 of 2 workers");
    let back = cluster.join(hello(0, 0, 2, 4)).unwrap();
    assert_ne!(back, gone);
    assert_eq!(cluster.first_device_id(back), Some(0));
    assert_eq!(cluster.first_device_id(stays), Some(4));
    // The old registration's late end must not unseat the new worker.
    cluster.leave(gone);
    assert_eq!(cluster.live(), 2);
}

#[test]
fn the_first_worker_tells_the_size_of_a_slice() {
    let mut cluster = Cluster::new(2, None);
    assert_eq!(cluster.expected(), None);
    assert!(!cluster.is_complete());
    cluster.join(hello(0, 0, 3, 1)).unwrap();
    assert_eq!(cluster.expected(), Some(6));
    assert_eq!(
        cluster.join(hello(1, 0, 2, 1)),
        Err(Refusal::SliceTasks { theirs: 2, ours: 3 })
    );
}

#[test]
fn a_second_worker_in_a_place_is_refused_and_the_first_stays() {
    let mut cluster = Cluster::new(1, None);
    cluster.join(hello(0, 0, 1, 1)).unwrap();
    let mut second = hello(0, 0, 1, 1);
    second.address = "elsewhere:2".to_owned();
    let refusal = cluster.join(second).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "slice 0 task 0 is taken by the live worker at host-0-0:1: give this worker another --slice or --task, or stop \
         that one"
    );
    assert_eq!(cluster.workers()[0].address, "host-0-0:1");
}

#[test]
fn places_outside_the_cluster_are_refused() {
    let mut cluster = Cluster::new(1, Some(2));
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
    assert_eq!(cluster.live(), 0);
}

#[test]
fn another_link_version_is_refused_naming_both() {
    let mut cluster = Cluster::new(1, None);
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
    let mut cluster = Cluster::new(1, Some(2));
    assert!(matches!(
        cluster.join(hello(0, 0, 2, 0)),
        Err(Refusal::NoDevices { .. })
    ));
    let member = cluster.join(hello(0, 0, 2, 4)).unwrap();
    cluster.leave(member);
    assert!(matches!(
        cluster.join(hello(0, 0, 2, 8)),
        Err(Refusal::DeviceCount {
            before: 4,
            now: 8,
            ..
        })
    ));
    cluster.join(hello(0, 0, 2, 4)).unwrap();
    let mut other = hello(0, 1, 2, 4);
    other.inventory.as_mut().unwrap().platform_name = "cuda".to_owned();
    assert!(matches!(cluster.join(other), Err(Refusal::Platform { .. })));
}
