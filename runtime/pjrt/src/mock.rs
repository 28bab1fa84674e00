//! A mock of a plugin that joins several processes to one client and has collectives of its own, as those for GPUs do. For
//! tests; the library `waystation-mock-plugin` exports it.
//!
//! It stands in front of the real CPU plugin. Its clients find each other as XLA's for GPUs do: each puts how many devices it has
//! into the key-value store, and gets the others'. Behind each of them is a real client with the devices of all, of which it shows
//! its own part as the ones that can be used. A program over several processes is *run whole by each*, with the other processes'
//! arguments fetched through the store: results are XLA's own, and come only when all have started the same launch. Launches must
//! have other ids than those before, and come in the same order everywhere; the mock fails those that do not.

mod execute;

use crate::api::{slice, text};
use crate::discover;
use crate::sys::{self, Call, PJRT_Api, PJRT_Error, Slot, named_value};
use std::collections::{HashMap, HashSet};
use std::ffi::{c_char, c_int};
use std::fmt::Display;
use std::mem::offset_of;
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// What its clients call their platform.
const PLATFORM: &str = "mock";

/// How long a process waits for another.
const PATIENCE_MS: c_int = 60_000;

/// The real plugin's table, as an address.
static REAL: OnceLock<usize> = OnceLock::new();

/// The mock's own table, as an address.
static TABLE: OnceLock<usize> = OnceLock::new();

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// Pointers are kept as addresses, to be compared and handed back.
#[derive(Default)]
struct State {
    clients: Vec<Arc<Node>>,
    /// The process of each device description.
    processes: HashMap<usize, c_int>,
    /// Those devices of an executable that can be used; lists that were handed out stay.
    own: HashMap<usize, &'static [usize]>,
    errors: HashSet<usize>,
}

/// An error of the mock's, in place of one of the real plugin's.
struct OwnError {
    code: c_int,
    message: String,
}

/// A client of the mock's, and the process that it stands for.
struct Node {
    client: usize,
    node: c_int,
    nodes: c_int,
    /// All devices, and the process of each.
    all: Vec<(usize, c_int)>,
    own: &'static [usize],
    store: Option<Store>,
    /// Launches over several processes so far.
    launches: AtomicU64,
}

/// What the creator lent.
#[derive(Clone, Copy)]
struct Store {
    get: sys::PJRT_KeyValueGetCallback,
    try_get: sys::PJRT_KeyValueTryGetCallback,
    put: sys::PJRT_KeyValuePutCallback,
    users: [usize; 3],
}

/// What went wrong, of the mock's or of the real plugin's kind.
type Failed = *mut PJRT_Error;

fn state() -> MutexGuard<'static, Option<State>> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn with_state<R>(work: impl FnOnce(&mut State) -> R) -> R {
    work(state().get_or_insert_default())
}

fn own_error(code: c_int, message: impl Display) -> Failed {
    let error = Box::into_raw(Box::new(OwnError {
        code,
        message: format!("the mock plugin: {message}"),
    }));
    with_state(|state| state.errors.insert(error.addr()));
    error.cast()
}

/// Calls the real plugin.
///
/// # Safety
///
/// As [`crate::api::Api::call`].
unsafe fn real<A: Call<Table = PJRT_Api>>(args: &mut A) -> Result<(), Failed> {
    let Some(table) = REAL.get() else {
        return Err(own_error(9, "there is no real plugin"));
    };
    // SAFETY: `table` is the real plugin's, of a version that has all slots used here, and a slot holds what `Call` says.
    let error = unsafe {
        let slot = std::ptr::with_exposed_provenance::<u8>(*table)
            .add(A::SLOT)
            .cast::<Slot>()
            .read();
        let function =
            std::mem::transmute::<Slot, unsafe extern "C" fn(*mut A) -> *mut PJRT_Error>(slot);
        function(args)
    };
    if error.is_null() { Ok(()) } else { Err(error) }
}

fn address<T>(pointer: *const T) -> usize {
    pointer.expose_provenance()
}

fn pointer<T>(address: usize) -> *mut T {
    std::ptr::with_exposed_provenance_mut(address)
}

/// The mock's table of functions; null without a real CPU plugin in the environment of `WAYSTATION_TEST_PYTHON` or `.venv`.
#[must_use]
pub fn api() -> *const std::ffi::c_void {
    let table = *TABLE.get_or_init(|| table().unwrap_or(0));
    std::ptr::with_exposed_provenance(table)
}

