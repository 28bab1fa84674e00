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
//! A Mosaic kernel is a module of its own in a call's configuration. It is followed too, as the module `kernel` says.
//!
//! What is not understood is refused, never skipped: a wrong match is worse than a missed one. Two checks catch an encoding
//! read wrongly, whose indices would be off: an op's location has to be a location, and nothing else may be one.

mod kernel;
mod structure;
mod table;

use self::table::{Sink, Table};
use crate::{
    artifact::{Artifact, lookup},
    cursor::Cursor,
    error::Error,
    ir::{self, Argument, Op, Regions, Visitor, mask},
    schema::{self, Family, Field},
};

/// Changes with the rules by which a program is hashed, so that digests of different rules never meet.
const ALGORITHM: &[u8] = b"waystation stablehlo digest 1";

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

/// What a program is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// SHA-256 over its structure.
    pub digest: [u8; 32],
    /// A part that is not understood and stands in the digest with its bytes, locations included: a kernel for a GPU, for
    /// example. Two programs with one digest are the same all the same.
    pub opaque: Option<String>,
}

/// The digest of a StableHLO portable artifact: SHA-256 over its structure.
///
/// # Errors
/// When the program has a construct that is not understood (by name) or must not be cached.
pub fn digest(program: &[u8]) -> Result<[u8; 32], Refusal> {
    identity(program).map(|identity| identity.digest)
}

/// The digest, and what in the program is not understood.
///
/// # Errors
/// As [`digest`].
pub fn identity(program: &[u8]) -> Result<Identity, Refusal> {
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

fn structural(program: &[u8]) -> Result<Identity, Refusal> {
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
    let mut program = Program {
        table: Table::new(&artifact),
        properties: vec![None; artifact.op_names.len()],
        out,
        uncacheable: None,
        opaque: None,
    };
    let walked = ir::walk(&artifact, &mut program);
    if let Some(construct) = program.uncacheable {
        return Err(Refusal::Uncacheable { construct });
    }
    walked?;
    Ok(Identity {
        digest: program.out.finish(),
        opaque: program.opaque,
    })
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

/// The custom call of a Mosaic kernel for TPUs, whose module is in the backend's configuration.
const MOSAIC: &[u8] = b"tpu_custom_call";

/// In the name of every custom call of a Python callback, `xla_ffi_python_cpu_callback` for one. The callback is named by a
/// number that the client's process gave it.
const CALLBACK: [&[u8]; 2] = [b"_python_", b"callback"];

/// Hashes the ops as they come.
struct Program<'s, 'a> {
    table: Table<'s, 'a>,
    /// [`schema::properties`] by the index of the op's name, which looks through a long list.
    properties: Vec<Option<&'static str>>,
    out: Sink,
    uncacheable: Option<String>,
    opaque: Option<String>,
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
        let known = self.properties.get(op.names).copied().flatten();
        let letters = match known {
            Some(letters) => letters,
            None => {
                let family = Family::of(op.dialect).filter(|_| op.registered);
                let letters = family.and_then(|family| schema::properties(family, op.name));
                let letters = letters.ok_or_else(|| Error::unsupported(name()))?;
                if let Some(slot) = self.properties.get_mut(op.names) {
                    *slot = Some(letters);
                }
                letters
            }
        };
        structure::op_begins(
            op,
            op.mask & !mask::USE_LIST_ORDERS,
            &mut self.table,
            &mut self.out,
        )?;
        match op.properties.clone() {
            Some(mut properties) => {
                let fields = schema::decode(self.table.artifact, letters, &mut properties)?;
                properties.finish("bytes behind an op's properties")?;
                let call = op.name.starts_with(b"custom_call_");
                let texts = if call {
                    self.texts(&fields)?
                } else {
                    Vec::new()
                };
                self.refuse_process_local(&texts)?;
                let kernels = texts.iter().any(|(_, text)| *text == MOSAIC);
                for (place, field) in fields.into_iter().enumerate() {
                    let text = texts.iter().find(|(at, _)| kernels && *at == place);
                    if text.is_some_and(|(_, text)| self.kernel(text)) {
                        continue;
                    }
                    self.table.field(field, &mut self.out, &properties, 0)?;
                }
                if std::mem::take(&mut self.table.has_module_in_string) {
                    let targets = texts.iter().map(|(_, text)| *text);
                    let target = targets.filter(|text| !text.is_empty() && text.len() < MAX_TARGET);
                    self.opaque.get_or_insert_with(|| {
                        let target = target.map(String::from_utf8_lossy).collect::<Vec<_>>();
                        format!("a kernel in a call of {}", target.join(", "))
                    });
                }
            }
            // An op whose properties are all absent has none at all.
            None if letters.contains('a') => return Err(at.damaged("op without its properties")),
            None => {}
        }
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

impl<'a> Program<'_, 'a> {
    /// Hashes a Mosaic kernel's configuration by what it means. False where it has to stand as it is.
    fn kernel(&mut self, text: &[u8]) -> bool {
        match kernel::parts(text) {
            Ok(None) => false,
            Ok(Some(parts)) => {
                self.out.number(b'k', parts.len() as u64);
                parts.iter().for_each(|part| self.out.bytes(part));
                true
            }
            Err(error) => {
                self.opaque
                    .get_or_insert_with(|| format!("a Mosaic kernel ({error})"));
                false
            }
        }
    }

    /// The strings among a call's attributes and their places: its target, the backend's configuration, symbols.
    fn texts(&self, properties: &[Field<'a>]) -> Result<Vec<(usize, &'a [u8])>, Error> {
        let artifact = self.table.artifact;
        let mut texts = Vec::new();
        for (place, field) in properties.iter().enumerate() {
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
            if let [Field::String(text)] = schema::decode(artifact, "s", &mut content)?[..] {
                texts.push((place, text));
            }
        }
        Ok(texts)
    }

    /// Refuses a call whose target is a thing of the client's process: a Python callback, named by a number, or a partitioner,
    /// named by the address of a Python object. The bytes say nothing of what would be called.
    fn refuse_process_local(&mut self, texts: &[(usize, &[u8])]) -> Result<(), Error> {
        for (_, text) in texts {
            // The target, the backend's configuration or a symbol; the names are not those of anything else.
            if text.len() < MAX_TARGET && names_process_local(text) {
                self.uncacheable = Some(String::from_utf8_lossy(text).into_owned());
                return Err(Error::unsupported("a call into the client's process"));
            }
        }
        Ok(())
    }
}
