//! Something of ours that an execution hands to the targets it calls.

use crate::error::Error;
use crate::plugin::Plugin;
use crate::sys::{self, Call as _};
use std::any::Any;
use std::ffi::c_void;
use std::ptr::{NonNull, null, null_mut};
use std::sync::{Arc, PoisonError};

/// What targets get: any value.
pub(crate) type UserData = Arc<dyn Any + Send + Sync>;

/// A value for the targets of one or more executions; see [`crate::ffi::Call::user_data`]. Clones share it.
#[derive(Clone)]
pub struct ExecuteContext(Arc<Inner>);

struct Inner {
    plugin: Arc<Plugin>,
    raw: NonNull<sys::PJRT_ExecuteContext>,
    /// Where `raw` points to for the value: a box, which is freed after `raw`.
    data: NonNull<UserData>,
}

// SAFETY: a context is only read once it is made, and may be by any thread; the value may be used by any.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        let mut args = sys::PJRT_ExecuteContext_Destroy_Args::new();
        args.context = self.raw.as_ptr();
        // SAFETY: the context is live, and no execution uses it: each keeps a clone until it is done.
        if let Err(error) = unsafe { self.plugin.api().call(&mut args) } {
            tracing::warn!(%error, "an execution's context was not destroyed");
        }
        // SAFETY: from a box in `new`, and given back once; the only other who knew it is gone.
        drop(unsafe { Box::from_raw(self.data.as_ptr()) });
    }
}

impl std::fmt::Debug for ExecuteContext {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("ExecuteContext")
    }
}

static NO_FUNCTIONS: TypeInfo = TypeInfo(sys::PJRT_FFI_Type_Info {
    deleter: null(),
    serialize: null(),
    deserialize: null(),
});

struct TypeInfo(sys::PJRT_FFI_Type_Info);

// SAFETY: it is constant.
unsafe impl Sync for TypeInfo {}

/// XLA's number of the type `UserData`, which all plugins of the process get registered under one name.
pub(crate) fn type_id(plugin: &Plugin) -> Result<i64, Error> {
    let mut known = plugin
        .user_data()
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    if let Some(id) = *known {
        return Ok(id);
    }
    let name = "waystation.UserData";
    let mut args = sys::PJRT_FFI_Type_Register_Args {
        struct_size: size_of::<sys::PJRT_FFI_Type_Register_Args>(),
        extension_start: null_mut(),
        type_name: name.as_ptr().cast(),
        type_name_size: name.len(),
        // To be chosen.
        type_id: 0,
        type_info: &raw const NO_FUNCTIONS.0,
    };
    // SAFETY: the name lives through the call, which copies it; the functions live for good.
    unsafe { plugin.api().call_ffi(&mut args)? };
    if args.type_id == 0 {
        return Err(Error::contract(
            sys::PJRT_FFI_Type_Register_Args::NAME,
            "gave the type no number",
        ));
    }
    *known = Some(args.type_id);
    Ok(args.type_id)
}

/// A context without data, never destroyed.
pub(crate) struct Empty(NonNull<sys::PJRT_ExecuteContext>);

// SAFETY: nobody changes it once it is made.
unsafe impl Send for Empty {}
// SAFETY: as above.
unsafe impl Sync for Empty {}

impl Empty {
    pub(crate) fn new(plugin: &Plugin) -> Result<Self, Error> {
        let mut args = sys::PJRT_ExecuteContext_Create_Args::new();
        // SAFETY: the arguments hold no pointers.
        unsafe { plugin.api().call(&mut args)? };
        NonNull::new(args.context)
            .map(Self)
            .ok_or_else(|| Error::contract("PJRT_ExecuteContext_Create", "returned no context"))
    }

    pub(crate) fn raw(&self) -> *mut sys::PJRT_ExecuteContext {
        self.0.as_ptr()
    }
}

/// What an execution gets whose caller has no context: null, or an empty one if there are targets that look for data. XLA
/// looks it up without a check, so an execution without any context must not meet them, whatever program it is.
pub(crate) fn none(plugin: &Plugin) -> *mut sys::PJRT_ExecuteContext {
    plugin.no_data().get().map_or(null_mut(), Empty::raw)
}

/// Has all executions get a context from now on.
pub(crate) fn give_always(plugin: &Plugin) -> Result<(), Error> {
    if plugin.no_data().get().is_none() {
        let empty = Empty::new(plugin)?;
        // If another thread was faster, this one is not used, and lost.
        let _ = plugin.no_data().set(empty);
    }
    Ok(())
}

impl ExecuteContext {
    /// A context with `data`.
    ///
    /// # Errors
    ///
    /// [`crate::Code::Unimplemented`] if the plugin has no contexts; else what it reports.
    pub fn new(plugin: &Arc<Plugin>, data: Arc<dyn Any + Send + Sync>) -> Result<Self, Error> {
        let type_id = type_id(plugin)?;
        let mut args = sys::PJRT_ExecuteContext_Create_Args::new();
        // SAFETY: the arguments hold no pointers.
        unsafe { plugin.api().call(&mut args)? };
        let raw = NonNull::new(args.context)
            .ok_or_else(|| Error::contract("PJRT_ExecuteContext_Create", "returned no context"))?;
        let data: NonNull<UserData> = NonNull::from(Box::leak(Box::new(data)));
        // From here on both are freed whatever fails.
        let inner = Inner {
            plugin: Arc::clone(plugin),
            raw,
            data,
        };
        let mut args = sys::PJRT_FFI_UserData_Add_Args {
            struct_size: size_of::<sys::PJRT_FFI_UserData_Add_Args>(),
            extension_start: null_mut(),
            context: raw.as_ptr(),
            type_id,
            data: data.as_ptr().cast::<c_void>(),
            deleter: null(),
        };
        // SAFETY: the context is live and not in use yet; the value lives longer than it.
        unsafe { plugin.api().call_ffi(&mut args)? };
        Ok(Self(Arc::new(inner)))
    }

    pub(crate) fn raw(&self) -> *mut sys::PJRT_ExecuteContext {
        self.0.raw.as_ptr()
    }

    /// The plugin whose executions take it.
    pub(crate) fn plugin(&self) -> &Arc<Plugin> {
        &self.0.plugin
    }
}
