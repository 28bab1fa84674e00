//! Sizes and offsets of the declarations, against numbers that a C compiler gave for the header of API 0.81, and
//! for the two structs that have grown since, for that of 0.104.

use super::*;
use std::mem::offset_of;

macro_rules! sizes {
    ($($name:ident = $size:literal;)*) => {
        &[$((stringify!($name), $name::STRUCT_SIZE, $size)),*]
    };
}

/// What the header calls `<name>_STRUCT_SIZE`.
const SIZES: &[(&str, usize, usize)] = sizes! {
    PJRT_Buffer_CopyRawToHost_Args = 56;
    PJRT_Buffer_CopyToDevice_Args = 40;
    PJRT_Buffer_CopyToMemory_Args = 40;
    PJRT_Buffer_DecreaseExternalReferenceCount_Args = 24;
    PJRT_Buffer_Delete_Args = 24;
    PJRT_Buffer_Destroy_Args = 24;
    PJRT_Buffer_Dimensions_Args = 40;
    PJRT_Buffer_ElementType_Args = 28;
    PJRT_Buffer_GetMemoryLayout_Args = 104;
    PJRT_Buffer_IncreaseExternalReferenceCount_Args = 24;
    PJRT_Buffer_IsDeleted_Args = 25;
    PJRT_Buffer_IsOnCpu_Args = 25;
    PJRT_Buffer_OnDeviceSizeInBytes_Args = 32;
    PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args = 32;
    PJRT_Buffer_ReadyEvent_Args = 32;
    PJRT_Buffer_ToHostBuffer_Args = 56;
    PJRT_Client_AddressableDevices_Args = 40;
    PJRT_Client_BufferFromHostBuffer_Args = 120;
    PJRT_Client_Compile_Args = 56;
    PJRT_Client_Create_Args = 88;
    PJRT_Client_Destroy_Args = 24;
    PJRT_Client_Devices_Args = 40;
    PJRT_Client_PlatformName_Args = 40;
    PJRT_Client_PlatformVersion_Args = 40;
    PJRT_Client_ProcessIndex_Args = 28;
    PJRT_DeviceDescription_Attributes_Args = 40;
    PJRT_DeviceDescription_DebugString_Args = 40;
    PJRT_DeviceDescription_Id_Args = 28;
    PJRT_DeviceDescription_Kind_Args = 40;
    PJRT_DeviceDescription_ProcessIndex_Args = 28;
    PJRT_DeviceDescription_ToString_Args = 40;
    PJRT_Device_AddressableMemories_Args = 40;
    PJRT_Device_DefaultMemory_Args = 32;
    PJRT_Device_GetDescription_Args = 32;
    PJRT_Device_LocalHardwareId_Args = 28;
    PJRT_Error_GetCode_Args = 28;
    PJRT_Event_Await_Args = 24;
    PJRT_Event_Destroy_Args = 24;
    PJRT_Event_Error_Args = 24;
    PJRT_Event_IsReady_Args = 25;
    PJRT_Event_OnReady_Args = 40;
    PJRT_ExecuteContext_Create_Args = 24;
    PJRT_ExecuteContext_Destroy_Args = 24;
    PJRT_Executable_DeserializeAndLoad_Args = 64;
    PJRT_Executable_Destroy_Args = 24;
    PJRT_Executable_Fingerprint_Args = 40;
    PJRT_Executable_GetCompiledMemoryStats_Args = 144;
    PJRT_Executable_GetCostAnalysis_Args = 40;
    PJRT_Executable_Name_Args = 40;
    PJRT_Executable_NumOutputs_Args = 32;
    PJRT_Executable_OptimizedProgram_Args = 32;
    PJRT_Executable_OutputDimensions_Args = 48;
    PJRT_Executable_OutputElementTypes_Args = 40;
    PJRT_Executable_OutputMemoryKinds_Args = 48;
    PJRT_Executable_Serialize_Args = 56;
    PJRT_Executable_SizeOfGeneratedCodeInBytes_Args = 32;
    PJRT_LoadedExecutable_AddressableDevices_Args = 40;
    PJRT_LoadedExecutable_Delete_Args = 24;
    PJRT_LoadedExecutable_Destroy_Args = 24;
    PJRT_LoadedExecutable_Execute_Args = 80;
    PJRT_LoadedExecutable_GetExecutable_Args = 32;
    PJRT_LoadedExecutable_IsDeleted_Args = 25;
    PJRT_Memory_DebugString_Args = 40;
    PJRT_Memory_Id_Args = 28;
    PJRT_Memory_Kind_Args = 40;
    PJRT_Memory_Kind_Id_Args = 28;
    PJRT_Memory_ToString_Args = 40;
    PJRT_Plugin_Attributes_Args = 32;
    PJRT_Plugin_Initialize_Args = 16;
    PJRT_Layouts_MemoryLayout_Destroy_Args = 24;
    PJRT_Layouts_MemoryLayout_Serialize_Args = 56;
    PJRT_Layouts_PJRT_Client_GetDefaultLayout_Args = 56;
};

#[test]
fn argument_structs_have_the_sizes_of_the_header() {
    for (name, ours, header) in SIZES {
        assert_eq!(ours, header, "{name}");
    }
}

#[test]
fn plain_structs_have_the_sizes_of_the_header() {
    assert_eq!(size_of::<PJRT_NamedValue>(), 56);
    assert_eq!(size_of::<PJRT_Program>(), 48);
    assert_eq!(size_of::<PJRT_Buffer_MemoryLayout_Tiled>(), 56);
    assert_eq!(size_of::<PJRT_Buffer_MemoryLayout>(), 80);
    assert_eq!(size_of::<PJRT_ExecuteOptions>(), 120);
    assert_eq!(size_of::<PJRT_Error_Destroy_Args>(), 24);
    assert_eq!(size_of::<PJRT_Error_Message_Args>(), 40);
    assert_eq!(size_of::<PJRT_Api_Version>(), 24);
    assert_eq!(size_of::<PJRT_Extension_Base>(), 24);
}

#[test]
fn fields_behind_padding_lie_where_the_header_puts_them() {
    assert_eq!(offset_of!(PJRT_Client_BufferFromHostBuffer_Args, dims), 40);
    assert_eq!(
        offset_of!(PJRT_Client_BufferFromHostBuffer_Args, device),
        80
    );
    assert_eq!(
        offset_of!(PJRT_Client_BufferFromHostBuffer_Args, buffer),
        112
    );
    assert_eq!(offset_of!(PJRT_ExecuteOptions, launch_id), 48);
    assert_eq!(
        offset_of!(PJRT_ExecuteOptions, non_donatable_input_indices),
        56
    );
    assert_eq!(offset_of!(PJRT_ExecuteOptions, multi_slice_config), 112);
    assert_eq!(offset_of!(PJRT_Buffer_MemoryLayout, kind), 72);
    assert_eq!(offset_of!(PJRT_NamedValue, value), 40);
    assert_eq!(
        offset_of!(PJRT_Layouts_PJRT_Client_GetDefaultLayout_Args, dims),
        32
    );
    assert_eq!(
        offset_of!(
            PJRT_Executable_GetCompiledMemoryStats_Args,
            peak_memory_in_bytes
        ),
        104
    );
}
