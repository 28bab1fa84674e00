//! Runs `tests/tensorstore/peer.py` of the crate that this is compiled into: the crate above includes it too.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The Python of `WAYSTATION_TEST_PYTHON`, else of `.venv` at the top of the repository.
fn python() -> PathBuf {
    let named = std::env::var_os("WAYSTATION_TEST_PYTHON").filter(|python| !python.is_empty());
    let python = named.map(PathBuf::from).or_else(|| {
        let above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
        let mut pythons = above.map(|folder| folder.join(".venv/bin/python"));
        pythons.find(|python| python.is_file())
    });
    python.expect(
        "no .venv: run `make venv`, or set WAYSTATION_TEST_PYTHON to a Python with orbax-checkpoint",
    )
}

pub(crate) fn peer(command: &str, folder: &Path) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tensorstore/peer.py");
    let ended = Command::new(python())
        .arg(script)
        .arg(command)
        .arg(folder)
        .output()
        .unwrap();
    assert!(
        ended.status.success(),
        "peer.py {command}: {}\n{}{}",
        ended.status,
        String::from_utf8_lossy(&ended.stdout),
        String::from_utf8_lossy(&ended.stderr)
    );
}
