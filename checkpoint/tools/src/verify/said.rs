//! What the files of an item say of its arrays, against what the arrays are.

use std::collections::BTreeMap;

use serde_json::Value;
use waystation_checkpoint::zarr::{Codec, Metadata, Order};
use waystation_proto::xla::PrimitiveType;

use super::{Kind, Report};
use crate::info::{ARRAY_METADATAS, ArrayMetadata, Leaf, METADATA, SHARDING, STRINGS};
use crate::item::{Array, Item};
use waystation_checkpoint::Layout;

/// What Orbax calls leaves.
const VALUE_TYPES: [&str; 9] = [
    "jax.Array",
    "np.ndarray",
    "scalar",
    "string",
    "None",
    "Dict",
    "List",
    "Tuple",
    "NamedTuple",
];

pub(super) fn check(item: &Item, report: &mut Report) {
    leaves(item, report);
    layouts(item, report);
    for (name, layouts) in &item.arrays {
        let Some(array) = layouts.first() else {
            continue;
        };
        report.arrays += 1;
        match (&array.metadata, &array.fault) {
            (Some(metadata), _) => said_of(item, name, array, metadata, report),
            (None, fault) => report.fault(
                Kind::DamagedMetadata,
                Some(name),
                array.layout.format().metadata_file(),
                fault.clone().unwrap_or_default(),
            ),
        }
    }
    for name in item.metadatas.by_array.keys() {
        if !item.arrays.contains_key(name) {
            report.fault(
                Kind::Contradiction,
                Some(name),
                ARRAY_METADATAS,
                "it speaks of an array that is not there",
            );
        }
    }
    for name in item.shardings.keys() {
        if !item.arrays.contains_key(name) {
            report.fault(
                Kind::Contradiction,
                Some(name),
                SHARDING,
                "it speaks of an array that is not there",
            );
        }
    }
}

/// The tree against the arrays and texts.
fn leaves(item: &Item, report: &mut Report) {
    let Some(tree) = &item.tree else {
        if item.faults.iter().all(|fault| fault.object != METADATA) {
            report.fault(
                Kind::Unreadable,
                None,
                METADATA,
                "it is not there, so Orbax does not know the tree",
            );
        }
        return;
    };
    for (key, reason) in &tree.odd {
        report.fault(
            Kind::Contradiction,
            None,
            METADATA,
            format!("{key}: {reason}"),
        );
    }
    // Older versions of Orbax write none of them.
    let have_shapes = tree.leaves.values().any(|leaf| leaf.write_shape.is_some());
    for (name, leaf) in &tree.leaves {
        if have_shapes && leaf.value_type == "jax.Array" && leaf.write_shape.is_none() {
            let reason = "no write_shape, which other arrays have";
            report.fault(Kind::Contradiction, Some(name), METADATA, reason);
        }
        if leaf.is_array() && !item.arrays.contains_key(name) {
            report.fault(
                Kind::MissingArray,
                Some(name),
                METADATA,
                "the array is in no layout there",
            );
        }
        if !VALUE_TYPES.contains(&leaf.value_type.as_str()) {
            let reason = format!("the value_type {:?} is none of Orbax's", leaf.value_type);
            report.fault(Kind::Unusual, Some(name), METADATA, reason);
        }
        if leaf.value_type == "string" && !item.strings.contains_key(name) {
            report.fault(
                Kind::Contradiction,
                Some(name),
                STRINGS,
                "the text is not there",
            );
        }
    }
    for name in item.strings.keys() {
        if tree
            .leaves
            .get(name)
            .is_none_or(|leaf| leaf.value_type != "string")
        {
            let reason = format!("a text that {METADATA} does not know");
            report.fault(Kind::Contradiction, Some(name), STRINGS, reason);
        }
    }
    for name in item.arrays.keys() {
        if tree.leaves.get(name).is_none_or(|leaf| !leaf.is_array()) {
            let reason = format!("an array that {METADATA} does not know");
            report.fault(Kind::Extra, Some(name), "", reason);
        }
    }
}

