//! The bytes of a chunk.

use bytes::Bytes;
use zstd::stream::raw::{CParameter, Encoder, InBuffer, Operation as _, OutBuffer};

use super::{Result, malformed};
use crate::engine::{Buffer, filled};

/// A frame's checksum (RFC 8878, 3.1.1).
const CHECKSUM_BYTES: usize = 4;

/// What is compressed in parts is kept in parts of this size.
pub(crate) const PART_BYTES: usize = 2 << 20;
/// What an encoder may hold of what it has been given: a block and its window's end, amply.
const ENCODER_BYTES: usize = 256 << 10;

/// How a chunk is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    /// The elements as they are.
    Raw,
    /// One zstd frame with its content size and a checksum of the content.
    ///
    /// Orbax writes none, and a bit that flips in a block that zstd stored as it is then passes for data. Every zstd reader,
    /// TensorStore's too, checks the checksum where there is one.
    Zstd {
        /// The compression level.
        level: i32,
    },
}

impl Codec {
    /// The most bytes that `len` bytes of elements become.
    #[must_use]
    pub fn bound(self, len: usize) -> usize {
        match self {
            Codec::Raw => len,
            Codec::Zstd { .. } => zstd::zstd_safe::compress_bound(len) + CHECKSUM_BYTES,
        }
    }

    /// Compresses the elements of a chunk.
    ///
    /// # Errors
    /// No memory for the compressor.
    pub fn encode(self, elements: Bytes) -> Result<Bytes> {
        match self {
            Codec::Raw => Ok(elements),
            Codec::Zstd { level } => encode_zstd(&elements, level)
                .map(Bytes::from)
                .or_else(|error| malformed(format!("zstd: {error}"))),
        }
    }

    /// As [`Codec::encode`] of all parts one behind the other, each of which is let go of when it has been compressed. What is
    /// stored comes in parts as well, in memory that `buffer` gives.
    ///
    /// # Errors
    /// As [`Codec::encode`].
    pub(crate) fn encode_parts(
        self,
        parts: Vec<Bytes>,
        buffer: &dyn Fn(usize) -> Option<Box<dyn Buffer>>,
    ) -> Result<Vec<Bytes>> {
        match self {
            Codec::Raw => Ok(parts),
            Codec::Zstd { level } => encode_zstd_parts(parts, level, buffer)
                .or_else(|error| malformed(format!("zstd: {error}"))),
        }
    }

    /// The elements of a chunk, which must be exactly `len` bytes. No more than `len` bytes are allocated, and none where
    /// elements are stored as they are and `stored` is shared with nobody.
    ///
    /// # Errors
    /// A frame that is damaged, cut short, of another length, or followed by anything; no memory for `len` bytes.
    pub fn decode(self, stored: Bytes, len: usize) -> Result<Vec<u8>> {
        self.check(&stored, len)?;
        if self == Codec::Raw {
            return Ok(stored.into());
        }
        let Some(mut elements) = crate::strided::zeroed(len) else {
            return malformed(format!("no memory for a chunk of {len} bytes"));
        };
        self.decode_to(&stored, &mut elements)?;
        Ok(elements)
    }

    /// What can be said of a chunk of `len` bytes of elements before there is memory for them.
    ///
    /// # Errors
    /// As [`Codec::decode`], as far as that is known.
    pub(crate) fn check(self, stored: &[u8], len: usize) -> Result<()> {
        match self {
            Codec::Raw if stored.len() == len => Ok(()),
            Codec::Raw => malformed(format!(
                "{} bytes stored where a chunk has {len}",
                stored.len()
            )),
            Codec::Zstd { .. } => check_zstd(stored, len),
        }
    }

    /// As [`Codec::decode`] of what has been checked, to where the elements are wanted, all of which is written.
    ///
    /// # Errors
    /// As [`Codec::decode`].
    pub(crate) fn decode_to(self, stored: &[u8], elements: &mut [u8]) -> Result<()> {
        match self {
            Codec::Raw => elements.copy_from_slice(stored),
            Codec::Zstd { .. } => decode_zstd(stored, elements)?,
        }
        Ok(())
    }
}

fn encode_zstd(elements: &[u8], level: i32) -> std::io::Result<Vec<u8>> {
    let mut encoder = zstd::bulk::Compressor::new(level)?;
    encoder.include_checksum(true)?;
    let mut stored = encoder.compress(elements)?;
    // It has been given room for what nothing can be compressed to.
    stored.shrink_to_fit();
    Ok(stored)
}

