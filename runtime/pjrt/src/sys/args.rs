//! Arguments of the functions that Waystation calls, one struct a function.

use super::*;
use std::mem::offset_of;

/// The arguments of one function of a plugin: which slot of which table takes them.
///
/// # Safety
///
/// `SLOT` is the byte offset, in `Table`, of a function that takes `*mut Self` and returns `*mut PJRT_Error`;
/// `Self` is `repr(C)` and starts with its own size.
pub(crate) unsafe trait Call: Sized {
    /// Table that holds the function.
    type Table;
    /// The function's name in the C API, for errors.
    const NAME: &'static str;
    /// Byte offset of the function's slot in its table.
    const SLOT: usize;
}

/// Declares argument structs: all start with `struct_size` and `extension_start`, which `new` fills; `new`
/// leaves every other field zero (null, false, none).
macro_rules! calls {
    ($table:ident: $($function:ident($args:ident { $($field:ident: $type:ty,)* });)*) => {
        $(
            #[repr(C)]
            pub(crate) struct $args {
                pub(crate) struct_size: usize,
                pub(crate) extension_start: *mut PJRT_Extension_Base,
                $(pub(crate) $field: $type,)*
            }

            impl $args {
                /// The size that a plugin is told: up to the end of the last field, without the padding
                /// behind it, into which a later version may put a field that we do not know.
                pub(crate) const STRUCT_SIZE: usize = {
                    let _end = offset_of!(Self, extension_start) + size_of::<usize>();
                    $(let _end = offset_of!(Self, $field) + size_of::<$type>();)*
                    _end
                };

                pub(crate) fn new() -> Self {
                    // SAFETY: every field is an integer, a bool, a raw pointer, an optional function pointer
                    // or a struct of these; all of them may be zero.
                    let zeroed = unsafe { std::mem::zeroed::<Self>() };
                    Self { struct_size: Self::STRUCT_SIZE, ..zeroed }
                }
            }

            // SAFETY: the slot of this name in the header takes exactly these arguments.
            unsafe impl Call for $args {
                type Table = $table;
                const NAME: &'static str = stringify!($function);
                const SLOT: usize = offset_of!($table, $function);
            }
        )*
    };
}

/// A callback that frees what the plugin lent.
pub(crate) type Deleter<T> = Option<unsafe extern "C" fn(*mut T)>;

// The three functions about errors stand outside `calls!`: they cannot fail in turn.

#[repr(C)]
pub(crate) struct PJRT_Error_Destroy_Args {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut PJRT_Extension_Base,
    pub(crate) error: *mut PJRT_Error,
}

#[repr(C)]
pub(crate) struct PJRT_Error_Message_Args {
    pub(crate) struct_size: usize,
    pub(crate) extension_start: *mut PJRT_Extension_Base,
    pub(crate) error: *const PJRT_Error,
    pub(crate) message: *const c_char,
    pub(crate) message_size: usize,
}

