//! Bytes as they lie in an entry: compressed where that gains something.

use std::io::{self, Read};

use bytes::Bytes;

/// zstd level. Executables are machine code and protos, texts shrink to a tenth: higher levels gain a few percent for
/// several times the time, and writers are workers that have other things to do.
const LEVEL: i32 = 1;

/// Fewer bytes than this are not compressed: nothing would be gained.
const COMPRESS_FROM: usize = 512;

/// What is reserved at once for bytes that are being decompressed, beyond a multiple of what is really there.
const RESERVE_BYTES: u64 = 1 << 20;

/// Usual compression is below this; what claims more gets its memory as its bytes come.
const RESERVE_RATIO: u64 = 16;

/// What is compressed further than this is not an entry of ours: zeros shrink to a thirty-thousandth, with which a small
/// object could fill the memory of every worker. Where it would be so of ours, we store it as it is.
const MOST_RATIO: u64 = 256;

/// So much may come of anything.
const ALWAYS_BYTES: u64 = 64 << 20;

const RAW: u32 = 0;
const ZSTD: u32 = 1;

const WRONG_LENGTH: &str = "it is not as long as stated";

const ABSURD: &str = "it would be more than 256 times as long as it is here";

fn is_absurd(stored: u64, decoded: u64) -> bool {
    decoded > ALWAYS_BYTES && decoded / MOST_RATIO > stored
}

/// Bytes with how they are to be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Packed {
    pub(super) encoding: u32,
    pub(super) stored: Bytes,
    pub(super) decoded_bytes: u64,
}

impl Packed {
    /// Takes time in proportion to the bytes, as [`Packed::decode`] does.
    pub(super) fn of(data: &[u8]) -> io::Result<Packed> {
        let decoded_bytes = data.len() as u64;
        if data.len() >= COMPRESS_FROM {
            let packed = zstd::bulk::compress(data, LEVEL)?;
            if packed.len() < data.len() && !is_absurd(packed.len() as u64, decoded_bytes) {
                return Ok(Packed {
                    encoding: ZSTD,
                    stored: packed.into(),
                    decoded_bytes,
                });
            }
        }
        Ok(Packed::raw(Bytes::copy_from_slice(data)))
    }

    pub(super) fn raw(stored: Bytes) -> Packed {
        Packed {
            encoding: RAW,
            decoded_bytes: stored.len() as u64,
            stored,
        }
    }

    /// Looks, without decoding, whether the bytes say the same of themselves as the table does.
    pub(super) fn check(&self) -> Result<(), String> {
        let says = match self.encoding {
            RAW => Some(self.stored.len() as u64),
            ZSTD => zstd::zstd_safe::get_frame_content_size(&self.stored).unwrap_or_default(),
            other => return Err(unknown(other)),
        };
        if says == Some(self.decoded_bytes) {
            Ok(())
        } else {
            Err(WRONG_LENGTH.to_owned())
        }
    }

    /// The decoded bytes: as many as stated, not one more or less. The caller has seen that so many are allowed.
    pub(super) fn decode(&self) -> Result<Bytes, String> {
        let wrong_length = || WRONG_LENGTH.to_owned();
        match self.encoding {
            RAW if self.stored.len() as u64 == self.decoded_bytes => Ok(self.stored.clone()),
            RAW => Err(wrong_length()),
            ZSTD if is_absurd(self.stored.len() as u64, self.decoded_bytes) => {
                Err(ABSURD.to_owned())
            }
            ZSTD => {
                let likely = (self.stored.len() as u64)
                    .saturating_mul(RESERVE_RATIO)
                    .saturating_add(RESERVE_BYTES);
                let reserve =
                    usize::try_from(self.decoded_bytes.min(likely)).map_err(|_| wrong_length())?;
                let mut out = Vec::with_capacity(reserve.saturating_add(1));
                zstd::stream::read::Decoder::with_buffer(&self.stored[..])
                    .and_then(|decoder| {
                        // One more than stated, to see that there is not more.
                        decoder
                            .take(self.decoded_bytes.saturating_add(1))
                            .read_to_end(&mut out)
                    })
                    .map_err(|error| error.to_string())?;
                if out.len() as u64 != self.decoded_bytes {
                    return Err(wrong_length());
                }
                Ok(Bytes::from(out))
            }
            other => Err(unknown(other)),
        }
    }
}

fn unknown(encoding: u32) -> String {
    format!("it has the unknown encoding {encoding}")
}

/// A text as it lies in an entry. It is large, and seldom asked for: it is compressed once, when it is made, and
/// decompressed only when somebody wants to read it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Text(pub(super) Packed);

impl Text {
    /// Takes time in proportion to the text; `None` when the compressor fails.
    pub fn new(text: &str) -> Option<Text> {
        Packed::of(text.as_bytes()).ok().map(Text)
    }

    /// The text. Takes time in proportion to it. `None` where an entry holds something else in its place.
    pub fn read(&self) -> Option<String> {
        String::from_utf8(self.0.decode().ok()?.into()).ok()
    }

    /// Its length, as the entry states it.
    pub fn bytes(&self) -> u64 {
        self.0.decoded_bytes
    }

    /// Bytes that it takes as it is.
    pub fn packed_bytes(&self) -> usize {
        self.0.stored.len()
    }
}
