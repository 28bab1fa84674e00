//! What every store must do for us, as assertions. Run on each scheme and through each layer.

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{Error, ObjectStoreExt, PutMode, PutOptions, PutPayload};

use super::Bucket;

/// Runs the suite in an empty bucket. Leaves objects below `conformance/` only if it fails.
///
/// # Panics
/// Where the store does not behave.
pub async fn run(bucket: &Bucket) {
    put_get_range(bucket).await;
    create_only_once(bucket).await;
    racing_creates_have_one_winner(bucket).await;
    list_is_by_prefix(bucket).await;
}

fn create() -> PutOptions {
    PutOptions::from(PutMode::Create)
}

async fn put_get_range(bucket: &Bucket) {
    let store = bucket.store();
    let path = Path::from("conformance/object");
    assert!(
        matches!(store.get(&path).await, Err(Error::NotFound { .. })),
        "an absent object is not found"
    );
    let body = Bytes::from((0..100_000u32).map(|i| i as u8).collect::<Vec<_>>());
    store
        .put(&path, PutPayload::from_bytes(body.clone()))
        .await
        .expect("put");
    let found = store.get(&path).await.expect("get");
    assert_eq!(found.meta.size, body.len() as u64);
    assert_eq!(found.bytes().await.expect("body"), body);
    assert_eq!(
        store.get_range(&path, 10..20).await.expect("range"),
        body.slice(10..20)
    );
    store.delete(&path).await.expect("delete");
    assert!(matches!(
        store.head(&path).await,
        Err(Error::NotFound { .. })
    ));
}

async fn create_only_once(bucket: &Bucket) {
    let store = bucket.store();
    let path = Path::from("conformance/once");
    store
        .put_opts(&path, PutPayload::from_static(b"first"), create())
        .await
        .expect("create");
    let second = store
        .put_opts(&path, PutPayload::from_static(b"second"), create())
        .await;
    assert!(
        matches!(second, Err(Error::AlreadyExists { .. })),
        "a second create is refused: {second:?}"
    );
    let found = store.get(&path).await.expect("get").bytes().await;
    assert_eq!(found.expect("body"), "first");
    store.delete(&path).await.expect("delete");
}

async fn racing_creates_have_one_winner(bucket: &Bucket) {
    let store = bucket.store();
    let path = Path::from("conformance/race");
    let writers = (0..16u8).map(|i| {
        let path = path.clone();
        async move {
            let body = Bytes::from(vec![i; 1000]);
            store
                .put_opts(&path, PutPayload::from_bytes(body), create())
                .await
                .is_ok()
                .then_some(i)
        }
    });
    let winners: Vec<u8> = futures::future::join_all(writers)
        .await
        .into_iter()
        .flatten()
        .collect();
    let [winner] = winners[..] else {
        panic!("one create wins, not {winners:?}");
    };
    let found = store.get(&path).await.expect("get").bytes().await;
    assert_eq!(found.expect("body"), vec![winner; 1000]);
    store.delete(&path).await.expect("delete");
}

async fn list_is_by_prefix(bucket: &Bucket) {
    let store = bucket.store();
    let names = ["conformance/l/a/0", "conformance/l/a/1", "conformance/l/b"];
    for name in names {
        store
            .put(&Path::from(name), PutPayload::from_static(b"x"))
            .await
            .expect("put");
    }
    let mut found: Vec<String> = store
        .list(Some(&Path::from("conformance/l/a")))
        .map_ok(|meta| meta.location.to_string())
        .try_collect()
        .await
        .expect("list");
    found.sort();
    assert_eq!(found, names[..2]);
    let absent: Vec<_> = store
        .list(Some(&Path::from("conformance/absent")))
        .try_collect()
        .await
        .expect("an absent prefix lists as empty");
    assert!(absent.is_empty());
    for name in names {
        store.delete(&Path::from(name)).await.expect("delete");
    }
}
