//! Kernels of Mosaic, the language of Pallas on TPUs.
//!
//! A call of one carries JSON, in it, as base64, the kernel as MLIR bytecode of version 0, `"body": "..."`, and perhaps the
//! locations that were taken out of it, `"debug_locations": "..."`. The JSON counts byte by byte, but for these two values:
//! the body counts by its structure, and locations do not count.

use base64::{Engine as _, engine::general_purpose::STANDARD};

use super::{
    structure,
    table::{Sink, Table},
};
use crate::{
    artifact::Artifact,
    cursor::Cursor,
    error::Error,
    ir::{self, Argument, Op, Regions, Visitor, mask},
};

/// Changes with the rules by which a kernel is hashed.
const ALGORITHM: &[u8] = b"waystation kernel digest 1";

/// What a configuration comes to: its text around the two values, and the body's digest. `None` for one without a body.
///
/// # Errors
/// When the body cannot be followed.
pub(super) fn parts(text: &[u8]) -> Result<Option<Vec<Vec<u8>>>, Error> {
    let Some((before, body, after)) = value(text, b"\"body\"")? else {
        return Ok(None);
    };
    let body = STANDARD
        .decode(body)
        .map_err(|_| Error::unsupported("a body that is not base64"))?;
    let mut parts = vec![digest(&body)?.to_vec()];
    for around in [before, after] {
        match value(around, b"\"debug_locations\"")? {
            None => parts.push(around.to_vec()),
            Some((before, _, after)) => {
                parts.extend([b"locations".as_slice(), before, after].map(<[u8]>::to_vec));
            }
        }
    }
    Ok(Some(parts))
}

/// The text before a value, the value, the text behind it.
type Around<'t> = (&'t [u8], &'t [u8], &'t [u8]);

/// A member's value. It is a string of base64, so nothing in it has another meaning, and there is only one.
fn value<'t>(text: &'t [u8], name: &[u8]) -> Result<Option<Around<'t>>, Error> {
    let mut places = text
        .windows(name.len())
        .enumerate()
        .filter(|(_, window)| *window == name)
        .map(|(place, _)| place + name.len());
    let Some(place) = places.next() else {
        return Ok(None);
    };
    if places.next().is_some() {
        return Err(Error::unsupported("a member twice"));
    }
    let odd = || Error::unsupported("a member that is not a string of base64");
    let start = text[place..]
        .iter()
        .position(|byte| !matches!(byte, b' ' | b':'))
        .map(|skipped| place + skipped)
        .filter(|quote| text[*quote] == b'"')
        .ok_or_else(odd)?
        + 1;
    let length = text[start..]
        .iter()
        .position(|byte| !(byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'=')))
        .filter(|length| text[start + length] == b'"')
        .ok_or_else(odd)?;
    let (before, rest) = text.split_at(start);
    let (value, after) = rest.split_at(length);
    Ok(Some((before, value, after)))
}

/// The digest of a kernel's module.
fn digest(module: &[u8]) -> Result<[u8; 32], Error> {
    let artifact = Artifact::parse_kernel(module)?;
    if artifact.has_resources {
        return Err(Error::unsupported("resource blobs"));
    }
    let mut out = Sink::new(b"kernel");
    out.bytes(ALGORITHM);
    let mut kernel = Kernel {
        table: Table::new(&artifact),
        out,
    };
    ir::walk(&artifact, &mut kernel)?;
    Ok(kernel.out.finish())
}

/// Hashes the ops as they come. In version 0 all that an op has is in its dictionary of attributes, so ops of any dialect
/// can be followed.
struct Kernel<'s, 'a> {
    table: Table<'s, 'a>,
    out: Sink,
}

impl<'a> Visitor<'a> for Kernel<'_, 'a> {
    fn op(&mut self, op: &Op<'a>) -> Result<Regions, Error> {
        let at = &op.at;
        if op.mask & (mask::PROPERTIES | mask::USE_LIST_ORDERS) != 0 {
            return Err(at.damaged("op with a part that version 0 does not have"));
        }
        structure::op_begins(op, op.mask, &mut self.table, &mut self.out)?;
        structure::op_ends(op, &mut self.table, &mut self.out)?;
        Ok(Regions::Enter)
    }

    fn region(&mut self, blocks: usize) -> Result<(), Error> {
        structure::region(blocks, &mut self.out);
        Ok(())
    }

    fn block(&mut self, ops: usize, arguments: &[Argument], at: &Cursor<'a>) -> Result<(), Error> {
        structure::block(ops, arguments, at, &mut self.table, &mut self.out)
    }
}
