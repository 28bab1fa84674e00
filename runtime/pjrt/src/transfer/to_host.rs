//! From a device to the host.

use crate::buffer::Buffer;
use crate::completion::{self, Completion};
use crate::error::Error;
use crate::event::RawEvent;
use crate::host::AlignedBytes;
use crate::sys;
use std::ffi::c_void;
use std::future::Future;
use std::pin::Pin;
use std::ptr::null_mut;
use std::task::{Context, Poll};

/// A copy to the host under way: a future of the bytes, or a callback with them. Dropping it lets the copy run to
/// its end and then frees the bytes.
#[must_use = "the bytes come out of this"]
pub struct ToHost(Completion<Result<AlignedBytes, Error>>);

impl ToHost {
    /// Whether the copy is done or has failed.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.0.is_ready()
    }

    /// Calls `callback` once with the bytes: on a thread of the plugin, where it must not block, or at once on this
    /// thread if they are there.
    pub fn on_ready(self, callback: impl FnOnce(Result<AlignedBytes, Error>) + Send + 'static) {
        self.0.on_ready(callback);
    }
}

impl Future for ToHost {
    type Output = Result<AlignedBytes, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context)
    }
}

impl std::fmt::Debug for ToHost {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("ToHost")
            .field("ready", &self.is_ready())
            .finish()
    }
}

/// Calls `PJRT_Buffer_ToHostBuffer` for dense row-major bytes; gives the arguments back with what it put out.
///
/// # Safety
///
/// `dst` is null, which asks for the size, or may be written for `dst_size` bytes until the event is ready.
unsafe fn call(
    buffer: &Buffer,
    dst: *mut c_void,
    dst_size: usize,
) -> Result<sys::PJRT_Buffer_ToHostBuffer_Args, Error> {
    // The last dimension varies fastest.
    let minor_to_major: Vec<i64> = (0_i64..)
        .take(buffer.dims().len())
        .collect::<Vec<_>>()
        .into_iter()
        .rev()
        .collect();
    let mut layout = sys::PJRT_Buffer_MemoryLayout::of(&minor_to_major);
    let mut args = sys::PJRT_Buffer_ToHostBuffer_Args::new();
    args.src = buffer.raw();
    args.host_layout = &raw mut layout;
    args.dst = dst;
    args.dst_size = dst_size;
    // SAFETY: the buffer is live, the layout lives across the call, the caller vouches for `dst`.
    unsafe { buffer.inner().api().call(&mut args)? };
    Ok(args)
}

/// Bytes that [`to_host`] writes.
pub(crate) fn host_bytes(buffer: &Buffer) -> Result<usize, Error> {
    // SAFETY: null asks for the size only.
    let args = unsafe { call(buffer, null_mut(), 0)? };
    Ok(args.dst_size)
}

/// See [`Buffer::to_host`].
pub(crate) fn to_host(buffer: &Buffer, mut dst: AlignedBytes) -> Result<ToHost, Error> {
    const FUNCTION: &str = "PJRT_Buffer_ToHostBuffer";
    let needed = host_bytes(buffer)?;
    if dst.len() < needed {
        return Err(Error::invalid(
            FUNCTION,
            format!(
                "the array takes {needed} bytes on the host and there is room for {}",
                dst.len()
            ),
        ));
    }
    dst.truncate(needed);
    if needed == 0 {
        let (sender, completion) = completion::pair();
        // Nothing to copy; whether the array is good is still worth knowing.
        buffer
            .ready()?
            .on_ready(move |outcome| sender.send(outcome.map(|()| dst)));
        return Ok(ToHost(completion));
    }
    // SAFETY: `dst` is owned and moves, without its bytes moving, into the callback that the event calls.
    let args = unsafe { call(buffer, dst.as_mut_ptr().cast(), dst.len())? };
    // SAFETY: the call handed the event over, and writes into `dst` until then.
    unsafe { follow(buffer, args.event, dst, FUNCTION) }
}

/// See [`Buffer::part_to_host`].
pub(crate) fn part_to_host(
    buffer: &Buffer,
    offset: u64,
    mut dst: AlignedBytes,
) -> Result<ToHost, Error> {
    const FUNCTION: &str = "PJRT_Buffer_CopyRawToHost";
    let whole = buffer.on_device_bytes()?;
    let end = offset.checked_add(dst.len() as u64);
    if dst.is_empty() || end.is_none_or(|end| end > whole) {
        return Err(Error::invalid(
            FUNCTION,
            format!(
                "{} bytes from {offset} on of an array of {whole}",
                dst.len()
            ),
        ));
    }
    let (Ok(from), Ok(len)) = (i64::try_from(offset), i64::try_from(dst.len())) else {
        return Err(Error::invalid(FUNCTION, "too far"));
    };
    let mut args = sys::PJRT_Buffer_CopyRawToHost_Args::new();
    args.buffer = buffer.raw();
    args.dst = dst.as_mut_ptr().cast();
    args.offset = from;
    args.transfer_size = len;
    // SAFETY: the buffer is live and has these bytes; `dst` may be written and is kept until the event below.
    unsafe {
        buffer.inner().api().call(&mut args)?;
        follow(buffer, args.event, dst, FUNCTION)
    }
}

/// The bytes when the event that the plugin has given for a copy into them is there.
///
/// # Safety
///
/// The event was handed over, or is null; the plugin writes to nothing but `dst`, until the event is ready.
unsafe fn follow(
    buffer: &Buffer,
    event: *mut sys::PJRT_Event,
    dst: AlignedBytes,
    function: &'static str,
) -> Result<ToHost, Error> {
    let (sender, completion) = completion::pair();
    // SAFETY: passed on from this function's contract.
    let event = match unsafe { RawEvent::take(buffer.inner().plugin(), event, function) } {
        Ok(event) => event,
        Err(error) => {
            // Nobody will tell when the plugin stops writing, so the bytes stay.
            std::mem::forget(dst);
            return Err(error);
        }
    };
    // The source stays until it is read.
    let source = buffer.clone();
    let arrived = move |outcome: Result<(), Error>| {
        drop(source);
        sender.send(outcome.map(|()| dst));
    };
    match event.on_ready(arrived) {
        Ok(()) => Ok(ToHost(completion)),
        Err((error, event, arrived)) => {
            // As above.
            std::mem::forget((event, arrived));
            Err(error)
        }
    }
}
