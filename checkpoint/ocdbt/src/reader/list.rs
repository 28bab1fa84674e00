//! Keys in order, read as they are asked for.

use bytes::Bytes;

use super::visit::Visit;
use super::{Database, Source};
use crate::error::{Result, at_most};
use crate::node::Value;

/// A key and its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The whole key.
    pub key: Bytes,
    /// The value, or where it is.
    pub value: Value,
}

/// The keys of a range, in order. Holds the nodes from the root to where it is, and ends after an error.
#[derive(Debug)]
pub struct List<'a, S> {
    database: &'a Database<S>,
    start: Vec<u8>,
    /// All keys of the range are less.
    end: Option<Vec<u8>>,
    /// From the root down, with the number of the next entry of each.
    path: Vec<(Visit, usize)>,
    entered: bool,
    ended: bool,
}

/// The least key after all that have a prefix; none where there is no key after them.
pub(super) fn after_prefix(prefix: &[u8]) -> Option<Vec<u8>> {
    let last = prefix.iter().rposition(|byte| *byte != 0xff)?;
    let mut after = prefix[..=last].to_vec();
    after[last] += 1;
    Some(after)
}

impl<'a, S: Source> List<'a, S> {
    pub(super) fn new(database: &'a Database<S>, start: Vec<u8>, end: Option<Vec<u8>>) -> Self {
        Self {
            database,
            start,
            end,
            path: Vec::new(),
            entered: false,
            ended: false,
        }
    }

    /// The next key and its value. Each call reads one node of each height at most, as far as they are not kept.
    ///
    /// Cancel-safe: no key is lost.
    ///
    /// # Errors
    /// A node that cannot be read, or is not what its parent says.
    pub async fn next(&mut self) -> Result<Option<Entry>> {
        if self.ended {
            return Ok(None);
        }
        let next = self.advance().await;
        if !matches!(next, Ok(Some(_))) {
            self.ended = true;
            self.path.clear();
        }
        next
    }

    /// All that is left, of which there may be `limit` at most.
    ///
    /// # Errors
    /// As [`List::next`]; more than that.
    pub async fn collect(mut self, limit: usize) -> Result<Vec<Entry>> {
        let mut all = Vec::new();
        while let Some(entry) = self.next().await? {
            at_most("number of keys", all.len() as u64 + 1, limit as u64)?;
            all.push(entry);
        }
        Ok(all)
    }

    fn enter(&mut self, visit: Visit) -> Result<()> {
        let above: usize = self.path.iter().map(|(visit, _)| visit.bytes()).sum();
        at_most(
            "memory of the nodes on the way",
            above.saturating_add(visit.bytes()) as u64,
            self.database.limits.list_bytes as u64,
        )?;
        let at = visit.seek(&self.start);
        self.path.push((visit, at));
        Ok(())
    }

    fn is_past(&self, key: &[u8]) -> bool {
        self.end.as_ref().is_some_and(|end| key >= &end[..])
    }

    async fn advance(&mut self) -> Result<Option<Entry>> {
        let database = self.database;
        if !self.entered {
            let root = database.root().await?;
            self.entered = true;
            if let Some(root) = root {
                self.enter(root)?;
            }
        }
        while let Some((visit, at)) = self.path.last() {
            let index = *at;
            if index >= visit.node().len() {
                self.path.pop();
                continue;
            }
            let key = visit.key(index);
            if self.is_past(&key) {
                break;
            }
            if let Some(value) = visit.value(index).cloned() {
                self.step();
                let key = Bytes::from(key);
                return Ok(Some(Entry { key, value }));
            }
            let child = database.child(visit, index).await?;
            self.step();
            self.enter(child)?;
        }
        Ok(None)
    }

    fn step(&mut self) {
        if let Some((_, at)) = self.path.last_mut() {
            *at += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_after_a_prefix() {
        assert_eq!(after_prefix(b""), None);
        assert_eq!(after_prefix(b"a"), Some(b"b".to_vec()));
        assert_eq!(after_prefix(b"a/"), Some(b"a0".to_vec()));
        assert_eq!(after_prefix(b"a\xff\xff"), Some(b"b".to_vec()));
        assert_eq!(after_prefix(b"\xff"), None);
    }
}
