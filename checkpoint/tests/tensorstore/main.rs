//! What is written here, TensorStore and Orbax read, and the reverse: every element type, bit for bit.
//!
//! The other side is `peer.py`, run with the Python of `WAYSTATION_TEST_PYTHON`, else of `.venv` at the top of the repository.

#![allow(
    clippy::unwrap_used,
    reason = "a test's helpers fail as its assertions do"
)]

#[path = "../../ocdbt/tests/tensorstore/peer.rs"]
mod peer;

use std::path::{Path, PathBuf};

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use waystation_checkpoint::{
    Config, Engine, IndexDomain, Layout, RestoreArray, SaveArray, Saving, zarr::Codec, zarr::DType,
    zarr::Format,
};
use waystation_proto::xla::PrimitiveType;

use self::peer::peer;

#[derive(Serialize, Deserialize)]
struct Item {
    name: String,
    dtype: String,
    dims: Vec<i64>,
    #[serde(default)]
    location: String,
    #[serde(default)]
    zarr3: bool,
    #[serde(default)]
    ocdbt: bool,
}

/// Elements of any bits the type has, the same in every run.
fn elements(dtype: DType, count: usize) -> Vec<u8> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64 ^ dtype.primitive() as u64;
    let mut bytes: Vec<u8> = (0..count * dtype.item_bytes())
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect();
    if dtype.primitive() == PrimitiveType::Pred {
        bytes.iter_mut().for_each(|byte| *byte &= 1);
    }
    bytes
}

/// The elements of rows `from..to` of an array whose rows have `row` bytes.
fn rows(bytes: &[u8], row: usize, from: i64, to: i64) -> Bytes {
    Bytes::copy_from_slice(&bytes[from as usize * row..to as usize * row])
}

/// Two processes that share nothing, and where they save.
struct Savers {
    layout: Layout,
    folder: PathBuf,
    location: String,
    engines: [Engine; 2],
    savings: [Saving; 2],
}

impl Savers {
    fn new(layout: Layout, folder: &Path, location: &str) -> Self {
        let engines = ["w0", "s1w0"].map(|process| {
            Engine::new(Config {
                format: layout,
                process: process.to_owned(),
                ..Config::default()
            })
        });
        Self {
            layout,
            folder: folder.to_owned(),
            location: location.to_owned(),
            savings: [engines[0].saving(), engines[1].saving()],
            engines,
        }
    }

    /// What comes is another request.
    async fn next_request(&mut self) {
        for (engine, saving) in self.engines.iter().zip(&mut self.savings) {
            std::mem::replace(saving, engine.saving())
                .finish()
                .await
                .unwrap();
        }
    }

    fn path(&self) -> PathBuf {
        self.folder.join(&self.location)
    }

    /// Saves an array in row pieces of the chunk's height, half by each process.
    async fn save(
        &self,
        name: &str,
        dtype: DType,
        dims: &[i64],
        chunks: &[i64],
        codec: Option<Codec>,
    ) -> Item {
        let count = dims.iter().product::<i64>() as usize;
        let bytes = elements(dtype, count);
        let array = SaveArray {
            location: self.path().to_str().unwrap().to_owned(),
            name: name.to_owned(),
            dtype: dtype.primitive(),
            dims: dims.to_vec(),
            chunks: chunks.to_vec(),
            codec,
        };
        let mut pieces = Vec::new();
        if let (Some(&height), Some(&chunk)) = (dims.first(), chunks.first()) {
            let row = bytes.len().checked_div(height as usize).unwrap_or(0);
            let mut at = 0;
            while at < height {
                let end = height.min(at + chunk);
                let mut domain = IndexDomain::whole(dims);
                (domain.origin[0], domain.shape[0]) = (at, end - at);
                pieces.push((domain, rows(&bytes, row, at, end)));
                at = end;
            }
        } else {
            pieces.push((IndexDomain::whole(dims), Bytes::from(bytes.clone())));
        }
        let second = pieces.split_off(pieces.len() / 2);
        let parts = [(pieces, true), (second, false)];
        for (saving, (pieces, metadata)) in self.savings.iter().zip(parts) {
            saving.save(&array, pieces, metadata).await.unwrap();
        }
        let mut raw = bytes;
        dtype.clear_padding(&mut raw);
        let file = self.folder.join("raw").join(format!("{name}.bin"));
        std::fs::write(file, raw).unwrap();
        Item {
            name: name.to_owned(),
            dtype: dtype.primitive().as_str_name().to_owned(),
            dims: dims.to_vec(),
            location: self.location.clone(),
            zarr3: self.layout.format() == Format::Zarr3,
            ocdbt: self.layout.is_ocdbt(),
        }
    }
}

