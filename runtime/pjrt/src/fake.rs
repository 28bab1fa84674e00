//! A plugin that is wrong on purpose: tables too short, slots left out, answers that break the contract.
//!
//! Real plugins test that the bindings work; this one, that they stay safe where a plugin does not.

use crate::error::{Code, Error};
use crate::sys::{self, PJRT_Api, PJRT_Error, Slot};
use crate::{Client, OptionValue, Plugin};
use std::ffi::c_char;
use std::mem::offset_of;
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// An error object of the fake.
struct FakeError {
    code: i32,
    message: &'static str,
}

pub(crate) static ERRORS_ALIVE: AtomicUsize = AtomicUsize::new(0);
static CLIENTS_DESTROYED: AtomicUsize = AtomicUsize::new(0);

/// Tests that count take turns.
pub(crate) static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());

pub(crate) fn fail(code: i32, message: &'static str) -> *mut PJRT_Error {
    ERRORS_ALIVE.fetch_add(1, Ordering::SeqCst);
    Box::into_raw(Box::new(FakeError { code, message })).cast()
}

unsafe extern "C" fn error_destroy(args: *mut sys::PJRT_Error_Destroy_Args) {
    // SAFETY: the bindings destroy what `fail` made, once; a second time would fail the count.
    drop(unsafe { Box::from_raw((*args).error.cast::<FakeError>()) });
    ERRORS_ALIVE.fetch_sub(1, Ordering::SeqCst);
}

unsafe extern "C" fn error_message(args: *mut sys::PJRT_Error_Message_Args) {
    // SAFETY: the error is one of `fail`.
    unsafe {
        let message: &'static str = (*(*args).error.cast::<FakeError>()).message;
        (*args).message = message.as_ptr().cast::<c_char>();
        (*args).message_size = message.len();
    }
}

unsafe extern "C" fn error_code(args: *mut sys::PJRT_Error_GetCode_Args) -> *mut PJRT_Error {
    // SAFETY: the error is one of `fail`.
    unsafe { (*args).code = (*(*args).error.cast::<FakeError>()).code };
    null_mut()
}

unsafe extern "C" fn initialize(_: *mut sys::PJRT_Plugin_Initialize_Args) -> *mut PJRT_Error {
    null_mut()
}

unsafe extern "C" fn initialize_fails(_: *mut sys::PJRT_Plugin_Initialize_Args) -> *mut PJRT_Error {
    fail(14, "the hardware is asleep")
}

/// Reports success without a client.
unsafe extern "C" fn create_nothing(_: *mut sys::PJRT_Client_Create_Args) -> *mut PJRT_Error {
    null_mut()
}

unsafe extern "C" fn create(args: *mut sys::PJRT_Client_Create_Args) -> *mut PJRT_Error {
    // SAFETY: the arguments are live. The client is a number in a pointer's place, never looked at.
    unsafe { (*args).client = std::ptr::without_provenance_mut(0x1000) };
    null_mut()
}

unsafe extern "C" fn destroy(_: *mut sys::PJRT_Client_Destroy_Args) -> *mut PJRT_Error {
    CLIENTS_DESTROYED.fetch_add(1, Ordering::SeqCst);
    null_mut()
}

/// No devices: the list stays null, with a length that must not be believed.
unsafe extern "C" fn devices(
    args: *mut sys::PJRT_Client_AddressableDevices_Args,
) -> *mut PJRT_Error {
    // SAFETY: the arguments are live.
    unsafe { (*args).num_devices = 5 };
    null_mut()
}

unsafe extern "C" fn name(_: *mut sys::PJRT_Client_PlatformName_Args) -> *mut PJRT_Error {
    null_mut()
}

unsafe extern "C" fn version(_: *mut sys::PJRT_Client_PlatformVersion_Args) -> *mut PJRT_Error {
    fail(99, "no version, and a code that no one knows")
}

unsafe extern "C" fn version_works(
    _: *mut sys::PJRT_Client_PlatformVersion_Args,
) -> *mut PJRT_Error {
    null_mut()
}

/// Reports success without an executable.
unsafe extern "C" fn compile(_: *mut sys::PJRT_Client_Compile_Args) -> *mut PJRT_Error {
    null_mut()
}

/// A function that no test may reach.
unsafe extern "C" fn never() -> *mut PJRT_Error {
    std::process::abort();
}

/// A table that ends after the slot at `last` (an offset), of this minor version.
fn table(last: usize, minor: i32) -> Box<PJRT_Api> {
    // SAFETY: the table is made of integers and pointers, which may be zero.
    let mut table = unsafe { Box::<PJRT_Api>::new_zeroed().assume_init() };
    table.struct_size = last + size_of::<Slot>();
    table.pjrt_api_version.struct_size = size_of::<sys::PJRT_Api_Version>();
    table.pjrt_api_version.minor_version = minor;
    table.PJRT_Error_Destroy = error_destroy as Slot;
    table.PJRT_Error_Message = error_message as Slot;
    table.PJRT_Error_GetCode = error_code as Slot;
    table.PJRT_Plugin_Initialize = initialize as Slot;
    table
}