calls! { PJRT_Api:
    PJRT_Error_GetCode(PJRT_Error_GetCode_Args { error: *const PJRT_Error, code: c_int, });
    PJRT_Plugin_Initialize(PJRT_Plugin_Initialize_Args {});
    PJRT_Plugin_Attributes(PJRT_Plugin_Attributes_Args {
        attributes: *const PJRT_NamedValue,
        num_attributes: usize,
    });

    PJRT_Event_Destroy(PJRT_Event_Destroy_Args { event: *mut PJRT_Event, });
    PJRT_Event_IsReady(PJRT_Event_IsReady_Args { event: *mut PJRT_Event, is_ready: bool, });
    PJRT_Event_Error(PJRT_Event_Error_Args { event: *mut PJRT_Event, });
    PJRT_Event_Await(PJRT_Event_Await_Args { event: *mut PJRT_Event, });
    PJRT_Event_OnReady(PJRT_Event_OnReady_Args {
        event: *mut PJRT_Event,
        callback: Option<unsafe extern "C" fn(*mut PJRT_Error, *mut c_void)>,
        user_arg: *mut c_void,
    });

    PJRT_Client_Create(PJRT_Client_Create_Args {
        create_options: *const PJRT_NamedValue,
        num_options: usize,
        kv_get_callback: Option<PJRT_KeyValueGetCallback>,
        kv_get_user_arg: *mut c_void,
        kv_put_callback: Option<PJRT_KeyValuePutCallback>,
        kv_put_user_arg: *mut c_void,
        client: *mut PJRT_Client,
        kv_try_get_callback: Option<PJRT_KeyValueTryGetCallback>,
        kv_try_get_user_arg: *mut c_void,
    });
    PJRT_Client_Destroy(PJRT_Client_Destroy_Args { client: *mut PJRT_Client, });
    PJRT_Client_PlatformName(PJRT_Client_PlatformName_Args {
        client: *mut PJRT_Client,
        platform_name: *const c_char,
        platform_name_size: usize,
    });
    PJRT_Client_PlatformVersion(PJRT_Client_PlatformVersion_Args {
        client: *mut PJRT_Client,
        platform_version: *const c_char,
        platform_version_size: usize,
    });
    PJRT_Client_ProcessIndex(PJRT_Client_ProcessIndex_Args {
        client: *mut PJRT_Client,
        process_index: c_int,
    });
    PJRT_Client_Devices(PJRT_Client_Devices_Args {
        client: *mut PJRT_Client,
        devices: *const *mut PJRT_Device,
        num_devices: usize,
    });
    PJRT_Client_AddressableDevices(PJRT_Client_AddressableDevices_Args {
        client: *mut PJRT_Client,
        devices: *const *mut PJRT_Device,
        num_devices: usize,
    });
    PJRT_Client_Compile(PJRT_Client_Compile_Args {
        client: *mut PJRT_Client,
        program: *const PJRT_Program,
        compile_options: *const c_char,
        compile_options_size: usize,
        executable: *mut PJRT_LoadedExecutable,
    });
    PJRT_Client_BufferFromHostBuffer(PJRT_Client_BufferFromHostBuffer_Args {
        client: *mut PJRT_Client,
        data: *const c_void,
        element_type: c_int,
        dims: *const i64,
        num_dims: usize,
        byte_strides: *const i64,
        num_byte_strides: usize,
        host_buffer_semantics: c_int,
        device: *mut PJRT_Device,
        memory: *mut PJRT_Memory,
        device_layout: *mut PJRT_Buffer_MemoryLayout,
        done_with_host_buffer: *mut PJRT_Event,
        buffer: *mut PJRT_Buffer,
    });

    PJRT_DeviceDescription_Id(PJRT_DeviceDescription_Id_Args {
        device_description: *mut PJRT_DeviceDescription,
        id: c_int,
    });
    PJRT_DeviceDescription_ProcessIndex(PJRT_DeviceDescription_ProcessIndex_Args {
        device_description: *mut PJRT_DeviceDescription,
        process_index: c_int,
    });
    PJRT_DeviceDescription_Attributes(PJRT_DeviceDescription_Attributes_Args {
        device_description: *mut PJRT_DeviceDescription,
        num_attributes: usize,
        attributes: *const PJRT_NamedValue,
    });
    PJRT_DeviceDescription_Kind(PJRT_DeviceDescription_Kind_Args {
        device_description: *mut PJRT_DeviceDescription,
        device_kind: *const c_char,
        device_kind_size: usize,
    });
    PJRT_DeviceDescription_DebugString(PJRT_DeviceDescription_DebugString_Args {
        device_description: *mut PJRT_DeviceDescription,
        debug_string: *const c_char,
        debug_string_size: usize,
    });
    PJRT_DeviceDescription_ToString(PJRT_DeviceDescription_ToString_Args {
        device_description: *mut PJRT_DeviceDescription,
        to_string: *const c_char,
        to_string_size: usize,
    });
    PJRT_Device_GetDescription(PJRT_Device_GetDescription_Args {
        device: *mut PJRT_Device,
        device_description: *mut PJRT_DeviceDescription,
    });
    PJRT_Device_LocalHardwareId(PJRT_Device_LocalHardwareId_Args {
        device: *mut PJRT_Device,
        local_hardware_id: c_int,
    });
    PJRT_Device_AddressableMemories(PJRT_Device_AddressableMemories_Args {
        device: *mut PJRT_Device,
        memories: *const *mut PJRT_Memory,
        num_memories: usize,
    });
    PJRT_Device_DefaultMemory(PJRT_Device_DefaultMemory_Args {
        device: *mut PJRT_Device,
        memory: *mut PJRT_Memory,
    });
    PJRT_Memory_Id(PJRT_Memory_Id_Args { memory: *mut PJRT_Memory, id: c_int, });
    PJRT_Memory_Kind(PJRT_Memory_Kind_Args {
        memory: *mut PJRT_Memory,
        kind: *const c_char,
        kind_size: usize,
    });
    PJRT_Memory_Kind_Id(PJRT_Memory_Kind_Id_Args { memory: *mut PJRT_Memory, kind_id: c_int, });
    PJRT_Memory_DebugString(PJRT_Memory_DebugString_Args {
        memory: *mut PJRT_Memory,
        debug_string: *const c_char,
        debug_string_size: usize,
    });
    PJRT_Memory_ToString(PJRT_Memory_ToString_Args {
        memory: *mut PJRT_Memory,
        to_string: *const c_char,
        to_string_size: usize,
    });

    PJRT_Executable_Destroy(PJRT_Executable_Destroy_Args { executable: *mut PJRT_Executable, });
    PJRT_Executable_Name(PJRT_Executable_Name_Args {
        executable: *mut PJRT_Executable,
        executable_name: *const c_char,
        executable_name_size: usize,
    });
    PJRT_Executable_NumOutputs(PJRT_Executable_NumOutputs_Args {
        executable: *mut PJRT_Executable,
        num_outputs: usize,
    });
    PJRT_Executable_SizeOfGeneratedCodeInBytes(PJRT_Executable_SizeOfGeneratedCodeInBytes_Args {
        executable: *mut PJRT_Executable,
        size_in_bytes: i64,
    });
    PJRT_Executable_GetCostAnalysis(PJRT_Executable_GetCostAnalysis_Args {
        executable: *mut PJRT_Executable,
        num_properties: usize,
        properties: *const PJRT_NamedValue,
    });
    PJRT_Executable_OutputMemoryKinds(PJRT_Executable_OutputMemoryKinds_Args {
        executable: *mut PJRT_Executable,
        num_outputs: usize,
        memory_kinds: *const *const c_char,
        memory_kind_sizes: *const usize,
    });
    PJRT_Executable_OptimizedProgram(PJRT_Executable_OptimizedProgram_Args {
        executable: *mut PJRT_Executable,
        program: *mut PJRT_Program,
    });
    PJRT_Executable_Serialize(PJRT_Executable_Serialize_Args {
        executable: *const PJRT_Executable,
        serialized_bytes: *const c_char,
        serialized_bytes_size: usize,
        serialized_executable: *mut PJRT_SerializedExecutable,
        serialized_executable_deleter: Deleter<PJRT_SerializedExecutable>,
    });
    PJRT_Executable_DeserializeAndLoad(PJRT_Executable_DeserializeAndLoad_Args {
        client: *mut PJRT_Client,
        serialized_executable: *const c_char,
        serialized_executable_size: usize,
        loaded_executable: *mut PJRT_LoadedExecutable,
        overridden_serialized_compile_options: *const c_char,
        overridden_serialized_compile_options_size: usize,
    });
    PJRT_Executable_OutputElementTypes(PJRT_Executable_OutputElementTypes_Args {
        executable: *mut PJRT_Executable,
        output_types: *mut c_int,
        num_output_types: usize,
    });
    PJRT_Executable_OutputDimensions(PJRT_Executable_OutputDimensions_Args {
        executable: *mut PJRT_Executable,
        num_outputs: usize,
        dims: *const i64,
        dim_sizes: *const usize,
    });
    PJRT_Executable_Fingerprint(PJRT_Executable_Fingerprint_Args {
        executable: *mut PJRT_Executable,
        executable_fingerprint: *const c_char,
        executable_fingerprint_size: usize,
    });
    PJRT_Executable_GetCompiledMemoryStats(PJRT_Executable_GetCompiledMemoryStats_Args {
        executable: *mut PJRT_Executable,
        generated_code_size_in_bytes: i64,
        argument_size_in_bytes: i64,
        output_size_in_bytes: i64,
        alias_size_in_bytes: i64,
        temp_size_in_bytes: i64,
        host_generated_code_size_in_bytes: i64,
        host_argument_size_in_bytes: i64,
        host_output_size_in_bytes: i64,
        host_alias_size_in_bytes: i64,
        host_temp_size_in_bytes: i64,
        peak_memory_in_bytes: i64,
        total_size_in_bytes: i64,
        total_allocation_bytes: i64,
        indefinite_allocations: i64,
        peak_unpadded_heap_bytes: i64,
    });

    PJRT_LoadedExecutable_Destroy(PJRT_LoadedExecutable_Destroy_Args {
        executable: *mut PJRT_LoadedExecutable,
    });
    PJRT_LoadedExecutable_GetExecutable(PJRT_LoadedExecutable_GetExecutable_Args {
        loaded_executable: *mut PJRT_LoadedExecutable,
        executable: *mut PJRT_Executable,
    });
    PJRT_LoadedExecutable_AddressableDevices(PJRT_LoadedExecutable_AddressableDevices_Args {
        executable: *mut PJRT_LoadedExecutable,
        devices: *const *mut PJRT_Device,
        num_devices: usize,
    });
    PJRT_LoadedExecutable_Delete(PJRT_LoadedExecutable_Delete_Args {
        executable: *mut PJRT_LoadedExecutable,
    });
    PJRT_LoadedExecutable_IsDeleted(PJRT_LoadedExecutable_IsDeleted_Args {
        executable: *mut PJRT_LoadedExecutable,
        is_deleted: bool,
    });
    PJRT_LoadedExecutable_Execute(PJRT_LoadedExecutable_Execute_Args {
        executable: *mut PJRT_LoadedExecutable,
        options: *mut PJRT_ExecuteOptions,
        argument_lists: *const *const *mut PJRT_Buffer,
        num_devices: usize,
        num_args: usize,
        output_lists: *const *mut *mut PJRT_Buffer,
        device_complete_events: *mut *mut PJRT_Event,
        execute_device: *mut PJRT_Device,
    });

    PJRT_ExecuteContext_Create(PJRT_ExecuteContext_Create_Args {
        context: *mut PJRT_ExecuteContext,
    });
    PJRT_ExecuteContext_Destroy(PJRT_ExecuteContext_Destroy_Args {
        context: *mut PJRT_ExecuteContext,
    });

    PJRT_Buffer_Destroy(PJRT_Buffer_Destroy_Args { buffer: *mut PJRT_Buffer, });
    PJRT_Buffer_ElementType(PJRT_Buffer_ElementType_Args {
        buffer: *mut PJRT_Buffer,
        element_type: c_int,
    });
    PJRT_Buffer_Dimensions(PJRT_Buffer_Dimensions_Args {
        buffer: *mut PJRT_Buffer,
        dims: *const i64,
        num_dims: usize,
    });
    PJRT_Buffer_GetMemoryLayout(PJRT_Buffer_GetMemoryLayout_Args {
        buffer: *mut PJRT_Buffer,
        layout: PJRT_Buffer_MemoryLayout,
    });
    PJRT_Buffer_OnDeviceSizeInBytes(PJRT_Buffer_OnDeviceSizeInBytes_Args {
        buffer: *mut PJRT_Buffer,
        on_device_size_in_bytes: usize,
    });
    PJRT_Buffer_Delete(PJRT_Buffer_Delete_Args { buffer: *mut PJRT_Buffer, });
    PJRT_Buffer_IsDeleted(PJRT_Buffer_IsDeleted_Args {
        buffer: *mut PJRT_Buffer,
        is_deleted: bool,
    });
    PJRT_Buffer_IsOnCpu(PJRT_Buffer_IsOnCpu_Args {
        buffer: *mut PJRT_Buffer,
        is_on_cpu: bool,
    });
    PJRT_Buffer_IncreaseExternalReferenceCount(PJRT_Buffer_IncreaseExternalReferenceCount_Args {
        buffer: *mut PJRT_Buffer,
    });
    PJRT_Buffer_DecreaseExternalReferenceCount(PJRT_Buffer_DecreaseExternalReferenceCount_Args {
        buffer: *mut PJRT_Buffer,
    });
    PJRT_Buffer_OpaqueDeviceMemoryDataPointer(PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args {
        buffer: *mut PJRT_Buffer,
        device_memory_ptr: *mut c_void,
    });
    PJRT_Buffer_CopyToDevice(PJRT_Buffer_CopyToDevice_Args {
        buffer: *mut PJRT_Buffer,
        dst_device: *mut PJRT_Device,
        dst_buffer: *mut PJRT_Buffer,
    });
    PJRT_Buffer_CopyToMemory(PJRT_Buffer_CopyToMemory_Args {
        buffer: *mut PJRT_Buffer,
        dst_memory: *mut PJRT_Memory,
        dst_buffer: *mut PJRT_Buffer,
    });
    PJRT_Buffer_ToHostBuffer(PJRT_Buffer_ToHostBuffer_Args {
        src: *mut PJRT_Buffer,
        host_layout: *mut PJRT_Buffer_MemoryLayout,
        dst: *mut c_void,
        dst_size: usize,
        event: *mut PJRT_Event,
    });
    PJRT_Buffer_CopyRawToHost(PJRT_Buffer_CopyRawToHost_Args {
        buffer: *mut PJRT_Buffer,
        dst: *mut c_void,
        offset: i64,
        transfer_size: i64,
        event: *mut PJRT_Event,
    });
    PJRT_Buffer_ReadyEvent(PJRT_Buffer_ReadyEvent_Args {
        buffer: *mut PJRT_Buffer,
        event: *mut PJRT_Event,
    });
}

calls! { PJRT_Layouts_Extension:
    PJRT_Layouts_MemoryLayout_Destroy(PJRT_Layouts_MemoryLayout_Destroy_Args {
        layout: *mut PJRT_Layouts_MemoryLayout,
    });
    PJRT_Layouts_MemoryLayout_Serialize(PJRT_Layouts_MemoryLayout_Serialize_Args {
        layout: *mut PJRT_Layouts_MemoryLayout,
        serialized_bytes: *const c_char,
        serialized_bytes_size: usize,
        serialized_layout: *mut PJRT_Layouts_SerializedLayout,
        serialized_layout_deleter: Deleter<PJRT_Layouts_SerializedLayout>,
    });
    PJRT_Layouts_PJRT_Client_GetDefaultLayout(PJRT_Layouts_PJRT_Client_GetDefaultLayout_Args {
        client: *mut PJRT_Client,
        element_type: c_int,
        dims: *const i64,
        num_dims: usize,
        layout: *mut PJRT_Layouts_MemoryLayout,
    });
}
