//! Walks the ops of a module, in the order they stand in the file.

use crate::{
    artifact::{Artifact, KERNEL_VERSION},
    cursor::Cursor,
    error::Error,
};

/// How deep regions may nest. JAX's programs nest a region for each loop, branch or reduction around an op.
const MAX_DEPTH: usize = 200;

/// The bits of an op's mask: which parts follow.
pub(crate) mod mask {
    pub(crate) const ATTRIBUTES: u8 = 0x01;
    pub(crate) const RESULTS: u8 = 0x02;
    pub(crate) const OPERANDS: u8 = 0x04;
    pub(crate) const SUCCESSORS: u8 = 0x08;
    pub(crate) const REGIONS: u8 = 0x10;
    pub(crate) const USE_LIST_ORDERS: u8 = 0x20;
    pub(crate) const PROPERTIES: u8 = 0x40;
    pub(crate) const UNKNOWN: u8 = 0x80;
}

/// An op without the contents of its regions. Numbers are indices into the artifact's tables, or value and block numbers.
#[derive(Debug)]
pub(crate) struct Op<'a> {
    pub(crate) dialect: &'a [u8],
    pub(crate) name: &'a [u8],
    /// Index of both among the artifact's op names.
    pub(crate) names: usize,
    pub(crate) registered: bool,
    pub(crate) mask: u8,
    /// Attribute index.
    pub(crate) location: u64,
    /// Attribute index of a dictionary.
    pub(crate) attributes: Option<u64>,
    pub(crate) properties: Option<Cursor<'a>>,
    pub(crate) result_types: Vec<u64>,
    pub(crate) operands: Vec<u64>,
    pub(crate) successors: Vec<u64>,
    pub(crate) regions: usize,
    /// Regions that see no value from outside lie in a section of their own.
    pub(crate) isolated: bool,
    /// The first byte behind the op's head, for messages.
    pub(crate) at: Cursor<'a>,
}

impl Op<'_> {
    pub(crate) fn is(&self, dialect: &str, name: &str) -> bool {
        self.dialect == dialect.as_bytes() && self.name == name.as_bytes()
    }
}

/// An argument of a block: type index and, as a rule, location attribute index.
#[derive(Debug)]
pub(crate) struct Argument {
    pub(crate) ty: u64,
    pub(crate) location: Option<u64>,
}

/// What to do with the regions of an op.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Regions {
    Enter,
    /// Isolated regions are passed over without a look. Others have no length of their own and are entered all the same.
    Skip,
}

/// Told of every part of the module in the order of the file. Counts come first, so the sequence of calls determines the
/// structure.
pub(crate) trait Visitor<'a> {
    fn op(&mut self, op: &Op<'a>) -> Result<Regions, Error>;

    fn region(&mut self, _blocks: usize) -> Result<(), Error> {
        Ok(())
    }

    fn block(
        &mut self,
        _ops: usize,
        _arguments: &[Argument],
        _at: &Cursor<'a>,
    ) -> Result<(), Error> {
        Ok(())
    }
}

/// Walks the whole IR section. Its outermost part is a block without arguments that holds the module.
pub(crate) fn walk<'a>(
    artifact: &Artifact<'a>,
    visitor: &mut impl Visitor<'a>,
) -> Result<(), Error> {
    let mut cursor = artifact.ir.clone();
    block(artifact, &mut cursor, visitor, 0)?;
    cursor.finish("bytes behind the module")
}

fn block<'a>(
    artifact: &Artifact<'a>,
    cursor: &mut Cursor<'a>,
    visitor: &mut impl Visitor<'a>,
    depth: usize,
) -> Result<(), Error> {
    let (ops, has_arguments) = cursor.flagged()?;
    // An op takes two bytes and more.
    let ops = usize::try_from(ops)
        .ok()
        .filter(|ops| *ops <= cursor.remaining());
    let ops = ops.ok_or_else(|| cursor.damaged("block with more ops than bytes"))?;
    let mut arguments = Vec::new();
    if has_arguments {
        for _ in 0..cursor.count()? {
            let (ty, has_location) = match artifact.version {
                KERNEL_VERSION => (cursor.varint()?, true),
                _ => cursor.flagged()?,
            };
            let location = if has_location {
                Some(cursor.varint()?)
            } else {
                None
            };
            arguments.push(Argument { ty, location });
        }
        if artifact.version != KERNEL_VERSION && cursor.byte()? != 0 {
            skip_use_list_orders(cursor, arguments.len())?;
        }
    }
    visitor.block(ops, &arguments, cursor)?;
    for _ in 0..ops {
        let (op, has_section) = read_op(artifact, cursor)?;
        let regions = visitor.op(&op)?;
        if op.regions == 0 {
            if has_section && artifact.version != KERNEL_VERSION {
                cursor.section()?;
            }
            continue;
        }
        if depth == MAX_DEPTH {
            return Err(Error::unsupported(format!(
                "regions nested deeper than {MAX_DEPTH}"
            )));
        }
        if !op.isolated || artifact.version == KERNEL_VERSION {
            inside(artifact, cursor, visitor, op.regions, depth + 1)?;
            continue;
        }
        let start = cursor.clone();
        let (id, mut content) = cursor.section()?;
        if id != 4 {
            return Err(start.damaged("another section in place of isolated regions"));
        }
        if regions == Regions::Enter {
            inside(artifact, &mut content, visitor, op.regions, depth + 1)?;
            content.finish("bytes behind an op's regions")?;
        }
    }
    Ok(())
}