/// Where the arrays are against where they are said to be. One fault for all arrays of a layout.
fn layouts(item: &Item, report: &mut Report) {
    let Some(said) = item.said_layout() else {
        return;
    };
    let mut elsewhere: BTreeMap<Layout, Vec<&str>> = BTreeMap::new();
    for (name, layouts) in &item.arrays {
        if let Some(array) = layouts.first().filter(|array| array.layout != said) {
            elsewhere.entry(array.layout).or_default().push(name);
        }
    }
    for (layout, names) in elsewhere {
        let (first, count) = (names.first().copied().unwrap_or_default(), names.len());
        let reason = format!(
            "it says use_ocdbt={} and use_zarr3={}, that is {said}, but {count} arrays ({first:?} ...) are {layout}: plain \
             Orbax cannot restore them; `convert --in_place` mends it, and saving with the matching \
             --checkpoint_format avoids it",
            said.is_ocdbt(),
            said.format() != waystation_checkpoint::zarr::Format::Zarr2,
        );
        report.fault(Kind::Mismatch, None, METADATA, reason);
    }
}

fn said_of(item: &Item, name: &str, array: &Array, metadata: &Metadata, report: &mut Report) {
    let file = array.layout.format().metadata_file();
    if metadata.order == Order::F {
        report.fault(
            Kind::Unusual,
            Some(name),
            file,
            "order \"F\": Orbax writes \"C\"",
        );
    }
    if metadata.big_endian && metadata.dtype.has_byte_order() {
        let reason = "elements are big-endian: Orbax writes them little-endian";
        report.fault(Kind::Unusual, Some(name), file, reason);
    }
    let leaf = item.tree.as_ref().and_then(|tree| tree.leaves.get(name));
    if let Some(leaf) = leaf {
        said_in_tree(name, leaf, metadata, report);
    }
    for said in item.array_metadatas(name) {
        said_by_process(name, said, leaf, metadata, report);
    }
    if let Some(reason) = item
        .shardings
        .get(name)
        .and_then(|sharding| sharding_fault(sharding, metadata.grid.shape()))
    {
        report.fault(Kind::Contradiction, Some(name), SHARDING, reason);
    }
}

fn said_in_tree(name: &str, leaf: &Leaf, metadata: &Metadata, report: &mut Report) {
    let shape = metadata.grid.shape();
    if leaf.value_type == "scalar" && !shape.is_empty() {
        let reason = format!("a scalar, but the array has shape {shape:?}");
        report.fault(Kind::Contradiction, Some(name), METADATA, reason);
    }
    if let Some(reason) = leaf
        .write_shape
        .as_ref()
        .and_then(|said| write_shape_fault(said, metadata))
    {
        report.fault(Kind::Contradiction, Some(name), METADATA, reason);
    }
}

fn said_by_process(
    name: &str,
    said: &ArrayMetadata,
    leaf: Option<&Leaf>,
    metadata: &Metadata,
    report: &mut Report,
) {
    let mut fault = |reason: String| {
        report.fault(Kind::Contradiction, Some(name), ARRAY_METADATAS, reason);
    };
    let (shape, chunks) = (metadata.grid.shape(), metadata.grid.chunks());
    if let Some(reason) = said
        .write_shape
        .as_ref()
        .and_then(|said| write_shape_fault(said, metadata))
    {
        fault(reason);
    }
    let in_tree = leaf.and_then(|leaf| leaf.write_shape.as_ref());
    if let (Some(in_tree), Some(here)) = (in_tree, &said.write_shape)
        && in_tree != here
    {
        fault(format!(
            "write_shape {here:?}, but {METADATA} has {in_tree:?}"
        ));
    }
    // Pathways' handler says the whole shape, whatever the worker has chosen.
    if let Some(here) = &said.chunk_shape
        && here != chunks
        && here != shape
        && here
            .iter()
            .map(|&extent| extent.max(1))
            .ne(chunks.iter().copied())
    {
        fault(format!("chunk_shape {here:?}, but chunks are {chunks:?}"));
    }
    if let Some(kind) = &said.prng_impl {
        let words = match kind.as_str() {
            "threefry2x32" => Some(2),
            "rbg" | "unsafe_rbg" => Some(4),
            _ => None,
        };
        match words {
            None => fault(format!("the PRNG implementation {kind:?} is none of JAX's")),
            Some(words)
                if shape.last() != Some(&words)
                    || metadata.dtype.primitive() != PrimitiveType::U32 =>
            {
                fault(format!(
                    "a key of {kind} has {words} words of uint32, the array is {} {shape:?}",
                    metadata.dtype.v3_name()
                ));
            }
            Some(_) => {}
        }
    }
}

