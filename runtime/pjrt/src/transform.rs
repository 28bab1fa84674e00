//! Compiling a program that is changed on the way.
//!
//! XLA's list of transforms belongs to the whole process, and a transform is not told which program it is given. So one
//! transform is registered for good, which does nothing but for the program that its thread is compiling with
//! [`Client::compile_transformed`]: XLA calls it on the thread that compiles.

use crate::api::slice;
use crate::client::Client;
use crate::error::{Code, Error};
use crate::executable::LoadedExecutable;
use crate::ffi::Failure;
use crate::plugin::Plugin;
use crate::sys;
use std::cell::Cell;
use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::PoisonError;

const FUNCTION: &str = "PJRT_Register_Xla_Transform";

/// What changes a program: it gets an `xla.HloModuleProto` and returns another, or `None` to leave it as it is.
type Transform<'a> = dyn FnMut(&[u8]) -> Result<Option<Vec<u8>>, Failure> + 'a;

/// One compilation under way on a thread.
struct Request<'a> {
    transform: &'a mut Transform<'a>,
    /// How often XLA has called.
    calls: usize,
    /// Why the transform failed, which XLA passes on as an internal error.
    failure: Option<Failure>,
}

thread_local! {
    /// The request of this thread, or null.
    static REQUEST: Cell<*mut c_void> = const { Cell::new(null_mut()) };
}

/// What the transform hands to XLA, which gives it back by [`clean`].
struct Handed {
    bytes: Vec<u8>,
}

struct Callbacks(sys::PJRT_XlaTransform_Callbacks);

// SAFETY: nobody writes to it; XLA reads it from any thread.
unsafe impl Sync for Callbacks {}

static CALLBACKS: Callbacks = Callbacks(sys::PJRT_XlaTransform_Callbacks {
    version: sys::XLA_TRANSFORM_VERSION,
    dtor: None,
    transform_hlo_module: Some(transform),
});

impl Plugin {
    /// Registers the transform with this plugin, once.
    fn transform(&self) -> Result<(), Error> {
        let mut registered = self
            .transforming()
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if *registered {
            return Ok(());
        }
        let name = "waystation";
        let mut args = sys::PJRT_Register_Xla_Transform_Args {
            struct_size: size_of::<sys::PJRT_Register_Xla_Transform_Args>(),
            name: name.as_ptr().cast(),
            name_size: name.len(),
            stage: sys::XLA_TRANSFORM_PRE_SCHEDULER,
            callbacks: (&raw const CALLBACKS.0).cast_mut(),
        };
        // SAFETY: the name lives through the call, which copies it; the callbacks live for good, and are only read.
        unsafe { self.api().call_transform(&mut args)? };
        *registered = true;
        Ok(())
    }
}

impl Client {
    /// As [`Client::compile`], with the program passing through `change` when it is partitioned, optimized and laid out, and
    /// before it is scheduled and code is made. `change` gets a serialised `xla.HloModuleProto` and returns another, or `None` to leave it;
    /// a failure fails the compilation with its own code, and costs no more than the partitioning.
    ///
    /// # Errors
    ///
    /// As [`Client::compile`]; [`Code::Unimplemented`] if the plugin has no such extension;
    /// [`Code::FailedPrecondition`] if the plugin did not call `change`: the executable must not be used.
    pub fn compile_transformed(
        &self,
        program: &[u8],
        format: &str,
        options: &[u8],
        mut change: impl FnMut(&[u8]) -> Result<Option<Vec<u8>>, Failure>,
    ) -> Result<LoadedExecutable, Error> {
        self.plugin().transform()?;
        let mut request = Request {
            transform: &mut change,
            calls: 0,
            failure: None,
        };
        let compiled = {
            let _reset = Reset(REQUEST.replace((&raw mut request).cast()));
            self.compile(program, format, options)
        };
        if let (Err(_), Some(failure)) = (&compiled, request.failure) {
            return Err(Error::own(failure.code(), FUNCTION, failure.message()));
        }
        if compiled.is_ok() && request.calls == 0 {
            return Err(Error::own(
                Code::FailedPrecondition,
                FUNCTION,
                "the plugin compiled a program without having it transformed",
            ));
        }
        compiled
    }
}

/// Puts back what the thread had before, whatever happens.
struct Reset(*mut c_void);

impl Drop for Reset {
    fn drop(&mut self) {
        REQUEST.set(self.0);
    }
}

/// What XLA calls for every program.
///
/// # Safety
///
/// `args` is null or complete arguments of version 1, valid until this returns.
unsafe extern "C" fn transform(
    _: *mut sys::PJRT_XlaTransform_Callbacks,
    args: *mut sys::PJRT_XlaTransform_Args,
) {
    // Taken away while it is in use, so that a compilation within it does not find it.
    let request = REQUEST.replace(null_mut());
    let _reset = Reset(request);
    if args.is_null() || request.is_null() {
        return;
    }
    // SAFETY: `compile_transformed` has put it there, on this thread, and waits for the plugin: it is live. Nobody else has
    // a reference, since the pointer was the only one and is taken away.
    let request = unsafe { &mut *request.cast::<Request<'_>>() };
    // SAFETY: arguments start with their size.
    let size = unsafe { (*args).struct_size };
    if size < sys::PJRT_XlaTransform_Args::STRUCT_SIZE {
        // Without a call that is counted, `compile_transformed` refuses the executable.
        return;
    }
    // SAFETY: they have all fields, and lend the program until this returns.
    let module = unsafe {
        let module = &(*args).hlo_module;
        slice(module.data.cast::<u8>(), module.size)
    };
    request.calls += 1;
    // Nothing may unwind into XLA.
    let changed = catch_unwind(AssertUnwindSafe(|| (request.transform)(module)));
    let changed = changed.unwrap_or_else(|_| {
        Err(Failure::new(
            Code::Unknown,
            "the transform panicked; this is a defect of waystation",
        ))
    });
    let (bytes, failed) = match changed {
        Ok(None) => return,
        Ok(Some(bytes)) => (bytes, false),
        Err(failure) => {
            let text = failure.message().as_bytes().to_vec();
            request.failure = Some(failure);
            (text, true)
        }
    };
    let handed = Box::new(Handed { bytes });
    let string = sys::PJRT_XlaTransform_string {
        data: handed.bytes.as_ptr().cast(),
        size: handed.bytes.len(),
    };
    // SAFETY: the arguments have all fields; XLA reads the bytes and then calls `clean` with `data`, once.
    unsafe {
        if failed {
            (*args).header.has_error = true;
            (*args).header.code = Code::Unknown.number();
            (*args).header.error_msg = string;
        } else {
            (*args).transformed_hlo_module = string;
            (*args).changed = true;
        }
        (*args).header.data = Box::into_raw(handed).cast();
        (*args).header.cleanup_fn = Some(clean);
    }
}

/// # Safety
///
/// `data` is what [`transform`] handed over, given back once.
unsafe extern "C" fn clean(data: *mut c_void) {
    if !data.is_null() {
        // SAFETY: passed on from this function's contract.
        drop(unsafe { Box::from_raw(data.cast::<Handed>()) });
    }
}
