//! How long a location's objects are kept, and who sees to it.
//!
//! | location | who deletes |
//! | --- | --- |
//! | `gs://` | Cloud Storage, by a lifecycle rule on our prefixes that [`ensure`] adds |
//! | `file://`, `memory://` | we do, by age ([`sweep`]) |
//! | `s3://` | a rule that the user sets: `object_store` has no call for it. [`rule::for_s3`] is its text |
//!
//! [`keep`] does what a location takes, for as long as it runs. Nothing of this is ever a reason to fail a job: what
//! does not work is one warning.

mod ensure;
mod keep;
mod permissions;
pub mod rule;
mod sweep;
mod ttl;

pub use ensure::{Ensured, ensure, present};
pub use keep::{Pace, keep};
pub use permissions::{RIGHTS, Right, rights};
pub use sweep::{Swept, sweep};
pub use ttl::{BadTtl, Ttl};

use crate::bucket::layout::{self, Prefix};

/// Lifecycle rules that a bucket may hold before none is added, where nothing else is said.
pub const MAX_RULES: usize = 50;

/// What is wanted of a location.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// How long what is not used is kept.
    pub ttl: Ttl,
    /// How what is used lives longer.
    pub renew: Renew,
    /// Rules that the bucket may hold with ours, everybody's counted.
    pub max_rules: usize,
}

impl Default for Policy {
    fn default() -> Policy {
        Policy {
            ttl: Ttl::default(),
            renew: Renew::default(),
            max_rules: MAX_RULES,
        }
    }
}

/// How an entry that is used outlives its age.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Renew {
    /// A reader publishes it again under another name: rights to create are enough. The rule goes by age.
    #[default]
    Publish,
    /// A reader moves the object's custom time on, which takes `storage.objects.update`. The rule goes by days since
    /// then, and a second one by age at four times the TTL, for objects without a custom time.
    CustomTime,
}

/// Prefixes whose objects go when they are old. What was recorded on purpose stays.
pub(crate) fn expiring() -> impl Iterator<Item = Prefix> {
    layout::PREFIXES
        .into_iter()
        .filter(|prefix| prefix.retention_days.is_some())
}
