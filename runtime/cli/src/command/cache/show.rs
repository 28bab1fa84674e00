//! `cache ls`, `inspect`, `verify` and `stats`: what a cache holds.

use std::{
    cell::Cell,
    io::{IsTerminal as _, Write as _},
    path::PathBuf,
    sync::Arc,
    time::SystemTime,
};

use futures::{Stream, StreamExt as _, TryStreamExt as _};
use serde_json::{Value, json};
use waystation_cache::{
    envelope::Limits,
    survey::{self, KeyPrefix, Listed, Object},
};
use waystation_lifecycle::bucket::{Bucket, layout};

use super::{Place, about};
use crate::{
    error::{Failure, chain},
    output, sharing,
};

/// Entries read at the same time: each may be large.
const READS: usize = 4;

/// Keys that are named where a prefix means several.
const NAMED: usize = 5;

/// Which entries a command is about.
#[derive(Debug, clap::Args)]
struct Only {
    /// Only keys that begin so
    #[arg(
        long = "key",
        value_name = "HEX",
        default_value = "",
        hide_default_value = true
    )]
    key: String,
}

/// List the entries of a cache: key, slot, bytes, age
#[derive(Debug, clap::Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    only: Only,
}

/// Say all that is known of one entry: program, who compiled it and when, what its key is made of
#[derive(Debug, clap::Args)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    place: Place,
    /// The key, or as many of its first digits as tell it from others
    #[arg(value_name = "KEY")]
    key: String,
}

/// Read every entry whole and name the bad ones; exit status 1 when there are any
#[derive(Debug, clap::Args)]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    only: Only,
    /// File with the key that entries have to be signed with, as the workers have it; its public half will do [default: none]
    #[arg(long = "cache_signing_key", value_name = "FILE")]
    cache_signing_key: Option<PathBuf>,
}

/// Count what lies in a cache's location, and its bytes
#[derive(Debug, clap::Args)]
pub(crate) struct StatsArgs {
    #[command(flatten)]
    place: Place,
}

pub(super) fn key_prefix(text: &str) -> Result<KeyPrefix, Failure> {
    KeyPrefix::parse(text).ok_or_else(|| {
        Failure::usage(format!(
            "{} are no first digits of a key: at most 64 hexadecimal ones",
            text.escape_debug()
        ))
    })
}

/// A listing or a read that failed. What strangers have named their files stays on its line.
pub(super) fn failed(error: &object_store::Error) -> Failure {
    let said = chain(error).replace(char::is_control, "?");
    Failure::internal(format!("the location cannot be read: {said}"))
}

/// What cannot be listed of a location.
#[derive(Default)]
pub(super) struct Gaps(Cell<Option<Failure>>);

impl Gaps {
    /// What can be listed. In a folder that goes on behind what cannot, which is told at once.
    pub(super) fn pass_over<'a>(
        &'a self,
        bucket: &Bucket,
        prefix: &KeyPrefix,
    ) -> impl Stream<Item = Listed> + use<'a> {
        survey::list(bucket, prefix).filter_map(|listed| {
            let listed = listed.inspect_err(|error| {
                let failure = failed(error);
                tracing::warn!("{failure}");
                self.0.set(Some(failure));
            });
            std::future::ready(listed.ok())
        })
    }

    /// To be asked when all is done that can be.
    pub(super) fn end(&self, status: u8) -> Result<u8, Failure> {
        match self.0.take() {
            None => Ok(status),
            Some(failure) => Err(Failure {
                message: format!("not all was looked at: {}", failure.message),
                ..failure
            }),
        }
    }
}

pub(super) async fn list(args: &ListArgs) -> Result<u8, Failure> {
    let prefix = key_prefix(&args.only.key)?;
    let bucket = args.place.open().await?;
    let mut out = Rows::new(args.place.json);
    let now = SystemTime::now();
    let gaps = Gaps::default();
    let mut found = std::pin::pin!(gaps.pass_over(&bucket, &prefix));
    let mut foreign = 0u64;
    while let Some(listed) = found.next().await {
        match listed {
            Listed::Entry(object) => {
                let age = age(&object, now);
                let (key, slot, bytes) = (object.key.to_string(), object.slot, object.meta.size);
                let row = if args.place.json {
                    json!({"key": key, "slot": slot, "bytes": bytes, "age_seconds": age})
                        .to_string()
                } else {
                    format!("{key} {slot} {:>10} {:>8}", size(bytes), time(age))
                };
                if !out.row(&row)? {
                    return Ok(0);
                }
            }
            Listed::Foreign(_) => foreign += 1,
        }
    }
    out.end()?;
    if foreign > 0 {
        tracing::warn!(
            foreign,
            "objects with other names than entries have lie there, too"
        );
    }
    gaps.end(0)
}

