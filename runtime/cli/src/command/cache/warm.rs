//! `cache warm`.

use std::{
    collections::BTreeMap,
    io::{IsTerminal as _, Write as _},
    num::NonZero,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use clap::ArgAction;
use futures::StreamExt as _;
use serde_json::{Value, json};
use waystation_cache::{Mode, Origin, recording};
use waystation_lifecycle::bucket::Bucket;
use waystation_worker::{Warmer, WarmerConfig};

use super::{bytecode, show};
use crate::{
    argv::parse_bool,
    cache_args::CacheArgs,
    command::{compile_child::InChild, worker::environment},
    error::{Failure, chain},
    flag_files, lifetime, location, output, plugin, python,
    sharing::SharingArgs,
    threads,
};

/// Failures that are told one by one.
const TOLD: usize = 100;

/// How long the end waits for uploads.
const GRACE: Duration = Duration::from_secs(60);

/// Compile what clients have asked for before, so that the next job finds it in the cache
///
/// LOCATION is what a proxy's --record_programs was given, or a file or folder of MLIR bytecode (NAME.mlirbc, its options
/// beside in NAME.json). Programs that the cache has are left as they are. Run it on a machine like the workers', with
/// their plugin, flags and variables: what it compiles has the keys that a worker here would ask for. Programs over several
/// workers are compiled here alone.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where the recordings are: gs://BUCKET/PREFIX, s3://..., file:///PATH, or a path
    #[arg(value_name = "LOCATION")]
    recordings: String,
    /// Bucket for compiled programs, as the workers have it [default: LOCATION]
    #[arg(long = "gcs_scratch_location", value_name = "LOCATION")]
    gcs_scratch_location: Option<String>,
    /// PJRT plugin: cpu, cuda, tpu, or the path of a shared library
    #[arg(long = "pjrt_plugin", value_name = "NAME|PATH", default_value = "cpu")]
    pjrt_plugin: String,
    /// Python interpreter whose packages hold the plugin [default: the virtual environment's, or python3]
    #[arg(long = "python", value_name = "PATH")]
    python: Option<PathBuf>,
    /// Devices to make, for CPU plugins: as many as a worker has
    #[arg(long = "devices", alias = "devices_per_worker", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    devices: Option<u32>,
    /// Workers of the cluster to come, with --devices each: programs are spread over them [default: spread as when recorded]
    #[arg(long = "workers", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096), requires = "devices")]
    workers: Option<u32>,
    /// LAPACK library for linear algebra with CPU plugins [default: SciPy's, or that of the Python package scipy-openblas32]
    #[arg(long = "lapack", value_name = "PATH")]
    lapack: Option<PathBuf>,
    /// Programs compiled at the same time [default: as many as there are cores]
    #[arg(long = "jobs", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    jobs: Option<u32>,
    /// JSON instead of text
    #[arg(long = "json", num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    json: bool,
    #[command(flatten)]
    cache: CacheArgs,
    #[command(flatten)]
    sharing: SharingArgs,
    /// Compile in a child process, which a program that breaks the compiler ends in this one's place [auto: with CPU plugins]
    #[arg(long = "compile_in_child", value_name = "auto|true|false", default_value = "auto", value_parser = InChild::parse)]
    compile_in_child: InChild,
}

