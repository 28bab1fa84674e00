//! `doctor`.

use std::{
    collections::BTreeMap,
    env,
    ffi::{OsStr, OsString},
    fmt::Write as _,
    path::PathBuf,
};

use waystation_cache::platform;

use crate::{error::Failure, flag_files, http, large_transfers, output, plugin, python};

mod bucket;

/// Look at this machine and this environment: the plugin, the bucket, and what JAX would be told
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// PJRT plugin: cpu, cuda, tpu, or the path of a shared library
    #[arg(long = "pjrt_plugin", value_name = "NAME|PATH", default_value = "cpu")]
    pjrt_plugin: String,
    /// Python interpreter whose packages hold the plugin [default: the virtual environment's, or python3]
    #[arg(long = "python", value_name = "PATH")]
    python: Option<PathBuf>,
    /// Bucket to look at
    #[arg(long = "gcs_scratch_location", value_name = "LOCATION")]
    gcs_scratch_location: Option<String>,
    /// Status page of a proxy to ask
    #[arg(long = "status_url", value_name = "URL")]
    status_url: Option<String>,
}

/// Prints one line a finding. Returns the exit status: 64 when something has to be mended.
pub(crate) async fn run(args: Args) -> Result<u8, Failure> {
    let mut report = Report::default();
    report.line(
        "ok",
        "build",
        &format!(
            "{}, link version {}",
            waystation_proto::BUILD_ID,
            waystation_proto::LINK_VERSION
        ),
    );
    let python = args.python.or_else(|| python::choose(None));
    match &python {
        Some(python) => report.line("ok", "python", &python.display().to_string()),
        None => report.line("--", "python", "none found"),
    }
    let found = plugin::find(&args.pjrt_plugin, python.as_deref());
    report.result("plugin", found.map(|path| path.display().to_string()));
    match &args.gcs_scratch_location {
        None => report.line(
            "--",
            "bucket",
            "no --gcs_scratch_location: programs are kept in memory only",
        ),
        Some(text) => bucket::look(&mut report, text).await,
    }
    compiler_environment(&mut report, env::vars_os());
    client_environment(&mut report, |name| env::var(name).ok());
    if let Some(url) = &args.status_url {
        report.result(
            "proxy",
            http::get(url).await.map(|_| format!("answers at {url}")),
        );
    }
    output::print(&report.text)?;
    Ok(if report.bad { crate::error::USAGE } else { 0 })
}

/// What a worker started in this environment takes into the keys of compiled programs, because its compiler obeys it.
fn compiler_environment(
    report: &mut Report,
    variables: impl Iterator<Item = (OsString, OsString)>,
) {
    let text = |raw: OsString| raw.to_string_lossy().into_owned();
    let mut variables: BTreeMap<OsString, OsString> = variables.collect();
    // As a worker does.
    match flag_files::changes(|name| variables.get(OsStr::new(name)).cloned()) {
        Ok(changes) => {
            for (name, value) in changes {
                match value {
                    Some(value) => variables.insert(name.into(), value),
                    None => variables.remove(OsStr::new(name)),
                };
            }
        }
        Err(failure) => report.line("!!", "compiler", &failure.message),
    }
    let variables = variables.into_iter();
    let obeyed = platform::environment(variables.map(|(name, value)| (text(name), text(value))));
    if obeyed.is_empty() {
        report.line("ok", "compiler", "no variable steers it");
    }
    for (name, value) in obeyed {
        let text = format!("{value} (obeyed by the compiler, part of every key)");
        report.line("ok", &name, &text);
    }
}

/// What JAX reads. `variable`: the environment.
fn client_environment(report: &mut Report, variable: impl Fn(&str) -> Option<String>) {
    let Some(target) = variable("JAX_BACKEND_TARGET") else {
        report.line("--", "client", "JAX_BACKEND_TARGET is not set: this is no environment of a client (`waystation run` makes one)");
        return;
    };
    report.check(
        "JAX_BACKEND_TARGET",
        Some(&target),
        target.starts_with("grpc://"),
        "write grpc://HOST:PORT",
    );
    let platforms = variable("JAX_PLATFORMS");
    let first = platforms.as_deref().and_then(|list| list.split(',').next());
    report.check(
        "JAX_PLATFORMS",
        platforms.as_deref(),
        first == Some("proxy"),
        "write proxy, or proxy,cpu",
    );
    let insecure = variable(INSECURE);
    let is_true = insecure.as_deref() == Some("true");
    report.check(
        INSECURE,
        insecure.as_deref(),
        is_true,
        "write the word true, jaxlib takes no other; without it the client speaks ALTS",
    );
    let persistence = variable("ENABLE_PATHWAYS_PERSISTENCE");
    let known = matches!(persistence.as_deref(), None | Some("0" | "1"));
    report.check(
        "ENABLE_PATHWAYS_PERSISTENCE",
        persistence.as_deref(),
        known,
        "write 1 or 0, anything else raises in pathwaysutils",
    );
    for (name, reader) in NUMBERS {
        let Some(value) = variable(name) else {
            continue;
        };
        let good = value.parse::<u64>().is_ok_and(|number| number > 0);
        let cure = format!("write a number from 1, as {reader} reads it");
        report.check(name, Some(&value), good, &cure);
    }
    if variable(THRESHOLD).is_some() {
        let directory = variable(large_transfers::VARIABLE);
        report.check(
            large_transfers::VARIABLE,
            directory.as_deref(),
            directory.is_some(),
            "name the proxy's --large_transfer_directory, or leave the threshold out",
        );
    }
    if variable(OVERRIDE).is_some() && !is_true {
        let text = format!("newer jaxlib does not read it: set {INSECURE}=true");
        report.line("!!", OVERRIDE, &text);
    }
}

