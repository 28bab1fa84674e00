//! Events: futures, callbacks, threads.

use crate::support::{Which, add, compile, fetch_floats, put, run};
use std::sync::mpsc;
use std::time::Duration;
use waystation_pjrt::{AlignedBytes, ExecuteOptions};

const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn callbacks_and_futures(which: Which) {
    let client = which.client();
    let executable = compile(&client, &add(false), &[0]).expect("it compiles");
    let a = put(&client, 0, &[1., 2., 3., 4.]);

    let execution = executable
        .execute(&[vec![&a, &a]], &ExecuteOptions::default())
        .expect("it starts");
    let output = execution.outputs[0][0].clone();
    let (sender, receiver) = mpsc::channel();
    for done in execution.done {
        let sender = sender.clone();
        done.on_ready(move |outcome| sender.send(outcome).expect("somebody listens"));
    }
    assert_eq!(receiver.recv_timeout(PATIENCE), Ok(Ok(())));
    // An event that is ready, in all three ways.
    assert!(output.ready().expect("an event").is_ready());
    let sent = sender.clone();
    output
        .ready()
        .expect("an event")
        .on_ready(move |outcome| sent.send(outcome).expect("somebody listens"));
    assert_eq!(receiver.recv_timeout(PATIENCE), Ok(Ok(())));
    assert_eq!(
        futures::executor::block_on(output.ready().expect("an event")),
        Ok(())
    );
    assert_eq!(output.ready().expect("an event").wait(), Ok(()));
    // Dropped without a look.
    drop(output.ready().expect("an event"));

    let (sender, receiver) = mpsc::channel();
    let dst = AlignedBytes::zeroed(16).expect("memory");
    output
        .to_host(dst)
        .expect("it starts")
        .on_ready(move |bytes| {
            sender
                .send(bytes.map(|bytes| bytes.to_vec()))
                .expect("somebody listens");
        });
    let bytes = receiver
        .recv_timeout(PATIENCE)
        .expect("a call")
        .expect("the bytes");
    assert_eq!(crate::support::floats_of(&bytes), [2., 4., 6., 8.]);
    drop(
        output
            .to_host(AlignedBytes::zeroed(16).expect("memory"))
            .expect("it starts"),
    );
}

pub(crate) fn a_panicking_callback_does_no_harm(which: Which) {
    let client = which.client();
    let a = put(&client, 0, &[1.0]);
    a.ready()
        .expect("an event")
        .on_ready(|_| panic!("this panic is part of a test"));
    assert_eq!(fetch_floats(&a), [1.0]);
}

pub(crate) fn the_last_handle_may_go_in_a_callback(which: Which) {
    let (sender, receiver) = mpsc::channel();
    {
        let client = which.new_client();
        let executable = compile(&client, &add(false), &[0]).expect("it compiles");
        let a = put(&client, 0, &[1., 2., 3., 4.]);
        let execution = executable
            .execute(&[vec![&a, &a]], &ExecuteOptions::default())
            .expect("it starts");
        let everything = (client, executable, a, execution.outputs);
        for done in execution.done {
            let sender = sender.clone();
            // With one device there is one event.
            let everything = everything.clone();
            done.on_ready(move |outcome| {
                std::thread::sleep(Duration::from_millis(20));
                drop(everything);
                sender.send(outcome).expect("somebody listens");
            });
        }
    }
    assert_eq!(receiver.recv_timeout(PATIENCE), Ok(Ok(())));
}

pub(crate) fn calls_from_many_threads(which: Which) {
    let client = which.client();
    let executable = compile(&client, &add(false), &[0]).expect("it compiles");
    std::thread::scope(|scope| {
        for thread in 0..4_u8 {
            let (client, executable) = (&client, &executable);
            scope.spawn(move || {
                for round in 0..50_u8 {
                    let a = put(client, 0, &[f32::from(thread), f32::from(round), 0., 0.]);
                    let outputs = run(executable, &[&a, &a]);
                    let expected = [2. * f32::from(thread), 2. * f32::from(round), 0., 0.];
                    assert_eq!(fetch_floats(&outputs[0]), expected);
                }
            });
        }
    });
}
