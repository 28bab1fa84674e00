//! The command lines of Pathways' containers: every flag that is publicly known of, at every role that it is known at.

use super::*;
use crate::pathways;

/// What becomes of a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// It does what it says.
    Obeyed,
    /// It is taken, and the log says that it does nothing.
    Taken,
    /// It goes to the compiler.
    Compiler,
}
use Fate::{Compiler, Obeyed, Taken};

type At = Option<Fate>;
const EVERYWHERE: [At; 3] = [Some(Taken), Some(Taken), Some(Taken)];
const MANAGER: [At; 3] = [Some(Obeyed), None, None];
const COMPILER: [At; 3] = [None, Some(Compiler), None];

/// A flag as launchers write it, and its fate at resource manager, proxy and worker.
const FLAGS: &[(&str, [At; 3])] = &[
    ("--server_port=29009", [Some(Obeyed); 3]),
    (
        "--gcs_scratch_location=gs://b/tmp",
        [Some(Obeyed), Some(Taken), Some(Obeyed)],
    ),
    ("--instance_count=2", MANAGER),
    ("--instance_type=tpuv4:2x2x1", MANAGER),
    ("--instance_type=tpuv5:2x2x2", MANAGER),
    ("--instance_type=tpuv5e:4x4", MANAGER),
    ("--instance_type=tpuv5lite:4x4", MANAGER),
    ("--instance_type=tpuv6e:2x2", MANAGER),
    ("--instance_type=tpu7x:2x2x1", MANAGER),
    ("--enable_gcs_olm", [Some(Obeyed), Some(Taken), Some(Taken)]),
    (
        "--enable_gcs_olm=false",
        [Some(Obeyed), Some(Taken), Some(Taken)],
    ),
    (
        "--noenable_gcs_olm",
        [Some(Obeyed), Some(Taken), Some(Taken)],
    ),
    (
        "--resource_manager_address=other:29001",
        [None, Some(Obeyed), Some(Obeyed)],
    ),
    ("--num_elastic_slices=1", [None, Some(Obeyed), None]),
    (
        "--virtual_slices=tpuv6e:2x2,tpuv6e:2x2",
        [None, Some(Obeyed), None],
    ),
    ("--xla_tpu_enable_async_collective_fusion=true", COMPILER),
    ("--xla_tpu_enable_data_parallel_all_reduce_opt=1", COMPILER),
    ("--xla_tpu_scoped_vmem_limit_kib=98304", COMPILER),
    ("--xla_tpu_enable_latency_hiding_scheduler=True", COMPILER),
    ("--sidecar_name=external", [None, Some(Taken), None]),
    (
        "--cloud_pathways_external_sidecar_port=50051",
        [None, Some(Taken), None],
    ),
    (
        "--cloud_pathways_external_sidecar_connect_timeout=60s",
        [None, Some(Taken), None],
    ),
    (
        "--cloud_pathways_sidecar_shm_directory=/tmp/shared-memory",
        [None, None, Some(Taken)],
    ),
    (
        "--tpu_premapped_buffer_size=1073741824",
        [None, None, Some(Taken)],
    ),
    (
        "--tpu_pinned_host_allocation_recycle=true",
        [None, None, Some(Taken)],
    ),
    ("--enable_metrics_collection=true", EVERYWHERE),
    ("--enforce_kernel_ipv6_support=false", EVERYWHERE),
    ("--vmodule=a=1,b=2", [None, Some(Taken), None]),
    (
        "--temporary_flags_for_debugging=x=1",
        [None, Some(Taken), None],
    ),
    ("--pathways_persistent_compilation_cache=true", EVERYWHERE),
    ("--pathways_compilation_mode=compile_at_worker", EVERYWHERE),
    ("--pathways_tmp_dir_pattern=gs://b/tmp", EVERYWHERE),
    ("--pathways_server_provides_devices=false", EVERYWHERE),
    ("--pathways_device_type=NONE", EVERYWHERE),
    ("--pathways_expected_instances=tpuv4:2x2x1", EVERYWHERE),
    ("--pathways_resource_manager=h:38677", EVERYWHERE),
    (
        "--pathways_resource_manager_expected_num_worker_jobs=1",
        EVERYWHERE,
    ),
    (
        "--pathways_enforce_subset_devices_form_subslice=false",
        EVERYWHERE,
    ),
    // Of the same sets, and in nobody's list.
    ("--pathways_something_new=1", EVERYWHERE),
    ("--nocloud_pathways_something", EVERYWHERE),
    ("--megascale_something=a", EVERYWHERE),
];

/// What the images' entry points are, and what each role is always told.
const ROLES: [&str; 3] = [
    "w server --node_type=resource_manager",
    "w proxy --resource_manager_address=head:29001",
    "w server --resource_manager_address=head:29001",
];

#[test]
fn every_flag_of_pathways_is_taken_where_it_is_given() {
    for (flag, fates) in FLAGS {
        for (fate, role) in fates.iter().zip(ROLES) {
            let Some(fate) = fate else { continue };
            let told = if flag.starts_with("--resource_manager_address") {
                role.replace(" --resource_manager_address=head:29001", "")
            } else {
                role.to_owned()
            };
            let parsed = line(&format!("{told} {flag}"));
            let parsed = parsed.unwrap_or_else(|stop| panic!("{told} {flag}: {stop:?}"));
            let found = match (&parsed.warnings[..], &parsed.xla_flags[..]) {
                ([], []) => Obeyed,
                ([], [_]) => Compiler,
                ([one], []) if one.contains("has no effect") => Taken,
                other => panic!("{told} {flag}: {other:?}"),
            };
            assert_eq!(found, *fate, "{told} {flag}");
        }
    }
}

#[test]
fn what_is_obeyed_arrives() {
    let Command::ResourceManager(manager) = line(
        "w server --node_type=resource_manager --server_port=29009 --gcs_scratch_location=gs://b/t --instance_count=2 \
         --instance_type=tpuv5:2x2x2 --enable_gcs_olm=false",
    )
    .unwrap()
    .command
    else {
        panic!("not a resource manager");
    };
    assert_eq!((manager.server_port, manager.slices), (29009, 2));
    assert_eq!(manager.gcs_scratch_location.as_deref(), Some("gs://b/t"));
    assert_eq!(manager.instance_type.unwrap().hosts(), 2);
    assert!(!manager.retention.enable_gcs_olm);
    let ports = ROLES.map(|role| match line(role).unwrap().command {
        Command::ResourceManager(args) => args.server_port,
        Command::Proxy(args) => args.server_port,
        Command::Worker(args) => args.server_port,
        other => panic!("{other:?}"),
    });
    assert_eq!(ports, [29001, 29000, 29005]);
}

#[test]
fn no_flag_of_ours_is_taken_for_one_of_pathways() {
    let all = [
        ("proxy", Image::Proxy),
        ("resource-manager", Image::ResourceManager),
        ("worker", Image::Worker),
    ];
    let command = command();
    for (subcommand, image) in all {
        let found = command.find_subcommand(subcommand).unwrap();
        for flag in found.get_arguments().filter_map(clap::Arg::get_long) {
            let taken = pathways::take(image, vec![format!("--{flag}=1").into()]);
            assert_eq!(taken.rest.len(), 1, "{subcommand} --{flag}");
        }
    }
}
