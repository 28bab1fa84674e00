use super::*;
use proptest::prelude::*;

/// Options as a client writes them, with the given assignment (one list of ids a computation) and counts.
fn options(replicas: u64, partitions: u64, assignment: Option<(u64, u64, &[&[u64]])>) -> Vec<u8> {
    let mut build = Message::default();
    build.push_varint(NUM_REPLICAS, replicas);
    build.push_varint(NUM_PARTITIONS, partitions);
    if let Some((replicas, computations, devices)) = assignment {
        let mut message = Message::default();
        message.push_varint(REPLICA_COUNT, replicas);
        message.push_varint(COMPUTATION_COUNT, computations);
        for ids in devices {
            let mut computation = Message::default();
            ids.iter()
                .for_each(|id| computation.push_varint(REPLICA_DEVICE_IDS, *id));
            message.push_bytes(COMPUTATION_DEVICES, &computation.encode());
        }
        build.push_bytes(DEVICE_ASSIGNMENT, &message.encode());
    }
    let mut options = Message::default();
    options.push_bytes(EXECUTABLE_BUILD_OPTIONS, &build.encode());
    options.encode()
}

#[test]
fn ids_come_replica_major() {
    let bytes = options(2, 3, Some((2, 3, &[&[10, 20], &[11, 21], &[12, 22]])));
    let assignment = device_assignment(&bytes).expect("valid");
    assert_eq!((assignment.num_replicas, assignment.num_partitions), (2, 3));
    assert_eq!(assignment.device_ids, [10, 11, 12, 20, 21, 22]);
}

#[test]
fn a_permuted_subset_keeps_its_order() {
    let bytes = options(1, 3, Some((1, 3, &[&[5], &[2], &[7]])));
    assert_eq!(
        device_assignment(&bytes).expect("valid").device_ids,
        [5, 2, 7]
    );
}

#[test]
fn options_without_an_assignment_get_the_default_one() {
    let single = DeviceAssignment {
        num_replicas: 1,
        num_partitions: 1,
        device_ids: vec![0],
    };
    assert_eq!(device_assignment(&[]), Ok(single.clone()));
    assert_eq!(device_assignment(&options(0, 0, None)), Ok(single));
    assert_eq!(
        device_assignment(&options(1, 4, None))
            .expect("valid")
            .device_ids,
        [0, 1, 2, 3]
    );
}

#[test]
fn contradictions_are_refused_with_their_numbers() {
    let one: &[&[u64]] = &[&[1]];
    for (bytes, words) in [
        (
            options(1, 2, Some((1, 1, one))),
            "ask for 2 partitions, the assignment has 1",
        ),
        (
            options(2, 1, Some((1, 1, one))),
            "ask for 2 replicas, the assignment has 1",
        ),
        (
            options(1, 2, Some((1, 2, one))),
            "2 computations, devices for 1",
        ),
        (
            options(2, 1, Some((2, 1, one))),
            "computation 0 has 1 devices",
        ),
        (
            options(1, 2, Some((1, 2, &[&[3], &[3]]))),
            "device 3 is named twice",
        ),
        (options(1, 1, Some((1, 1, &[&[u64::MAX]]))), "out of range"),
        (options(1, 1, Some((1, 1, &[&[1 << 31]]))), "out of range"),
        (
            options(1, 1, Some((1, 0, &[]))),
            "1 replicas x 0 partitions",
        ),
        (
            options(0, 0, Some((1 << 40, 1 << 40, one))),
            "is not between 1 and 65536",
        ),
        (options(1, 65_537, None), "is not between 1 and 65536"),
    ] {
        let error = device_assignment(&bytes).expect_err(words).to_string();
        assert!(error.contains(words), "{error}");
    }
    let error = device_assignment(&[0x1a, 0x05]).expect_err("cut");
    assert!(
        matches!(
            error,
            Error::Malformed {
                part: "CompileOptionsProto",
                ..
            }
        ),
        "{error}"
    );
}

proptest! {
    #[test]
    fn an_assignment_is_read_as_written(replicas in 1..5u32, partitions in 1..7u32, seed in any::<u16>()) {
        let count = replicas * partitions;
        let device_ids = (0..count).map(|i| ((i + u32::from(seed)) * 7) as i32).collect();
        let assignment = DeviceAssignment { num_replicas: replicas, num_partitions: partitions, device_ids };
        prop_assert_eq!(read_assignment(&encode_assignment(&assignment)), Ok(assignment));
    }

    #[test]
    fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        let _ = device_assignment(&bytes);
    }
}
