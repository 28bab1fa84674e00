//! What plugins and clients tell about themselves.

use crate::support::{DEVICES, Which};
use std::sync::Arc;
use waystation_pjrt::{Client, Code, ElementType, GlobalDevice, OptionValue, Plugin};

pub(crate) fn versions_and_devices(which: Which) {
    let plugin = which.plugin();
    let version = match which {
        Which::Lammps => (0, 115),
        Which::FastAtomStruct => (0, 106),
        Which::XlaCpuPjrt => (0, 81),
    };
    assert_eq!(plugin.api_version(), version);
    let attributes = plugin.attributes().expect("attributes");
    let stablehlo = attributes
        .iter()
        .find(|(name, _)| name == "stablehlo_current_version");
    assert!(
        matches!(stablehlo, Some((_, OptionValue::Int64List(version))) if version.len() == 3),
        "{attributes:?}"
    );

    let client = which.client();
    assert_eq!(client.platform_name(), "cpu");
    assert_eq!(client.devices().len(), DEVICES);
    assert_eq!(client.process_index(), Ok(0));
    let global = client
        .global_devices()
        .expect("the devices of all processes");
    let own = client.devices().iter().map(|device| GlobalDevice {
        id: device.id(),
        process_index: 0,
    });
    assert_eq!(global, own.collect::<Vec<_>>());
    for (index, device) in client.devices().iter().enumerate() {
        assert_eq!(usize::try_from(device.id()), Ok(index));
        assert_eq!(device.kind(), "cpu");
        assert_eq!(device.to_string(), format!("CpuDevice(id={index})"));
        assert!(!device.debug_string().is_empty());
        let kinds: Vec<_> = device
            .memories()
            .iter()
            .map(|memory| memory.kind())
            .collect();
        assert_eq!(kinds, ["device", "pinned_host", "unpinned_host"]);
        assert_eq!(device.memories()[device.default_memory()].kind(), "device");
        assert!(device.memory_of_kind("pinned_host").is_some());
        assert!(device.memory_of_kind("nonsense").is_none());
    }
    let mut ids: Vec<_> = client
        .devices()
        .iter()
        .flat_map(|device| device.memories())
        .map(|memory| memory.id())
        .collect();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 3 * DEVICES, "CPU devices share no memories");

    let unknown = [("nonsense".to_owned(), OptionValue::Int64(1))];
    match Client::create(&plugin, &unknown) {
        Err(error) => {
            assert_eq!(which, Which::Lammps);
            assert_eq!(error.code(), Code::InvalidArgument);
            assert!(error.message().contains("nonsense"), "{error}");
            assert!(error.is_from_plugin());
        }
        // The older ones ignore it.
        Ok(_) => assert_ne!(which, Which::Lammps),
    }
}

pub(crate) fn loading_twice_gives_one_plugin(which: Which) {
    let first = which.plugin();
    let second = Plugin::load(first.path()).expect("the plugin loads");
    assert!(Arc::ptr_eq(&first, &second));
}

pub(crate) fn layouts(which: Which) {
    let client = which.client();
    let layout = |dims: &[i64]| {
        client
            .default_layout(ElementType::F32, dims)
            .expect("a layout")
    };
    assert_eq!(layout(&[2, 3]), "{1,0}");
    assert_eq!(layout(&[2, 0, 3]), "{2,1,0}");
    assert_eq!(layout(&[]), "{}");
    let layout = client
        .default_layout(ElementType::S4, &[8])
        .expect("a layout");
    // Two to a byte, which the older ones do not say.
    assert_eq!(
        layout,
        if which == Which::Lammps {
            "{0:E(4)}"
        } else {
            "{0}"
        }
    );
}
