//! The extension of the PJRT C API that registers FFI targets, and the part of XLA's FFI C API that a target sees.
//!
//! Source: XLA's `xla/pjrt/c/pjrt_c_api_ffi_extension.h` (versions 1 to 3) and `xla/ffi/api/c_api.h` (version 0.5). Of the
//! latter every struct has grown at its end only, and each that XLA passes starts with its size.

use super::{Call, PJRT_Extension_Base, Slot};
use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

/// `PJRT_Extension_Type_FFI`.
pub(crate) const EXTENSION_FFI: c_int = 5;

/// The extension's table.
#[repr(C)]
pub(crate) struct PJRT_FFI_Extension {
    pub(crate) base: PJRT_Extension_Base,
    pub(crate) type_id_register: Slot,
    pub(crate) user_data_add: Slot,
    pub(crate) register_handler: Slot,
}

/// Unlike other arguments these have no list of extensions.
#[repr(C)]
pub(crate) struct PJRT_FFI_Register_Handler_Args {
    pub(crate) struct_size: usize,
    pub(crate) target_name: *const c_char,
    pub(crate) target_name_size: usize,
    pub(crate) handler: Handler,
    pub(crate) platform_name: *const c_char,
    pub(crate) platform_name_size: usize,
    pub(crate) traits: c_int,
}

impl PJRT_FFI_Register_Handler_Args {
    /// As the header counts it: without the padding at the end.
    pub(crate) const STRUCT_SIZE: usize = offset_of!(Self, traits) + size_of::<c_int>();
}

// SAFETY: the slot of this name in the header takes exactly these arguments, and a plugin from before version 3 of the
// extension, which takes those below, looks at nothing but the size and refuses it: they are longer.
unsafe impl Call for PJRT_FFI_Register_Handler_Args {
    type Table = PJRT_FFI_Extension;
    const NAME: &'static str = "PJRT_FFI_Register_Handler";
    const SLOT: usize = offset_of!(PJRT_FFI_Extension, register_handler);
}

/// The arguments before version 3 of the extension, which had a kind of target that is gone.
#[repr(C)]
pub(crate) struct PJRT_FFI_Register_Handler_Args_V2 {
    pub(crate) struct_size: usize,
    pub(crate) target_name: *const c_char,
    pub(crate) target_name_size: usize,
    /// 1 for a target that takes an [`XLA_FFI_CallFrame`].
    pub(crate) api_version: c_int,
    pub(crate) handler: Handler,
    pub(crate) platform_name: *const c_char,
    pub(crate) platform_name_size: usize,
    pub(crate) traits: c_int,
}

impl PJRT_FFI_Register_Handler_Args_V2 {
    /// As the header counts it: without the padding at the end.
    pub(crate) const STRUCT_SIZE: usize = offset_of!(Self, traits) + size_of::<c_int>();
}

// SAFETY: the slot of this name takes exactly these arguments in plugins that refuse the shorter ones above.
unsafe impl Call for PJRT_FFI_Register_Handler_Args_V2 {
    type Table = PJRT_FFI_Extension;
    const NAME: &'static str = "PJRT_FFI_Register_Handler";
    const SLOT: usize = offset_of!(PJRT_FFI_Extension, register_handler);
}

/// Functions on values of a type. All are left out: what is handed over stays the caller's.
#[repr(C)]
pub(crate) struct PJRT_FFI_Type_Info {
    pub(crate) deleter: *const c_void,
    pub(crate) serialize: *const c_void,
    pub(crate) deserialize: *const c_void,
}

/// Older versions of the extension have no `type_info`, and take longer arguments than theirs.
#[repr(C)]
pub(crate) struct PJRT_FFI_Type_Register_Args {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut PJRT_Extension_Base,
    pub(crate) type_name: *const c_char,
    pub(crate) type_name_size: usize,
    pub(crate) type_id: i64,
    pub(crate) type_info: *const PJRT_FFI_Type_Info,
}

