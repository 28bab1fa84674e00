//! XLA's dump options, and the others that name a file: a client's are taken out, the worker's own are put in.
//!
//! A client's debug options reflect its own `XLA_FLAGS`. Its paths mean nothing on a worker's disk and must not be written to
//! or read there. Numbers and names are those of `xla.DebugOptions` (xla/xla.proto).

use std::path::Path;

use waystation_stablehlo::{
    compile_options::{DEBUG_OPTIONS, ENV_OPTION_OVERRIDES, EXECUTABLE_BUILD_OPTIONS},
    wire::Message,
};

use super::{
    Error,
    flags::{self, Override},
    options::read,
};

const XLA_DUMP_TO: u32 = 109;
const XLA_DUMP_HLO_AS_TEXT: u32 = 112;
const XLA_DUMP_MAX_HLO_MODULES: u32 = 132;
const XLA_ENABLE_DUMPING: u32 = 253;

/// Every `xla_dump_*` option, and those that write beside XLA's dumps.
const DUMPS: [u32; 32] = [
    XLA_DUMP_TO,
    110, // xla_dump_hlo_module_re
    111, // xla_dump_hlo_pass_re
    XLA_DUMP_HLO_AS_TEXT,
    113, // xla_dump_hlo_as_proto
    114, // xla_dump_hlo_as_dot
    115, // xla_dump_hlo_as_url
    116, // xla_dump_hlo_as_html
    118, // xla_dump_hlo_snapshots
    131, // xla_dump_include_timestamp
    XLA_DUMP_MAX_HLO_MODULES,
    144, // xla_dump_module_metadata
    149, // xla_dump_fusion_visualization
    151, // xla_dump_compress_protos
    153, // xla_dump_disable_metadata
    154, // xla_dump_hlo_pipeline_re
    155, // xla_gpu_dump_llvmir
    164, // xla_dump_hlo_as_long_text
    182, // xla_dump_latency_hiding_schedule
    185, // xla_dump_enable_mlir_pretty_form
    232, // xla_gpu_dump_autotuned_gemm_fusions
    290, // xla_dump_large_constants
    338, // xla_gpu_experimental_dump_fdo_profiles
    381, // xla_dump_full_hlo_config
    405, // xla_dump_hlo_unoptimized_snapshots
    427, // xla_gpu_experimental_dump_gpu_executable
    433, // xla_dump_emitter_re
    445, // xla_gpu_dump_autotuned_instructions
    466, // xla_dump_buffer_assignment_analysis
    495, // xla_dump_compact_gte
    498, // xla_dump_hlo_as_riegeli
    502, // xla_dump_hlo_to_subfolder
];

/// Options that name a file or a directory, by number and name.
const PATHS: [(u32, &str); 18] = [
    (127, "xla_gpu_ptx_file"),
    (128, "xla_gpu_algorithm_denylist_path"),
    (150, "xla_gpu_llvm_ir_file"),
    (210, "xla_gpu_pgle_profile_file_or_directory_path"),
    (222, "xla_gpu_dump_autotune_results_to"),
    (223, "xla_gpu_load_autotune_results_from"),
    (261, "xla_gpu_target_config_filename"),
    (292, "xla_gpu_dump_autotune_logs_to"),
    (306, "xla_gpu_kernel_cache_file"),
    (310, "xla_gpu_per_fusion_autotune_cache_dir"),
    (377, "xla_gpu_experimental_collective_perf_table_path"),
    (383, "xla_gpu_experimental_matmul_perf_table_path"),
    (407, "xla_gpu_experimental_autotuner_cache_dir"),
    (434, "xla_gpu_gemm_autotuner_override_file"),
    (540, "xla_gpu_dump_cost_model_top_k_candidates_to"),
    (544, "xla_candidate_configs_file"),
    (554, "xla_gpu_topology_filename"),
    XLA_GPU_CUDA_DATA_DIR,
];
const XLA_GPU_CUDA_DATA_DIR: (u32, &str) = (61, "xla_gpu_cuda_data_dir");
/// XLA's default. An absent option would mean the empty path, not the default.
const DEFAULT_CUDA_DATA_DIR: &[u8] = b"./cuda_sdk_lib";

