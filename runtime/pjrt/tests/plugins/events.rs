//! Events: futures, callbacks, threads.

use crate::support::{
    SLOW, Which, add, aligned, bytes_of, compile, fetch_floats, floats_of, put, run,
};
use std::sync::mpsc;
use std::time::Duration;
use waystation_pjrt::{AlignedBytes, Buffer, Client, ElementType, ExecuteOptions};

const PATIENCE: Duration = Duration::from_secs(60);

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
    assert_eq!(floats_of(&bytes), [2., 4., 6., 8.]);
    drop(
        output
            .to_host(AlignedBytes::zeroed(16).expect("memory"))
            .expect("it starts"),
    );
}

/// The argument of [`SLOW`]: with 1/256 everywhere, every product is the same again.
fn even(client: &Client) -> Buffer {
    let device = &client.devices()[0];
    let memory = &device.memories()[device.default_memory()];
    let host = aligned(&bytes_of(&[1.0 / 256.0; 256 * 256]));
    client
        .buffer_from_host(host, ElementType::F32, &[256, 256], None, memory)
        .expect("a buffer")
}

fn is_even(bytes: &[u8]) {
    assert_eq!(bytes.len(), 4 * 256 * 256);
    assert!(floats_of(bytes).iter().all(|value| *value == 1.0 / 256.0));
}

/// What `look` found of a program that still ran. On a busy machine a program may have ended before this thread comes to look,
/// so it is started anew until it is caught.
fn caught_under_way<T>(look: impl Fn() -> Option<T>) -> T {
    (0..1000)
        .find_map(|_| look())
        .expect("the program should still run at one of a thousand looks")
}

pub(crate) fn work_under_way_is_waited_for(which: Which) {
    let client = which.client();
    let executable = compile(&client, SLOW, &[0]).expect("it compiles");
    let x = even(&client);
    let start = || {
        let options = ExecuteOptions::default();
        executable
            .execute(&[vec![&x]], &options)
            .expect("it starts")
    };
    let room = || AlignedBytes::zeroed(4 * 256 * 256).expect("memory");

    // A future that is polled too early is woken.
    let (execution, fetch) = caught_under_way(|| {
        let execution = start();
        let fetch = execution.outputs[0][0].to_host(room()).expect("it starts");
        let under_way = !fetch.is_ready();
        under_way.then_some((execution, fetch))
    });
    let output = &execution.outputs[0][0];
    let ready = output.ready().expect("an event");
    for done in execution.done {
        futures::executor::block_on(done).expect("it runs");
    }
    futures::executor::block_on(ready).expect("it is filled");
    is_even(&futures::executor::block_on(fetch).expect("the bytes"));

    // A callback that is registered too early is called.
    let execution = start();
    let (sender, receiver) = mpsc::channel();
    let fetch = execution.outputs[0][0].to_host(room()).expect("it starts");
    fetch.on_ready(move |bytes| {
        sender
            .send(bytes.map(|bytes| bytes.to_vec()))
            .expect("somebody listens")
    });
    // Nothing but the plugin holds the work now.
    drop(execution);
    is_even(
        &receiver
            .recv_timeout(PATIENCE)
            .expect("a call")
            .expect("the bytes"),
    );

    // A future that is polled and dropped, a copy that nobody wants, buffers dropped under way.
    let execution = start();
    drop(execution.outputs[0][0].to_host(room()).expect("it starts"));
    for mut done in execution.done {
        let _ = futures::executor::block_on(futures::future::poll_immediate(&mut done));
    }
    drop(execution.outputs);

    // Polled first, then given a callback.
    let done = caught_under_way(|| {
        let mut done = start().done.pop().expect("one device ran it");
        let early = futures::executor::block_on(futures::future::poll_immediate(&mut done));
        early.is_none().then_some(done)
    });
    let (sender, receiver) = mpsc::channel();
    done.on_ready(move |outcome| sender.send(outcome).expect("somebody listens"));
    assert_eq!(receiver.recv_timeout(PATIENCE), Ok(Ok(())));
}

pub(crate) fn more_under_way_than_the_plugin_queues(which: Which) {
    let client = which.client();
    let executable = compile(&client, SLOW, &[0]).expect("it compiles");
    let x = even(&client);
    std::thread::scope(|scope| {
        let run = || {
            for _ in 0..20 {
                // Blocks once 32 are under way, and goes on as they end.
                let options = ExecuteOptions::default();
                let _ = executable
                    .execute(&[vec![&x]], &options)
                    .expect("it starts");
            }
        };
        scope.spawn(run);
        scope.spawn(run);
    });
    let execution = executable
        .execute(&[vec![&x]], &ExecuteOptions::default())
        .expect("it starts");
    is_even(&crate::support::fetch(&execution.outputs[0][0]).expect("the bytes"));
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
