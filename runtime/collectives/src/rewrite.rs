//! Collectives of a partitioned program become calls of an FFI target.
//!
//! XLA has partitioned and optimized the program for all partitions and has generated no code yet. [`rewrite`] takes the
//! `xla.HloModuleProto` of this moment and puts a typed custom call in the place of each collective, and of what asks for
//! the partition's or the replica's number. What comes out runs on one device and knows only numbers of partitions, which count
//! those of all replicas, replica by replica; so one executable serves every worker, wherever they lie.
//!
//! It works on the bytes as they are on the wire: instructions that are none of these are copied as they came, with
//! every field that we do not know. Bytes that make no module are refused, never believed: nothing here panics, and no
//! more is allocated than some times the module's size.
//!
//! # What is refused
//!
//! See [`Refusal`]. Such programs can be run within one worker only, where XLA's own collectives serve them.

mod groups;
mod instruction;
mod shape;
#[cfg(test)]
mod tests;
mod wire;

use crate::op::{Kind, MOST_PARTITIONS};
use groups::Grid;
use instruction::{Instruction, Parts};
use std::collections::{HashMap, HashSet};
use wire::{fields, put_bytes};

/// Bytes that a module may grow by. Each collective becomes some hundred bytes, and some for each partition.
const MOST_GROWTH: usize = 256 << 20;

/// Why a program cannot be rewritten.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The bytes are no module.
    #[error("the program is no HLO module: {0}")]
    Malformed(&'static str),
    /// A number of partitions that is not served.
    #[error("{0} partitions, of which 1 to {MOST_PARTITIONS} are served")]
    Partitions(u32),
    /// A collective in two instructions, of which one starts and the other waits.
    #[error("{0}, which is asynchronous, does not run between workers")]
    Asynchronous(String),
    /// Communication of a kind that is not served.
    #[error("{0} does not run between workers")]
    Opcode(String),
    /// A collective inside of a computation that becomes one kernel.
    #[error("{0} inside of {1} does not run between workers")]
    Inside(String, &'static str),
    /// A reduction that is not one operation on two elements.
    #[error("the reduction of {0} is not one of add, multiply, minimum, maximum, and, or, xor")]
    Reducer(String),
    /// An array that cannot be taken apart by bytes.
    #[error("a collective on an array {0}")]
    Shape(&'static str),
    /// Groups that make no sense.
    #[error("a collective among groups {0}")]
    Groups(&'static str),
    /// Operands and results that do not fit the collective.
    #[error("{0} with operands or results that do not fit it")]
    Operands(String),
    /// Too many collectives.
    #[error("the rewritten program would be more than {MOST_GROWTH} bytes larger")]
    Growth,
}

/// A program that was rewritten.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rewritten {
    /// The `xla.HloModuleProto`.
    pub module: Vec<u8>,
    /// What was replaced, in the order of the operations' numbers.
    pub kinds: Vec<Kind>,
}

/// A computation of the module.
struct Computation<'a> {
    id: i64,
    root: i64,
    instructions: Vec<Instruction<'a>>,
}

fn computation(message: &[u8]) -> Result<Computation<'_>, Refusal> {
    let mut computation = Computation {
        id: 0,
        root: 0,
        instructions: Vec::new(),
    };
    for field in fields(message) {
        let field = field?;
        match field.number {
            2 => computation
                .instructions
                .push(Instruction::new(field.bytes()?)?),
            5 => computation.id = field.int()?,
            6 => computation.root = field.int()?,
            _ => {}
        }
    }
    Ok(computation)
}

/// Opcodes of communication that is not served. Those of asynchronous collectives are told by their endings.
const UNSERVED: &[&str] = &[
    "ragged-all-to-all",
    "send",
    "send-done",
    "recv",
    "recv-done",
    "partial-all-reduce",
];

