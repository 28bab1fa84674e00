//! What programs over several processes are built from: changed programs, portable executables, calls that end later.

use crate::support::{Which, add, code, compile, fetch_floats, options, put};
use prost::Message;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};
use waystation_pjrt::ffi::{AsyncTarget, Call, Failure};
use waystation_pjrt::{Client, Code, ExecuteContext, ExecuteOptions, LoadedExecutable};
use waystation_proto::xla;

pub(crate) fn a_plugin_has_it_or_says_what_it_lacks(which: Which) {
    let checked = which.plugin().check_spanning();
    if which == Which::Lammps {
        checked.expect("it has all");
        // Again, with all registered.
        which.plugin().check_spanning().expect("it has all");
    } else {
        let error = checked.expect_err("it is older");
        assert_eq!(error.code(), Code::Unimplemented, "{error}");
    }
}

/// The program `add`, compiled with what `change` makes of it.
fn transformed(
    client: &Client,
    change: impl FnMut(&[u8]) -> Result<Option<Vec<u8>>, Failure>,
) -> Result<LoadedExecutable, waystation_pjrt::Error> {
    client.compile_transformed(add(false).as_bytes(), "mlir", &options(&[0]), change)
}

/// Replaces one text by another of the same length.
fn replaced(module: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let mut module = module.to_vec();
    let mut found = 0;
    for start in 0..module.len() - from.len() {
        if &module[start..start + from.len()] == from {
            module[start..start + from.len()].copy_from_slice(to);
            found += 1;
        }
    }
    assert!(found > 0);
    module
}

/// The operands of the sum, as field 36 of its instruction, and the same with the first one twice.
fn operands(module: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let tag = b"\xa2\x02";
    let found = module
        .windows(tag.len())
        .enumerate()
        .filter(|(_, window)| window == tag)
        .filter_map(|(at, _)| {
            let len = usize::from(*module.get(at + 2)?);
            let found = module.get(at..at + 3 + len)?;
            (len >= 2 && len.is_multiple_of(2)).then(|| found.to_vec())
        })
        // The entry computation is the last one; XLA makes the sum a kernel of its own.
        .next_back()
        .expect("two operands, of numbers alike");
    let mut twice = found.clone();
    let half = (found.len() - 3) / 2;
    twice.copy_within(3..3 + half, 3 + half);
    (found, twice)
}

#[test]
fn programs_are_changed_on_the_way() {
    let client = Which::Lammps.new_client();
    let (a, b) = (
        put(&client, 0, &[1., 2., 3., 4.]),
        put(&client, 0, &[1.; 4]),
    );
    let changed = transformed(&client, |module| {
        let (found, twice) = operands(module);
        Ok(Some(replaced(module, &found, &twice)))
    });
    let outputs = crate::support::run(&changed.expect("it compiles"), &[&a, &b]);
    assert_eq!(fetch_floats(&outputs[0]), [2., 4., 6., 8.]);
    let refused = transformed(&client, |_| Err(Failure::invalid("no such program")));
    let error = refused.expect_err("refused");
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().contains("no such program"), "{error}");
    let panicked = transformed(&client, |_| panic!("a test"));
    assert!(
        panicked
            .expect_err("refused")
            .message()
            .contains("panicked")
    );
    // Others are left alone, and those that are left as they are run.
    for executable in [
        transformed(&client, |_| Ok(None)),
        compile(&client, &add(false), &[0]),
    ] {
        let outputs = crate::support::run(&executable.expect("it compiles"), &[&a, &b]);
        assert_eq!(fetch_floats(&outputs[0]), [2., 3., 4., 5.]);
    }
}

/// Hands its calls to the execution's user data.
struct Forward;

type Calls = Mutex<Sender<Call>>;

impl AsyncTarget for Forward {
    fn call(call: Call) {
        match call
            .user_data()
            .cloned()
            .and_then(|data| data.downcast::<Calls>().ok())
        {
            Some(calls) => calls
                .lock()
                .expect("no panic")
                .send(call)
                .expect("received"),
            None => call.finish(Err(Failure::invalid("no user data"))),
        }
    }
}

const FORWARDING: &str = "module @forwarding {
  func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.add %x, %x : tensor<4xf32>
    %1 = stablehlo.custom_call @forward(%0) {
      api_version = 4 : i32, has_side_effect = true, backend_config = {n = array<i64: 7>}
    } : (tensor<4xf32>) -> tensor<4xf32>
    %2 = stablehlo.add %1, %x : tensor<4xf32>
    return %2 : tensor<4xf32>
  }
}";

