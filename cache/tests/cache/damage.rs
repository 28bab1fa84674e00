//! Every kind of damage to a small entry, over a store in memory: a miss, the right result, a count by its reason, and a
//! repaired entry.

use std::sync::Arc;

use bytes::Bytes;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, PutPayload};
use waystation_cache::{Cache, Config, Counts, Entry, Key, Origin};
use waystation_lifecycle::bucket::{Bucket, Location, layout};

use crate::kit::{self, LONG};

/// A bucket in memory.
#[derive(Clone)]
struct Store(Arc<InMemory>);

impl Store {
    fn new() -> Store {
        Store(Arc::new(InMemory::new()))
    }

    fn cache(&self) -> Cache {
        let location = Location::parse("gs://bucket/prefix").unwrap();
        let bucket = Bucket::from_store(location, Arc::clone(&self.0) as Arc<dyn ObjectStore>);
        Cache::open(Config {
            // Who comes for the same program within the minute is not to wait.
            claim_wait: Some(std::time::Duration::ZERO),
            ..kit::config(Some(bucket))
        })
    }

    async fn read(&self, key: &Key, slot: u8) -> Option<Bytes> {
        let path = layout::executable(key.digest(), slot);
        self.0.get(&path).await.ok()?.bytes().await.ok()
    }

    async fn write(&self, path: &Path, object: impl Into<Bytes>) {
        let payload = PutPayload::from(object.into());
        self.0.put(path, payload).await.unwrap();
    }
}

/// Small, so that each of its bytes can be tried.
fn entry(program: &str) -> Entry {
    Entry {
        executable: Bytes::from(program.to_owned()),
        text: None,
        ..kit::entry(program)
    }
}

async fn ask(cache: &Cache, program: &str) -> Origin {
    let compile = async || Ok::<_, ()>(entry(program));
    let (found, origin) = cache
        .get_or_compile(&kit::key(program), compile)
        .await
        .unwrap();
    assert_eq!(found.executable, program, "the right one");
    assert_eq!(found.info.name, program, "the right one");
    origin
}

async fn filled(program: &str) -> (Store, Bytes) {
    let store = Store::new();
    let cache = store.cache();
    ask(&cache, program).await;
    assert_eq!(cache.shutdown(LONG).await, 0);
    let object = store.read(&kit::key(program), 0).await.unwrap();
    (store, object)
}

/// The counters of who meets `object` in the place of the entry of "a".
async fn meet(object: Bytes, what: &str) -> Counts {
    let store = Store::new();
    let path = layout::executable(kit::key("a").digest(), 0);
    store.write(&path, object.clone()).await;
    let cache = store.cache();
    assert_eq!(ask(&cache, "a").await, Origin::Compiled, "{what}");
    assert_eq!(cache.shutdown(LONG).await, 0);
    let counts = cache.counters();
    assert_eq!(counts.bad_entries, 1, "{what}: read, and written beside");
    assert_eq!((counts.bucket_misses, counts.bucket_writes), (1, 1));

    let next = store.cache();
    assert_eq!(ask(&next, "a").await, Origin::Bucket, "{what}: repaired");
    assert_eq!(store.read(&kit::key("a"), 0).await.unwrap(), object, "left");
    counts
}

fn reasons(counts: &Counts) -> [u64; 8] {
    [
        counts.bad_corrupt,
        counts.bad_foreign,
        counts.bad_format,
        counts.bad_wrong_key,
        counts.bad_too_large,
        counts.bad_signature,
        counts.bad_refused,
        counts.bad_unreadable,
    ]
}

const CORRUPT: [u64; 8] = [1, 0, 0, 0, 0, 0, 0, 0];
const FOREIGN: [u64; 8] = [0, 1, 0, 0, 0, 0, 0, 0];
const WRONG_KEY: [u64; 8] = [0, 0, 0, 1, 0, 0, 0, 0];

#[tokio::test]
async fn cut_at_every_length() {
    let (_, object) = filled("a").await;
    for length in 0..object.len() {
        let what = format!("the first {length} bytes");
        let counts = meet(object.slice(..length), &what).await;
        assert_eq!(reasons(&counts), CORRUPT, "{what}");
    }
}

#[tokio::test]
async fn one_bit_flipped_in_every_byte() {
    let (_, object) = filled("a").await;
    for at in 0..object.len() {
        let mut flipped = object.to_vec();
        // Another bit in each byte, and not the same one in each row of the table.
        flipped[at] ^= 1 << (at * 5 % 8);
        let what = format!("a bit of byte {at} flipped");
        let counts = meet(flipped.into(), &what).await;
        let expected = match at {
            0..8 => FOREIGN,
            8..12 => [0, 0, 1, 0, 0, 0, 0, 0],
            _ => CORRUPT,
        };
        assert_eq!(reasons(&counts), expected, "{what}");
    }
}

#[tokio::test]
async fn other_files() {
    for (what, object) in [
        ("a picture", Bytes::from_static(b"\x89PNG\r\n\x1a\n....")),
        ("zeros", Bytes::from(vec![0; 5000])),
        ("one byte", Bytes::from_static(b"X")),
    ] {
        assert_eq!(reasons(&meet(object, what).await), FOREIGN, "{what}");
    }
    let empty = meet(Bytes::new(), "an empty object").await;
    assert_eq!(reasons(&empty), CORRUPT);
}

#[tokio::test]
async fn two_entries_swapped() {
    let (store, a) = filled("a").await;
    let (_, b) = filled("b").await;
    let path = |program: &str| layout::executable(kit::key(program).digest(), 0);
    store.write(&path("a"), b).await;
    store.write(&path("b"), a).await;
    let cache = store.cache();
    for program in ["a", "b"] {
        assert_eq!(ask(&cache, program).await, Origin::Compiled);
    }
    assert_eq!(cache.shutdown(LONG).await, 0);
    let counts = cache.counters();
    assert_eq!(reasons(&counts), WRONG_KEY.map(|count| 2 * count));
    let next = store.cache();
    for program in ["a", "b"] {
        assert_eq!(ask(&next, program).await, Origin::Bucket);
    }
}
