//! Conversions in place that are cut off at every write and every removal: what is left can be read, and the same command ends
//! well.

#![allow(
    clippy::unwrap_used,
    reason = "a helper that fails fails its test; clippy knows that only of test functions"
)]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use futures::StreamExt as _;
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt as _, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use waystation_checkpoint::zarr::{Codec, DType, Format, Metadata};
use waystation_checkpoint::{IndexDomain, Layout};
use waystation_checkpoint_tools::convert::{Options, in_place};
use waystation_checkpoint_tools::{Item, Memory, Place, Progress, diff, verify};

/// Changes nothing any more after so many changes.
#[derive(Debug)]
struct Ending {
    inner: Arc<InMemory>,
    left: AtomicI64,
}

impl Ending {
    fn count(&self) -> Result<()> {
        if self.left.fetch_sub(1, Ordering::Relaxed) > 0 {
            return Ok(());
        }
        Err(object_store::Error::Generic {
            store: "ending",
            source: "it is over".into(),
        })
    }
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ending")
    }
}

#[async_trait::async_trait]
impl ObjectStore for Ending {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Result<PutResult> {
        self.count()?;
        self.inner.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.count()?;
        self.inner.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.inner.get_opts(location, options).await
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        match self.count() {
            Ok(()) => self.inner.delete_stream(locations),
            Err(error) => futures::stream::once(async { Err(error) }).boxed(),
        }
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

const ARRAYS: [(&str, &[i64], &[i64]); 3] = [
    ("w", &[8, 300], &[4, 300]),
    ("layers.0.b", &[6], &[3]),
    ("scalar", &[], &[]),
];

/// A checkpoint in zarr v2 as Orbax writes it.
async fn plain(arrays: &[(&str, &[i64], &[i64])]) -> Arc<InMemory> {
    let store = Arc::new(InMemory::new());
    let mut leaves = serde_json::Map::new();
    for &(name, shape, chunks) in arrays {
        let dtype = DType::parse_v3("float32").unwrap();
        let codec = Codec::Zstd { level: 1 };
        let metadata = Metadata::new(Format::Zarr2, shape, chunks, dtype, codec).unwrap();
        let path = Path::parse(format!("item/{name}/.zarray")).unwrap();
        store
            .put(&path, metadata.encode().unwrap().into())
            .await
            .unwrap();
        for (number, index) in metadata
            .grid
            .chunks_of(&IndexDomain::whole(shape))
            .enumerate()
        {
            let elements: Vec<u8> = (0..metadata.block_bytes().unwrap())
                .map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8 ^ number as u8)
                .collect();
            let path = Path::parse(format!("item/{name}/{}", metadata.keys.key(&index))).unwrap();
            let frame = codec.encode(elements.into()).unwrap();
            store.put(&path, frame.into()).await.unwrap();
        }
        let keys: Vec<_> = name
            .split('.')
            .map(|key| serde_json::json!({"key": key, "key_type": 2}))
            .collect();
        let quoted: Vec<String> = name.split('.').map(|key| format!("'{key}'")).collect();
        let key = match quoted.as_slice() {
            [one] => format!("({one},)"),
            several => format!("({})", several.join(", ")),
        };
        let value = serde_json::json!({"value_type": "jax.Array", "skip_deserialize": false, "write_shape": chunks});
        leaves.insert(
            key,
            serde_json::json!({"key_metadata": keys, "value_metadata": value}),
        );
    }
    let about = serde_json::json!({"tree_metadata": leaves, "use_ocdbt": false, "use_zarr3": false, "custom_metadata": null});
    let path = Path::from("item/_METADATA");
    store
        .put(&path, about.to_string().into_bytes().into())
        .await
        .unwrap();
    store
}

/// Another store with the same objects.
async fn copied(store: &InMemory) -> Arc<InMemory> {
    let copy = InMemory::new();
    let mut listed = store.list(None);
    while let Some(meta) = listed.next().await {
        let path = meta.unwrap().location;
        let bytes = store.get(&path).await.unwrap().bytes().await.unwrap();
        copy.put(&path, bytes.into()).await.unwrap();
    }
    Arc::new(copy)
}

async fn open(store: Arc<dyn ObjectStore>) -> Item {
    Item::open(&Place::from_store(store, "item", "memory:///item"))
        .await
        .unwrap()
}

async fn convert(
    store: Arc<dyn ObjectStore>,
    layout: Layout,
    remove: bool,
) -> waystation_checkpoint_tools::Result<u64> {
    let options = Options {
        layout: Some(layout),
        ..Options::default()
    };
    let item = open(store).await;
    let (memory, progress) = (Memory::default(), Progress::default());
    let done = in_place(&item, &options, remove, &memory, &progress).await?;
    assert_eq!(done.layout, layout);
    Ok(done.removed)
}

/// That all arrays can be read where `_METADATA` says they are, and are what they were.
async fn assert_well(store: Arc<InMemory>, original: &Item, is_interrupted: bool) -> Item {
    let item = open(store).await;
    let (memory, progress) = (Memory::default(), Progress::default());
    let report = verify::verify(&item, &memory, &progress).await.unwrap();
    let faults: Vec<_> = report
        .faults
        .iter()
        // Chunks of arrays that are not whole yet, or not any more.
        .filter(|fault| !is_interrupted || fault.kind != verify::Kind::Extra)
        .collect();
    assert!(faults.is_empty(), "{faults:?}");
    let found = diff::diff(original, &item, &[], &memory, &progress);
    let found = found.await.unwrap();
    let all = original.arrays.len() as u64;
    assert_eq!((found.compared, found.differences), (all, Vec::new()));
    item
}

#[tokio::test]
async fn an_interruption_at_any_point_leaves_a_checkpoint_that_can_be_read() {
    let mut interruptions = 0;
    let original = plain(&ARRAYS).await;
    let wanted = open(original.clone()).await;
    for from in Layout::ALL {
        let begin = copied(&original).await;
        convert(begin.clone(), from, true).await.unwrap();
        assert_well(begin.clone(), &wanted, false).await;
        for to in Layout::ALL {
            for remove in [false, true] {
                for changes in 0.. {
                    let store = copied(&begin).await;
                    let ending = Arc::new(Ending {
                        inner: store.clone(),
                        left: AtomicI64::new(changes),
                    });
                    let ended = convert(ending, to, remove).await;
                    assert_well(store.clone(), &wanted, ended.is_err()).await;
                    let is_whole = ended.is_ok();
                    // Once more, and it is done.
                    convert(store.clone(), to, true).await.unwrap();
                    let item = assert_well(store, &wanted, false).await;
                    assert_eq!(item.said_layout(), Some(to));
                    assert!(item.arrays.values().all(|layouts| layouts.len() == 1));
                    if is_whole {
                        break;
                    }
                    interruptions += 1;
                }
            }
        }
    }
    assert!(interruptions > 100, "{interruptions}");
}

/// Names that begin like those of a database's files and folders.
const ALIKE: [(&str, &[i64], &[i64]); 5] = [
    ("w", &[8, 300], &[4, 300]),
    ("manifest.w", &[6], &[3]),
    ("ocdbt_stats", &[6], &[3]),
    ("ocdbt.process_x", &[6], &[3]),
    ("d/0", &[6], &[3]),
];

#[tokio::test]
async fn what_is_only_named_like_a_database_is_not_removed_with_it() {
    let store = plain(&ALIKE).await;
    let wanted = open(copied(&store).await).await;
    let others = [
        "item/manifest.json",
        "item/d/notes.txt",
        "item/ocdbt_notes/readme",
        "item/ocdbt.process_notes/log",
    ];
    for other in others {
        store.put(&Path::from(other), "mine".into()).await.unwrap();
    }
    for layout in [
        Layout::OcdbtZarr2,
        Layout::Zarr2,
        Layout::OcdbtZarr3,
        Layout::Zarr3,
    ] {
        convert(store.clone(), layout, true).await.unwrap();
        let item = assert_well(store.clone(), &wanted, false).await;
        assert!(item.arrays.values().all(|layouts| layouts.len() == 1));
        for other in others {
            let kept = store.get(&Path::from(other)).await.unwrap();
            assert_eq!(kept.bytes().await.unwrap(), "mine", "{other}");
        }
        let manifest = store.head(&Path::from("item/manifest.ocdbt")).await;
        assert_eq!(manifest.is_ok(), layout.is_ocdbt());
    }
}

#[tokio::test]
async fn what_a_symbolic_link_leads_to_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let store = plain(&ARRAYS).await;
    let mut listed = store.list(None);
    while let Some(meta) = listed.next().await {
        let path = meta.unwrap().location;
        let file = folder.path().join(path.as_ref());
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        let bytes = store.get(&path).await.unwrap().bytes().await.unwrap();
        std::fs::write(file, bytes).unwrap();
    }
    let (inside, outside) = (folder.path().join("item/w"), folder.path().join("others"));
    std::fs::rename(&inside, &outside).unwrap();
    std::os::unix::fs::symlink(&outside, &inside).unwrap();
    let files = || std::fs::read_dir(&outside).unwrap().count();
    let before = files();

