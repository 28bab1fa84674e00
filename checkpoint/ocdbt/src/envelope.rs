//! What manifests, version tree nodes and B+tree nodes have around them (format: "Manifest header", "Version tree node outer
//! header", "B+tree node outer header", and the footers).
//!
//! | field | encoding |
//! | --- | --- |
//! | magic | u32, big-endian |
//! | length of everything, this header and the checksum too | u64, little-endian |
//! | version, 0 | varint |
//! | compression of the body: 0 none, 1 one zstd frame | varint |
//! | body | |
//! | CRC-32C of everything before it | u32, little-endian |

use std::io::Read as _;

use bytes::Bytes;
use zstd::zstd_safe;

use crate::config::Compression;
use crate::error::{Error, Result, at_most};
use crate::primitive::{Cursor, put_varint};

/// Begins a manifest.
pub const MANIFEST_MAGIC: u32 = 0x0cdb_3a2a;
/// Begins a version tree node.
pub const VERSION_NODE_MAGIC: u32 = 0x0cdb_1234;
/// Begins a B+tree node.
pub const NODE_MAGIC: u32 = 0x0cdb_20de;

/// Magic and length.
const FIXED_HEADER_BYTES: usize = 12;
const CHECKSUM_BYTES: usize = 4;
/// With the shortest version and compression.
const LEAST_BYTES: usize = FIXED_HEADER_BYTES + 2 + CHECKSUM_BYTES;

/// Begins a frame (RFC 8878, 3.1.1).
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// Every zstd decoder is asked to support windows of 8 MiB (RFC 8878, 3.1.1.1.2), whatever is decoded.
const LEAST_WINDOW_LOG: u32 = 23;
/// The largest window that zstd's own levels use.
const MOST_WINDOW_LOG: u32 = 27;

/// The CRC-32C (Castagnoli) of bytes.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// Puts header and checksum around a body, compressed as asked.
///
/// # Errors
/// zstd fails, for want of memory.
pub fn seal(magic: u32, compression: Compression, body: &[u8]) -> Result<Bytes> {
    let mut out = Vec::with_capacity(LEAST_BYTES + body.len());
    out.extend_from_slice(&magic.to_be_bytes());
    out.extend_from_slice(&[0; 8]);
    put_varint(&mut out, 0);
    match compression {
        Compression::None => {
            put_varint(&mut out, 0);
            out.extend_from_slice(body);
        }
        Compression::Zstd { level } => {
            put_varint(&mut out, 1);
            let frame = zstd::bulk::compress(body, level).map_err(zstd_error)?;
            out.extend_from_slice(&frame);
        }
    }
    let length = (out.len() + CHECKSUM_BYTES) as u64;
    out[4..FIXED_HEADER_BYTES].copy_from_slice(&length.to_le_bytes());
    let checksum = crc32c(&out);
    out.extend_from_slice(&checksum.to_le_bytes());
    Ok(out.into())
}

/// The body, decompressed, of `limit` bytes at most. An uncompressed one shares the memory of `sealed`.
///
/// Besides the body, no more is allocated than zstd's window: `limit` rounded up to a power of two, or 8 MiB.
///
/// # Errors
/// Another magic, a wrong length or checksum, a version or compression that is not known, a zstd frame that is damaged or
/// followed by anything, a body beyond the limit.
pub fn open(sealed: &Bytes, magic: u32, limit: usize) -> Result<Bytes> {
    if sealed.len() < LEAST_BYTES {
        return Err(Error::TooShort {
            found: sealed.len(),
            least: LEAST_BYTES,
        });
    }
    let inner = sealed.slice(..sealed.len() - CHECKSUM_BYTES);
    let mut cursor = Cursor::new(&inner);
    let found = u32::from_be_bytes(cursor.array()?);
    if found != magic {
        return Err(Error::Magic {
            expected: magic,
            found,
        });
    }
    let (stated, actual) = (cursor.u64_le()?, sealed.len() as u64);
    if stated != actual {
        return Err(Error::Length { stated, actual });
    }
    let mut stored = [0; CHECKSUM_BYTES];
    stored.copy_from_slice(&sealed[inner.len()..]);
    let (stored, computed) = (u32::from_le_bytes(stored), crc32c(&inner));
    if stored != computed {
        return Err(Error::Checksum { stored, computed });
    }
    let version = cursor.varint()?;
    if version != 0 {
        return Err(Error::Unknown {
            what: "format version",
            value: version,
        });
    }
    let compression = cursor.varint()?;
    let body = cursor.share(cursor.remaining())?;
    match compression {
        0 => {
            at_most("size of the body", body.len() as u64, limit as u64)?;
            Ok(body)
        }
        1 => inflate(&body, limit).map(Bytes::from),
        value => Err(Error::Unknown {
            what: "compression format",
            value,
        }),
    }
}

