//! Element types.

use crate::support::{Which, aligned, fetch};
use waystation_pjrt::{Code, ElementType};

/// Bits that a value has.
fn bits(ty: ElementType) -> u32 {
    match ty {
        ElementType::S1 | ElementType::U1 | ElementType::Pred => 1,
        ElementType::S2 | ElementType::U2 => 2,
        ElementType::S4 | ElementType::U4 | ElementType::F4E2M1FN => 4,
        _ => 8,
    }
}

/// Values of an element type that must come back as they went: every bit pattern that the type has, as far as one
/// byte can vary it.
fn pattern(ty: ElementType) -> Vec<u8> {
    (0..=255_u8)
        .flat_map(|index| {
            // Wider types: the varied byte first, a fixed one after it.
            std::iter::once(index & (u8::MAX >> (8 - bits(ty))))
                .chain(std::iter::repeat_n(0x3f, ty.host_bytes() - 1))
        })
        .collect()
}

pub(crate) fn every_type_survives(which: Which) {
    let client = which.client();
    let device = &client.devices()[0];
    let memory = &device.memories()[device.default_memory()];
    let mut refused = Vec::new();
    for ty in ElementType::ALL {
        if *ty == ElementType::Token {
            continue;
        }
        let bytes = pattern(*ty);
        assert_eq!(bytes.len(), 256 * ty.host_bytes());
        // Both ways into the device: used in place or copied.
        for dims in [&[256_i64][..], &[16, 16]] {
            match client.buffer_from_host(aligned(&bytes), *ty, dims, None, memory) {
                Ok(buffer) => {
                    assert_eq!(buffer.element_type(), *ty);
                    assert_eq!(buffer.host_bytes(), Ok(bytes.len()), "{ty:?}");
                    assert_eq!(fetch(&buffer).as_ref(), Ok(&bytes), "{ty:?}");
                }
                Err(error) => {
                    assert_eq!(error.code(), Code::Unimplemented, "{ty:?}: {error}");
                    refused.push(*ty);
                }
            }
        }
    }
    // Negative numbers of a narrow type may go with their sign through the whole byte; what counts is the low bits.
    for (ty, mask) in [(ElementType::S4, 0xf), (ElementType::S2, 0x3)] {
        let bytes: Vec<u8> = (0..=255).collect();
        let buffer = client
            .buffer_from_host(aligned(&bytes), ty, &[256], None, memory)
            .expect("a buffer");
        let back = fetch(&buffer).expect("the bytes");
        assert!(
            back.iter()
                .zip(&bytes)
                .all(|(back, byte)| back & mask == byte & mask),
            "{ty:?}"
        );
    }
    refused.dedup();
    // One-bit types are younger than the oldest plugin.
    let young = [ElementType::S1, ElementType::U1];
    if which == Which::XlaCpuPjrt {
        assert_eq!(refused, young);
    } else {
        assert_eq!(refused, []);
    }
}
