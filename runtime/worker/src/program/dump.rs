//! XLA's dump options, and the others that name a file: a client's are taken out, an operator's are kept apart, the worker's
//! own are put in.
//!
//! A client's paths mean nothing on a worker's disk and must not be written to or read there.

use std::path::Path;

use waystation_stablehlo::{compile_options::ENV_OPTION_OVERRIDES, wire::Message};

use super::{Error, flags::Override, options::read};

/// Options that name a file or a directory and whose name does not say so.
const PATHS: [&str; 1] = ["xla_gpu_load_autotune_results_from"];

/// Words in the names of options that name a file or a directory, known ones and others.
const PATH_WORDS: [&str; 7] = [
    "dir",
    "directory",
    "file",
    "filename",
    "files",
    "path",
    "paths",
];

/// What an operator asks to be dumped, by `--xla_dump_...` flags of the proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dump {
    /// `--xla_dump_to`.
    pub to: String,
    /// The others: which dumps.
    pub(crate) flags: Vec<Override>,
}

/// True for an option that only says what is dumped, and where.
pub(super) fn is_dump(name: &str) -> bool {
    name.starts_with("xla_dump_")
        || name.starts_with("xla_gpu_dump_")
        || name.starts_with("xla_gpu_experimental_dump_")
        || name == "xla_enable_dumping"
}

/// True for an option that a client may not set on a worker.
pub(super) fn is_client_path(name: &str) -> bool {
    let says_so = name.split('_').any(|word| PATH_WORDS.contains(&word));
    // Not every path is one of files.
    is_dump(name) || PATHS.contains(&name) || (says_so && !name.ends_with("_fast_path"))
}

/// An operator's dump options, when they say where to.
pub(super) fn requested(mut flags: Vec<Override>) -> Option<Dump> {
    let place = flags.iter().position(|flag| flag.name == "xla_dump_to")?;
    let to = flags.remove(place).words()?.to_owned();
    Some(Dump { to, flags })
}

/// Options that make the plugin write the program's HLO as text files into a directory while it compiles, beside what
/// `asked` asks for. Takes the plugin's options as [`super::prepare`] made them, which say nothing of dumps.
///
/// # Errors
/// When the options are not an `xla.CompileOptionsProto` or the directory's name is not UTF-8.
pub fn with_dump(
    plugin_options: &[u8],
    directory: &Path,
    asked: Option<&Dump>,
) -> Result<Vec<u8>, Error> {
    let to = directory.to_str().ok_or_else(|| Error::DumpDirectory {
        directory: directory.to_string_lossy().into_owned(),
    })?;
    let mut options: Message<'_> = read("CompileOptionsProto", plugin_options)?;
    let own = [
        Override::text("xla_dump_to", to),
        Override::truth("xla_dump_hlo_as_text", true),
    ];
    let asked = asked.map_or(&[][..], |dump| &dump.flags);
    let others = asked
        .iter()
        .filter(|flag| own.iter().all(|own| own.name != flag.name));
    for entry in own.iter().chain(others) {
        options.push_bytes(ENV_OPTION_OVERRIDES, &entry.encode());
    }
    Ok(options.encode())
}
