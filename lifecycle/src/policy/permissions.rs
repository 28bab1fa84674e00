//! The rights on a bucket of Cloud Storage, and what the lack of each means.

use crate::gcs::{CallError, Client};

/// One permission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Right {
    /// As Cloud Storage has it.
    pub name: &'static str,
    /// Whether everything is there without it that is there when nothing is said.
    pub optional: bool,
    /// What does not happen without it.
    pub lack: &'static str,
}

/// All that Waystation can make use of: five, and two for what is not done unless it is asked for.
pub const RIGHTS: [Right; 7] = [
    Right {
        name: "storage.objects.get",
        optional: false,
        lack: "no entry is read: every program is compiled",
    },
    Right {
        name: "storage.objects.list",
        optional: false,
        lack: "the bucket is not used: what is absent cannot be told from what is forbidden",
    },
    Right {
        name: "storage.objects.create",
        optional: false,
        lack: "nothing is published: no other job gets what this one compiles",
    },
    Right {
        name: "storage.buckets.get",
        optional: false,
        lack: "the bucket's lifecycle rules cannot be read, and none is added: old entries stay until somebody else \
               removes them",
    },
    Right {
        name: "storage.buckets.update",
        optional: false,
        lack: "no lifecycle rule is added: old entries stay until somebody else removes them",
    },
    Right {
        name: "storage.objects.delete",
        optional: true,
        lack: "damaged entries are stepped over, and stay until they are old",
    },
    Right {
        name: "storage.objects.update",
        optional: true,
        lack: "--cache_ttl_renew=custom-time cannot renew entries",
    },
];

/// Every right, and whether this identity has it.
///
/// # Errors
/// Where the bucket is missing or does not answer.
pub async fn rights(client: &Client) -> Result<Vec<(Right, bool)>, CallError> {
    let granted = client.granted(&RIGHTS.map(|right| right.name)).await?;
    let has = |right: &Right| granted.iter().any(|granted| granted == right.name);
    Ok(RIGHTS
        .into_iter()
        .map(|right| (right, has(&right)))
        .collect())
}
