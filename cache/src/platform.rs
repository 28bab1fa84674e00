//! What a compiler depends on besides program and options: its own file, the CPU, and the variables it reads.
//!
//! The functions here gather the `platform` and `environment` of [`crate::KeyInputs`]. A worker calls them once, at its
//! start. None reads the environment: the caller hands it in.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::path::Path;

use sha2::{Digest as _, Sha256};

use crate::harmless;

/// SHA-256 of a file in hex: the identity of a plugin. Blocks; a plugin of 300 MB takes some tenths of a second.
///
/// # Errors
/// When the file cannot be read.
pub fn file_digest(path: &Path) -> io::Result<String> {
    let mut file = std::fs::File::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hex::encode(hash.finalize())),
            read => hash.update(&buffer[..read]),
        }
    }
}

/// The name of the fact that says into how many parts XLA divides loops. It makes another executable; one that was made for other
/// machines runs here all the same.
pub const CPU_PARALLELISM: &str = "cpu_parallelism";

/// The parts of the key that a CPU compiler takes from the machine: instruction set and cores.
///
/// XLA's CPU compiler targets the host's instruction set, and an executable that uses more of it than another machine
/// has would be killed there. It also splits loops by the number of CPUs that the process may run on; that is taken as
/// the next power of two, so that machines of one kind agree although a container leaves them a core more or less.
pub fn cpu() -> Vec<(String, String)> {
    let cores = std::fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|status| allowed_cpus(&status))
        .or_else(|| std::thread::available_parallelism().ok().map(usize::from))
        .unwrap_or(1);
    let mut features = detected_features();
    if let Ok(text) = std::fs::read_to_string("/proc/cpuinfo") {
        features.extend(listed_features(&text));
    }
    let features: Vec<String> = features.into_iter().collect();
    vec![
        ("cpu_arch".to_owned(), std::env::consts::ARCH.to_owned()),
        ("cpu_features".to_owned(), features.join(",")),
        (
            CPU_PARALLELISM.to_owned(),
            cores.next_power_of_two().to_string(),
        ),
    ]
}

/// How many CPUs this process may run on, from the text of `/proc/self/status`. XLA counts so; the standard library also
/// heeds a container's quota of CPU time, which XLA does not see.
fn allowed_cpus(status: &str) -> Option<usize> {
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed:"))?;
    let bits: u32 = mask
        .trim()
        .split(',')
        .map(|word| u32::from_str_radix(word, 16).map(u32::count_ones))
        .sum::<Result<u32, _>>()
        .ok()?;
    usize::try_from(bits).ok().filter(|&bits| bits > 0)
}

macro_rules! detect {
    ($detected:ident, $into:ident, [$($feature:tt),* $(,)?]) => {
        $(if std::arch::$detected!($feature) { $into.insert($feature.to_owned()); })*
    };
}

/// What the CPU says itself, checked by the standard library (which also asks whether the system saves the registers).
fn detected_features() -> BTreeSet<String> {
    #[cfg_attr(
        not(any(target_arch = "x86_64", target_arch = "aarch64")),
        allow(unused_mut, reason = "no detection for other architectures")
    )]
    let mut found = BTreeSet::new();
    #[cfg(target_arch = "x86_64")]
    detect!(
        is_x86_feature_detected,
        found,
        [
            "adx",
            "aes",
            "avx",
            "avx2",
            "avx512bf16",
            "avx512bitalg",
            "avx512bw",
            "avx512cd",
            "avx512dq",
            "avx512f",
            "avx512fp16",
            "avx512ifma",
            "avx512vbmi",
            "avx512vbmi2",
            "avx512vl",
            "avx512vnni",
            "avx512vp2intersect",
            "avx512vpopcntdq",
            "avxifma",
            "avxneconvert",
            "avxvnni",
            "avxvnniint16",
            "avxvnniint8",
            "bmi1",
            "bmi2",
            "cmpxchg16b",
            "f16c",
            "fma",
            "fxsr",
            "gfni",
            "kl",
            "lzcnt",
            "movbe",
            "pclmulqdq",
            "popcnt",
            "rdrand",
            "rdseed",
            "sha",
            "sha512",
            "sm3",
            "sm4",
            "sse",
            "sse2",
            "sse3",
            "sse4.1",
            "sse4.2",
            "sse4a",
            "ssse3",
            "tbm",
            "vaes",
            "vpclmulqdq",
            "widekl",
            "xsave",
            "xsavec",
            "xsaveopt",
            "xsaves",
        ]
    );
    #[cfg(target_arch = "aarch64")]
    detect!(
        is_aarch64_feature_detected,
        found,
        [
            "aes", "asimd", "bf16", "crc", "dotprod", "f32mm", "f64mm", "fcma", "fhm", "flagm",
            "fp", "fp16", "frintts", "i8mm", "jsconv", "lse", "lse2", "rcpc", "rcpc2", "rdm",
            "sha2", "sha3", "sm4", "sve", "sve2",
        ]
    );
    found
}

