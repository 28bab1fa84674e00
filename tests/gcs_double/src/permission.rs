//! Who may do what. Everybody everything, until a test says otherwise.

use std::collections::{BTreeMap, BTreeSet};

use crate::reply::Refusal;

/// Every permission that the double asks for.
pub const ALL_PERMISSIONS: [&str; 8] = [
    "storage.buckets.create",
    "storage.buckets.get",
    "storage.buckets.update",
    "storage.objects.create",
    "storage.objects.delete",
    "storage.objects.get",
    "storage.objects.list",
    "storage.objects.update",
];

/// What was taken from whom.
#[derive(Debug, Default)]
pub(crate) struct Grants {
    /// By bucket and token; a token of None is everybody without an entry of his own.
    granted: BTreeMap<(String, Option<String>), BTreeSet<String>>,
}

impl Grants {
    /// `permissions`: None gives everything back.
    pub(crate) fn set(
        &mut self,
        bucket: &str,
        token: Option<&str>,
        permissions: Option<Vec<String>>,
    ) {
        let who = (bucket.to_owned(), token.map(str::to_owned));
        match permissions {
            Some(permissions) => {
                self.granted.insert(who, permissions.into_iter().collect());
            }
            None => {
                self.granted.remove(&who);
            }
        }
    }

    pub(crate) fn has(&self, bucket: &str, token: Option<&str>, permission: &str) -> bool {
        let own = (bucket.to_owned(), token.map(str::to_owned));
        let all = (bucket.to_owned(), None);
        let granted = self.granted.get(&own).or_else(|| self.granted.get(&all));
        granted.is_none_or(|granted| granted.contains(permission))
    }

    pub(crate) fn check(
        &self,
        bucket: &str,
        token: Option<&str>,
        permission: &str,
    ) -> Result<(), Refusal> {
        if self.has(bucket, token, permission) {
            Ok(())
        } else {
            Err(Refusal::Forbidden(permission.to_owned()))
        }
    }
}
