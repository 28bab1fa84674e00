//! Arrays in formats of others: `.npy`, a file an array, and safetensors, one file for all.

mod npy;
mod tensors;

use bytes::Bytes;
use tokio::io::AsyncWriteExt as _;
use waystation_checkpoint::zarr::DType;

use crate::blocks::{Reader, Slabs};
use crate::item::{Array, Item, elements};
use crate::memory::Memory;
use crate::pattern::Pattern;
use crate::place::Place;
use crate::progress::Progress;
use crate::values::Cast;
use crate::{Error, Result};

/// The most bytes of an array on their way at once.
const SLAB_BYTES: u64 = 32 << 20;

/// What is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// A folder with a file an array.
    Npy,
    /// One file.
    Safetensors,
}

/// What is to be exported, and how.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Of these, if there are any, one must match an array's name.
    pub only: Vec<Pattern>,
    /// Other element types; the last pattern that matches counts.
    pub casts: Vec<(Pattern, DType)>,
    /// What the format has no name for as unsigned integers of the same size: the bits.
    pub as_bits: bool,
}

/// What was done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// Arrays written.
    pub arrays: u64,
    /// The bytes of their elements.
    pub bytes: u64,
    /// Arrays written as bits.
    pub as_bits: Vec<String>,
}

/// An array that is to be written.
struct Source {
    reader: Reader,
    cast: Option<Cast>,
    dtype: DType,
}

impl Source {
    fn bytes(&self) -> Result<u64> {
        elements(self.reader.shape())
            .and_then(|elements| elements.checked_mul(self.dtype.item_bytes() as u64))
            .ok_or_else(|| Error::Asked(format!("array {:?} is too large", self.reader.name)))
    }
}

/// Exports an item: for [`Format::Npy`] into the folder `target`, for [`Format::Safetensors`] into the file of that name.
///
/// # Errors
/// An element type that the format has no name for; an array that cannot be read; a file that is there already.
pub async fn export(
    item: &Item,
    format: Format,
    target: &str,
    options: &Options,
    memory: &Memory,
    progress: &Progress,
) -> Result<Report> {
    let is_meant = |name: &str| {
        options.only.is_empty() || options.only.iter().any(|pattern| pattern.matches(name))
    };
    let mut sources = Vec::new();
    let meant = item.arrays.values().filter_map(|layouts| layouts.first());
    for array in meant.filter(|array| is_meant(&array.name)) {
        sources.push(source(item, array, options, memory)?);
    }
    if sources.is_empty() {
        return Err(Error::Asked("no array is meant".to_owned()));
    }
    for source in &sources {
        progress.expect(source.bytes()?);
    }
    match format {
        Format::Npy => npy::write(&sources, target, options, memory, progress).await,
        Format::Safetensors => {
            tensors::write(item, &sources, target, options, memory, progress).await
        }
    }
}

fn source(item: &Item, array: &Array, options: &Options, memory: &Memory) -> Result<Source> {
    let reader = Reader::open(item, array, memory)?;
    let from = reader.metadata.dtype;
    let wanted = options
        .casts
        .iter()
        .rfind(|(pattern, _)| pattern.matches(&array.name));
    let dtype = match wanted {
        Some((_, to)) if item.prng_impl(&array.name).is_none() => *to,
        _ => from,
    };
    let cast = if dtype == from {
        None
    } else {
        let cast = Cast::new(from, dtype);
        Some(cast.ok_or_else(|| {
            let (name, from, to) = (&array.name, from.v3_name(), dtype.v3_name());
            Error::Asked(format!(
                "array {name:?} is {from}, which cannot be cast to {to}"
            ))
        })?)
    };
    Ok(Source {
        reader,
        cast,
        dtype,
    })
}

/// Why an element type cannot be written, and what can be done.
fn no_name(source: &Source, format: &str) -> Error {
    Error::Asked(format!(
        "array {:?} is {}, for which {format} has no name: cast it (--cast), leave it out (--only), or write its bits as \
         unsigned integers (--as_bits)",
        source.reader.name,
        source.dtype.v3_name()
    ))
}

/// Writes the elements of an array, in order.
async fn stream(
    source: &Source,
    writer: &mut object_store::buffered::BufWriter,
    (place, file): (&Place, &str),
    memory: &Memory,
    progress: &Progress,
) -> Result<u64> {
    let reader = &source.reader;
    let item_bytes = reader.item_bytes().max(source.dtype.item_bytes() as u64);
    let most = SLAB_BYTES.min(memory.total() / 16) / item_bytes;
    let mut written = 0;
    for slab in Slabs::new(reader.shape(), reader.grid.chunks(), most) {
        let bytes = elements(&slab.shape).unwrap_or(0) * item_bytes;
        // The elements as they are read, as they are cast, and on their way.
        let (cost, reads) = reader.cost(bytes.saturating_mul(3))?;
        let _room = memory.take(cost).await;
        let mut read = reader.read(&slab, reads).await?;
        if let Some(cast) = source.cast {
            read = tokio::task::spawn_blocking(move || cast.apply(&read)).await?;
        }
        let len = read.len() as u64;
        writer
            .put(Bytes::from(read))
            .await
            .map_err(|source| place.failed("writing", file, source))?;
        written += len;
        progress.did(1, len);
    }
    Ok(written)
}

async fn shut(
    mut writer: object_store::buffered::BufWriter,
    place: &Place,
    file: &str,
) -> Result<()> {
    writer.shutdown().await.map_err(|source| {
        let source = object_store::Error::Generic {
            store: "upload",
            source: Box::new(source),
        };
        place.failed("writing", file, source)
    })
}
