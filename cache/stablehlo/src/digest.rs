//! A digest of a whole program that does not depend on where in a source file it was written.
//!
//! Two clients that trace the same function from different directories send different bytes: the paths, line numbers and names
//! of scopes and arguments are in the artifact as locations, and everything after them shifts. This digest follows the
//! structure instead. Every number of a string, attribute, type or op name is replaced by what it stands for, locations are left
//! out, and tables are hashed only through what uses them. The names of the module, its functions, their results, and every
//! attribute stay in: the first can be read in profiles and the last can change what is compiled.
//!
//! Left out besides locations: the producer's name, the order and unused entries of tables, use-list orders.
//!
//! What is not understood is refused, never skipped: a wrong match is worse than a missed one. Two checks catch an encoding
//! read wrongly, whose indices would be off: an op's location has to be a location, and nothing else may be one.

use std::fmt;

use sha2::{Digest as _, Sha256};

use crate::{
    artifact::{Artifact, Entry, lookup},
    cursor::Cursor,
    error::Error,
    ir::{self, Argument, Op, Regions, Visitor, mask},
    schema::{self, Family, Field},
};

/// Changes with the rules by which a program is hashed, so that digests of different rules never meet.
const ALGORITHM: &[u8] = b"waystation stablehlo digest 1";

/// How deep attributes and types may nest.
const MAX_DEPTH: usize = 100;

/// Why a program has no digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The program cannot be followed. Its bytes still identify it.
    #[error("program has no structural digest")]
    Unreadable(#[from] Error),
    /// The program means something only in the process that sent it. Not even its bytes identify it, so what is compiled from
    /// it must not be kept.
    #[error(
        "program calls {construct}, which only the process that sent it knows; it cannot be cached"
    )]
    Uncacheable {
        /// The custom call's target.
        construct: String,
    },
}

impl Refusal {
    /// True when the program's bytes can still serve as a key.
    pub fn allows_raw_key(&self) -> bool {
        matches!(self, Self::Unreadable(_))
    }
}

/// The digest of a StableHLO portable artifact: SHA-256 over its structure.
///
/// # Errors
/// When the program has a construct that is not understood (by name) or must not be cached.
pub fn digest(program: &[u8]) -> Result<[u8; 32], Refusal> {
    structural(program).map_err(|refusal| match refusal {
        // What was not followed may hide such a call; the name of its target is in the bytes all the same.
        Refusal::Unreadable(_) if names_process_local(program) => {
            let construct =
                "a Python callback or partitioner, in a part that is not understood,".to_owned();
            Refusal::Uncacheable { construct }
        }
        other => other,
    })
}

fn structural(program: &[u8]) -> Result<[u8; 32], Refusal> {
    let artifact = Artifact::parse(program)?;
    if artifact.has_resources {
        return Err(Error::unsupported("resource blobs").into());
    }
    let mut out = Sink::new(b"program");
    out.bytes(ALGORITHM);
    for dialect in artifact
        .dialects
        .iter()
        .filter(|dialect| dialect.version.is_some())
    {
        out.bytes(dialect.name);
        out.bytes(dialect.version.unwrap_or_default());
    }
    let table = Table {
        artifact: &artifact,
        attributes: vec![State::New; artifact.attributes.len()],
        types: vec![State::New; artifact.types.len()],
    };
    let mut program = Program {
        table,
        out,
        uncacheable: None,
    };
    let walked = ir::walk(&artifact, &mut program);
    if let Some(construct) = program.uncacheable {
        return Err(Refusal::Uncacheable { construct });
    }
    walked?;
    Ok(program.out.finish())
}

/// True when bytes name a target that means something only in the client's process.
fn names_process_local(bytes: &[u8]) -> bool {
    let contains = |name: &[u8]| bytes.windows(name.len()).any(|window| window == name);
    contains(PARTITIONER) || CALLBACK.iter().all(|part| contains(part))
}

/// The custom call that asks a Python object of the client to partition it. The object is named by its address.
const PARTITIONER: &[u8] = b"CustomSPMDPartitioning";

/// A longer string is no target's name but, say, a kernel.
const MAX_TARGET: usize = 100;

