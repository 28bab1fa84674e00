//! Programs that are compiled and loaded.

use crate::api;
use crate::buffer::Buffer;
use crate::client::{Client, ClientInner};
use crate::context::ExecuteContext;
use crate::device::Device;
use crate::device::text_of;
use crate::element::ElementType;
use crate::error::Error;
use crate::execute::{self, ExecuteOptions, Execution, OneExecution};
use crate::sys;
use crate::value::{self, OptionValue};
use std::ptr::{NonNull, null, null_mut};
use std::sync::Arc;

/// A program loaded on its devices. Clones share it.
#[derive(Clone)]
pub struct LoadedExecutable(Arc<Inner>);

struct Inner {
    name: String,
    num_outputs: usize,
    device_ids: Vec<i32>,
    // The description goes before what it describes, both before the client.
    description: Description,
    raw: Raw,
}

/// The plugin's loaded executable, destroyed on drop.
struct Raw {
    client: Arc<ClientInner>,
    raw: NonNull<sys::PJRT_LoadedExecutable>,
}

/// The plugin's description of a loaded executable, destroyed on drop.
struct Description {
    client: Arc<ClientInner>,
    raw: NonNull<sys::PJRT_Executable>,
}

// SAFETY: PJRT executables may be used from any thread, by several at once.
unsafe impl Send for Raw {}
// SAFETY: as above.
unsafe impl Sync for Raw {}
// SAFETY: as above.
unsafe impl Send for Description {}
// SAFETY: as above.
unsafe impl Sync for Description {}

impl Drop for Raw {
    fn drop(&mut self) {
        let mut args = sys::PJRT_LoadedExecutable_Destroy_Args::new();
        args.executable = self.raw.as_ptr();
        // SAFETY: the executable is live and its last owner gives it up.
        if let Err(error) = unsafe { self.client.api().call(&mut args) } {
            tracing::warn!(%error, "an executable was not destroyed");
        }
    }
}

impl Drop for Description {
    fn drop(&mut self) {
        let mut args = sys::PJRT_Executable_Destroy_Args::new();
        args.executable = self.raw.as_ptr();
        // SAFETY: the description is live and its last owner gives it up.
        if let Err(error) = unsafe { self.client.api().call(&mut args) } {
            tracing::warn!(%error, "an executable's description was not destroyed");
        }
    }
}

/// Memory that one execution needs on one device, in bytes, as the compiler planned it. Fields that the plugin is
/// too old to fill are zero.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[expect(
    missing_docs,
    reason = "the names are those of xla::CompiledMemoryStats and say what they count"
)]
pub struct MemoryStats {
    pub generated_code_size_in_bytes: i64,
    pub argument_size_in_bytes: i64,
    pub output_size_in_bytes: i64,
    /// Arguments reused for outputs.
    pub alias_size_in_bytes: i64,
    pub temp_size_in_bytes: i64,
    pub host_generated_code_size_in_bytes: i64,
    pub host_argument_size_in_bytes: i64,
    pub host_output_size_in_bytes: i64,
    pub host_alias_size_in_bytes: i64,
    pub host_temp_size_in_bytes: i64,
    /// Since API 0.72.
    pub peak_memory_in_bytes: i64,
    /// Since API 0.90.
    pub total_size_in_bytes: i64,
    /// Since API 0.104.
    pub total_allocation_bytes: i64,
    /// Since API 0.104.
    pub indefinite_allocations: i64,
    /// Since API 0.104.
    pub peak_unpadded_heap_bytes: i64,
}

impl std::fmt::Debug for LoadedExecutable {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            out,
            "LoadedExecutable({} on {:?})",
            self.0.name, self.0.device_ids
        )
    }
}

