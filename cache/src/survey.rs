//! A look at all that lies below a cache's prefix in a bucket, entry by entry, for tools. A bucket may hold millions of
//! objects, and anything at all: listings are streams, and a name that is not exactly one of ours is foreign.

use std::sync::Arc;

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStoreExt as _};
use waystation_lifecycle::bucket::Bucket;
use waystation_lifecycle::bucket::layout::{self, Digest};

use crate::envelope::{self, Bad, Limits, Opened};
use crate::key::Key;
use crate::sign::SigningKey;

/// An entry by its name; what it holds is not known yet.
#[derive(Debug, Clone)]
pub struct Object {
    /// The key in the name.
    pub key: Key,
    /// Its slot.
    pub slot: u8,
    /// Name, bytes and age.
    pub meta: ObjectMeta,
}

/// What a listing meets.
#[derive(Debug, Clone)]
pub enum Listed {
    /// An object under an entry's name.
    Entry(Object),
    /// An object under another name, of so many bytes.
    Foreign(u64),
}

/// The first hex digits of keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyPrefix(String);

impl KeyPrefix {
    /// Reads at most 64 hex digits.
    pub fn parse(text: &str) -> Option<KeyPrefix> {
        let hex = text.bytes().all(|byte| byte.is_ascii_hexdigit());
        (hex && text.len() <= 64).then(|| KeyPrefix(text.to_ascii_lowercase()))
    }

    fn fits(&self, key: &Key) -> bool {
        key.to_string().starts_with(&self.0)
    }

    /// The deepest folder that all such keys lie in.
    fn folder(&self) -> Path {
        let mut path = layout::EXECUTABLES.path.trim_end_matches('/').to_owned();
        for at in [0, 2] {
            if let Some(part) = self.0.get(at..at + 2) {
                path = format!("{path}/{part}");
            }
        }
        Path::from(path)
    }
}

/// All objects where entries with such keys lie, in the store's order.
pub fn list(
    bucket: &Bucket,
    prefix: &KeyPrefix,
) -> impl Stream<Item = object_store::Result<Listed>> + use<> {
    let (found, prefix) = (bucket.store().list(Some(&prefix.folder())), prefix.clone());
    found.filter_map(move |object| {
        // Whose a foreign object would be is not to be told.
        let foreign = |bytes| prefix.0.is_empty().then_some(Ok(Listed::Foreign(bytes)));
        std::future::ready(match object {
            Ok(meta) => match name(&meta.location) {
                Some((key, slot)) if prefix.fits(&key) => {
                    Some(Ok(Listed::Entry(Object { key, slot, meta })))
                }
                Some(_) => None,
                None => foreign(meta.size),
            },
            Err(error) => Some(Err(error)),
        })
    })
}

/// Key and slot of an entry's name.
fn name(path: &Path) -> Option<(Key, u8)> {
    let slot = layout::slot_of(path)?;
    let mut parts: Vec<_> = path.parts().collect();
    parts.pop();
    let mut digest: Digest = [0; 32];
    hex::decode_to_slice(parts.last()?.as_ref(), &mut digest).ok()?;
    (layout::executable(&digest, slot) == *path).then(|| (Key::from_digest(digest), slot))
}

/// Reads an entry whole and checks it to the last bit, and with `signing` its signature. `None`: it has gone.
///
/// # Errors
/// The store's.
pub async fn read(
    bucket: &Bucket,
    object: &Object,
    limits: &Limits,
    signing: Option<&Arc<SigningKey>>,
) -> object_store::Result<Option<Result<Opened, Bad>>> {
    let limit = limits.object;
    let too_large = |bytes| Ok(Some(Err(Bad::TooLarge { bytes, limit })));
    if object.meta.size > limit {
        return too_large(object.meta.size);
    }
    let found = match bucket.store().get(&object.meta.location).await {
        Ok(found) => found,
        Err(object_store::Error::NotFound { .. }) => return Ok(None),
        Err(error) => return Err(error),
    };
    if found.meta.size > limit {
        return too_large(found.meta.size);
    }
    let bytes: Bytes = found.bytes().await?;
    let (key, limits, signing) = (*object.key.digest(), *limits, signing.cloned());
    let opening = tokio::task::spawn_blocking(move || {
        envelope::open_signed(&key, &bytes, &limits, signing.as_deref())
    });
    Ok(opening.await.ok())
}

#[cfg(test)]
mod tests {
    use object_store::PutPayload;
    use waystation_lifecycle::bucket::Location;

    use super::*;

    async fn listed(bucket: &Bucket, prefix: &str) -> (Vec<(String, u8)>, Vec<u64>) {
        let prefix = KeyPrefix::parse(prefix).unwrap();
        let mut found = std::pin::pin!(list(bucket, &prefix));
        let (mut entries, mut foreign) = (Vec::new(), Vec::new());
        while let Some(object) = found.next().await {
            match object.unwrap() {
                Listed::Entry(object) => entries.push((object.key.to_string(), object.slot)),
                Listed::Foreign(bytes) => foreign.push(bytes),
            }
        }
        entries.sort();
        (entries, foreign)
    }

    #[tokio::test]
    async fn entries_are_told_from_foreign_objects_and_by_the_first_digits() {
        let bucket = Bucket::open(&Location::Memory).unwrap();
        let (a, b): (Digest, Digest) = ([0xab; 32], [0xac; 32]);
        let odd = [
            "exe/v1/README".to_owned(),
            "exe/v1/ab/ab/x/0".to_owned(),
            // Right, but for its place.
            format!("exe/v1/aa/ab/{}/0", hex::encode(a)),
            format!("exe/v1/ab/ab/{}/4", hex::encode(a)),
            format!("exe/v1/ab/ab/{}/0/0", hex::encode(a)),
            format!("exe/v1/ab/ab/{}/0", hex::encode(a).to_uppercase()),
        ];
        let ours = [
            layout::executable(&a, 0),
            layout::executable(&a, 3),
            layout::executable(&b, 0),
        ];
        for path in ours.into_iter().chain(odd.iter().cloned().map(Path::from)) {
            bucket
                .store()
                .put(&path, PutPayload::from_static(b"junk"))
                .await
                .unwrap();
        }
        let (hex_a, hex_b) = (hex::encode(a), hex::encode(b));
        let (entries, foreign) = listed(&bucket, "").await;
        assert_eq!(
            entries,
            [(hex_a.clone(), 0), (hex_a.clone(), 3), (hex_b.clone(), 0)]
        );
        assert_eq!(foreign, vec![4; odd.len()]);
        for prefix in ["ab", "AB", "aba", "abab", &hex_a] {
            let found = listed(&bucket, prefix).await;
            assert_eq!(
                found,
                (vec![(hex_a.clone(), 0), (hex_a.clone(), 3)], vec![]),
                "{prefix}"
            );
        }
        assert_eq!(listed(&bucket, "a").await.0.len(), 3);
        assert_eq!(KeyPrefix::parse("ag"), None);
        assert_eq!(KeyPrefix::parse("../x"), None);

        let object = Object {
            key: Key::from_digest(a),
            slot: 0,
            meta: bucket
                .store()
                .head(&layout::executable(&a, 0))
                .await
                .unwrap(),
        };
        let read_back = read(&bucket, &object, &Limits::default(), None)
            .await
            .unwrap();
        assert!(matches!(read_back, Some(Err(Bad::Foreign))));
        bucket.store().delete(&object.meta.location).await.unwrap();
        let gone = read(&bucket, &object, &Limits::default(), None)
            .await
            .unwrap();
        assert!(gone.is_none());
    }
}
