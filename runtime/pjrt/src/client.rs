//! A client: a runtime of the plugin with its devices.

use crate::api;
use crate::buffer::Buffer;
use crate::device::{ClientId, Device, GlobalDevice, Memory, text_of};
use crate::element::ElementType;
use crate::error::Error;
use crate::event;
use crate::executable::LoadedExecutable;
use crate::host::HostBytes;
use crate::key_value::{KeyValueStore, Lent};
use crate::plugin::Plugin;
use crate::sys;
use crate::transfer::from_host;
use crate::value::{self, OptionValue};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A runtime of a plugin. Clones share it; it ends when the last clone, buffer and executable of it is gone.
#[derive(Clone)]
pub struct Client(pub(crate) Arc<ClientInner>);

pub(crate) struct ClientInner {
    pub(crate) id: ClientId,
    devices: Vec<Device>,
    platform_name: String,
    platform_version: String,
    // Last: the object goes when all that describes it is gone.
    raw: RawClient,
}

/// The plugin's client object, destroyed on drop.
struct RawClient {
    plugin: Arc<Plugin>,
    raw: NonNull<sys::PJRT_Client>,
    /// Used by the plugin until the client is destroyed.
    lent: Option<Lent>,
}

// SAFETY: PJRT clients may be used from any thread, by several at once.
unsafe impl Send for RawClient {}
// SAFETY: as above.
unsafe impl Sync for RawClient {}

impl Drop for RawClient {
    fn drop(&mut self) {
        let raw = Destroy {
            plugin: Arc::clone(&self.plugin),
            raw: self.raw,
            _lent: self.lent.take(),
        };
        if event::in_callback() {
            // Destroying a client waits for the plugin's threads to end, and this is one of them.
            std::thread::spawn(move || raw.run());
        } else {
            raw.run();
        }
    }
}

struct Destroy {
    plugin: Arc<Plugin>,
    raw: NonNull<sys::PJRT_Client>,
    _lent: Option<Lent>,
}

// SAFETY: as for `RawClient`.
unsafe impl Send for Destroy {}

impl Destroy {
    fn run(self) {
        let mut args = sys::PJRT_Client_Destroy_Args::new();
        args.client = self.raw.as_ptr();
        // SAFETY: the client is live and its last owner gives it up; buffers and executables own it too.
        if let Err(error) = unsafe { self.plugin.api().call(&mut args) } {
            tracing::warn!(%error, "a client was not destroyed");
        }
    }
}

impl ClientInner {
    pub(crate) fn plugin(&self) -> &Arc<Plugin> {
        &self.raw.plugin
    }

    pub(crate) fn api(&self) -> &crate::api::Api {
        self.raw.plugin.api()
    }

    pub(crate) fn raw(&self) -> *mut sys::PJRT_Client {
        self.raw.raw.as_ptr()
    }

    /// Refuses what belongs to another client: the plugin would take its handle for one of its own.
    pub(crate) fn owns(&self, other: ClientId, function: &'static str) -> Result<(), Error> {
        if other == self.id {
            return Ok(());
        }
        Err(Error::invalid(
            function,
            "an argument belongs to another client",
        ))
    }
}

impl std::fmt::Debug for Client {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Client")
            .field("plugin", self.plugin())
            .field("platform", &self.platform_name())
            .field("devices", &self.devices().len())
            .finish()
    }
}

impl Client {
    /// Starts a runtime. Which options exist is the plugin's matter; newer ones refuse an unknown option,
    /// older ones (API 0.106 and before, on CPU) ignore it.
    ///
    /// CPU plugins take `cpu_device_count` (an integer, four if it is not given).
    ///
    /// # Errors
    ///
    /// What the plugin reports, such as an unknown option or missing hardware.
    pub fn create(plugin: &Arc<Plugin>, options: &[(String, OptionValue)]) -> Result<Self, Error> {
        Self::create_with(plugin, options, None)
    }

    /// As [`Client::create`], as one of several processes that the plugin joins to one client. They find each other through
    /// `store`; which of them this one is, and how many they are, the options say (`node_id`, `num_nodes` for GPUs). Blocks
    /// until all have come, for as long as the plugin waits.
    ///
    /// The plugin uses the store as long as the client lives; afterwards its calls fail.
    ///
    /// # Errors
    ///
    /// As [`Client::create`]; the store's own errors come back as the plugin puts them.
    pub fn create_shared(
        plugin: &Arc<Plugin>,
        options: &[(String, OptionValue)],
        store: Arc<dyn KeyValueStore>,
    ) -> Result<Self, Error> {
        Self::create_with(plugin, options, Some(Lent::new(store)))
    }

