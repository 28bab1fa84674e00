//! Calls that end later.
//!
//! XLA keeps operands and results of a call as they are until it is told that the call has ended. A [`Call`] and what it is
//! taken apart into share one hold on them, and XLA is told when the last part of the hold is gone. So all of it may be kept, and sent
//! to other threads, for as long as wanted, and nobody can read or write what is XLA's again.

use super::element::packed_bits;
use super::frame::{Buffer, raw_attributes};
use super::future::{Functions, Hold, REGISTERING, remember};
use super::{CALLS, Failure, describe, known_size, metadata, report};
use crate::api::slice;
use crate::context::{self, UserData};
use crate::error::{Code, Error};
use crate::heap;
use crate::plugin::Plugin;
use crate::sys;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// A function that programs may call, and that ends its calls when it can.
pub trait AsyncTarget: 'static {
    /// Takes a call, and does not block. A call that is dropped without an outcome fails.
    fn call(call: Call);
}

/// Operands or results of one call at most.
const MOST_BUFFERS: i64 = 1024;
/// Numbers in an attribute at most.
const MOST_NUMBERS: usize = 1 << 20;

impl Plugin {
    /// Registers `T` under `name` for programs on `platform` (`Host` means the CPU). Registering a name again does
    /// nothing. Targets stay registered as long as the process runs.
    ///
    /// # Errors
    ///
    /// As [`Plugin::register_ffi`]. That a plugin is too old for calls that end later is found when it calls.
    pub fn register_async_ffi<T: AsyncTarget>(
        &self,
        name: &str,
        platform: &str,
    ) -> Result<(), Error> {
        // Without user data the targets get none.
        let type_id = context::type_id(self).and_then(|type_id| {
            context::give_always(self)?;
            Ok(type_id)
        });
        let before = REGISTERING.replace(type_id.unwrap_or_default());
        let registered = self.register_handler(name, platform, handle::<T>);
        REGISTERING.set(before);
        registered
    }
}

/// What XLA calls.
///
/// # Safety
///
/// As [`enter`].
unsafe extern "C" fn handle<T: AsyncTarget>(
    frame: *mut sys::XLA_FFI_CallFrame,
) -> *mut sys::XLA_FFI_Error {
    // SAFETY: passed on from this function's contract.
    unsafe { enter(frame, T::call) }
}

/// # Safety
///
/// `frame` is null or a call frame of XLA's FFI, valid with all that it points to until this returns; what operands, results
/// and attributes lie in, until the future that this leaves in the frame is complete.
pub(super) unsafe fn enter(
    frame: *mut sys::XLA_FFI_CallFrame,
    target: fn(Call),
) -> *mut sys::XLA_FFI_Error {
    if frame.is_null() {
        return null_mut();
    }
    // SAFETY: not null, hence a frame; every frame has these two first.
    let (size, api) = unsafe { ((*frame).struct_size, (*frame).api) };
    let prepared = || {
        known_size(size)?;
        // SAFETY: a frame of this size has every field; passed on from this function's contract.
        unsafe {
            if let Some(metadata) = metadata(frame) {
                remember(api);
                describe(api, metadata)?;
                return Ok(None);
            }
            // There is nothing to do in the other stages.
            if (*frame).stage != sys::FFI_STAGE_EXECUTE {
                return Ok(None);
            }
            CALLS.fetch_add(1, Relaxed);
            Call::new(frame).map(Some)
        }
    };
    // Nothing may unwind into XLA.
    let result = catch_unwind(AssertUnwindSafe(prepared));
    match result {
        Ok(Ok(None)) => null_mut(),
        Ok(Ok(Some(call))) => {
            // A call that a panic drops fails, and its future says so.
            let _ = catch_unwind(AssertUnwindSafe(|| target(call)));
            null_mut()
        }
        // SAFETY: the frame's table of functions, or null.
        Ok(Err(failure)) => unsafe { report(api, &failure) },
        Err(_) => {
            let failure = Failure::new(
                Code::Unknown,
                "the FFI target panicked; this is a defect of waystation",
            );
            // SAFETY: as above.
            unsafe { report(api, &failure) }
        }
    }
}

/// One call of a target, with its operands and results as bytes: dense, in the order that the program asks for, elements of
/// less than a byte packed.
pub struct Call {
    inputs: Vec<Input>,
    outputs: Outputs,
    promise: Promise,
    attributes: Numbers,
    user_data: Option<UserData>,
}

