//! Buffers: arrays on one device.

use crate::api;
use crate::client::{Client, ClientInner};
use crate::device::{Device, Memory};
use crate::element::ElementType;
use crate::error::Error;
use crate::event::{Event, RawEvent};
use crate::host::AlignedBytes;
use crate::sys;
use crate::transfer::to_host::{self, ToHost};
use crate::view::HostView;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An array in a device's memory, possibly still to be filled. Clones share it.
#[derive(Clone)]
pub struct Buffer(Arc<BufferInner>);

struct BufferInner {
    ty: ElementType,
    dims: Box<[i64]>,
    raw: RawBuffer,
    /// Held while the plugin counts a view: it keeps no lock of its own there.
    views: Mutex<()>,
}

/// The plugin's buffer object, destroyed on drop.
pub(crate) struct RawBuffer {
    client: Arc<ClientInner>,
    raw: NonNull<sys::PJRT_Buffer>,
}

// SAFETY: PJRT buffers may be used from any thread, by several at once.
unsafe impl Send for RawBuffer {}
// SAFETY: as above.
unsafe impl Sync for RawBuffer {}

impl Drop for RawBuffer {
    fn drop(&mut self) {
        let mut args = sys::PJRT_Buffer_Destroy_Args::new();
        args.buffer = self.raw.as_ptr();
        // SAFETY: the buffer is live and its last owner gives it up.
        if let Err(error) = unsafe { self.client.api().call(&mut args) } {
            tracing::warn!(%error, "a buffer was not destroyed");
        }
    }
}

impl RawBuffer {
    /// Takes over a buffer that a function of the plugin has just returned.
    ///
    /// # Safety
    ///
    /// `raw` is null or a live buffer of `client` that the caller owns.
    pub(crate) unsafe fn take(
        client: &Arc<ClientInner>,
        raw: *mut sys::PJRT_Buffer,
        origin: &'static str,
    ) -> Result<Self, Error> {
        let raw = NonNull::new(raw).ok_or_else(|| Error::contract(origin, "returned no buffer"))?;
        Ok(Self {
            client: Arc::clone(client),
            raw,
        })
    }

    /// Asks type and dims, and so makes it a [`Buffer`].
    pub(crate) fn describe(self) -> Result<Buffer, Error> {
        let api = self.client.api();
        let mut args = sys::PJRT_Buffer_ElementType_Args::new();
        args.buffer = self.raw.as_ptr();
        // SAFETY: the buffer is live.
        unsafe { api.call(&mut args)? };
        let ty = ElementType::reported(args.element_type, "PJRT_Buffer_ElementType")?;
        let mut args = sys::PJRT_Buffer_Dimensions_Args::new();
        args.buffer = self.raw.as_ptr();
        // SAFETY: the buffer is live, and its dims with it.
        let dims = unsafe {
            api.call(&mut args)?;
            api::slice(args.dims, args.num_dims).into()
        };
        Ok(Buffer(Arc::new(BufferInner {
            ty,
            dims,
            raw: self,
            views: Mutex::default(),
        })))
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Buffer({:?}{:?})", self.0.ty, self.0.dims)
    }
}

impl Buffer {
    /// # Safety
    ///
    /// As [`RawBuffer::take`].
    pub(crate) unsafe fn take(
        client: &Arc<ClientInner>,
        raw: *mut sys::PJRT_Buffer,
        origin: &'static str,
    ) -> Result<Self, Error> {
        // SAFETY: passed on from this function's contract.
        unsafe { RawBuffer::take(client, raw, origin) }?.describe()
    }

    pub(crate) fn inner(&self) -> &Arc<ClientInner> {
        &self.0.raw.client
    }

    pub(crate) fn raw(&self) -> *mut sys::PJRT_Buffer {
        self.0.raw.raw.as_ptr()
    }

    /// The client that the buffer belongs to.
    #[must_use]
    pub fn client(&self) -> Client {
        Client(Arc::clone(self.inner()))
    }

    /// Type of the elements.
    #[must_use]
    pub fn element_type(&self) -> ElementType {
        self.0.ty
    }

    /// Extents, most significant dimension first; empty for a scalar.
    #[must_use]
    pub fn dims(&self) -> &[i64] {
        &self.0.dims
    }

    /// When the array is filled, or why it never will be.
    ///
    /// # Errors
    ///
    /// What the plugin reports, such as for a buffer that was deleted or donated.
    pub fn ready(&self) -> Result<Event, Error> {
        const FUNCTION: &str = "PJRT_Buffer_ReadyEvent";
        let mut args = sys::PJRT_Buffer_ReadyEvent_Args::new();
        args.buffer = self.raw();
        // SAFETY: the buffer is live; the event is handed over.
        unsafe {
            self.inner().api().call(&mut args)?;
            RawEvent::take(self.inner().plugin(), args.event, FUNCTION).map(Event::new)
        }
    }

    /// Bytes that the array takes on the device, padding included.
    ///
    /// # Errors
    ///
    /// What the plugin reports.
    pub fn on_device_bytes(&self) -> Result<u64, Error> {
        let mut args = sys::PJRT_Buffer_OnDeviceSizeInBytes_Args::new();
        args.buffer = self.raw();
        // SAFETY: the buffer is live.
        unsafe { self.inner().api().call(&mut args)? };
        u64::try_from(args.on_device_size_in_bytes)
            .map_err(|_| Error::contract("PJRT_Buffer_OnDeviceSizeInBytes", "gave no size"))
    }

