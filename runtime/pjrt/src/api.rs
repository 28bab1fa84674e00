//! The one door to the plugin's functions.
//!
//! A plugin is a table of function pointers that says its own size. Newer plugins have more functions, older
//! ones fewer, and any slot may be null. [`Api::call`] reads the size, checks that the slot lies within it and
//! is not null, calls, and turns a `PJRT_Error` into an [`Error`] that names the function. Nothing else in the
//! crate calls a plugin, except the three functions that take errors apart, here too.
//!
//! The table is only ever read through the plugin's own pointer, field by field: a copy of it, or a reference
//! to it as a whole, would reach past the end of an older plugin's table.

use crate::error::{Code, Error};
use crate::sys::{self, Call, Slot};
use std::ffi::c_char;
use std::mem::offset_of;
use std::ptr::{NonNull, null_mut};

/// A table of functions in the plugin: the main one or an extension's.
pub(crate) struct Table<T> {
    base: NonNull<T>,
}

impl<T> Clone for Table<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Table<T> {}

// SAFETY: the table is constant memory of a library that is never unloaded, and PJRT requires every function
// of it to be callable from any thread.
unsafe impl<T> Send for Table<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Table<T> {}

impl<T> Table<T> {
    /// # Safety
    ///
    /// `base` points to a table that starts with its own size in bytes (`size_t`), is valid and constant for
    /// as many bytes as that says, and stays so for the rest of the process.
    unsafe fn new(base: NonNull<T>) -> Self {
        Self { base }
    }

    fn size(self) -> usize {
        // SAFETY: every table starts with its size (contract of `new`).
        unsafe { self.base.cast::<usize>().read() }
    }

    /// Reads `V` at `offset` if the plugin's table reaches that far.
    ///
    /// # Safety
    ///
    /// The bytes at `offset`, where the table has them, are a valid `V`.
    unsafe fn read<V: Copy>(self, offset: usize) -> Option<V> {
        let end = offset.checked_add(size_of::<V>())?;
        if end > self.size() {
            return None;
        }
        // SAFETY: the range lies within the table's own size; the caller vouches for the type.
        Some(unsafe { self.base.byte_add(offset).cast::<V>().read() })
    }

    /// The function pointer in the slot at `offset`, or why there is none.
    fn slot(self, offset: usize, name: &'static str) -> Result<Slot, Error> {
        // SAFETY: `offset` is that of a slot (`Call::SLOT`), and slots are pointers.
        match unsafe { self.read::<Slot>(offset) } {
            None => Err(Error::own(
                Code::Unimplemented,
                name,
                "this plugin is older than the function: its table of functions ends before it; \
                 use a newer plugin",
            )),
            Some(slot) if slot.is_null() => Err(Error::own(
                Code::Unimplemented,
                name,
                "this plugin leaves the function out: its slot in the table is null",
            )),
            Some(slot) => Ok(slot),
        }
    }
}

/// The plugin's main table, and its layouts and FFI extensions where it has them.
#[derive(Clone, Copy)]
pub(crate) struct Api {
    table: Table<sys::PJRT_Api>,
    layouts: Option<Table<sys::PJRT_Layouts_Extension>>,
    ffi: Option<Table<sys::PJRT_FFI_Extension>>,
    transform: Option<Table<sys::PJRT_Xla_Transform_Extension>>,
}

