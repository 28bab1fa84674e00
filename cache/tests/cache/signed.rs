//! A bucket that somebody else can write to.

use std::path::Path;
use std::sync::Arc;

use waystation_cache::sign::SigningKey;
use waystation_cache::{Cache, Config, Origin};

use crate::kit::{self, Compiler, LONG, ask};

fn signed(path: &Path, secret: u8) -> Cache {
    Cache::open(Config {
        signing: Some(Arc::new(SigningKey::parse(&[secret; 32]).unwrap())),
        ..kit::config(Some(kit::folder(path)))
    })
}

#[tokio::test]
async fn an_entry_that_is_not_signed_with_the_key_is_a_miss() {
    let temp = tempfile::tempdir().unwrap();
    let compiler = Compiler::default();
    // Nobody's signature, then somebody else's.
    let writers = [kit::cache(temp.path()), signed(temp.path(), 2)];
    for (slot, writer) in writers.iter().enumerate() {
        assert_eq!(ask(writer, &compiler, "a").await, Origin::Compiled);
        assert_eq!(writer.shutdown(LONG).await, 0);
        assert_eq!(kit::files(temp.path()).len(), slot + 1);
    }
    let ours = signed(temp.path(), 1);
    assert_eq!(ask(&ours, &compiler, "a").await, Origin::Compiled);
    assert_eq!(ours.shutdown(LONG).await, 0);
    let counts = ours.counters();
    assert_eq!((counts.bad_signature, counts.bad_entries), (2, 2));
    assert_eq!(counts.bucket_writes, 1);
    assert_eq!(
        ask(&signed(temp.path(), 1), &compiler, "a").await,
        Origin::Bucket
    );
    // Each finds its own, and who asks for no signature is content with the first.
    assert_eq!(
        ask(&signed(temp.path(), 2), &compiler, "a").await,
        Origin::Bucket
    );
    let unsigned = kit::cache(temp.path());
    assert_eq!(ask(&unsigned, &compiler, "a").await, Origin::Bucket);
    assert_eq!(unsigned.counters().bad_entries, 0);
}

/// With the right to delete too: what others may be content with is not removed.
#[tokio::test]
async fn entries_of_others_are_left_where_they_are() {
    let temp = tempfile::tempdir().unwrap();
    let compiler = Compiler::default();
    let other = kit::cache(temp.path());
    ask(&other, &compiler, "a").await;
    other.shutdown(LONG).await;
    let ours = Cache::open(Config {
        signing: Some(Arc::new(SigningKey::parse(&[1; 32]).unwrap())),
        remove_bad: true,
        ..kit::config(Some(kit::folder(temp.path())))
    });
    ask(&ours, &compiler, "a").await;
    ours.shutdown(LONG).await;
    assert_eq!(ours.counters().bad_removed, 0);
    assert_eq!(kit::files(temp.path()).len(), 2);
}
