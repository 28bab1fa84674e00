//! A plugin in the test's own process uses the callbacks as XLA does: from several threads, with the first two fields of the
//! arguments unset, deleting what it gets.

use super::*;
use crate::fake::{ERRORS_ALIVE, TURN, fail, load, with_client};
use crate::sys::{PJRT_Error, Slot};
use crate::{Client, OptionValue, Plugin};
use std::collections::BTreeMap;
use std::mem::MaybeUninit;
use std::sync::atomic::Ordering;
use std::sync::{Condvar, Mutex};

/// A store in memory.
#[derive(Default)]
struct InMemory {
    values: Mutex<BTreeMap<Vec<u8>, Vec<u8>>>,
    news: Condvar,
}

impl KeyValueStore for InMemory {
    fn get(&self, key: &[u8], timeout: Duration) -> Result<Vec<u8>, Failure> {
        assert_ne!(key, b"panic", "as asked for");
        let values = self.values.lock().expect("not poisoned");
        let missing = |values: &mut BTreeMap<Vec<u8>, Vec<u8>>| !values.contains_key(key);
        let (values, _) = self
            .news
            .wait_timeout_while(values, timeout, missing)
            .expect("not poisoned");
        values
            .get(key)
            .cloned()
            .ok_or_else(|| Failure::new(Code::DeadlineExceeded, format!("{timeout:?} have passed")))
    }

    fn try_get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, Failure> {
        Ok(self.values.lock().expect("not poisoned").get(key).cloned())
    }

    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), Failure> {
        let mut values = self.values.lock().expect("not poisoned");
        if values.contains_key(key) {
            return Err(Failure::new(Code::AlreadyExists, "it is there"));
        }
        values.insert(key.to_vec(), value.to_vec());
        self.news.notify_all();
        Ok(())
    }
}

/// What the fake plugin was created with: the callbacks, as it would keep them.
#[derive(Clone, Copy)]
struct Given {
    get: sys::PJRT_KeyValueGetCallback,
    try_get: sys::PJRT_KeyValueTryGetCallback,
    put: sys::PJRT_KeyValuePutCallback,
    user: [*mut c_void; 3],
}

// SAFETY: the callbacks may be used from any thread, as the header asks.
unsafe impl Send for Given {}
// SAFETY: as above.
unsafe impl Sync for Given {}

static GIVEN: Mutex<Vec<Given>> = Mutex::new(Vec::new());

unsafe extern "C" fn create_shared(args: *mut sys::PJRT_Client_Create_Args) -> *mut PJRT_Error {
    // SAFETY: the arguments are live.
    let args = unsafe { &mut *args };
    let (Some(get), Some(try_get), Some(put)) = (
        args.kv_get_callback,
        args.kv_try_get_callback,
        args.kv_put_callback,
    ) else {
        return fail(9, "no store");
    };
    let user = [
        args.kv_get_user_arg,
        args.kv_try_get_user_arg,
        args.kv_put_user_arg,
    ];
    GIVEN.lock().expect("not poisoned").push(Given {
        get,
        try_get,
        put,
        user,
    });
    args.client = std::ptr::without_provenance_mut(0x1000);
    std::ptr::null_mut()
}

unsafe extern "C" fn make_error(
    code: std::ffi::c_int,
    message: *const c_char,
    size: usize,
) -> *mut PJRT_Error {
    // SAFETY: the callback lends its message for the call.
    let message = unsafe { slice(message.cast::<u8>(), size) };
    let message = String::from_utf8_lossy(message).into_owned();
    // The fake's errors have static texts.
    fail(code, Box::leak(message.into_boxed_str()))
}

static MAKE_ERROR: sys::PJRT_CallbackError = make_error;

/// Takes an error of the fake apart, as the plugin would; the code and the text.
fn taken(plugin: &Plugin, error: *mut PJRT_Error) -> (Code, String) {
    let error = plugin.api().check(error, "store").expect_err("an error");
    (error.code(), error.message().to_owned())
}

impl Given {
    fn get(self, plugin: &Plugin, key: &[u8], timeout_ms: i32) -> Result<Vec<u8>, (Code, String)> {
        let mut args = MaybeUninit::<sys::PJRT_KeyValueGetCallback_Args>::uninit();
        let args = args.as_mut_ptr();
        // SAFETY: all fields that the callback may read are set; what it gives is copied and deleted once.
        unsafe {
            (&raw mut (*args).key).write(key.as_ptr().cast());
            (&raw mut (*args).key_size).write(key.len());
            (&raw mut (*args).timeout_in_ms).write(timeout_ms);
            (&raw mut (*args).callback_error).write(&raw const MAKE_ERROR);
            (&raw mut (*args).user_arg).write(self.user[0]);
            let error = (self.get)(args);
            if !error.is_null() {
                return Err(taken(plugin, error));
            }
            let value = slice((*args).value.cast::<u8>(), (*args).value_size).to_vec();
            assert!(!(*args).value.is_null());
            ((*args).value_deleter_callback.expect("a deleter"))((*args).value);
            Ok(value)
        }
    }

