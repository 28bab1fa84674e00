//! Command lines written for Pathways' containers: the flags that are taken without effect, the compiler flags, and the
//! role that the server image is asked to play. Pure.

use std::ffi::OsString;

use crate::argv::Flag;

/// Flags that launchers of Pathways add and that change nothing here, with what to say of them.
pub(crate) const WITHOUT_EFFECT: &[(&str, &str)] = &[
    ("cloud_pathways_external_sidecar_connect_timeout", COLOCATED),
    ("cloud_pathways_external_sidecar_port", COLOCATED),
    ("cloud_pathways_sidecar_shm_directory", COLOCATED),
    (
        "enable_gcs_olm",
        "the resource manager sees to lifecycle rules",
    ),
    (
        "enable_metrics_collection",
        "counters are at the proxy's --status_port",
    ),
    (
        "enforce_kernel_ipv6_support",
        "addresses of both families are taken",
    ),
    (
        "num_elastic_slices",
        "the proxy is told which slices may be missing",
    ),
    ("pathways_compilation_mode", OLD),
    ("pathways_device_type", OLD),
    ("pathways_enforce_subset_devices_form_subslice", OLD),
    ("pathways_expected_instances", OLD),
    ("pathways_persistent_compilation_cache", OLD),
    ("pathways_resource_manager", OLD),
    ("pathways_resource_manager_expected_num_worker_jobs", OLD),
    ("pathways_server_provides_devices", OLD),
    ("pathways_tmp_dir_pattern", OLD),
    ("sidecar_name", COLOCATED),
    ("temporary_flags_for_debugging", "use WAYSTATION_LOG"),
    (
        "tpu_pinned_host_allocation_recycle",
        "host staging is the plugin's",
    ),
    ("tpu_premapped_buffer_size", "host staging is the plugin's"),
    ("virtual_slices", "the proxy is told which slices it gets"),
    ("vmodule", "use WAYSTATION_LOG"),
];

/// What the names of Pathways' other flags begin with. There are more than anybody has written down, and a launcher that gives
/// one is to find its job running.
const OLD_SETS: [&str; 5] = [
    "cloud_pathways_",
    "megascale_",
    "pathways_",
    "tpu_",
    "xcloud_",
];

/// Taken from the proxy only.
const SCRATCH: (&str, &str) = (
    "gcs_scratch_location",
    "only workers and the resource manager use the bucket",
);

/// Of these flags, what the resource manager obeys.
const MANAGERS: &str = "enable_gcs_olm";
/// Of these flags, what the proxy obeys.
const PROXYS: [&str; 2] = ["num_elastic_slices", "virtual_slices"];

const COLOCATED: &str = "colocated Python is not built yet";
const OLD: &str = "it belongs to older Pathways releases";

/// The command line of a Pathways container, taken apart.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Taken {
    /// What is left for clap, in order.
    pub(crate) rest: Vec<OsString>,
    /// "--xla_...=..." as given, names with underscores; a bare flag is `=true`, `--noxla_...` is `=false`.
    pub(crate) xla_flags: Vec<String>,
    /// One a flag that has no effect.
    pub(crate) warnings: Vec<String>,
}

/// The two images' command lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Image {
    /// `proxy_server`.
    Proxy,
    /// `server`, as resource manager.
    ResourceManager,
    /// `server`, as worker.
    Worker,
}

/// Takes what clap need not see out of normalised arguments.
pub(crate) fn take(image: Image, args: Vec<OsString>) -> Taken {
    let mut taken = Taken::default();
    let mut args = args.into_iter().peekable();
    while let Some(arg) = args.next() {
        let Some(flag) = arg.to_str().and_then(Flag::read) else {
            taken.rest.push(arg);
            continue;
        };
        let is_xla = image == Image::Proxy && is_xla(&flag.name);
        let note = note(image, &flag.name);
        if !is_xla && note.is_none() {
            taken.rest.push(arg);
            continue;
        }
        // None of these command lines has positional arguments: what follows a flag and is no flag is its value.
        let follows = if flag.value.is_none() {
            args.next_if(|next| !next.to_string_lossy().starts_with("--"))
        } else {
            None
        };
        if let Some(note) = note {
            taken
                .warnings
                .push(format!("--{} has no effect: {note}", flag.name));
        } else {
            let value = flag
                .value
                .clone()
                .or_else(|| follows.map(|value| value.to_string_lossy().into_owned()));
            taken.xla_flags.push(xla_flag(&flag.name, value));
        }
    }
    taken
}

/// The compiler flags among normalised arguments, and the others. A value must follow its `--xla_...` by `=`.
pub(crate) fn take_xla(args: Vec<OsString>) -> (Vec<String>, Vec<OsString>) {
    let mut xla_flags = Vec::new();
    let mut rest = Vec::new();
    for arg in args {
        match arg
            .to_str()
            .and_then(Flag::read)
            .filter(|flag| is_xla(&flag.name))
        {
            Some(flag) => xla_flags.push(xla_flag(&flag.name, flag.value)),
            None => rest.push(arg),
        }
    }
    (xla_flags, rest)
}

