//! FFI targets: functions of ours that a program calls by name (`stablehlo.custom_call` with `api_version = 4`).
//!
//! A [`Target`] is a type with a function that takes a [`Frame`]: the operands, results and attributes of one call. It
//! needs no `unsafe`: the frame checks what the plugin passes before it lends any of it, and lends no memory twice.
//! XLA calls targets from its own threads, many at once; a target that blocks holds up the program that calls it.
//! One that panics fails its program and no more.
//!
//! An [`AsyncTarget`] gets a [`Call`] instead, which it may keep, and end when it can: nothing is blocked meanwhile.

mod call;
mod element;
mod finish;
mod frame;
mod future;
#[cfg(test)]
mod tests;

pub use call::{AsyncTarget, Call, Input, Outputs, Promise};
pub use element::Element;
pub use frame::Frame;
pub use num_complex::Complex;

use crate::error::{Code, Error};
use crate::plugin::Plugin;
use crate::sys;
use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Calls of all targets since the process began; questions about a target's metadata are not calls.
static CALLS: AtomicU64 = AtomicU64::new(0);

/// How many times programs have called targets since the process began.
#[must_use]
pub fn calls() -> u64 {
    CALLS.load(Relaxed)
}

/// A function that programs may call.
pub trait Target: 'static {
    /// Reads the operands and writes every result.
    ///
    /// # Errors
    ///
    /// What is wrong with the call; it becomes the error of the program's execution.
    fn call(frame: &mut Frame<'_>) -> Result<(), Failure>;
}

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    code: Code,
    message: String,
}

impl Failure {
    /// A failure with a code and a text for the user.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            message: message.into(),
        }
    }

    /// The program calls the target wrongly.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    /// The status code that the program's execution fails with.
    #[must_use]
    pub fn code(&self) -> Code {
        self.code
    }

    /// The text.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl Plugin {
    /// Registers `T` under `name` for programs on `platform` (`Host` means the CPU). Registering a name again does
    /// nothing. Targets stay registered as long as the process runs.
    ///
    /// # Errors
    ///
    /// [`Code::Unimplemented`] if the plugin takes no targets; what the plugin reports, such as a name that it has
    /// itself.
    pub fn register_ffi<T: Target>(&self, name: &str, platform: &str) -> Result<(), Error> {
        self.register_handler(name, platform, handle::<T>)
    }

    fn register_handler(
        &self,
        name: &str,
        platform: &str,
        handler: sys::Handler,
    ) -> Result<(), Error> {
        let mut known = self
            .ffi_targets()
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if known.contains(name) {
            return Ok(());
        }
        // Both kinds of arguments, old and new, say nothing of which they are but their size.
        const SIZE: usize = sys::PJRT_FFI_Register_Handler_Args::STRUCT_SIZE;
        let mut args = sys::PJRT_FFI_Register_Handler_Args {
            struct_size: SIZE,
            target_name: name.as_ptr().cast(),
            target_name_size: name.len(),
            handler,
            platform_name: platform.as_ptr().cast(),
            platform_name_size: platform.len(),
            traits: 0,
        };
        // SAFETY: the strings live through the call, which copies them; the handler is a function for good.
        let registered = unsafe { self.api().call_ffi(&mut args) };
        match registered {
            Err(error) if error.message().contains(&format!(", got {SIZE}")) => {
                let mut args = sys::PJRT_FFI_Register_Handler_Args_V2 {
                    struct_size: sys::PJRT_FFI_Register_Handler_Args_V2::STRUCT_SIZE,
                    target_name: name.as_ptr().cast(),
                    target_name_size: name.len(),
                    api_version: 1,
                    handler,
                    platform_name: platform.as_ptr().cast(),
                    platform_name_size: platform.len(),
                    traits: 0,
                };
                // SAFETY: as above; the plugin has said that it wants longer arguments than the new ones.
                unsafe { self.api().call_ffi(&mut args) }?;
            }
            registered => registered?,
        }
        known.insert(name.to_owned());
        Ok(())
    }
}

/// What XLA calls.
///
/// # Safety
///
/// As [`enter`].
unsafe extern "C" fn handle<T: Target>(
    frame: *mut sys::XLA_FFI_CallFrame,
) -> *mut sys::XLA_FFI_Error {
    // SAFETY: passed on from this function's contract.
    unsafe { enter(frame, T::call) }
}

/// Refuses call frames that lack a field.
fn known_size(size: usize) -> Result<(), Failure> {
    if size < size_of::<sys::XLA_FFI_CallFrame>() {
        return Err(Failure::new(
            Code::FailedPrecondition,
            format!(
                "XLA's call frame has {size} bytes, fewer than any version that waystation knows"
            ),
        ));
    }
    Ok(())
}

