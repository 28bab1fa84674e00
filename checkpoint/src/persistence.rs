//! The persistence plugin programs: JSON texts by which a client asks the backend itself to write or read arrays.
//!
//! A client with `ENABLE_PATHWAYS_PERSISTENCE=1` compiles such a text as an IFRT `PluginProgram` and executes it, with the
//! arrays to write as arguments or the arrays read as results. As sent by pathwaysutils 0.1.11 and 0.1.13 and by Orbax
//! 0.12.8, a text is one JSON object with one member:
//!
//! | member | value |
//! |---|---|
//! | `persistenceWriteRequest` | one write item |
//! | `persistenceReadRequest` | one read item |
//! | `bulk_persistence_write_request` | `{"write_requests": [write item, ...]}` |
//! | `bulk_persistence_read_request` | `{"read_requests": [read item, ...]}` |
//!
//! An item has `b64_location`, `b64_name`, `b64_hlo_sharding_string` (each base64; the last of a serialized `OpSharding`,
//! which is the empty string for a replicated array), `devices.device_ids` and `timeout {seconds, nanos}`. A write item has
//! `shape` as a list and no dtype: the buffers have one. A read item has `shape {xla_primitive_type_str, dimensions}`.
//!
//! # Locations and names
//! The location is the client's to choose, as every path a program writes to is, and is not judged here. The name becomes a
//! path below it, in which `/` makes a real subdirectory, as TensorStore has it: `a/b.c` is the array in `LOCATION/a/b.c`.
//! No name may leave the location or be read in two ways, so absolute names, `.` and `..` segments, empty segments and
//! control characters are refused. The empty name is taken: it is the array at the location itself, which Orbax uses when
//! the whole tree is one array.

mod wire;

#[cfg(test)]
mod tests;

use std::time::Duration;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use prost::Message as _;
use waystation_proto::xla::{OpSharding, PrimitiveType};

use crate::{Error, Result, sharding::Sharding};

/// The longest program text taken, in bytes: room for 10,000 arrays over some thousand devices.
pub const MAX_PROGRAM_BYTES: usize = 256 << 20;
/// The longest location or name taken, in bytes: Linux' limit for a path.
pub const MAX_PATH_BYTES: usize = 4096;

/// What a persistence program asks for. The items are in the order of the program's arguments or results.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    /// Write the arrays given as arguments.
    Write(Vec<WriteItem>),
    /// Read arrays and give them as results.
    Read(Vec<ReadItem>),
}

/// One array to write.
#[derive(Debug, Clone, PartialEq)]
pub struct WriteItem {
    /// The directory or prefix, as the client wrote it: an absolute path or a URL.
    pub location: String,
    /// The path of the array below the location; may be empty and may contain `/`.
    pub name: String,
    /// The global dimensions, in elements.
    pub dims: Vec<i64>,
    /// How the array lies over `device_ids`; known to make a [`Sharding`] that fits `dims`.
    pub sharding: OpSharding,
    /// Global device ids in the sharding's order, at least one.
    pub device_ids: Vec<i32>,
    /// How long the client waits, from when it sent the request; `None` when it did not say.
    pub timeout: Option<Duration>,
}

/// One array to read.
#[derive(Debug, Clone, PartialEq)]
pub struct ReadItem {
    /// The directory or prefix, as the client wrote it: an absolute path or a URL.
    pub location: String,
    /// The path of the array below the location; may be empty and may contain `/`.
    pub name: String,
    /// The element type the result has.
    pub dtype: PrimitiveType,
    /// The global dimensions the result has, in elements. What is stored may differ: that is for the reader to find.
    pub dims: Vec<i64>,
    /// How the array lies over `device_ids`; known to make a [`Sharding`] that fits `dims`.
    pub sharding: OpSharding,
    /// Global device ids in the sharding's order, at least one.
    pub device_ids: Vec<i32>,
    /// How long the client waits, from when it sent the request; `None` when it did not say.
    pub timeout: Option<Duration>,
}

/// Reads the text of a plugin program.
///
/// # Errors
/// The text of every error contains `Bad PluginProgram`, by which clients tell a refused program from a broken backend:
/// [`Error::UnsupportedPluginProgram`] for a program of another kind, [`Error::BadPluginProgram`] for a persistence program
/// that is malformed, names a path that is not taken, or writes one array twice.
pub fn parse(program: &str) -> Result<Request> {
    if program.len() > MAX_PROGRAM_BYTES {
        return bad(format!(
            "{} bytes of text, at most {MAX_PROGRAM_BYTES} are taken",
            program.len()
        ));
    }
    let (member, body) = wire::open(program)?;
    match member.as_str() {
        "persistenceWriteRequest" => write(&member, vec![wire::decode(&member, body)?]),
        "persistenceReadRequest" => read(&member, vec![wire::decode(&member, body)?]),
        "bulk_persistence_write_request" => write(
            &member,
            wire::decode::<wire::BulkWrite>(&member, body)?.write_requests,
        ),
        "bulk_persistence_read_request" => read(
            &member,
            wire::decode::<wire::BulkRead>(&member, body)?.read_requests,
        ),
        _ => Err(Error::UnsupportedPluginProgram {
            request: shown(&member),
        }),
    }
}

/// Whether clients of Orbax can ask for arrays of an element type. Those of other types they save and cannot restore through
/// a persistence program: their only table of type names has these.
#[must_use]
pub fn is_asked_for(dtype: PrimitiveType) -> bool {
    use PrimitiveType::{Bf16, F32, F64, S8, S16, S32, S64, U8, U16, U32, U64};
    matches!(
        dtype,
        Bf16 | F32 | F64 | S8 | S16 | S32 | S64 | U8 | U16 | U32 | U64
    )
}