pub(super) async fn inspect(args: &InspectArgs) -> Result<u8, Failure> {
    let prefix = key_prefix(&args.key)?;
    let bucket = args.place.open().await?;
    let objects = one_key(&bucket, &prefix).await?;
    let mut shown = Vec::new();
    for object in &objects {
        let read = survey::read(&bucket, object, &Limits::default(), None).await;
        let mut about = match read.map_err(|error| failed(&error))? {
            None => continue,
            Some(Ok(opened)) => about::entry(&opened),
            Some(Err(bad)) => json!({"bad": bad.reason(), "why": bad.to_string()}),
        };
        about["key"] = json!(object.key.to_string());
        about["slot"] = json!(object.slot);
        about["bytes"] = json!(object.meta.size);
        about["age_seconds"] = json!(age(object, SystemTime::now()));
        shown.push(about);
    }
    let text = if args.place.json {
        format!("{:#}", Value::from(shown))
    } else {
        shown.iter().map(fields).collect::<Vec<_>>().join("\n")
    };
    output::print(&text)?;
    Ok(0)
}

/// The objects of the one key that is meant.
pub(super) async fn one_key(bucket: &Bucket, prefix: &KeyPrefix) -> Result<Vec<Object>, Failure> {
    let mut objects: Vec<Object> = Vec::new();
    let mut keys = Vec::new();
    let mut found = std::pin::pin!(survey::list(bucket, prefix));
    while let Some(listed) = found.next().await {
        let Listed::Entry(object) = listed.map_err(|error| failed(&error))? else {
            continue;
        };
        if !keys.contains(&object.key) {
            keys.push(object.key.clone());
        }
        if keys.len() > NAMED {
            break;
        }
        objects.push(object);
    }
    match keys.as_slice() {
        [] => Err(Failure::internal("there is no entry of that key")),
        [_] => {
            objects.sort_by_key(|object| object.slot);
            Ok(objects)
        }
        several => {
            let names: Vec<_> = several
                .iter()
                .take(NAMED)
                .map(ToString::to_string)
                .collect();
            let more = if several.len() > NAMED { ", ..." } else { "" };
            Err(Failure::usage(format!(
                "several keys begin so, give more digits: {}{more}",
                names.join(", ")
            )))
        }
    }
}

/// One thing's fields, a line each. What strangers may have written stays on its line.
fn fields(about: &Value) -> String {
    let mut text = String::new();
    for (name, value) in about.as_object().into_iter().flatten() {
        match value {
            Value::Object(parts) => {
                for (part, value) in parts {
                    text += &format!("{name:18}{} {value}\n", part.escape_debug());
                }
            }
            // With its quotes and escapes.
            value => text += &format!("{name:18}{value}\n"),
        }
    }
    text
}

pub(super) async fn verify(args: &VerifyArgs) -> Result<u8, Failure> {
    let prefix = key_prefix(&args.only.key)?;
    let signing = sharing::read_signing_key(args.cache_signing_key.as_deref())?.map(Arc::new);
    let signing = signing.as_ref();
    let bucket = args.place.open().await?;
    let mut out = Rows::new(args.place.json);
    let shown = std::io::stderr().is_terminal() && !args.place.json;
    let (mut good, mut bad, mut foreign) = (0u64, 0u64, 0u64);
    let limits = Limits::default();
    let gaps = Gaps::default();
    let checked = gaps
        .pass_over(&bucket, &prefix)
        .map(|listed| async {
            Ok(match listed {
                Listed::Foreign(_) => None,
                Listed::Entry(object) => {
                    let read = survey::read(&bucket, &object, &limits, signing).await?;
                    Some((object, read.map(|opened| opened.map(|_| ()))))
                }
            })
        })
        .buffer_unordered(READS);
    let mut checked = std::pin::pin!(checked);
    while let Some(one) = checked.next().await {
        match one.map_err(|error: object_store::Error| failed(&error))? {
            None => foreign += 1,
            // Gone between the listing and the look.
            Some((_, None)) => {}
            Some((_, Some(Ok(())))) => good += 1,
            Some((object, Some(Err(why)))) => {
                bad += 1;
                let (key, slot) = (object.key.to_string(), object.slot);
                let row = if args.place.json {
                    json!({"key": key, "slot": slot, "bytes": object.meta.size, "bad": why.reason(), "why": why.to_string()})
                        .to_string()
                } else {
                    format!("{key}/{slot} {}: {}", why.reason(), why)
                };
                out.row(&row)?;
            }
        }
        if shown {
            let _ = write!(
                std::io::stderr().lock(),
                "\r{} entries read, {bad} bad",
                good + bad
            );
        }
    }
    if shown {
        let _ = writeln!(std::io::stderr().lock());
    }
    out.row(&if args.place.json {
        json!({"good": good, "bad_entries": bad, "foreign_objects": foreign}).to_string()
    } else {
        format!("{good} good, {bad} bad, {foreign} objects under other names")
    })?;
    out.end()?;
    gaps.end(u8::from(bad > 0))
}