impl Api {
    /// Takes the table that `GetPjrtApi` returned.
    ///
    /// # Safety
    ///
    /// `table`, if not null, points to a `PJRT_Api` as the C header defines it: its first field says its size,
    /// it is constant, and it stays valid for the rest of the process, with all that it points to.
    pub(crate) unsafe fn new(table: *const sys::PJRT_Api) -> Result<Self, Error> {
        const FUNCTION: &str = "GetPjrtApi";
        let Some(base) = NonNull::new(table.cast_mut()) else {
            return Err(Error::own(
                Code::FailedPrecondition,
                FUNCTION,
                "the plugin returned no table of functions",
            ));
        };
        // SAFETY: passed on from this function's contract.
        let table = unsafe { Table::new(base) };
        let api = Self {
            table,
            layouts: None,
            ffi: None,
            transform: None,
        };
        let (major, minor) = api.version().ok_or_else(|| {
            Error::own(
                Code::FailedPrecondition,
                FUNCTION,
                format!(
                    "the plugin's table of {} bytes is too short to hold a version",
                    table.size()
                ),
            )
        })?;
        // Fields of the table moved for the last time in 0.57.
        if major != 0 || minor < 57 {
            return Err(Error::own(
                Code::FailedPrecondition,
                FUNCTION,
                format!(
                    "the plugin speaks version {major}.{minor} of the PJRT C API and Waystation 0.57 and \
                     later minor versions of it; use another build of the plugin"
                ),
            ));
        }
        // SAFETY: the extension list belongs to the table, for which this function's contract vouches.
        let layouts = unsafe { api.extension(sys::EXTENSION_LAYOUTS) }.map(|base| {
            // SAFETY: an extension of this type starts with its size, as every extension does, and lives as
            // long as the table.
            unsafe { Table::new(base.cast()) }
        });
        // SAFETY: as above.
        let ffi = unsafe { api.extension(sys::EXTENSION_FFI) }.map(|base| {
            // SAFETY: as above.
            unsafe { Table::new(base.cast()) }
        });
        // SAFETY: as above.
        let transform = unsafe { api.extension(sys::EXTENSION_XLA_TRANSFORM) }.map(|base| {
            // SAFETY: as above.
            unsafe { Table::new(base.cast()) }
        });
        Ok(Self {
            table,
            layouts,
            ffi,
            transform,
        })
    }

    /// Major and minor version, if the table is long enough to say.
    fn version(&self) -> Option<(i32, i32)> {
        let version = offset_of!(sys::PJRT_Api, pjrt_api_version);
        let major = version + offset_of!(sys::PJRT_Api_Version, major_version);
        let minor = version + offset_of!(sys::PJRT_Api_Version, minor_version);
        // SAFETY: both are C ints in the header, and any bits make a valid int.
        unsafe {
            Some((
                self.table.read::<i32>(major)?,
                self.table.read::<i32>(minor)?,
            ))
        }
    }

    /// Version of the C API the plugin was built with.
    pub(crate) fn api_version(&self) -> (i32, i32) {
        // `new` has seen it.
        self.version().unwrap_or_default()
    }

    /// First extension of a type.
    ///
    /// # Safety
    ///
    /// The table's list of extensions is well formed: each starts with size, type and next.
    unsafe fn extension(&self, kind: i32) -> Option<NonNull<sys::PJRT_Extension_Base>> {
        let offset = offset_of!(sys::PJRT_Api, extension_start);
        // SAFETY: the field is a pointer.
        let mut next = unsafe { self.table.read::<*mut sys::PJRT_Extension_Base>(offset)? };
        // A bound, so that a list that bites its tail ends.
        for _ in 0..256 {
            let base = NonNull::new(next)?;
            // SAFETY: well formed by contract.
            let (this, after) = unsafe { ((*base.as_ptr()).kind, (*base.as_ptr()).next) };
            if this == kind {
                return Some(base);
            }
            next = after;
        }
        None
    }

    /// Calls the function that takes `A`.
    ///
    /// # Errors
    ///
    /// [`Code::Unimplemented`] if the plugin lacks the function; else what the plugin reports.
    ///
    /// # Safety
    ///
    /// Every pointer in `args` is what the function's entry in the C header asks for, and lives as long as it
    /// asks.
    pub(crate) unsafe fn call<A: Call<Table = sys::PJRT_Api>>(
        &self,
        args: &mut A,
    ) -> Result<(), Error> {
        // SAFETY: passed on from this function's contract.
        unsafe { self.call_in(self.table, args) }
    }

    /// As [`Api::call`], for a function of the layouts extension.
    ///
    /// # Errors
    ///
    /// As [`Api::call`]; [`Code::Unimplemented`] also if the plugin lacks the extension.
    ///
    /// # Safety
    ///
    /// As [`Api::call`].
    pub(crate) unsafe fn call_layouts<A: Call<Table = sys::PJRT_Layouts_Extension>>(
        &self,
        args: &mut A,
    ) -> Result<(), Error> {
        let Some(layouts) = self.layouts else {
            return Err(Error::own(
                Code::Unimplemented,
                A::NAME,
                "this plugin has no layouts extension",
            ));
        };
        // SAFETY: passed on from this function's contract.
        unsafe { self.call_in(layouts, args) }
    }

