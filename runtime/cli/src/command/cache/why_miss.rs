//! `cache why-miss`.

use std::{
    fmt::Write as _,
    path::{Path, PathBuf},
    time::SystemTime,
};

use clap::ArgAction;
use waystation_cache::history::{self, Change, Explanation, File, History as _};

use crate::{argv::parse_bool, error::Failure, history::file, output};

/// Components that only programs over several workers have.
const SPANNING: &str = "platform/spanning";
const COLLECTIVES: &str = "platform/collectives";

/// Say what was different about programs that were compiled on this machine although one like them was known
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// File in which the workers have noted it [default: waystation-history in the user's folder for caches]
    #[arg(long = "cache_history", value_name = "FILE|none")]
    cache_history: Option<PathBuf>,
    /// Also what the workers that share this folder have noted in it, their --cache_disk_dir [default: none]
    #[arg(long = "cache_disk_dir", value_name = "DIR")]
    cache_disk_dir: Option<PathBuf>,
    /// Only programs of this name, as in jit_train_step
    #[arg(long = "program", value_name = "NAME")]
    program: Option<String>,
    /// So many compiles, the last ones
    #[arg(long = "last", value_name = "N", default_value_t = 20)]
    last: usize,
    /// JSON instead of text
    #[arg(long = "json", num_args = 0..=1, require_equals = true, default_value = "false",
          default_missing_value = "true", value_parser = parse_bool, action = ArgAction::Set)]
    json: bool,
}

/// Prints a line a compile, oldest first.
pub(crate) fn run(args: &Args) -> Result<(), Failure> {
    let path = file(args.cache_history.clone());
    if path.is_none() && args.cache_disk_dir.is_none() {
        return Err(Failure::usage(
            "no history is kept: name the file of a worker's --cache_history",
        ));
    }
    let records = records(path.as_deref(), args.cache_disk_dir.as_deref())?;
    let mut found = history::explain(&records);
    if let Some(name) = &args.program {
        found.retain(|explanation| explanation.note.program == *name);
    }
    found.drain(..found.len().saturating_sub(args.last));
    let text = if args.json {
        let json = serde_json::to_string_pretty(&found);
        json.map_err(|error| Failure::because("JSON cannot be written", &error))? + "\n"
    } else if found.is_empty() {
        let places = [&path, &args.cache_disk_dir].into_iter().flatten();
        let places: Vec<_> = places.map(|path| path.display().to_string()).collect();
        format!("no compile is noted in {}\n", places.join(" and "))
    } else {
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |time| {
                u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
            });
        found.iter().map(|one| line(one, now)).collect()
    };
    output::print(&text)
}

/// What is noted in a file, and in a folder on disk.
fn records(file: Option<&Path>, folder: Option<&Path>) -> Result<Vec<Vec<u8>>, Failure> {
    let noted = match file {
        None => Vec::new(),
        Some(path) => {
            let read = File::new(path.to_owned()).recent(usize::MAX);
            read.map_err(|error| {
                let path = path.display();
                Failure::usage(format!("--cache_history {path} cannot be read: {error}"))
            })?
        }
    };
    Ok(match folder {
        None => noted,
        Some(folder) if folder.is_dir() => history::merged(noted, history::of_folder(folder)),
        Some(folder) => {
            let folder = folder.display();
            return Err(Failure::usage(format!(
                "--cache_disk_dir: there is no folder {folder}"
            )));
        }
    })
}

/// One compile, explained.
fn line(explanation: &Explanation, now: u64) -> String {
    let note = &explanation.note;
    let mut line = format!("{} ago {}: ", age(now, note.unix_ms), note.program);
    // Writing to a String does not fail.
    let _ = match &explanation.since {
        None => write!(line, "the first of its name"),
        Some(Change { components, .. }) if components.is_empty() => write!(
            line,
            "nothing has changed: its entry was not kept, not there any more, or bad"
        ),
        Some(change) => write!(
            line,
            "changed since {} ago: {}",
            age(now, change.unix_ms),
            told(&change.components)
                .map(words)
                .collect::<Vec<_>>()
                .join(", ")
        ),
    };
    if let Some(construct) = &note.construct {
        let _ = write!(
            line,
            " (keyed on its bytes, which differ from run to run: {construct})"
        );
    }
    line + "\n"
}