fn table() -> Option<usize> {
    let python = std::env::var_os("WAYSTATION_TEST_PYTHON").map_or_else(
        || {
            PathBuf::from(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/../../.venv/bin/python"
            ))
        },
        PathBuf::from,
    );
    let path = discover::resolve("cpu", Some(&python)).ok()?;
    // SAFETY: as in `Plugin::load`; the library stays loaded.
    let real = unsafe {
        let library = libloading::os::unix::Library::open(
            Some(&path),
            libloading::os::unix::RTLD_NOW | libloading::os::unix::RTLD_LOCAL,
        )
        .ok()?;
        let get = library
            .get::<unsafe extern "C" fn() -> *const PJRT_Api>(b"GetPjrtApi\0")
            .ok()?;
        let real = get();
        std::mem::forget(library);
        real
    };
    // SAFETY: a table starts with its size, has as many bytes, and lives for good.
    let copy = unsafe {
        let size = real.cast::<usize>().read();
        if size < size_of::<PJRT_Api>() {
            return None;
        }
        let mut copy = vec![0_usize; size.div_ceil(size_of::<usize>())].into_boxed_slice();
        std::ptr::copy_nonoverlapping(real.cast::<u8>(), copy.as_mut_ptr().cast(), size);
        Box::leak(copy)
    };
    REAL.set(address(real)).ok()?;
    let mut replace = |offset: usize, function: Slot| {
        if let Some(slot) = copy.get_mut(offset / size_of::<usize>()) {
            *slot = function.expose_provenance();
        }
    };
    macro_rules! replace {
        ($($slot:ident = $function:expr;)*) => {
            $(replace(offset_of!(PJRT_Api, $slot), $function as Slot);)*
        };
    }
    replace! {
        PJRT_Error_Destroy = error_destroy;
        PJRT_Error_Message = error_message;
        PJRT_Error_GetCode = error_code;
        PJRT_Client_Create = create;
        PJRT_Client_Destroy = destroy;
        PJRT_Client_PlatformName = platform_name;
        PJRT_Client_ProcessIndex = process_index;
        PJRT_Client_AddressableDevices = own_devices;
        PJRT_DeviceDescription_ProcessIndex = process_of;
        PJRT_LoadedExecutable_AddressableDevices = execute::own_devices;
        PJRT_LoadedExecutable_Destroy = execute::destroy;
        PJRT_LoadedExecutable_Execute = execute::execute;
    }
    Some(address(copy.as_ptr()))
}

/// Turns a result into what the C interface wants.
fn answer(result: Result<(), Failed>) -> *mut PJRT_Error {
    result.err().unwrap_or(null_mut())
}

// The functions that stand in for the real plugin's. Each is called as the C header says, with complete arguments.

unsafe extern "C" fn error_destroy(args: *mut sys::PJRT_Error_Destroy_Args) {
    // SAFETY: the arguments are complete; an error of ours was made by `own_error`, and is given up now.
    unsafe {
        let error = (*args).error;
        if with_state(|state| state.errors.remove(&error.addr())) {
            drop(Box::from_raw(error.cast::<OwnError>()));
            return;
        }
        forward_error(offset_of!(PJRT_Api, PJRT_Error_Destroy), args);
    }
}

unsafe extern "C" fn error_message(args: *mut sys::PJRT_Error_Message_Args) {
    // SAFETY: as above; the message lives as long as the error.
    unsafe {
        let error = (*args).error;
        if with_state(|state| state.errors.contains(&error.addr())) {
            let message = &(*error.cast::<OwnError>()).message;
            (*args).message = message.as_ptr().cast();
            (*args).message_size = message.len();
            return;
        }
        forward_error(offset_of!(PJRT_Api, PJRT_Error_Message), args);
    }
}

/// # Safety
///
/// The slot at `offset` takes `A` and returns nothing.
unsafe fn forward_error<A>(offset: usize, args: *mut A) {
    if let Some(table) = REAL.get() {
        // SAFETY: passed on from this function's contract.
        unsafe {
            let slot = std::ptr::with_exposed_provenance::<u8>(*table)
                .add(offset)
                .cast::<Slot>()
                .read();
            let function = std::mem::transmute::<Slot, unsafe extern "C" fn(*mut A)>(slot);
            function(args);
        }
    }
}

unsafe extern "C" fn error_code(args: *mut sys::PJRT_Error_GetCode_Args) -> *mut PJRT_Error {
    // SAFETY: as above.
    unsafe {
        let error = (*args).error;
        if with_state(|state| state.errors.contains(&error.addr())) {
            (*args).code = (*error.cast::<OwnError>()).code;
            return null_mut();
        }
        answer(real(&mut *args))
    }
}

