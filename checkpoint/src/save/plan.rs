//! Which chunks a save writes, and the bytes of each.

use std::collections::HashSet;
use std::sync::Arc;

use bytes::Bytes;
use object_store::PutPayload;

use super::SaveArray;
use crate::sharding::IndexDomain;
use crate::strided::{self, Side};
use crate::zarr::{ChunkIndex, DType, Format, Metadata, Shards};
use crate::{Error, Result};

/// What a save does, checked.
pub(super) struct Plan {
    pub(super) metadata: Metadata,
    /// The metadata file.
    pub(super) encoded: Bytes,
    writes_metadata: bool,
    pub(super) chunk_bytes: usize,
    chunk_strides: Vec<usize>,
    pieces: Vec<(IndexDomain, Bytes)>,
}

/// One object to write.
pub(super) enum Job {
    Metadata,
    Chunk { piece: usize, chunk: ChunkIndex },
}

impl Plan {
    pub(super) fn new(
        format: Format,
        array: &SaveArray,
        pieces: Vec<(IndexDomain, Bytes)>,
        writes_metadata: bool,
    ) -> Result<Self> {
        let bad = |reason: String| Error::BadRequest {
            array: array.name.clone(),
            reason,
        };
        let Some(dtype) = DType::of(array.dtype) else {
            return Err(Error::UnstorableDType {
                array: array.name.clone(),
                dtype: array.dtype,
            });
        };
        let codec = array.codec.unwrap_or(format.orbax_codec());
        let metadata = Metadata::new(format, &array.dims, &array.chunks, dtype, codec)
            .map_err(|e| bad(e.to_string()))?;
        let encoded = metadata.encode().map_err(|e| bad(e.to_string()))?;
        let (Some(chunk_bytes), Some(chunk_strides)) =
            (metadata.block_bytes(), metadata.block_strides())
        else {
            return Err(bad(format!("chunks {:?} are too large", array.chunks)));
        };
        let pieces: Vec<_> = pieces
            .into_iter()
            .filter(|(domain, _)| !domain.is_empty())
            .collect();
        let mut origins = HashSet::with_capacity(pieces.len());
        for (domain, bytes) in &pieces {
            check_piece(domain, bytes.len(), &metadata).map_err(&bad)?;
            if !origins.insert(&domain.origin) {
                return Err(bad(format!("two pieces at {:?}", domain.origin)));
            }
        }
        Ok(Self {
            metadata,
            encoded: encoded.into(),
            writes_metadata,
            chunk_bytes,
            chunk_strides,
            pieces,
        })
    }

    pub(super) fn jobs(self: &Arc<Self>) -> impl Iterator<Item = Job> + Send + use<> {
        let plan = Arc::clone(self);
        let metadata = plan.writes_metadata.then_some(Job::Metadata);
        let chunks = (0..plan.pieces.len()).flat_map(move |piece| {
            let chunks = plan.metadata.grid.chunks_of(&plan.pieces[piece].0);
            chunks.map(move |chunk| Job::Chunk { piece, chunk })
        });
        metadata.into_iter().chain(chunks)
    }

    /// Refuses a piece that does not fit.
    pub(super) fn check(&self, array: &str, domain: &IndexDomain, bytes: usize) -> Result<()> {
        check_piece(domain, bytes, &self.metadata).map_err(|reason| Error::BadRequest {
            array: array.to_owned(),
            reason,
        })
    }

    /// Whether a piece is exactly one whole chunk, whose elements are stored as they are.
    pub(super) fn is_whole_chunk(&self, piece: usize) -> bool {
        self.stores_as_it_is(&self.pieces[piece].0)
    }

    /// As [`Plan::is_whole_chunk`], for a piece of another's.
    pub(super) fn stores_as_it_is(&self, piece: &IndexDomain) -> bool {
        piece.shape == self.metadata.grid.chunks() && !self.metadata.dtype.is_narrow()
    }

    /// The object of a chunk that has been compressed.
    pub(super) fn payload(&self, stored: Vec<Bytes>) -> PutPayload {
        let len = stored.iter().map(Bytes::len).sum();
        let index = (self.metadata.shards.is_some())
            .then(|| Bytes::copy_from_slice(&Shards::index_of_one(len)));
        stored.into_iter().chain(index).collect()
    }

    /// The object of a chunk. Fails with the number of bytes that could not be had.
    pub(super) fn encode(
        &self,
        piece: usize,
        chunk: &[i64],
    ) -> std::result::Result<PutPayload, usize> {
        let (domain, bytes) = &self.pieces[piece];
        let dtype = self.metadata.dtype;
        let codec = self.metadata.codec;
        let encode = |elements| {
            let stored = codec
                .encode(elements)
                .map_err(|_| codec.bound(self.chunk_bytes))?;
            Ok(self.payload(vec![stored]))
        };
        if self.is_whole_chunk(piece) {
            return encode(bytes.clone());
        }
        let mut elements = strided::zeroed(self.chunk_bytes).ok_or(self.chunk_bytes)?;
        let part = self.metadata.grid.domain(chunk);
        let within: Vec<i64> = part
            .origin
            .iter()
            .zip(&domain.origin)
            .map(|(a, b)| a - b)
            .collect();
        let piece_strides =
            strided::row_major(&domain.shape, dtype.item_bytes()).ok_or(self.chunk_bytes)?;
        strided::copy(
            bytes,
            &Side {
                strides: &piece_strides,
                origin: &within,
            },
            &mut elements,
            &Side {
                strides: &self.chunk_strides,
                origin: &vec![0; within.len()],
            },
            &part.shape,
            dtype.item_bytes(),
        );
        dtype.clear_padding(&mut elements);
        encode(elements.into())
    }
}

fn check_piece(
    domain: &IndexDomain,
    bytes: usize,
    metadata: &Metadata,
) -> std::result::Result<(), String> {
    let grid = &metadata.grid;
    if !domain.lies_in(grid.shape()) {
        return Err(format!(
            "piece {domain:?} is not inside shape {:?}",
            grid.shape()
        ));
    }
    let expected = domain
        .num_elements()
        .and_then(|n| n.checked_mul(metadata.dtype.item_bytes()));
    if expected != Some(bytes) {
        return Err(format!(
            "piece {domain:?} of {} has {bytes} bytes",
            metadata.dtype.primitive().as_str_name()
        ));
    }
    for (d, &chunk) in grid.chunks().iter().enumerate() {
        let end = domain.origin[d] + domain.shape[d];
        if domain.origin[d] % chunk != 0 || (end % chunk != 0 && end != grid.shape()[d]) {
            return Err(format!(
                "piece {domain:?} does not begin and end at chunks of {:?}",
                grid.chunks()
            ));
        }
    }
    Ok(())
}
