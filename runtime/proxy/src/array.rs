//! Arrays as the proxy knows them: metadata, and a counted reference to each device's shard (D4).

use std::sync::{Arc, Mutex};

use waystation_proto::xla::PrimitiveType;

use crate::{
    convert::{Dtype, Sharding},
    link::Link,
    lock::lock,
    needs::Needs,
    session::UserContext,
    status::{self, Status},
    strings::Coming,
};

/// One device's piece of one or more arrays. The worker forgets it when the last reference goes.
#[derive(Debug)]
pub(crate) struct Shard {
    /// As the worker knows it; 0 for strings.
    pub(crate) id: u64,
    /// Global id of the device.
    pub(crate) device: i32,
    pub(crate) link: Arc<Link>,
    /// The request that made it, in whose name it may fail.
    pub(crate) context: UserContext,
    /// What it still needs from outside the workers.
    pub(crate) needs: Needs,
    /// What saves and moves of it wait for before they copy: whatever takes it over waits for that, too.
    saves_need: Mutex<Needs>,
    /// Set where the values are strings: they are here, and the worker knows of nothing.
    strings: Option<Coming>,
}

impl Shard {
    /// A shard that the worker knows, or will with the next op.
    pub(crate) fn new(id: u64, device: i32, link: Arc<Link>, context: &UserContext) -> Self {
        Self {
            id,
            device,
            link,
            context: context.clone(),
            needs: Needs::default(),
            saves_need: Mutex::default(),
            strings: None,
        }
    }

    /// The same, made of what needs this.
    pub(crate) fn needing(mut self, needs: &Needs) -> Self {
        self.needs = needs.clone();
        self
    }

    /// A shard of strings.
    pub(crate) fn of_strings(
        device: i32,
        link: Arc<Link>,
        context: &UserContext,
        strings: Coming,
    ) -> Self {
        Self {
            id: 0,
            device,
            link,
            context: context.clone(),
            needs: Needs::default(),
            saves_need: Mutex::default(),
            strings: Some(strings),
        }
    }

    /// It is saved or moved together with what needs this, which may be copied first.
    pub(crate) fn saved_with(&self, needs: &Needs) {
        let mut saves_need = lock(&self.saves_need);
        *saves_need = Needs::of([&*saves_need, needs]);
    }

    /// What saves and moves of it wait for.
    pub(crate) fn saves_need(&self) -> Needs {
        lock(&self.saves_need).clone()
    }

    /// Why it is lost, when it is: with its worker. Strings are here.
    pub(crate) fn lost(&self) -> Option<Status> {
        self.link.lost().filter(|_| self.strings.is_none())
    }

    /// Its strings.
    ///
    /// # Errors
    /// INVALID_ARGUMENT where it has numbers.
    pub(crate) fn strings(&self) -> Result<&Coming, Status> {
        self.strings
            .as_ref()
            .ok_or_else(|| status::invalid_argument("a shard of numbers where strings are wanted"))
    }
}

impl Drop for Shard {
    fn drop(&mut self) {
        if self.strings.is_none() {
            self.link.drop_shard(self.id);
        }
    }
}

/// What a client's handle stands for.
#[derive(Clone, Debug)]
pub(crate) struct Array {
    pub(crate) dtype: Dtype,
    /// Global dimensions.
    pub(crate) dims: Vec<i64>,
    pub(crate) sharding: Sharding,
    /// By position in the sharding's device list. Empty once the array is deleted or donated.
    pub(crate) shards: Vec<Arc<Shard>>,
    pub(crate) deleted: bool,
}

impl Array {
    pub(crate) fn new(
        dtype: impl Into<Dtype>,
        dims: Vec<i64>,
        sharding: Sharding,
        shards: Vec<Arc<Shard>>,
    ) -> Self {
        Self {
            dtype: dtype.into(),
            dims,
            sharding,
            shards,
            deleted: false,
        }
    }

    /// The type of its numbers, for what only numbers can do: `what`.
    ///
    /// # Errors
    /// INVALID_ARGUMENT where it holds strings.
    pub(crate) fn numbers(&self, what: &str) -> Result<PrimitiveType, Status> {
        match self.dtype {
            Dtype::Numbers(primitive) => Ok(primitive),
            Dtype::Strings => Err(status::invalid_argument(format!(
                "{what} is an array of strings; only arrays of numbers can be used there"
            ))),
        }
    }

    /// Lets go of the shards.
    pub(crate) fn delete(&mut self) {
        self.deleted = true;
        self.shards.clear();
    }
}

/// A handle's value: an array, or the failure of the request that should have made it.
pub(crate) type Value = Result<Array, Failure>;

/// Why there is no array.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    /// Shared: one request may fail for any number of handles.
    pub(crate) status: Arc<Status>,
    /// The request that failed; what the status names lives at least as long.
    pub(crate) context: UserContext,
}