/// What the store calls when it has to report: keeps the code, since the mock looks at it.
unsafe extern "C" fn callback_error(
    code: c_int,
    message: *const c_char,
    size: usize,
) -> *mut PJRT_Error {
    // SAFETY: the store lends its message for the call.
    own_error(code, unsafe { text(message, size) })
}

static CALLBACK_ERROR: sys::PJRT_CallbackError = callback_error;

impl Store {
    fn of(args: &sys::PJRT_Client_Create_Args) -> Option<Store> {
        Some(Store {
            get: args.kv_get_callback?,
            try_get: args.kv_try_get_callback?,
            put: args.kv_put_callback?,
            users: [
                address(args.kv_get_user_arg),
                address(args.kv_try_get_user_arg),
                address(args.kv_put_user_arg),
            ],
        })
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), Failed> {
        let mut args = sys::PJRT_KeyValuePutCallback_Args {
            struct_size: 0,
            extension_start: null_mut(),
            key: key.as_ptr().cast(),
            key_size: key.len(),
            value: value.as_ptr().cast(),
            value_size: value.len(),
            callback_error: &raw const CALLBACK_ERROR,
            user_arg: pointer(self.users[2]),
        };
        // SAFETY: the arguments live across the call.
        let error = unsafe { (self.put)(&raw mut args) };
        if error.is_null() { Ok(()) } else { Err(error) }
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, Failed> {
        let mut args = sys::PJRT_KeyValueGetCallback_Args {
            struct_size: 0,
            extension_start: null_mut(),
            key: key.as_ptr().cast(),
            key_size: key.len(),
            timeout_in_ms: PATIENCE_MS,
            callback_error: &raw const CALLBACK_ERROR,
            user_arg: pointer(self.users[0]),
            value: null_mut(),
            value_size: 0,
            value_deleter_callback: None,
        };
        // SAFETY: as above; what was given is copied, and deleted once.
        unsafe {
            let error = (self.get)(&raw mut args);
            if !error.is_null() {
                return Err(error);
            }
            let value = slice(args.value.cast::<u8>(), args.value_size).to_vec();
            if let Some(delete) = args.value_deleter_callback {
                delete(args.value);
            }
            Ok(value)
        }
    }

    /// Makes sure that a key which nobody puts is found missing at once, with the code for that.
    fn misses(&self, key: &str) -> Result<(), Failed> {
        let mut args = sys::PJRT_KeyValueTryGetCallback_Args {
            struct_size: 0,
            extension_start: null_mut(),
            key: key.as_ptr().cast(),
            key_size: key.len(),
            callback_error: &raw const CALLBACK_ERROR,
            user_arg: pointer(self.users[1]),
            value: null_mut(),
            value_size: 0,
            value_deleter_callback: None,
        };
        // SAFETY: as above. An error is one of ours, since we gave the store the means to make it.
        let error = unsafe { (self.try_get)(&raw mut args) };
        if error.is_null() {
            return Err(own_error(13, format!("{key} was found")));
        }
        // SAFETY: as above.
        let code = unsafe { (*error.cast::<OwnError>()).code };
        if code != 5 {
            return Err(error);
        }
        with_state(|state| state.errors.remove(&error.addr()));
        // SAFETY: nobody else has it.
        drop(unsafe { Box::from_raw(error.cast::<OwnError>()) });
        Ok(())
    }
}

unsafe extern "C" fn create(args: *mut sys::PJRT_Client_Create_Args) -> *mut PJRT_Error {
    // SAFETY: the arguments are complete, and nobody else uses them meanwhile.
    answer(create_client(unsafe { &mut *args }))
}

fn create_client(args: &mut sys::PJRT_Client_Create_Args) -> Result<(), Failed> {
    // SAFETY: the options are complete, and live across the call.
    let options = unsafe { slice(args.create_options, args.num_options) };
    let number = |wanted: &str| {
        let found = options.iter().find(|option| {
            // SAFETY: as above.
            option.kind == named_value::INT64
                && unsafe { text(option.name, option.name_size) } == wanted
        });
        // SAFETY: the kind says which member it is.
        found.map(|option| unsafe { option.value.int64 })
    };
    let node = number("node_id").unwrap_or(0);
    let nodes = number("num_nodes").unwrap_or(1);
    let own = number("cpu_device_count").unwrap_or(1);
    let store = Store::of(args);
    let mut counts = vec![own];
    if nodes > 1 {
        let Some(store) = &store else {
            return Err(own_error(9, "several processes need a key-value store"));
        };
        store.misses("mock/nobody")?;
        store.put(&format!("mock/devices/{node}"), own.to_string().as_bytes())?;
        counts.clear();
        for other in 0..nodes {
            let count = store.get(&format!("mock/devices/{other}"))?;
            let count = String::from_utf8_lossy(&count).parse::<i64>();
            counts.push(count.map_err(|error| own_error(13, error))?);
        }
    }
    let count = [(
        "cpu_device_count".to_owned(),
        crate::OptionValue::Int64(counts.iter().sum()),
    )];
    let devices = crate::value::to_raw(&count);
    let mut behind = sys::PJRT_Client_Create_Args::new();
    behind.create_options = devices.as_ptr();
    behind.num_options = devices.len();
    // SAFETY: the options live across the call.
    unsafe { real(&mut behind)? };
    args.client = behind.client;

    let mut list = sys::PJRT_Client_AddressableDevices_Args::new();
    list.client = behind.client;
    // SAFETY: the client is live, and the list lives as long.
    let list = unsafe {
        real(&mut list)?;
        slice(list.devices, list.num_devices)
    };
    let processes = (0..)
        .zip(&counts)
        .flat_map(|(node, count)| (0..*count).map(move |_| node));
    let all: Vec<(usize, c_int)> = list.iter().map(|d| address(*d)).zip(processes).collect();
    for (device, process) in &all {
        let mut described = sys::PJRT_Device_GetDescription_Args::new();
        described.device = pointer(*device);
        // SAFETY: the device is live.
        unsafe { real(&mut described)? };
        let description = address(described.device_description);
        with_state(|state| state.processes.insert(description, *process));
    }
    let node = c_int::try_from(node).map_err(|error| own_error(3, error))?;
    let own = all.iter().filter(|(_, process)| *process == node);
    let own: Vec<usize> = own.map(|(device, _)| *device).collect();
    let made = Arc::new(Node {
        client: address(behind.client),
        node,
        nodes: c_int::try_from(nodes).map_err(|error| own_error(3, error))?,
        all,
        own: Vec::leak(own),
        store,
        launches: AtomicU64::new(0),
    });
    with_state(|state| state.clients.push(made));
    Ok(())
}

/// The mock's side of a client.
fn node_of(client: *const sys::PJRT_Client) -> Result<Arc<Node>, Failed> {
    let found = with_state(|state| {
        let mut clients = state.clients.iter();
        clients.find(|node| node.client == client.addr()).cloned()
    });
    found.ok_or_else(|| own_error(3, "the client is none of its own"))
}

unsafe extern "C" fn destroy(args: *mut sys::PJRT_Client_Destroy_Args) -> *mut PJRT_Error {
    // SAFETY: the arguments are complete.
    unsafe {
        let client = (*args).client.addr();
        with_state(|state| state.clients.retain(|node| node.client != client));
        answer(real(&mut *args))
    }
}

unsafe extern "C" fn platform_name(
    args: *mut sys::PJRT_Client_PlatformName_Args,
) -> *mut PJRT_Error {
    // SAFETY: the arguments are complete.
    unsafe {
        (*args).platform_name = PLATFORM.as_ptr().cast();
        (*args).platform_name_size = PLATFORM.len();
    }
    null_mut()
}

unsafe extern "C" fn process_index(
    args: *mut sys::PJRT_Client_ProcessIndex_Args,
) -> *mut PJRT_Error {
    // SAFETY: the arguments are complete.
    unsafe { answer(node_of((*args).client).map(|node| (*args).process_index = node.node)) }
}

unsafe extern "C" fn own_devices(
    args: *mut sys::PJRT_Client_AddressableDevices_Args,
) -> *mut PJRT_Error {
    // SAFETY: the arguments are complete; the list is never freed.
    unsafe {
        answer(node_of((*args).client).map(|node| {
            (*args).devices = node.own.as_ptr().cast();
            (*args).num_devices = node.own.len();
        }))
    }
}

unsafe extern "C" fn process_of(
    args: *mut sys::PJRT_DeviceDescription_ProcessIndex_Args,
) -> *mut PJRT_Error {
    // SAFETY: the arguments are complete.
    unsafe {
        let description = (*args).device_description.addr();
        let process = with_state(|state| state.processes.get(&description).copied());
        match process {
            Some(process) => {
                (*args).process_index = process;
                null_mut()
            }
            None => own_error(3, "the device is none of its own"),
        }
    }
}