/// A table with all that a client without devices needs.
pub(crate) fn with_client(minor: i32) -> Box<PJRT_Api> {
    let mut table = table(offset_of!(PJRT_Api, PJRT_Memory_Kind_Id), minor);
    table.PJRT_Client_Create = create as Slot;
    table.PJRT_Client_Destroy = destroy as Slot;
    table.PJRT_Client_AddressableDevices = devices as Slot;
    table.PJRT_Client_PlatformName = name as Slot;
    table.PJRT_Client_PlatformVersion = version_works as Slot;
    table.PJRT_Client_Compile = compile as Slot;
    table
}

pub(crate) fn load(table: Box<PJRT_Api>) -> Result<Arc<Plugin>, Error> {
    // SAFETY: the table is as its size says, and is leaked.
    unsafe { Plugin::from_table(PathBuf::from("fake.so"), Box::leak(table)) }
}

fn refused(table: Box<PJRT_Api>) -> Error {
    load(table).expect_err("it is refused")
}

#[test]
fn no_table_is_refused() {
    // SAFETY: null is allowed.
    let error = unsafe { Plugin::from_table(PathBuf::from("fake.so"), std::ptr::null()) };
    let error = error.expect_err("it is refused");
    assert_eq!(
        (error.code(), error.function()),
        (Code::FailedPrecondition, "GetPjrtApi")
    );
}

#[test]
fn a_table_without_a_version_is_refused() {
    let mut short = table(0, 81);
    short.struct_size = offset_of!(PJRT_Api, pjrt_api_version);
    assert!(
        refused(short).message().contains("16 bytes"),
        "the size is named"
    );
    let mut empty = table(0, 81);
    empty.struct_size = 0;
    assert_eq!(refused(empty).code(), Code::FailedPrecondition);
}

#[test]
fn other_versions_are_refused_by_name() {
    let last = offset_of!(PJRT_Api, PJRT_Memory_Kind_Id);
    assert!(refused(table(last, 56)).message().contains("0.56"));
    let mut major = table(last, 0);
    major.pjrt_api_version.major_version = 1;
    assert!(refused(major).message().contains("1.0"));
    assert_eq!(
        load(table(last, 57)).expect("it loads").api_version(),
        (0, 57)
    );
    assert_eq!(
        load(table(last, 9000)).expect("it loads").api_version(),
        (0, 9000)
    );
}

#[test]
fn a_table_that_ends_early_gives_an_error_that_names_the_function() {
    // The memory behind the table's end holds pointers, as an older plugin's may, which must not be called.
    let mut short = table(offset_of!(PJRT_Api, PJRT_Plugin_Initialize) - 8, 81);
    short.PJRT_Plugin_Initialize = never as Slot;
    let error = refused(short);
    assert_eq!(
        (error.code(), error.function()),
        (Code::Unimplemented, "PJRT_Plugin_Initialize")
    );
    assert!(!error.is_from_plugin());

    let mut short = table(offset_of!(PJRT_Api, PJRT_Client_Create) - 8, 81);
    short.PJRT_Client_Create = never as Slot;
    let plugin = load(short).expect("it loads");
    let error = Client::create(&plugin, &[]).expect_err("no such function");
    assert_eq!(
        (error.code(), error.function()),
        (Code::Unimplemented, "PJRT_Client_Create")
    );

    // Half a slot is no slot.
    let mut half = table(offset_of!(PJRT_Api, PJRT_Client_Create), 81);
    half.struct_size -= 1;
    half.PJRT_Client_Create = never as Slot;
    let plugin = load(half).expect("it loads");
    assert_eq!(
        Client::create(&plugin, &[])
            .expect_err("half a slot")
            .code(),
        Code::Unimplemented
    );
}

#[test]
fn a_null_slot_gives_an_error_that_names_the_function() {
    let plugin = load(table(offset_of!(PJRT_Api, PJRT_Memory_Kind_Id), 81)).expect("it loads");
    let error = Client::create(&plugin, &[]).expect_err("no such function");
    assert_eq!(
        (error.code(), error.function()),
        (Code::Unimplemented, "PJRT_Client_Create")
    );
    assert!(error.message().contains("null"), "{error}");
    let error = plugin.attributes().expect_err("no such function");
    assert_eq!(error.function(), "PJRT_Plugin_Attributes");
}

#[test]
fn errors_are_taken_over_and_freed_once() {
    let _turn = TURN.lock();
    let before = ERRORS_ALIVE.load(Ordering::SeqCst);
    let mut failing = table(offset_of!(PJRT_Api, PJRT_Memory_Kind_Id), 81);
    failing.PJRT_Plugin_Initialize = initialize_fails as Slot;
    let error = refused(failing);
    assert_eq!(
        (error.code(), error.message()),
        (Code::Unavailable, "the hardware is asleep")
    );
    assert_eq!(error.function(), "PJRT_Plugin_Initialize");
    assert!(error.is_from_plugin());
    assert_eq!(ERRORS_ALIVE.load(Ordering::SeqCst), before);
}