/// In the name of every custom call of a Python callback, `xla_ffi_python_cpu_callback` for one. The callback is named by a
/// number that the client's process gave it.
const CALLBACK: [&[u8]; 2] = [b"_python_", b"callback"];

/// A hash in the making. Everything that goes in has a tag and, where its size varies, its length before it.
struct Sink(Sha256);

impl Sink {
    fn new(kind: &'static [u8]) -> Self {
        let mut sink = Self(Sha256::new());
        sink.bytes(kind);
        sink
    }

    fn number(&mut self, tag: u8, number: u64) {
        let mut encoded = [tag; 9];
        encoded[1..].copy_from_slice(&number.to_le_bytes());
        self.0.update(encoded);
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.number(b'b', bytes.len() as u64);
        self.0.update(bytes);
    }

    fn digest(&mut self, tag: u8, digest: &[u8; 32]) {
        self.0.update([tag]);
        self.0.update(digest);
    }

    fn finish(self) -> [u8; 32] {
        self.0.finalize().into()
    }
}

/// How far an attribute or type has been hashed.
#[derive(Debug, Clone, Copy)]
enum State {
    New,
    /// Being hashed: met again, it contains itself.
    Busy,
    Done(Node),
}

/// What an attribute or type comes to.
#[derive(Debug, Clone, Copy)]
enum Node {
    Location,
    Digest([u8; 32]),
}

/// Which of the two tables.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Attribute,
    Type,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::Attribute {
            "an attribute"
        } else {
            "a type"
        })
    }
}

/// The digests of attributes and types, each made once.
struct Table<'s, 'a> {
    artifact: &'s Artifact<'a>,
    attributes: Vec<State>,
    types: Vec<State>,
}

