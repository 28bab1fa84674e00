//! The extension of the PJRT C API that has programs transformed while they are compiled.
//!
//! Source: XLA's `xla/pjrt/c/pjrt_c_api_xla_transform_extension.h` (version 1).

use super::{Call, PJRT_Extension_Base, Slot};
use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

/// `PJRT_Extension_Type_XlaTransform`.
pub(crate) const EXTENSION_XLA_TRANSFORM: c_int = 24;

/// `PJRT_API_XLA_TRANSFORM_EXTENSION_VERSION`.
pub(crate) const XLA_TRANSFORM_VERSION: i64 = 1;

/// `PJRT_XlaTransform_PipelineStage_kPreScheduler`.
pub(crate) const XLA_TRANSFORM_PRE_SCHEDULER: c_int = 0;

/// The extension's table.
#[repr(C)]
pub(crate) struct PJRT_Xla_Transform_Extension {
    pub(crate) base: PJRT_Extension_Base,
    pub(crate) register_xla_transform: Slot,
    pub(crate) clear_xla_transform: Slot,
}

#[repr(C)]
pub(crate) struct PJRT_XlaTransform_string {
    pub(crate) data: *const c_char,
    pub(crate) size: usize,
}

#[repr(C)]
pub(crate) struct PJRT_XlaTransform_version_and_error {
    pub(crate) api_version: i64,
    pub(crate) data: *mut c_void,
    pub(crate) cleanup_fn: Option<unsafe extern "C" fn(*mut c_void)>,
    pub(crate) has_error: bool,
    pub(crate) code: c_int,
    pub(crate) error_msg: PJRT_XlaTransform_string,
}

/// One program; it says its own size.
#[repr(C)]
pub(crate) struct PJRT_XlaTransform_Args {
    pub(crate) struct_size: usize,
    pub(crate) header: PJRT_XlaTransform_version_and_error,
    pub(crate) hlo_module: PJRT_XlaTransform_string,
    pub(crate) transformed_hlo_module: PJRT_XlaTransform_string,
    pub(crate) changed: bool,
}

impl PJRT_XlaTransform_Args {
    /// As the header counts it: without the padding at the end.
    pub(crate) const STRUCT_SIZE: usize = offset_of!(Self, changed) + size_of::<bool>();
}

/// What XLA calls. It keeps the pointer until the transform is cleared.
#[repr(C)]
pub(crate) struct PJRT_XlaTransform_Callbacks {
    pub(crate) version: i64,
    pub(crate) dtor: Option<unsafe extern "C" fn(*mut PJRT_XlaTransform_Callbacks)>,
    pub(crate) transform_hlo_module:
        Option<unsafe extern "C" fn(*mut PJRT_XlaTransform_Callbacks, *mut PJRT_XlaTransform_Args)>,
}

/// Unlike other arguments these have no list of extensions.
#[repr(C)]
pub(crate) struct PJRT_Register_Xla_Transform_Args {
    pub(crate) struct_size: usize,
    pub(crate) name: *const c_char,
    pub(crate) name_size: usize,
    pub(crate) stage: c_int,
    pub(crate) callbacks: *mut PJRT_XlaTransform_Callbacks,
}

// SAFETY: the slot of this name in the header takes exactly these arguments.
unsafe impl Call for PJRT_Register_Xla_Transform_Args {
    type Table = PJRT_Xla_Transform_Extension;
    const NAME: &'static str = "PJRT_Register_Xla_Transform";
    const SLOT: usize = offset_of!(PJRT_Xla_Transform_Extension, register_xla_transform);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers that follow from the header named above, on 64-bit systems.
    #[test]
    fn structs_have_the_sizes_of_the_header() {
        assert_eq!(
            offset_of!(PJRT_Xla_Transform_Extension, register_xla_transform),
            24
        );
        assert_eq!(
            offset_of!(PJRT_Xla_Transform_Extension, clear_xla_transform),
            32
        );
        assert_eq!(size_of::<PJRT_XlaTransform_version_and_error>(), 48);
        assert_eq!(offset_of!(PJRT_XlaTransform_Args, hlo_module), 56);
        assert_eq!(
            offset_of!(PJRT_XlaTransform_Args, transformed_hlo_module),
            72
        );
        assert_eq!(PJRT_XlaTransform_Args::STRUCT_SIZE, 89);
        assert_eq!(size_of::<PJRT_XlaTransform_Callbacks>(), 24);
        assert_eq!(size_of::<PJRT_Register_Xla_Transform_Args>(), 40);
    }
}