/// Attributes that are numbers, by name.
type Numbers = Vec<(Box<str>, Vec<i64>)>;

/// An operand of a call.
#[derive(Clone)]
pub struct Input {
    start: *const u8,
    bytes: usize,
    _hold: Arc<Hold>,
}

// SAFETY: nobody writes to the memory while there is a hold.
unsafe impl Send for Input {}
// SAFETY: as above.
unsafe impl Sync for Input {}

impl AsRef<[u8]> for Input {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `Buffer::new` has checked pointer and size. XLA keeps the memory as it is until the hold is gone, and no
        // result overlaps it.
        unsafe { slice(self.start, self.bytes) }
    }
}

/// The results of a call.
pub struct Outputs {
    parts: Vec<(*mut u8, usize)>,
    _hold: Arc<Hold>,
}

// SAFETY: nobody else uses the memory while there is a hold.
unsafe impl Send for Outputs {}
// SAFETY: as above; through a shared reference nothing of it can be seen.
unsafe impl Sync for Outputs {}

impl Outputs {
    /// How many results there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.parts.len()
    }

    /// The bytes of a result, to be written; what they hold before is any value. Empty if there is no such result.
    pub fn get(&mut self, index: usize) -> &mut [u8] {
        match self.parts.get(index) {
            // SAFETY: `Buffer::new` has checked pointer and size. XLA lets nobody else use the memory until the hold is
            // gone; no operand and no other result overlaps it, and `self` is borrowed for as long as the bytes.
            Some((start, bytes)) if *bytes > 0 => unsafe {
                std::slice::from_raw_parts_mut(*start, *bytes)
            },
            _ => &mut [],
        }
    }

    /// Asks the system to back large results by large pages, as far as they have no pages yet. To be called before they are
    /// written to: XLA takes such memory anew for each execution, and page by page that costs more than what is written.
    pub fn prefer_large_pages(&self) {
        for (start, bytes) in &self.parts {
            heap::prefer_large_pages(*start, *bytes);
        }
    }
}

/// What tells XLA the outcome of a call, when operands and results are let go of too.
pub struct Promise(Arc<Hold>);

impl Promise {
    /// Sets the outcome.
    pub fn finish(self, outcome: Result<(), Failure>) {
        self.0.set(outcome);
    }
}

impl std::fmt::Debug for Call {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Call")
            .field("inputs", &self.inputs.len())
            .field("outputs", &self.outputs.count())
            .field("attributes", &self.attributes)
            .finish_non_exhaustive()
    }
}

impl Call {
    /// # Safety
    ///
    /// As [`enter`]; the frame has every field and is an execution.
    unsafe fn new(frame: *mut sys::XLA_FFI_CallFrame) -> Result<Self, Failure> {
        // SAFETY: passed on from this function's contract.
        let raw = unsafe { &*frame };
        // SAFETY: the frame's table of functions, or null.
        let functions = unsafe { Functions::new(raw.api) }.ok_or_else(|| {
            Failure::new(
                Code::Unimplemented,
                "the plugin is too old for FFI targets that end their calls later",
            )
        })?;
        // SAFETY: passed on from this function's contract.
        let (inputs, outputs, attributes, user_data) = unsafe {
            (
                Buffer::list(&raw.args, "operands", MOST_BUFFERS, packed_bits)?,
                Buffer::list(&raw.rets, "results", MOST_BUFFERS, packed_bits)?,
                numbers(&raw.attrs)?,
                functions.user_data(raw.context),
            )
        };
        apart(&inputs, &outputs)?;
        let (future, hold) = Hold::new(functions).ok_or_else(|| {
            Failure::new(
                Code::Unknown,
                "the plugin gives a call of an FFI target no future",
            )
        })?;
        // SAFETY: frames have the field in every version whose table has the functions. Nothing fails after this, so XLA
        // takes it.
        unsafe {
            let place = &raw mut (*frame.cast::<sys::XLA_FFI_CallFrame_Async>()).future;
            place.write(future);
        }
        let hold = Arc::new(hold);
        Ok(Self {
            inputs: inputs
                .iter()
                .map(|buffer| Input {
                    start: buffer.data,
                    bytes: buffer.bytes,
                    _hold: Arc::clone(&hold),
                })
                .collect(),
            outputs: Outputs {
                parts: outputs
                    .iter()
                    .map(|buffer| (buffer.data, buffer.bytes))
                    .collect(),
                _hold: Arc::clone(&hold),
            },
            promise: Promise(hold),
            attributes,
            user_data,
        })
    }