    /// As [`Api::call`], for a function of the FFI extension.
    ///
    /// # Errors
    ///
    /// As [`Api::call`]; [`Code::Unimplemented`] also if the plugin lacks the extension.
    ///
    /// # Safety
    ///
    /// As [`Api::call`].
    pub(crate) unsafe fn call_ffi<A: Call<Table = sys::PJRT_FFI_Extension>>(
        &self,
        args: &mut A,
    ) -> Result<(), Error> {
        let Some(ffi) = self.ffi else {
            return Err(Error::own(
                Code::Unimplemented,
                A::NAME,
                "this plugin has no FFI extension",
            ));
        };
        // SAFETY: passed on from this function's contract.
        unsafe { self.call_in(ffi, args) }
    }

    /// As [`Api::call`], for a function of the extension that has programs transformed.
    ///
    /// # Errors
    ///
    /// As [`Api::call`]; [`Code::Unimplemented`] also if the plugin lacks the extension.
    ///
    /// # Safety
    ///
    /// As [`Api::call`].
    pub(crate) unsafe fn call_transform<A: Call<Table = sys::PJRT_Xla_Transform_Extension>>(
        &self,
        args: &mut A,
    ) -> Result<(), Error> {
        let Some(transform) = self.transform else {
            return Err(Error::own(
                Code::Unimplemented,
                A::NAME,
                "this plugin lets nobody change a program that it compiles: it has no XlaTransform extension",
            ));
        };
        // SAFETY: passed on from this function's contract.
        unsafe { self.call_in(transform, args) }
    }

    /// Whether the plugin has the functions that [`Api::call`] and its kin would call.
    pub(crate) fn check_spanning(&self) -> Result<(), Error> {
        use sys::Call as _;
        self.table.slot(
            sys::PJRT_ExecuteContext_Create_Args::SLOT,
            sys::PJRT_ExecuteContext_Create_Args::NAME,
        )?;
        let lacks =
            |name| move || Error::own(Code::Unimplemented, name, "this plugin lacks the extension");
        let ffi = self
            .ffi
            .ok_or_else(lacks(sys::PJRT_FFI_UserData_Add_Args::NAME))?;
        ffi.slot(
            sys::PJRT_FFI_UserData_Add_Args::SLOT,
            sys::PJRT_FFI_UserData_Add_Args::NAME,
        )?;
        let transform = self
            .transform
            .ok_or_else(lacks(sys::PJRT_Register_Xla_Transform_Args::NAME))?;
        transform.slot(
            sys::PJRT_Register_Xla_Transform_Args::SLOT,
            sys::PJRT_Register_Xla_Transform_Args::NAME,
        )?;
        Ok(())
    }

    /// # Safety
    ///
    /// As [`Api::call`]; `table` is the plugin's table of that type.
    unsafe fn call_in<A: Call>(&self, table: Table<A::Table>, args: &mut A) -> Result<(), Error> {
        let slot = table.slot(A::SLOT, A::NAME)?;
        // SAFETY: `Call` promises that the slot holds a function of this signature, and it is not null.
        let function = unsafe {
            std::mem::transmute::<Slot, unsafe extern "C" fn(*mut A) -> *mut sys::PJRT_Error>(slot)
        };
        // SAFETY: the caller vouches for what `args` points to.
        let error = unsafe { function(args) };
        self.check(error, A::NAME)
    }

    /// Turns an error that the plugin gave us to own into ours, and frees it.
    pub(crate) fn check(
        &self,
        error: *mut sys::PJRT_Error,
        function: &'static str,
    ) -> Result<(), Error> {
        if error.is_null() {
            return Ok(());
        }
        // SAFETY: the plugin has just handed over `error`, and nobody else holds it.
        Err(unsafe { self.take_error(error, function) })
    }

