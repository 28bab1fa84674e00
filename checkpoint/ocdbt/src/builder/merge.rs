//! One database over several others that lie in folders below it, as Orbax makes of those that its processes write: small
//! values are copied, others are referred to where they are, so the databases below must stay.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use bytes::Bytes;

use super::Builder;
use crate::error::{Error, Result, shown};
use crate::node::Value;
use crate::reader::{Database, List, Source};

/// What a merge took over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Merged {
    /// Keys, each counted once.
    pub keys: u64,
    /// Keys that several databases have, with the same value inline or at the same place.
    pub repeated: u64,
}

/// Adds all keys of databases, opened with [`Database::open_under`] from where the new one will be, to a builder.
///
/// Of each database, no more is held than the nodes from its root to where it is read, and what it
/// [keeps](crate::Limits::kept_bytes), which serves nothing here.
///
/// # Errors
/// A database that cannot be read; a key that two of them have, unless both hold the same value inline or
/// refer to the same place.
pub async fn merge<'a, S: Source + 'a>(
    databases: impl IntoIterator<Item = &'a Database<S>>,
    into: &mut Builder,
) -> Result<Merged> {
    let mut lists: Vec<List<'_, S>> = databases
        .into_iter()
        .map(|database| database.list(&[]))
        .collect();
    let mut values: Vec<Option<Value>> = vec![None; lists.len()];
    let mut heads: BinaryHeap<Reverse<(Bytes, usize)>> = BinaryHeap::new();
    for (index, list) in lists.iter_mut().enumerate() {
        advance(list, index, &mut values, &mut heads).await?;
    }
    let mut merged = Merged::default();
    let mut last: Option<(Bytes, Value)> = None;
    while let Some(Reverse((key, index))) = heads.pop() {
        let Some(value) = values[index].take() else {
            continue;
        };
        advance(&mut lists[index], index, &mut values, &mut heads).await?;
        match &last {
            Some((last, before)) if *last == key => {
                // The same place counts too: one of the databases may be a merge of others.
                if *before != value {
                    return Err(Error::Conflict { key: shown(&key) });
                }
                merged.repeated += 1;
            }
            _ => {
                into.put_value(key.clone(), value.clone())?;
                merged.keys += 1;
                last = Some((key, value));
            }
        }
    }
    Ok(merged)
}

async fn advance<S: Source>(
    list: &mut List<'_, S>,
    index: usize,
    values: &mut [Option<Value>],
    heads: &mut BinaryHeap<Reverse<(Bytes, usize)>>,
) -> Result<()> {
    if let Some(entry) = list.next().await? {
        values[index] = Some(entry.value);
        heads.push(Reverse((entry.key, index)));
    }
    Ok(())
}