/// # Safety
///
/// `frame` is null or a call frame of XLA's FFI, valid with all that it points to until this returns.
unsafe fn enter(
    frame: *mut sys::XLA_FFI_CallFrame,
    target: fn(&mut Frame<'_>) -> Result<(), Failure>,
) -> *mut sys::XLA_FFI_Error {
    if frame.is_null() {
        return null_mut();
    }
    // SAFETY: not null, hence a frame; every frame has these two first.
    let (size, api) = unsafe { ((*frame).struct_size, (*frame).api) };
    // Nothing may unwind into XLA.
    let result = catch_unwind(AssertUnwindSafe(|| {
        known_size(size)?;
        // SAFETY: a frame of this size has every field; passed on from this function's contract.
        unsafe {
            if let Some(metadata) = metadata(frame) {
                return describe(api, metadata);
            }
            CALLS.fetch_add(1, Relaxed);
            target(&mut Frame::new(&*frame)?)
        }
    }));
    let failure = match result {
        Ok(Ok(())) => return null_mut(),
        Ok(Err(failure)) => failure,
        Err(_) => Failure::new(
            Code::Unknown,
            "the FFI target panicked; this is a defect of waystation",
        ),
    };
    // SAFETY: the frame's table of functions, or null.
    unsafe { report(api, &failure) }
}

/// The question about the target, if the frame is one.
///
/// # Safety
///
/// As [`enter`]; the frame is not null and has every field.
unsafe fn metadata(
    frame: *mut sys::XLA_FFI_CallFrame,
) -> Option<*mut sys::XLA_FFI_Metadata_Extension> {
    // SAFETY: the list is well formed by contract.
    unsafe {
        let mut next = (*frame).extension_start;
        // A bound, so that a list that bites its tail ends.
        for _ in 0..64 {
            if next.is_null() {
                break;
            }
            if (*next).kind == sys::FFI_EXTENSION_METADATA {
                return Some(next.cast());
            }
            next = (*next).next;
        }
    }
    None
}

/// Answers the question: no traits, no state, and the version that the plugin itself has, since nothing is used here
/// that differs between versions, and older plugins take their own version only.
///
/// # Safety
///
/// `api` is null or XLA's table; `extension` is an extension of this kind.
unsafe fn describe(
    api: *const sys::XLA_FFI_Api,
    extension: *mut sys::XLA_FFI_Metadata_Extension,
) -> Result<(), Failure> {
    let short = || {
        Failure::new(
            Code::FailedPrecondition,
            "XLA's question about an FFI target is shorter than any version that waystation knows",
        )
    };
    // SAFETY: every extension starts with its size, the metadata and the table too; nothing is touched beyond it.
    unsafe {
        if (*extension).base.struct_size < size_of::<sys::XLA_FFI_Metadata_Extension>()
            || (*extension).metadata.is_null()
        {
            return Err(short());
        }
        let metadata = (*extension).metadata;
        let size = (*metadata).struct_size;
        if size < std::mem::offset_of!(sys::XLA_FFI_Metadata, traits) + size_of::<u32>() {
            return Err(short());
        }
        let (major, minor) =
            if !api.is_null() && (*api).struct_size >= size_of::<sys::XLA_FFI_Api>() {
                let version = &(*api).api_version;
                (version.major_version, version.minor_version)
            } else {
                return Err(short());
            };
        if major != 0 {
            return Err(Failure::new(
                Code::FailedPrecondition,
                format!(
                    "the plugin speaks version {major}.{minor} of XLA's FFI, and waystation 0.x"
                ),
            ));
        }
        (*metadata).api_version.struct_size = size_of::<sys::XLA_FFI_Api_Version>();
        (*metadata).api_version.extension_start = null_mut();
        (*metadata).api_version.major_version = major;
        (*metadata).api_version.minor_version = minor;
        (*metadata).traits = 0;
        if size >= size_of::<sys::XLA_FFI_Metadata>() {
            (*metadata).state_type_id = 0;
        }
    }
    Ok(())
}

/// Makes an error that XLA owns.
///
/// # Safety
///
/// `api` is null or XLA's table.
unsafe fn report(api: *const sys::XLA_FFI_Api, failure: &Failure) -> *mut sys::XLA_FFI_Error {
    // SAFETY: the table starts with its size.
    let create = unsafe {
        if !api.is_null() && (*api).struct_size >= size_of::<sys::XLA_FFI_Api>() {
            (*api).error_create
        } else {
            None
        }
    };
    let Some(create) = create else {
        // Not to be told apart from success by any other means: a program must not go on with results unwritten.
        tracing::error!(
            message = failure.message,
            "the plugin takes no errors from FFI targets"
        );
        std::process::abort();
    };
    let text = CString::new(failure.message.replace('\0', " ")).unwrap_or_default();
    let mut args = sys::XLA_FFI_Error_Create_Args {
        struct_size: sys::XLA_FFI_Error_Create_Args::STRUCT_SIZE,
        extension_start: null_mut(),
        message: text.as_ptr(),
        code: failure.code.number(),
    };
    // SAFETY: the arguments are complete; the function copies the text.
    unsafe { create(&mut args) }
}
