//! Devices and memories: what a client runs on.

use crate::api::{self, Api};
use crate::error::{Code, Error};
use crate::sys;
use crate::value::{self, OptionValue};
use std::ptr::null_mut;

/// Tells the clients of this process apart, so that a device of one is not handed to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClientId(pub(crate) u64);

/// A memory that a device can reach. Memories that several devices share appear once under each of them.
#[derive(Debug)]
pub struct Memory {
    pub(crate) client: ClientId,
    /// Null where the plugin knows no memories; then the device alone says where.
    pub(crate) raw: *mut sys::PJRT_Memory,
    pub(crate) device: *mut sys::PJRT_Device,
    id: i32,
    kind: String,
    kind_id: i32,
    debug_string: String,
    to_string: String,
}

/// A device that this process can use directly.
#[derive(Debug)]
pub struct Device {
    pub(crate) client: ClientId,
    pub(crate) raw: *mut sys::PJRT_Device,
    id: i32,
    local_hardware_id: i32,
    kind: String,
    debug_string: String,
    to_string: String,
    attributes: Vec<(String, OptionValue)>,
    memories: Vec<Memory>,
    default_memory: usize,
}

// SAFETY: the pointers are handles into the client, which the owner of this value keeps alive; PJRT lets any
// thread use them.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}
// SAFETY: as above.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// A device of any process that a client joins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalDevice {
    /// As [`Device::id`].
    pub id: i32,
    /// The process that can use it.
    pub process_index: i32,
}

/// A device's description, which lives as long as it does, and its id.
///
/// # Safety
///
/// `raw` is a live device of a client of this plugin.
unsafe fn identify(
    api: &Api,
    raw: *mut sys::PJRT_Device,
) -> Result<(*mut sys::PJRT_DeviceDescription, i32), Error> {
    let mut args = sys::PJRT_Device_GetDescription_Args::new();
    args.device = raw;
    // SAFETY: the device is live.
    unsafe { api.call(&mut args)? };
    let description = args.device_description;

    let mut args = sys::PJRT_DeviceDescription_Id_Args::new();
    args.device_description = description;
    // SAFETY: the description belongs to the device.
    unsafe { api.call(&mut args)? };
    Ok((description, args.id))
}

impl GlobalDevice {
    /// # Safety
    ///
    /// `raw` is a live device of a client of this plugin.
    pub(crate) unsafe fn describe(api: &Api, raw: *mut sys::PJRT_Device) -> Result<Self, Error> {
        // SAFETY: the device is live.
        let (description, id) = unsafe { identify(api, raw)? };

        let mut args = sys::PJRT_DeviceDescription_ProcessIndex_Args::new();
        args.device_description = description;
        // SAFETY: the description belongs to the device.
        unsafe { api.call(&mut args)? };
        Ok(Self {
            id,
            process_index: args.process_index,
        })
    }
}

/// Queries of one string: sets the handle, calls, copies the text.
macro_rules! text_of {
    ($api:expr, $args:ident, $handle:ident = $raw:expr, $text:ident, $size:ident) => {{
        let mut args = sys::$args::new();
        args.$handle = $raw;
        // SAFETY: the handle is live; the text belongs to it and is copied at once.
        unsafe {
            $api.call(&mut args)?;
            api::text(args.$text, args.$size)
        }
    }};
}
pub(crate) use text_of;

impl Device {
    /// Asks all that is to know about a device.
    ///
    /// # Safety
    ///
    /// `raw` is a live device of a client of this plugin.
    pub(crate) unsafe fn describe(
        api: &Api,
        client: ClientId,
        raw: *mut sys::PJRT_Device,
    ) -> Result<Self, Error> {
        // SAFETY: the device is live.
        let (description, id) = unsafe { identify(api, raw)? };

        let mut args = sys::PJRT_Device_LocalHardwareId_Args::new();
        args.device = raw;
        // SAFETY: the device is live.
        let local_hardware_id = match unsafe { api.call(&mut args) } {
            Ok(()) => args.local_hardware_id,
            // Not every plugin has hardware to number.
            Err(_) => -1,
        };

        let mut args = sys::PJRT_DeviceDescription_Attributes_Args::new();
        args.device_description = description;
        // SAFETY: the description belongs to the device, and the attributes to it; they are copied at once.
        let attributes = unsafe {
            api.call(&mut args)?;
            value::from_raw(args.attributes, args.num_attributes)
        };
        // SAFETY: the device is live.
        let (memories, default_memory) = unsafe { memories_of(api, client, raw)? };
        Ok(Self {
            client,
            raw,
            id,
            local_hardware_id,
            kind: text_of!(
                api,
                PJRT_DeviceDescription_Kind_Args,
                device_description = description,
                device_kind,
                device_kind_size
            ),
            debug_string: text_of!(
                api,
                PJRT_DeviceDescription_DebugString_Args,
                device_description = description,
                debug_string,
                debug_string_size
            ),
            to_string: text_of!(
                api,
                PJRT_DeviceDescription_ToString_Args,
                device_description = description,
                to_string,
                to_string_size
            ),
            attributes,
            memories,
            default_memory,
        })
    }

