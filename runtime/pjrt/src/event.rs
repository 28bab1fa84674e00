//! Events: promises of the plugin that something will be done, or will have failed.

use crate::completion::{self, Completion};
use crate::error::Error;
use crate::plugin::Plugin;
use crate::sys;
use std::cell::Cell;
use std::ffi::c_void;
use std::future::Future;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::ptr::NonNull;
use std::sync::Arc;
use std::task::{Context, Poll};

thread_local! {
    /// Whether this thread is inside a callback of a plugin.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Whether the calling thread is one of a plugin's, inside a callback: a client must not be destroyed there,
/// since that waits for the plugin's threads to end.
pub(crate) fn in_callback() -> bool {
    IN_CALLBACK.get()
}

/// An event object of the plugin, destroyed on drop.
pub(crate) struct RawEvent {
    plugin: Arc<Plugin>,
    raw: NonNull<sys::PJRT_Event>,
    /// The function that returned the event, for the errors it brings.
    origin: &'static str,
}

// SAFETY: PJRT events may be used from any thread; the handle is owned and only destroyed once.
unsafe impl Send for RawEvent {}
// SAFETY: the functions that take an event by reference (is ready, error) may run at the same time.
unsafe impl Sync for RawEvent {}

impl Drop for RawEvent {
    fn drop(&mut self) {
        let mut args = sys::PJRT_Event_Destroy_Args::new();
        args.event = self.raw.as_ptr();
        // SAFETY: the event is live and nobody uses it after this.
        if let Err(error) = unsafe { self.plugin.api().call(&mut args) } {
            tracing::warn!(%error, "an event was not destroyed");
        }
    }
}

impl RawEvent {
    /// Takes over an event that a function of the plugin has just returned.
    ///
    /// # Safety
    ///
    /// `raw` is null or a live event of `plugin` that the caller owns.
    pub(crate) unsafe fn take(
        plugin: &Arc<Plugin>,
        raw: *mut sys::PJRT_Event,
        origin: &'static str,
    ) -> Result<Self, Error> {
        let raw = NonNull::new(raw).ok_or_else(|| Error::contract(origin, "returned no event"))?;
        Ok(Self {
            plugin: Arc::clone(plugin),
            raw,
            origin,
        })
    }

    fn is_ready(&self) -> Result<bool, Error> {
        let mut args = sys::PJRT_Event_IsReady_Args::new();
        args.event = self.raw.as_ptr();
        // SAFETY: the event is live.
        unsafe { self.plugin.api().call(&mut args)? };
        Ok(args.is_ready)
    }

    /// The outcome of an event that is ready.
    fn outcome(&self) -> Result<(), Error> {
        let mut args = sys::PJRT_Event_Error_Args::new();
        args.event = self.raw.as_ptr();
        // SAFETY: the event is live. The error returned is the event's outcome.
        unsafe { self.plugin.api().call(&mut args) }.map_err(|error| error.from(self.origin))
    }

    fn wait(&self) -> Result<(), Error> {
        let mut args = sys::PJRT_Event_Await_Args::new();
        args.event = self.raw.as_ptr();
        // SAFETY: the event is live. The error returned is the event's outcome.
        unsafe { self.plugin.api().call(&mut args) }.map_err(|error| error.from(self.origin))
    }

    /// Keeps `value` until the event is ready; for good if it cannot be told when that is.
    pub(crate) fn keep<T: Send + 'static>(&self, value: T) {
        unsafe extern "C" fn ready<T>(error: *mut sys::PJRT_Error, argument: *mut c_void) {
            // SAFETY: `argument` is the box of this type that `keep` gave away; the plugin calls once.
            let kept = unsafe { Box::from_raw(argument.cast::<(Arc<Plugin>, T)>()) };
            let outer = IN_CALLBACK.replace(true);
            let caught = catch_unwind(AssertUnwindSafe(move || {
                let (plugin, value) = *kept;
                // The callback owns the error, which the event's owner hears of too.
                let _ = plugin.api().check(error, "PJRT_Event_OnReady");
                drop(value);
            }));
            IN_CALLBACK.set(outer);
            if caught.is_err() {
                tracing::error!("letting go of something panicked");
            }
        }

        let mut args = sys::PJRT_Event_OnReady_Args::new();
        args.event = self.raw.as_ptr();
        args.callback = Some(ready::<T>);
        args.user_arg = Box::into_raw(Box::new((Arc::clone(&self.plugin), value))).cast();
        // SAFETY: the event is live; what is registered stays so if the event is destroyed. If it could not be registered,
        // the box is lost on purpose.
        if let Err(error) = unsafe { self.plugin.api().call(&mut args) } {
            tracing::error!(%error, "it cannot be told when an execution ends");
        }
    }

    /// Has `callback` called with the outcome, on a thread of the plugin or at once on this one. If it cannot
    /// be registered, the event and the callback come back with the reason.
    pub(crate) fn on_ready<F>(self, callback: F) -> Result<(), (Error, Self, F)>
    where
        F: FnOnce(Result<(), Error>) + Send + 'static,
    {
        struct Registered<F> {
            event: RawEvent,
            callback: F,
        }

        unsafe extern "C" fn ready<F>(error: *mut sys::PJRT_Error, argument: *mut c_void)
        where
            F: FnOnce(Result<(), Error>) + Send + 'static,
        {
            // SAFETY: `argument` is the box of this type that `on_ready` gave away; the plugin calls once.
            let registered = unsafe { Box::from_raw(argument.cast::<Registered<F>>()) };
            let Registered { event, callback } = *registered;
            // The callback owns the error.
            let outcome = event
                .plugin
                .api()
                .check(error, "PJRT_Event_OnReady")
                .map_err(|error| error.from(event.origin));
            let outer = IN_CALLBACK.replace(true);
            let caught = catch_unwind(AssertUnwindSafe(move || {
                drop(event);
                callback(outcome);
            }));
            IN_CALLBACK.set(outer);
            if caught.is_err() {
                tracing::error!("a callback on an event panicked");
            }
        }

        let plugin = Arc::clone(&self.plugin);
        let mut args = sys::PJRT_Event_OnReady_Args::new();
        args.event = self.raw.as_ptr();
        args.callback = Some(ready::<F>);
        let registered = Box::into_raw(Box::new(Registered {
            event: self,
            callback,
        }));
        args.user_arg = registered.cast();
        // SAFETY: the event is live and stays so until the callback, which owns it, has run.
        match unsafe { plugin.api().call(&mut args) } {
            Ok(()) => Ok(()),
            Err(error) => {
                // SAFETY: registering failed, so that the plugin never calls and the box is ours again.
                let registered = unsafe { Box::from_raw(registered) };
                Err((error, registered.event, registered.callback))
            }
        }
    }
}

