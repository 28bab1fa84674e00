//! Compiling and running.

use crate::support::{
    DEVICES, Which, add, all_reduce, bytes_of, code, compile, fetch_floats, options, put, run,
};
use prost::Message;
use waystation_pjrt::{Code, ElementType, ExecuteOptions, OptionValue};
use waystation_proto::xla;

pub(crate) fn one_device(which: Which) {
    let client = which.client();
    for device in [0_usize, 2] {
        let id = i64::try_from(device).expect("small");
        let executable = compile(&client, &add(false), &[id]).expect("it compiles");
        assert_eq!(executable.name(), "add");
        assert_eq!(
            executable.device_ids(),
            [i32::try_from(device).expect("small")]
        );
        let a = put(&client, device, &[1., 2., 3., 4.]);
        let b = put(&client, device, &[10., 20., 30., 40.]);
        let outputs = run(&executable, &[&a, &b]);
        assert_eq!(outputs.len(), 1);
        assert_eq!(outputs[0].dims(), [4]);
        assert_eq!(fetch_floats(&outputs[0]), [11., 22., 33., 44.]);
        // Results feed the next run before they are there.
        let mut last = outputs[0].clone();
        for _ in 0..50 {
            let execution = executable
                .execute(&[vec![&last, &b]], &ExecuteOptions::default())
                .expect("it starts");
            last = execution.outputs[0][0].clone();
        }
        assert_eq!(fetch_floats(&last), [511., 1022., 1533., 2044.]);
        assert_eq!(a.is_deleted(), Ok(false));
    }
}

pub(crate) fn many_devices(which: Which) {
    let client = which.client();
    let count = DEVICES;
    // Not in the devices' order: argument lists follow the assignment.
    let devices: Vec<i64> = (0..i64::try_from(count).expect("few")).rev().collect();
    let executable = compile(&client, &all_reduce(count), &devices).expect("it compiles");
    assert_eq!(executable.device_ids().len(), count);
    let inputs: Vec<_> = executable
        .device_ids()
        .iter()
        .map(|id| {
            let index = usize::try_from(*id).expect("an id");
            put(
                &client,
                index,
                &[f32::from(u8::try_from(index).expect("small")), 1.0],
            )
        })
        .collect();
    let args: Vec<_> = inputs.iter().map(|input| vec![input]).collect();
    for launch_id in 1..=20 {
        let options = ExecuteOptions {
            launch_id,
            ..Default::default()
        };
        let execution = executable.execute(&args, &options).expect("it starts");
        assert_eq!(execution.outputs.len(), count);
        assert_eq!(execution.done.len(), count);
        for done in execution.done {
            done.wait().expect("it runs");
        }
        let total = f32::from(u8::try_from(count * (count - 1) / 2).expect("small"));
        for output in &execution.outputs {
            assert_eq!(
                fetch_floats(&output[0]),
                [total, f32::from(u8::try_from(count).expect("few"))]
            );
        }
    }
}

pub(crate) fn donation(which: Which) {
    let client = which.client();
    let executable = compile(&client, &add(true), &[0]).expect("it compiles");
    let first = put(&client, 0, &[1., 2., 3., 4.]);
    let b = put(&client, 0, &[1., 1., 1., 1.]);
    // What was put is used in place and stays the host's; the result of a run is the device's own.
    let a = run(&executable, &[&first, &b]).remove(0);
    assert_eq!(first.is_deleted(), Ok(true));
    let stats = executable.memory_stats().expect("statistics");
    assert_eq!(stats.alias_size_in_bytes, 16);

    let keep = ExecuteOptions {
        non_donatable: vec![0],
        ..Default::default()
    };
    let kept = executable
        .execute(&[vec![&a, &b]], &keep)
        .expect("it starts");
    assert_eq!(a.is_deleted(), Ok(false));
    assert_eq!(fetch_floats(&kept.outputs[0][0]), [3., 4., 5., 6.]);
    assert_eq!(
        fetch_floats(&a),
        [2., 3., 4., 5.],
        "the kept argument is not overwritten"
    );

    let gone = executable
        .execute(&[vec![&a, &b]], &ExecuteOptions::default())
        .expect("it starts");
    assert_eq!(a.is_deleted(), Ok(true));
    assert_eq!(b.is_deleted(), Ok(false));
    assert_eq!(fetch_floats(&gone.outputs[0][0]), [3., 4., 5., 6.]);
    let again = executable.execute(&[vec![&a, &b]], &ExecuteOptions::default());
    let error = match again {
        Err(error) => error,
        Ok(execution) => execution
            .done
            .into_iter()
            .next()
            .expect("one")
            .wait()
            .expect_err("a is gone"),
    };
    assert!(error.is_from_plugin(), "{error}");
}