/// The most bytes that a body of `limit` bytes can take when sealed.
pub(crate) fn most_sealed(limit: usize) -> u64 {
    // Versions and compressions are one byte when written canonically, ten at most.
    (zstd_safe::compress_bound(limit).max(limit) + LEAST_BYTES + 18) as u64
}

fn zstd_error(error: impl std::fmt::Display) -> Error {
    Error::Zstd {
        reason: error.to_string(),
    }
}

fn inflate(frame: &[u8], limit: usize) -> Result<Vec<u8>> {
    // One frame and nothing after it, as TensorStore wants it; a skippable frame is none.
    if !frame.starts_with(&ZSTD_MAGIC) {
        return Err(zstd_error("no frame"));
    }
    match zstd_safe::find_frame_compressed_size(frame) {
        Ok(length) if length == frame.len() => {}
        Ok(_) => return Err(zstd_error("bytes after the frame")),
        Err(_) => return Err(zstd_error("no whole frame")),
    }
    let stated = match zstd_safe::get_frame_content_size(frame) {
        Ok(Some(stated)) => Some(at_most("size of the body", stated, limit as u64)? as usize),
        Ok(None) => None,
        Err(_) => return Err(zstd_error("no whole frame header")),
    };
    let mut decoder = zstd::stream::read::Decoder::with_buffer(frame)
        .map_err(zstd_error)?
        .single_frame();
    let window_log = usize::BITS - limit.leading_zeros();
    decoder
        .window_log_max(window_log.clamp(LEAST_WINDOW_LOG, MOST_WINDOW_LOG))
        .map_err(zstd_error)?;
    let mut body = Vec::new();
    body.try_reserve_exact(stated.unwrap_or(0))
        .map_err(zstd_error)?;
    // Grown here in steps: `read_to_end` alone would double past the limit.
    let mut chunk = vec![0; 64 << 10];
    loop {
        let length = decoder.read(&mut chunk).map_err(zstd_error)?;
        if length == 0 {
            break;
        }
        at_most(
            "size of the body",
            (body.len() + length) as u64,
            limit as u64,
        )?;
        if body.capacity() - body.len() < length {
            let room = (body.capacity() * 2).clamp(body.len() + length, limit);
            body.try_reserve_exact(room - body.len())
                .map_err(zstd_error)?;
        }
        body.extend_from_slice(&chunk[..length]);
    }
    if stated.is_some_and(|stated| stated != body.len()) {
        return Err(zstd_error("another size than the frame says"));
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_castagnolis() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        // RFC 3720, B.4: 32 bytes of zeros.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    }

    #[test]
    fn a_bomb_is_refused_at_the_limit() {
        let zeros = vec![0; 48 << 20];
        let level = Compression::Zstd { level: 3 };
        let bomb = seal(NODE_MAGIC, level, &zeros).unwrap();
        assert!(bomb.len() < 64 << 10);
        let refused = open(&bomb, NODE_MAGIC, 1 << 20);
        assert!(
            matches!(refused, Err(Error::TooLarge { .. })),
            "{refused:?}"
        );

        // The same without the content size in the frame header: only decoding finds it.
        let mut encoder = zstd::stream::write::Encoder::new(Vec::new(), 3).unwrap();
        std::io::copy(&mut &zeros[..], &mut encoder).unwrap();
        let frame = encoder.finish().unwrap();
        assert_eq!(zstd_safe::get_frame_content_size(&frame).unwrap(), None);
        let refused = inflate(&frame, 1 << 20);
        assert!(
            matches!(refused, Err(Error::TooLarge { .. })),
            "{refused:?}"
        );
        // What it is decoded into grows to the limit and no further.
        let body = inflate(&frame, zeros.len() + 1000).unwrap();
        assert_eq!(body, zeros);
        assert!(body.capacity() <= zeros.len() + 1000);
    }

    #[test]
    fn one_frame_and_nothing_after_it() {
        let frame = zstd::bulk::compress(b"body", 1).unwrap();
        assert_eq!(&inflate(&frame, 4).unwrap()[..], b"body");
        assert!(inflate(&frame, 3).is_err());
        assert!(inflate(&[&frame[..], &frame[..]].concat(), 100).is_err());
        assert!(inflate(&[&frame[..], &[0]].concat(), 100).is_err());
        assert!(inflate(&frame[..frame.len() - 1], 100).is_err());
        assert!(inflate(&[], 100).is_err());
        // A skippable frame is none.
        assert!(inflate(&[0x50, 0x2a, 0x4d, 0x18, 0, 0, 0, 0], 100).is_err());
    }
}