/// A piece that a process writes makes up the array, and is made up of chunks.
fn write_shape_fault(said: &[i64], metadata: &Metadata) -> Option<String> {
    let (shape, chunks) = (metadata.grid.shape(), metadata.grid.chunks());
    if said == shape {
        return None;
    }
    let fits = said.len() == shape.len()
        && said
            .iter()
            .zip(shape.iter().zip(chunks))
            .all(|(&said, (&dim, &chunk))| said > 0 && dim % said == 0 && said % chunk == 0);
    (!fits).then(|| {
        format!("write_shape {said:?} does not fit shape {shape:?} with chunks {chunks:?}")
    })
}

fn sharding_fault(sharding: &Value, shape: &[i64]) -> Option<String> {
    match sharding["sharding_type"].as_str() {
        Some("NamedSharding") => {}
        Some("SingleDeviceSharding") => {
            let named = sharding["device_str"].is_string();
            return (!named).then(|| "a single device without device_str".to_owned());
        }
        Some("GSPMDSharding" | "PositionalSharding") => return None,
        other => return Some(format!("the sharding_type {other:?} is none of Orbax's")),
    }
    let Some(mesh) = sharding["shape"]
        .as_array()
        .and_then(|mesh| mesh.iter().map(Value::as_i64).collect::<Option<Vec<_>>>())
    else {
        return Some("a mesh without a shape".to_owned());
    };
    let names: Vec<_> = sharding["axis_names"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|name| name.as_str().unwrap_or_default())
        .collect();
    if names.len() != mesh.len() {
        return Some(format!(
            "{} axes in a mesh of {} dimensions",
            names.len(),
            mesh.len()
        ));
    }
    if let Some(types) = sharding["axis_types"].as_array()
        && types.len() != mesh.len()
    {
        return Some(format!(
            "{} axis_types in a mesh of {} dimensions",
            types.len(),
            mesh.len()
        ));
    }
    let devices = &sharding["device_mesh"]["mesh"];
    // Older versions of Orbax do not name the devices at all.
    if sharding.get("device_mesh").is_some() && !devices.is_array() {
        return Some("a device_mesh without devices".to_owned());
    }
    let product = mesh
        .iter()
        .try_fold(1i64, |product, &n| product.checked_mul(n));
    if devices.is_array() && product != Some(count(devices, 0)) {
        return Some(format!(
            "a mesh of shape {mesh:?} with {} devices",
            count(devices, 0)
        ));
    }
    let spec = sharding["partition_spec"].as_array();
    let spec = spec.map_or(&[][..], Vec::as_slice);
    if spec.len() > shape.len() {
        return Some(format!(
            "it partitions {} dimensions of {}",
            spec.len(),
            shape.len()
        ));
    }
    for (part, dim) in spec.iter().zip(shape) {
        let axes: Vec<&str> = match part {
            Value::Null => continue,
            Value::String(axis) => vec![axis],
            Value::Array(axes) => axes.iter().filter_map(Value::as_str).collect(),
            _ => return Some(format!("the partition {part}")),
        };
        let mut cuts = 1i64;
        for axis in axes {
            let Some(at) = names.iter().position(|name| *name == axis) else {
                return Some(format!("there is no axis {axis:?}"));
            };
            cuts = cuts.saturating_mul(mesh[at]);
        }
        if cuts <= 0 || dim % cuts != 0 {
            return Some(format!("a dimension of {dim} cut {cuts} ways"));
        }
    }
    None
}

/// The devices of nested lists, a few deep.
fn count(mesh: &Value, depth: usize) -> i64 {
    match mesh {
        Value::Array(inner) if depth < 32 => {
            inner.iter().map(|inner| count(inner, depth + 1)).sum()
        }
        Value::Array(_) => 0,
        _ => 1,
    }
}

/// Whether a flipped bit in a chunk may pass for data.
pub(super) fn is_unchecked(codec: Codec, stored: &[u8]) -> bool {
    match codec {
        Codec::Raw => true,
        // The descriptor's checksum flag (RFC 8878, 3.1.1.1.1).
        Codec::Zstd { .. } => stored
            .get(4)
            .is_none_or(|descriptor| descriptor & 0b100 == 0),
    }
}