/// Takes a client's dump options and paths out of its debug options.
pub(super) fn strip_client(debug_options: &mut Message<'_>) {
    strip_dumps(debug_options);
    let names_cuda = debug_options
        .repeated(XLA_GPU_CUDA_DATA_DIR.0)
        .is_ok_and(|paths| !paths.is_empty());
    for (number, _) in PATHS {
        debug_options.remove(number);
    }
    if names_cuda {
        debug_options.push_bytes(XLA_GPU_CUDA_DATA_DIR.0, DEFAULT_CUDA_DATA_DIR);
    }
}

/// Takes every dump option out of debug options.
pub(super) fn strip_dumps(debug_options: &mut Message<'_>) {
    for number in DUMPS {
        debug_options.remove(number);
    }
}

/// True for an option that only says what is dumped, and where.
pub(super) fn is_dump(name: &[u8]) -> bool {
    name.starts_with(b"xla_dump_")
        || name.starts_with(b"xla_gpu_dump_")
        || name == b"xla_enable_dumping"
}

/// True for an option that a client may not set on a worker.
pub(super) fn is_client_path(name: &[u8]) -> bool {
    is_dump(name)
        || name.starts_with(b"xla_gpu_experimental_dump_")
        || PATHS.iter().any(|(_, path)| path.as_bytes() == name)
}

/// Takes `xla_enable_dumping` out as well, for a key: it has no say in what is compiled.
pub(super) fn strip_for_key(debug_options: &mut Message<'_>) {
    strip_dumps(debug_options);
    debug_options.remove(XLA_ENABLE_DUMPING);
}

/// Options that make the plugin write the program's HLO as text files into a directory while it compiles, and nothing else.
/// Takes the plugin's options as [`super::prepare`] made them.
///
/// The settings go into the debug options themselves, where a plugin of another age passes over those it does not know; as
/// overrides it would refuse them.
///
/// # Errors
/// When the options are not an `xla.CompileOptionsProto` or the directory's name is not UTF-8.
pub fn with_dump(plugin_options: &[u8], directory: &Path) -> Result<Vec<u8>, Error> {
    let directory_text = directory.to_str().ok_or_else(|| Error::DumpDirectory {
        directory: directory.to_string_lossy().into_owned(),
    })?;
    let mut options = read("CompileOptionsProto", plugin_options)?;
    retain_overrides(&mut options, |name| !is_dump(name))?;
    let build = super::options::part(
        &options,
        EXECUTABLE_BUILD_OPTIONS,
        "executable_build_options",
    )?;
    let mut build = read("ExecutableBuildOptionsProto", &build)?;
    let debug = super::options::message_of(&build, DEBUG_OPTIONS, "debug_options")?;
    let Some(debug) = debug else {
        // An empty message would set every other option to zero, so here they are overrides after all.
        for (name, value) in [
            ("xla_dump_to", directory_text),
            ("xla_dump_hlo_as_text", "true"),
        ] {
            options.push_bytes(ENV_OPTION_OVERRIDES, &Override::new(name, value).encode());
        }
        return Ok(options.encode());
    };
    let mut debug = read("DebugOptions", &debug)?;
    strip_dumps(&mut debug);
    debug.push_bytes(XLA_DUMP_TO, directory_text.as_bytes());
    debug.push_varint(XLA_DUMP_HLO_AS_TEXT, 1);
    // Without a bound; absent would mean none at all.
    debug.push_varint(XLA_DUMP_MAX_HLO_MODULES, -1_i64 as u64);
    debug.set_varint(XLA_ENABLE_DUMPING, 1);
    build.set_bytes(DEBUG_OPTIONS, &debug.encode());
    options.set_bytes(EXECUTABLE_BUILD_OPTIONS, &build.encode());
    Ok(options.encode())
}

/// Keeps the overrides whose option's name passes.
pub(super) fn retain_overrides(
    options: &mut Message<'_>,
    keep: impl Fn(&[u8]) -> bool,
) -> Result<(), Error> {
    let malformed = |source| Error::Options {
        part: "env_option_overrides",
        source,
    };
    let mut kept = Vec::new();
    for entry in options.repeated(ENV_OPTION_OVERRIDES).map_err(malformed)? {
        if keep(&flags::name_of(entry).map_err(malformed)?) {
            kept.push(entry.to_vec());
        }
    }
    options.remove(ENV_OPTION_OVERRIDES);
    for entry in kept {
        options.push_bytes(ENV_OPTION_OVERRIDES, &entry);
    }
    Ok(())
}