    /// The plugin's number for the device, unique among all devices of the runtime.
    #[must_use]
    pub fn id(&self) -> i32 {
        self.id
    }

    /// Number of the hardware on this host, such as a CUDA ordinal; -1 where there is none.
    #[must_use]
    pub fn local_hardware_id(&self) -> i32 {
        self.local_hardware_id
    }

    /// Vendor's name of the hardware, such as `TPU v5e` or `cpu`.
    #[must_use]
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Long text for logs.
    #[must_use]
    pub fn debug_string(&self) -> &str {
        &self.debug_string
    }

    /// Short text for users, such as `CpuDevice(id=0)`.
    #[must_use]
    pub fn to_string(&self) -> &str {
        &self.to_string
    }

    /// Facts by name, as the plugin gives them.
    #[must_use]
    pub fn attributes(&self) -> &[(String, OptionValue)] {
        &self.attributes
    }

    /// Memories that the device can reach; at least one.
    #[must_use]
    pub fn memories(&self) -> &[Memory] {
        &self.memories
    }

    /// Position in [`Device::memories`] of the one used where nothing else is said.
    #[must_use]
    pub fn default_memory(&self) -> usize {
        self.default_memory
    }

    /// The memory of a kind, such as `device` or `pinned_host`.
    #[must_use]
    pub fn memory_of_kind(&self, kind: &str) -> Option<&Memory> {
        self.memories.iter().find(|memory| memory.kind == kind)
    }
}

impl Memory {
    /// The plugin's number for the memory, unique among all memories of the runtime.
    #[must_use]
    pub fn id(&self) -> i32 {
        self.id
    }

    /// Kind, such as `device`, `pinned_host`, `unpinned_host`.
    #[must_use]
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Number of the kind.
    #[must_use]
    pub fn kind_id(&self) -> i32 {
        self.kind_id
    }

    /// Long text for logs.
    #[must_use]
    pub fn debug_string(&self) -> &str {
        &self.debug_string
    }

    /// Short text for users.
    #[must_use]
    pub fn to_string(&self) -> &str {
        &self.to_string
    }

    /// # Safety
    ///
    /// `raw` is a live memory of the plugin, reachable by `device`.
    unsafe fn describe(
        api: &Api,
        client: ClientId,
        raw: *mut sys::PJRT_Memory,
        device: *mut sys::PJRT_Device,
    ) -> Result<Self, Error> {
        let mut args = sys::PJRT_Memory_Id_Args::new();
        args.memory = raw;
        // SAFETY: the memory is live.
        unsafe { api.call(&mut args)? };
        let id = args.id;
        let mut args = sys::PJRT_Memory_Kind_Id_Args::new();
        args.memory = raw;
        // SAFETY: the memory is live.
        unsafe { api.call(&mut args)? };
        Ok(Self {
            client,
            raw,
            device,
            id,
            kind: text_of!(api, PJRT_Memory_Kind_Args, memory = raw, kind, kind_size),
            kind_id: args.kind_id,
            debug_string: text_of!(
                api,
                PJRT_Memory_DebugString_Args,
                memory = raw,
                debug_string,
                debug_string_size
            ),
            to_string: text_of!(
                api,
                PJRT_Memory_ToString_Args,
                memory = raw,
                to_string,
                to_string_size
            ),
        })
    }

    /// Stands for a device's only memory where the plugin knows no memories.
    fn implied(client: ClientId, device: *mut sys::PJRT_Device) -> Self {
        Self {
            client,
            raw: null_mut(),
            device,
            id: 0,
            kind: "device".to_owned(),
            kind_id: 0,
            debug_string: "device".to_owned(),
            to_string: "device".to_owned(),
        }
    }
}

/// The memories of a device and which is the default.
///
/// # Safety
///
/// `device` is a live device of the plugin.
unsafe fn memories_of(
    api: &Api,
    client: ClientId,
    device: *mut sys::PJRT_Device,
) -> Result<(Vec<Memory>, usize), Error> {
    let mut args = sys::PJRT_Device_AddressableMemories_Args::new();
    args.device = device;
    // SAFETY: the device is live.
    match unsafe { api.call(&mut args) } {
        Ok(()) => {}
        Err(error) if error.code() == Code::Unimplemented => {
            return Ok((vec![Memory::implied(client, device)], 0));
        }
        Err(error) => return Err(error),
    }
    // SAFETY: the list belongs to the device and is read at once.
    let raw = unsafe { api::slice(args.memories, args.num_memories) };
    if raw.is_empty() {
        return Ok((vec![Memory::implied(client, device)], 0));
    }
    let memories = raw
        .iter()
        // SAFETY: the plugin has just listed it.
        .map(|memory| unsafe { Memory::describe(api, client, *memory, device) })
        .collect::<Result<Vec<_>, _>>()?;

    let mut args = sys::PJRT_Device_DefaultMemory_Args::new();
    args.device = device;
    // SAFETY: the device is live.
    let default = match unsafe { api.call(&mut args) } {
        Ok(()) => memories
            .iter()
            .position(|memory| memory.raw == args.memory)
            .unwrap_or(0),
        Err(error) if error.code() == Code::Unimplemented => 0,
        Err(error) => return Err(error),
    };
    Ok((memories, default))
}
