//! A key-value store that a client's creator lends to the plugin.
//!
//! Plugins that make one client of several processes (those for GPUs) find each other through it: each process puts what
//! devices it has, and the identifiers under which their communicators meet. They go on using it while the client lives, from
//! threads of their own, several at once.
//!
//! The plugin is given a *cell* that holds the store, and the cell is never freed: XLA keeps what it was given in objects that
//! live as long as the process. When the client ends, the store is taken out, and later calls are told that it is gone.

use crate::api::slice;
use crate::error::Code;
use crate::ffi::Failure;
use crate::sys;
use std::alloc::{Layout, alloc, dealloc};
use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{self, NonNull};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// Waited for at most, whatever the plugin asks for: it says "for ever" as a negative number of milliseconds.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 60 * 60);

/// What the processes of one client share. Keys of different clients must not meet: each needs a store, or a part of one, of
/// its own.
///
/// The plugin calls from its own threads, several at a time, and a call of [`KeyValueStore::get`] may block its thread.
pub trait KeyValueStore: Send + Sync {
    /// The value of a key, waited for until somebody puts it.
    ///
    /// # Errors
    ///
    /// [`Code::DeadlineExceeded`] if nobody has within `timeout`; else why the store cannot be asked.
    fn get(&self, key: &[u8], timeout: Duration) -> Result<Vec<u8>, Failure>;

    /// The value of a key if it has one now.
    ///
    /// # Errors
    ///
    /// Why the store cannot be asked.
    fn try_get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, Failure>;

    /// Gives a key its value, once.
    ///
    /// # Errors
    ///
    /// [`Code::AlreadyExists`] if it has one; plugins of a process that starts again look at the code. Else why the store
    /// cannot be asked.
    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), Failure>;
}

/// What the plugin's user argument points to.
struct Cell(RwLock<Option<Arc<dyn KeyValueStore>>>);

impl Cell {
    /// The store, held for one call.
    fn store(&self) -> Result<Arc<dyn KeyValueStore>, Failure> {
        let store = self.0.read().unwrap_or_else(PoisonError::into_inner);
        store.clone().ok_or_else(|| {
            Failure::new(
                Code::Unavailable,
                "the key-value store is gone with the client that it was made for",
            )
        })
    }
}

