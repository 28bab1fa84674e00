//! The metadata file of an array.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Codec, DType, Error, Grid, Result, malformed};

/// The name of the metadata file in the array's folder.
pub const METADATA_FILE: &str = ".zarray";
/// The longest metadata file read, in bytes. Real ones have a few hundred.
pub const MAX_METADATA_BYTES: usize = 1 << 20;

/// The order of elements inside a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Row-major: the last index runs fastest.
    C,
    /// Column-major: the first index runs fastest.
    F,
}

/// What `.zarray` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Metadata {
    /// Shape and chunks.
    pub grid: Grid,
    /// The element type.
    pub dtype: DType,
    /// Whether elements are stored with the most significant byte first.
    pub big_endian: bool,
    /// How chunks are compressed.
    pub codec: Codec,
    /// The order of elements inside a chunk.
    pub order: Order,
    /// What stands between the numbers of a chunk's name: `.` or `/`.
    pub separator: char,
}

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

impl Metadata {
    /// The metadata of an array as Waystation writes it: row-major, little-endian, `.` between the numbers.
    ///
    /// `chunks` is in elements; an extent of 0, which the format does not have, becomes 1.
    ///
    /// # Errors
    /// As [`Grid::new`].
    pub fn new(shape: &[i64], chunks: &[i64], dtype: DType, codec: Codec) -> Result<Self> {
        let chunks: Vec<i64> = chunks
            .iter()
            .map(|&extent| if extent == 0 { 1 } else { extent })
            .collect();
        let grid = Grid::new(shape, &chunks)?;
        Ok(Self {
            grid,
            dtype,
            big_endian: false,
            codec,
            order: Order::C,
            separator: '.',
        })
    }

    /// The bytes of the file, as TensorStore writes it: compact JSON without a newline.
    ///
    /// # Errors
    /// None in practice: the members all have a JSON form.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let big_endian = self.dtype.name().replacen('<', ">", 1);
        let written = Written {
            chunks: self.grid.chunks(),
            compressor: match self.codec {
                Codec::Raw => None,
                Codec::Zstd { level } => Some(WrittenCompressor { id: "zstd", level }),
            },
            dimension_separator: self.separator,
            dtype: if self.big_endian {
                &big_endian
            } else {
                self.dtype.name()
            },
            fill_value: None,
            filters: None,
            order: match self.order {
                Order::C => 'C',
                Order::F => 'F',
            },
            shape: self.grid.shape(),
            zarr_format: 2,
        };
        serde_json::to_vec(&written).or_else(|error| malformed(error.to_string()))
    }

    /// Reads the file.
    ///
    /// # Errors
    /// [`Error::Malformed`] for what TensorStore would refuse too; [`Error::Unsupported`] for other compressors, filters
    /// and structured element types.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        if bytes.len() > MAX_METADATA_BYTES {
            return malformed(format!(
                "{} bytes of metadata, at most {MAX_METADATA_BYTES} are taken",
                bytes.len()
            ));
        }
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
            Some(ReadCompressor { id }) if id == "zstd" => Codec::Zstd {
                level: super::ZSTD_LEVEL,
            },
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
        Ok(Self {
            grid,
            dtype,
            big_endian,
            codec,
            order,
            separator,
        })
    }

    /// The size of a decoded chunk in bytes; `None` when it cannot be counted.
    #[must_use]
    pub fn chunk_bytes(&self) -> Option<usize> {
        self.grid
            .chunk_elements()
            .checked_mul(self.dtype.item_bytes())
    }

    /// The strides of a chunk, in bytes, one a dimension; `None` when they cannot be counted.
    #[must_use]
    pub fn chunk_strides(&self) -> Option<Vec<usize>> {
        let chunks = self.grid.chunks();
        match self.order {
            Order::C => crate::strided::row_major(chunks, self.dtype.item_bytes()),
            Order::F => {
                let mirrored: Vec<i64> = chunks.iter().rev().copied().collect();
                let mut strides = crate::strided::row_major(&mirrored, self.dtype.item_bytes())?;
                strides.reverse();
                Some(strides)
            }
        }
    }
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
        let metadata = Metadata::new(&[8, 8], &[2, 8], dtype, Codec::Zstd { level: 1 }).unwrap();
        assert_eq!(
            String::from_utf8(metadata.encode().unwrap()).unwrap(),
            ORBAX
        );
        assert_eq!(Metadata::decode(ORBAX.as_bytes()).unwrap(), metadata);
    }

    #[test]
    fn zero_extents_become_one() {
        let dtype = DType::of(PrimitiveType::F32).unwrap();
        let metadata = Metadata::new(&[0, 3], &[0, 3], dtype, Codec::Raw).unwrap();
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
            Metadata::decode(ORBAX.replace(from, to).as_bytes()).unwrap();
        }
        let other = ORBAX
            .replace("bfloat16", ">f4")
            .replace(r#""C""#, r#""F""#)
            .replace(r#"":".""#, r#"":"/""#);
        let metadata = Metadata::decode(other.as_bytes()).unwrap();
        assert!(metadata.big_endian && metadata.order == Order::F && metadata.separator == '/');
        assert_eq!(metadata.chunk_strides().unwrap(), [4, 8]);
        assert_eq!(
            Metadata::decode(&metadata.encode().unwrap()).unwrap(),
            metadata
        );
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
            let error = Metadata::decode(ORBAX.replace(from, to).as_bytes()).unwrap_err();
            assert_eq!(
                matches!(error, Error::Unsupported(_)),
                unsupported,
                "{from} -> {to}: {error}"
            );
        }
        assert!(Metadata::decode(&vec![b' '; MAX_METADATA_BYTES + 1]).is_err());
        assert!(Metadata::decode(b"").is_err());
    }

    proptest::proptest! {
        #[test]
        fn no_change_of_a_few_bytes_panics(changes in proptest::collection::vec((0..ORBAX.len(), proptest::prelude::any::<u8>()), 1..4)) {
            let mut bytes = ORBAX.as_bytes().to_vec();
            for (at, byte) in changes {
                bytes[at] = byte;
            }
            if let Ok(metadata) = Metadata::decode(&bytes) {
                // What is taken can be laid out and written again.
                let _ = (metadata.chunk_bytes(), metadata.chunk_strides());
                proptest::prop_assert_eq!(Metadata::decode(&metadata.encode().unwrap()).unwrap(), metadata);
            }
        }
    }
}