fn is_xla(name: &str) -> bool {
    name.starts_with("xla_") || name.starts_with("noxla_")
}

fn note(image: Image, name: &str) -> Option<&'static str> {
    let positive = name.strip_prefix("no").unwrap_or(name);
    let scratch = (image == Image::Proxy).then_some(&SCRATCH);
    let known = WITHOUT_EFFECT.iter().chain(scratch);
    known
        .filter(|(known, _)| image != Image::ResourceManager || *known != MANAGERS)
        .filter(|(known, _)| image != Image::Proxy || !PROXYS.contains(known))
        .find(|(known, _)| *known == name || *known == positive)
        .map(|(_, note)| *note)
        .or_else(|| {
            let old = OLD_SETS.iter().any(|set| positive.starts_with(set));
            old.then_some("it is a flag of Pathways that is not known here")
        })
}

fn xla_flag(name: &str, value: Option<String>) -> String {
    match (name.strip_prefix("no"), value) {
        (Some(name), None) => format!("--{name}=false"),
        (_, Some(value)) => format!("--{name}={value}"),
        (None, None) => format!("--{name}=true"),
    }
}

/// The role that `server`'s normalised arguments ask for, and the arguments without the choice. `unnamed`: the
/// environment's choice, for arguments without one.
///
/// # Errors
/// A text for the user, when `--node_type` names something else.
pub(crate) fn server_role(
    args: Vec<OsString>,
    unnamed: Option<String>,
) -> Result<(Image, Vec<OsString>), String> {
    let mut node_type = unnamed;
    let mut rest = Vec::with_capacity(args.len());
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        let flag = arg
            .to_str()
            .and_then(Flag::read)
            .filter(|flag| flag.name == "node_type");
        let Some(flag) = flag else {
            rest.push(arg);
            continue;
        };
        let value = flag.value.or_else(|| {
            args.next()
                .map(|value| value.to_string_lossy().into_owned())
        });
        node_type = Some(value.unwrap_or_default());
    }
    let role = match node_type.as_deref() {
        Some("resource_manager" | "resource-manager") => Image::ResourceManager,
        Some("worker") | None => Image::Worker,
        Some(other) => {
            return Err(format!(
                "--node_type is {other:?}: write resource_manager, or leave it out for a worker"
            ));
        }
    };
    Ok((role, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn a_proxy_line_of_a_launcher_is_taken_apart() {
        let taken = take(
            Image::Proxy,
            args(
                "--server_port=29000 --resource_manager_address=head:29001 --gcs_scratch_location=gs://b/t \
                 --xla_tpu_enable_x=true --xla_y 3 --xla_z --noxla_w --enforce_kernel_ipv6_support=false --vmodule a=1 \
                 --odd",
            ),
        );
        assert_eq!(
            taken.rest,
            args("--server_port=29000 --resource_manager_address=head:29001 --odd")
        );
        assert_eq!(
            taken.xla_flags,
            [
                "--xla_tpu_enable_x=true",
                "--xla_y=3",
                "--xla_z=true",
                "--xla_w=false"
            ]
        );
        assert_eq!(taken.warnings.len(), 3);
        assert!(taken.warnings[0].starts_with("--gcs_scratch_location has no effect"));
    }

    #[test]
    fn a_worker_keeps_its_location_and_has_no_compiler_flags() {
        let line = args("--gcs_scratch_location=gs://b/t --xla_y=3");
        let taken = take(Image::Worker, line.clone());
        assert_eq!(taken.rest, line);
        assert!(taken.warnings.is_empty() && taken.xla_flags.is_empty());
    }

    #[test]
    fn a_flag_without_value_does_not_swallow_the_next_flag() {
        let taken = take(
            Image::ResourceManager,
            args(
                "--enable_metrics_collection --server_port 1 --noenforce_kernel_ipv6_support --enable_gcs_olm=false",
            ),
        );
        assert_eq!(taken.rest, args("--server_port 1 --enable_gcs_olm=false"));
        assert_eq!(taken.warnings.len(), 2);
    }

    #[test]
    fn node_type_chooses_the_role() {
        let (role, rest) = server_role(
            args("--server_port=1 --node_type=resource_manager --slices=2"),
            None,
        )
        .unwrap();
        assert_eq!(
            (role, rest),
            (Image::ResourceManager, args("--server_port=1 --slices=2"))
        );
        let (role, rest) = server_role(args("--node_type resource_manager"), None).unwrap();
        assert_eq!((role, rest.len()), (Image::ResourceManager, 0));
        assert_eq!(
            server_role(args("--server_port=1"), None).unwrap().0,
            Image::Worker
        );
        assert!(
            server_role(args("--node_type=head"), None)
                .unwrap_err()
                .contains("\"head\"")
        );
        assert!(server_role(args("--node_type"), None).is_err());
        let manager = || Some("resource_manager".to_owned());
        assert_eq!(
            server_role(args("--slices=2"), manager()).unwrap().0,
            Image::ResourceManager
        );
        assert_eq!(
            server_role(args("--node_type=worker"), manager())
                .unwrap()
                .0,
            Image::Worker
        );
    }
}
