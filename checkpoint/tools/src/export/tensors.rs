//! safetensors: the length of a header, the header, the elements of all arrays one behind the other. The header is the
//! `safetensors` crate's, which checks it; the elements are streamed, which the crate cannot.

use std::collections::HashMap;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use waystation_checkpoint::zarr::DType;
use waystation_proto::xla::PrimitiveType as P;

use super::{Options, Output, Report, Source, no_name};
use crate::item::Item;
use crate::memory::Memory;
use crate::place::Place;
use crate::progress::Progress;
use crate::{Error, Result};

/// The longest header that readers take.
const MAX_HEADER_BYTES: usize = 100_000_000;
/// The header is a multiple of so many bytes.
const ALIGNMENT: usize = 8;

pub(super) async fn write(
    item: &Item,
    sources: &[Source],
    target: &str,
    options: &Options,
    memory: &Memory,
    progress: &Progress,
) -> Result<Report> {
    let mut report = Report::default();
    // Readers want larger elements first, so that all are aligned.
    let mut sources: Vec<&Source> = sources.iter().collect();
    sources.sort_by_key(|source| std::cmp::Reverse(source.dtype.item_bytes()));
    let mut tensors = Vec::new();
    let mut about = HashMap::new();
    let mut offset = 0usize;
    for source in &sources {
        let name = source.reader.name.clone();
        let dtype = match dtype(source.dtype) {
            Some(dtype) => dtype,
            None if options.as_bits && source.dtype.item_bytes() == 1 => {
                // So that a reader can find out what they are.
                about.insert(
                    format!("dtype of {name}"),
                    source.dtype.v3_name().to_owned(),
                );
                report.as_bits.push(name.clone());
                Dtype::U8
            }
            None => return Err(no_name(source, "safetensors")),
        };
        if let Some(kind) = item.prng_impl(&name) {
            about.insert(format!("prng of {name}"), kind.to_owned());
        }
        let shape = source.reader.shape().iter();
        let shape = shape
            .map(|&dim| usize::try_from(dim).unwrap_or(0))
            .collect();
        let len = usize::try_from(source.bytes()?).unwrap_or(usize::MAX);
        let end = offset
            .checked_add(len)
            .ok_or_else(|| Error::Asked("all together is too large".to_owned()))?;
        let info = TensorInfo {
            dtype,
            shape,
            data_offsets: (offset, end),
        };
        tensors.push((name, info));
        offset = end;
    }
    let header = header((!about.is_empty()).then_some(about), tensors)?;

    let (folder, file) = target.rsplit_once('/').unwrap_or(("", target));
    if file.is_empty() || folder.is_empty() {
        return Err(Error::Asked(format!(
            "{target:?} is no name of a file in a folder"
        )));
    }
    let place = Place::create(folder).await?;
    let mut at = header.len() as u64;
    let mut output = Output::create(&place, file, header, at + offset as u64).await?;
    for source in sources {
        output.array(source, at, memory, progress).await?;
        let bytes = source.bytes()?;
        at += bytes;
        report.bytes += bytes;
        report.arrays += 1;
    }
    output.finish().await?;
    Ok(report)
}

fn header(
    about: Option<HashMap<String, String>>,
    tensors: Vec<(String, TensorInfo)>,
) -> Result<Vec<u8>> {
    let asked =
        |error: &dyn std::fmt::Display| Error::Asked(format!("no header can be made: {error}"));
    let metadata = Metadata::new(about, tensors).map_err(|error| asked(&error))?;
    let mut text = serde_json::to_vec(&metadata).map_err(|error| asked(&error))?;
    text.resize(text.len().next_multiple_of(ALIGNMENT), b' ');
    if text.len() > MAX_HEADER_BYTES {
        return Err(asked(&"it is too long for readers"));
    }
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    Ok(header)
}

/// safetensors' name of an element type. Types narrower than a byte are packed there, which they are not here.
fn dtype(dtype: DType) -> Option<Dtype> {
    Some(match dtype.primitive() {
        P::Pred => Dtype::BOOL,
        P::S8 => Dtype::I8,
        P::S16 => Dtype::I16,
        P::S32 => Dtype::I32,
        P::S64 => Dtype::I64,
        P::U8 => Dtype::U8,
        P::U16 => Dtype::U16,
        P::U32 => Dtype::U32,
        P::U64 => Dtype::U64,
        P::F16 => Dtype::F16,
        P::Bf16 => Dtype::BF16,
        P::F32 => Dtype::F32,
        P::F64 => Dtype::F64,
        P::F8e4m3fn => Dtype::F8_E4M3,
        P::F8e5m2 => Dtype::F8_E5M2,
        P::F8e8m0fnu => Dtype::F8_E8M0,
        P::C64 => Dtype::C64,
        _ => return None,
    })
}