/// The components that are worth a word: a program that does not span workers has none of those of one that does.
fn told(components: &[String]) -> impl Iterator<Item = &str> {
    let spans = components.iter().any(|name| name == SPANNING);
    let names = components.iter().map(String::as_str);
    names.filter(move |&name| !(spans && name == COLLECTIVES))
}

/// What a component is called.
fn words(component: &str) -> String {
    match component.split_once('/') {
        _ if component == SPANNING => {
            "whether the program spans workers, or its replicas and partitions then".to_owned()
        }
        _ if component == COLLECTIVES => "Waystation's collectives between workers".to_owned(),
        Some(("flag", name)) => format!("flag --{name}"),
        Some(("environment", "NPROC")) => {
            "the worker's --devices_per_worker or its cores, of which NPROC is made where it is not set"
                .to_owned()
        }
        Some(("environment", name)) => format!("the worker's variable {name}"),
        Some(("platform", "plugin")) => "the plugin's file".to_owned(),
        Some(("platform", "ffi_targets")) => "Waystation's FFI targets".to_owned(),
        Some(("platform", name)) => format!("the worker's {}", name.replace('_', " ")),
        _ => match component {
            "program" => "the program".to_owned(),
            "options" => "the compile options".to_owned(),
            "rules" => "Waystation's rules of rewriting".to_owned(),
            other => other.to_owned(),
        },
    }
}

fn age(now: u64, then: u64) -> String {
    let seconds = now.saturating_sub(then) / 1000;
    match seconds {
        0..=119 => format!("{seconds} s"),
        120..=7199 => format!("{} min", seconds / 60),
        7200..=172_799 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use waystation_cache::history::Note;

    use super::*;

    fn explanation(since: Option<&[&str]>) -> Explanation {
        Explanation {
            note: Note {
                unix_ms: 100_000,
                program: "jit_f".to_owned(),
                key: "k".to_owned(),
                origin: "compiled".to_owned(),
                construct: None,
                components: Vec::new(),
            },
            since: since.map(|names| Change {
                unix_ms: 1_000,
                key: "l".to_owned(),
                components: names.iter().map(|name| (*name).to_owned()).collect(),
            }),
        }
    }

    #[test]
    fn what_has_changed_is_said_in_words() {
        let said = |since| line(&explanation(since), 400_000);
        assert_eq!(said(None), "5 min ago jit_f: the first of its name\n");
        let changed: &[&str] = &[
            "environment/NPROC",
            "environment/XLA_FLAGS",
            "flag/xla_a",
            "options",
            "platform/cpu_features",
            "platform/plugin",
            "program",
            "rules",
        ];
        assert_eq!(
            said(Some(changed)),
            "5 min ago jit_f: changed since 6 min ago: the worker's --devices_per_worker or its cores, of which NPROC is \
             made where it is not set, the worker's variable XLA_FLAGS, flag --xla_a, the compile options, \
             the worker's cpu features, the plugin's file, the program, Waystation's rules of rewriting\n"
        );
        assert!(said(Some(&[])).contains("nothing has changed"));
        let spread = said(Some(&[COLLECTIVES, SPANNING]));
        assert!(
            spread.contains("spans workers") && !spread.contains("collectives"),
            "{spread}"
        );
        let newer = said(Some(&[COLLECTIVES]));
        assert!(newer.contains("Waystation's collectives"), "{newer}");
        assert_eq!(age(10_000, 20_000), "0 s", "clocks differ");
    }
}