impl<'a> Table<'_, 'a> {
    /// An attribute or type in a place where a location would be a mistake.
    fn digest(
        &mut self,
        kind: Kind,
        index: u64,
        at: &Cursor<'_>,
        depth: usize,
    ) -> Result<[u8; 32], Error> {
        match self.node(kind, index, at, depth)? {
            Node::Digest(digest) => Ok(digest),
            Node::Location => Err(at.damaged("location in place of an attribute")),
        }
    }

    /// Checks that an attribute is a location.
    fn location(&mut self, index: u64, at: &Cursor<'_>) -> Result<(), Error> {
        match self.node(Kind::Attribute, index, at, 0)? {
            Node::Location => Ok(()),
            Node::Digest(_) => Err(at.damaged("attribute in place of a location")),
        }
    }

    fn node(
        &mut self,
        kind: Kind,
        index: u64,
        at: &Cursor<'_>,
        depth: usize,
    ) -> Result<Node, Error> {
        let states = if kind == Kind::Attribute {
            &mut self.attributes
        } else {
            &mut self.types
        };
        let slot = usize::try_from(index)
            .ok()
            .and_then(|index| states.get_mut(index));
        let slot = slot.ok_or_else(|| at.damaged("attribute or type index out of range"))?;
        match *slot {
            State::Done(node) => return Ok(node),
            State::Busy => return Err(at.damaged("attribute or type that contains itself")),
            State::New => *slot = State::Busy,
        }
        if depth == MAX_DEPTH {
            return Err(Error::unsupported(format!(
                "attributes or types nested deeper than {MAX_DEPTH}"
            )));
        }
        let node = self.make(kind, index, at, depth + 1)?;
        let states = if kind == Kind::Attribute {
            &mut self.attributes
        } else {
            &mut self.types
        };
        if let Some(slot) = usize::try_from(index)
            .ok()
            .and_then(|index| states.get_mut(index))
        {
            *slot = State::Done(node);
        }
        Ok(node)
    }

    fn make(
        &mut self,
        kind: Kind,
        index: u64,
        at: &Cursor<'_>,
        depth: usize,
    ) -> Result<Node, Error> {
        let artifact = self.artifact;
        let entries = if kind == Kind::Attribute {
            &artifact.attributes
        } else {
            &artifact.types
        };
        let entry = lookup(entries, index)
            .ok_or_else(|| at.damaged("attribute or type index out of range"))?;
        let dialect = artifact.dialects[entry.dialect].name;
        let mut out = Sink::new(if kind == Kind::Attribute {
            b"attribute"
        } else {
            b"type"
        });
        out.bytes(dialect);
        if !entry.binary {
            return assembly(entry, out);
        }
        let unknown = |what: String| {
            Error::unsupported(format!(
                "{kind} of dialect {} {what}",
                String::from_utf8_lossy(dialect)
            ))
        };
        let family = Family::of(dialect).ok_or_else(|| unknown("(dialect not read)".into()))?;
        let mut content = entry.content.clone();
        let code = content.varint()?;
        if kind == Kind::Attribute && schema::is_location(family, code) {
            return Ok(Node::Location);
        }
        let letters = match kind {
            Kind::Attribute => schema::attribute(family, code),
            Kind::Type => schema::type_fields(family, code),
        };
        let letters = letters.ok_or_else(|| unknown(format!("with code {code}")))?;
        out.number(b'c', code);
        for field in schema::decode(artifact, letters, &mut content)? {
            self.field(field, &mut out, &content, depth)?;
        }
        content.finish("bytes behind an attribute or type")?;
        Ok(Node::Digest(out.finish()))
    }

    fn field(
        &mut self,
        field: Field<'a>,
        out: &mut Sink,
        at: &Cursor<'_>,
        depth: usize,
    ) -> Result<(), Error> {
        match field {
            Field::Attribute(index) => {
                out.digest(b'a', &self.digest(Kind::Attribute, index, at, depth)?)
            }
            Field::Optional(None) => out.number(b'o', 0),
            Field::Optional(Some(index)) => {
                out.number(b'o', 1);
                out.digest(b'a', &self.digest(Kind::Attribute, index, at, depth)?);
            }
            Field::Type(index) => out.digest(b't', &self.digest(Kind::Type, index, at, depth)?),
            Field::String(string) | Field::Bytes(string) => out.bytes(string),
            Field::Number(number) => out.number(b'v', number),
            Field::Signed(number) => out.number(b'z', number as u64),
            Field::Attributes(list) => {
                out.number(b'A', list.len() as u64);
                for index in list {
                    out.digest(b'a', &self.digest(Kind::Attribute, index, at, depth)?);
                }
            }
            Field::Types(list) => {
                out.number(b'T', list.len() as u64);
                for index in list {
                    out.digest(b't', &self.digest(Kind::Type, index, at, depth)?);
                }
            }
            Field::Numbers(list) => {
                out.number(b'V', list.len() as u64);
                list.into_iter().for_each(|number| out.number(b'v', number));
            }
            Field::Signeds(list) => {
                out.number(b'Z', list.len() as u64);
                list.into_iter()
                    .for_each(|number| out.number(b'z', number as u64));
            }
            Field::Strings(list) => {
                out.number(b'S', list.len() as u64);
                list.into_iter().for_each(|string| out.bytes(string));
            }
            Field::Pairs(list) => {
                out.number(b'P', list.len() as u64);
                for (name, value) in list {
                    out.digest(b'a', &self.digest(Kind::Attribute, name, at, depth)?);
                    match self.node(Kind::Attribute, value, at, depth)? {
                        Node::Digest(digest) => out.digest(b'a', &digest),
                        Node::Location => out.number(b'l', 0),
                    }
                }
            }
        }
        Ok(())
    }
}

/// An attribute or type in text form, which dialects without an encoding of their own have.
fn assembly(entry: &Entry<'_>, mut out: Sink) -> Result<Node, Error> {
    let text = entry.content.clone().rest();
    if text.starts_with(b"loc(") {
        return Ok(Node::Location);
    }
    for part in ["loc(", "distinct[", "dense_resource<"] {
        if text
            .windows(part.len())
            .any(|window| window == part.as_bytes())
        {
            return Err(Error::unsupported(format!(
                "`{part}` inside an attribute in text form"
            )));
        }
    }
    out.number(b'x', 0);
    out.bytes(text);
    Ok(Node::Digest(out.finish()))
}

