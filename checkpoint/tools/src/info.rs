//! What Orbax writes beside arrays: `_METADATA`, `_sharding`, `array_metadatas`, `_strings.json`.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::prelude::{BASE64_URL_SAFE, BASE64_URL_SAFE_NO_PAD};
use serde_json::{Map, Value};

use crate::place::Place;
use crate::{Error, Result};

/// The largest of these files that is read. Of a tree of 100,000 leaves it has about 30 MB.
const MAX_JSON_BYTES: u64 = 256 << 20;

/// What stands in `_METADATA`.
pub(crate) const METADATA: &str = "_METADATA";
/// The shardings that arrays had.
pub(crate) const SHARDING: &str = "_sharding";
/// The leaves that are texts.
pub(crate) const STRINGS: &str = "_strings.json";
/// What each process wrote of each array.
pub(crate) const ARRAY_METADATAS: &str = "array_metadatas";

/// A leaf of the saved tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leaf {
    /// `jax.Array`, `np.ndarray`, `scalar`, `string`, `None`, `Dict`, `List`, or what another version of Orbax calls it.
    pub value_type: String,
    /// Whether there is nothing on disk.
    pub is_skipped: bool,
    /// The shape of what one process wrote at once.
    pub write_shape: Option<Vec<i64>>,
}

impl Leaf {
    /// Whether an array of its name must lie in the item.
    #[must_use]
    pub fn is_array(&self) -> bool {
        !self.is_skipped
            && !matches!(
                self.value_type.as_str(),
                "string" | "None" | "Dict" | "List"
            )
    }
}

/// `_METADATA`.
#[derive(Debug, Clone)]
pub struct TreeMetadata {
    /// The file as it is, for what is written anew.
    pub(crate) json: Map<String, Value>,
    /// By name: the keys on the way to the leaf, joined with dots.
    pub leaves: BTreeMap<String, Leaf>,
    /// Entries whose key is not what their `key_metadata` spells, with the reason.
    pub(crate) odd: Vec<(String, &'static str)>,
    /// Whether arrays lie in a database; older files do not say.
    pub use_ocdbt: Option<bool>,
    /// Whether arrays are zarr v3; older files do not say, and mean that they are not.
    pub use_zarr3: Option<bool>,
}

/// One array in `array_metadatas/process_*`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ArrayMetadata {
    /// The shape of what one process wrote at once.
    pub write_shape: Option<Vec<i64>>,
    /// The shape of chunks.
    pub chunk_shape: Option<Vec<i64>>,
    /// The implementation of a typed PRNG key, whose data the array is.
    pub prng_impl: Option<String>,
}

impl TreeMetadata {
    pub(crate) async fn read(place: &Place) -> Result<Option<TreeMetadata>> {
        let Some(json) = object(place, METADATA).await? else {
            return Ok(None);
        };
        TreeMetadata::of(json)
            .map(Some)
            .map_err(|reason| place.malformed(METADATA, reason))
    }

    fn of(json: Map<String, Value>) -> std::result::Result<TreeMetadata, String> {
        let mut leaves = BTreeMap::new();
        let tree = match json.get("tree_metadata") {
            Some(Value::Object(tree)) => tree,
            _ => return Err("no tree_metadata".to_owned()),
        };
        let mut odd = Vec::new();
        for (key, entry) in tree {
            odd.extend(odd_key(key, entry).map(|reason| (key.clone(), reason)));
            let name = name(entry).ok_or_else(|| format!("no key_metadata of {key}"))?;
            let value = &entry["value_metadata"];
            let leaf = Leaf {
                value_type: value["value_type"].as_str().unwrap_or_default().to_owned(),
                is_skipped: value["skip_deserialize"].as_bool().unwrap_or(false),
                write_shape: shape(&value["write_shape"]),
            };
            // Two keys may give one name (`{"a.b": x}` and `{"a": {"b": y}}`): then they share an array.
            leaves.insert(name, leaf);
        }
        let flag = |name: &str| json.get(name).and_then(Value::as_bool);
        Ok(TreeMetadata {
            use_ocdbt: flag("use_ocdbt"),
            use_zarr3: flag("use_zarr3"),
            leaves,
            odd,
            json,
        })
    }

