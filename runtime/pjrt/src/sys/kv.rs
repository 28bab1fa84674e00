//! The key-value store that a client's creator may lend to the plugin.

use super::{PJRT_Error, PJRT_Extension_Base};
use std::ffi::{c_char, c_int, c_void};

/// `PJRT_CallbackError`: the plugin's way to make an error for a callback. It copies the message.
pub(crate) type PJRT_CallbackError = unsafe extern "C" fn(
    code: c_int,
    message: *const c_char,
    message_size: usize,
) -> *mut PJRT_Error;

/// Frees a value that a callback has given to the plugin; all that it gets is the value's address.
pub(crate) type PJRT_KeyValue_ValueDeleter = unsafe extern "C" fn(value: *mut c_char);

/// XLA leaves `struct_size` and `extension_start` of these three unset, so nothing may be read from them.
#[repr(C)]
pub(crate) struct PJRT_KeyValueGetCallback_Args {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut PJRT_Extension_Base,
    pub(crate) key: *const c_char,
    pub(crate) key_size: usize,
    pub(crate) timeout_in_ms: c_int,
    pub(crate) callback_error: *const PJRT_CallbackError,
    pub(crate) user_arg: *mut c_void,
    pub(crate) value: *mut c_char,
    pub(crate) value_size: usize,
    pub(crate) value_deleter_callback: Option<PJRT_KeyValue_ValueDeleter>,
}

/// As above, for the callback that does not wait.
#[repr(C)]
pub(crate) struct PJRT_KeyValueTryGetCallback_Args {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut PJRT_Extension_Base,
    pub(crate) key: *const c_char,
    pub(crate) key_size: usize,
    pub(crate) callback_error: *const PJRT_CallbackError,
    pub(crate) user_arg: *mut c_void,
    pub(crate) value: *mut c_char,
    pub(crate) value_size: usize,
    pub(crate) value_deleter_callback: Option<PJRT_KeyValue_ValueDeleter>,
}

/// As above, for the callback that stores.
#[repr(C)]
pub(crate) struct PJRT_KeyValuePutCallback_Args {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut PJRT_Extension_Base,
    pub(crate) key: *const c_char,
    pub(crate) key_size: usize,
    pub(crate) value: *const c_char,
    pub(crate) value_size: usize,
    pub(crate) callback_error: *const PJRT_CallbackError,
    pub(crate) user_arg: *mut c_void,
}

pub(crate) type PJRT_KeyValueGetCallback =
    unsafe extern "C" fn(*mut PJRT_KeyValueGetCallback_Args) -> *mut PJRT_Error;
pub(crate) type PJRT_KeyValueTryGetCallback =
    unsafe extern "C" fn(*mut PJRT_KeyValueTryGetCallback_Args) -> *mut PJRT_Error;
pub(crate) type PJRT_KeyValuePutCallback =
    unsafe extern "C" fn(*mut PJRT_KeyValuePutCallback_Args) -> *mut PJRT_Error;

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    #[test]
    fn fields_lie_where_the_header_puts_them() {
        assert_eq!(
            offset_of!(PJRT_KeyValueGetCallback_Args, callback_error),
            40
        );
        assert_eq!(size_of::<PJRT_KeyValueGetCallback_Args>(), 80);
        assert_eq!(
            offset_of!(PJRT_KeyValueTryGetCallback_Args, callback_error),
            32
        );
        assert_eq!(size_of::<PJRT_KeyValueTryGetCallback_Args>(), 72);
        assert_eq!(offset_of!(PJRT_KeyValuePutCallback_Args, user_arg), 56);
        assert_eq!(size_of::<PJRT_KeyValuePutCallback_Args>(), 64);
    }
}
