//! The metadata file of version 2, `.zarray`.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Codec, DType, Error, Format, Grid, Keys, Metadata, Order, Result, malformed};

/// The members in the order TensorStore writes them, which is alphabetical. TensorStore demands that all but
/// `dimension_separator` be present when it opens an array.
#[derive(Serialize)]
struct Written<'a> {
    chunks: &'a [i64],
    compressor: Option<WrittenCompressor>,
    dimension_separator: char,
    dtype: &'a str,
    fill_value: Option<()>,
    filters: Option<()>,
    order: char,
    shape: &'a [i64],
    zarr_format: u32,
}

#[derive(Serialize)]
struct WrittenCompressor {
    id: &'static str,
    level: i32,
}

/// The members as read. Members beyond these are ignored, as TensorStore does; of the fill value nothing is needed, for a
/// missing chunk is an error.
#[derive(Deserialize)]
struct Read {
    chunks: Vec<i64>,
    #[serde(deserialize_with = "present")]
    compressor: Option<ReadCompressor>,
    dimension_separator: Option<String>,
    dtype: Value,
    #[serde(deserialize_with = "present")]
    filters: Option<Vec<Value>>,
    order: String,
    shape: Vec<i64>,
    zarr_format: u32,
}

#[derive(Deserialize)]
struct ReadCompressor {
    id: String,
}

/// An optional value whose member must be there, if only as null.
fn present<'de, D, T>(deserializer: D) -> std::result::Result<Option<T>, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Deserialize<'de>,
{
    Option::deserialize(deserializer)
}

/// The bytes of the file.
pub(super) fn encode(metadata: &Metadata) -> Result<Vec<u8>> {
    let big_endian = metadata.dtype.name().replacen('<', ">", 1);
    let written = Written {
        chunks: metadata.grid.chunks(),
        compressor: match metadata.codec {
            Codec::Raw => None,
            Codec::Zstd { level } => Some(WrittenCompressor { id: "zstd", level }),
        },
        dimension_separator: metadata.keys.separator,
        dtype: if metadata.big_endian {
            &big_endian
        } else {
            metadata.dtype.name()
        },
        fill_value: None,
        filters: None,
        order: match metadata.order {
            Order::C => 'C',
            Order::F => 'F',
        },
        shape: metadata.grid.shape(),
        zarr_format: 2,
    };
    serde_json::to_vec(&written).or_else(|error| malformed(error.to_string()))
}

/// Reads the file.
pub(super) fn decode(bytes: &[u8]) -> Result<Metadata> {
    let read: Read = serde_json::from_slice(bytes)
        .or_else(|error| malformed(format!("not zarr v2: {error}")))?;
    if read.zarr_format != 2 {
        return malformed(format!("zarr_format {}", read.zarr_format));
    }
    if read.filters.is_some_and(|filters| !filters.is_empty()) {
        return Err(Error::Unsupported("an array with filters".to_owned()));
    }
    let Value::String(name) = &read.dtype else {
        return Err(Error::Unsupported("a structured dtype".to_owned()));
    };
    let Some((dtype, big_endian)) = DType::parse(name) else {
        return Err(Error::Unsupported(format!("dtype {name:?}")));
    };
    let codec = match read.compressor {
        None => Codec::Raw,
        // The level is of no matter to a reader and may be absent.
        Some(ReadCompressor { id }) if id == "zstd" => Format::Zarr2.orbax_codec(),
        Some(ReadCompressor { id }) => {
            return Err(Error::Unsupported(format!("compressor {id:?}")));
        }
    };
    let order = match read.order.as_str() {
        "C" => Order::C,
        "F" => Order::F,
        other => return malformed(format!("order {other:?}")),
    };
    let separator = match read.dimension_separator.as_deref() {
        None | Some(".") => '.',
        Some("/") => '/',
        Some(other) => return malformed(format!("dimension_separator {other:?}")),
    };
    let grid = Grid::new(&read.shape, &read.chunks)?;
    Ok(Metadata {
        format: Format::Zarr2,
        grid,
        dtype,
        big_endian,
        codec,
        order,
        keys: Keys {
            prefixed: false,
            separator,
        },
        shards: None,
    })
}

#[cfg(test)]
mod tests {
    use waystation_proto::xla::PrimitiveType;

    use super::*;

    /// As Orbax 0.12.8 with TensorStore 0.1.86 wrote it.
    const ORBAX: &str = r#"{"chunks":[2,8],"compressor":{"id":"zstd","level":1},"dimension_separator":".","dtype":"bfloat16","fill_value":null,"filters":null,"order":"C","shape":[8,8],"zarr_format":2}"#;