impl LoadedExecutable {
    /// Takes over an executable that a function of the plugin has just returned.
    ///
    /// # Safety
    ///
    /// `raw` is null or a live loaded executable of `client` that the caller owns.
    pub(crate) unsafe fn take(
        client: &Arc<ClientInner>,
        raw: *mut sys::PJRT_LoadedExecutable,
        origin: &'static str,
    ) -> Result<Self, Error> {
        let api = client.api();
        let raw =
            NonNull::new(raw).ok_or_else(|| Error::contract(origin, "returned no executable"))?;
        let raw = Raw {
            client: Arc::clone(client),
            raw,
        };

        let mut args = sys::PJRT_LoadedExecutable_GetExecutable_Args::new();
        args.loaded_executable = raw.raw.as_ptr();
        // SAFETY: the executable is live; its description is handed over.
        unsafe { api.call(&mut args)? };
        let description = NonNull::new(args.executable).ok_or_else(|| {
            Error::contract(
                "PJRT_LoadedExecutable_GetExecutable",
                "returned no executable",
            )
        })?;
        let description = Description {
            client: Arc::clone(client),
            raw: description,
        };
        let executable = description.raw.as_ptr();

        let mut args = sys::PJRT_Executable_NumOutputs_Args::new();
        args.executable = executable;
        // SAFETY: the description is live.
        unsafe { api.call(&mut args)? };
        let num_outputs = args.num_outputs;

        let mut args = sys::PJRT_LoadedExecutable_AddressableDevices_Args::new();
        args.executable = raw.raw.as_ptr();
        // SAFETY: the executable is live; the list belongs to it, and the devices in it to the client.
        let devices = unsafe {
            api.call(&mut args)?;
            api::slice(args.devices, args.num_devices)
        };
        let device_ids = devices
            .iter()
            .map(|device| {
                let known = Client(Arc::clone(client));
                known
                    .devices()
                    .iter()
                    .find(|known| known.raw == *device)
                    .map(|known| known.id())
            })
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| {
                Error::contract(
                    "PJRT_LoadedExecutable_AddressableDevices",
                    "listed a device that is not the client's",
                )
            })?;
        let name = text_of!(
            api,
            PJRT_Executable_Name_Args,
            executable = executable,
            executable_name,
            executable_name_size
        );
        Ok(Self(Arc::new(Inner {
            name,
            num_outputs,
            device_ids,
            description,
            raw,
        })))
    }

    pub(crate) fn inner(&self) -> &Arc<ClientInner> {
        &self.0.raw.client
    }

    pub(crate) fn raw(&self) -> *mut sys::PJRT_LoadedExecutable {
        self.0.raw.raw.as_ptr()
    }

    fn api(&self) -> &crate::api::Api {
        self.inner().api()
    }

    fn description(&self) -> *mut sys::PJRT_Executable {
        self.0.description.raw.as_ptr()
    }

    /// The client that it is loaded in.
    #[must_use]
    pub fn client(&self) -> Client {
        Client(Arc::clone(self.inner()))
    }

    /// Name of the module, such as `jit_step`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Arrays that one execution gives on each device.
    #[must_use]
    pub fn num_outputs(&self) -> usize {
        self.0.num_outputs
    }

    /// Ids of the devices that it runs on here, in the order of an execution's argument lists.
    #[must_use]
    pub fn device_ids(&self) -> &[i32] {
        &self.0.device_ids
    }

    /// Element type of each output.
    ///
    /// # Errors
    ///
    /// What the plugin reports.
    pub fn output_types(&self) -> Result<Vec<ElementType>, Error> {
        const FUNCTION: &str = "PJRT_Executable_OutputElementTypes";
        let mut args = sys::PJRT_Executable_OutputElementTypes_Args::new();
        args.executable = self.description();
        // SAFETY: the description is live, and the list belongs to it.
        let types = unsafe {
            self.api().call(&mut args)?;
            api::slice(args.output_types.cast_const(), args.num_output_types)
        };
        types
            .iter()
            .map(|number| ElementType::reported(*number, FUNCTION))
            .collect()
    }

    /// Extents of each output on one device.
    ///
    /// # Errors
    ///
    /// What the plugin reports.
    pub fn output_dims(&self) -> Result<Vec<Vec<i64>>, Error> {
        let mut args = sys::PJRT_Executable_OutputDimensions_Args::new();
        args.executable = self.description();
        // SAFETY: the description is live, and the lists belong to it: one rank an output, then as many extents as
        // the ranks add up to.
        unsafe {
            self.api().call(&mut args)?;
            let ranks = api::slice(args.dim_sizes, args.num_outputs);
            let mut all = api::slice(args.dims, ranks.iter().sum());
            let mut outputs = Vec::with_capacity(ranks.len());
            for rank in ranks {
                let (dims, rest) = all.split_at_checked(*rank).unwrap_or_default();
                outputs.push(dims.to_vec());
                all = rest;
            }
            Ok(outputs)
        }
    }

    /// Kind of memory that each output lies in.
    ///
    /// # Errors
    ///
    /// What the plugin reports.
    pub fn output_memory_kinds(&self) -> Result<Vec<String>, Error> {
        let mut args = sys::PJRT_Executable_OutputMemoryKinds_Args::new();
        args.executable = self.description();
        // SAFETY: the description is live, and the texts belong to it: a pointer and a length an output.
        unsafe {
            self.api().call(&mut args)?;
            let texts = api::slice(args.memory_kinds, args.num_outputs);
            let sizes = api::slice(args.memory_kind_sizes, args.num_outputs);
            Ok(texts
                .iter()
                .zip(sizes)
                .map(|(text, size)| api::text(*text, *size))
                .collect())
        }
    }

    /// The optimised program, in the plugin's format: `hlo_with_config` (a serialised `xla.HloModuleProtoWithConfig`)
    /// from those built on XLA.
    ///
    /// # Errors
    ///
    /// What the plugin reports.
    pub fn optimized_program(&self) -> Result<Vec<u8>, Error> {
        let mut program = sys::PJRT_Program {
            struct_size: size_of::<sys::PJRT_Program>(),
            extension_start: null_mut(),
            code: null_mut(),
            code_size: 0,
            format: null(),
            format_size: 0,
        };
        let mut args = sys::PJRT_Executable_OptimizedProgram_Args::new();
        args.executable = self.description();
        args.program = &raw mut program;
        // SAFETY: the description is live, the program lives across the call; no code asks for the size.
        unsafe { self.api().call(&mut args)? };
        let mut code = vec![0_u8; program.code_size];
        program.code = code.as_mut_ptr().cast();
        // Anew: the plugin may have written to it.
        args.program = &raw mut program;
        // SAFETY: as above; the code has the size that was asked for.
        unsafe { self.api().call(&mut args)? };
        Ok(code)
    }

    /// The executable as bytes that [`Client::deserialize`] of the same build of the plugin takes.
    ///
    /// # Errors
    ///
    /// What the plugin reports.
    pub fn serialize(&self) -> Result<Vec<u8>, Error> {
        let mut args = sys::PJRT_Executable_Serialize_Args::new();
        args.executable = self.description();
        // SAFETY: the description is live; the bytes live until the deleter is called, once.
        unsafe {
            self.api().call(&mut args)?;
            let bytes = api::slice(
                args.serialized_bytes.cast::<u8>(),
                args.serialized_bytes_size,
            )
            .to_vec();
            if let Some(delete) = args.serialized_executable_deleter {
                delete(args.serialized_executable);
            }
            Ok(bytes)
        }
    }

    /// The plugin's own hash of the executable.
    ///
    /// # Errors
    ///
    /// What the plugin reports; some have none.
    pub fn fingerprint(&self) -> Result<Vec<u8>, Error> {
        let mut args = sys::PJRT_Executable_Fingerprint_Args::new();
        args.executable = self.description();
        // SAFETY: the description is live, and the bytes belong to it.
        unsafe {
            self.api().call(&mut args)?;
            let bytes = args.executable_fingerprint.cast::<u8>();
            Ok(api::slice(bytes, args.executable_fingerprint_size).to_vec())
        }
    }

    /// Memory that an execution needs.
    ///
    /// # Errors
    ///
    /// What the plugin reports.
    pub fn memory_stats(&self) -> Result<MemoryStats, Error> {
        let mut args = sys::PJRT_Executable_GetCompiledMemoryStats_Args::new();
        args.executable = self.description();
        // SAFETY: the description is live.
        unsafe { self.api().call(&mut args)? };
        Ok(MemoryStats {
            generated_code_size_in_bytes: args.generated_code_size_in_bytes,
            argument_size_in_bytes: args.argument_size_in_bytes,
            output_size_in_bytes: args.output_size_in_bytes,
            alias_size_in_bytes: args.alias_size_in_bytes,
            temp_size_in_bytes: args.temp_size_in_bytes,
            host_generated_code_size_in_bytes: args.host_generated_code_size_in_bytes,
            host_argument_size_in_bytes: args.host_argument_size_in_bytes,
            host_output_size_in_bytes: args.host_output_size_in_bytes,
            host_alias_size_in_bytes: args.host_alias_size_in_bytes,
            host_temp_size_in_bytes: args.host_temp_size_in_bytes,
            peak_memory_in_bytes: args.peak_memory_in_bytes,
            total_size_in_bytes: args.total_size_in_bytes,
            total_allocation_bytes: args.total_allocation_bytes,
            indefinite_allocations: args.indefinite_allocations,
            peak_unpadded_heap_bytes: args.peak_unpadded_heap_bytes,
        })
    }

    /// Costs by name, such as `flops` and `bytes accessed`.
    ///
    /// # Errors
    ///
    /// What the plugin reports.
    pub fn cost_analysis(&self) -> Result<Vec<(String, OptionValue)>, Error> {
        let mut args = sys::PJRT_Executable_GetCostAnalysis_Args::new();
        args.executable = self.description();
        // SAFETY: the description is live, and the properties belong to it; they are copied at once.
        unsafe {
            self.api().call(&mut args)?;
            Ok(value::from_raw(args.properties, args.num_properties))
        }
    }

    /// Size of the machine code in bytes, as far as the plugin knows it.
    ///
    /// # Errors
    ///
    /// What the plugin reports.
    pub fn generated_code_bytes(&self) -> Result<i64, Error> {
        let mut args = sys::PJRT_Executable_SizeOfGeneratedCodeInBytes_Args::new();
        args.executable = self.description();
        // SAFETY: the description is live.
        unsafe { self.api().call(&mut args)? };
        Ok(args.size_in_bytes)
    }

    /// Starts an execution: `args[device][argument]`, devices in the order of [`LoadedExecutable::device_ids`].
    ///
    /// Arguments that the program donates are deleted by it, unless `options` names them.
    ///
    /// Returns before the work is done, but not always at once: XLA's CPU client runs cheap programs on the calling
    /// thread, and lets at most 32 executions of a device be under way, blocking the next call until one ends.
    /// Several threads may call at once.
    ///
    /// # Errors
    ///
    /// [`crate::Code::InvalidArgument`] if the lists do not fit the executable or hold another client's buffers; else
    /// what the plugin reports. Errors of the running program come with the outputs and events instead.
    pub fn execute(
        &self,
        args: &[Vec<&Buffer>],
        options: &ExecuteOptions,
    ) -> Result<Execution, Error> {
        execute::execute(self, args, options)
    }

    /// Starts an execution on one device, which may be any for an executable that was compiled or loaded as portable
    /// (`compile_portable_executable`). Targets that it calls get `context`.
    ///
    /// XLA's CPU client runs cheap programs on the calling thread, and returns when they are done, also if they call targets that end
    /// their calls later: where such calls wait for other devices, each device needs a thread of its own to call this.
    ///
    /// # Errors
    ///
    /// As [`LoadedExecutable::execute`].
    pub fn execute_on(
        &self,
        device: &Device,
        args: &[&Buffer],
        options: &ExecuteOptions,
        context: Option<&ExecuteContext>,
    ) -> Result<OneExecution, Error> {
        execute::execute_on(self, device, args, options, context)
    }

    /// Unloads the executable while handles to it stay; executions under way finish.
    ///
    /// # Errors
    ///
    /// What the plugin reports.
    pub fn delete(&self) -> Result<(), Error> {
        let mut args = sys::PJRT_LoadedExecutable_Delete_Args::new();
        args.executable = self.raw();
        // SAFETY: the executable is live.
        unsafe { self.api().call(&mut args) }
    }

    /// Whether [`LoadedExecutable::delete`] was called.
    ///
    /// # Errors
    ///
    /// What the plugin reports.
    pub fn is_deleted(&self) -> Result<bool, Error> {
        let mut args = sys::PJRT_LoadedExecutable_IsDeleted_Args::new();
        args.executable = self.raw();
        // SAFETY: the executable is live.
        unsafe { self.api().call(&mut args)? };
        Ok(args.is_deleted)
    }
}
