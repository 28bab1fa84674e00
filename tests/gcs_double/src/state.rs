//! Everything that the double knows.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use bytes::Bytes;

use crate::bucket::Bucket;
use crate::clock::{Clock, Time};
use crate::fault::Faults;
use crate::object::{About, Conditions};
use crate::permission::Grants;
use crate::reply::Refusal;
use crate::token::Tokens;

/// Requests that are remembered.
const LOG: usize = 100_000;

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) clock: Clock,
    pub(crate) buckets: BTreeMap<String, Bucket>,
    pub(crate) grants: Grants,
    pub(crate) tokens: Tokens,
    pub(crate) faults: Faults,
    /// Resumable uploads of the JSON API.
    pub(crate) sessions: BTreeMap<String, Session>,
    /// Multipart uploads of the XML API: bucket, name, parts.
    pub(crate) multiparts: BTreeMap<String, (String, String, BTreeMap<u32, Bytes>)>,
    pub(crate) log: VecDeque<Logged>,
    /// Bodies of bucket updates.
    pub(crate) patches: Vec<String>,
    /// Entries of a list's page at most.
    pub(crate) page: Option<usize>,
    /// How late every answer comes.
    pub(crate) latency: Duration,
    last_id: u64,
}

/// A request that was answered, or was not.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Logged {
    /// HTTP method.
    pub method: String,
    /// Path and query, as sent.
    pub target: String,
    /// None where there was no answer.
    pub status: Option<u16>,
}

/// A resumable upload that is under way.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) bucket: String,
    pub(crate) name: String,
    pub(crate) about: About,
    pub(crate) conditions: Conditions,
    pub(crate) data: Vec<u8>,
}

impl State {
    pub(crate) fn now(&self) -> Time {
        self.clock.now()
    }

    /// Moves the clock on, and lets lifecycle rules act.
    pub(crate) fn advance(&mut self, by: Duration) {
        self.clock.advance(by);
        let now = self.now();
        for bucket in self.buckets.values_mut() {
            bucket.expire(now);
        }
    }

    pub(crate) fn bucket(&mut self, name: &str) -> Result<&mut Bucket, Refusal> {
        self.buckets
            .get_mut(name)
            .ok_or_else(|| Refusal::NoBucket(name.to_owned()))
    }

    pub(crate) fn create_bucket(&mut self, name: &str) -> Result<&mut Bucket, Refusal> {
        if name.is_empty() {
            return Err(Refusal::Invalid("a bucket needs a name".to_owned()));
        }
        if self.buckets.contains_key(name) {
            return Err(Refusal::Exists(name.to_owned()));
        }
        let now = self.now();
        Ok(self
            .buckets
            .entry(name.to_owned())
            .or_insert_with(|| Bucket::new(name, now)))
    }

    /// A bucket that is there, for somebody who may do all of this.
    pub(crate) fn allowed(
        &mut self,
        bucket: &str,
        token: Option<&str>,
        permissions: &[&str],
    ) -> Result<&mut Bucket, Refusal> {
        if self.buckets.contains_key(bucket) {
            for permission in permissions {
                self.grants.check(bucket, token, permission)?;
            }
        }
        self.bucket(bucket)
    }

    /// What writing an object takes: `create`, and `delete` where one is there and may be replaced.
    pub(crate) fn allowed_write(
        &mut self,
        bucket: &str,
        token: Option<&str>,
        name: &str,
        conditions: &Conditions,
    ) -> Result<&mut Bucket, Refusal> {
        let known = self.allowed(bucket, token, &["storage.objects.create"])?;
        let replaces = known.objects.contains_key(name) && conditions.generation != Some(0);
        if replaces {
            return self.allowed(bucket, token, &["storage.objects.delete"]);
        }
        self.bucket(bucket)
    }

    pub(crate) fn new_id(&mut self, what: &str) -> String {
        self.last_id += 1;
        format!("{what}-{}", self.last_id)
    }

    pub(crate) fn record(&mut self, logged: Logged) {
        if self.log.len() == LOG {
            self.log.pop_front();
        }
        self.log.push_back(logged);
    }
}
