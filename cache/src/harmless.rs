//! XLA flags that leave no trace in an executable. A flag that is not here counts, known or not: a needless miss is better
//! than a wrong hit.
//!
//! JAX leaves out some more, which stay in here: `xla_gpu_cuda_data_dir` (code of that directory is linked in), the modes and
//! places of autotuning (they choose kernels) and `xla_tpu_compiler_variant` (it names another compiler).

/// Beginnings of names, and why the flags do not matter.
const FAMILIES: [(&str, &str); 3] = [
    (
        "xla_dump_",
        "what XLA writes about a compile, where and how",
    ),
    (
        "xla_gpu_dump_",
        "what XLA writes about a compile for GPUs, where and how",
    ),
    (
        "xla_gpu_experimental_dump_",
        "what XLA writes about a compile for GPUs, where and how",
    ),
];

/// Whole names, and why the flags do not matter.
const FLAGS: [(&str, &str); 7] = [
    ("xla_enable_dumping", "switches the dumps on and off"),
    ("xla_detailed_logging", "says more in the log"),
    (
        "xla_force_host_platform_device_count",
        "read when a CPU client is made; of the devices only their number in the program counts, which is in the options",
    ),
    (
        "xla_tpu_sdc_checker_streamz_metric",
        "who hears of a checker's findings",
    ),
    (
        "xla_tpu_sdc_checker_enable_sdc_event_callbacks",
        "who hears of a checker's findings",
    ),
    (
        "xla_tpu_sdc_checker_enable_coresweep_ng_callbacks",
        "who hears of a checker's findings",
    ),
    (
        "xla_tpu_sdc_checker_no_logging_if_callbacks_are_present",
        "who hears of a checker's findings",
    ),
];

/// Why a flag (without dashes) is not part of a key; `None` for one that is.
pub fn why(flag: &str) -> Option<&'static str> {
    let family = FAMILIES
        .iter()
        .find(|(beginning, _)| flag.starts_with(beginning));
    let whole = FLAGS.iter().find(|(name, _)| *name == flag);
    family.or(whole).map(|(_, reason)| *reason)
}

#[cfg(test)]
mod tests {
    use super::why;

    #[test]
    fn only_what_is_listed_is_left_out() {
        for flag in [
            "xla_dump_to",
            "xla_dump_something_new",
            "xla_gpu_dump_llvmir",
            "xla_detailed_logging",
        ] {
            assert!(why(flag).is_some(), "{flag}");
        }
        for flag in [
            "xla_backend_optimization_level",
            "xla_gpu_cuda_data_dir",
            "xla_gpu_experimental_autotune_cache_mode",
            "xla_tpu_compiler_variant",
            "xla_unheard_of",
            "xla_detailed_logging_2",
            "dump_xla_dump_to",
            "",
        ] {
            assert_eq!(why(flag), None, "{flag}");
        }
    }
}
