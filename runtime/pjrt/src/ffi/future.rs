//! XLA's futures: calls that end later, and where their user data is found.

use super::finish::finish;
use super::{Failure, report};
use crate::context::UserData;
use crate::error::Code;
use crate::sys;
use std::cell::Cell;
use std::mem::offset_of;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

/// Tables of XLA's functions that frames come with, one a plugin, and the plugin's number for the type of user data.
static TABLES: Mutex<Vec<(usize, i64)>> = Mutex::new(Vec::new());

thread_local! {
    /// The number for the type of user data of the plugin that this thread registers a target with, or zero.
    pub(super) static REGISTERING: Cell<i64> = const { Cell::new(0) };
}

/// Takes note of the table that the plugin asks with, which is registering a target on this thread.
pub(super) fn remember(api: *const sys::XLA_FFI_Api) {
    let type_id = REGISTERING.get();
    if type_id == 0 || api.is_null() {
        return;
    }
    let mut tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
    if !tables.iter().any(|(known, _)| *known == api.addr()) {
        tables.push((api.addr(), type_id));
    }
}

/// The functions of XLA that calls which end later need.
#[derive(Clone, Copy)]
pub(super) struct Functions {
    api: *const sys::XLA_FFI_Api,
    create: unsafe extern "C" fn(*mut sys::XLA_FFI_Future_Create_Args) -> *mut sys::XLA_FFI_Error,
    set_available:
        unsafe extern "C" fn(*mut sys::XLA_FFI_Future_SetAvailable_Args) -> *mut sys::XLA_FFI_Error,
    set_error:
        unsafe extern "C" fn(*mut sys::XLA_FFI_Future_SetError_Args) -> *mut sys::XLA_FFI_Error,
    destroy: unsafe extern "C" fn(*mut sys::XLA_FFI_Error_Destroy_Args),
    get: unsafe extern "C" fn(*mut sys::XLA_FFI_InvokeContext_Get_Args) -> *mut sys::XLA_FFI_Error,
}

// SAFETY: the table is constant memory of a library that is never unloaded, and its functions may be called from any thread.
unsafe impl Send for Functions {}
// SAFETY: as above.
unsafe impl Sync for Functions {}

impl Functions {
    /// # Safety
    ///
    /// `api` is null or XLA's table, which says its size.
    pub(super) unsafe fn new(api: *const sys::XLA_FFI_Api) -> Option<Self> {
        let end = offset_of!(sys::XLA_FFI_Api_Async, future_set_error) + size_of::<usize>();
        // SAFETY: the table starts with its size, and is as long as that says.
        let table = unsafe {
            if api.is_null() || (*api).struct_size < end {
                return None;
            }
            &*api.cast::<sys::XLA_FFI_Api_Async>()
        };
        Some(Self {
            api,
            create: table.future_create?,
            set_available: table.future_set_available?,
            set_error: table.future_set_error?,
            destroy: table.error_destroy?,
            get: table.invoke_context_get?,
        })
    }

    /// # Safety
    ///
    /// `error` is null or an error of XLA's that the caller owns and does not use after this.
    unsafe fn discard(&self, error: *mut sys::XLA_FFI_Error) -> bool {
        if error.is_null() {
            return true;
        }
        let mut args = sys::XLA_FFI_Error_Destroy_Args {
            struct_size: size_of::<sys::XLA_FFI_Error_Destroy_Args>(),
            extension_start: null_mut(),
            error,
        };
        // SAFETY: passed on from this function's contract.
        unsafe { (self.destroy)(&mut args) };
        false
    }

