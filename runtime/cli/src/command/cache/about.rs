//! What is said of one entry.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use waystation_cache::{Text, envelope::Opened};
use waystation_proto::waystation::ExecutableInfo;

/// All that is known of an entry but where it lies.
pub(super) fn entry(opened: &Opened) -> Value {
    let (entry, provenance) = (&opened.entry, &opened.provenance);
    let components: serde_json::Map<_, _> = provenance
        .components
        .iter()
        .map(|(name, digest)| (name.clone(), json!(digest)))
        .collect();
    let spans = provenance
        .components
        .iter()
        .any(|(name, _)| name == "platform/spanning");
    json!({
        "program": entry.info.name,
        "replicas": entry.info.num_replicas,
        "partitions": entry.info.num_partitions,
        "spans_workers": spans,
        "pieces": pieces(&entry.info),
        "executable_bytes": entry.executable.len(),
        "text_bytes": entry.text.as_ref().map_or(0, Text::bytes),
        "writer": provenance.writer,
        "created_unix_ms": provenance.created_unix_ms,
        "compile_seconds": provenance.compile_time().as_secs_f64(),
        "components": components,
    })
}

/// The arguments and results of a program by how they are cut into pieces: `4x2`, and how many arrays are cut so.
fn pieces(info: &ExecutableInfo) -> BTreeMap<String, u64> {
    let mut arrays = BTreeMap::new();
    for value in info.parameters.iter().chain(&info.results) {
        let sharding = value.sharding.as_ref();
        // Behind the array's dimensions stand those over which pieces are repeated.
        let pieces = sharding.and_then(|sharding| {
            let pieces = &sharding.tile_assignment_dimensions;
            pieces.get(..value.dims.len())
        });
        let cut = pieces.filter(|pieces| pieces.iter().any(|count| *count != 1));
        let name = cut.map_or_else(
            || "whole".to_owned(),
            |cut| cut.iter().map(i64::to_string).collect::<Vec<_>>().join("x"),
        );
        *arrays.entry(name).or_default() += 1;
    }
    arrays
}

#[cfg(test)]
mod tests {
    use waystation_proto::{waystation::executable_info, xla::OpSharding};

    use super::*;

    #[test]
    fn arrays_are_told_by_their_pieces() {
        let value = |rank: usize, pieces: &[i64]| executable_info::Value {
            dims: vec![8; rank],
            sharding: Some(OpSharding {
                tile_assignment_dimensions: pieces.to_vec(),
                ..OpSharding::default()
            }),
            ..executable_info::Value::default()
        };
        let info = ExecutableInfo {
            // The last dimension repeats the pieces.
            parameters: vec![value(2, &[2, 4]), value(2, &[2, 4, 2]), value(0, &[])],
            results: vec![value(1, &[8]), value(1, &[1, 8]), value(2, &[8])],
            ..ExecutableInfo::default()
        };
        let found: Vec<_> = pieces(&info).into_iter().collect();
        let found: Vec<_> = found
            .iter()
            .map(|(name, count)| (&**name, *count))
            .collect();
        assert_eq!(found, [("2x4", 2), ("8", 1), ("whole", 3)]);
    }
}
