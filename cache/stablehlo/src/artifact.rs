//! The container: an artifact's sections and the tables in them.
//!
//! A file is the magic `4D 4C EF 52`, the version, the producer's name and sections in any order. Everything in it is an index
//! into a table: strings, dialects, op names, attributes, types, properties. The tables are split into their entries here;
//! what an entry means is read when it is asked for.

use crate::{cursor::Cursor, error::Error};

/// The container's version in every portable artifact since VHLO 0.15.
pub(crate) const VERSION: u64 = 6;

const MAGIC: [u8; 4] = [0x4d, 0x4c, 0xef, 0x52];

/// The version of a kernel in a custom call: it has no properties, and less is said of dialects, op names and blocks.
pub(crate) const KERNEL_VERSION: u64 = 0;

/// Whether bytes begin as MLIR bytecode does.
pub(crate) fn is_bytecode(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC)
}

/// Section ids.
mod id {
    pub(super) const STRINGS: usize = 0;
    pub(super) const DIALECTS: usize = 1;
    pub(super) const ENTRIES: usize = 2;
    pub(super) const ENTRY_SIZES: usize = 3;
    pub(super) const IR: usize = 4;
    pub(super) const RESOURCES: usize = 5;
    pub(super) const RESOURCE_SIZES: usize = 6;
    pub(super) const DIALECT_VERSION: u8 = 7;
    pub(super) const PROPERTIES: usize = 8;
    pub(super) const COUNT: usize = 9;
}

/// A program split into its tables.
#[derive(Debug)]
pub(crate) struct Artifact<'a> {
    /// The container's version, [`VERSION`] or [`KERNEL_VERSION`].
    pub(crate) version: u64,
    pub(crate) strings: Vec<&'a [u8]>,
    pub(crate) dialects: Vec<Dialect<'a>>,
    pub(crate) op_names: Vec<OpName>,
    pub(crate) attributes: Vec<Entry<'a>>,
    pub(crate) types: Vec<Entry<'a>>,
    pub(crate) properties: Vec<Cursor<'a>>,
    pub(crate) ir: Cursor<'a>,
    /// True when the file carries resource blobs. JAX writes its constants in line and leaves the section empty.
    pub(crate) has_resources: bool,
}

/// A dialect by name, with the version bytes it may carry.
#[derive(Debug)]
pub(crate) struct Dialect<'a> {
    pub(crate) name: &'a [u8],
    pub(crate) version: Option<&'a [u8]>,
}

/// An op's name, without its dialect's prefix.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OpName {
    pub(crate) dialect: usize,
    pub(crate) string: usize,
    pub(crate) registered: bool,
}

/// One attribute or type, encoded.
#[derive(Debug, Clone)]
pub(crate) struct Entry<'a> {
    pub(crate) dialect: usize,
    /// False: the content is assembly text.
    pub(crate) binary: bool,
    pub(crate) content: Cursor<'a>,
}

impl<'a> Artifact<'a> {
    pub(crate) fn parse(bytes: &'a [u8]) -> Result<Self, Error> {
        Self::of_version(VERSION, bytes)
    }

    /// A kernel in a custom call's configuration.
    pub(crate) fn parse_kernel(bytes: &'a [u8]) -> Result<Self, Error> {
        Self::of_version(KERNEL_VERSION, bytes)
    }