    /// The file for arrays that lie otherwise; `write_shapes` has those that are other than they were.
    pub(crate) fn rewritten(
        &self,
        use_ocdbt: bool,
        use_zarr3: bool,
        write_shapes: &BTreeMap<String, Vec<i64>>,
    ) -> Vec<u8> {
        let mut json = self.json.clone();
        json.insert("use_ocdbt".to_owned(), Value::Bool(use_ocdbt));
        json.insert("use_zarr3".to_owned(), Value::Bool(use_zarr3));
        if let Some(Value::Object(tree)) = json.get_mut("tree_metadata") {
            for entry in tree.values_mut() {
                let Some(shape) = name(entry).and_then(|name| write_shapes.get(&name)) else {
                    continue;
                };
                if let Some(written) = entry
                    .get_mut("value_metadata")
                    .and_then(|value| value.get_mut("write_shape"))
                {
                    *written = Value::from(shape.clone());
                }
            }
        }
        Value::Object(json).to_string().into_bytes()
    }
}

/// What is wrong with the key of an entry, as far as it can be told without Python.
fn odd_key(key: &str, entry: &Value) -> Option<&'static str> {
    let keys = entry.get("key_metadata")?.as_array()?;
    // 1 for a place in a sequence, 2 for a key or an attribute.
    let is_typed = |key: &Value| matches!(key["key_type"].as_u64(), Some(1 | 2));
    if !keys.iter().all(is_typed) {
        return Some("a key_type that is neither 1 nor 2");
    }
    let parts: Option<Vec<&str>> = keys.iter().map(|key| key["key"].as_str()).collect();
    let parts = parts?;
    // Python quotes and escapes others in ways of its own.
    let is_plain = |part: &&str| {
        part.bytes()
            .all(|byte| matches!(byte, b' '..=b'~') && !matches!(byte, b'\'' | b'\\'))
    };
    if !parts.iter().all(is_plain) {
        return None;
    }
    let quoted: Vec<String> = parts.iter().map(|part| format!("'{part}'")).collect();
    let spelled = match quoted.as_slice() {
        [one] => format!("({one},)"),
        several => format!("({})", several.join(", ")),
    };
    (spelled != key).then_some("its key_metadata spells another key")
}

/// The name on disk of an entry of the tree.
fn name(entry: &Value) -> Option<String> {
    let mut parts = Vec::new();
    for key in entry.get("key_metadata")?.as_array()? {
        match key.get("key")? {
            Value::String(text) => parts.push(text.clone()),
            other => parts.push(other.to_string()),
        }
    }
    Some(parts.join("."))
}

fn shape(value: &Value) -> Option<Vec<i64>> {
    value.as_array()?.iter().map(Value::as_i64).collect()
}

async fn object(place: &Place, file: &str) -> Result<Option<Map<String, Value>>> {
    let Some(bytes) = place.get(file, MAX_JSON_BYTES).await? else {
        return Ok(None);
    };
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(json)) => Ok(Some(json)),
        Ok(_) => Err(place.malformed(file, "no JSON object")),
        Err(error) => Err(place.malformed(file, error.to_string())),
    }
}

/// `_sharding`: by array, the sharding as Orbax spells it.
pub(crate) async fn shardings(place: &Place) -> Result<BTreeMap<String, Value>> {
    let mut shardings = BTreeMap::new();
    for (key, value) in object(place, SHARDING).await?.unwrap_or_default() {
        let decoded = BASE64_URL_SAFE
            .decode(&key)
            .or_else(|_| BASE64_URL_SAFE_NO_PAD.decode(&key));
        let name = decoded.ok().and_then(|name| String::from_utf8(name).ok());
        let sharding = value
            .as_str()
            .and_then(|text| serde_json::from_str::<Value>(text).ok());
        let (Some(name), Some(sharding)) = (name, sharding) else {
            return Err(place.malformed(SHARDING, format!("the entry {key:?} cannot be read")));
        };
        shardings.insert(name, sharding);
    }
    Ok(shardings)
}

