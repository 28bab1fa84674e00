//! The bytes of arrays that lie in this process's memory.

use crate::buffer::Buffer;
use crate::error::{Code, Error};
use crate::sys;
use std::fmt;
use std::ptr::NonNull;
use std::slice;

/// The bytes of an array where they lie on its device, which is this process's memory. Keeps the array, and has the plugin
/// neither free its memory nor give it to an execution.
pub struct HostView {
    start: NonNull<u8>,
    len: usize,
    /// Counted by the plugin while this is here.
    buffer: Buffer,
}

// SAFETY: plain memory that nothing writes while the plugin counts this reference.
unsafe impl Send for HostView {}
// SAFETY: as above.
unsafe impl Sync for HostView {}

impl HostView {
    pub(crate) fn of(buffer: &Buffer) -> Result<Option<Self>, Error> {
        const FUNCTION: &str = "PJRT_Buffer_OpaqueDeviceMemoryDataPointer";
        match is_on_cpu(buffer) {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(error) if error.code() == Code::Unimplemented => return Ok(None),
            Err(error) => return Err(error),
        }
        let filled = buffer.ready()?;
        if !filled.is_ready() {
            return Err(Error::own(
                Code::FailedPrecondition,
                FUNCTION,
                "the array is not filled yet",
            ));
        }
        // At once. Where filling it has failed, the bytes are anything.
        filled.wait()?;
        let len = usize::try_from(buffer.on_device_bytes()?)
            .map_err(|_| Error::contract(FUNCTION, "gave a size beyond the address space"))?;
        let mut args = sys::PJRT_Buffer_IncreaseExternalReferenceCount_Args::new();
        args.buffer = buffer.raw();
        let counted = {
            let _alone = buffer.counting();
            // SAFETY: the buffer is live, and nobody else has the plugin count its references meanwhile.
            unsafe { buffer.inner().api().call(&mut args) }
        };
        match counted {
            Ok(()) => {}
            Err(error) if error.code() == Code::Unimplemented => return Ok(None),
            Err(error) => return Err(error),
        }
        // From here on the reference is counted, and given back when this is dropped.
        let mut view = Self {
            start: NonNull::dangling(),
            len: 0,
            buffer: buffer.clone(),
        };
        let mut args = sys::PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args::new();
        args.buffer = buffer.raw();
        // SAFETY: the buffer is live.
        match unsafe { buffer.inner().api().call(&mut args) } {
            Ok(()) => {}
            Err(error) if error.code() == Code::Unimplemented => return Ok(None),
            Err(error) => return Err(error),
        }
        if let Some(start) = NonNull::new(args.device_memory_ptr.cast::<u8>()) {
            (view.start, view.len) = (start, len);
        } else if len > 0 {
            return Err(Error::contract(FUNCTION, "gave no memory"));
        }
        Ok(Some(view))
    }
}

fn is_on_cpu(buffer: &Buffer) -> Result<bool, Error> {
    let mut args = sys::PJRT_Buffer_IsOnCpu_Args::new();
    args.buffer = buffer.raw();
    // SAFETY: the buffer is live.
    unsafe { buffer.inner().api().call(&mut args)? };
    Ok(args.is_on_cpu)
}

impl AsRef<[u8]> for HostView {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `len` bytes of this process's memory (the plugin says that the buffer is on the CPU, and how large it is), filled
        // before this was made. The counted reference keeps them, and nothing writes to a filled buffer but an execution that it
        // was donated to, which a counted reference prevents. Without a start, `len` is zero.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl Drop for HostView {
    fn drop(&mut self) {
        let mut args = sys::PJRT_Buffer_DecreaseExternalReferenceCount_Args::new();
        args.buffer = self.buffer.raw();
        let _alone = self.buffer.counting();
        // SAFETY: the buffer is live, this is the one who was counted, and nobody else has the plugin count meanwhile.
        if let Err(error) = unsafe { self.buffer.inner().api().call(&mut args) } {
            tracing::warn!(%error, "a buffer stays referenced");
        }
    }
}

impl fmt::Debug for HostView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostView({} bytes of {:?})", self.len, self.buffer)
    }
}