/// Families of flags in `/proc/cpuinfo` that code generation may use and that the list above may not know yet. Flags of
/// other families (mitigations, virtualization) differ between kernels and would only cost misses.
const FAMILIES: [&str; 10] = [
    "amx",
    "apx",
    "avx",
    "cldemote",
    "movdir",
    "ptwrite",
    "serialize",
    "sme",
    "sve",
    "waitpkg",
];

/// Flags of those families, from the text of `/proc/cpuinfo` (x86 calls the line "flags", Arm "Features").
fn listed_features(cpuinfo: &str) -> BTreeSet<String> {
    cpuinfo
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(name, _)| matches!(name.trim(), "flags" | "Features"))
        .map(|(_, flags)| {
            flags
                .split_whitespace()
                .filter(|flag| FAMILIES.iter().any(|family| flag.starts_with(family)))
                .map(|flag| format!("os:{flag}"))
                .collect()
        })
        .unwrap_or_default()
}

/// Variables whose whole purpose is to steer XLA or a plugin, by prefix. What begins so and is not listed below counts,
/// known or not: a needless miss is better than a wrong hit.
const STEERING: [&str; 5] = ["XLA_", "TF_XLA_", "LIBTPU_", "TPU_", "MEGASCALE_"];

/// Variables that steer it without such a name.
const ALSO: [&str; 7] = [
    // PJRT's CPU client takes the size of its thread pool from it, for which code is divided.
    "NPROC",
    // Overrides what the CPU seems to be, to the CPU compiler's own libraries.
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_MAX_CPU_ISA",
    // Let the GPU compiler choose other kernels.
    "NVIDIA_TF32_OVERRIDE",
    "CUDA_FORCE_PTX_JIT",
    "TF_CUDNN_DETERMINISTIC",
    "ROCM_PATH",
];

/// Variables that begin like steering ones and leave no trace in an executable. The places and numbers of hosts are among
/// them: all hosts of a slice run one executable, and two jobs are to share it. What they are connected to (topology,
/// bounds, number of slices) is not.
const HARMLESS: [&str; 15] = [
    // Which host memory to take for transfers and how much device memory at the start.
    "XLA_PYTHON_CLIENT_ALLOCATOR",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    // Where the compiler's file is; its digest counts.
    "TPU_LIBRARY_PATH",
    // What a host is called, and where to find it and the others.
    "TPU_NAME",
    "TPU_WORKER_ID",
    "TPU_WORKER_HOSTNAMES",
    "TPU_PROCESS_ADDRESSES",
    "TPU_PROCESS_PORT",
    "TPU_SKIP_MDS_QUERY",
    "MEGASCALE_COORDINATOR_ADDRESS",
    "MEGASCALE_SLICE_ID",
    // Logs.
    "TPU_LOG_DIR",
    "TPU_MIN_LOG_LEVEL",
    "TPU_STDERR_LOG_LEVEL",
];

/// Variables whose value is a list of flags separated by white space.
pub const FLAG_LISTS: [&str; 3] = ["XLA_FLAGS", "TF_XLA_FLAGS", "LIBTPU_INIT_ARGS"];

/// Whether XLA takes the value of such a variable for the name of a file that holds the flags. It reads the file when it
/// likes, so nobody can say what it will have read: an environment with one is not described by [`environment`].
pub fn names_a_file(value: &str) -> bool {
    let value = value.trim();
    !value.is_empty() && !value.starts_with('-')
}

/// The first of the variables of a worker's environment that names a file of flags.
pub fn flag_file(variables: &[(String, String)]) -> Option<&str> {
    let found = variables
        .iter()
        .find(|(name, value)| FLAG_LISTS.contains(&name.as_str()) && names_a_file(value));
    found.map(|(name, _)| name.as_str())
}

/// Of all variables of a worker's environment, those that the compiler obeys, in a normal form: lists of flags without
/// those that leave no trace ([`crate::harmless`]) and in one order (a flag that is given twice keeps its order, since the last one wins), sorted by name.
/// Lists that end up empty are left out, as if not set. None may name a file ([`flag_file`]).
pub fn environment(variables: impl IntoIterator<Item = (String, String)>) -> Vec<(String, String)> {
    let mut kept: Vec<(String, String)> = variables
        .into_iter()
        .filter(|(name, _)| {
            let steers = STEERING.iter().any(|prefix| name.starts_with(prefix));
            (steers || ALSO.contains(&name.as_str())) && !HARMLESS.contains(&name.as_str())
        })
        .filter_map(|(name, value)| {
            if FLAG_LISTS.contains(&name.as_str()) {
                let flags = normal_flags(&value);
                (!flags.is_empty()).then_some((name, flags))
            } else {
                Some((name, value))
            }
        })
        .collect();
    kept.sort();
    kept
}

