//! Where entries are kept.
//!
//! The memory tier holds decoded entries and stands before all others. Behind it stand tiers of bytes, which is what
//! [`Tier`] is for: the bucket now, a local disk between the two later. A tier of bytes verifies what it reads
//! ([`crate::envelope`]); so whatever comes out of one is an entry, and a bad object is the tier's to count and step
//! over.

use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use bytes::Bytes;

use waystation_lifecycle::bucket::is_denied;

use crate::config::Renewal;
use crate::envelope::Opened;
use crate::key::Key;

pub mod bucket;
pub mod disk;
pub(crate) mod memory;

/// How entries that are used are to outlive their age.
#[derive(Debug, Clone)]
pub struct Terms {
    /// Those written longer ago than this.
    pub older_than: Duration,
    /// What is done.
    pub renewal: Renewal,
}

/// A place for sealed entries outside this process's memory.
#[async_trait]
pub trait Tier: std::fmt::Debug + Send + Sync + 'static {
    /// A word for logs and metrics.
    fn name(&self) -> &'static str;

    /// Looks for the entry of a key, and verifies what it finds ([`crate::verify::Verifier`]).
    ///
    /// Ends within a time that the tier knows. Cancel-safe.
    ///
    /// # Errors
    /// When the tier cannot say.
    async fn get(&self, key: &Key) -> Result<Look, TierError>;

    /// Keeps a sealed entry, unless a good one is there. Writes over nothing.
    ///
    /// One attempt, within a time that the tier knows. Dropped midway, it may or may not have happened; nobody sees
    /// half of it.
    ///
    /// # Errors
    /// When it is not known to have happened.
    async fn put(&self, key: &Key, sealed: &Bytes) -> Result<Put, TierError>;

    /// Lets an entry that was found here live longer. One attempt, as [`Tier::put`].
    ///
    /// # Errors
    /// When it is not known to have happened.
    async fn renew(
        &self,
        _key: &Key,
        _found: &Found,
        _terms: &Terms,
    ) -> Result<Renewed, TierError> {
        Ok(Renewed::Present)
    }
}

/// What became of an entry that was to live longer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renewed {
    /// It does now.
    Done,
    /// Another process has seen to it.
    Present,
    /// There is no place for it.
    NoRoom,
}

/// What a tier has for a key.
#[derive(Debug, Clone)]
pub enum Look {
    /// A good entry.
    Good(Box<Found>),
    /// Bad objects and nothing else; when the last of them was written, by the tier's clock.
    Bad(SystemTime),
    /// Nothing.
    Absent,
}

/// A good entry in a tier.
#[derive(Debug, Clone)]
pub struct Found {
    /// What it says.
    pub opened: Opened,
    /// The object itself.
    pub object: Bytes,
    /// When it was written, by the tier's clock.
    pub written: Option<SystemTime>,
}

/// How an entry came to be in a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    /// It was written.
    Created,
    /// Another writer's good entry is there.
    Present,
    /// All names that the key has are taken by bad objects.
    NoRoom,
}

/// A tier that does not do its work.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TierError {
    /// No answer in time.
    #[error("no answer within {} s", deadline.as_secs_f32())]
    NoAnswer {
        /// How long was waited.
        deadline: Duration,
    },
    /// The store said no.
    #[error("request failed")]
    Store(#[from] object_store::Error),
    /// An entry could not be marked as used.
    #[error("entry cannot be marked as used")]
    Touch(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The disk said no.
    #[error("disk failed")]
    Disk(#[source] std::io::Error),
    /// Work on another thread was cut off by the end of the runtime.
    #[error("process is shutting down")]
    Stopped,
}

impl TierError {
    /// True where a wait was lost and not only a request.
    pub fn timed_out(&self) -> bool {
        matches!(self, TierError::NoAnswer { .. })
    }

    /// True where the store asks for patience: the request is as good as any, and will do later.
    pub fn is_busy(&self) -> bool {
        match self {
            TierError::Store(error) => matches!(status(error), Some(429 | 503)),
            _ => false,
        }
    }

    /// True where trying again cannot help until somebody changes something: rights, credentials, the bucket itself.
    pub fn is_permanent(&self) -> bool {
        use object_store::Error;
        match self {
            TierError::Store(
                Error::NotSupported { .. }
                | Error::NotImplemented { .. }
                | Error::InvalidPath { .. },
            ) => true,
            TierError::Store(error) => is_denied(error),
            _ => false,
        }
    }
}

/// The HTTP status in an error that is of no other kind.
fn status(error: &object_store::Error) -> Option<u16> {
    let object_store::Error::Generic { .. } = error else {
        return None;
    };
    // The store's client has no kind of error for it, but shows the status always the same way.
    let text = chain(error);
    let (_, after) = text.split_once("status code: ")?;
    after.get(..3)?.parse().ok()
}

/// True where a store has understood a read, and says no. Not where it is the credentials, or asks for patience.
pub(crate) fn is_refusal(error: &object_store::Error) -> bool {
    use object_store::Error;
    match error {
        Error::PermissionDenied { .. }
        | Error::AlreadyExists { .. }
        | Error::Precondition { .. }
        | Error::NotModified { .. } => true,
        error => status(error).is_some_and(|status| {
            (400..500).contains(&status) && !matches!(status, 401 | 408 | 429)
        }),
    }
}

/// The outcome of `work`, if it ends in time.
pub(crate) async fn within<T>(
    deadline: Duration,
    work: impl Future<Output = Result<T, TierError>>,
) -> Result<T, TierError> {
    tokio::time::timeout(deadline, work)
        .await
        .unwrap_or(Err(TierError::NoAnswer { deadline }))
}

/// An error with all its causes, for a log line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        // Some libraries repeat their cause in their own text.
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
