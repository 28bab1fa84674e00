//! Two items compared: which arrays they have, and their elements, whatever the layouts and chunks.

use std::collections::BTreeSet;

use futures::{StreamExt as _, TryStreamExt as _};
use waystation_checkpoint::IndexDomain;
use waystation_checkpoint::zarr::DType;

use crate::blocks::Reader;
use crate::item::{Array, Item, elements, unreadable};
use crate::memory::Memory;
use crate::pattern::Pattern;
use crate::progress::Progress;
use crate::values::{Number, numbers};
use crate::{Error, Result};

/// Boxes of an array compared at the same time.
const PAIRS: usize = 8;

/// How an array of one item differs from that of the other.
#[derive(Debug, Clone, PartialEq)]
pub enum Difference {
    /// Only the first has it.
    OnlyInFirst,
    /// Only the second has it.
    OnlyInSecond,
    /// The shapes differ, first and second.
    Shape(Vec<i64>, Vec<i64>),
    /// The element types differ; the values may, too.
    DType {
        /// The first's.
        first: DType,
        /// The second's.
        second: DType,
        /// How the values differ as numbers, if they do.
        values: Option<Values>,
    },
    /// Elements differ.
    Values(Values),
    /// The implementations of a typed PRNG key differ.
    Prng(Option<String>, Option<String>),
    /// A text differs, or only one has it.
    Text(Option<String>, Option<String>),
}

/// How elements differ.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Values {
    /// How many do.
    pub differing: u64,
    /// Of how many.
    pub elements: u64,
    /// The largest distance of two numbers.
    pub max_abs_difference: f64,
    /// Pairs of which one is NaN and the other is not.
    pub nan_on_one_side: u64,
}

/// What was found.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// Arrays that both have.
    pub compared: u64,
    /// By name.
    pub differences: Vec<(String, Difference)>,
}

/// Compares two items; of `patterns`, if there are any, one must match a name.
///
/// Elements of one type are the same when their bits are; those of different types when they are the same numbers.
///
/// # Errors
/// An array that cannot be read, or for which memory does not suffice.
pub async fn diff(
    first: &Item,
    second: &Item,
    patterns: &[Pattern],
    memory: &Memory,
    progress: &Progress,
) -> Result<Report> {
    let is_meant =
        |name: &str| patterns.is_empty() || patterns.iter().any(|pattern| pattern.matches(name));
    if patterns.is_empty() {
        first.check_readable()?;
        second.check_readable()?;
    }
    let mut report = Report::default();
    let names: BTreeSet<&String> = first.arrays.keys().chain(second.arrays.keys()).collect();
    for name in names.into_iter().filter(|name| is_meant(name)) {
        let found = match (first.array(name), second.array(name)) {
            (Some(_), None) => Some(Difference::OnlyInFirst),
            (None, Some(_)) => Some(Difference::OnlyInSecond),
            (Some(a), Some(b)) => {
                report.compared += 1;
                let prng = (first.prng_impl(name), second.prng_impl(name));
                if prng.0 != prng.1 {
                    let prng = (prng.0.map(str::to_owned), prng.1.map(str::to_owned));
                    let difference = Difference::Prng(prng.0, prng.1);
                    report.differences.push((name.clone(), difference));
                }
                arrays((first, a), (second, b), memory, progress).await?
            }
            (None, None) => None,
        };
        report
            .differences
            .extend(found.map(|difference| (name.clone(), difference)));
    }
    let texts: BTreeSet<&String> = first.strings.keys().chain(second.strings.keys()).collect();
    for name in texts.into_iter().filter(|name| is_meant(name)) {
        let (a, b) = (first.strings.get(name), second.strings.get(name));
        if a != b {
            let difference = Difference::Text(a.cloned(), b.cloned());
            report.differences.push((name.clone(), difference));
        }
    }
    Ok(report)
}

