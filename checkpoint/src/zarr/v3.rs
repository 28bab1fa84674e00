//! The metadata file of version 3, `zarr.json`.

mod codecs;
mod fill;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use self::codecs::{Chain, Named, WrittenCodec};
use super::{DType, Error, Format, Grid, Keys, Metadata, Order, Result, malformed};

/// The members in the order TensorStore writes them, which is alphabetical.
#[derive(Serialize)]
struct Written<'a> {
    chunk_grid: Named<WrittenGrid<'a>>,
    chunk_key_encoding: Named<WrittenKeys>,
    codecs: Vec<WrittenCodec<'a>>,
    data_type: &'static str,
    fill_value: Value,
    node_type: &'static str,
    shape: &'a [i64],
    zarr_format: u32,
}

#[derive(Serialize)]
struct WrittenGrid<'a> {
    chunk_shape: &'a [i64],
}

#[derive(Serialize)]
struct WrittenKeys {
    separator: char,
}

/// The members as read. Of attributes and dimension names nothing is needed.
#[derive(Deserialize)]
struct Read {
    zarr_format: u32,
    node_type: String,
    shape: Vec<i64>,
    data_type: Value,
    chunk_grid: Extension,
    chunk_key_encoding: Extension,
    fill_value: Value,
    codecs: Vec<Extension>,
    #[serde(default)]
    storage_transformers: Vec<Value>,
    #[serde(default, rename = "attributes")]
    _attributes: Option<Map<String, Value>>,
    #[serde(default, rename = "dimension_names")]
    _dimension_names: Option<Vec<Option<String>>>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// An extension point: a name and its configuration, or the name alone.
#[derive(Deserialize)]
#[serde(untagged)]
enum Extension {
    Short(String),
    Long {
        name: String,
        #[serde(default)]
        configuration: Map<String, Value>,
    },
}

impl Extension {
    fn name(&self) -> &str {
        match self {
            Extension::Short(name) | Extension::Long { name, .. } => name,
        }
    }

    /// The configuration; none is an empty one.
    fn configuration<T: serde::de::DeserializeOwned>(self) -> Result<T> {
        let (name, configuration) = match self {
            Extension::Short(name) => (name, Map::new()),
            Extension::Long {
                name,
                configuration,
            } => (name, configuration),
        };
        serde_json::from_value(Value::Object(configuration))
            .or_else(|error| malformed(format!("the configuration of {name:?}: {error}")))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RegularGrid {
    chunk_shape: Vec<i64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Separator {
    separator: Option<String>,
}

/// The bytes of the file.
pub(super) fn encode(metadata: &Metadata) -> Result<Vec<u8>> {
    let default = if metadata.keys.prefixed {
        ("default", '/')
    } else {
        ("v2", '.')
    };
    let separator = metadata.keys.separator;
    let written = Written {
        chunk_grid: Named {
            configuration: Some(WrittenGrid {
                chunk_shape: metadata.grid.chunks(),
            }),
            name: "regular",
        },
        chunk_key_encoding: Named {
            configuration: (separator != default.1).then_some(WrittenKeys { separator }),
            name: default.0,
        },
        codecs: codecs::written(metadata)?,
        data_type: metadata.dtype.v3_name(),
        fill_value: fill::zero(metadata.dtype),
        node_type: "array",
        shape: metadata.grid.shape(),
        zarr_format: 3,
    };
    serde_json::to_vec(&written).or_else(|error| malformed(error.to_string()))
}

/// Reads the file.
pub(super) fn decode(bytes: &[u8]) -> Result<Metadata> {
    let read: Read = serde_json::from_slice(bytes)
        .or_else(|error| malformed(format!("not zarr v3: {error}")))?;
    if read.zarr_format != 3 {
        return malformed(format!("zarr_format {}", read.zarr_format));
    }
    if read.node_type != "array" {
        return malformed(format!("node_type {:?}", read.node_type));
    }
    if !read.storage_transformers.is_empty() {
        return unsupported("an array with storage transformers");
    }
    // What the format will have that is not known here is marked where it may be passed over.
    let needed = |value: &Value| value.get("must_understand") != Some(&Value::Bool(false));
    if let Some((name, _)) = read.others.iter().find(|(_, value)| needed(value)) {
        return unsupported(format!("the member {name:?}"));
    }
    let Value::String(name) = &read.data_type else {
        return unsupported("a data_type with a configuration");
    };
    let Some(dtype) = DType::parse_v3(name) else {
        return unsupported(format!("data_type {name:?}"));
    };
    fill::check(dtype, &read.fill_value)?;
    if read.chunk_grid.name() != "regular" {
        return unsupported(format!("chunk_grid {:?}", read.chunk_grid.name()));
    }
    let chunks: RegularGrid = read.chunk_grid.configuration()?;
    let grid = Grid::new(&read.shape, &chunks.chunk_shape)?;
    let Chain {
        big_endian,
        codec,
        shards,
    } = codecs::read(read.codecs, dtype, grid.chunks())?;
    Ok(Metadata {
        format: Format::Zarr3,
        grid,
        dtype,
        big_endian,
        codec,
        order: Order::C,
        keys: keys(read.chunk_key_encoding)?,
        shards,
    })
}

fn keys(encoding: Extension) -> Result<Keys> {
    let mut keys = match encoding.name() {
        "default" => Keys::V3,
        "v2" => Keys::V2,
        other => return unsupported(format!("chunk_key_encoding {other:?}")),
    };
    let read: Separator = encoding.configuration()?;
    match read.separator.as_deref() {
        None => {}
        Some(".") => keys.separator = '.',
        Some("/") => keys.separator = '/',
        Some(other) => return malformed(format!("the separator {other:?} of chunk names")),
    }
    Ok(keys)
}

fn unsupported<T>(what: impl Into<String>) -> Result<T> {
    Err(Error::Unsupported(what.into()))
}

#[cfg(test)]
mod tests;