// SAFETY: the slot takes these arguments since version 3 of the extension, and before it their beginning.
unsafe impl Call for PJRT_FFI_Type_Register_Args {
    type Table = PJRT_FFI_Extension;
    const NAME: &'static str = "PJRT_FFI_Type_Register";
    const SLOT: usize = offset_of!(PJRT_FFI_Extension, type_id_register);
}

/// Adds a pointer to an execution's context. Since version 3 of the extension there is no `deleter`; it is left null.
#[repr(C)]
pub(crate) struct PJRT_FFI_UserData_Add_Args {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut PJRT_Extension_Base,
    pub(crate) context: *mut super::PJRT_ExecuteContext,
    pub(crate) type_id: i64,
    pub(crate) data: *const c_void,
    pub(crate) deleter: *const c_void,
}

// SAFETY: the slot takes these arguments before version 3 of the extension, and since then their beginning.
unsafe impl Call for PJRT_FFI_UserData_Add_Args {
    type Table = PJRT_FFI_Extension;
    const NAME: &'static str = "PJRT_FFI_UserData_Add";
    const SLOT: usize = offset_of!(PJRT_FFI_Extension, user_data_add);
}

/// `XLA_FFI_Handler`: takes a frame, returns null or an error that XLA then owns.
pub(crate) type Handler = unsafe extern "C" fn(*mut XLA_FFI_CallFrame) -> *mut XLA_FFI_Error;

#[repr(C)]
pub(crate) struct XLA_FFI_Error {
    _opaque: [u8; 0],
}

/// Head of the extensions of a frame.
#[repr(C)]
pub(crate) struct XLA_FFI_InternalExtension {
    pub(crate) struct_size: usize,
    pub(crate) kind: c_int,
    pub(crate) next: *mut XLA_FFI_InternalExtension,
}

/// `XLA_FFI_Extension_Metadata`: the frame asks what the target is and does not run it.
pub(crate) const FFI_EXTENSION_METADATA: c_int = 1;

#[repr(C)]
pub(crate) struct XLA_FFI_Api_Version {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut XLA_FFI_InternalExtension,
    pub(crate) major_version: c_int,
    pub(crate) minor_version: c_int,
}

/// What a target answers about itself.
#[repr(C)]
pub(crate) struct XLA_FFI_Metadata {
    pub(crate) struct_size: usize,
    pub(crate) api_version: XLA_FFI_Api_Version,
    pub(crate) traits: u32,
    /// Since 0.1; 0 for a target without state.
    pub(crate) state_type_id: i64,
}

#[repr(C)]
pub(crate) struct XLA_FFI_Metadata_Extension {
    pub(crate) base: XLA_FFI_InternalExtension,
    pub(crate) metadata: *mut XLA_FFI_Metadata,
}

/// The functions that XLA offers targets, as far as they are used.
#[repr(C)]
pub(crate) struct XLA_FFI_Api {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut XLA_FFI_InternalExtension,
    pub(crate) api_version: XLA_FFI_Api_Version,
    pub(crate) internal_api: *const c_void,
    pub(crate) error_create:
        Option<unsafe extern "C" fn(*mut XLA_FFI_Error_Create_Args) -> *mut XLA_FFI_Error>,
}

/// More of these functions, which older versions lack: the table's own size says which are there.
#[repr(C)]
pub(crate) struct XLA_FFI_Api_Async {
    pub(crate) first: XLA_FFI_Api,
    pub(crate) error_get_details: *const c_void,
    pub(crate) error_destroy: FfiCall<XLA_FFI_Error_Destroy_Args, ()>,
    pub(crate) handler_register: *const c_void,
    pub(crate) stream_get: *const c_void,
    pub(crate) type_register: *const c_void,
    /// `XLA_FFI_ExecutionContext_Get` in older versions.
    pub(crate) invoke_context_get: FfiCall<XLA_FFI_InvokeContext_Get_Args>,
    pub(crate) state_set: *const c_void,
    pub(crate) state_get: *const c_void,
    pub(crate) device_memory_allocate: *const c_void,
    pub(crate) device_memory_free: *const c_void,
    pub(crate) thread_pool_schedule: *const c_void,
    pub(crate) thread_pool_num_threads: *const c_void,
    pub(crate) future_create: FfiCall<XLA_FFI_Future_Create_Args>,
    pub(crate) future_set_available: FfiCall<XLA_FFI_Future_SetAvailable_Args>,
    pub(crate) future_set_error: FfiCall<XLA_FFI_Future_SetError_Args>,
}