/// A program that calls [`Forward`], for any device.
fn forwarding(client: &Client) -> LoadedExecutable {
    client
        .plugin()
        .register_async_ffi::<Forward>("forward", "Host")
        .expect("it is taken");
    let bytes = client
        .compile(FORWARDING.as_bytes(), "mlir", &options(&[0]))
        .expect("it compiles")
        .serialize()
        .expect("bytes");
    let portable = xla::CompileOptionsProto {
        executable_build_options: Some(xla::ExecutableBuildOptionsProto {
            device_ordinal: -1,
            num_replicas: 1,
            num_partitions: 1,
            ..Default::default()
        }),
        compile_portable_executable: true,
        ..Default::default()
    };
    client
        .deserialize(&bytes, Some(&portable.encode_to_vec()))
        .expect("it loads")
}

#[test]
fn calls_end_when_all_of_them_is_let_go_of() {
    let client = Which::Lammps.new_client();
    let executable = forwarding(&client);
    for device in [3, 1] {
        let (sender, receiver) = channel::<Call>();
        let context = ExecuteContext::new(client.plugin(), Arc::new(Mutex::new(sender)) as _)
            .expect("a context");
        let input = put(&client, device, &[1., 2., 3., 4.]);
        let (executable, client) = (executable.clone(), client.clone());
        let running = std::thread::spawn(move || {
            let device = &client.devices()[device];
            let execution = executable
                .execute_on(
                    device,
                    &[&input],
                    &ExecuteOptions::default(),
                    Some(&context),
                )
                .expect("it starts");
            drop(context);
            execution.done.wait().expect("it runs");
            fetch_floats(&execution.outputs[0])
        });
        let call = receiver.recv().expect("a call");
        assert_eq!(call.attribute("n"), Some(&[7][..]));
        assert_eq!(call.attribute("m"), None);
        let (inputs, mut outputs, promise) = call.into_parts();
        let bytes = inputs[0].as_ref().to_vec();
        assert_eq!(crate::support::floats_of(&bytes), [2., 4., 6., 8.]);
        promise.finish(Ok(()));
        // Not before the last part is gone.
        assert!(!running.is_finished());
        outputs.get(0).copy_from_slice(&bytes);
        assert!(outputs.get(1).is_empty());
        drop(outputs);
        assert_eq!(inputs[0].as_ref(), bytes);
        drop(inputs);
        assert_eq!(running.join().expect("no panic"), [3., 6., 9., 12.]);
    }
}

#[test]
fn calls_that_fail_or_are_dropped_fail_their_program_only() {
    let client = Which::Lammps.new_client();
    let executable = forwarding(&client);
    let input = put(&client, 2, &[1.; 4]);
    let device = &client.devices()[2];
    let (sender, receiver) = channel::<Call>();
    let context =
        ExecuteContext::new(client.plugin(), Arc::new(Mutex::new(sender)) as _).expect("a context");
    let ending = std::thread::spawn(move || {
        let failure = Failure::new(Code::DataLoss, "a worker is gone");
        receiver.recv().expect("a call").finish(Err(failure));
        drop(receiver.recv().expect("a call"));
        let mut call = receiver.recv().expect("a call");
        call.outputs().get(0).fill(0);
        call.finish(Ok(()));
    });
    let run = |context: Option<&ExecuteContext>| {
        let execution =
            executable.execute_on(device, &[&input], &ExecuteOptions::default(), context)?;
        execution.done.wait()?;
        Ok::<_, waystation_pjrt::Error>(fetch_floats(&execution.outputs[0]))
    };
    let error = run(Some(&context)).expect_err("it fails");
    assert_eq!(error.code(), Code::DataLoss, "{error}");
    assert!(error.message().contains("a worker is gone"), "{error}");
    let error = run(Some(&context)).expect_err("it fails");
    assert!(error.message().contains("without an outcome"), "{error}");
    assert_eq!(run(Some(&context)), Ok(vec![1.; 4]));
    // Without a context there is no user data, and nothing worse.
    assert_eq!(code(run(None)), Some(Code::InvalidArgument));
    let plain = compile(&client, FORWARDING, &[2]).expect("it compiles");
    let outcome = plain
        .execute(&[vec![&input]], &ExecuteOptions::default())
        .and_then(|execution| execution.done.into_iter().try_for_each(|done| done.wait()));
    assert_eq!(code(outcome), Some(Code::InvalidArgument));
    ending.join().expect("no panic");
}

#[test]
fn what_does_not_belong_together_is_refused() {
    let client = Which::Lammps.new_client();
    let other = Which::Lammps.new_client();
    let executable = forwarding(&client);
    let input = put(&client, 0, &[1.; 4]);
    let options = ExecuteOptions::default();
    let refused = |device, inputs: &[&waystation_pjrt::Buffer]| {
        code(executable.execute_on(device, inputs, &options, None))
    };
    assert_eq!(
        refused(&other.devices()[0], &[&input]),
        Some(Code::InvalidArgument)
    );
    let foreign = put(&other, 0, &[1.; 4]);
    assert_eq!(
        refused(&client.devices()[0], &[&foreign]),
        Some(Code::InvalidArgument)
    );
}
