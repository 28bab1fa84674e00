//! The part of the PJRT C API that Waystation calls, declared by hand.
//!
//! Source of every number and order here: XLA's `xla/pjrt/c/pjrt_c_api.h` and
//! `pjrt_c_api_layouts_extension.h`, API versions 0.57 (the last one that moved fields of the function
//! table) to 0.115. Since 0.57 the table and the argument structs only grow at their ends.
//!
//! Only what is used is declared, with two exceptions: the function table names every slot up to the last
//! one used, since a slot is found by its position; and structs are declared in full, since plugins refuse
//! a struct shorter than the one they were built with (they accept a longer one).

#![allow(
    non_camel_case_types,
    non_snake_case,
    reason = "the names are those of the C header, so that both can be searched together"
)]

mod args;
mod ffi;
mod kv;
#[cfg(test)]
mod layout_tests;
mod table;
mod transform;

pub(crate) use args::*;
pub(crate) use ffi::*;
pub(crate) use kv::*;
pub(crate) use table::*;
pub(crate) use transform::*;

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;
use std::ptr::{null, null_mut};

/// Handles that the plugin owns and we only pass around.
macro_rules! opaque {
    ($($name:ident),* $(,)?) => {
        $(
            #[repr(C)]
            pub(crate) struct $name {
                _opaque: [u8; 0],
            }
        )*
    };
}

opaque!(
    PJRT_Error,
    PJRT_Event,
    PJRT_Client,
    PJRT_Device,
    PJRT_DeviceDescription,
    PJRT_Memory,
    PJRT_Buffer,
    PJRT_Executable,
    PJRT_LoadedExecutable,
    PJRT_SerializedExecutable,
    PJRT_Layouts_MemoryLayout,
    PJRT_Layouts_SerializedLayout,
    PJRT_ExecuteContext,
);

/// Head of every extension: a linked list that starts in the function table.
#[repr(C)]
pub(crate) struct PJRT_Extension_Base {
    pub(crate) struct_size: usize,
    pub(crate) kind: c_int,
    pub(crate) next: *mut PJRT_Extension_Base,
}

/// `PJRT_Extension_Type_Layouts`.
pub(crate) const EXTENSION_LAYOUTS: c_int = 4;

/// Version numbers as the plugin was built with.
#[repr(C)]
pub(crate) struct PJRT_Api_Version {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut PJRT_Extension_Base,
    pub(crate) major_version: c_int,
    pub(crate) minor_version: c_int,
}

/// Values of `PJRT_NamedValue.kind`.
pub(crate) mod named_value {
    use std::ffi::c_int;
    pub(crate) const STRING: c_int = 0;
    pub(crate) const INT64: c_int = 1;
    pub(crate) const INT64_LIST: c_int = 2;
    pub(crate) const FLOAT: c_int = 3;
    pub(crate) const BOOL: c_int = 4;
}

/// The value of a `PJRT_NamedValue`; which member holds is said by its `kind`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union NamedValuePayload {
    pub(crate) string: *const c_char,
    pub(crate) int64: i64,
    pub(crate) int64_list: *const i64,
    pub(crate) float: f32,
    pub(crate) boolean: bool,
}

/// A name and a value of one of five types: creation options, device attributes, cost properties.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PJRT_NamedValue {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut PJRT_Extension_Base,
    pub(crate) name: *const c_char,
    pub(crate) name_size: usize,
    pub(crate) kind: c_int,
    pub(crate) value: NamedValuePayload,
    /// Elements of a string or list; 1 for scalars.
    pub(crate) value_size: usize,
}

/// A program and the name of its format, in both directions.
#[repr(C)]
pub(crate) struct PJRT_Program {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut PJRT_Extension_Base,
    pub(crate) code: *mut c_char,
    pub(crate) code_size: usize,
    pub(crate) format: *const c_char,
    pub(crate) format_size: usize,
}

/// `PJRT_Buffer_MemoryLayout_Type_Tiled`.
pub(crate) const LAYOUT_TILED: c_int = 0;

/// Layout by dimension order and tiles. It is the larger member of the C union, so that the struct below
/// has the union's size without declaring the other one (strides), which we never use.
#[repr(C)]
pub(crate) struct PJRT_Buffer_MemoryLayout_Tiled {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut PJRT_Extension_Base,
    pub(crate) minor_to_major: *const i64,
    pub(crate) minor_to_major_size: usize,
    pub(crate) tile_dims: *const i64,
    pub(crate) tile_dim_sizes: *const usize,
    pub(crate) num_tiles: usize,
}

/// Layout of a buffer's bytes, on a device or on the host.
#[repr(C)]
pub(crate) struct PJRT_Buffer_MemoryLayout {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut PJRT_Extension_Base,
    pub(crate) tiled: PJRT_Buffer_MemoryLayout_Tiled,
    pub(crate) kind: c_int,
}

impl PJRT_Buffer_MemoryLayout {
    /// The layout of that order of dimensions, without tiles. It refers to `minor_to_major`, which must outlive its use.
    pub(crate) fn of(minor_to_major: &[i64]) -> Self {
        Self {
            struct_size: offset_of!(Self, kind) + size_of::<c_int>(),
            extension_start: null_mut(),
            tiled: PJRT_Buffer_MemoryLayout_Tiled {
                struct_size: size_of::<PJRT_Buffer_MemoryLayout_Tiled>(),
                extension_start: null_mut(),
                minor_to_major: minor_to_major.as_ptr(),
                minor_to_major_size: minor_to_major.len(),
                tile_dims: null(),
                tile_dim_sizes: null(),
                num_tiles: 0,
            },
            kind: LAYOUT_TILED,
        }
    }
}

/// What the plugin may do with host bytes after the call returns.
pub(crate) mod host_semantics {
    use std::ffi::c_int;
    /// Read them until the transfer is complete.
    pub(crate) const IMMUTABLE_UNTIL_TRANSFER_COMPLETES: c_int = 1;
    /// Read them as long as the buffer lives, without writing.
    pub(crate) const IMMUTABLE_ZERO_COPY: c_int = 2;
}

/// Options of one execution.
#[repr(C)]
pub(crate) struct PJRT_ExecuteOptions {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut PJRT_Extension_Base,
    pub(crate) send_callbacks: *mut c_void,
    pub(crate) recv_callbacks: *mut c_void,
    pub(crate) num_send_ops: usize,
    pub(crate) num_recv_ops: usize,
    pub(crate) launch_id: c_int,
    pub(crate) non_donatable_input_indices: *const i64,
    pub(crate) num_non_donatable_input_indices: usize,
    pub(crate) context: *mut PJRT_ExecuteContext,
    pub(crate) call_location: *const c_char,
    pub(crate) num_tasks: usize,
    pub(crate) task_ids: *mut c_int,
    pub(crate) incarnation_ids: *mut i64,
    /// Since 0.97.
    pub(crate) multi_slice_config: *mut c_void,
}