#[test]
fn errors_that_cannot_be_read_are_errors_all_the_same() {
    let _turn = TURN.lock();
    let mut mute = table(offset_of!(PJRT_Api, PJRT_Memory_Kind_Id), 81);
    mute.PJRT_Plugin_Initialize = initialize_fails as Slot;
    mute.PJRT_Error_Message = std::ptr::null();
    mute.PJRT_Error_GetCode = std::ptr::null();
    let error = refused(mute);
    assert_eq!(error.code(), Code::Unknown);
    assert!(!error.message().is_empty());
}

#[test]
fn success_without_a_result_is_an_error() {
    let mut empty = with_client(81);
    empty.PJRT_Client_Create = create_nothing as Slot;
    let plugin = load(empty).expect("it loads");
    let error = Client::create(&plugin, &[]).expect_err("no client");
    assert_eq!(
        (error.code(), error.function()),
        (Code::Unknown, "PJRT_Client_Create")
    );

    let plugin = load(with_client(81)).expect("it loads");
    let _turn = TURN.lock();
    let client = Client::create(&plugin, &[]).expect("a client");
    assert!(client.devices().is_empty());
    assert_eq!(client.platform_name(), "");
    let error = client.compile(b"", "mlir", b"").expect_err("no executable");
    assert_eq!(
        (error.code(), error.function()),
        (Code::Unknown, "PJRT_Client_Compile")
    );
}

#[test]
fn a_client_is_destroyed_once_also_if_it_is_half_made() {
    let _turn = TURN.lock();
    let before = CLIENTS_DESTROYED.load(Ordering::SeqCst);
    let mut half = with_client(81);
    half.PJRT_Client_PlatformVersion = version as Slot;
    let plugin = load(half).expect("it loads");
    let error = Client::create(&plugin, &[]).expect_err("it fails half way");
    assert_eq!(error.code(), Code::Unknown);
    assert_eq!(CLIENTS_DESTROYED.load(Ordering::SeqCst), before + 1);

    let plugin = load(with_client(81)).expect("it loads");
    let options = [("name".to_owned(), OptionValue::Bool(true))];
    let client = Client::create(&plugin, &options).expect("a client");
    let clone = client.clone();
    drop(client);
    assert_eq!(CLIENTS_DESTROYED.load(Ordering::SeqCst), before + 1);
    drop(clone);
    assert_eq!(CLIENTS_DESTROYED.load(Ordering::SeqCst), before + 2);
}

#[test]
fn an_old_plugin_is_not_asked_for_what_it_would_overlook() {
    let _turn = TURN.lock();
    let plugin = load(with_client(70)).expect("it loads");
    let client = Client::create(&plugin, &[]).expect("a client");
    let error = client
        .deserialize(b"bytes", Some(b"options"))
        .expect_err("it is too old");
    assert_eq!(error.code(), Code::Unimplemented);
    assert!(error.message().contains("0.71"), "{error}");
    let error = client
        .default_layout(crate::ElementType::U1, &[1])
        .expect_err("it is too old");
    assert!(error.message().contains("0.70"), "{error}");
    let error = client
        .default_layout(crate::ElementType::F32, &[1])
        .expect_err("no extension");
    assert_eq!(
        error.function(),
        "PJRT_Layouts_PJRT_Client_GetDefaultLayout"
    );
    assert_eq!(error.code(), Code::Unimplemented);
}

#[test]
fn a_list_of_extensions_may_bite_its_tail() {
    let mut table = table(offset_of!(PJRT_Api, PJRT_Memory_Kind_Id), 81);
    let base = Box::leak(Box::new(sys::PJRT_Extension_Base {
        struct_size: size_of::<sys::PJRT_Extension_Base>(),
        kind: 0,
        next: null_mut(),
    }));
    let raw: *mut sys::PJRT_Extension_Base = base;
    // SAFETY: the extension is leaked and nobody else writes to it.
    unsafe { (*raw).next = raw };
    table.extension_start = raw;
    assert!(load(table).is_ok());
}

#[test]
fn an_extension_that_ends_early_is_no_crash() {
    let _turn = TURN.lock();
    let mut table = with_client(81);
    table.extension_start = Box::leak(Box::new(sys::PJRT_Extension_Base {
        struct_size: size_of::<sys::PJRT_Extension_Base>(),
        kind: sys::EXTENSION_LAYOUTS,
        next: null_mut(),
    }));
    let client = Client::create(&load(table).expect("it loads"), &[]).expect("a client");
    let error = client
        .default_layout(crate::ElementType::F32, &[1])
        .expect_err("no function");
    assert_eq!(error.code(), Code::Unimplemented);
    assert!(error.message().contains("older"), "{error}");
}