    let place = folder.path().join("item");
    let place = Place::open(place.to_str().unwrap()).await.unwrap();
    let item = Item::open(&place).await.unwrap();
    for layout in [Layout::Zarr3, Layout::OcdbtZarr2] {
        let options = Options {
            layout: Some(layout),
            ..Options::default()
        };
        let (memory, progress) = (Memory::default(), Progress::default());
        let refused = in_place(&item, &options, true, &memory, &progress).await;
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("w is a symbolic link"), "{refused}");
    }
    assert_eq!(files(), before);
    assert!(!folder.path().join("item/d").exists());
}

#[tokio::test]
async fn an_array_that_is_named_as_a_file_stays_in_its_database() {
    for (name, is_refused) in [("_METADATA", true), ("_sharding/x", true), ("d", false)] {
        let store = plain(&[("w", &[8, 300], &[4, 300]), (name, &[6], &[3])]).await;
        let place = Place::from_store(store.clone(), "item", "memory:///item");
        let (memory, progress) = (Memory::default(), Progress::default());
        let run = async |layout| {
            let options = Options {
                layout: Some(layout),
                ..Options::default()
            };
            let item = Item::open(&place).await.unwrap();
            in_place(&item, &options, true, &memory, &progress).await
        };
        run(Layout::OcdbtZarr2).await.unwrap();
        let files = async || store.list(None).count().await;
        let before = files().await;
        let done = run(Layout::Zarr3).await;
        if is_refused {
            let refused = done.unwrap_err().to_string();
            assert!(refused.contains("cannot be a folder"), "{refused}");
            assert_eq!(files().await, before, "nothing is written");
        } else {
            done.unwrap();
        }
    }
}
