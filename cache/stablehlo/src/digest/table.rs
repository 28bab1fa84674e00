//! The digests of attributes and types, by what they stand for.

use std::fmt;

use sha2::{Digest as _, Sha256};

use crate::{
    artifact::{Artifact, Entry, is_bytecode, lookup},
    cursor::Cursor,
    error::Error,
    schema::{self, Family, Field},
};

/// How deep attributes and types may nest.
const MAX_DEPTH: usize = 100;

/// A hash in the making. Everything that goes in has a tag and, where its size varies, its length before it.
pub(super) struct Sink(Sha256);

impl Sink {
    pub(super) fn new(kind: &'static [u8]) -> Self {
        let mut sink = Self(Sha256::new());
        sink.bytes(kind);
        sink
    }

    pub(super) fn number(&mut self, tag: u8, number: u64) {
        let mut encoded = [tag; 9];
        encoded[1..].copy_from_slice(&number.to_le_bytes());
        self.0.update(encoded);
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.number(b'b', bytes.len() as u64);
        self.0.update(bytes);
    }

    pub(super) fn digest(&mut self, tag: u8, digest: &[u8; 32]) {
        self.0.update([tag]);
        self.0.update(digest);
    }

    pub(super) fn finish(self) -> [u8; 32] {
        self.0.finalize().into()
    }
}

/// How far an attribute or type has been hashed.
#[derive(Debug, Clone, Copy)]
pub(super) enum State {
    New,
    /// Being hashed: met again, it contains itself.
    Busy,
    Done(Node),
}

/// What an attribute or type comes to.
#[derive(Debug, Clone, Copy)]
pub(super) enum Node {
    Location,
    Digest([u8; 32]),
}

/// Which of the two tables.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
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
pub(super) struct Table<'s, 'a> {
    pub(super) artifact: &'s Artifact<'a>,
    attributes: Vec<State>,
    types: Vec<State>,
    /// Set when a string has been hashed that is a module of its own.
    pub(super) has_module_in_string: bool,
}

impl<'s, 'a> Table<'s, 'a> {
    pub(super) fn new(artifact: &'s Artifact<'a>) -> Self {
        Self {
            artifact,
            attributes: vec![State::New; artifact.attributes.len()],
            types: vec![State::New; artifact.types.len()],
            has_module_in_string: false,
        }
    }

    /// An attribute or type in a place where a location would be a mistake.
    pub(super) fn digest(
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
    pub(super) fn location(&mut self, index: u64, at: &Cursor<'_>) -> Result<(), Error> {
        match self.node(Kind::Attribute, index, at, 0)? {
            Node::Location => Ok(()),
            Node::Digest(_) => Err(at.damaged("attribute in place of a location")),
        }
    }

    fn slot(&mut self, kind: Kind, index: u64) -> Option<&mut State> {
        let states = match kind {
            Kind::Attribute => &mut self.attributes,
            Kind::Type => &mut self.types,
        };
        states.get_mut(usize::try_from(index).ok()?)
    }

    fn node(
        &mut self,
        kind: Kind,
        index: u64,
        at: &Cursor<'_>,
        depth: usize,
    ) -> Result<Node, Error> {
        let slot = self.slot(kind, index);
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
        if let Some(slot) = self.slot(kind, index) {
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

    pub(super) fn field(
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
            Field::String(string) => {
                self.has_module_in_string |= is_bytecode(string);
                out.bytes(string);
            }
            Field::Bytes(bytes) => out.bytes(bytes),
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