    fn create_with(
        plugin: &Arc<Plugin>,
        options: &[(String, OptionValue)],
        lent: Option<Lent>,
    ) -> Result<Self, Error> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let api = plugin.api();
        let options = value::to_raw(options);
        let mut args = sys::PJRT_Client_Create_Args::new();
        args.create_options = options.as_ptr();
        args.num_options = options.len();
        if let Some(lent) = &lent {
            lent.fill(&mut args);
        }
        // SAFETY: the options live across the call. The callbacks are null, as is allowed, or all of one store, whose user
        // argument lives for good.
        unsafe { api.call(&mut args)? };
        let raw = NonNull::new(args.client)
            .ok_or_else(|| Error::contract("PJRT_Client_Create", "returned no client"))?;
        // From here on the client is destroyed whatever fails.
        let raw = RawClient {
            plugin: Arc::clone(plugin),
            raw,
            lent,
        };
        let id = ClientId(NEXT.fetch_add(1, Ordering::Relaxed));
        let client = raw.raw.as_ptr();

        let mut args = sys::PJRT_Client_AddressableDevices_Args::new();
        args.client = client;
        // SAFETY: the client is live.
        unsafe { api.call(&mut args)? };
        // SAFETY: the list lives as long as the client.
        let devices = unsafe { api::slice(args.devices, args.num_devices) }
            .iter()
            // SAFETY: the plugin has just listed it.
            .map(|device| unsafe { Device::describe(api, id, *device) })
            .collect::<Result<Vec<_>, _>>()?;
        let platform_name = text_of!(
            api,
            PJRT_Client_PlatformName_Args,
            client = client,
            platform_name,
            platform_name_size
        );
        let platform_version = text_of!(
            api,
            PJRT_Client_PlatformVersion_Args,
            client = client,
            platform_version,
            platform_version_size
        );
        Ok(Self(Arc::new(ClientInner {
            id,
            devices,
            platform_name,
            platform_version,
            raw,
        })))
    }

    /// The plugin that this client came from.
    #[must_use]
    pub fn plugin(&self) -> &Arc<Plugin> {
        self.0.plugin()
    }

    /// Platform, such as `cpu`, `cuda`, `tpu`.
    #[must_use]
    pub fn platform_name(&self) -> &str {
        &self.0.platform_name
    }

    /// Version text of the platform, in the plugin's own form.
    #[must_use]
    pub fn platform_version(&self) -> &str {
        &self.0.platform_version
    }

    /// Devices that this process can use, in the plugin's order.
    #[must_use]
    pub fn devices(&self) -> &[Device] {
        &self.0.devices
    }

    /// This process's number among those that the client joins; 0 where it is alone.
    ///
    /// # Errors
    ///
    /// What the plugin reports.
    pub fn process_index(&self) -> Result<i32, Error> {
        let mut args = sys::PJRT_Client_ProcessIndex_Args::new();
        args.client = self.0.raw();
        // SAFETY: the client is live.
        unsafe { self.0.api().call(&mut args)? };
        Ok(args.process_index)
    }

    /// The devices of all processes that the client joins, those of this one included.
    ///
    /// # Errors
    ///
    /// What the plugin reports.
    pub fn global_devices(&self) -> Result<Vec<GlobalDevice>, Error> {
        let api = self.0.api();
        let mut args = sys::PJRT_Client_Devices_Args::new();
        args.client = self.0.raw();
        // SAFETY: the client is live.
        unsafe { api.call(&mut args)? };
        // SAFETY: the list lives as long as the client.
        unsafe { api::slice(args.devices, args.num_devices) }
            .iter()
            // SAFETY: the plugin has just listed it.
            .map(|device| unsafe { GlobalDevice::describe(api, *device) })
            .collect()
    }

    /// Compiles `program` and loads it on the devices that `options` name. Blocks for as long as that takes.
    ///
    /// `format` is `mlir` (StableHLO as text, bytecode or portable artifact) or `hlo` (`HloModuleProto`);
    /// `options` is a serialised `xla.CompileOptionsProto`.
    ///
    /// # Errors
    ///
    /// What the plugin reports.
    pub fn compile(
        &self,
        program: &[u8],
        format: &str,
        options: &[u8],
    ) -> Result<LoadedExecutable, Error> {
        let program = sys::PJRT_Program {
            struct_size: size_of::<sys::PJRT_Program>(),
            extension_start: null_mut(),
            code: program.as_ptr().cast_mut().cast(),
            code_size: program.len(),
            format: format.as_ptr().cast(),
            format_size: format.len(),
        };
        let mut args = sys::PJRT_Client_Compile_Args::new();
        args.client = self.0.raw();
        args.program = &raw const program;
        args.compile_options = options.as_ptr().cast();
        args.compile_options_size = options.len();
        // SAFETY: the client is live; program and options live across the call and are only read.
        unsafe {
            self.0.api().call(&mut args)?;
            LoadedExecutable::take(&self.0, args.executable, "PJRT_Client_Compile")
        }
    }

    /// Loads an executable that [`LoadedExecutable::serialize`] of the same build of the plugin wrote.
    ///
    /// With `overridden_options`, a serialised `xla.CompileOptionsProto`, it is loaded under these instead of those
    /// it was compiled with, on the devices that they name.
    ///
    /// # Errors
    ///
    /// What the plugin reports; [`crate::Code::Unimplemented`] for `overridden_options` on a plugin before API 0.71.
    pub fn deserialize(
        &self,
        bytes: &[u8],
        overridden_options: Option<&[u8]>,
    ) -> Result<LoadedExecutable, Error> {
        const FUNCTION: &str = "PJRT_Executable_DeserializeAndLoad";
        let mut args = sys::PJRT_Executable_DeserializeAndLoad_Args::new();
        args.client = self.0.raw();
        args.serialized_executable = bytes.as_ptr().cast();
        args.serialized_executable_size = bytes.len();
        if let Some(options) = overridden_options {
            // An older plugin would not see the field, and load for the wrong devices.
            if self.plugin().api_version() < (0, 71) {
                return Err(Error::own(
                    crate::Code::Unimplemented,
                    FUNCTION,
                    "this plugin is older than API 0.71 and cannot load an executable for other devices \
                     than those it was compiled for",
                ));
            }
            args.overridden_serialized_compile_options = options.as_ptr().cast();
            args.overridden_serialized_compile_options_size = options.len();
        }
        // SAFETY: the client is live; bytes and options live across the call and are only read.
        unsafe {
            self.0.api().call(&mut args)?;
            LoadedExecutable::take(&self.0, args.loaded_executable, FUNCTION)
        }
    }

    /// Makes an array in `memory` from host bytes.
    ///
    /// `dims` may hold zeros and may be empty (a scalar). Without `byte_strides` the bytes are dense and row-major;
    /// with them, each dimension has its step in bytes, which may be negative: then the host's first byte is the
    /// lowest address used, not that of the element at index zero. Element types narrower than a byte take a whole
    /// byte each ([`ElementType::host_bytes`]). More bytes than needed are allowed.
    ///
    /// The plugin may keep using `host` as long as the buffer lives, without a copy, if its bytes start at a
    /// multiple of 64; `host` is dropped when the plugin is done with it.
    ///
    /// # Errors
    ///
    /// [`crate::Code::InvalidArgument`] if the bytes do not hold such an array or the memory is another client's; else
    /// what the plugin reports.
    pub fn buffer_from_host(
        &self,
        host: HostBytes,
        ty: ElementType,
        dims: &[i64],
        byte_strides: Option<&[i64]>,
        memory: &Memory,
    ) -> Result<Buffer, Error> {
        from_host::from_host(self, host, ty, dims, byte_strides, None, memory)
    }

    /// As [`Client::buffer_from_host`] for dense bytes, with the order in which the device lays the dimensions out, the one
    /// that varies fastest first.
    ///
    /// # Errors
    ///
    /// As [`Client::buffer_from_host`]; [`crate::Code::InvalidArgument`] also for an order that does not name each
    /// dimension once, or an array without elements.
    pub fn buffer_from_host_in_order(
        &self,
        host: HostBytes,
        ty: ElementType,
        dims: &[i64],
        minor_to_major: &[i64],
        memory: &Memory,
    ) -> Result<Buffer, Error> {
        from_host::from_host(self, host, ty, dims, None, Some(minor_to_major), memory)
    }

    /// The layout that the plugin gives an array where nothing else is asked, as XLA writes it, such as `{1,0}`.
    ///
    /// # Errors
    ///
    /// [`crate::Code::Unimplemented`] if the plugin has no layouts extension; else what the plugin reports.
    pub fn default_layout(&self, ty: ElementType, dims: &[i64]) -> Result<String, Error> {
        self.takes(ty, "PJRT_Layouts_PJRT_Client_GetDefaultLayout")?;
        let api = self.0.api();
        let mut args = sys::PJRT_Layouts_PJRT_Client_GetDefaultLayout_Args::new();
        args.client = self.0.raw();
        args.element_type = ty.number();
        args.dims = dims.as_ptr();
        args.num_dims = dims.len();
        // SAFETY: the client is live and the dims live across the call.
        unsafe { api.call_layouts(&mut args)? };
        let layout = args.layout;

        let mut args = sys::PJRT_Layouts_MemoryLayout_Serialize_Args::new();
        args.layout = layout;
        // SAFETY: the layout has just been handed over; the text lives until the deleter is called.
        let text = unsafe {
            api.call_layouts(&mut args).map(|()| {
                let text = api::text(args.serialized_bytes, args.serialized_bytes_size);
                if let Some(delete) = args.serialized_layout_deleter {
                    delete(args.serialized_layout);
                }
                text
            })
        };
        let mut args = sys::PJRT_Layouts_MemoryLayout_Destroy_Args::new();
        args.layout = layout;
        // SAFETY: the layout is ours and not used after this.
        unsafe { api.call_layouts(&mut args)? };
        text
    }

    /// Refuses element types at which the plugin would abort.
    pub(crate) fn takes(&self, ty: ElementType, function: &'static str) -> Result<(), Error> {
        if ty == ElementType::Token {
            return Err(Error::invalid(function, "a token is no array"));
        }
        ty.known_to(self.plugin().api_version(), function)
    }
}