/// Warms, and says what was done. The exit status is 1 where a program is not in the cache now.
pub(crate) fn run(args: &Args) -> Result<u8, Failure> {
    let plugin_options = plugin::options(&args.pjrt_plugin, args.devices)?;
    flag_files::take_in()?;
    if !matches!(args.pjrt_plugin.as_str(), "cuda" | "tpu") {
        // As a worker does; may start this process anew.
        threads::ensure(args.devices)?;
    }
    let python = args.python.clone().or_else(|| python::choose(None));
    let plugin = plugin::find(&args.pjrt_plugin, python.as_deref())?;
    let lapack = plugin::lapack(args.lapack.clone(), &args.pjrt_plugin, python.as_deref())?;
    let jobs = args.jobs.map_or_else(
        || std::thread::available_parallelism().map_or(1, NonZero::get),
        |jobs| jobs as usize,
    );
    let tally = Arc::new(Tally::new(std::io::stderr().is_terminal() && !args.json));
    let begun = Instant::now();
    let mut not_written = 0;
    lifetime::run(false, async |stop| {
        let source = Source::find(args).await?;
        let cache = match (&args.gcs_scratch_location, &source) {
            (Some(text), _) => location::to_fill("--gcs_scratch_location", text).await?,
            (None, Source::Recordings(bucket)) => Bucket::clone(bucket),
            (None, Source::Files(_)) => {
                return Err(Failure::usage(
                    "--gcs_scratch_location says which cache to fill: give the workers' one",
                ));
            }
        };
        let cache = args.cache.config(Some(cache), None);
        let cache = args.sharing.apply(cache, None)?;
        let signs = cache.signing.as_ref().is_none_or(|key| key.signs());
        if cache.mode != Mode::ReadWrite || !signs {
            return Err(Failure::usage(
                "a cache that is not written to cannot be warmed: give --cache_mode=read-write, and a key that signs",
            ));
        }
        let config = WarmerConfig {
            plugin,
            plugin_options,
            lapack,
            cache,
            environment: environment(),
            compile_child: args.compile_in_child.child(),
            compiles: jobs,
            workers: args.workers,
        };
        let warmer = Warmer::open(config)
            .await
            .map_err(|error| Failure::because("the plugin cannot be used", &error))?;
        let work = source.warm(&warmer, jobs, &tally);
        let ended = tokio::select! {
            ended = work => ended,
            () = stop.cancelled() => Err(Failure::internal("interrupted; what was compiled so far is kept")),
        };
        warmer.finish(GRACE).await;
        let counts = warmer.counts();
        not_written = counts.bucket_write_errors
            + counts.skipped_large
            + counts.skipped_quick
            + counts.skipped_small;
        ended
    })?;
    let report = tally.report(begun.elapsed(), not_written);
    let bad = report["failed"] != 0 || report["bad_recordings"] != 0 || not_written > 0;
    let text = if args.json {
        format!("{report:#}")
    } else {
        words(&report)
    };
    output::print(&text)?;
    Ok(u8::from(bad))
}

/// Where the programs come from.
enum Source {
    Recordings(Box<Bucket>),
    Files(Vec<PathBuf>),
}

impl Source {
    async fn find(args: &Args) -> Result<Source, Failure> {
        if let Some(files) = bytecode::files(&args.recordings)? {
            return Ok(Source::Files(files));
        }
        let bucket = location::required("LOCATION", &args.recordings).await?;
        Ok(Source::Recordings(Box::new(bucket)))
    }

    async fn warm(&self, warmer: &Warmer, jobs: usize, tally: &Tally) -> Result<(), Failure> {
        match self {
            Source::Recordings(bucket) => {
                let mut failed = None;
                let found = recording::list(bucket).filter_map(|object| {
                    let taken = match object {
                        Ok(Some(object)) => Some(object),
                        Ok(None) => {
                            tally.foreign();
                            None
                        }
                        Err(error) => {
                            failed.get_or_insert(error);
                            None
                        }
                    };
                    std::future::ready(taken)
                });
                found
                    .for_each_concurrent(jobs, async |object| {
                        let name = object.location.filename().unwrap_or_default().to_owned();
                        match recording::read(bucket, &object).await {
                            Ok(Ok(recording)) => {
                                tally.done(&name, warmer.warm(recording).await);
                            }
                            Ok(Err(bad)) => tally.bad(&name, bad.to_string()),
                            Err(error) => tally.bad(&name, chain(&error)),
                        }
                    })
                    .await;
                match failed {
                    Some(error) => Err(show::failed(&error)),
                    None => Ok(()),
                }
            }
            Source::Files(files) => {
                futures::stream::iter(files)
                    .for_each_concurrent(jobs, async |file| {
                        let name = file.display().to_string();
                        let path = file.clone();
                        let read = tokio::task::spawn_blocking(move || bytecode::read(&path)).await;
                        match read.map_err(|error| error.to_string()).flatten() {
                            Ok(recording) => tally.done(&name, warmer.warm(recording).await),
                            Err(why) => tally.bad(&name, why),
                        }
                    })
                    .await;
                Ok(())
            }
        }
    }
}