/// Checks the path of an array below its location, as the module's documentation says.
///
/// # Errors
/// The reason, as a phrase about the name.
pub fn check_name(name: &str) -> std::result::Result<(), &'static str> {
    if name.is_empty() {
        return Ok(());
    }
    if name.len() > MAX_PATH_BYTES {
        return Err("is too long");
    }
    if name.starts_with('/') {
        return Err("is absolute");
    }
    if name.chars().any(char::is_control) {
        return Err("has a control character");
    }
    for segment in name.split('/') {
        match segment {
            "" => return Err("has an empty path segment"),
            "." | ".." => return Err("has a '.' or '..' path segment"),
            _ => {}
        }
    }
    Ok(())
}

fn write(member: &str, items: Vec<wire::Write>) -> Result<Request> {
    let mut seen = std::collections::HashSet::with_capacity(items.len());
    let mut out = Vec::with_capacity(items.len());
    for (index, item) in items.into_iter().enumerate() {
        let at = At { member, index };
        let common = at.common(&item, &item.shape)?;
        if !seen.insert((common.location.clone(), common.name.clone())) {
            return at.bad(format!("array {:?} is written twice", common.name));
        }
        let Common {
            location,
            name,
            sharding,
            timeout,
        } = common;
        let device_ids = item.devices.device_ids;
        out.push(WriteItem {
            location,
            name,
            dims: item.shape,
            sharding,
            device_ids,
            timeout,
        });
    }
    Ok(Request::Write(out))
}

fn read(member: &str, items: Vec<wire::Read>) -> Result<Request> {
    let mut out = Vec::with_capacity(items.len());
    for (index, item) in items.into_iter().enumerate() {
        let at = At { member, index };
        let Common {
            location,
            name,
            sharding,
            timeout,
        } = at.common(&item, &item.shape.dimensions)?;
        let dtype = at.dtype(&item.shape.xla_primitive_type_str)?;
        let device_ids = item.devices.device_ids;
        out.push(ReadItem {
            location,
            name,
            dtype,
            dims: item.shape.dimensions,
            sharding,
            device_ids,
            timeout,
        });
    }
    Ok(Request::Read(out))
}

struct Common {
    location: String,
    name: String,
    sharding: OpSharding,
    timeout: Option<Duration>,
}

/// The item being read, for messages.
struct At<'a> {
    member: &'a str,
    index: usize,
}

impl At<'_> {
    fn common<S>(&self, item: &wire::Item<S>, dims: &[i64]) -> Result<Common> {
        let name = self.text("b64_name", &item.b64_name)?;
        if let Err(reason) = check_name(&name) {
            return self.bad(format!("the array name {:?} {reason}", shown(&name)));
        }
        let location = self.text("b64_location", &item.b64_location)?;
        if location.is_empty()
            || location.len() > MAX_PATH_BYTES
            || location.chars().any(char::is_control)
        {
            return self.bad(format!(
                "the location {:?} of array {name:?} is not a path or a URL",
                shown(&location)
            ));
        }

        let bytes = self.base64("b64_hlo_sharding_string", &item.b64_hlo_sharding_string)?;
        let sharding = OpSharding::decode(bytes.as_slice()).or_else(|error| {
            self.bad(format!(
                "the sharding of array {name:?} is not an OpSharding: {error}"
            ))
        })?;
        Sharding::new(&sharding, item.devices.device_ids.len())
            .and_then(|sharding| sharding.shard_dims(dims))
            .or_else(|error| self.bad(format!("array {name:?}: {error}")))?;

        let timeout = item
            .timeout
            .as_ref()
            .map(|timeout| self.timeout(timeout))
            .transpose()?;
        Ok(Common {
            location,
            name,
            sharding,
            timeout,
        })
    }

    fn timeout(&self, timeout: &wire::Timeout) -> Result<Duration> {
        match (u64::try_from(timeout.seconds), u32::try_from(timeout.nanos)) {
            (Ok(seconds), Ok(nanos)) if nanos < 1_000_000_000 => Ok(Duration::new(seconds, nanos)),
            _ => self.bad(format!(
                "a timeout of {} s and {} ns",
                timeout.seconds, timeout.nanos
            )),
        }
    }

    /// An XLA type name as in `PrimitiveType`, in any case. The clients send eleven of them; all that have elements are taken.
    fn dtype(&self, name: &str) -> Result<PrimitiveType> {
        use PrimitiveType::{Buffer, Invalid, OpaqueType, Token, Tuple};
        match PrimitiveType::from_str_name(&name.to_ascii_uppercase()) {
            Some(Invalid | Tuple | OpaqueType | Token | Buffer) | None => {
                self.bad(format!("unknown element type {:?}", shown(name)))
            }
            Some(dtype) => Ok(dtype),
        }
    }

    fn text(&self, field: &str, text: &str) -> Result<String> {
        let bytes = self.base64(field, text)?;
        String::from_utf8(bytes).or_else(|_| self.bad(format!("{field} is not UTF-8")))
    }

    fn base64(&self, field: &str, text: &str) -> Result<Vec<u8>> {
        BASE64_STANDARD
            .decode(text)
            .or_else(|error| self.bad(format!("{field} is not base64: {error}")))
    }

    fn bad<T>(&self, reason: String) -> Result<T> {
        bad(format!("{} item {}: {reason}", self.member, self.index))
    }
}

/// Text from outside, short enough for a message.
fn shown(text: &str) -> String {
    const MOST: usize = 200;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

fn bad<T>(reason: String) -> Result<T> {
    Err(Error::BadPluginProgram { reason })
}
