//! XLA's text of an optimized program. The C API gives it as a proto only, and printing that is XLA's own business; so where
//! no text has been kept, the program is compiled once more with XLA's dumps going to a private folder, and the text is read
//! from there.

use std::{fs, io};

use tempfile::TempDir;
use waystation_proto::tensorflow::{StatusProto, error::Code};

use crate::{program, status};

/// How XLA ends the name of the file that has the program after all passes.
const SUFFIX: &str = "after_optimizations.txt";

/// Larger texts are refused before they are read.
const MAX_TEXT_BYTES: u64 = 1 << 30;

/// A private folder for a compile's dumps, which goes when it is dropped.
pub(crate) fn folder() -> Result<TempDir, StatusProto> {
    let folder = tempfile::Builder::new()
        .prefix("waystation-text-")
        .tempdir();
    folder.map_err(|error| unreadable(&error))
}

/// The plugin's options, with XLA's dumps going to the folder: the texts, and what else is asked for.
pub(crate) fn options(
    options: &[u8],
    folder: &TempDir,
    dump: Option<&program::Dump>,
) -> Result<Vec<u8>, StatusProto> {
    program::with_dump(options, folder.path(), dump)
        .map_err(|error| status::invalid(error.to_string()))
}

/// The text that a compile has left in the folder. Blocks.
pub(crate) fn read(folder: &TempDir) -> Result<String, StatusProto> {
    let folder = folder.path();
    let mut best: Option<(u64, std::path::PathBuf)> = None;
    for entry in fs::read_dir(folder).map_err(|error| unreadable(&error))? {
        let entry = entry.map_err(|error| unreadable(&error))?;
        if entry.file_name().to_string_lossy().ends_with(SUFFIX) {
            let bytes = entry.metadata().map_err(|error| unreadable(&error))?.len();
            // Small helper modules are dumped too; the program is the largest.
            if best.as_ref().is_none_or(|(most, _)| bytes > *most) {
                best = Some((bytes, entry.path()));
            }
        }
    }
    match best {
        None => Err(status::unimplemented(
            "the plugin writes no text of its optimized programs",
        )),
        Some((bytes, _)) if bytes > MAX_TEXT_BYTES => Err(status::exhausted(format!(
            "the program's text has {bytes} bytes, more than {MAX_TEXT_BYTES}"
        ))),
        Some((_, path)) => fs::read_to_string(path).map_err(|error| unreadable(&error)),
    }
}

fn unreadable(error: &io::Error) -> StatusProto {
    status::of(
        Code::Unavailable,
        format!("the folder for the program's text cannot be used: {error}"),
    )
}