async fn arrays(
    (first, a): (&Item, &Array),
    (second, b): (&Item, &Array),
    memory: &Memory,
    progress: &Progress,
) -> Result<Option<Difference>> {
    let (Some(of_a), Some(of_b)) = (&a.metadata, &b.metadata) else {
        let broken = if a.metadata.is_none() {
            (first, a)
        } else {
            (second, b)
        };
        return Err(unreadable(broken.0, broken.1));
    };
    let (shape, other) = (of_a.grid.shape(), of_b.grid.shape());
    if shape != other {
        return Ok(Some(Difference::Shape(shape.to_vec(), other.to_vec())));
    }
    let (a, b) = (
        Reader::open(first, a, memory)?,
        Reader::open(second, b, memory)?,
    );
    let values = compare(&a, &b, memory, progress).await?;
    Ok(if of_a.dtype != of_b.dtype {
        Some(Difference::DType {
            first: of_a.dtype,
            second: of_b.dtype,
            values,
        })
    } else {
        values.map(Difference::Values)
    })
}

async fn compare(
    a: &Reader,
    b: &Reader,
    memory: &Memory,
    progress: &Progress,
) -> Result<Option<Values>> {
    let all = elements(a.shape()).unwrap_or(0);
    progress.expect(all.saturating_mul(a.item_bytes()));
    let mut values = Values {
        differing: 0,
        elements: all,
        max_abs_difference: 0.0,
        nan_on_one_side: 0,
    };
    // Larger blocks are read once, smaller ones about once.
    let by = if a.block_bytes >= b.block_bytes { a } else { b };
    let blocks = by.grid.chunks_of(&IndexDomain::whole(by.shape()));
    let mut counted = futures::stream::iter(blocks)
        .map(|block| pair(a, b, by.grid.domain(&block), memory, progress))
        .buffer_unordered(PAIRS);
    while let Some(counted) = counted.try_next().await? {
        values.differing += counted.differing;
        values.nan_on_one_side += counted.nan_on_one_side;
        values.max_abs_difference = values.max_abs_difference.max(counted.max_abs_difference);
    }
    Ok((values.differing > 0).then_some(values))
}

/// Compares the same box of both.
async fn pair(
    a: &Reader,
    b: &Reader,
    wanted: IndexDomain,
    memory: &Memory,
    progress: &Progress,
) -> Result<Values> {
    let elements = elements(&wanted.shape).unwrap_or(0);
    let both = elements.saturating_mul(a.item_bytes() + b.item_bytes());
    let ((for_a, reads_a), (for_b, reads_b)) = (a.cost(both)?, b.cost(both)?);
    let _room = memory.take(for_a.max(for_b)).await;
    let left = a.read(&wanted, reads_a).await?;
    let right = b.read(&wanted, reads_b).await?;
    progress.did(1, left.len() as u64);
    let (from, to) = (a.metadata.dtype, b.metadata.dtype);
    let counted = tokio::task::spawn_blocking(move || count(from, &left, to, &right));
    counted.await?.ok_or_else(|| {
        let (from, to) = (from.v3_name(), to.v3_name());
        Error::Asked(format!("{from} cannot be compared with {to}"))
    })
}

fn count(from: DType, left: &[u8], to: DType, right: &[u8]) -> Option<Values> {
    let mut values = Values {
        differing: 0,
        elements: 0,
        max_abs_difference: 0.0,
        nan_on_one_side: 0,
    };
    if from == to && left == right {
        return Some(values);
    }
    let same_type = from == to;
    let bytes = left
        .chunks_exact(from.item_bytes())
        .zip(right.chunks_exact(to.item_bytes()));
    for ((a, b), (a_bytes, b_bytes)) in numbers(from, left)?.zip(numbers(to, right)?).zip(bytes) {
        let distance = a.distance(b);
        let both_nan = is_nan(a) && is_nan(b);
        let is_same = if same_type {
            a_bytes == b_bytes
        } else {
            distance == 0.0 || both_nan
        };
        if is_same {
            continue;
        }
        values.differing += 1;
        if is_nan(a) != is_nan(b) {
            values.nan_on_one_side += 1;
        } else if !distance.is_nan() {
            values.max_abs_difference = values.max_abs_difference.max(distance);
        }
    }
    Some(values)
}

fn is_nan(number: Number) -> bool {
    match number {
        Number::Int(_) => false,
        Number::Real(value) => value.is_nan(),
        Number::Complex(real, imaginary) => real.is_nan() || imaginary.is_nan(),
    }
}