/// A store lent to a plugin, until this is dropped.
pub(crate) struct Lent(&'static Cell);

impl Lent {
    pub(crate) fn new(store: Arc<dyn KeyValueStore>) -> Self {
        Self(Box::leak(Box::new(Cell(RwLock::new(Some(store))))))
    }

    /// Says to the plugin how to use it.
    pub(crate) fn fill(&self, args: &mut sys::PJRT_Client_Create_Args) {
        let user = ptr::from_ref(self.0).cast_mut().cast::<c_void>();
        args.kv_get_callback = Some(get);
        args.kv_get_user_arg = user;
        args.kv_try_get_callback = Some(try_get);
        args.kv_try_get_user_arg = user;
        args.kv_put_callback = Some(put);
        args.kv_put_user_arg = user;
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        let store = self
            .0
            .0
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        drop(store);
    }
}

/// Runs `work` on the store behind a user argument. Nothing unwinds out of it.
///
/// # Safety
///
/// `user` is what [`Lent::fill`] gave the plugin.
unsafe fn with_store<R>(
    user: *mut c_void,
    work: impl FnOnce(&dyn KeyValueStore) -> Result<R, Failure>,
) -> Result<R, Failure> {
    // SAFETY: `fill` made the pointer of a shared reference that lives for good.
    let cell = unsafe { &*user.cast::<Cell>().cast_const() };
    catch_unwind(AssertUnwindSafe(|| {
        let store = cell.store()?;
        work(&*store)
    }))
    .unwrap_or_else(|_| {
        Err(Failure::new(
            Code::Unknown,
            "the key-value store panicked; this is a defect of waystation",
        ))
    })
}

/// An error of the plugin's own kind, which it takes over.
///
/// # Safety
///
/// `make` points to the function that the plugin gave the callback.
unsafe fn error(make: *const sys::PJRT_CallbackError, failure: &Failure) -> *mut sys::PJRT_Error {
    let message = failure.message().as_bytes();
    // SAFETY: the pointer is good by contract, and the function copies the message before it returns.
    unsafe {
        (*make)(
            failure.code().number(),
            message.as_ptr().cast(),
            message.len(),
        )
    }
}

/// # Safety
///
/// `args` are complete arguments of a plugin that was given these callbacks by [`Lent::fill`], valid until this returns.
unsafe extern "C" fn get(args: *mut sys::PJRT_KeyValueGetCallback_Args) -> *mut sys::PJRT_Error {
    // SAFETY: the arguments are complete; nothing else refers to them meanwhile. The two fields that XLA leaves unset are not
    // read, and no reference to the whole is made.
    unsafe {
        let key = slice((*args).key.cast::<u8>(), (*args).key_size);
        let timeout = u64::try_from((*args).timeout_in_ms)
            .map_or(LONGEST_WAIT, Duration::from_millis)
            .min(LONGEST_WAIT);
        let got = with_store((*args).user_arg, |store| lend(&store.get(key, timeout)?));
        match got {
            Ok((value, size)) => {
                (*args).value = value.as_ptr();
                (*args).value_size = size;
                (*args).value_deleter_callback = Some(delete);
                ptr::null_mut()
            }
            Err(failure) => error((*args).callback_error, &failure),
        }
    }
}

/// # Safety
///
/// As [`get`].
unsafe extern "C" fn try_get(
    args: *mut sys::PJRT_KeyValueTryGetCallback_Args,
) -> *mut sys::PJRT_Error {
    // SAFETY: as in `get`.
    unsafe {
        let key = slice((*args).key.cast::<u8>(), (*args).key_size);
        let got = with_store((*args).user_arg, |store| {
            let value = store.try_get(key)?.ok_or_else(|| {
                let key = String::from_utf8_lossy(key);
                Failure::new(Code::NotFound, format!("nobody has put {key:?}"))
            })?;
            lend(&value)
        });
        match got {
            Ok((value, size)) => {
                (*args).value = value.as_ptr();
                (*args).value_size = size;
                (*args).value_deleter_callback = Some(delete);
                ptr::null_mut()
            }
            Err(failure) => error((*args).callback_error, &failure),
        }
    }
}

/// # Safety
///
/// As [`get`].
unsafe extern "C" fn put(args: *mut sys::PJRT_KeyValuePutCallback_Args) -> *mut sys::PJRT_Error {
    // SAFETY: as in `get`.
    unsafe {
        let key = slice((*args).key.cast::<u8>(), (*args).key_size);
        let value = slice((*args).value.cast::<u8>(), (*args).value_size);
        match with_store((*args).user_arg, |store| store.put(key, value)) {
            Ok(()) => ptr::null_mut(),
            Err(failure) => error((*args).callback_error, &failure),
        }
    }
}

/// In front of each value that is lent lies how much was allocated, since its deleter is told the address alone.
const HEAD: usize = size_of::<usize>();

fn layout(all: usize) -> Option<Layout> {
    Layout::from_size_align(all, align_of::<usize>()).ok()
}

/// A copy of a value for the plugin, which gives it back by [`delete`]; never null, also of an empty one.
fn lend(value: &[u8]) -> Result<(NonNull<c_char>, usize), Failure> {
    let no_room = || {
        Failure::new(
            Code::ResourceExhausted,
            format!("no memory for a value of {} bytes", value.len()),
        )
    };
    let all = value.len().checked_add(HEAD).ok_or_else(no_room)?;
    let layout = layout(all).ok_or_else(no_room)?;
    // SAFETY: the layout has at least the head's size. The head is aligned, and the value lies behind it, in the same
    // allocation.
    unsafe {
        let head = NonNull::new(alloc(layout)).ok_or_else(no_room)?;
        head.cast::<usize>().write(all);
        let copy = head.add(HEAD);
        ptr::copy_nonoverlapping(value.as_ptr(), copy.as_ptr(), value.len());
        Ok((copy.cast(), value.len()))
    }
}

/// # Safety
///
/// `value` is null or comes from [`lend`], and is not used afterwards.
unsafe extern "C" fn delete(value: *mut c_char) {
    if value.is_null() {
        return;
    }
    // SAFETY: `lend` put the head there, with the size that it was allocated with.
    unsafe {
        let head = value.cast::<u8>().sub(HEAD);
        let all = head.cast::<usize>().read();
        if let Some(layout) = layout(all) {
            dealloc(head, layout);
        }
    }
}

#[cfg(test)]
mod tests;