/// A function of the table.
pub(crate) type FfiCall<A, R = *mut XLA_FFI_Error> = Option<unsafe extern "C" fn(*mut A) -> R>;

#[repr(C)]
pub(crate) struct XLA_FFI_Future {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct XLA_FFI_Error_Destroy_Args {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut XLA_FFI_InternalExtension,
    pub(crate) error: *mut XLA_FFI_Error,
}

#[repr(C)]
pub(crate) struct XLA_FFI_InvokeContext_Get_Args {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut XLA_FFI_InternalExtension,
    pub(crate) context: *mut c_void,
    pub(crate) type_id: *const i64,
    pub(crate) data: *mut c_void,
}

#[repr(C)]
pub(crate) struct XLA_FFI_Future_Create_Args {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut XLA_FFI_InternalExtension,
    pub(crate) future: *mut XLA_FFI_Future,
}

#[repr(C)]
pub(crate) struct XLA_FFI_Future_SetAvailable_Args {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut XLA_FFI_InternalExtension,
    pub(crate) future: *mut XLA_FFI_Future,
}

#[repr(C)]
pub(crate) struct XLA_FFI_Future_SetError_Args {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut XLA_FFI_InternalExtension,
    pub(crate) future: *mut XLA_FFI_Future,
    pub(crate) error: *mut XLA_FFI_Error,
}

#[repr(C)]
pub(crate) struct XLA_FFI_Error_Create_Args {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut XLA_FFI_InternalExtension,
    pub(crate) message: *const c_char,
    pub(crate) code: c_int,
}

impl XLA_FFI_Error_Create_Args {
    /// As the header counts it: without the padding at the end.
    pub(crate) const STRUCT_SIZE: usize = offset_of!(Self, code) + size_of::<c_int>();
}

/// An operand or a result: dense, in the order that the program asks for.
#[repr(C)]
pub(crate) struct XLA_FFI_Buffer {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut XLA_FFI_InternalExtension,
    /// Numbered as `xla::PrimitiveType`.
    pub(crate) dtype: c_int,
    pub(crate) data: *mut c_void,
    pub(crate) rank: i64,
    pub(crate) dims: *const i64,
}

/// The kind of an operand or result that is an [`XLA_FFI_Buffer`].
pub(crate) const FFI_BUFFER: c_int = 1;

/// Operands (`XLA_FFI_Args`) or results (`XLA_FFI_Rets`); both look the same.
#[repr(C)]
pub(crate) struct XLA_FFI_Buffers {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut XLA_FFI_InternalExtension,
    pub(crate) size: i64,
    pub(crate) kinds: *const c_int,
    pub(crate) buffers: *const *const XLA_FFI_Buffer,
}

#[repr(C)]
pub(crate) struct XLA_FFI_ByteSpan {
    pub(crate) ptr: *const c_char,
    pub(crate) len: usize,
}

/// The kind of an attribute that is an [`XLA_FFI_Scalar`].
pub(crate) const FFI_SCALAR: c_int = 3;

#[repr(C)]
pub(crate) struct XLA_FFI_Scalar {
    pub(crate) dtype: c_int,
    pub(crate) value: *const c_void,
}

/// The kind of an attribute that is an [`XLA_FFI_Array`].
pub(crate) const FFI_ARRAY: c_int = 1;

#[repr(C)]
pub(crate) struct XLA_FFI_Array {
    pub(crate) dtype: c_int,
    pub(crate) size: usize,
    pub(crate) data: *const c_void,
}

#[repr(C)]
pub(crate) struct XLA_FFI_Attrs {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut XLA_FFI_InternalExtension,
    pub(crate) size: i64,
    pub(crate) kinds: *const c_int,
    pub(crate) names: *const *const XLA_FFI_ByteSpan,
    pub(crate) attrs: *const *const c_void,
}

/// One call of a target. Newer versions have a field for asynchronous targets behind these ([`XLA_FFI_CallFrame_Async`]).
#[repr(C)]
pub(crate) struct XLA_FFI_CallFrame {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut XLA_FFI_InternalExtension,
    pub(crate) api: *const XLA_FFI_Api,
    pub(crate) context: *mut c_void,
    pub(crate) stage: c_int,
    pub(crate) args: XLA_FFI_Buffers,
    pub(crate) rets: XLA_FFI_Buffers,
    pub(crate) attrs: XLA_FFI_Attrs,
}

/// One call, in versions whose table has `XLA_FFI_Future_Create`. The size that the frame says does not count the last field.
#[repr(C)]
pub(crate) struct XLA_FFI_CallFrame_Async {
    pub(crate) first: XLA_FFI_CallFrame,
    pub(crate) future: *mut XLA_FFI_Future,
}

/// `XLA_FFI_ExecutionStage_EXECUTE`.
pub(crate) const FFI_STAGE_EXECUTE: c_int = 3;

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that a C compiler gave for the headers named above.
    #[test]
    fn structs_have_the_sizes_of_the_headers() {
        assert_eq!(PJRT_FFI_Register_Handler_Args::STRUCT_SIZE, 52);
        assert_eq!(PJRT_FFI_Register_Handler_Args_V2::STRUCT_SIZE, 60);
        assert_eq!(offset_of!(PJRT_FFI_Extension, register_handler), 40);
        assert_eq!(size_of::<XLA_FFI_Api_Version>(), 24);
        assert_eq!(offset_of!(XLA_FFI_Metadata, traits), 32);
        assert_eq!(offset_of!(XLA_FFI_Metadata, state_type_id), 40);
        assert_eq!(offset_of!(XLA_FFI_Metadata_Extension, metadata), 24);
        assert_eq!(offset_of!(XLA_FFI_Api, error_create), 48);
        assert_eq!(XLA_FFI_Error_Create_Args::STRUCT_SIZE, 28);
        assert_eq!(size_of::<XLA_FFI_Buffer>(), 48);
        assert_eq!(size_of::<XLA_FFI_Buffers>(), 40);
        assert_eq!(size_of::<XLA_FFI_Attrs>(), 48);
        assert_eq!(offset_of!(XLA_FFI_CallFrame, args), 40);
        assert_eq!(size_of::<XLA_FFI_CallFrame>(), 168);
        assert_eq!(offset_of!(XLA_FFI_CallFrame_Async, future), 168);
        assert_eq!(size_of::<XLA_FFI_Array>(), 24);
        assert_eq!(size_of::<PJRT_FFI_Type_Register_Args>(), 48);
        assert_eq!(offset_of!(PJRT_FFI_UserData_Add_Args, type_id), 24);
        assert_eq!(size_of::<PJRT_FFI_UserData_Add_Args>(), 48);
        // Slots counted in the header's list, behind 40 bytes of head and the internal table.
        let slot = |index: usize| 48 + 8 * index;
        assert_eq!(offset_of!(XLA_FFI_Api_Async, error_get_details), slot(1));
        assert_eq!(offset_of!(XLA_FFI_Api_Async, invoke_context_get), slot(6));
        assert_eq!(offset_of!(XLA_FFI_Api_Async, future_create), slot(13));
        assert_eq!(offset_of!(XLA_FFI_Api_Async, future_set_error), slot(15));
        assert_eq!(size_of::<XLA_FFI_InvokeContext_Get_Args>(), 40);
        assert_eq!(size_of::<XLA_FFI_Future_Create_Args>(), 24);
        assert_eq!(size_of::<XLA_FFI_Future_SetAvailable_Args>(), 24);
        assert_eq!(size_of::<XLA_FFI_Future_SetError_Args>(), 32);
        assert_eq!(size_of::<XLA_FFI_Error_Destroy_Args>(), 24);
    }
}
