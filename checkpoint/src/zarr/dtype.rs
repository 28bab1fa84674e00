//! Element types: XLA's, as TensorStore 0.1.86 spells them in zarr v2 and v3.

use waystation_proto::xla::PrimitiveType;

/// An element type that can be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DType {
    primitive: PrimitiveType,
    /// The spelling in `.zarray`; the first character is the byte order where there is one.
    name: &'static str,
    /// The spelling in `zarr.json`.
    v3_name: &'static str,
    /// The size of an element in a chunk and on the host, in bytes.
    item_bytes: usize,
    /// The size of what is swapped for the other byte order: half an element for complex numbers.
    word_bytes: usize,
    /// The bits of a byte that hold the value, where that is not all of them.
    mask: Option<u8>,
}

const fn plain(
    primitive: PrimitiveType,
    name: &'static str,
    v3_name: &'static str,
    item_bytes: usize,
) -> DType {
    DType {
        primitive,
        name,
        v3_name,
        item_bytes,
        word_bytes: item_bytes,
        mask: None,
    }
}

const fn complex(
    primitive: PrimitiveType,
    name: &'static str,
    v3_name: &'static str,
    item_bytes: usize,
) -> DType {
    DType {
        primitive,
        name,
        v3_name,
        item_bytes,
        word_bytes: item_bytes / 2,
        mask: None,
    }
}

/// One byte an element, the value in its low bits, the others zero.
const fn narrow(primitive: PrimitiveType, name: &'static str, mask: u8) -> DType {
    DType {
        primitive,
        name,
        v3_name: name,
        item_bytes: 1,
        word_bytes: 1,
        mask: Some(mask),
    }
}

/// Every XLA type that TensorStore stores. It has no name for `S1`, `U1`, `U2`, `U4`, `F8E4M3` and the 6-bit floats.
const TABLE: &[DType] = &[
    plain(PrimitiveType::Pred, "|b1", "bool", 1),
    narrow(PrimitiveType::S2, "int2", 0x03),
    narrow(PrimitiveType::S4, "int4", 0x0f),
    plain(PrimitiveType::S8, "|i1", "int8", 1),
    plain(PrimitiveType::S16, "<i2", "int16", 2),
    plain(PrimitiveType::S32, "<i4", "int32", 4),
    plain(PrimitiveType::S64, "<i8", "int64", 8),
    plain(PrimitiveType::U8, "|u1", "uint8", 1),
    plain(PrimitiveType::U16, "<u2", "uint16", 2),
    plain(PrimitiveType::U32, "<u4", "uint32", 4),
    plain(PrimitiveType::U64, "<u8", "uint64", 8),
    plain(PrimitiveType::F16, "<f2", "float16", 2),
    plain(PrimitiveType::F32, "<f4", "float32", 4),
    plain(PrimitiveType::F64, "<f8", "float64", 8),
    plain(PrimitiveType::Bf16, "bfloat16", "bfloat16", 2),
    narrow(PrimitiveType::F4e2m1fn, "float4_e2m1fn", 0x0f),
    plain(PrimitiveType::F8e3m4, "float8_e3m4", "float8_e3m4", 1),
    plain(PrimitiveType::F8e4m3fn, "float8_e4m3fn", "float8_e4m3fn", 1),
    plain(
        PrimitiveType::F8e4m3fnuz,
        "float8_e4m3fnuz",
        "float8_e4m3fnuz",
        1,
    ),
    plain(
        PrimitiveType::F8e4m3b11fnuz,
        "float8_e4m3b11fnuz",
        "float8_e4m3b11fnuz",
        1,
    ),
    plain(PrimitiveType::F8e5m2, "float8_e5m2", "float8_e5m2", 1),
    plain(
        PrimitiveType::F8e5m2fnuz,
        "float8_e5m2fnuz",
        "float8_e5m2fnuz",
        1,
    ),
    plain(
        PrimitiveType::F8e8m0fnu,
        "float8_e8m0fnu",
        "float8_e8m0fnu",
        1,
    ),
    complex(PrimitiveType::C64, "<c8", "complex64", 8),
    complex(PrimitiveType::C128, "<c16", "complex128", 16),
];

impl DType {
    /// All that can be stored.
    pub fn all() -> impl Iterator<Item = DType> {
        TABLE.iter().copied()
    }