const INSECURE: &str = "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS";
/// What older clients had in place of [`INSECURE`].
const OVERRIDE: &str = "PATHWAYS_UNSAFE_UNSAFE_OVERRIDE_GRPC_CREDENTIALS";
const THRESHOLD: &str = "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_THRESHOLD_BYTES";
/// Variables that may be left out, and who reads them.
const NUMBERS: [(&str, &str); 4] = [
    ("PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS", "pathwaysutils"),
    ("IFRT_PROXY_GRPC_MAX_ONGOING_HOST_BUFFER_STORES", "jaxlib"),
    ("IFRT_PROXY_GRPC_MAX_ONGOING_HOST_BUFFER_LOOKUPS", "jaxlib"),
    (THRESHOLD, "jaxlib"),
];

#[derive(Debug, Default)]
struct Report {
    text: String,
    bad: bool,
}

impl Report {
    fn line(&mut self, mark: &str, subject: &str, text: &str) {
        self.bad |= mark == "!!";
        // Writing to a String does not fail.
        let _ = writeln!(self.text, "{mark} {subject}: {text}");
    }

    fn result(&mut self, subject: &str, result: Result<String, Failure>) {
        match result {
            Ok(text) => self.line("ok", subject, &text),
            Err(failure) => self.line("!!", subject, &failure.message),
        }
    }

    fn check(&mut self, name: &str, value: Option<&str>, good: bool, cure: &str) {
        let value = value.unwrap_or("not set");
        if good {
            self.line("ok", name, value);
        } else {
            self.line("!!", name, &format!("{value}: {cure}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(variables: &[(&str, &str)]) -> Report {
        let mut report = Report::default();
        client_environment(&mut report, |name| {
            variables
                .iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| (*value).to_owned())
        });
        report
    }

    const GOOD: [(&str, &str); 4] = [
        ("JAX_BACKEND_TARGET", "grpc://127.0.0.1:1"),
        ("JAX_PLATFORMS", "proxy,cpu"),
        ("IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS", "true"),
        ("ENABLE_PATHWAYS_PERSISTENCE", "1"),
    ];

    #[test]
    fn variables_that_steer_the_compiler_are_shown() {
        let shown = |variables: &[(&str, &str)]| {
            let mut report = Report::default();
            let variables = variables
                .iter()
                .map(|(name, value)| ((*name).into(), (*value).into()));
            compiler_environment(&mut report, variables);
            report.text
        };
        assert_eq!(
            shown(&[("HOME", "/h")]),
            "ok compiler: no variable steers it\n"
        );
        assert_eq!(
            shown(&[
                ("XLA_FLAGS", "--xla_b --xla_dump_to=/d --xla_a"),
                ("HOME", "/h")
            ]),
            "ok XLA_FLAGS: --xla_a --xla_b (obeyed by the compiler, part of every key)\n"
        );
    }

    #[test]
    fn a_good_environment_is_good_and_each_spoiled_variable_is_named() {
        assert!(!checked(&GOOD).bad);
        assert!(!checked(&[]).bad);
        for (position, wrong) in ["127.0.0.1:1", "cpu,proxy", "True", "yes"]
            .into_iter()
            .enumerate()
        {
            let mut variables = GOOD;
            variables[position].1 = wrong;
            let report = checked(&variables);
            assert!(report.bad, "{wrong}");
            assert!(
                report
                    .text
                    .contains(&format!("!! {}: {wrong}", GOOD[position].0)),
                "{}",
                report.text
            );
        }
    }

    #[test]
    fn what_may_be_left_out_is_looked_at_where_it_is_set() {
        let with = |name: &str, value: &str| {
            let more = [(name, value)];
            checked(&[&GOOD[..], &more[..]].concat())
        };
        for (name, _) in NUMBERS.iter().filter(|(name, _)| *name != THRESHOLD) {
            assert!(!with(name, "64").bad, "{name}");
            for wrong in ["", "0", "-1", "many"] {
                let text = with(name, wrong).text;
                assert!(text.contains(&format!("!! {name}: {wrong}")), "{text}");
            }
        }
        let alone = with(THRESHOLD, "1048576").text;
        assert!(
            alone.contains(&format!("!! {}", large_transfers::VARIABLE)),
            "{alone}"
        );
        let both = [
            &GOOD[..],
            &[(THRESHOLD, "1048576"), (large_transfers::VARIABLE, "/d")],
        ];
        assert!(!checked(&both.concat()).bad);
        // Both at once do no harm.
        assert!(!with(OVERRIDE, "grpc_insecure_override").bad);
        assert!(checked(&[GOOD[0], GOOD[1], (OVERRIDE, "grpc_insecure_override")]).bad);
    }
}
