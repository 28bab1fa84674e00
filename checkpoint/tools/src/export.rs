//! Arrays in formats of others: `.npy`, a file an array, and safetensors, one file for all.

mod local;
mod npy;
mod tensors;

use bytes::Bytes;
use object_store::buffered::BufWriter;
use tokio::io::AsyncWriteExt as _;
use waystation_checkpoint::IndexDomain;
use waystation_checkpoint::zarr::DType;

use crate::blocks::{Reader, Slabs};
use crate::item::{Array, Item, elements};
use crate::memory::Memory;
use crate::pattern::Pattern;
use crate::place::Place;
use crate::progress::Progress;
use crate::values::Cast;
use crate::{Error, Result};

/// The least bytes of an array that are streamed at once.
const SLAB_BYTES: u64 = 1 << 20;

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

impl Source {
    /// The memory that reading a box takes: the elements as they are read, as they are cast, and on their way.
    fn cost(&self, wanted: &IndexDomain) -> Result<(u64, usize)> {
        let item_bytes = self.reader.item_bytes().max(self.dtype.item_bytes() as u64);
        let bytes = elements(&wanted.shape)
            .unwrap_or(0)
            .saturating_mul(item_bytes);
        let copies = if self.cast.is_some() { 2 } else { 1 };
        self.reader.cost(bytes.saturating_mul(copies))
    }

    async fn read(&self, wanted: &IndexDomain, reads: usize) -> Result<Vec<u8>> {
        let read = self.reader.read(wanted, reads).await?;
        match self.cast {
            None => Ok(read),
            Some(cast) => Ok(tokio::task::spawn_blocking(move || cast.apply(&read)).await?),
        }
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
    // What is asked for by name can be had from what is left of a checkpoint.
    if options.only.is_empty() {
        item.check_readable()?;
    }
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
    let (dtype, cast) = Cast::asked(&options.casts, item, &array.name, from)?;
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

/// A file that is written: on a disk box by box wherever each belongs, elsewhere in order.
enum Output {
    Local(local::File),
    Stream {
        writer: Box<BufWriter>,
        place: Place,
        file: String,
    },
}

impl Output {
    /// Begins a file with its header; `len` is what it will have in all.
    async fn create(place: &Place, file: &str, header: Vec<u8>, len: u64) -> Result<Output> {
        if place.head(file).await?.is_some() {
            return Err(Error::Unfit {
                location: place.location().to_owned(),
                reason: format!("{file} is there already"),
            });
        }
        if let Some(folder) = place.local_path() {
            // The name has been taken for one of an object, so it leads nowhere else.
            let created = local::File::create(folder.join(file), header, len).await?;
            return Ok(Output::Local(created));
        }
        let mut output = Output::Stream {
            writer: Box::new(place.writer(file)?),
            place: place.clone(),
            file: file.to_owned(),
        };
        output.append(header.into()).await?;
        Ok(output)
    }

    async fn append(&mut self, bytes: Bytes) -> Result<()> {
        match self {
            Output::Local(_) => Ok(()),
            Output::Stream {
                writer,
                place,
                file,
            } => writer
                .put(bytes)
                .await
                .map_err(|source| place.failed("writing", file, source)),
        }
    }

    /// Writes the elements of an array, which begin at `at`: in a file that is streamed, behind all before.
    async fn array(
        &mut self,
        source: &Source,
        at: u64,
        memory: &Memory,
        progress: &Progress,
    ) -> Result<()> {
        if let Output::Local(file) = self {
            return file.array(source, at, memory, progress).await;
        }
        let reader = &source.reader;
        let item_bytes = reader.item_bytes().max(source.dtype.item_bytes() as u64);
        // Blocks that run over several slabs are read for each of them.
        let most = (memory.total() / 16).max(SLAB_BYTES) / item_bytes;
        for slab in Slabs::new(reader.shape(), reader.grid.chunks(), most) {
            let (cost, reads) = source.cost(&slab)?;
            let _room = memory.take(cost).await;
            let read = source.read(&slab, reads).await?;
            let len = read.len() as u64;
            self.append(read.into()).await?;
            progress.did(1, len);
        }
        Ok(())
    }

    async fn finish(self) -> Result<()> {
        match self {
            Output::Local(file) => file.finish().await,
            Output::Stream {
                mut writer,
                place,
                file,
            } => writer.shutdown().await.map_err(|source| {
                let source = object_store::Error::Generic {
                    store: "upload",
                    source: Box::new(source),
                };
                place.failed("writing", &file, source)
            }),
        }
    }
}