/// Replaces the collectives of `module` (an `xla.HloModuleProto`), a program of `replicas` replicas of `partitions` partitions.
/// `None` if it has none.
///
/// # Errors
///
/// A [`Refusal`] if the module is none, or has communication that cannot be replaced.
pub fn rewrite(
    module: &[u8],
    replicas: u32,
    partitions: u32,
) -> Result<Option<Rewritten>, Refusal> {
    let grid = Grid::new(replicas, partitions)?;
    let mut computations = Vec::new();
    for field in fields(module) {
        let field = field?;
        if field.number == 3 {
            computations.push(computation(field.bytes()?)?);
        }
    }
    check(&computations)?;
    let by_id: HashMap<i64, &Computation<'_>> =
        computations.iter().map(|each| (each.id, each)).collect();
    let mut kinds = Vec::new();
    let mut out = Vec::new();
    let mut growth = 0_usize;
    let mut next = computations.iter();
    for field in fields(module) {
        let field = field?;
        let changed = (field.number == 3)
            .then(|| next.next())
            .flatten()
            .filter(|each| each.instructions.iter().any(|each| each.kind().is_some()));
        let Some(changed) = changed else {
            out.extend_from_slice(field.raw);
            continue;
        };
        let message = field.bytes()?;
        let inside = replace(message, changed, &by_id, grid, &mut kinds)?;
        growth = growth.saturating_add(inside.len().saturating_sub(message.len()));
        if growth > MOST_GROWTH {
            return Err(Refusal::Growth);
        }
        put_bytes(&mut out, 3, &inside);
    }
    Ok((!kinds.is_empty()).then_some(Rewritten { module: out, kinds }))
}

/// Refuses communication that is not replaced.
fn check(computations: &[Computation<'_>]) -> Result<(), Refusal> {
    let mut kernels: HashMap<i64, &'static str> = HashMap::new();
    let mut communicating = HashSet::new();
    for computation in computations {
        for each in &computation.instructions {
            let collective =
                |opcode: &str| Kind::of_opcode(opcode).is_some() || UNSERVED.contains(&opcode);
            if UNSERVED.contains(&each.opcode) {
                return Err(Refusal::Opcode(each.opcode.to_owned()));
            }
            if let Some((collective_opcode, "start" | "done")) = each.opcode.rsplit_once('-')
                && collective(collective_opcode)
            {
                return Err(Refusal::Asynchronous(each.opcode.to_owned()));
            }
            let kernel = match each.opcode {
                "fusion" => "a fusion",
                "async-start" | "async-update" | "async-done" => "an asynchronous computation",
                // Reductions and the like call theirs an element at a time.
                "map" | "reduce" | "reduce-window" | "scatter" | "select-and-scatter" | "sort"
                | "all-reduce" | "reduce-scatter" | "custom-call" => "a computation of elements",
                _ => "",
            };
            if !kernel.is_empty() {
                kernels.extend(each.called.iter().map(|id| (*id, kernel)));
            }
            if each.kind().is_some() {
                communicating.insert((computation.id, each.opcode));
            }
        }
    }
    for (id, opcode) in communicating {
        if let Some(kernel) = kernels.get(&id) {
            return Err(Refusal::Inside(opcode.to_owned(), kernel));
        }
    }
    Ok(())
}

fn replace(
    message: &[u8],
    computation: &Computation<'_>,
    by_id: &HashMap<i64, &Computation<'_>>,
    grid: Grid,
    kinds: &mut Vec<Kind>,
) -> Result<Vec<u8>, Refusal> {
    let shapes: HashMap<i64, &[u8]> = computation
        .instructions
        .iter()
        .map(|each| (each.id, each.shape))
        .collect();
    let mut out = Vec::with_capacity(message.len());
    let mut next = computation.instructions.iter();
    for field in fields(message) {
        let field = field?;
        let collective = (field.number == 2)
            .then(|| next.next())
            .flatten()
            .and_then(|each| Some((each, each.kind()?)));
        let Some((instruction, kind)) = collective else {
            out.extend_from_slice(field.raw);
            continue;
        };
        let number = u32::try_from(kinds.len()).map_err(|_| Refusal::Growth)?;
        let reducer = instruction
            .called
            .first()
            .and_then(|id| by_id.get(id))
            .map(|each| (each.root, each.instructions.as_slice()));
        let parts = Parts::new(instruction, kind)?;
        let op = parts.op(number, &shapes, reducer, grid)?;
        kinds.push(op.kind);
        put_bytes(&mut out, 2, &parts.custom_call(&op)?);
        if out.len() > message.len().saturating_add(MOST_GROWTH) {
            return Err(Refusal::Growth);
        }
    }
    Ok(out)
}
