//! Arrays to test with.

use bytes::Bytes;
use waystation_checkpoint::{
    Config, Engine, IndexDomain, Layout, RestoreArray, SaveArray, zarr::Format,
};
use waystation_proto::xla::PrimitiveType;

/// A global array of 2-byte elements (bf16), each different from its neighbours.
#[derive(Debug, Clone)]
pub(crate) struct Array {
    pub(crate) dims: Vec<i64>,
    elements: Vec<u8>,
}

pub(crate) const ITEM: usize = 2;

impl Array {
    pub(crate) fn new(dims: &[i64]) -> Self {
        let count = dims.iter().product::<i64>();
        let elements = (0..count)
            .flat_map(|i| (i as u16).wrapping_mul(40_503).to_le_bytes())
            .collect();
        Self {
            dims: dims.to_vec(),
            elements,
        }
    }

    /// The elements of a box, one by one.
    pub(crate) fn part(&self, domain: &IndexDomain) -> Bytes {
        let mut out = Vec::new();
        let count = domain.shape.iter().product::<i64>();
        for flat in 0..count {
            let (mut rest, mut at, mut stride) = (flat, 0, 1);
            for d in (0..self.dims.len()).rev() {
                at += (domain.origin[d] + rest % domain.shape[d]) * stride;
                rest /= domain.shape[d];
                stride *= self.dims[d];
            }
            let at = at as usize * ITEM;
            out.extend_from_slice(&self.elements[at..at + ITEM]);
        }
        out.into()
    }

    pub(crate) fn pieces(&self, domains: &[IndexDomain]) -> Vec<(IndexDomain, Bytes)> {
        domains
            .iter()
            .map(|domain| (domain.clone(), self.part(domain)))
            .collect()
    }
}

pub(crate) fn engine() -> Engine {
    engine_of(Format::Zarr2)
}

pub(crate) fn engine_of(layout: impl Into<Layout>) -> Engine {
    Engine::new(Config {
        format: layout.into(),
        host_memory_bytes: 1 << 20,
        requests: 8,
        threads: 2,
        ..Config::default()
    })
}

pub(crate) fn to_save(location: &str, name: &str, dims: &[i64], chunks: &[i64]) -> SaveArray {
    SaveArray {
        location: location.to_owned(),
        name: name.to_owned(),
        dtype: PrimitiveType::Bf16,
        dims: dims.to_vec(),
        chunks: chunks.to_vec(),
        codec: None,
    }
}

pub(crate) fn to_restore(location: &str, name: &str, dims: &[i64]) -> RestoreArray {
    RestoreArray {
        location: location.to_owned(),
        name: name.to_owned(),
        dtype: PrimitiveType::Bf16,
        dims: dims.to_vec(),
    }
}

pub(crate) fn domain(origin: &[i64], shape: &[i64]) -> IndexDomain {
    IndexDomain {
        origin: origin.to_vec(),
        shape: shape.to_vec(),
    }
}

/// All boxes of a grid of `chunks` over `dims`, clipped.
pub(crate) fn boxes(dims: &[i64], chunks: &[i64]) -> Vec<IndexDomain> {
    let mut boxes = vec![domain(&[], &[])];
    for (&dim, &chunk) in dims.iter().zip(chunks) {
        let mut next = Vec::new();
        for part in boxes {
            let mut at = 0;
            while at < dim {
                let mut part = part.clone();
                part.origin.push(at);
                part.shape.push(chunk.min(dim - at));
                next.push(part);
                at += chunk;
            }
        }
        boxes = next;
    }
    boxes
}
