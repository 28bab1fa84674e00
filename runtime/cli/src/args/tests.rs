//! Whole command lines.

use super::*;
use crate::error::USAGE;

mod pathways;

fn line(line: &str) -> Result<Parsed, Stop> {
    parse(line.split_whitespace().map(OsString::from).collect())
}

fn failure(text: &str) -> String {
    match line(text) {
        Err(Stop::Failure(failure)) => {
            assert_eq!(failure.status, USAGE, "{text}");
            assert!(!failure.message.contains('\n'), "{}", failure.message);
            failure.message
        }
        other => panic!("{text}: {other:?}"),
    }
}

#[test]
fn the_definitions_hold_together() {
    command().debug_assert();
}

#[test]
fn flags_have_underscores_and_a_variable() {
    for subcommand in command()
        .get_subcommands()
        .filter(|subcommand| !subcommand.is_hide_set())
    {
        let flags = subcommand.get_arguments().filter(|arg| !arg.is_hide_set());
        for (arg, flag) in flags
            .filter_map(|arg| Some((arg, arg.get_long()?)))
            .filter(|(_, flag)| *flag != "help")
        {
            assert!(!flag.contains('-'), "{flag}");
            let variable = arg
                .get_env()
                .unwrap_or_else(|| panic!("{flag} has no variable"));
            assert!(
                variable.to_string_lossy().ends_with(&flag.to_uppercase()),
                "{flag}"
            );
            assert!(arg.get_help().is_some(), "{flag} has no help");
        }
    }
}

#[test]
fn both_spellings_of_a_flag_work() {
    for text in [
        "waystation resource-manager --server_port=7 --slices 2",
        "waystation resource-manager --server-port 7 --instance-count=2",
    ] {
        let Command::ResourceManager(args) = line(text).unwrap().command else {
            panic!("{text}");
        };
        assert_eq!((args.server_port, args.slices), (7, 2), "{text}");
    }
}

#[test]
fn run_keeps_the_command_line_behind_the_dashes() {
    let parsed = line(
        "waystation run --workers=2 --xla_a=1 --noverbose -- python --workers-x --xla_b=2 -- --c",
    )
    .unwrap();
    assert_eq!(parsed.xla_flags, ["--xla_a=1"]);
    let Command::Run(args) = parsed.command else {
        panic!("not run");
    };
    assert_eq!(
        args.command,
        ["python", "--workers-x", "--xla_b=2", "--", "--c"]
    );
    assert_eq!(args.cluster.workers, 2);
    assert!(!args.cluster.verbose);
}

#[test]
fn server_is_resource_manager_or_worker() {
    let parsed = line("w server --node_type=resource_manager --server_port=29001 --instance_count=2 --instance_type=tpuv6e:2x2").unwrap();
    assert!(matches!(&parsed.command, Command::ResourceManager(args)
            if args.slices == 2 && args.instance_type.as_ref().is_some_and(|instance| instance.hosts() == 1)));
    assert!(parsed.warnings.is_empty());
    let parsed = line("w server --server_port=29005 --resource_manager_address=h:29001 --gcs_scratch_location=gs://b/t").unwrap();
    assert!(
        matches!(&parsed.command, Command::Worker(args) if args.cache.gcs_scratch_location.as_deref() == Some("gs://b/t"))
    );
    assert!(
        matches!(line("w server --help"), Err(Stop::Show(text)) if text.contains("--node_type"))
    );
}

#[test]
fn mistakes_are_one_line_with_what_to_do() {
    assert!(failure("w worker --resource_manager_address=h:1 --slicse=3").contains("--slice"));
    assert!(
        failure("w proxy --server_port=70000 --resource_manager_address=h:1").contains("70000")
    );
    assert!(failure("w proxy --no_such_flag").contains("--no_such_flag"));
    assert!(
        failure("w proxy --resource_manager_address=h:1 --host_buffer_memory=2G").contains("GiB")
    );
    assert!(failure("w run").contains("COMMAND"));
    assert!(failure("w run python x.py").contains("after a bare --"));
    let missing = failure("w worker");
    assert!(
        missing.contains("not provided: --resource_manager_address"),
        "{missing}"
    );
    assert!(failure("w run --workers=0 -- true").contains("0"));
    assert!(failure("w run --workers -1 -- true").contains("-1 is not in 1..=1024"));
    assert!(failure("w").contains("--help"));
    assert!(failure("w frobnicate").contains("frobnicate"));
    assert!(failure("w server --node_type=head").contains("head"));
    let wrong = failure("w server --node_type=resource_manager --instance_type=tpuv9:2x2");
    assert!(wrong.contains("tpuv6e"), "{wrong}");
}

#[test]
fn help_and_version_are_shown() {
    assert!(
        matches!(line("w --version"), Err(Stop::Show(text)) if text.starts_with("waystation ") && text.contains("jaxlib 0.8.3 to"))
    );
    let Err(Stop::Show(text)) = line("w run --help") else {
        panic!("no help");
    };
    assert!(text.contains("--devices_per_worker"), "{text}");
    assert!(!text.contains("parent_stdin"), "{text}");
}

#[test]
fn the_reference_names_every_flag() {
    let page = include_str!("../../../../docs/command-line.md");
    let mut flags = BTreeSet::from(["instance_count".to_owned()]);
    for subcommand in command()
        .get_subcommands()
        .filter(|subcommand| !subcommand.is_hide_set())
    {
        assert!(
            page.contains(&format!("`{}`", subcommand.get_name())),
            "{}",
            subcommand.get_name()
        );
        let nested = subcommand
            .get_subcommands()
            .flat_map(clap::Command::get_arguments);
        let shown = subcommand.get_arguments().chain(nested);
        let shown = shown.filter(|arg| !arg.is_hide_set());
        flags.extend(shown.filter_map(|arg| arg.get_long().map(str::to_owned)));
    }
    flags.remove("help");
    flags.extend(
        crate::pathways::WITHOUT_EFFECT
            .iter()
            .map(|(name, _)| (*name).to_owned()),
    );
    // A longer name that begins alike must not stand in for a flag.
    let named: BTreeSet<_> = page
        .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '-'))
        .collect();
    for flag in flags {
        assert!(
            named.contains(format!("--{flag}").as_str()),
            "--{flag} is not on the page"
        );
    }
}
