//! Executables as bytes.

use crate::support::{Which, add, all_reduce, compile, fetch_floats, options, put, run};
use waystation_pjrt::ExecuteOptions;

pub(crate) fn loads_in_a_new_client_on_other_devices(which: Which) {
    let bytes = {
        let client = which.new_client();
        let executable = compile(&client, &add(false), &[0]).expect("it compiles");
        executable.serialize().expect("bytes")
    };
    assert!(!bytes.is_empty());
    let client = which.new_client();
    let same = client.deserialize(&bytes, None).expect("it loads");
    assert_eq!(same.device_ids(), [0]);
    let moved = client
        .deserialize(&bytes, Some(&options(&[3])))
        .expect("it loads");
    assert_eq!(moved.name(), "add");
    assert_eq!(moved.device_ids(), [3]);
    let a = put(&client, 3, &[1., 2., 3., 4.]);
    let b = put(&client, 3, &[1., 1., 1., 1.]);
    assert_eq!(fetch_floats(&run(&moved, &[&a, &b])[0]), [2., 3., 4., 5.]);
    assert_eq!(moved.num_outputs(), 1);
    assert!(moved.optimized_program().is_ok());
    // The copy outlives what it came from, and can be written again.
    drop(same);
    assert!(!moved.serialize().expect("bytes").is_empty());

    let pair = compile(&client, &all_reduce(2), &[0, 1]).expect("it compiles");
    let bytes = pair.serialize().expect("bytes");
    let moved = client
        .deserialize(&bytes, Some(&options(&[2, 1])))
        .expect("it loads");
    let mut ids = moved.device_ids().to_vec();
    ids.sort_unstable();
    assert_eq!(ids, [1, 2]);
    let inputs: Vec<_> = moved
        .device_ids()
        .iter()
        .map(|id| put(&client, usize::try_from(*id).expect("an id"), &[1.0, 2.0]))
        .collect();
    let args: Vec<_> = inputs.iter().map(|input| vec![input]).collect();
    let execution = moved
        .execute(&args, &ExecuteOptions::default())
        .expect("it starts");
    for output in &execution.outputs {
        assert_eq!(fetch_floats(&output[0]), [2.0, 4.0]);
    }
}

pub(crate) fn garbage_is_refused(which: Which) {
    let client = which.client();
    for garbage in [&b""[..], b"garbage", &[0xff; 1000]] {
        let error = client
            .deserialize(garbage, None)
            .expect_err("no executable");
        assert!(error.is_from_plugin(), "{error}");
    }
}