/// Hashes the ops as they come.
struct Program<'s, 'a> {
    table: Table<'s, 'a>,
    out: Sink,
    uncacheable: Option<String>,
}

impl<'a> Visitor<'a> for Program<'_, 'a> {
    fn op(&mut self, op: &Op<'a>) -> Result<Regions, Error> {
        let at = &op.at;
        let name = || {
            let (dialect, name) = (
                String::from_utf8_lossy(op.dialect),
                String::from_utf8_lossy(op.name),
            );
            format!("the op {dialect}.{name}")
        };
        let family = Family::of(op.dialect).filter(|_| op.registered);
        let family = family.ok_or_else(|| Error::unsupported(name()))?;
        let letters =
            schema::properties(family, op.name).ok_or_else(|| Error::unsupported(name()))?;
        self.table.location(op.location, at)?;
        self.out
            .number(b'O', (op.mask & !mask::USE_LIST_ORDERS).into());
        self.out.bytes(op.dialect);
        self.out.bytes(op.name);
        if let Some(attributes) = op.attributes {
            self.out.digest(
                b'd',
                &self.table.digest(Kind::Attribute, attributes, at, 0)?,
            );
        }
        match op.properties.clone() {
            Some(mut properties) => {
                let fields = schema::decode(self.table.artifact, letters, &mut properties)?;
                properties.finish("bytes behind an op's properties")?;
                if op.name.starts_with(b"custom_call_") {
                    self.refuse_process_local(&fields)?;
                }
                for field in fields {
                    self.table.field(field, &mut self.out, &properties, 0)?;
                }
            }
            // An op whose properties are all absent has none at all.
            None if letters.contains('a') => return Err(at.damaged("op without its properties")),
            None => {}
        }
        self.out.number(b'r', op.result_types.len() as u64);
        for ty in &op.result_types {
            self.out
                .digest(b't', &self.table.digest(Kind::Type, *ty, at, 0)?);
        }
        for (tag, numbers) in [(b'p', &op.operands), (b's', &op.successors)] {
            self.out.number(tag, numbers.len() as u64);
            numbers
                .iter()
                .for_each(|number| self.out.number(b'v', *number));
        }
        self.out.number(b'g', op.regions as u64);
        self.out.number(b'i', op.isolated.into());
        Ok(Regions::Enter)
    }

    fn region(&mut self, blocks: usize) -> Result<(), Error> {
        self.out.number(b'G', blocks as u64);
        Ok(())
    }

    fn block(&mut self, ops: usize, arguments: &[Argument], at: &Cursor<'a>) -> Result<(), Error> {
        self.out.number(b'B', ops as u64);
        self.out.number(b'n', arguments.len() as u64);
        for argument in arguments {
            self.out
                .digest(b't', &self.table.digest(Kind::Type, argument.ty, at, 0)?);
            if let Some(location) = argument.location {
                self.table.location(location, at)?;
            }
        }
        Ok(())
    }
}

impl<'a> Program<'_, 'a> {
    /// Refuses a call whose target is a thing of the client's process: a Python callback, named by a number, or a partitioner,
    /// named by the address of a Python object. The bytes say nothing of what would be called.
    fn refuse_process_local(&mut self, properties: &[Field<'a>]) -> Result<(), Error> {
        let artifact = self.table.artifact;
        for field in properties {
            let Field::Attribute(index) = field else {
                continue;
            };
            let Some(entry) = lookup(&artifact.attributes, *index) else {
                continue;
            };
            if !entry.binary || artifact.dialects[entry.dialect].name != b"vhlo" {
                continue;
            }
            let mut content = entry.content.clone();
            if schema::attribute(Family::Vhlo, content.varint()?) != Some("s") {
                continue;
            }
            let [Field::String(text)] = schema::decode(artifact, "s", &mut content)?[..] else {
                continue;
            };
            // The target, the backend's configuration or a symbol; the names are not those of anything else.
            if text.len() < MAX_TARGET && names_process_local(text) {
                self.uncacheable = Some(String::from_utf8_lossy(text).into_owned());
                return Err(Error::unsupported("a call into the client's process"));
            }
        }
        Ok(())
    }
}