pub(super) async fn stats(args: &StatsArgs) -> Result<u8, Failure> {
    let bucket = args.place.open().await?;
    let now = SystemTime::now();
    let (mut entries, mut repairs, mut foreign) = (0u64, 0u64, 0u64);
    let (mut bytes, mut foreign_bytes, mut largest) = (0u64, 0u64, 0u64);
    let (mut youngest, mut oldest) = (None::<u64>, None::<u64>);
    let all = key_prefix("")?;
    let gaps = Gaps::default();
    let mut found = std::pin::pin!(gaps.pass_over(&bucket, &all));
    while let Some(listed) = found.next().await {
        match listed {
            Listed::Entry(object) => {
                entries += 1;
                repairs += u64::from(object.slot > 0);
                bytes += object.meta.size;
                largest = largest.max(object.meta.size);
                let age = age(&object, now);
                youngest = Some(youngest.map_or(age, |other| other.min(age)));
                oldest = Some(oldest.map_or(age, |other| other.max(age)));
            }
            Listed::Foreign(bytes) => {
                foreign += 1;
                foreign_bytes += bytes;
            }
        }
    }
    let mut others = Vec::new();
    for (what, prefix) in [("recordings", layout::PROGRAMS), ("claims", layout::CLAIMS)] {
        let path = object_store::path::Path::from(prefix.path);
        let counted = bucket
            .store()
            .list(Some(&path))
            .try_fold((0u64, 0u64), async |(count, bytes), meta| {
                Ok((count + 1, bytes + meta.size))
            });
        let counted = counted.await.map_err(|error| failed(&error))?;
        others.push((what, counted));
    }
    let report = json!({
        "location": bucket.location().to_string(),
        "entries": entries,
        "entries_beyond_slot_0": repairs,
        "bytes": bytes,
        "largest_bytes": largest,
        "youngest_seconds": youngest,
        "oldest_seconds": oldest,
        "foreign_objects": foreign,
        "foreign_bytes": foreign_bytes,
        "recordings": others[0].1.0,
        "recording_bytes": others[0].1.1,
        "claims": others[1].1.0,
    });
    output::print(&if args.place.json {
        format!("{report:#}")
    } else {
        let ages = match (youngest, oldest) {
            (Some(youngest), Some(oldest)) => {
                format!(", {} to {} old", time(youngest), time(oldest))
            }
            _ => String::new(),
        };
        let mut text = format!(
            "{}\n{entries} entries, {}, the largest {}{ages}\n",
            bucket.location(),
            size(bytes),
            size(largest)
        );
        if repairs > 0 {
            text += &format!("{repairs} of them in slots 1 to 3: repaired or renewed\n");
        }
        if foreign > 0 {
            text += &format!(
                "{foreign} objects under other names, {}\n",
                size(foreign_bytes)
            );
        }
        for (what, (count, bytes)) in others {
            text += &format!("{count} {what}, {}\n", size(bytes));
        }
        text
    })?;
    gaps.end(0)
}

/// Lines, or with JSON the elements of a list, written as they come.
struct Rows {
    json: bool,
    first: bool,
}

impl Rows {
    fn new(json: bool) -> Rows {
        Rows { json, first: true }
    }

    /// False when nobody reads any more.
    fn row(&mut self, row: &str) -> Result<bool, Failure> {
        let before = match (self.json, std::mem::take(&mut self.first)) {
            (false, _) => "",
            (true, true) => "[\n",
            (true, false) => ",\n",
        };
        let after = if self.json { "" } else { "\n" };
        written(write!(std::io::stdout().lock(), "{before}{row}{after}"))
    }

    fn end(&mut self) -> Result<(), Failure> {
        let end = match (self.json, self.first) {
            (false, _) => "",
            (true, true) => "[]\n",
            (true, false) => "\n]\n",
        };
        let mut stdout = std::io::stdout().lock();
        written(write!(stdout, "{end}").and_then(|()| stdout.flush())).map(drop)
    }
}

fn written(result: std::io::Result<()>) -> Result<bool, Failure> {
    match result {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(Failure::because("stdout cannot be written", &error)),
    }
}

pub(super) fn age(object: &Object, now: SystemTime) -> u64 {
    now.duration_since(object.meta.last_modified.into())
        .unwrap_or_default()
        .as_secs()
}

fn time(seconds: u64) -> String {
    match seconds {
        0..=119 => format!("{seconds} s"),
        120..=7199 => format!("{} min", seconds / 60),
        7200..=172_799 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

#[expect(clippy::cast_precision_loss, reason = "a figure for people")]
pub(crate) fn size(bytes: u64) -> String {
    match bytes {
        0..=1023 => format!("{bytes} B"),
        1024..=1_048_575 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        1_048_576..=1_073_741_823 => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
        _ => format!("{:.1} GiB", bytes as f64 / 1_073_741_824.0),
    }
}
