//! The library of the mock plugin in `waystation_pjrt::mock`.

#![allow(
    unsafe_code,
    reason = "a plugin is found by the name of one function, which may not be mangled"
)]

/// What a PJRT plugin exports.
// SAFETY: no other function of this name is linked into this library.
#[unsafe(no_mangle)]
pub extern "C" fn GetPjrtApi() -> *const std::ffi::c_void {
    waystation_pjrt::mock::api()
}