#[tokio::test]
async fn tensorstore_and_orbax_read_what_is_written_here() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::create_dir(folder.join("raw")).unwrap();
    let mut listed = Vec::new();
    for layout in Layout::ALL {
        let mut savers = Savers::new(layout, folder, layout.name());
        for dtype in DType::all() {
            let name = dtype.primitive().as_str_name();
            // Uneven: the last chunk runs over the edge, in both dimensions in the second case.
            for (kind, dims, chunks, codec) in [
                ("zstd", &[5, 7][..], &[2, 7][..], None),
                ("raw", &[5, 7], &[2, 4], Some(Codec::Raw)),
                ("scalar", &[], &[], None),
                ("empty", &[0, 3], &[0, 3], None),
            ] {
                let name = format!("{name}.{kind}.{layout}");
                listed.push(savers.save(&name, dtype, dims, chunks, codec).await);
            }
        }
        // Of each array, and of what an OCDBT tree does not hold: a request of its own, as older clients send them.
        for primitive in [PrimitiveType::F32, PrimitiveType::Bf16, PrimitiveType::S32] {
            savers.next_request().await;
            let dtype = DType::of(primitive).unwrap();
            let name = format!("orbax.{layout}.{}", primitive.as_str_name());
            let chunks = if primitive == PrimitiveType::F32 {
                [500, 300]
            } else {
                [5, 3]
            };
            let dims = chunks.map(|extent| 2 * extent);
            listed.push(savers.save(&name, dtype, &dims, &chunks, None).await);
        }
        savers.next_request().await;
    }
    for (layout, location) in [
        (Layout::OcdbtZarr2, "merged2"),
        (Layout::OcdbtZarr3, "merged3"),
    ] {
        let mut savers = Savers::new(layout, folder, location);
        let dtype = DType::of(PrimitiveType::F32).unwrap();
        let saved = savers.save(location, dtype, &[300, 20], &[200, 20], None);
        listed.push(saved.await);
        savers.next_request().await;
        let location = savers.path();
        let location = location.to_str().unwrap();
        let keys = savers.engines[0].merge_children(location).await.unwrap();
        assert_eq!(keys, 3);
        // What is merged already is so after another merge too.
        let keys = savers.engines[0].merge_children(location).await.unwrap();
        assert_eq!(keys, 3);
    }
    std::fs::write(
        folder.join("list.json"),
        serde_json::to_vec(&listed).unwrap(),
    )
    .unwrap();
    peer("read", folder);
}

#[tokio::test]
async fn what_tensorstore_and_orbax_write_is_read_here() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    peer("write", folder);
    let listed: Vec<Item> =
        serde_json::from_slice(&std::fs::read(folder.join("list.json")).unwrap()).unwrap();
    assert!(listed.len() > 10 * DType::all().count());
    let engine = Engine::new(Config::default());
    for item in listed {
        let raw = std::fs::read(folder.join("raw").join(format!("{}.bin", item.name))).unwrap();
        let array = RestoreArray {
            location: folder.join(&item.location).to_str().unwrap().to_owned(),
            name: item.name.clone(),
            dtype: PrimitiveType::from_str_name(&item.dtype).unwrap(),
            dims: item.dims.clone(),
        };
        // The whole, and each row.
        let mut domains = vec![IndexDomain::whole(&item.dims)];
        let height = item.dims.first().copied().unwrap_or(0);
        for at in 0..height {
            let mut row = IndexDomain::whole(&item.dims);
            (row.origin[0], row.shape[0]) = (at, 1);
            domains.push(row);
        }
        let found = engine
            .restore(&array, &domains)
            .await
            .unwrap_or_else(|error| panic!("{}", error.report()));
        assert_eq!(found[0], raw, "{}", item.name);
        let row = raw.len().checked_div(height as usize).unwrap_or(0);
        for at in 0..height {
            assert_eq!(
                found[at as usize + 1],
                rows(&raw, row, at, at + 1),
                "{} row {at}",
                item.name
            );
        }
    }
}