/// What has been done so far.
struct Tally {
    shown: bool,
    counts: Mutex<Counts>,
}

#[derive(Default)]
struct Counts {
    compiled: u64,
    present: u64,
    failed: u64,
    bad: u64,
    foreign: u64,
    compile_seconds: f64,
    failures: Vec<(String, String)>,
}

impl Tally {
    fn new(shown: bool) -> Tally {
        Tally {
            shown,
            counts: Mutex::default(),
        }
    }

    fn with(&self, change: impl FnOnce(&mut Counts)) {
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut counts);
        if self.shown {
            // A terminal that is gone is no reason to end.
            let _ = write!(
                std::io::stderr().lock(),
                "\r{} programs: {} compiled, {} in the cache already, {} failed",
                counts.compiled + counts.present + counts.failed + counts.bad,
                counts.compiled,
                counts.present,
                counts.failed + counts.bad
            );
        }
    }

    fn done(&self, name: &str, warmed: Result<waystation_worker::Warmed, String>) {
        self.with(|counts| match warmed {
            Ok(warmed) if warmed.origin == Origin::Compiled => {
                counts.compiled += 1;
                counts.compile_seconds += warmed.took.as_secs_f64();
            }
            Ok(_) => counts.present += 1,
            Err(why) => {
                counts.failed += 1;
                counts.tell(name, why);
            }
        });
    }

    fn bad(&self, name: &str, why: String) {
        self.with(|counts| {
            counts.bad += 1;
            counts.tell(name, why);
        });
    }

    fn foreign(&self) {
        self.with(|counts| counts.foreign += 1);
    }

    fn report(&self, took: Duration, not_written: u64) -> Value {
        if self.shown {
            let _ = writeln!(std::io::stderr().lock());
        }
        let counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let failures: BTreeMap<_, _> = counts.failures.iter().cloned().collect();
        json!({
            "programs": counts.compiled + counts.present + counts.failed + counts.bad,
            "compiled": counts.compiled,
            "present": counts.present,
            "failed": counts.failed,
            "bad_recordings": counts.bad,
            "foreign_objects": counts.foreign,
            "not_written": not_written,
            "compile_seconds": counts.compile_seconds,
            "seconds": took.as_secs_f64(),
            "failures": failures,
        })
    }
}

impl Counts {
    fn tell(&mut self, name: &str, why: String) {
        if self.failures.len() < TOLD {
            self.failures.push((name.to_owned(), why));
        }
    }
}

/// The report for people.
fn words(report: &Value) -> String {
    let mut text = format!(
        "{} programs in {:.1} s: {} compiled, {} in the cache already",
        report["programs"],
        report["seconds"].as_f64().unwrap_or_default(),
        report["compiled"],
        report["present"]
    );
    for (field, what) in [
        ("failed", "failed"),
        ("bad_recordings", "bad recordings"),
        ("foreign_objects", "other objects passed over"),
        ("not_written", "not written to the cache"),
    ] {
        if report[field] != 0 {
            text += &format!(", {} {what}", report[field]);
        }
    }
    for (name, why) in report["failures"].as_object().into_iter().flatten() {
        let why = why.as_str().unwrap_or_default();
        text += &format!("\n{}: {}", name.escape_debug(), crate::error::one_line(why));
    }
    text
}
