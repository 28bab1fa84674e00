//! One object, and the conditions that a request may put on it.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::clock::Time;
use crate::hash;
use crate::reply::Refusal;

#[derive(Debug, Clone)]
pub(crate) struct Object {
    pub(crate) data: Bytes,
    pub(crate) generation: i64,
    pub(crate) metageneration: i64,
    pub(crate) created: Time,
    pub(crate) updated: Time,
    pub(crate) about: About,
    pub(crate) crc32c: u32,
    /// None for what was composed.
    pub(crate) md5: Option<[u8; 16]>,
}

/// What a writer says of an object.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct About {
    pub(crate) content_type: Option<String>,
    pub(crate) custom_time: Option<Time>,
    pub(crate) metadata: BTreeMap<String, String>,
}

impl Object {
    /// The ETag header of the XML API.
    pub(crate) fn etag(&self) -> String {
        match &self.md5 {
            Some(md5) => format!("\"{}\"", hash::hex(md5)),
            None => format!("\"{}-{}\"", self.generation, self.metageneration),
        }
    }
}

/// `ifGenerationMatch` and its three sisters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Conditions {
    pub(crate) generation: Option<i64>,
    pub(crate) generation_not: Option<i64>,
    pub(crate) metageneration: Option<i64>,
    pub(crate) metageneration_not: Option<i64>,
}

impl Conditions {
    /// Of a write: an object that is absent has generation 0.
    pub(crate) fn allow_write(&self, object: Option<&Object>) -> Result<(), Refusal> {
        let generation = object.map_or(0, |object| object.generation);
        let metageneration = object.map_or(0, |object| object.metageneration);
        let good = self.generation.is_none_or(|wanted| wanted == generation)
            && self
                .generation_not
                .is_none_or(|wanted| wanted != generation)
            && self
                .metageneration
                .is_none_or(|wanted| wanted == metageneration)
            && self
                .metageneration_not
                .is_none_or(|wanted| wanted != metageneration);
        if good {
            Ok(())
        } else {
            Err(Refusal::Precondition)
        }
    }

    /// Of a read.
    pub(crate) fn allow_read(&self, object: &Object) -> Result<(), Refusal> {
        let unchanged = self.generation_not == Some(object.generation)
            || self.metageneration_not == Some(object.metageneration);
        if unchanged {
            return Err(Refusal::NotModified);
        }
        self.allow_write(Some(object))
    }
}