fn inside<'a>(
    artifact: &Artifact<'a>,
    cursor: &mut Cursor<'a>,
    visitor: &mut impl Visitor<'a>,
    regions: usize,
    depth: usize,
) -> Result<(), Error> {
    for _ in 0..regions {
        let blocks = cursor.count()?;
        visitor.region(blocks)?;
        if blocks > 0 {
            // The number of values in the region, which a reader may use to reserve room.
            cursor.varint()?;
        }
        for _ in 0..blocks {
            block(artifact, cursor, visitor, depth)?;
        }
    }
    Ok(())
}

/// The head of an op, and whether a section stands behind it.
fn read_op<'a>(artifact: &Artifact<'a>, cursor: &mut Cursor<'a>) -> Result<(Op<'a>, bool), Error> {
    let names = cursor.varint()?;
    let (dialect, name, entry) = artifact.op_name(names, cursor)?;
    // It has just been looked up.
    let names = names as usize;
    let mask = cursor.byte()?;
    if mask & mask::UNKNOWN != 0 {
        return Err(cursor.damaged("op with an unknown part"));
    }
    let has = |part: u8| mask & part != 0;
    let location = cursor.varint()?;
    let attributes = if has(mask::ATTRIBUTES) {
        Some(cursor.varint()?)
    } else {
        None
    };
    let properties = if has(mask::PROPERTIES) {
        let index = cursor.varint()?;
        let properties = crate::artifact::lookup(&artifact.properties, index);
        Some(
            properties
                .ok_or_else(|| cursor.damaged("property index out of range"))?
                .clone(),
        )
    } else {
        None
    };
    let mut numbers = |part| {
        if has(part) {
            list(cursor)
        } else {
            Ok(Vec::new())
        }
    };
    let result_types = numbers(mask::RESULTS)?;
    let operands = numbers(mask::OPERANDS)?;
    let successors = numbers(mask::SUCCESSORS)?;
    if has(mask::USE_LIST_ORDERS) {
        skip_use_list_orders(cursor, result_types.len())?;
    }
    let (regions, isolated) = if has(mask::REGIONS) {
        cursor.flagged()?
    } else {
        (0, false)
    };
    let regions = usize::try_from(regions)
        .ok()
        .filter(|regions| *regions <= cursor.remaining());
    let regions = regions.ok_or_else(|| cursor.damaged("op with more regions than bytes"))?;
    let at = cursor.clone();
    let registered = entry.registered;
    Ok((
        Op {
            dialect,
            name,
            names,
            registered,
            mask,
            location,
            attributes,
            properties,
            result_types,
            operands,
            successors,
            regions,
            isolated,
            at,
        },
        isolated,
    ))
}

fn list(cursor: &mut Cursor<'_>) -> Result<Vec<u64>, Error> {
    let count = cursor.count()?;
    (0..count).map(|_| cursor.varint()).collect()
}

/// Use-list orders: a reader may restore the order in which a value's uses were made. The program does not depend on it.
fn skip_use_list_orders(cursor: &mut Cursor<'_>, values: usize) -> Result<(), Error> {
    let entries = if values == 1 { 1 } else { cursor.count()? };
    for _ in 0..entries {
        if values != 1 {
            cursor.varint()?;
        }
        let (numbers, _as_pairs) = cursor.flagged()?;
        if numbers > cursor.remaining() as u64 {
            return Err(cursor.damaged("list longer than the bytes that hold it"));
        }
        for _ in 0..numbers {
            cursor.varint()?;
        }
    }
    Ok(())
}