    fn of_version(version: u64, bytes: &'a [u8]) -> Result<Self, Error> {
        let mut cursor = Cursor::new(bytes, 0);
        if cursor
            .take(MAGIC.len(), "")
            .map_err(|_| Error::NotBytecode)?
            != MAGIC
        {
            return Err(Error::NotBytecode);
        }
        let found = cursor.varint()?;
        if found != version {
            return Err(Error::Version { found });
        }
        // The producer names the StableHLO release; the program does not depend on it.
        cursor.terminated()?;
        let mut sections: [Option<Cursor<'a>>; id::COUNT] = [const { None }; id::COUNT];
        while !cursor.is_empty() {
            let start = cursor.clone();
            let (id, content) = cursor.section()?;
            let slot = sections
                .get_mut(usize::from(id))
                .filter(|slot| slot.is_none());
            *slot.ok_or_else(|| start.damaged("unknown or repeated section"))? = Some(content);
        }
        let mut section = |id: usize, what| sections[id].take().ok_or_else(|| cursor.damaged(what));
        let strings = strings(section(id::STRINGS, "no string section")?)?;
        let (dialects, op_names) = dialects(
            version,
            section(id::DIALECTS, "no dialect section")?,
            &strings,
        )?;
        let sizes = section(id::ENTRY_SIZES, "no attribute and type offset section")?;
        let entries = section(id::ENTRIES, "no attribute and type section")?;
        let (attributes, types) = entries_of(sizes, entries, dialects.len())?;
        let ir = section(id::IR, "no IR section")?;
        let properties = match section(id::PROPERTIES, "") {
            Ok(section) => properties(section)?,
            Err(_) => Vec::new(),
        };
        let has_resources = section(id::RESOURCES, "").is_ok_and(|section| !section.is_empty())
            || section(id::RESOURCE_SIZES, "")
                .is_ok_and(|section| !matches!(section.clone().rest(), [] | [0x01]));
        Ok(Self {
            version,
            strings,
            dialects,
            op_names,
            attributes,
            types,
            properties,
            ir,
            has_resources,
        })
    }

    /// A string by its index, at a place in the file for the message.
    pub(crate) fn string(&self, index: u64, at: &Cursor<'_>) -> Result<&'a [u8], Error> {
        lookup(&self.strings, index)
            .copied()
            .ok_or_else(|| at.damaged("string index out of range"))
    }

    /// An op's dialect and name.
    pub(crate) fn op_name(
        &self,
        index: u64,
        at: &Cursor<'_>,
    ) -> Result<(&'a [u8], &'a [u8], OpName), Error> {
        let name = *lookup(&self.op_names, index)
            .ok_or_else(|| at.damaged("op name index out of range"))?;
        // Both indices were checked when the table was read.
        Ok((
            self.dialects[name.dialect].name,
            self.strings[name.string],
            name,
        ))
    }

    pub(crate) fn has_dialect(&self, name: &[u8]) -> bool {
        self.dialects.iter().any(|dialect| dialect.name == name)
    }
}

/// The element at an index from the file.
pub(crate) fn lookup<T>(table: &[T], index: u64) -> Option<&T> {
    usize::try_from(index)
        .ok()
        .and_then(|index| table.get(index))
}

/// Strings: their count, their lengths from last to first with the NUL counted, their bytes from first to last.
fn strings(mut section: Cursor<'_>) -> Result<Vec<&[u8]>, Error> {
    let count = section.count()?;
    let mut lengths = Vec::with_capacity(count);
    for _ in 0..count {
        lengths.push(section.varint()?);
    }
    let mut strings = Vec::with_capacity(count);
    for length in lengths.into_iter().rev() {
        let length = usize::try_from(length)
            .ok()
            .and_then(|length| length.checked_sub(1));
        let length = length.ok_or_else(|| section.damaged("string without room for its end"))?;
        let string = section.take(length, "string longer than its section")?;
        if section.byte()? != 0 {
            return Err(section.damaged("string without an end"));
        }
        strings.push(string);
    }
    section.finish("bytes behind the last string")?;
    Ok(strings)
}

/// Dialects with their versions, then op names in groups by dialect. A kernel has neither the versions, nor the number of op
/// names, nor whether they are registered.
fn dialects<'a>(
    container: u64,
    mut section: Cursor<'a>,
    strings: &[&'a [u8]],
) -> Result<(Vec<Dialect<'a>>, Vec<OpName>), Error> {
    let count = section.count()?;
    let mut dialects = Vec::with_capacity(count);
    for _ in 0..count {
        let (name, has_version) = match container {
            KERNEL_VERSION => (section.varint()?, false),
            _ => section.flagged()?,
        };
        let name = lookup(strings, name)
            .copied()
            .ok_or_else(|| section.damaged("string index out of range"))?;
        let version = if has_version {
            let (id, mut content) = section.section()?;
            if id != id::DIALECT_VERSION {
                return Err(section.damaged("another section in place of a dialect's version"));
            }
            Some(content.rest())
        } else {
            None
        };
        dialects.push(Dialect { name, version });
    }
    let total = match container {
        KERNEL_VERSION => None,
        _ => Some(section.count()?),
    };
    let mut op_names = Vec::new();
    while !section.is_empty() {
        let dialect = group_dialect(&mut section, dialects.len())?;
        for _ in 0..section.count()? {
            let (string, registered) = match container {
                KERNEL_VERSION => (section.varint()?, true),
                _ => section.flagged()?,
            };
            let string = usize::try_from(string)
                .ok()
                .filter(|string| *string < strings.len());
            let string = string.ok_or_else(|| section.damaged("string index out of range"))?;
            op_names.push(OpName {
                dialect,
                string,
                registered,
            });
        }
    }
    if total.is_some_and(|total| total != op_names.len()) {
        return Err(section.damaged("another number of op names than announced"));
    }
    Ok((dialects, op_names))
}

/// Attributes, then types, in groups by dialect. One section has the sizes, the other the content.
fn entries_of<'a>(
    mut sizes: Cursor<'a>,
    mut content: Cursor<'a>,
    dialects: usize,
) -> Result<(Vec<Entry<'a>>, Vec<Entry<'a>>), Error> {
    let (num_attributes, num_types) = (sizes.count()?, sizes.count()?);
    let mut table = |count: usize| {
        if count > sizes.remaining() {
            return Err(sizes.damaged("list longer than the bytes that hold it"));
        }
        let mut entries = Vec::with_capacity(count);
        while entries.len() < count {
            let dialect = group_dialect(&mut sizes, dialects)?;
            let group = sizes.count()?;
            if group == 0 || group > count - entries.len() {
                return Err(sizes.damaged("attribute or type group of a wrong size"));
            }
            for _ in 0..group {
                let (size, binary) = sizes.flagged()?;
                let size = usize::try_from(size)
                    .map_err(|_| sizes.damaged("entry longer than its section"))?;
                let base = content.offset();
                let bytes = content.take(size, "attribute or type longer than its section")?;
                entries.push(Entry {
                    dialect,
                    binary,
                    content: Cursor::new(bytes, base),
                });
            }
        }
        Ok(entries)
    };
    let (attributes, types) = (table(num_attributes)?, table(num_types)?);
    sizes.finish("bytes behind the last attribute or type size")?;
    content.finish("bytes behind the last attribute or type")?;
    Ok((attributes, types))
}

fn group_dialect(section: &mut Cursor<'_>, dialects: usize) -> Result<usize, Error> {
    let dialect = section.varint()?;
    let dialect = usize::try_from(dialect)
        .ok()
        .filter(|dialect| *dialect < dialects);
    dialect.ok_or_else(|| section.damaged("dialect index out of range"))
}

/// Properties: their count, then each with its size.
fn properties(mut section: Cursor<'_>) -> Result<Vec<Cursor<'_>>, Error> {
    let count = section.count()?;
    let mut properties = Vec::with_capacity(count);
    for _ in 0..count {
        let start = section.clone();
        let bytes = section.sized()?;
        properties.push(Cursor::new(bytes, start.offset()));
    }
    section.finish("bytes behind the last property")?;
    Ok(properties)
}