/// An execution that would take over an array's memory fails, or takes other memory, while the bytes are seen.
pub(crate) fn what_is_seen_is_not_overwritten(which: Which) {
    let client = which.client();
    let executable = compile(&client, &add(true), &[0]).expect("it compiles");
    let first = put(&client, 0, &[1., 2., 3., 4.]);
    let b = put(&client, 0, &[1., 1., 1., 1.]);
    let a = run(&executable, &[&first, &b]).remove(0);
    let view = a.host_view().expect("a view").expect("on the host");
    let seen = [2., 3., 4., 5.];
    assert_eq!(view.as_ref(), bytes_of(&seen));
    let donated = executable.execute(&[vec![&a, &b]], &ExecuteOptions::default());
    for done in donated.into_iter().flat_map(|execution| execution.done) {
        let _ = done.wait();
    }
    assert_eq!(view.as_ref(), bytes_of(&seen));
    drop(view);
    drop((a, b, first));
}

pub(crate) fn outputs_are_described(which: Which) {
    let client = which.client();
    let program = "module @three {
        func.func public @main(%a: tensor<2x3xf32>) -> (tensor<2x3xf32>, tensor<i32>, tensor<0x5xi1>) {
          %0 = stablehlo.add %a, %a : tensor<2x3xf32>
          %1 = stablehlo.constant dense<7> : tensor<i32>
          %2 = stablehlo.constant dense<true> : tensor<0x5xi1>
          return %0, %1, %2 : tensor<2x3xf32>, tensor<i32>, tensor<0x5xi1>
        }
      }";
    let executable = compile(&client, program, &[1]).expect("it compiles");
    assert_eq!(executable.num_outputs(), 3);
    assert_eq!(
        executable.output_types(),
        Ok(vec![ElementType::F32, ElementType::S32, ElementType::Pred])
    );
    assert_eq!(
        executable.output_dims(),
        Ok(vec![vec![2, 3], vec![], vec![0, 5]])
    );
    match executable.output_memory_kinds() {
        Ok(kinds) => assert_eq!(kinds, ["device"; 3]),
        // The older ones have the function and do not answer.
        Err(error) => {
            assert_ne!(which, Which::Lammps);
            assert_eq!(error.code(), Code::Unimplemented);
        }
    }
    let stats = executable.memory_stats().expect("statistics");
    assert_eq!(stats.argument_size_in_bytes, 24);
    assert!(stats.output_size_in_bytes >= 24 + 4, "{stats:?}");
    match executable.cost_analysis() {
        Ok(costs) => {
            let flops = costs.iter().find(|(name, _)| name == "flops");
            assert_eq!(
                flops.map(|(_, value)| value),
                Some(&OptionValue::Float(6.0))
            );
        }
        Err(error) => assert_eq!(error.code(), Code::Unimplemented),
    }
    assert!(executable.generated_code_bytes().is_ok());
    // Some plugins have no fingerprint; asking must be safe.
    let _ = executable.fingerprint();

    assert_eq!(executable.is_deleted(), Ok(false));
    executable.delete().expect("it is unloaded");
    // The older ones take the call and do nothing.
    assert_eq!(executable.is_deleted(), Ok(which == Which::Lammps));
}