    /// The order in which the device lays the dimensions out, the one that varies fastest first; `None` where there is more
    /// to the layout than that.
    ///
    /// # Errors
    ///
    /// What the plugin reports.
    pub fn minor_to_major(&self) -> Result<Option<Vec<i64>>, Error> {
        let mut args = sys::PJRT_Buffer_GetMemoryLayout_Args::new();
        args.buffer = self.raw();
        // SAFETY: the buffer is live, and what the layout refers to with it.
        let order = unsafe {
            self.inner().api().call(&mut args)?;
            let tiled = &args.layout.tiled;
            let plain = args.layout.kind == sys::LAYOUT_TILED && tiled.num_tiles == 0;
            plain.then(|| api::slice(tiled.minor_to_major, tiled.minor_to_major_size).to_vec())
        };
        Ok(order)
    }

    /// Bytes that [`Buffer::to_host`] writes: dense, row-major, at least a byte an element.
    ///
    /// # Errors
    ///
    /// What the plugin reports.
    pub fn host_bytes(&self) -> Result<usize, Error> {
        to_host::host_bytes(self)
    }

    /// Copies the array into `dst`, dense and row-major whatever its layout on the device. `dst` comes back
    /// shortened to the array's size.
    ///
    /// # Errors
    ///
    /// [`crate::Code::InvalidArgument`] if `dst` is shorter than [`Buffer::host_bytes`]; else what the plugin reports.
    pub fn to_host(&self, dst: AlignedBytes) -> Result<ToHost, Error> {
        to_host::to_host(self, dst)
    }

    /// Fills `dst` with the array's bytes from `offset` on, as they lie on the device, padding and packing included.
    ///
    /// # Errors
    ///
    /// [`crate::Code::InvalidArgument`] if `dst` is empty or the array has no so many bytes on the device;
    /// [`crate::Code::Unimplemented`] from plugins that cannot; else what the plugin reports.
    pub fn part_to_host(&self, offset: u64, dst: AlignedBytes) -> Result<ToHost, Error> {
        to_host::part_to_host(self, offset, dst)
    }

    /// The array's own bytes, as they lie on the device, where that is memory of this process; `None` where it is not, or the plugin
    /// does not tell. The array must be filled ([`Buffer::ready`]). As long as the view lives, no execution takes the array's
    /// memory over: one that wants to fails.
    ///
    /// # Errors
    ///
    /// What the plugin reports, such as for a buffer that was deleted or donated; [`crate::Code::FailedPrecondition`] if the array
    /// is not filled.
    pub fn host_view(&self) -> Result<Option<HostView>, Error> {
        HostView::of(self)
    }

    /// Held while the plugin counts a view of this.
    pub(crate) fn counting(&self) -> MutexGuard<'_, ()> {
        self.0.views.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies to the default memory of another device of the same client.
    ///
    /// # Errors
    ///
    /// [`crate::Code::InvalidArgument`] for a device of another client; else what the plugin reports.
    pub fn copy_to_device(&self, device: &Device) -> Result<Self, Error> {
        const FUNCTION: &str = "PJRT_Buffer_CopyToDevice";
        self.inner().owns(device.client, FUNCTION)?;
        let mut args = sys::PJRT_Buffer_CopyToDevice_Args::new();
        args.buffer = self.raw();
        args.dst_device = device.raw;
        // SAFETY: buffer and device are live and of one client; the new buffer is handed over.
        unsafe {
            self.inner().api().call(&mut args)?;
            Self::take(self.inner(), args.dst_buffer, FUNCTION)
        }
    }

    /// Copies to another memory of the same client.
    ///
    /// # Errors
    ///
    /// [`crate::Code::InvalidArgument`] for a memory of another client; else what the plugin reports.
    pub fn copy_to_memory(&self, memory: &Memory) -> Result<Self, Error> {
        const FUNCTION: &str = "PJRT_Buffer_CopyToMemory";
        self.inner().owns(memory.client, FUNCTION)?;
        if memory.raw.is_null() {
            return Err(Error::own(
                crate::Code::Unimplemented,
                FUNCTION,
                "this plugin knows no memories; copy to the device",
            ));
        }
        let mut args = sys::PJRT_Buffer_CopyToMemory_Args::new();
        args.buffer = self.raw();
        args.dst_memory = memory.raw;
        // SAFETY: buffer and memory are live and of one client; the new buffer is handed over.
        unsafe {
            self.inner().api().call(&mut args)?;
            Self::take(self.inner(), args.dst_buffer, FUNCTION)
        }
    }

    /// Frees the array's memory as soon as running work no longer needs it; the handle stays, for nothing but
    /// [`Buffer::is_deleted`] and what is known of it.
    ///
    /// # Errors
    ///
    /// What the plugin reports.
    pub fn delete(&self) -> Result<(), Error> {
        let mut args = sys::PJRT_Buffer_Delete_Args::new();
        args.buffer = self.raw();
        // SAFETY: the buffer is live.
        unsafe { self.inner().api().call(&mut args) }
    }

    /// Whether the array was deleted, or donated to an execution.
    ///
    /// # Errors
    ///
    /// What the plugin reports.
    pub fn is_deleted(&self) -> Result<bool, Error> {
        let mut args = sys::PJRT_Buffer_IsDeleted_Args::new();
        args.buffer = self.raw();
        // SAFETY: the buffer is live.
        unsafe { self.inner().api().call(&mut args)? };
        Ok(args.is_deleted)
    }
}
