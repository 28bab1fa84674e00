//! Arrays in shards of several chunks, as TensorStore writes them and nothing here does; put together by hand.

use object_store::{ObjectStoreExt as _, PutPayload, path::Path};
use waystation_checkpoint::IndexDomain;
use waystation_checkpoint::zarr::{Codec, DType, Format, Metadata, Shards};
use waystation_proto::xla::PrimitiveType;

use crate::store::Counting;
use crate::support::{Array, ITEM, boxes, domain};

/// How an array is stored.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    pub(crate) shard: Vec<i64>,
    pub(crate) inner: Vec<i64>,
    pub(crate) index_at_start: bool,
    pub(crate) checksum: bool,
    pub(crate) compressed: bool,
    /// Bytes of nothing before every chunk.
    pub(crate) gap: usize,
}

impl Layout {
    pub(crate) fn new(shard: &[i64], inner: &[i64]) -> Self {
        Self {
            shard: shard.to_vec(),
            inner: inner.to_vec(),
            index_at_start: false,
            checksum: true,
            compressed: true,
            gap: 0,
        }
    }

    fn codec(&self) -> Codec {
        if self.compressed {
            Format::Zarr3.orbax_codec()
        } else {
            Codec::Raw
        }
    }

    fn metadata(&self, dims: &[i64]) -> Metadata {
        let dtype = DType::of(PrimitiveType::Bf16).unwrap();
        let mut metadata =
            Metadata::new(Format::Zarr3, dims, &self.shard, dtype, self.codec()).unwrap();
        let mut shards = Shards::new(&self.shard, &self.inner).unwrap();
        (shards.index_at_start, shards.checksum) = (self.index_at_start, self.checksum);
        metadata.shards = Some(shards);
        metadata
    }

    /// Writes `array` as array `w`.
    pub(crate) async fn write(&self, store: &Counting, array: &Array) {
        let metadata = self.metadata(&array.dims);
        put(store, "w/zarr.json", metadata.encode().unwrap()).await;
        for held in boxes(&array.dims, &self.shard) {
            let place: Vec<i64> = held
                .origin
                .iter()
                .zip(&self.shard)
                .map(|(origin, shard)| origin / shard)
                .collect();
            let object = self.object(array, &held.origin);
            put(store, &format!("w/{}", metadata.keys.key(&place)), object).await;
        }
    }

    /// The shard at `origin`; chunks beyond the array's edge are absent.
    fn object(&self, array: &Array, origin: &[i64]) -> Vec<u8> {
        let places = boxes(&self.shard, &self.inner);
        let index_bytes = places.len() * 16 + if self.checksum { 4 } else { 0 };
        let before = if self.index_at_start { index_bytes } else { 0 };
        let (mut chunks, mut index) = (Vec::new(), Vec::new());
        for place in &places {
            let mut held = place.clone();
            for (index, origin) in held.origin.iter_mut().zip(origin) {
                *index += origin;
            }
            let entry = match held.intersect(&IndexDomain::whole(&array.dims)) {
                None => [u64::MAX; 2],
                Some(part) => {
                    let elements = padded(array, &part, &self.inner);
                    let stored = self.codec().encode(elements.into()).unwrap();
                    chunks.extend(vec![0xee; self.gap]);
                    let at = before + chunks.len();
                    chunks.extend(&stored);
                    [at as u64, stored.len() as u64]
                }
            };
            index.extend(entry.iter().flat_map(|number| number.to_le_bytes()));
        }
        if self.checksum {
            seal(&mut index);
        }
        if self.index_at_start {
            [index, chunks].concat()
        } else {
            [chunks, index].concat()
        }
    }
}

/// The elements of a box in the first corner of a chunk of shape `inner`.
fn padded(array: &Array, part: &IndexDomain, inner: &[i64]) -> Vec<u8> {
    let mut elements = Vec::new();
    for place in boxes(inner, &vec![1; inner.len()]) {
        let at: Vec<i64> = place
            .origin
            .iter()
            .zip(&part.origin)
            .map(|(a, b)| a + b)
            .collect();
        let one = domain(&at, &vec![1; inner.len()]);
        match one.intersect(part) {
            Some(_) => elements.extend(array.part(&one)),
            None => elements.extend([0; ITEM]),
        }
    }
    elements
}

/// Ends an index with its CRC-32C, by the definition.
pub(crate) fn seal(index: &mut Vec<u8>) {
    let mut crc = u32::MAX;
    for &byte in index.iter() {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 {
                (crc >> 1) ^ 0x82f6_3b78
            } else {
                crc >> 1
            };
        }
    }
    index.extend((!crc).to_le_bytes());
}

pub(crate) async fn put(store: &Counting, name: &str, bytes: Vec<u8>) {
    let path = Path::parse(name).unwrap();
    let bucket = store.bucket();
    bucket
        .store()
        .put(&path, PutPayload::from(bytes))
        .await
        .unwrap();
}

pub(crate) async fn get(store: &Counting, name: &str) -> Vec<u8> {
    let path = Path::parse(name).unwrap();
    let found = store.bucket().store().get(&path).await.unwrap();
    found.bytes().await.unwrap().to_vec()
}
