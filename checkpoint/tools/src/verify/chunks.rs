//! Every chunk, read and decoded.

use futures::{StreamExt as _, TryStreamExt as _};
use waystation_checkpoint::zarr::ChunkIndex;
use waystation_checkpoint::{IndexDomain, Layout};

use super::said::is_unchecked;
use super::{Kind, Report};
use crate::blocks::{Block, Reader};
use crate::item::{Array, Item, elements, index_of, is_metadata, join};
use crate::memory::Memory;
use crate::progress::Progress;
use crate::{Error, Result};

/// Objects read at the same time, of all arrays.
const READS: usize = 32;
/// Where a zstd frame's header has its descriptor, and which bit of it is unused (RFC 8878, 3.1.1.1.1).
const DESCRIPTOR: usize = 4;
const UNUSED_BIT: u8 = 1 << 4;
/// Missing chunks of an array that are named; of more, their number is told.
const NAMED: usize = 8;

pub(super) async fn check(
    item: &Item,
    memory: &Memory,
    progress: &Progress,
    report: &mut Report,
) -> Result<()> {
    let arrays: Vec<&Array> = item
        .arrays
        .values()
        .filter_map(|layouts| layouts.first())
        .filter(|array| array.metadata.is_some())
        .collect();
    progress.expect(arrays.iter().map(|array| array.stored_bytes).sum());
    let mut readers = Vec::new();
    for array in arrays {
        let name = Some(array.name.as_str());
        let reader = match Reader::open(item, array, memory) {
            Ok(reader) => reader,
            Err(error) => {
                report.fault(Kind::DamagedMetadata, name, "", error.report());
                continue;
            }
        };
        objects_fit(item, array, &reader, report);
        // Chunks may be said to be of any size: those of other arrays are looked at all the same.
        if let Err(error) = reader.cost(0) {
            report.fault(Kind::Unreadable, name, "", error.report());
            continue;
        }
        readers.push((reader, array));
    }
    // Object by object over all arrays, so that many small ones are as quick as one large.
    let work = readers
        .iter()
        .flat_map(|(reader, array)| present(item, array, reader).map(move |index| (reader, index)));
    let mut done = futures::stream::iter(work)
        .map(|(reader, index)| object(reader, index, memory))
        .buffer_unordered(READS);
    while let Some(found) = done.try_next().await? {
        progress.did(1, found.bytes);
        report.chunks += found.chunks;
        report.bytes += found.bytes;
        report.unchecked_chunks += found.unchecked;
        for (kind, array, object, reason) in found.faults {
            report.fault(kind, Some(&array), &object, reason);
        }
    }
    Ok(())
}

/// The objects of an array that have a place in its grid.
fn present<'a>(
    item: &'a Item,
    array: &'a Array,
    reader: &'a Reader,
) -> impl Iterator<Item = ChunkIndex> + 'a {
    files(item, array).filter_map(move |file| index_of(&reader.metadata, file))
}

/// The files of an array, without its metadata and the arrays below it.
fn files<'a>(item: &'a Item, array: &'a Array) -> impl Iterator<Item = &'a str> + 'a {
    let objects = item.objects(array.layout.is_ocdbt());
    // Names without one have files between those of others: its own are few and known by their form.
    let prefix = join(&array.name, "");
    let len = prefix.len();
    objects
        .below(&prefix)
        .map(move |(key, _)| &key[len..])
        .filter(|file| !is_metadata(file))
}

/// Whether a file is the one beyond its edge by which Waystation tells Orbax' merge that an array without elements is whole.
fn is_stand_in(array: &Array, reader: &Reader, file: &str) -> bool {
    let (grid, keys) = (&reader.metadata.grid, reader.metadata.keys);
    array.layout == Layout::OcdbtZarr2
        && grid.count() == 0
        && file == keys.key(&vec![0; grid.shape().len()])
}