    /// The operands.
    #[must_use]
    pub fn inputs(&self) -> &[Input] {
        &self.inputs
    }

    /// The results.
    pub fn outputs(&mut self) -> &mut Outputs {
        &mut self.outputs
    }

    /// An attribute that is an array of `i64`.
    #[must_use]
    pub fn attribute(&self, name: &str) -> Option<&[i64]> {
        self.attributes
            .iter()
            .find(|(known, _)| **known == *name)
            .map(|(_, values)| values.as_slice())
    }

    /// The value of the execution's [`crate::ExecuteContext`], if it has one.
    #[must_use]
    pub fn user_data(&self) -> Option<&Arc<dyn std::any::Any + Send + Sync>> {
        self.user_data.as_ref()
    }

    /// Ends the call, once all operands that were cloned are gone too.
    pub fn finish(self, outcome: Result<(), Failure>) {
        self.promise.finish(outcome);
    }

    /// Takes the call apart. It ends when all parts are gone, with the outcome that the promise was given.
    #[must_use]
    pub fn into_parts(self) -> (Vec<Input>, Outputs, Promise) {
        (self.inputs, self.outputs, self.promise)
    }
}

/// Results must lie apart from each other and from the operands.
fn apart(inputs: &[Buffer], outputs: &[Buffer]) -> Result<(), Failure> {
    let mut all: Vec<(usize, usize, bool)> = inputs
        .iter()
        .map(|buffer| (buffer, false))
        .chain(outputs.iter().map(|buffer| (buffer, true)))
        .filter(|(buffer, _)| buffer.bytes > 0)
        .map(|(buffer, output)| (buffer.start, buffer.start + buffer.bytes, output))
        .collect();
    all.sort_unstable();
    let (mut end, mut output_end) = (0, 0);
    for (start, to, output) in all {
        if start < if output { end } else { output_end } {
            return Err(Failure::invalid(
                "a result lies where an operand or another result lies",
            ));
        }
        end = end.max(to);
        if output {
            output_end = output_end.max(to);
        }
    }
    Ok(())
}

/// The attributes that are arrays of `i64`, copied.
///
/// # Safety
///
/// `raw` is valid with what it points to.
unsafe fn numbers(raw: &sys::XLA_FFI_Attrs) -> Result<Numbers, Failure> {
    const S64: i32 = 5;
    // SAFETY: passed on from this function's contract.
    let attributes = unsafe { raw_attributes(raw)? };
    let mut found = Vec::new();
    for (name, kind, value) in attributes {
        if kind != sys::FFI_ARRAY {
            continue;
        }
        // SAFETY: the kind says that this is an array.
        let array = unsafe { &*value.cast::<sys::XLA_FFI_Array>() };
        if array.dtype != S64 {
            continue;
        }
        if array.size > MOST_NUMBERS {
            return Err(Failure::invalid(format!(
                "the attribute {name} has {} numbers; at most {MOST_NUMBERS} are taken",
                array.size
            )));
        }
        // SAFETY: the array has so many numbers of this type, aligned as C's.
        let values = unsafe { slice(array.data.cast::<i64>(), array.size) };
        found.push((name.into(), values.to_vec()));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(start: usize, bytes: usize) -> Buffer {
        Buffer::at(start, bytes)
    }

    #[test]
    fn results_must_lie_apart() {
        let fits = |inputs: &[Buffer], outputs: &[Buffer]| apart(inputs, outputs).is_ok();
        assert!(fits(&[at(0, 8), at(4, 8)], &[at(12, 4), at(16, 4)]));
        assert!(!fits(&[at(0, 8)], &[at(7, 4)]));
        assert!(!fits(&[at(8, 8)], &[at(0, 9)]));
        assert!(!fits(&[at(0, 100), at(10, 1)], &[at(50, 4)]));
        assert!(!fits(&[at(10, 1)], &[at(0, 100)]));
        assert!(!fits(&[], &[at(0, 4), at(3, 4)]));
        assert!(!fits(&[at(0, 4)], &[at(0, 4)]));
        // Nothing lies nowhere.
        assert!(fits(&[at(0, 4)], &[at(0, 0), at(2, 0)]));
    }
}