    /// The value of the execution's context, if it has one.
    ///
    /// # Safety
    ///
    /// `context` is the frame's.
    pub(super) unsafe fn user_data(&self, context: *mut std::ffi::c_void) -> Option<UserData> {
        let type_id = {
            let tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
            tables
                .iter()
                .find(|(known, _)| *known == self.api.addr())
                .map(|(_, type_id)| *type_id)?
        };
        if context.is_null() {
            return None;
        }
        let mut args = sys::XLA_FFI_InvokeContext_Get_Args {
            struct_size: size_of::<sys::XLA_FFI_InvokeContext_Get_Args>(),
            extension_start: null_mut(),
            context,
            type_id: &raw const type_id,
            data: null_mut(),
        };
        // SAFETY: the context is XLA's, and has one of ours in it (`context::give_always` came before the table was taken note
        // of); the number lives across the call. Under this number of this plugin only
        // `ExecuteContext` adds data, which is a `UserData` that lives until the execution is done.
        unsafe {
            let error = (self.get)(&mut args);
            if !self.discard(error) || args.data.is_null() {
                return None;
            }
            Some(UserData::clone(&*args.data.cast::<UserData>()))
        }
    }
}

/// XLA's promise that operands and results stay as they are; it ends when this is dropped.
pub(super) struct Hold {
    functions: Functions,
    future: *mut sys::XLA_FFI_Future,
    outcome: Mutex<Option<Result<(), Failure>>>,
}

// SAFETY: XLA's future may be completed from any thread.
unsafe impl Send for Hold {}
// SAFETY: as above; the future is only touched when the last owner is gone.
unsafe impl Sync for Hold {}

impl Hold {
    /// Begins a call: its future, which XLA has to be given, and the hold that completes it. `None` if the plugin fails.
    pub(super) fn new(functions: Functions) -> Option<(*mut sys::XLA_FFI_Future, Self)> {
        let mut args = sys::XLA_FFI_Future_Create_Args {
            struct_size: size_of::<sys::XLA_FFI_Future_Create_Args>(),
            extension_start: null_mut(),
            future: null_mut(),
        };
        // SAFETY: the arguments are complete; the error is handed over.
        let made = unsafe {
            let error = (functions.create)(&mut args);
            functions.discard(error)
        };
        let hold = Self {
            functions,
            future: args.future,
            outcome: Mutex::default(),
        };
        if made && !args.future.is_null() {
            return Some((args.future, hold));
        }
        // There is nothing to complete.
        std::mem::forget(hold);
        None
    }

    /// Sets the outcome.
    pub(super) fn set(&self, outcome: Result<(), Failure>) {
        *self.outcome.lock().unwrap_or_else(PoisonError::into_inner) = Some(outcome);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let outcome = self
            .outcome
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        finish(Ended {
            functions: self.functions,
            future: self.future,
            outcome: outcome.unwrap_or_else(|| {
                Err(Failure::new(
                    Code::Unknown,
                    "a call of an FFI target was given up without an outcome; this is a defect of waystation",
                ))
            }),
        });
    }
}

/// A call that has ended, of which XLA is to be told.
pub(super) struct Ended {
    functions: Functions,
    future: *mut sys::XLA_FFI_Future,
    outcome: Result<(), Failure>,
}

// SAFETY: as for `Hold`.
unsafe impl Send for Ended {}

impl Ended {
    /// Tells XLA, which goes on with the program on this thread.
    pub(super) fn tell(self) {
        let done = match &self.outcome {
            Ok(()) => {
                let mut args = sys::XLA_FFI_Future_SetAvailable_Args {
                    struct_size: size_of::<sys::XLA_FFI_Future_SetAvailable_Args>(),
                    extension_start: null_mut(),
                    future: self.future,
                };
                // SAFETY: the future is of `Future_Create`, lives until it is complete, and is completed here only, once.
                // The error is handed over.
                unsafe {
                    let error = (self.functions.set_available)(&mut args);
                    self.functions.discard(error)
                }
            }
            Err(failure) => {
                let mut args = sys::XLA_FFI_Future_SetError_Args {
                    struct_size: size_of::<sys::XLA_FFI_Future_SetError_Args>(),
                    extension_start: null_mut(),
                    future: self.future,
                    // SAFETY: this is XLA's table.
                    error: unsafe { report(self.functions.api, failure) },
                };
                // SAFETY: as above; the error is new, and XLA's from now on.
                unsafe {
                    let error = (self.functions.set_error)(&mut args);
                    self.functions.discard(error)
                }
            }
        };
        if !done {
            // The program waits for good.
            tracing::error!("the plugin was not told that a call of an FFI target has ended");
        }
    }
}