/// Files that have no place in the grid, and places that have no file.
fn objects_fit(item: &Item, array: &Array, reader: &Reader, report: &mut Report) {
    let name = Some(array.name.as_str());
    let mut found = 0u64;
    let below: Vec<&str> = item
        .arrays
        .range(format!("{}/", array.name)..)
        .map(|(other, _)| other.as_str())
        .take_while(|other| other.starts_with(&format!("{}/", array.name)))
        .collect();
    let other_layouts = item.arrays.get(&array.name).map_or(0, Vec::len) > 1;
    for file in files(item, array) {
        if index_of(&reader.metadata, file).is_some() {
            found += 1;
            continue;
        }
        let full = join(&array.name, file);
        let of_other = below.iter().any(|other| {
            full.strip_prefix(other)
                .is_some_and(|rest| rest.starts_with('/'))
        });
        // What is there in both versions of zarr has chunks of both.
        if !array.name.is_empty()
            && !of_other
            && !other_layouts
            && !is_stand_in(array, reader, file)
        {
            let reason = "there is no place for it in the array's grid";
            report.fault(Kind::Extra, name, &full, reason);
        }
    }
    let grid = &reader.metadata.grid;
    let expected = grid.count() as u64;
    let missing = expected.saturating_sub(found);
    if missing == 0 {
        return;
    }
    let objects = item.objects(array.layout.is_ocdbt());
    // So many steps find the first missing ones, however large the grid is said to be.
    let places = grid.chunks_of(&IndexDomain::whole(grid.shape()));
    let names: Vec<String> = places
        .map(|index| join(&array.name, &reader.metadata.keys.key(&index)))
        .filter(|key| objects.entry(key).is_none())
        .take(NAMED)
        .collect();
    let rest = missing.saturating_sub(names.len() as u64);
    for object in names {
        report.fault(Kind::MissingChunk, name, &object, "there is no such chunk");
    }
    if rest > 0 {
        let reason = format!("{rest} more of {expected} chunks are missing");
        report.fault(Kind::MissingChunk, name, "", reason);
    }
}

/// What one object is found to be.
#[derive(Debug, Default)]
struct Found {
    chunks: u64,
    bytes: u64,
    unchecked: u64,
    faults: Vec<(Kind, String, String, String)>,
}

/// Reads all blocks of an object.
async fn object(reader: &Reader, index: ChunkIndex, memory: &Memory) -> Result<Found> {
    let mut found = Found::default();
    let domain = reader.metadata.grid.domain(&index);
    for block in reader.grid.chunks_of(&domain) {
        let _room = memory.take(reader.block_cost()).await;
        found.chunks += 1;
        match reader.block(&block).await {
            Ok(read) => {
                found.bytes += read.stored.len() as u64;
                let codec = reader.metadata.codec;
                found.unchecked += u64::from(is_unchecked(codec, &read.stored));
                if let Some(reason) = odd_block(reader, &block, &read) {
                    let (object, _, _) = reader.place(&block);
                    found
                        .faults
                        .push((Kind::DamagedChunk, reader.name.clone(), object, reason));
                }
            }
            Err(error @ (Error::Storage { .. } | Error::CutOff(_))) => return Err(error),
            Err(Error::MissingChunk { array, object, .. }) => {
                let reason = "there is no such chunk".to_owned();
                found
                    .faults
                    .push((Kind::MissingChunk, array, object, reason));
            }
            Err(Error::Array {
                array,
                object,
                source,
                ..
            }) => found
                .faults
                .push((Kind::DamagedChunk, array, object, source.to_string())),
            Err(other) => {
                let (object, _, _) = reader.place(&block);
                found.faults.push((
                    Kind::DamagedChunk,
                    reader.name.clone(),
                    object,
                    other.report(),
                ));
            }
        }
    }
    Ok(found)
}

/// What decodes, but nobody writes: a bit of a frame's header that has no meaning, truth values beside 0 and 1.
fn odd_block(reader: &Reader, block: &[i64], read: &Block) -> Option<String> {
    if reader.is_compressed()
        && read
            .stored
            .get(DESCRIPTOR)
            .is_some_and(|descriptor| descriptor & UNUSED_BIT != 0)
    {
        return Some("the unused bit of the zstd frame's header is set".to_owned());
    }
    let is_bool = reader.metadata.dtype.v3_name() == "bool";
    let is_full = elements(&reader.grid.domain(block).shape) == elements(reader.grid.chunks());
    (is_bool && is_full && read.elements.iter().any(|&byte| byte > 1))
        .then(|| "a truth value is neither 0 nor 1".to_owned())
}