enum State {
    Fresh(RawEvent),
    Waiting(Completion<Result<(), Error>>),
    Done,
}

/// A promise of the plugin: a future of its outcome, or a callback with it.
///
/// Dropping it changes nothing about the work that it stands for.
#[must_use = "an event brings the error of the work that it stands for"]
pub struct Event(State);

impl std::fmt::Debug for Event {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Event")
            .field("ready", &self.is_ready())
            .finish()
    }
}

impl Event {
    pub(crate) fn new(raw: RawEvent) -> Self {
        Self(State::Fresh(raw))
    }

    /// Whether the work is done or has failed.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        match &self.0 {
            // An event that cannot be asked is not waited for: what it brings is the error.
            State::Fresh(raw) => raw.is_ready().unwrap_or(true),
            State::Waiting(completion) => completion.is_ready(),
            State::Done => true,
        }
    }

    /// Calls `callback` once with the outcome: on a thread of the plugin, where it must not block, or at once on
    /// this thread if the outcome is known.
    pub fn on_ready(self, callback: impl FnOnce(Result<(), Error>) + Send + 'static) {
        match self.0 {
            State::Fresh(raw) => {
                if let Err((error, _event, callback)) = raw.on_ready(callback) {
                    callback(Err(error));
                }
            }
            State::Waiting(completion) => completion.on_ready(callback),
            State::Done => {}
        }
    }

    /// Blocks the calling thread until the work is done. Not for threads of an async runtime.
    ///
    /// # Errors
    ///
    /// The outcome, where the work failed.
    pub fn wait(self) -> Result<(), Error> {
        match self.0 {
            State::Fresh(raw) => raw.wait(),
            State::Waiting(completion) => {
                let (sender, receiver) = std::sync::mpsc::sync_channel(1);
                completion.on_ready(move |outcome| {
                    // The receiver waits below.
                    let _ = sender.send(outcome);
                });
                receiver.recv().unwrap_or(Ok(()))
            }
            State::Done => Ok(()),
        }
    }
}

impl Future for Event {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if let State::Fresh(raw) = &self.0 {
            // Often it is ready; then nothing needs to be registered.
            match raw.is_ready() {
                Ok(false) => {}
                Ok(true) => {
                    let outcome = raw.outcome();
                    self.0 = State::Done;
                    return Poll::Ready(outcome);
                }
                Err(error) => {
                    self.0 = State::Done;
                    return Poll::Ready(Err(error));
                }
            }
            let State::Fresh(raw) = mem::replace(&mut self.0, State::Done) else {
                return Poll::Pending;
            };
            let (sender, completion) = completion::pair();
            if let Err((error, ..)) = raw.on_ready(move |outcome| sender.send(outcome)) {
                return Poll::Ready(Err(error));
            }
            self.0 = State::Waiting(completion);
        }
        match &mut self.0 {
            State::Waiting(completion) => {
                let outcome = std::task::ready!(Pin::new(completion).poll(context));
                self.0 = State::Done;
                Poll::Ready(outcome)
            }
            State::Fresh(_) | State::Done => Poll::Pending,
        }
    }
}