fn encode_zstd_parts(
    parts: Vec<Bytes>,
    level: i32,
    buffer: &dyn Fn(usize) -> Option<Box<dyn Buffer>>,
) -> std::io::Result<Vec<Bytes>> {
    let mut encoder = Encoder::new(level)?;
    encoder.set_parameter(CParameter::ChecksumFlag(true))?;
    let mut left: usize = parts.iter().map(Bytes::len).sum();
    // Which puts the content size into the frame, and lets the encoder choose for it.
    encoder.set_pledged_src_size(Some(left as u64))?;
    let mut stored = Stored {
        parts: Vec::new(),
        buffer,
    };
    let mut part = stored.next(left)?;
    for elements in parts {
        let mut input = InBuffer::around(&elements);
        while input.pos() < elements.len() {
            let before = input.pos();
            part.run(|output| encoder.run(&mut input, output))?;
            left -= input.pos() - before;
            if part.is_full() {
                part = stored.put_aside(part, left)?;
            }
        }
    }
    while part.run(|output| encoder.finish(output, true))? > 0 {
        if part.is_full() {
            part = stored.put_aside(part, left)?;
        }
    }
    stored.parts.push(part.into_bytes());
    Ok(stored.parts)
}

/// What has been compressed.
struct Stored<'a> {
    parts: Vec<Bytes>,
    buffer: &'a dyn Fn(usize) -> Option<Box<dyn Buffer>>,
}

impl Stored<'_> {
    /// A part for what is made of `left` bytes that are not compressed yet, and of what the encoder still holds.
    fn next(&self, left: usize) -> std::io::Result<StoredPart> {
        let held = if self.parts.is_empty() {
            0
        } else {
            ENCODER_BYTES
        };
        let bound = Codec::Zstd { level: 0 }.bound(left) + held;
        let buffer = (self.buffer)(bound.min(PART_BYTES)).ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(StoredPart { buffer, len: 0 })
    }

    fn put_aside(&mut self, part: StoredPart, left: usize) -> std::io::Result<StoredPart> {
        self.parts.push(part.into_bytes());
        self.next(left)
    }
}

struct StoredPart {
    buffer: Box<dyn Buffer>,
    len: usize,
}

