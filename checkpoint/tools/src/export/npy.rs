//! NumPy's format: a header that is a Python literal, then the elements.

use waystation_checkpoint::zarr::DType;

use super::{Options, Output, Report, Source, no_name};
use crate::Result;
use crate::memory::Memory;
use crate::place::Place;
use crate::progress::Progress;

/// The header is a multiple of so many bytes.
const ALIGNMENT: usize = 64;

pub(super) async fn write(
    sources: &[Source],
    target: &str,
    options: &Options,
    memory: &Memory,
    progress: &Progress,
) -> Result<Report> {
    let mut report = Report::default();
    let mut headers = Vec::new();
    for source in sources {
        let descr = match descr(source.dtype) {
            Some(descr) => descr,
            None if options.as_bits => {
                report.as_bits.push(source.reader.name.clone());
                bits(source.dtype)
            }
            None => return Err(no_name(source, "NumPy")),
        };
        headers.push(header(descr, source.reader.shape()));
    }
    let place = Place::create(target).await?;
    for (source, header) in sources.iter().zip(headers) {
        let name = &source.reader.name;
        let file = if name.is_empty() {
            "array.npy".to_owned()
        } else {
            format!("{name}.npy")
        };
        let (begin, bytes) = (header.len() as u64, source.bytes()?);
        let mut output = Output::create(&place, &file, header, begin + bytes).await?;
        output.array(source, begin, memory, progress).await?;
        output.finish().await?;
        report.bytes += bytes;
        report.arrays += 1;
    }
    Ok(report)
}

/// NumPy's name of an element type. It has none for what `ml_dtypes` adds.
fn descr(dtype: DType) -> Option<&'static str> {
    let name = dtype.name();
    name.starts_with(['<', '|']).then_some(name)
}

fn bits(dtype: DType) -> &'static str {
    if dtype.item_bytes() == 2 {
        "<u2"
    } else {
        "|u1"
    }
}

fn header(descr: &str, shape: &[i64]) -> Vec<u8> {
    let dims: Vec<String> = shape.iter().map(i64::to_string).collect();
    let shape = match dims.as_slice() {
        [one] => format!("({one},)"),
        several => format!("({})", several.join(", ")),
    };
    let text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
    // Magic, version and the length of the text, which ends with a newline.
    let begin = 10;
    let len = (begin + text.len() + 1).next_multiple_of(ALIGNMENT);
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    let rest = u16::try_from(len - begin).unwrap_or(u16::MAX);
    header.extend_from_slice(&rest.to_le_bytes());
    header.extend_from_slice(text.as_bytes());
    header.resize(len - 1, b' ');
    header.push(b'\n');
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_as_numpy_writes_them() {
        let written = header("<f4", &[8, 3]);
        assert_eq!(written.len(), 128);
        assert_eq!(&written[..10], b"\x93NUMPY\x01\x00\x76\x00");
        let text = std::str::from_utf8(&written[10..]).unwrap();
        assert_eq!(
            text.trim_end(),
            "{'descr': '<f4', 'fortran_order': False, 'shape': (8, 3), }"
        );
        assert!(text.ends_with(" \n"));
        assert!(String::from_utf8_lossy(&header("|b1", &[7])).contains("'shape': (7,), }"));
        assert!(String::from_utf8_lossy(&header("|b1", &[])).contains("'shape': (), }"));
        assert!(header("<c16", &[i64::MAX; 64]).len() < usize::from(u16::MAX));
    }
}
