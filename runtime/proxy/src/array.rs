//! Arrays as the proxy knows them: metadata, and a counted reference to each device's shard (D4).

use std::sync::Arc;

use waystation_proto::xla::PrimitiveType;

use crate::{convert::Sharding, link::Link, status::Status};

/// One device's piece of one or more arrays. The worker forgets it when the last reference goes.
#[derive(Debug)]
pub(crate) struct Shard {
    pub(crate) id: u64,
    /// Global id of the device.
    pub(crate) device: i32,
    pub(crate) link: Arc<Link>,
}

impl Drop for Shard {
    fn drop(&mut self) {
        self.link.drop_shard(self.id);
    }
}

/// What a client's handle stands for.
#[derive(Clone, Debug)]
pub(crate) struct Array {
    pub(crate) dtype: PrimitiveType,
    /// Global dimensions.
    pub(crate) dims: Vec<i64>,
    pub(crate) sharding: Sharding,
    /// By position in the sharding's device list. Empty once the array is deleted or donated.
    pub(crate) shards: Vec<Arc<Shard>>,
    pub(crate) deleted: bool,
}

impl Array {
    pub(crate) fn new(
        dtype: PrimitiveType,
        dims: Vec<i64>,
        sharding: Sharding,
        shards: Vec<Arc<Shard>>,
    ) -> Self {
        Self {
            dtype,
            dims,
            sharding,
            shards,
            deleted: false,
        }
    }

    /// Lets go of the shards.
    pub(crate) fn delete(&mut self) {
        self.deleted = true;
        self.shards.clear();
    }
}

/// A handle's value: an array, or the failure of the request that should have made it.
pub(crate) type Value = Result<Array, Status>;
