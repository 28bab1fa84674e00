//! A checkpoint as it is, at another location: every object byte for byte, the commit files last.

use std::collections::BTreeMap;

use futures::{StreamExt as _, TryStreamExt as _};
use object_store::ObjectMeta;
use tokio::io::AsyncWriteExt as _;

use crate::place::Place;
use crate::progress::Progress;
use crate::target::{Target, Work, is_of_work};
use crate::tree::{COMMIT, Checkpoint, Kind};
use crate::{Error, Result};

/// Objects on their way at the same time, each with two parts of 16 MiB at most.
const COPIES: usize = 8;
/// Up to so many bytes an object is read and written at once.
const SMALL_BYTES: u64 = 8 << 20;
/// The largest commit file.
const MAX_COMMIT_BYTES: u64 = 1 << 20;

/// What was done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Report {
    /// Objects copied.
    pub objects: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Objects that were there already.
    pub kept: u64,
    /// Steps left out because they are not finished.
    pub unfinished_steps: u64,
}

/// Copies a folder of steps, a step or an item.
///
/// An object that an interrupted copy of the same source has left is not copied again when it has the same size and, where
/// both stores tell the MD5 of it, the same MD5.
///
/// # Errors
/// The store fails; the target is something else; a step that is not finished.
pub async fn copy(source: &Checkpoint, target: &str, progress: &Progress) -> Result<Report> {
    let mut report = Report::default();
    let unfinished: Vec<String> = source
        .steps
        .iter()
        .filter(|step| !step.commit.is_finished())
        .map(|step| format!("{}/", step.name))
        .collect();
    if source.kind == Kind::Step && !unfinished.is_empty() {
        return Err(Error::Unfit {
            location: source.place.location().to_owned(),
            reason: "the step is not finished".to_owned(),
        });
    }
    let left_out: &[String] = if source.kind == Kind::Root {
        &unfinished
    } else {
        &[]
    };
    report.unfinished_steps = left_out.len() as u64;
    let work = Work {
        operation: "copy",
        source: source.place.location(),
        fingerprint: fingerprint(&source.place).await?,
        options: String::new(),
    };
    source.place.check_outside(target)?;
    let target = Target::open(target, &work).await?;
    let mut there = BTreeMap::new();
    if target.is_resumed {
        let listed = target.place.list();
        let mut listed = std::pin::pin!(listed);
        while let Some((name, meta)) = listed.try_next().await? {
            there.insert(name, meta);
        }
    }
    let mut commits = Vec::new();
    let mut wanted = Vec::new();
    let mut listed = std::pin::pin!(source.place.list());
    while let Some((name, meta)) = listed.try_next().await? {
        if is_of_work(&name) || left_out.iter().any(|step| name.starts_with(step)) {
            continue;
        }
        if name.rsplit('/').next() == Some(COMMIT) {
            let text = source.place.get(&name, MAX_COMMIT_BYTES).await?;
            commits.push((name, text.unwrap_or_default().to_vec()));
            report.objects += 1;
            continue;
        }
        progress.expect(meta.size);
        wanted.push((name, meta));
    }
    copy_all(
        &source.place,
        &target.place,
        wanted,
        &there,
        progress,
        &mut report,
    )
    .await?;
    target.complete(source, &mut commits);
    target.commit(commits).await?;
    Ok(report)
}

async fn copy_all(
    from: &Place,
    to: &Place,
    wanted: Vec<(String, ObjectMeta)>,
    there: &BTreeMap<String, ObjectMeta>,
    progress: &Progress,
    report: &mut Report,
) -> Result<()> {
    let mut copied = futures::stream::iter(wanted)
        .map(|(name, meta)| async move {
            let is_there = there.get(&name).is_some_and(|other| is_same(&meta, other));
            if !is_there {
                copy_object(from, to, &name, Some(meta.size)).await?;
            }
            Ok::<_, Error>((meta.size, is_there))
        })
        .buffer_unordered(COPIES);
    while let Some((bytes, was_there)) = copied.try_next().await? {
        progress.did(1, bytes);
        if was_there {
            report.kept += 1;
        } else {
            report.objects += 1;
            report.bytes += bytes;
        }
    }
    Ok(())
}

/// Copies one object; `size` is what it must have.
pub(crate) async fn copy_object(
    from: &Place,
    to: &Place,
    name: &str,
    size: Option<u64>,
) -> Result<()> {
    let size = match size {
        Some(size) => size,
        None => match from.head(name).await? {
            Some(meta) => meta.size,
            None => return Err(from.malformed(name, "it went away")),
        },
    };
    if size <= SMALL_BYTES {
        let bytes = from.get(name, size).await?;
        let bytes = bytes.filter(|bytes| bytes.len() as u64 == size);
        let bytes = bytes.ok_or_else(|| from.malformed(name, "it changed while it was copied"))?;
        return to.put(name, bytes).await;
    }
    let mut stream = std::pin::pin!(from.stream(name).await?);
    let mut writer = to.writer(name)?;
    let mut copied = 0;
    while let Some(bytes) = stream.try_next().await? {
        copied += bytes.len() as u64;
        writer
            .put(bytes)
            .await
            .map_err(|source| to.failed("writing", name, source))?;
    }
    if copied != size {
        // Best effort: what is not shut down is not there.
        let _ = writer.abort().await;
        return Err(from.malformed(name, "it changed while it was copied"));
    }
    writer.shutdown().await.map_err(|source| {
        let source = object_store::Error::Generic {
            store: "upload",
            source: Box::new(source),
        };
        to.failed("writing", name, source)
    })
}

/// Whether an object that is there is what would be copied.
fn is_same(source: &ObjectMeta, there: &ObjectMeta) -> bool {
    let sums = (md5(source), md5(there));
    source.size == there.size
        && match sums {
            (Some(a), Some(b)) => a == b,
            _ => true,
        }
}

/// The MD5, where the tag is one: of objects that were not uploaded in parts.
fn md5(meta: &ObjectMeta) -> Option<&str> {
    let tag = meta.e_tag.as_deref()?.trim_matches('"');
    let is_md5 = tag.len() == 32 && tag.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_md5.then_some(tag)
}

/// Of the names and sizes of all objects, in whichever order they are listed.
pub(crate) async fn fingerprint(place: &Place) -> Result<u64> {
    use std::hash::{DefaultHasher, Hash as _, Hasher as _};
    let mut listed = std::pin::pin!(place.list());
    let mut sum = 0u64;
    while let Some((name, meta)) = listed.try_next().await? {
        let mut hasher = DefaultHasher::new();
        (name, meta.size, meta.last_modified.timestamp_micros()).hash(&mut hasher);
        sum = sum.wrapping_add(hasher.finish());
    }
    Ok(sum)
}
