//! A source in memory, and databases in it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use futures::executor::block_on;
use waystation_ocdbt::{
    Builder, Built, Compression, Config, Database, Entry, Limits, Location, MANIFEST_NAME, Source,
    SourceError, Value,
};

/// Files in memory. Each read is counted, and pending once before it is done.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) files: BTreeMap<String, Bytes>,
    pub(crate) reads: AtomicUsize,
    pub(crate) log: Mutex<Vec<(String, Range<u64>)>>,
}

impl Source for Memory {
    async fn read(&self, path: &str, range: Range<u64>) -> Result<Option<Bytes>, SourceError> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.log.lock().unwrap().push((path.into(), range.clone()));
        pending_once().await;
        Ok(self.files.get(path).map(|file| {
            let end = (file.len() as u64).min(range.end) as usize;
            file.slice(end.min(range.start as usize)..end)
        }))
    }
}

async fn pending_once() {
    let mut polled = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut polled, true) {
            return std::task::Poll::Ready(());
        }
        context.waker().wake_by_ref();
        std::task::Poll::Pending
    })
    .await;
}

impl Memory {
    pub(crate) fn reads(&self) -> usize {
        self.reads.load(Ordering::Relaxed)
    }

    /// Writes a database into a folder.
    pub(crate) fn add(&mut self, folder: &str, built: &Built) {
        for file in &built.files {
            assert_eq!(
                file.parts.iter().map(Bytes::len).sum::<usize>() as u64,
                file.length
            );
            let path = format!("{folder}{}", file.file.path());
            assert!(
                self.files
                    .insert(path, file.parts.concat().into())
                    .is_none()
            );
        }
        let path = format!("{folder}{MANIFEST_NAME}");
        self.files.insert(path, built.manifest.clone());
    }

    /// Replaces bytes of a file.
    pub(crate) fn put(&mut self, path: &str, offset: u64, bytes: &[u8]) {
        let file = self.files.get_mut(path).unwrap();
        let mut content = file.to_vec();
        content[offset as usize..][..bytes.len()].copy_from_slice(bytes);
        *file = content.into();
    }

    pub(crate) fn part(&self, location: &Location) -> Bytes {
        let range = location.range();
        self.files[location.path()].slice(range.start as usize..range.end as usize)
    }
}

pub(crate) type Pairs = BTreeMap<Vec<u8>, Vec<u8>>;

/// Ids that look random and are not.
pub(crate) fn ids(seed: u8) -> impl FnMut() -> [u8; 16] + Send + 'static {
    let mut number = 0;
    move || {
        number += 1;
        let mut id = [seed; 16];
        id[15] = number;
        id
    }
}

pub(crate) fn config(node_bytes: u32, inline: u32, zstd: bool) -> Config {
    let mut config = Config::orbax([9; 16]);
    config.max_decoded_node_bytes = node_bytes;
    config.max_inline_value_bytes = inline;
    if !zstd {
        config.compression = Compression::None;
    }
    config
}

pub(crate) fn build(pairs: &Pairs, config: Config, seed: u8) -> Built {
    let mut builder = Builder::new(config, ids(seed)).unwrap();
    for (key, value) in pairs {
        builder
            .put(key.clone().into(), value.clone().into())
            .unwrap();
    }
    builder.finish(1).unwrap()
}

pub(crate) fn stored(pairs: &Pairs, config: Config) -> (Memory, Built) {
    let mut memory = Memory::default();
    let built = build(pairs, config, 1);
    memory.add("", &built);
    (memory, built)
}

/// As many pairs as asked for, every third value long.
pub(crate) fn pairs(count: usize) -> Pairs {
    let pair = |number: usize| {
        let length = if number.is_multiple_of(3) { 50 } else { 3 };
        let key = format!("layers.{}.w/{}.{}", number / 100, number / 10, number % 10);
        (key.into_bytes(), vec![number as u8; length])
    };
    (0..count).map(pair).collect()
}

pub(crate) fn open(memory: &Memory) -> Database<&Memory> {
    block_on(Database::open(memory, Limits::default())).unwrap()
}

pub(crate) fn contents<S: Source>(database: &Database<S>, entries: Vec<Entry>) -> Pairs {
    entries
        .into_iter()
        .map(|entry| {
            let value = block_on(database.value(&entry.value, 1 << 20)).unwrap();
            (entry.key.to_vec(), value.to_vec())
        })
        .collect()
}

pub(crate) fn everything<S: Source>(database: &Database<S>) -> Pairs {
    let entries = block_on(database.list(b"").collect(usize::MAX)).unwrap();
    assert!(entries.windows(2).all(|pair| pair[0].key < pair[1].key));
    contents(database, entries)
}

pub(crate) fn is_stored(value: &Value) -> bool {
    matches!(value, Value::Stored(_))
}