/// `_strings.json`.
pub(crate) async fn strings(place: &Place) -> Result<BTreeMap<String, String>> {
    let mut strings = BTreeMap::new();
    for (name, value) in object(place, STRINGS).await?.unwrap_or_default() {
        let Value::String(text) = value else {
            return Err(place.malformed(STRINGS, format!("{name:?} is no text")));
        };
        strings.insert(name, text);
    }
    Ok(strings)
}

/// `array_metadatas`: the files and what they say, by array; several processes may have written pieces of one.
pub(crate) async fn array_metadatas(place: &Place) -> Result<ArrayMetadatas> {
    let folder = place.below(ARRAY_METADATAS)?;
    let mut all = ArrayMetadatas::default();
    for (file, _) in folder.listing().await?.files {
        let Some(json) = object(&folder, &file).await? else {
            continue;
        };
        let Some(Value::Array(entries)) = json.get("array_metadatas") else {
            return Err(folder.malformed(&file, "no list array_metadatas"));
        };
        for entry in entries {
            let entry = &entry["array_metadata"];
            let Some(name) = entry["param_name"].as_str() else {
                return Err(folder.malformed(&file, "an entry without param_name"));
            };
            let said = ArrayMetadata {
                write_shape: shape(&entry["write_shape"]),
                chunk_shape: shape(&entry["chunk_shape"]),
                prng_impl: entry["ext_metadata"]["random_key_impl"]
                    .as_str()
                    .map(str::to_owned),
            };
            all.by_array.entry(name.to_owned()).or_default().push(said);
        }
        all.files.insert(file, json);
    }
    Ok(all)
}

/// What `array_metadatas` holds.
#[derive(Debug, Clone, Default)]
pub(crate) struct ArrayMetadatas {
    pub(crate) files: BTreeMap<String, Map<String, Value>>,
    pub(crate) by_array: BTreeMap<String, Vec<ArrayMetadata>>,
}

impl ArrayMetadatas {
    /// A file with other shapes in it.
    pub(crate) fn rewritten(
        file: &Map<String, Value>,
        write_shapes: &BTreeMap<String, Vec<i64>>,
    ) -> Vec<u8> {
        let mut json = file.clone();
        if let Some(Value::Array(entries)) = json.get_mut("array_metadatas") {
            for entry in entries {
                let Some(said) = entry.get_mut("array_metadata") else {
                    continue;
                };
                let shape = said["param_name"]
                    .as_str()
                    .and_then(|name| write_shapes.get(name));
                if let Some(shape) = shape.cloned() {
                    said["write_shape"] = Value::from(shape.clone());
                    said["chunk_shape"] = Value::from(shape);
                }
            }
        }
        Value::Object(json).to_string().into_bytes()
    }
}

/// A sharding in a few words: `('x', None) over {'x': 4}`.
#[must_use]
pub fn sharding_words(sharding: &Value) -> String {
    let kind = sharding["sharding_type"].as_str().unwrap_or("?");
    if kind != "NamedSharding" {
        return match sharding["device_str"].as_str() {
            Some(device) => format!("on {device}"),
            None => kind.to_owned(),
        };
    }
    let axes: Vec<String> = sharding["axis_names"]
        .as_array()
        .into_iter()
        .flatten()
        .zip(sharding["shape"].as_array().into_iter().flatten())
        .map(|(name, extent)| format!("{}={extent}", name.as_str().unwrap_or("?")))
        .collect();
    let parts: Vec<String> = sharding["partition_spec"]
        .as_array()
        .into_iter()
        .flatten()
        .map(part_words)
        .collect();
    format!("P({}) over {}", parts.join(", "), axes.join(" "))
}

fn part_words(part: &Value) -> String {
    match part {
        Value::Null => "None".to_owned(),
        Value::String(axis) => axis.clone(),
        Value::Array(axes) => {
            let axes: Vec<_> = axes.iter().map(part_words).collect();
            format!("({})", axes.join(", "))
        }
        other => other.to_string(),
    }
}

/// A file that may be broken, without which the rest can still be told.
pub(crate) fn or_fault<T: Default>(read: Result<T>, faults: &mut Vec<Error>) -> T {
    read.unwrap_or_else(|error| {
        faults.push(error);
        T::default()
    })
}