    /// The type for an XLA element type; `None` when TensorStore cannot store it.
    #[must_use]
    pub fn of(primitive: PrimitiveType) -> Option<DType> {
        TABLE
            .iter()
            .copied()
            .find(|dtype| dtype.primitive == primitive)
    }

    /// The type for a spelling in `.zarray`, and whether the bytes are big-endian. TensorStore writes little-endian
    /// numbers and reads both; it takes exactly these spellings.
    #[must_use]
    pub fn parse(name: &str) -> Option<(DType, bool)> {
        if let Some(dtype) = TABLE.iter().find(|dtype| dtype.name == name) {
            return Some((*dtype, false));
        }
        let rest = name.strip_prefix('>')?;
        TABLE
            .iter()
            .find(|dtype| dtype.name.strip_prefix('<') == Some(rest))
            .map(|dtype| (*dtype, true))
    }

    /// The type for a spelling in `zarr.json`.
    #[must_use]
    pub fn parse_v3(name: &str) -> Option<DType> {
        TABLE.iter().copied().find(|dtype| dtype.v3_name == name)
    }

    /// The XLA element type.
    #[must_use]
    pub fn primitive(&self) -> PrimitiveType {
        self.primitive
    }

    /// The spelling in `.zarray`, little-endian.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The spelling in `zarr.json`.
    #[must_use]
    pub fn v3_name(&self) -> &'static str {
        self.v3_name
    }

    /// Whether the order of an element's bytes is a matter of choice.
    #[must_use]
    pub fn has_byte_order(&self) -> bool {
        self.word_bytes > 1
    }

    /// The size of an element in a chunk and in host bytes. 1 for types narrower than a byte.
    #[must_use]
    pub fn item_bytes(&self) -> usize {
        self.item_bytes
    }

    /// Whether bytes hold bits beside the value, so that [`DType::clear_padding`] has work to do.
    #[must_use]
    pub fn is_narrow(&self) -> bool {
        self.mask.is_some()
    }

    /// Clears the bits of each byte that hold no value: -4 as `int4` is stored as 0x0c, never as 0xfc.
    pub fn clear_padding(&self, bytes: &mut [u8]) {
        if let Some(mask) = self.mask {
            for byte in bytes {
                *byte &= mask;
            }
        }
    }

    /// Turns elements of one byte order into the other.
    pub fn swap_bytes(&self, bytes: &mut [u8]) {
        for word in bytes.chunks_exact_mut(self.word_bytes) {
            word.reverse();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_read_back() {
        for dtype in DType::all() {
            assert_eq!(DType::parse(dtype.name()), Some((dtype, false)));
            assert_eq!(DType::parse_v3(dtype.v3_name()), Some(dtype));
            assert_eq!(DType::of(dtype.primitive()), Some(dtype));
        }
        assert_eq!(TABLE.len(), 25);
    }

    #[test]
    fn spellings_that_tensorstore_refuses_are_refused() {
        for name in [
            "f4",
            "=f4",
            "float32",
            "|f4",
            "<i1",
            ">bfloat16",
            "|i2",
            "uint4",
            "float8_e4m3",
            "",
            ">",
        ] {
            assert_eq!(DType::parse(name), None, "{name}");
        }
        for name in ["<f4", "f32", "Float32", "uint4", "float8_e4m3", "r16", ""] {
            assert_eq!(DType::parse_v3(name), None, "{name}");
        }
        for primitive in [
            PrimitiveType::U4,
            PrimitiveType::F8e4m3,
            PrimitiveType::S1,
            PrimitiveType::Token,
        ] {
            assert_eq!(DType::of(primitive), None);
        }
    }

    #[test]
    fn big_endian_is_swapped_by_word() {
        let (dtype, big) = DType::parse(">c8").unwrap();
        assert!(big);
        let mut bytes = [1, 2, 3, 4, 5, 6, 7, 8];
        dtype.swap_bytes(&mut bytes);
        assert_eq!(bytes, [4, 3, 2, 1, 8, 7, 6, 5]);
    }

    #[test]
    fn narrow_types_keep_only_their_bits() {
        let mut bytes = [0xfc, 0x07];
        DType::of(PrimitiveType::S4)
            .unwrap()
            .clear_padding(&mut bytes);
        assert_eq!(bytes, [0x0c, 0x07]);
        DType::of(PrimitiveType::S8)
            .unwrap()
            .clear_padding(&mut bytes);
        assert_eq!(bytes, [0x0c, 0x07]);
    }
}