/// A list of flags in its normal form. What is no list of plain flags (quotes, say) is left as it is.
fn normal_flags(value: &str) -> String {
    let value = value.trim();
    let flags: Vec<&str> = value.split_whitespace().collect();
    let plain = flags
        .iter()
        .all(|flag| flag.starts_with("--") && !flag.contains(['"', '\'']));
    if !plain {
        return value.to_owned();
    }
    let mut flags: Vec<&str> = flags
        .into_iter()
        .filter(|flag| {
            let name = flag.trim_start_matches('-').split('=').next();
            name.is_none_or(|name| harmless::why(name).is_none())
        })
        .collect();
    // Stable and by name only, so that two values of one flag stay in the order in which they were given.
    flags.sort_by_key(|flag| flag.split('=').next());
    flags.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn env(of: &[(&str, &str)]) -> Vec<(String, String)> {
        environment(of.iter().map(|(a, b)| (a.to_string(), b.to_string())))
    }

    #[test]
    fn only_what_the_compiler_obeys_is_kept() {
        let kept = env(&[
            ("PATH", "/bin"),
            ("XLA_NEW_THING", "1"),
            ("XLA_FLAGS", " --b=2  --a=1\n"),
            ("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),
            ("LIBTPU_INIT_ARGS", "--x"),
            ("HOME", "/root"),
            ("TPU_WORKER_ID", "3"),
            ("TPU_WORKER_HOSTNAMES", "a,b"),
            ("TPU_TOPOLOGY", "2x2"),
            ("TF_XLA_FLAGS", ""),
        ]);
        let expected = [
            ("LIBTPU_INIT_ARGS", "--x"),
            ("TPU_TOPOLOGY", "2x2"),
            ("XLA_FLAGS", "--a=1 --b=2"),
            ("XLA_NEW_THING", "1"),
        ];
        assert_eq!(kept, expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
    }

    #[test]
    fn dump_flags_and_order_do_not_count_but_repetition_does() {
        let flags = |value| env(&[("XLA_FLAGS", value)]);
        assert_eq!(flags("--xla_dump_to=/x --xla_dump_hlo_as_text"), env(&[]));
        assert_eq!(flags("--a --xla_dump_to=/x --b=1"), flags("--b=1 --a"));
        assert_ne!(flags("--a=1 --a=2"), flags("--a=2 --a=1"));
        assert_ne!(flags("--a=1"), flags("--a=2"));
        assert_ne!(flags("--a"), flags("--b"));
        assert_ne!(flags("--b='x --a=1'"), flags("--a=1' --b='x"));
    }

    #[test]
    fn a_file_of_flags_is_found() {
        let file = |name: &str, value: &str| {
            let variables = [(name.to_owned(), value.to_owned())];
            flag_file(&variables).map(str::to_owned)
        };
        assert_eq!(file("XLA_FLAGS", "flags.txt").unwrap(), "XLA_FLAGS");
        assert_eq!(file("TF_XLA_FLAGS", " /f").unwrap(), "TF_XLA_FLAGS");
        for value in ["", " ", "--a", "\n--a"] {
            assert_eq!(file("XLA_FLAGS", value), None, "{value:?}");
        }
        assert_eq!(file("XLA_OTHER", "flags.txt"), None);
    }

    #[test]
    fn the_cpu_is_described_the_same_twice() {
        let cpu = cpu();
        assert_eq!(cpu, super::cpu());
        assert_eq!(cpu[0].1, std::env::consts::ARCH);
        if cfg!(target_arch = "x86_64") {
            assert!(cpu[1].1.split(',').any(|feature| feature == "sse2"));
        }
        assert!(cpu[2].1.parse::<usize>().unwrap().is_power_of_two());
    }

    #[test]
    fn cpus_are_counted_in_the_mask() {
        let status =
            |mask: &str| format!("Name:\tx\nCpus_allowed:\t{mask}\nCpus_allowed_list:\t0-3\n");
        assert_eq!(allowed_cpus(&status("f")), Some(4));
        assert_eq!(allowed_cpus(&status("3,00000000,80000001")), Some(4));
        for bad in ["", "0", "g", "f,,f"] {
            assert_eq!(allowed_cpus(&status(bad)), None, "{bad}");
        }
        assert_eq!(allowed_cpus("Name: x"), None);
    }

    #[test]
    fn cpuinfo_gives_the_families_that_matter() {
        let text =
            "processor : 0\nflags\t\t: fpu sse2 avx10_1 amx_tile retbleed\n\nflags : amx_other\n";
        let found: Vec<_> = listed_features(text).into_iter().collect();
        assert_eq!(found, ["os:amx_tile", "os:avx10_1"]);
        assert!(listed_features("nothing here").is_empty());
    }

    #[test]
    fn a_file_is_known_by_its_content() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("plugin.so");
        std::fs::write(&path, b"abc").unwrap();
        assert_eq!(
            file_digest(&path).unwrap(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert!(file_digest(&temp.path().join("absent")).is_err());
    }
}