    /// # Safety
    ///
    /// `error` is a live error of this plugin, owned by the caller, who must not use it afterwards.
    unsafe fn take_error(&self, error: *mut sys::PJRT_Error, function: &'static str) -> Error {
        // SAFETY: `error` is live until `destroy_error` below.
        let message = unsafe { self.error_message(error) };
        // SAFETY: as above.
        let code = unsafe { self.error_code(error) };
        // SAFETY: not used after this.
        unsafe { self.destroy_error(error) };
        Error::plugin(code, function, message)
    }

    /// # Safety
    ///
    /// `error` is a live error of this plugin.
    unsafe fn error_message(&self, error: *const sys::PJRT_Error) -> String {
        let offset = offset_of!(sys::PJRT_Api, PJRT_Error_Message);
        let Ok(slot) = self.table.slot(offset, "PJRT_Error_Message") else {
            return "the plugin gives no text for its errors".to_owned();
        };
        let mut args = sys::PJRT_Error_Message_Args {
            struct_size: size_of::<sys::PJRT_Error_Message_Args>(),
            extension_start: null_mut(),
            error,
            message: std::ptr::null(),
            message_size: 0,
        };
        // SAFETY: the slot of this name takes these arguments, returns nothing, and is not null; the message
        // it gives lives as long as `error`.
        unsafe {
            let function = std::mem::transmute::<
                Slot,
                unsafe extern "C" fn(*mut sys::PJRT_Error_Message_Args),
            >(slot);
            function(&mut args);
            text(args.message, args.message_size)
        }
    }

    /// # Safety
    ///
    /// `error` is a live error of this plugin.
    unsafe fn error_code(&self, error: *const sys::PJRT_Error) -> Code {
        let mut args = sys::PJRT_Error_GetCode_Args::new();
        args.error = error;
        let offset = <sys::PJRT_Error_GetCode_Args as Call>::SLOT;
        let Ok(slot) = self.table.slot(offset, "PJRT_Error_GetCode") else {
            return Code::Unknown;
        };
        // SAFETY: `Call` promises the signature, the slot is not null, `error` is live. An error about the
        // error is freed at once; asking for its code in turn might never end.
        unsafe {
            let function = std::mem::transmute::<
                Slot,
                unsafe extern "C" fn(*mut sys::PJRT_Error_GetCode_Args) -> *mut sys::PJRT_Error,
            >(slot);
            let nested = function(&mut args);
            if nested.is_null() {
                Code::from_number(args.code)
            } else {
                self.destroy_error(nested);
                Code::Unknown
            }
        }
    }

    /// # Safety
    ///
    /// `error` is a live error of this plugin, not used afterwards.
    unsafe fn destroy_error(&self, error: *mut sys::PJRT_Error) {
        let offset = offset_of!(sys::PJRT_Api, PJRT_Error_Destroy);
        let Ok(slot) = self.table.slot(offset, "PJRT_Error_Destroy") else {
            return;
        };
        let mut args = sys::PJRT_Error_Destroy_Args {
            struct_size: size_of::<sys::PJRT_Error_Destroy_Args>(),
            extension_start: null_mut(),
            error,
        };
        // SAFETY: the slot of this name takes these arguments, returns nothing, and is not null.
        unsafe {
            let function = std::mem::transmute::<
                Slot,
                unsafe extern "C" fn(*mut sys::PJRT_Error_Destroy_Args),
            >(slot);
            function(&mut args);
        }
    }
}

/// A string that the plugin lends as pointer and length, copied; bytes that are not UTF-8 are replaced.
///
/// # Safety
///
/// `data` is null or points to `size` readable bytes.
pub(crate) unsafe fn text(data: *const c_char, size: usize) -> String {
    // SAFETY: passed on from this function's contract.
    String::from_utf8_lossy(unsafe { slice(data.cast::<u8>(), size) }).into_owned()
}

/// An array that the plugin lends as pointer and length; null counts as empty whatever the length.
///
/// # Safety
///
/// `data` is null or points to `size` valid values of `T` that live and do not change during `'a`.
pub(crate) unsafe fn slice<'a, T>(data: *const T, size: usize) -> &'a [T] {
    if data.is_null() || size == 0 {
        return &[];
    }
    // SAFETY: passed on from this function's contract.
    unsafe { std::slice::from_raw_parts(data, size) }
}