pub(crate) fn compile_errors(which: Which) {
    let client = which.client();
    let fail = |program: &str| compile(&client, program, &[0]).expect_err("it does not compile");
    let error = fail("this is no program");
    assert!(
        error.is_from_plugin() && error.message().contains("custom op 'this'"),
        "{error}"
    );
    let error = fail(
        "module @m { func.func public @main() -> tensor<f32> {
           %0 = stablehlo.custom_call @nobody_knows_this() : () -> tensor<f32>
           return %0 : tensor<f32> } }",
    );
    assert!(error.message().contains("nobody_knows_this"), "{error}");
    assert_eq!(error.function(), "PJRT_Client_Compile");
    let error = client
        .compile(add(false).as_bytes(), "cobol", &options(&[0]))
        .expect_err("no format");
    assert!(
        error.is_from_plugin() && error.message().contains("cobol"),
        "{error}"
    );
    let error = client
        .compile(add(false).as_bytes(), "mlir", b"\xff\xff\xff")
        .expect_err("no options");
    assert!(error.is_from_plugin(), "{error}");
    let error = compile(&client, &add(false), &[99]).expect_err("no such device");
    assert!(error.is_from_plugin(), "{error}");
}

pub(crate) fn run_errors(which: Which) {
    let client = which.client();
    let executable = compile(&client, &add(false), &[0]).expect("it compiles");
    let a = put(&client, 0, &[1., 2., 3.]);
    let b = put(&client, 0, &[1., 1., 1., 1.]);
    let error = match executable.execute(&[vec![&a, &b]], &ExecuteOptions::default()) {
        Err(error) => error,
        Ok(execution) => {
            // What depends on the failure fails with it.
            let poisoned = execution.outputs[0][0].clone();
            assert!(futures::executor::block_on(poisoned.ready().expect("an event")).is_err());
            execution
                .done
                .into_iter()
                .next()
                .expect("one")
                .wait()
                .expect_err("it fails")
        }
    };
    assert!(error.is_from_plugin(), "{error}");
    assert!(!error.message().is_empty());
    // And the next run is none the worse.
    let a = put(&client, 0, &[1., 2., 3., 4.]);
    assert_eq!(
        fetch_floats(&run(&executable, &[&a, &b])[0]),
        [2., 3., 4., 5.]
    );
}

pub(crate) fn wrong_argument_lists(which: Which) {
    let client = which.client();
    let executable = compile(&client, &add(false), &[0]).expect("it compiles");
    let a = put(&client, 0, &[1., 2., 3., 4.]);
    let default = ExecuteOptions::default();
    let invalid = Some(Code::InvalidArgument);
    assert_eq!(code(executable.execute(&[], &default)), invalid);
    assert_eq!(
        code(executable.execute(&[vec![&a, &a], vec![&a, &a]], &default)),
        invalid
    );
    let strange = ExecuteOptions {
        non_donatable: vec![2],
        ..Default::default()
    };
    assert_eq!(code(executable.execute(&[vec![&a, &a]], &strange)), invalid);
    let strange = ExecuteOptions {
        non_donatable: vec![-1],
        ..Default::default()
    };
    assert_eq!(code(executable.execute(&[vec![&a, &a]], &strange)), invalid);
    let other = which.new_client();
    let foreign = put(&other, 0, &[1., 2., 3., 4.]);
    assert_eq!(
        code(executable.execute(&[vec![&a, &foreign]], &default)),
        invalid
    );
    // Too few and too many arguments are for the plugin to refuse.
    for args in [vec![&a], vec![&a, &a, &a]] {
        let error = match executable.execute(&[args], &default) {
            Err(error) => error,
            Ok(execution) => execution
                .done
                .into_iter()
                .next()
                .expect("one")
                .wait()
                .expect_err("it fails"),
        };
        assert!(error.is_from_plugin(), "{error}");
    }
}

pub(crate) fn optimized_program(which: Which) {
    let client = which.client();
    let executable = compile(&client, &add(false), &[0]).expect("it compiles");
    let bytes = executable.optimized_program().expect("a program");
    let program = xla::HloModuleProtoWithConfig::decode(bytes.as_slice()).expect("it decodes");
    let module = program.hlo_module.expect("a module");
    assert_eq!(module.name, "add");
    assert!(module.host_program_shape.is_some());
}
