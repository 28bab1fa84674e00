//! The function table, slot by slot in the header's order.

use super::{PJRT_Api_Version, PJRT_Extension_Base};
use std::ffi::c_void;

/// Where a function pointer of the plugin lies. Its type is known only to the call (`sys::args`).
pub(crate) type Slot = *const c_void;

/// Declares the table and nothing else: a slot's offset is what is wanted of it, the plugin's own table is
/// never viewed through this type as a whole because it may be shorter.
macro_rules! table {
    ($($slot:ident)*) => {
        /// The plugin's function table, as far as Waystation reaches into it.
        #[repr(C)]
        pub(crate) struct PJRT_Api {
            pub(crate) struct_size: usize,
            pub(crate) extension_start: *mut PJRT_Extension_Base,
            pub(crate) pjrt_api_version: PJRT_Api_Version,
            $(pub(crate) $slot: Slot,)*
        }

        /// Names of the slots in their order.
        #[cfg(test)]
        pub(crate) const SLOTS: &[&str] = &[$(stringify!($slot)),*];
    };
}

table! {
    PJRT_Error_Destroy
    PJRT_Error_Message
    PJRT_Error_GetCode
    PJRT_Plugin_Initialize
    PJRT_Plugin_Attributes
    PJRT_Event_Destroy
    PJRT_Event_IsReady
    PJRT_Event_Error
    PJRT_Event_Await
    PJRT_Event_OnReady
    PJRT_Client_Create
    PJRT_Client_Destroy
    PJRT_Client_PlatformName
    PJRT_Client_ProcessIndex
    PJRT_Client_PlatformVersion
    PJRT_Client_Devices
    PJRT_Client_AddressableDevices
    PJRT_Client_LookupDevice
    PJRT_Client_LookupAddressableDevice
    PJRT_Client_AddressableMemories
    PJRT_Client_Compile
    PJRT_Client_DefaultDeviceAssignment
    PJRT_Client_BufferFromHostBuffer
    PJRT_DeviceDescription_Id
    PJRT_DeviceDescription_ProcessIndex
    PJRT_DeviceDescription_Attributes
    PJRT_DeviceDescription_Kind
    PJRT_DeviceDescription_DebugString
    PJRT_DeviceDescription_ToString
    PJRT_Device_GetDescription
    PJRT_Device_IsAddressable
    PJRT_Device_LocalHardwareId
    PJRT_Device_AddressableMemories
    PJRT_Device_DefaultMemory
    PJRT_Device_MemoryStats
    PJRT_Memory_Id
    PJRT_Memory_Kind
    PJRT_Memory_DebugString
    PJRT_Memory_ToString
    PJRT_Memory_AddressableByDevices
    PJRT_Executable_Destroy
    PJRT_Executable_Name
    PJRT_Executable_NumReplicas
    PJRT_Executable_NumPartitions
    PJRT_Executable_NumOutputs
    PJRT_Executable_SizeOfGeneratedCodeInBytes
    PJRT_Executable_GetCostAnalysis
    PJRT_Executable_OutputMemoryKinds
    PJRT_Executable_OptimizedProgram
    PJRT_Executable_Serialize
    PJRT_LoadedExecutable_Destroy
    PJRT_LoadedExecutable_GetExecutable
    PJRT_LoadedExecutable_AddressableDevices
    PJRT_LoadedExecutable_Delete
    PJRT_LoadedExecutable_IsDeleted
    PJRT_LoadedExecutable_Execute
    PJRT_Executable_DeserializeAndLoad
    PJRT_LoadedExecutable_Fingerprint
    PJRT_Buffer_Destroy
    PJRT_Buffer_ElementType
    PJRT_Buffer_Dimensions
    PJRT_Buffer_UnpaddedDimensions
    PJRT_Buffer_DynamicDimensionIndices
    PJRT_Buffer_GetMemoryLayout
    PJRT_Buffer_OnDeviceSizeInBytes
    PJRT_Buffer_Device
    PJRT_Buffer_Memory
    PJRT_Buffer_Delete
    PJRT_Buffer_IsDeleted
    PJRT_Buffer_CopyToDevice
    PJRT_Buffer_ToHostBuffer
    PJRT_Buffer_IsOnCpu
    PJRT_Buffer_ReadyEvent
    PJRT_Buffer_UnsafePointer
    PJRT_Buffer_IncreaseExternalReferenceCount
    PJRT_Buffer_DecreaseExternalReferenceCount
    PJRT_Buffer_OpaqueDeviceMemoryDataPointer
    PJRT_CopyToDeviceStream_Destroy
    PJRT_CopyToDeviceStream_AddChunk
    PJRT_CopyToDeviceStream_TotalBytes
    PJRT_CopyToDeviceStream_GranuleSize
    PJRT_CopyToDeviceStream_CurrentBytes
    PJRT_TopologyDescription_Create
    PJRT_TopologyDescription_Destroy
    PJRT_TopologyDescription_PlatformName
    PJRT_TopologyDescription_PlatformVersion
    PJRT_TopologyDescription_GetDeviceDescriptions
    PJRT_TopologyDescription_Serialize
    PJRT_TopologyDescription_Attributes
    PJRT_Compile
    PJRT_Executable_OutputElementTypes
    PJRT_Executable_OutputDimensions
    PJRT_Buffer_CopyToMemory
    PJRT_Client_CreateViewOfDeviceBuffer
    PJRT_Executable_Fingerprint
    PJRT_Client_TopologyDescription
    PJRT_Executable_GetCompiledMemoryStats
    PJRT_Memory_Kind_Id
    PJRT_ExecuteContext_Create
    PJRT_ExecuteContext_Destroy
    PJRT_Buffer_CopyRawToHost
}

/// The layouts extension, as far as Waystation reaches into it.
#[repr(C)]
pub(crate) struct PJRT_Layouts_Extension {
    pub(crate) base: PJRT_Extension_Base,
    pub(crate) PJRT_Layouts_MemoryLayout_Destroy: Slot,
    pub(crate) PJRT_Layouts_MemoryLayout_Serialize: Slot,
    pub(crate) PJRT_Layouts_PJRT_Client_GetDefaultLayout: Slot,
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    #[test]
    fn slots_lie_where_the_header_puts_them() {
        // 40 bytes of head, then one pointer a function.
        assert_eq!(offset_of!(PJRT_Api, pjrt_api_version), 16);
        assert_eq!(offset_of!(PJRT_Api, PJRT_Error_Destroy), 40);
        assert_eq!(size_of::<PJRT_Api>(), 40 + 8 * SLOTS.len());
        // Positions counted in the header of API 0.81.
        assert_eq!(SLOTS[10], "PJRT_Client_Create");
        assert_eq!(SLOTS[55], "PJRT_LoadedExecutable_Execute");
        assert_eq!(SLOTS[58], "PJRT_Buffer_Destroy");
        assert_eq!(SLOTS[89], "PJRT_Compile");
        assert_eq!(SLOTS[97], "PJRT_Memory_Kind_Id");
        assert_eq!(SLOTS[100], "PJRT_Buffer_CopyRawToHost");
        assert_eq!(offset_of!(PJRT_Api, PJRT_Memory_Kind_Id), 40 + 8 * 97);
    }

    #[test]
    fn layouts_extension_starts_with_its_head() {
        assert_eq!(
            offset_of!(PJRT_Layouts_Extension, PJRT_Layouts_MemoryLayout_Destroy),
            24
        );
        assert_eq!(
            offset_of!(
                PJRT_Layouts_Extension,
                PJRT_Layouts_PJRT_Client_GetDefaultLayout
            ),
            40
        );
    }
}
