//! What of a module's structure counts, whatever its dialects mean: which parts an op has, its types and values, its regions
//! and blocks. Locations are looked at and do not count.

use super::table::{Kind, Sink, Table};
use crate::{
    cursor::Cursor,
    error::Error,
    ir::{Argument, Op},
};

/// An op up to its properties. `parts`: those of its mask that count.
pub(super) fn op_begins(
    op: &Op<'_>,
    parts: u8,
    table: &mut Table<'_, '_>,
    out: &mut Sink,
) -> Result<(), Error> {
    table.location(op.location, &op.at)?;
    out.number(b'O', parts.into());
    out.bytes(op.dialect);
    out.bytes(op.name);
    if let Some(attributes) = op.attributes {
        out.digest(b'd', &table.digest(Kind::Attribute, attributes, &op.at, 0)?);
    }
    Ok(())
}

/// An op behind its properties.
pub(super) fn op_ends(op: &Op<'_>, table: &mut Table<'_, '_>, out: &mut Sink) -> Result<(), Error> {
    out.number(b'r', op.result_types.len() as u64);
    for ty in &op.result_types {
        out.digest(b't', &table.digest(Kind::Type, *ty, &op.at, 0)?);
    }
    for (tag, numbers) in [(b'p', &op.operands), (b's', &op.successors)] {
        out.number(tag, numbers.len() as u64);
        numbers.iter().for_each(|number| out.number(b'v', *number));
    }
    out.number(b'g', op.regions as u64);
    out.number(b'i', op.isolated.into());
    Ok(())
}

pub(super) fn region(blocks: usize, out: &mut Sink) {
    out.number(b'G', blocks as u64);
}

pub(super) fn block(
    ops: usize,
    arguments: &[Argument],
    at: &Cursor<'_>,
    table: &mut Table<'_, '_>,
    out: &mut Sink,
) -> Result<(), Error> {
    out.number(b'B', ops as u64);
    out.number(b'n', arguments.len() as u64);
    for argument in arguments {
        out.digest(b't', &table.digest(Kind::Type, argument.ty, at, 0)?);
        if let Some(location) = argument.location {
            table.location(location, at)?;
        }
    }
    Ok(())
}
