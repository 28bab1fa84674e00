//! The codecs of an array: `bytes` and maybe `zstd`, or `sharding_indexed` around those.

use serde::{Deserialize, Serialize};

use super::{Extension, unsupported};
use crate::zarr::{Codec, DType, Format, Metadata, Result, Shards, malformed};

/// What a list of codecs comes to.
pub(super) struct Chain {
    pub(super) big_endian: bool,
    pub(super) codec: Codec,
    pub(super) shards: Option<Shards>,
}

/// A name with its configuration, as TensorStore writes it.
#[derive(Serialize)]
pub(super) struct Named<C> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) configuration: Option<C>,
    pub(super) name: &'static str,
}

#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum WrittenCodec<'a> {
    Bytes(Named<WrittenBytes>),
    Zstd(Named<WrittenZstd>),
    Crc32c(Named<()>),
    Sharding(Named<WrittenSharding<'a>>),
}

#[derive(Serialize)]
pub(super) struct WrittenBytes {
    endian: &'static str,
}

#[derive(Serialize)]
pub(super) struct WrittenZstd {
    checksum: bool,
    level: i32,
}

#[derive(Serialize)]
pub(super) struct WrittenSharding<'a> {
    chunk_shape: &'a [i64],
    codecs: Vec<WrittenCodec<'a>>,
    index_codecs: Vec<WrittenCodec<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    index_location: Option<&'static str>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReadBytes {
    endian: Option<String>,
}

/// The level and whether there are checksums is of no matter to a reader.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReadZstd {
    level: Option<i32>,
    #[serde(rename = "checksum")]
    _checksum: Option<bool>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReadSharding {
    chunk_shape: Vec<i64>,
    codecs: Vec<Extension>,
    index_codecs: Vec<Extension>,
    index_location: Option<String>,
}

/// The codecs of an array, to write.
pub(super) fn written(metadata: &Metadata) -> Result<Vec<WrittenCodec<'_>>> {
    let mut codecs = vec![bytes(metadata.dtype.has_byte_order(), metadata.big_endian)];
    if let Codec::Zstd { level } = metadata.codec {
        codecs.push(WrittenCodec::Zstd(Named {
            // Orbax says false. Frames of ours have one, and a reader need not know.
            configuration: Some(WrittenZstd {
                checksum: true,
                level,
            }),
            name: "zstd",
        }));
    }
    if metadata.order != crate::zarr::Order::C {
        return unsupported("column-major order in zarr v3");
    }
    let Some(shards) = &metadata.shards else {
        return Ok(codecs);
    };
    let mut index_codecs = vec![bytes(true, false)];
    if shards.checksum {
        index_codecs.push(WrittenCodec::Crc32c(Named {
            configuration: None,
            name: "crc32c",
        }));
    }
    Ok(vec![WrittenCodec::Sharding(Named {
        configuration: Some(WrittenSharding {
            chunk_shape: shards.grid().chunks(),
            codecs,
            index_codecs,
            // The end is what it is by default.
            index_location: shards.index_at_start.then_some("start"),
        }),
        name: "sharding_indexed",
    })])
}

fn bytes<'a>(has_byte_order: bool, big_endian: bool) -> WrittenCodec<'a> {
    let endian = if big_endian { "big" } else { "little" };
    WrittenCodec::Bytes(Named {
        configuration: has_byte_order.then_some(WrittenBytes { endian }),
        name: "bytes",
    })
}

/// Reads the codecs of an array of `dtype` whose grid has chunks of shape `chunks`.
pub(super) fn read(codecs: Vec<Extension>, dtype: DType, chunks: &[i64]) -> Result<Chain> {
    if codecs
        .first()
        .is_some_and(|codec| codec.name() == "sharding_indexed")
    {
        return read_sharding(codecs, dtype, chunks);
    }
    let mut codecs = codecs.into_iter();
    let Some(first) = codecs.next() else {
        return malformed("no codecs");
    };
    if first.name() != "bytes" {
        return unsupported(format!(
            "codec {:?} where \"bytes\" is expected",
            first.name()
        ));
    }
    let big_endian = read_bytes(first, dtype.has_byte_order())?;
    let codec = match codecs.next() {
        None => Codec::Raw,
        Some(codec) if codec.name() == "zstd" => {
            let read: ReadZstd = codec.configuration()?;
            match read.level {
                Some(level) => Codec::Zstd { level },
                None => Format::Zarr3.orbax_codec(),
            }
        }
        Some(codec) => return unsupported(format!("codec {:?}", codec.name())),
    };
    if let Some(more) = codecs.next() {
        return unsupported(format!("codec {:?} on top of others", more.name()));
    }
    Ok(Chain {
        big_endian,
        codec,
        shards: None,
    })
}

fn read_sharding(codecs: Vec<Extension>, dtype: DType, chunks: &[i64]) -> Result<Chain> {
    let mut codecs = codecs.into_iter();
    let Some(sharding) = codecs.next() else {
        return malformed("no codecs");
    };
    if let Some(more) = codecs.next() {
        return unsupported(format!("codec {:?} on top of shards", more.name()));
    }
    let sharding: ReadSharding = sharding.configuration()?;
    let mut shards = Shards::new(chunks, &sharding.chunk_shape)?;
    match sharding.index_location.as_deref() {
        None | Some("end") => {}
        Some("start") => shards.index_at_start = true,
        Some(other) => return malformed(format!("index_location {other:?}")),
    }
    shards.checksum = read_index_codecs(sharding.index_codecs)?;
    if sharding
        .codecs
        .first()
        .is_some_and(|codec| codec.name() == "sharding_indexed")
    {
        return unsupported("shards in shards");
    }
    let inner = read(sharding.codecs, dtype, shards.grid().chunks())?;
    Ok(Chain {
        shards: Some(shards),
        ..inner
    })
}

/// Whether the index has a checksum.
fn read_index_codecs(codecs: Vec<Extension>) -> Result<bool> {
    let mut codecs = codecs.into_iter();
    let Some(first) = codecs.next().filter(|codec| codec.name() == "bytes") else {
        return unsupported("a shard index whose first codec is not \"bytes\"");
    };
    if read_bytes(first, true)? {
        return unsupported("a big-endian shard index");
    }
    match (codecs.next(), codecs.next()) {
        (None, _) => Ok(false),
        (Some(codec), None) if codec.name() == "crc32c" => Ok(true),
        (Some(codec), _) => unsupported(format!("codec {:?} of a shard index", codec.name())),
    }
}

/// Whether numbers are big-endian.
fn read_bytes(codec: Extension, has_byte_order: bool) -> Result<bool> {
    let read: ReadBytes = codec.configuration()?;
    match read.endian.as_deref() {
        Some("little") => Ok(false),
        // Single bytes have no order.
        Some("big") => Ok(has_byte_order),
        None if !has_byte_order => Ok(false),
        None => malformed("the codec \"bytes\" without an endian for elements of several bytes"),
        Some(other) => malformed(format!("endian {other:?}")),
    }
}