    fn try_get(self, plugin: &Plugin, key: &[u8]) -> Result<Vec<u8>, (Code, String)> {
        let mut args = MaybeUninit::<sys::PJRT_KeyValueTryGetCallback_Args>::uninit();
        let args = args.as_mut_ptr();
        // SAFETY: as in `get`.
        unsafe {
            (&raw mut (*args).key).write(key.as_ptr().cast());
            (&raw mut (*args).key_size).write(key.len());
            (&raw mut (*args).callback_error).write(&raw const MAKE_ERROR);
            (&raw mut (*args).user_arg).write(self.user[1]);
            let error = (self.try_get)(args);
            if !error.is_null() {
                return Err(taken(plugin, error));
            }
            let value = slice((*args).value.cast::<u8>(), (*args).value_size).to_vec();
            ((*args).value_deleter_callback.expect("a deleter"))((*args).value);
            Ok(value)
        }
    }

    fn put(self, plugin: &Plugin, key: &[u8], value: &[u8]) -> Result<(), (Code, String)> {
        let mut args = MaybeUninit::<sys::PJRT_KeyValuePutCallback_Args>::uninit();
        let args = args.as_mut_ptr();
        // SAFETY: as in `get`.
        unsafe {
            (&raw mut (*args).key).write(key.as_ptr().cast());
            (&raw mut (*args).key_size).write(key.len());
            (&raw mut (*args).value).write(value.as_ptr().cast());
            (&raw mut (*args).value_size).write(value.len());
            (&raw mut (*args).callback_error).write(&raw const MAKE_ERROR);
            (&raw mut (*args).user_arg).write(self.user[2]);
            let error = (self.put)(args);
            if error.is_null() {
                Ok(())
            } else {
                Err(taken(plugin, error))
            }
        }
    }
}

/// A client of the fake that shares `store`, and what the plugin keeps of it.
fn shared(store: &Arc<InMemory>) -> (Arc<Plugin>, Client, Given) {
    let mut table = with_client(115);
    table.PJRT_Client_Create = create_shared as Slot;
    let plugin = load(table).expect("it loads");
    let options = [("num_nodes".to_owned(), OptionValue::Int64(2))];
    let store = Arc::clone(store) as Arc<dyn KeyValueStore>;
    let client = Client::create_shared(&plugin, &options, store).expect("a client");
    let given = GIVEN
        .lock()
        .expect("not poisoned")
        .pop()
        .expect("it was given");
    (plugin, client, given)
}

#[test]
fn two_processes_exchange_values() {
    let _turn = TURN.lock();
    let alive = ERRORS_ALIVE.load(Ordering::SeqCst);
    let store = Arc::new(InMemory::default());
    let (plugin, _first, one) = shared(&store);
    let (_, _second, two) = shared(&store);
    std::thread::scope(|scope| {
        // Waits for the other, without an end of its own: XLA says so with a negative number.
        let waiting = scope.spawn(|| one.get(&plugin, b"local_topology/1", -1));
        two.put(&plugin, b"local_topology/1", b"two\0devices")
            .expect("it is the first");
        assert_eq!(
            waiting.join().expect("no panic"),
            Ok(b"two\0devices".to_vec())
        );
    });
    one.put(&plugin, b"empty", b"").expect("an empty value");
    assert_eq!(two.get(&plugin, b"empty", 0), Ok(Vec::new()));
    assert_eq!(two.try_get(&plugin, b"empty"), Ok(Vec::new()));
    let large = vec![7; 3 << 20];
    one.put(&plugin, b"large", &large).expect("a large value");
    assert_eq!(two.try_get(&plugin, b"large"), Ok(large));
    assert_eq!(ERRORS_ALIVE.load(Ordering::SeqCst), alive);
}

#[test]
fn failures_are_errors_of_the_plugin_with_their_codes() {
    let _turn = TURN.lock();
    let alive = ERRORS_ALIVE.load(Ordering::SeqCst);
    let store = Arc::new(InMemory::default());
    let (plugin, client, given) = shared(&store);
    given.put(&plugin, b"key", b"1").expect("it is the first");
    let (code, _) = given.put(&plugin, b"key", b"1").expect_err("a second");
    assert_eq!(code, Code::AlreadyExists);
    let (code, message) = given.try_get(&plugin, b"other").expect_err("none");
    assert_eq!(code, Code::NotFound);
    assert!(message.contains("other"), "{message}");
    let (code, _) = given.get(&plugin, b"other", 1).expect_err("none");
    assert_eq!(code, Code::DeadlineExceeded);
    let (code, _) = given.get(&plugin, b"panic", 1).expect_err("it panics");
    assert_eq!(code, Code::Unknown);

    // The plugin may go on with what it has when the client is gone.
    drop(client);
    assert_eq!(Arc::strong_count(&store), 1);
    let (code, _) = given.try_get(&plugin, b"key").expect_err("gone");
    assert_eq!(code, Code::Unavailable);
    assert_eq!(ERRORS_ALIVE.load(Ordering::SeqCst), alive);
}

#[test]
fn a_client_of_one_process_gets_no_store() {
    let _turn = TURN.lock();
    let mut table = with_client(115);
    table.PJRT_Client_Create = create_shared as Slot;
    let plugin = load(table).expect("it loads");
    let error = Client::create(&plugin, &[]).expect_err("there is no store");
    assert_eq!(error.message(), "no store");
}
