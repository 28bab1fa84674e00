//! Programs of an installed JAX, from two folders and two processes with other line numbers: this crate's digest tells apart
//! exactly what JAX's own hash tells apart, which is taken after MLIR has stripped all debug info.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

const SCRIPT: &str = include_str!("oracle.py");

/// The Python that has JAX.
fn python() -> PathBuf {
    std::env::var_os("WAYSTATION_TEST_PYTHON").map_or_else(
        || {
            PathBuf::from(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/../../.venv/bin/python"
            ))
        },
        PathBuf::from,
    )
}

/// Name, artifact and JAX's hash of every program, written by the script from `folder` with so many lines before it.
fn programs(folder: &Path, lines: usize) -> BTreeMap<String, (Vec<u8>, String)> {
    fs::create_dir_all(folder.join("out")).expect("a folder");
    let script = folder.join("model.py");
    fs::write(&script, "\n".repeat(lines) + SCRIPT).expect("written");
    let ended = Command::new(python())
        .arg(&script)
        .arg(folder.join("out"))
        .current_dir(folder)
        .output()
        .expect("a Python with JAX: run `make venv`, or name one in WAYSTATION_TEST_PYTHON");
    assert!(
        ended.status.success(),
        "{}",
        String::from_utf8_lossy(&ended.stderr)
    );
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder.join("out")).expect("listed") {
        let path = entry.expect("an entry").path();
        if path
            .extension()
            .is_some_and(|extension| extension == "mlirbc")
        {
            let hash = fs::read_to_string(path.with_extension("hash")).expect("beside it");
            let name = path
                .file_stem()
                .expect("a name")
                .to_string_lossy()
                .into_owned();
            found.insert(name, (fs::read(&path).expect("read"), hash));
        }
    }
    found
}

#[test]
fn programs_are_told_apart_as_jax_tells_them_apart() {
    let temp = tempfile::tempdir().expect("a folder");
    let here = programs(&temp.path().join("here"), 0);
    let there = programs(&temp.path().join("some/where/else"), 77);
    assert!(here.len() > 45, "only {} programs", here.len());
    assert!(here.keys().eq(there.keys()));

    // JAX's hash to the digest and the program's name that it was first seen with, and the other way round.
    let mut by_hash: BTreeMap<&str, ([u8; 32], &str)> = BTreeMap::new();
    let mut by_digest: BTreeMap<[u8; 32], (&str, &str)> = BTreeMap::new();
    for (name, (program, hash)) in here.iter().chain(&there) {
        let digest = waystation_stablehlo::digest(program)
            .unwrap_or_else(|refusal| panic!("{name}: {refusal:?}"));
        let (first, other) = *by_hash.entry(hash).or_insert((digest, name));
        assert_eq!(first, digest, "a needless miss: {name} and {other}");
        let (first, other) = *by_digest.entry(digest).or_insert((hash, name));
        assert_eq!(first, hash, "a wrong hit: {name} and {other}");
    }
    for (name, (program, _)) in &here {
        assert_ne!(*program, there[name].0, "{name}: the bytes do differ");
    }
}