impl StoredPart {
    fn run(
        &mut self,
        work: impl FnOnce(&mut OutBuffer<'_, [u8]>) -> std::io::Result<usize>,
    ) -> std::io::Result<usize> {
        let buffer: &mut [u8] = (*self.buffer).as_mut();
        let mut output = OutBuffer::around_pos(buffer, self.len);
        let result = work(&mut output);
        self.len = output.pos();
        result
    }

    fn is_full(&self) -> bool {
        self.len == (*self.buffer).as_ref().len()
    }

    fn into_bytes(self) -> Bytes {
        filled(self.buffer, self.len)
    }
}

fn check_zstd(stored: &[u8], len: usize) -> Result<()> {
    // TensorStore refuses a second frame, and so must whoever does not want to read what it does not.
    match zstd::zstd_safe::find_frame_compressed_size(stored) {
        Ok(frame) if frame == stored.len() => {}
        Ok(frame) => {
            return malformed(format!(
                "a zstd frame of {frame} bytes in {} bytes stored",
                stored.len()
            ));
        }
        Err(_) => return malformed("no whole zstd frame"),
    }
    match zstd::zstd_safe::get_frame_content_size(stored) {
        Ok(Some(size)) if usize::try_from(size) != Ok(len) => malformed(format!(
            "a zstd frame of {size} bytes where a chunk has {len}"
        )),
        _ => Ok(()),
    }
}

fn decode_zstd(stored: &[u8], elements: &mut [u8]) -> Result<()> {
    let len = elements.len();
    let mut decoder = match zstd::bulk::Decompressor::new() {
        Ok(decoder) => decoder,
        Err(error) => return malformed(format!("zstd: {error}")),
    };
    // A frame that holds more fails.
    match decoder.decompress_to_buffer(stored, elements) {
        Ok(size) if size == len => Ok(()),
        Ok(size) => malformed(format!(
            "{size} bytes in the zstd frame where a chunk has {len}"
        )),
        Err(error) => malformed(format!("zstd: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use std::io::Write as _;

    use super::*;

    const ZSTD: Codec = Codec::Zstd { level: 1 };

    #[test]
    fn a_frame_has_its_content_size_and_a_checksum() {
        let frame = ZSTD.encode(vec![7; 1000].into()).unwrap();
        assert_eq!(
            zstd::zstd_safe::get_frame_content_size(&frame).ok(),
            Some(Some(1000))
        );
        // Bit 2 of the frame header descriptor, the fifth byte (RFC 8878, 3.1.1.1.1), is the checksum flag.
        assert_eq!(frame[4] & 0b100, 0b100);
    }

    #[test]
    fn parts_make_one_frame() {
        // Noise in parts of odd sizes, more than one part of what is stored.
        let mut state = 1u32;
        let noise: Bytes = std::iter::repeat_with(|| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .take(2 * PART_BYTES + 5)
        .collect();
        let heap = &crate::engine::heap;
        for size in [1 << 20, 700_001, noise.len()] {
            let parts = (0..noise.len()).step_by(size);
            let parts = parts.map(|at| noise.slice(at..noise.len().min(at + size)));
            let stored = ZSTD.encode_parts(parts.collect(), heap).unwrap();
            let frame = Bytes::from(stored.concat());
            assert!(frame.len() <= ZSTD.bound(noise.len()));
            assert_eq!(frame[4] & 0b100, 0b100);
            let size = zstd::zstd_safe::get_frame_content_size(&frame);
            assert_eq!(size.ok(), Some(Some(noise.len() as u64)));
            assert_eq!(ZSTD.decode(frame, noise.len()).unwrap(), noise);
        }
        let nothing = ZSTD.encode_parts(vec![Bytes::new()], heap).unwrap();
        assert!(ZSTD.decode(nothing.concat().into(), 0).unwrap().is_empty());
        let raw = Codec::Raw.encode_parts(vec![noise.slice(..7), noise.slice(7..)], heap);
        assert_eq!(raw.unwrap().concat(), noise);
    }

    #[test]
    fn every_flipped_bit_of_a_chunk_is_found() {
        // Noise, which zstd stores as it is.
        let noise: Bytes = (0..200u32)
            .flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes())
            .collect();
        let frame = ZSTD.encode(noise.clone()).unwrap();
        for bit in 0..frame.len() * 8 {
            let mut damaged = frame.to_vec();
            damaged[bit / 8] ^= 1 << (bit % 8);
            let read = ZSTD.decode(damaged.into(), noise.len());
            assert!(read.is_err() || read.unwrap() == noise, "bit {bit}");
        }
    }

    #[test]
    fn frames_of_other_writers_are_read() {
        // A streaming encoder does not know the size; some writers add a checksum.
        let mut encoder = zstd::stream::Encoder::new(Vec::new(), 3).unwrap();
        encoder.include_checksum(true).unwrap();
        encoder.write_all(&[5; 300]).unwrap();
        let frame = Bytes::from(encoder.finish().unwrap());
        assert_eq!(ZSTD.decode(frame.clone(), 300).unwrap(), [5; 300]);
        assert!(ZSTD.decode(frame.clone(), 299).is_err());
        assert!(ZSTD.decode(frame.clone(), 301).is_err());
    }

    #[test]
    fn damaged_chunks_are_errors() {
        let data: Bytes = (0..4096u32)
            .flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes())
            .collect();
        let frame = ZSTD.encode(data.clone()).unwrap();
        let two = Bytes::from([frame.clone(), frame.clone()].concat());
        let trailing = Bytes::from([&frame[..], &[0]].concat());
        for stored in [
            frame.slice(..frame.len() - 1),
            Bytes::new(),
            two,
            trailing,
            data.clone(),
        ] {
            assert!(ZSTD.decode(stored, data.len()).is_err());
        }
        assert!(Codec::Raw.decode(data.slice(1..), data.len()).is_err());
        // A frame that promises an impossible size is refused before anything is allocated for it.
        assert!(ZSTD.decode(frame.clone(), usize::MAX).is_err());
    }

    proptest! {
        #[test]
        fn chunks_come_back(data in proptest::collection::vec(any::<u8>(), 0..2000), raw in any::<bool>()) {
            let codec = if raw { Codec::Raw } else { ZSTD };
            let stored = codec.encode(data.clone().into()).unwrap();
            prop_assert!(stored.len() <= codec.bound(data.len()));
            prop_assert_eq!(codec.decode(stored, data.len()).unwrap(), data);
        }

        #[test]
        fn no_bytes_panic(stored in proptest::collection::vec(any::<u8>(), 0..200), len in 0..1000usize) {
            let _ = ZSTD.decode(stored.clone().into(), len);
            let mut framed = vec![0x28, 0xb5, 0x2f, 0xfd];
            framed.extend(stored);
            let _ = ZSTD.decode(framed.into(), len);
        }
    }
}