    #[test]
    fn writes_what_orbax_writes() {
        let dtype = DType::of(PrimitiveType::Bf16).unwrap();
        let metadata = Metadata::new(
            Format::Zarr2,
            &[8, 8],
            &[2, 8],
            dtype,
            Codec::Zstd { level: 1 },
        )
        .unwrap();
        assert_eq!(
            String::from_utf8(metadata.encode().unwrap()).unwrap(),
            ORBAX
        );
        assert_eq!(decode(ORBAX.as_bytes()).unwrap(), metadata);
    }

    #[test]
    fn zero_extents_become_one() {
        let dtype = DType::of(PrimitiveType::F32).unwrap();
        let metadata = Metadata::new(Format::Zarr2, &[0, 3], &[0, 3], dtype, Codec::Raw).unwrap();
        let text = String::from_utf8(metadata.encode().unwrap()).unwrap();
        assert!(
            text.contains(r#""chunks":[1,3]"#) && text.contains(r#""shape":[0,3]"#),
            "{text}"
        );
        assert!(text.contains(r#""compressor":null"#), "{text}");
    }

    #[test]
    fn reads_what_tensorstore_accepts() {
        for (from, to) in [
            (r#""dimension_separator":".","#, ""),
            (r#","level":1"#, ""),
            (r#""filters":null"#, r#""filters":[]"#),
            (r#""fill_value":null"#, r#""fill_value":0.0"#),
            (r#""zarr_format":2"#, r#""zarr_format":2,"more":[1]"#),
        ] {
            assert!(ORBAX.contains(from), "{from}");
            decode(ORBAX.replace(from, to).as_bytes()).unwrap();
        }
        let other = ORBAX
            .replace("bfloat16", ">f4")
            .replace(r#""C""#, r#""F""#)
            .replace(r#"":".""#, r#"":"/""#);
        let metadata = decode(other.as_bytes()).unwrap();
        assert!(
            metadata.big_endian && metadata.order == Order::F && metadata.keys.separator == '/'
        );
        assert_eq!(metadata.block_strides().unwrap(), [4, 8]);
        assert_eq!(decode(&metadata.encode().unwrap()).unwrap(), metadata);
    }

    #[test]
    fn each_wrong_member_is_refused() {
        for (from, to, unsupported) in [
            (r#""zarr_format":2"#, r#""zarr_format":3"#, false),
            (r#","zarr_format":2"#, "", false),
            (r#""filters":null,"#, "", false),
            (r#""compressor":{"id":"zstd","level":1},"#, "", false),
            (r#""order":"C""#, r#""order":"A""#, false),
            (r#"[2,8]"#, "[2]", false),
            (r#"[2,8]"#, "[0,8]", false),
            (r#"[2,8]"#, "[2,-8]", false),
            (r#"[2,8]"#, "[2.5,8]", false),
            (r#"[2,8]"#, "[4611686018427387904,8]", false),
            (r#"[8,8]"#, "[8,99999999999999999999]", false),
            (r#"[8,8]"#, "[8,-1]", false),
            (r#"":".""#, r#"":"-""#, false),
            (r#""filters":null"#, r#""filters":[{"id":"delta"}]"#, true),
            (r#""id":"zstd""#, r#""id":"blosc""#, true),
            (r#""bfloat16""#, r#""float32""#, true),
            (r#""bfloat16""#, r#"[["a","<f4"]]"#, true),
        ] {
            assert!(ORBAX.contains(from), "{from}");
            let error = decode(ORBAX.replace(from, to).as_bytes()).unwrap_err();
            assert_eq!(
                matches!(error, Error::Unsupported(_)),
                unsupported,
                "{from} -> {to}: {error}"
            );
        }
        let long = vec![b' '; crate::zarr::MAX_METADATA_BYTES + 1];
        assert!(Metadata::decode(Format::Zarr2, &long).is_err());
        assert!(decode(b"").is_err());
    }

    proptest::proptest! {
        #[test]
        fn no_change_of_a_few_bytes_panics(changes in proptest::collection::vec((0..ORBAX.len(), proptest::prelude::any::<u8>()), 1..4)) {
            let mut bytes = ORBAX.as_bytes().to_vec();
            for (at, byte) in changes {
                bytes[at] = byte;
            }
            if let Ok(metadata) = decode(&bytes) {
                // What is taken can be laid out and written again.
                let _ = (metadata.block_bytes(), metadata.block_strides());
                proptest::prop_assert_eq!(decode(&metadata.encode().unwrap()).unwrap(), metadata);
            }
        }
    }
}
