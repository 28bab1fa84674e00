//! What a plugin needs for programs that span processes by our means.

use crate::client::Client;
use crate::context::ExecuteContext;
use crate::error::{Code, Error};
use crate::execute::ExecuteOptions;
use crate::ffi::{AsyncTarget, Call, Failure};
use crate::plugin::Plugin;
use crate::value::OptionValue;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

const FUNCTION: &str = "PJRT_LoadedExecutable_Execute";
const TARGET: &str = "waystation_probe";

/// Calls [`TARGET`] with four bytes, and returns what it gives.
const PROGRAM: &str = "module @probe {
  func.func public @main(%x: tensor<4xui8>) -> tensor<4xui8> {
    %0 = stablehlo.custom_call @waystation_probe(%x) {
      api_version = 4 : i32, has_side_effect = true, backend_config = {numbers = array<i64: 3, 4>}
    } : (tensor<4xui8>) -> tensor<4xui8>
    return %0 : tensor<4xui8>
  }
}";

/// Where the probe's calls go: the user data of its execution.
struct Calls(std::sync::Mutex<Sender<Call>>);

struct Probe;

impl AsyncTarget for Probe {
    fn call(call: Call) {
        let calls = call
            .user_data()
            .and_then(|data| Arc::clone(data).downcast::<Calls>().ok());
        match calls {
            Some(calls) => {
                let sender = calls
                    .0
                    .lock()
                    .unwrap_or_else(std::sync::PoisonError::into_inner);
                // If the probe is gone, the call is dropped, and fails.
                let _ = sender.send(call);
            }
            None => call.finish(Err(Failure::new(
                Code::FailedPrecondition,
                "the plugin hands an FFI target no user data",
            ))),
        }
    }
}

impl Plugin {
    /// Tries all that a program over several processes needs, on a client of its own with one device: a program is changed
    /// while it is compiled, serialized, loaded, and run with a target that has user data and ends its call from another thread.
    /// For CPU plugins; takes as long as compiling a tiny program.
    ///
    /// # Errors
    ///
    /// [`Code::Unimplemented`] or [`Code::FailedPrecondition`] with what is missing; else what the plugin reports.
    pub fn check_spanning(self: &Arc<Self>) -> Result<(), Error> {
        self.api().check_spanning()?;
        self.register_async_ffi::<Probe>(TARGET, "Host")?;
        let options = [("cpu_device_count".to_owned(), OptionValue::Int64(1))];
        let client = Client::create(self, &options)?;
        let device = client
            .devices()
            .first()
            .ok_or_else(|| missing("a device"))?;
        let mut seen = false;
        // `executable_build_options { num_replicas: 1 num_partitions: 1 }`.
        let compile_options = [0x1a, 4, 0x20, 1, 0x28, 1];
        let bytes = client
            .compile_transformed(PROGRAM.as_bytes(), "mlir", &compile_options, |module| {
                seen = !module.is_empty();
                // As another module, so that it is read back.
                Ok(Some(module.to_vec()))
            })?
            .serialize()?;
        if !seen {
            return Err(missing("a program to be transformed"));
        }
        let executable = client.deserialize(&bytes, None)?;
        let (sender, receiver) = channel();
        let calls: Arc<dyn std::any::Any + Send + Sync> =
            Arc::new(Calls(std::sync::Mutex::new(sender)));
        let context = ExecuteContext::new(self, calls)?;
        let memory = &device.memories()[device.default_memory()];
        let mut host = crate::host::AlignedBytes::zeroed(4)?;
        host.copy_from_slice(&[1, 2, 3, 4]);
        let input = client.buffer_from_host(
            Arc::new(host),
            crate::element::ElementType::U8,
            &[4],
            None,
            memory,
        )?;
        let answering = std::thread::spawn(move || answer(&receiver));
        let execution = executable.execute_on(
            device,
            &[&input],
            &ExecuteOptions::default(),
            Some(&context),
        );
        // The sender goes with the last context, so that the thread ends also if there was no call.
        drop(context);
        let execution = execution?;
        execution.done.wait()?;
        let output = execution
            .outputs
            .first()
            .ok_or_else(|| missing("a result"))?;
        let fetched = crate::host::AlignedBytes::zeroed(output.host_bytes()?)?;
        let (sender, receiver) = channel();
        output.to_host(fetched)?.on_ready(move |fetched| {
            // The receiver waits below.
            let _ = sender.send(fetched);
        });
        let fetched = receiver
            .recv()
            .map_err(|_| missing("bytes of a result"))??;
        let numbers = answering.join().unwrap_or_default();
        if fetched[..] != [2, 3, 4, 5] || numbers != [3, 4] {
            return Err(missing("the results of a target that ends its call later"));
        }
        Ok(())
    }
}

/// Ends the probe's call, and returns the attribute that it came with.
fn answer(calls: &Receiver<Call>) -> Vec<i64> {
    let Ok(mut call) = calls.recv() else {
        return Vec::new();
    };
    let numbers = call.attribute("numbers").unwrap_or_default().to_vec();
    let input = call
        .inputs()
        .first()
        .map(|input| input.as_ref().to_vec())
        .unwrap_or_default();
    for (into, from) in call.outputs().get(0).iter_mut().zip(&input) {
        *into = from + 1;
    }
    call.finish(Ok(()));
    numbers
}

fn missing(what: &str) -> Error {
    Error::own(
        Code::FailedPrecondition,
        FUNCTION,
        format!("the plugin gave no {what} when it was tried"),
    )
}
