//! XLA's dump options, and the others that name a file: a client's are taken out, an operator's are kept apart, the worker's
//! own are put in.
//!
//! A client's paths mean nothing on a worker's disk and must not be written to or read there.

use std::path::Path;

use memchr::memmem::Finder;
use waystation_stablehlo::{
    compile_options::ENV_OPTION_OVERRIDES,
    wire::{Message, Value},
};

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

/// `DebugOptions.xla_dump_to`.
const TO: u32 = 109;

/// `DebugOptions.xla_dump_to`, and those that make XLA dump without it, to its standard output: `xla_dump_hlo_as_...`,
/// `xla_dump_hlo_snapshots`, `xla_dump_hlo_unoptimized_snapshots`, and which modules, passes and emitters are meant.
const DUMPING: [u32; 14] = [
    TO, 110, 111, 112, 113, 114, 115, 116, 118, 154, 164, 405, 433, 498,
];

/// Messages lie within messages no deeper than this, in what a plugin serializes, down to the debug options.
const DEPTH: usize = 16;

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

/// A serialized executable without the dumps that it was compiled with by [`with_dump`]. It keeps the options it was compiled
/// with, and XLA would write into the folder again, and make it again, wherever the executable is loaded.
///
/// The folder's name is found where it stands, however deep; a plugin that serializes in another way gets back what it wrote.
pub fn without_dump(executable: Vec<u8>, options: &[u8]) -> Vec<u8> {
    let Some(folder) = dumped_to(options) else {
        return executable;
    };
    let folder = Finder::new(folder.as_bytes());
    if folder.find(&executable).is_none() {
        return executable;
    }
    cut(&executable, &folder, DEPTH).unwrap_or(executable)
}

/// The folder that compile options name.
fn dumped_to(options: &[u8]) -> Option<String> {
    let options = Message::parse(options).ok()?;
    let entries = options.repeated(ENV_OPTION_OVERRIDES).ok()?;
    let mut flags = entries.into_iter().rev().map(Override::decode);
    let to = flags.find_map(|flag| flag.ok().filter(|flag| flag.name == "xla_dump_to"))?;
    Some(to.words()?.to_owned())
}

/// A message without what asks for dumps to a folder, in it or in those within it.
fn cut(message: &[u8], folder: &Finder<'_>, depth: usize) -> Option<Vec<u8>> {
    let depth = depth.checked_sub(1)?;
    let mut message = Message::parse(message).ok()?;
    let is_folder = |value: Value<'_>| value == Value::Bytes(folder.needle());
    if message
        .fields()
        .any(|(number, value)| number == TO && is_folder(value))
    {
        DUMPING.iter().for_each(|number| message.remove(*number));
    }
    let asks = |entry: Value<'_>| match entry {
        Value::Bytes(entry) => Override::decode(entry).is_ok_and(|flag| is_dump(&flag.name)),
        _ => false,
    };
    message.remove_where(ENV_OPTION_OVERRIDES, asks);
    message.change_bytes(|_, within| {
        folder.find(within)?;
        cut(within, folder, depth)
    });
    Some(message.encode())
}

#[cfg(test)]
mod tests {
    use super::*;

    const FOLDER: &str = "/tmp/waystation-text-abcdef";

    /// As XLA:CPU serializes: the module's configuration with its debug options, and the compile options, beside code.
    fn executable(debug: &Message<'_>, overrides: &[Override]) -> Vec<u8> {
        let wrap = |number, within: &Message<'_>| {
            let mut message = Message::default();
            message.push_varint(1, 7);
            message.push_bytes(number, &within.encode());
            message
        };
        let mut serialized = wrap(1, &wrap(2, &wrap(14, debug)));
        serialized.push_bytes(5, b"code, not a message: \xff\xff");
        let mut options = Message::default();
        for entry in overrides {
            options.push_bytes(ENV_OPTION_OVERRIDES, &entry.encode());
        }
        let mut all = wrap(1, &serialized);
        all.push_bytes(2, &options.encode());
        all.encode()
    }

    #[test]
    fn a_loaded_executable_does_not_dump_again() {
        let kept = Override::truth("xla_cpu_enable_fast_math", true);
        let mut plain = Message::default();
        plain.push_varint(31, 3);
        let mut dumping = plain.clone();
        dumping.push_bytes(TO, FOLDER.as_bytes());
        dumping.push_varint(112, 1);
        let mut options = Message::default();
        options.push_bytes(ENV_OPTION_OVERRIDES, &kept.encode());
        let options = with_dump(&options.encode(), Path::new(FOLDER), None).unwrap();
        let asked = [
            kept.clone(),
            Override::text("xla_dump_to", FOLDER),
            Override::truth("xla_dump_hlo_as_text", true),
        ];
        let cut = without_dump(executable(&dumping, &asked), &options);
        assert_eq!(cut, executable(&plain, &[kept]));
    }

    #[test]
    fn what_is_not_ours_stays_byte_for_byte() {
        let options = with_dump(b"", Path::new(FOLDER), None).unwrap();
        let mut elsewhere = Message::default();
        elsewhere.push_bytes(TO, b"/somewhere/else");
        let untouched = executable(
            &elsewhere,
            &[Override::text("xla_dump_to", "/somewhere/else")],
        );
        assert_eq!(without_dump(untouched.clone(), &options), untouched);
        assert_eq!(without_dump(untouched.clone(), b""), untouched);
        let opaque = [b"\xff\xff", FOLDER.as_bytes()].concat();
        assert_eq!(without_dump(opaque.clone(), &options), opaque);
    }
}
