//! The types of a program's `main`: what it takes and gives, in global shapes.

mod types;

use std::collections::BTreeMap;

use self::types::Types;
pub(crate) use self::types::{is_tensor, type_entry};

use crate::{
    artifact::{Artifact, lookup},
    cursor::Cursor,
    error::Error,
    ir::{self, Op, Regions, Visitor},
    schema::{self, Family, Field},
};

/// What a program takes and gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// The module's symbol name, "jit_f"; empty when it has none.
    pub module_name: String,
    /// The parameters of `main` in order.
    pub parameters: Vec<Value>,
    /// The results of `main` in order.
    pub results: Vec<Value>,
    /// True when the program carries Shardy's dialect itself, false when shardings can only be in attributes.
    pub has_sdy: bool,
}

/// One parameter or result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Value {
    /// Its type.
    pub ty: ValueType,
    /// Its attributes by name: `tf.aliasing_output`, `jax.buffer_donor`, `mhlo.sharding`, `mhlo.layout_mode`,
    /// `mhlo.memory_kind`, `sdy.sharding`, `jax.result_info` and others.
    pub attributes: BTreeMap<String, Attribute>,
}

impl Value {
    /// True when the client gives the argument up: it is aliased with a result or free for any.
    pub fn is_donated(&self) -> bool {
        self.attributes.contains_key("tf.aliasing_output")
            || self.attributes.get("jax.buffer_donor") == Some(&Attribute::Bool(true))
    }

    /// A string attribute.
    pub fn text(&self, name: &str) -> Option<&str> {
        match self.attributes.get(name)? {
            Attribute::String(text) => Some(text),
            _ => None,
        }
    }
}

/// The value of an attribute, as far as it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Attribute {
    /// A string, with what is not UTF-8 replaced.
    String(String),
    /// An integer of up to 64 bits.
    Integer(i64),
    /// A boolean.
    Bool(bool),
    /// Anything else, for example a sharding of the sdy dialect.
    Other,
}

/// The type of a parameter or result.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ValueType {
    /// An array.
    Tensor(TensorType),
    /// An ordering of side effects, without bytes.
    Token,
    /// A tuple of the old way to return more than one value.
    Tuple(Vec<ValueType>),
}

/// An array's type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorType {
    /// The type of an element.
    pub element: ElementType,
    /// Global dimensions, major to minor; `None` where the size is not known before the program runs.
    pub dims: Vec<Option<u64>>,
}

/// The type of an array's elements, named as MLIR names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it: signed, unsigned, float formats by exponent and mantissa bits, complex")]
#[non_exhaustive]
#[rustfmt::skip]
pub enum ElementType {
    Bool, Si2, Si4, Si8, Si16, Si32, Si64, Ui2, Ui4, Ui8, Ui16, Ui32, Ui64, F4E2M1FN, F6E2M3FN, F6E3M2FN, F8E3M4, F8E4M3, F8E4M3FN,
    F8E4M3FNUZ, F8E4M3B11FNUZ, F8E5M2, F8E5M2FNUZ, F8E8M0FNU, BF16, F16, F32, F64, ComplexF32, ComplexF64,
}

/// Reads the signature of the function `main` of a StableHLO portable artifact.
///
/// Bodies are not looked at. The shapes are global: a partitioned program's `main` names whole arrays.
///
/// # Errors
/// When the bytes are not an artifact, are damaged, have no such function, or have a type that is not read, by name.
pub fn main_signature(program: &[u8]) -> Result<Signature, Error> {
    let artifact = Artifact::parse(program)?;
    let mut search = Search {
        artifact: &artifact,
        module_name: String::new(),
        main: None,
    };
    ir::walk(&artifact, &mut search)?;
    let module_name = search.module_name;
    let main = search.main.ok_or(Error::NoMain)?;
    let mut types = Types::new(&artifact);
    let (parameters, results) = types.function(main.function_type)?;
    Ok(Signature {
        module_name,
        parameters: values(&artifact, parameters, main.parameter_attributes)?,
        results: values(&artifact, results, main.result_attributes)?,
        has_sdy: artifact.has_dialect(b"sdy"),
    })
}

/// The attribute indices of `main`.
struct Main {
    function_type: u64,
    parameter_attributes: u64,
    result_attributes: u64,
}

struct Search<'s, 'a> {
    artifact: &'s Artifact<'a>,
    module_name: String,
    main: Option<Main>,
}

impl<'a> Visitor<'a> for Search<'_, 'a> {
    fn op(&mut self, op: &Op<'a>) -> Result<Regions, Error> {
        let artifact = self.artifact;
        if op.is("builtin", "module") {
            let properties = properties(artifact, op)?;
            if let [Field::Optional(Some(name)), ..] = properties.as_slice() {
                self.module_name = text(artifact, *name, &op.at)?.unwrap_or_default();
            }
            return Ok(Regions::Enter);
        }
        if op.is("vhlo", "func_v1") && self.main.is_none() {
            // In the order of their names: arg_attrs, function_type, res_attrs, sym_name, sym_visibility.
            let properties = properties(artifact, op)?;
            let indices = properties.iter().map(|field| match field {
                Field::Attribute(index) => *index,
                _ => u64::MAX,
            });
            if let [parameter_attributes, ty, result_attributes, name, _] =
                indices.collect::<Vec<_>>()[..]
                && text(artifact, name, &op.at)?.as_deref() == Some("main")
            {
                let Entry { fields, .. } = attribute(artifact, ty, &op.at)?.ok_or(Error::NoMain)?;
                let [Field::Type(function_type)] = fields[..] else {
                    return Err(Error::NoMain);
                };
                self.main = Some(Main {
                    function_type,
                    parameter_attributes,
                    result_attributes,
                });
            }
        }
        Ok(Regions::Skip)
    }
}

fn properties<'a>(artifact: &Artifact<'a>, op: &Op<'a>) -> Result<Vec<Field<'a>>, Error> {
    let letters = Family::of(op.dialect)
        .and_then(|family| schema::properties(family, op.name))
        .unwrap_or_default();
    let Some(mut properties) = op.properties.clone() else {
        return Ok(Vec::new());
    };
    let fields = schema::decode(artifact, letters, &mut properties)?;
    properties.finish("bytes behind an op's properties")?;
    Ok(fields)
}

/// A decoded attribute or type.
struct Entry<'a> {
    family: Family,
    code: u64,
    fields: Vec<Field<'a>>,
}

/// `None` for an attribute that is text, of another dialect or of an unknown kind.
fn attribute<'a>(
    artifact: &Artifact<'a>,
    index: u64,
    at: &Cursor<'_>,
) -> Result<Option<Entry<'a>>, Error> {
    let entry = lookup(&artifact.attributes, index)
        .ok_or_else(|| at.damaged("attribute index out of range"))?;
    let Some(family) = Family::of(artifact.dialects[entry.dialect].name).filter(|_| entry.binary)
    else {
        return Ok(None);
    };
    let mut content = entry.content.clone();
    let code = content.varint()?;
    let Some(letters) = schema::attribute(family, code) else {
        return Ok(None);
    };
    let fields = schema::decode(artifact, letters, &mut content)?;
    content.finish("bytes behind an attribute")?;
    Ok(Some(Entry {
        family,
        code,
        fields,
    }))
}

/// The text of a string attribute, of either dialect.
fn text(artifact: &Artifact<'_>, index: u64, at: &Cursor<'_>) -> Result<Option<String>, Error> {
    Ok(match attribute(artifact, index, at)? {
        Some(Entry { fields, .. }) => match fields.as_slice() {
            [Field::String(text)] => Some(String::from_utf8_lossy(text).into_owned()),
            _ => None,
        },
        None => None,
    })
}

/// Puts types and attributes together. The attributes are an array of dictionaries, empty when nobody has any.
fn values(
    artifact: &Artifact<'_>,
    types: Vec<ValueType>,
    attributes: u64,
) -> Result<Vec<Value>, Error> {
    let at = &artifact.ir;
    let dictionaries = match attribute(artifact, attributes, at)?.map(|entry| entry.fields) {
        Some(fields) => match <[Field<'_>; 1]>::try_from(fields) {
            Ok([Field::Attributes(dictionaries)]) => dictionaries,
            _ => {
                return Err(Error::unsupported(
                    "argument attributes of a function that are not an array",
                ));
            }
        },
        None => {
            return Err(Error::unsupported(
                "argument attributes of a function in an unknown encoding",
            ));
        }
    };
    if !dictionaries.is_empty() && dictionaries.len() != types.len() {
        return Err(at.damaged("another number of argument attributes than arguments"));
    }
    let mut dictionaries = dictionaries.into_iter();
    types
        .into_iter()
        .map(|ty| {
            let attributes = match dictionaries.next() {
                Some(dictionary) => named_attributes(artifact, dictionary, at)?,
                None => BTreeMap::new(),
            };
            Ok(Value { ty, attributes })
        })
        .collect()
}

fn named_attributes(
    artifact: &Artifact<'_>,
    dictionary: u64,
    at: &Cursor<'_>,
) -> Result<BTreeMap<String, Attribute>, Error> {
    let mut named = BTreeMap::new();
    let fields = attribute(artifact, dictionary, at)?
        .map(|entry| entry.fields)
        .unwrap_or_default();
    let [Field::Pairs(pairs)] = fields.as_slice() else {
        return Err(Error::unsupported(
            "an argument's attributes that are not a dictionary",
        ));
    };
    for (name, value) in pairs {
        let Some(name) = text(artifact, *name, at)? else {
            return Err(Error::unsupported(
                "an attribute whose name is not a string",
            ));
        };
        named.insert(name, attribute_value(artifact, *value, at)?);
    }
    Ok(named)
}

fn attribute_value(
    artifact: &Artifact<'_>,
    index: u64,
    at: &Cursor<'_>,
) -> Result<Attribute, Error> {
    let Some(entry) = attribute(artifact, index, at)? else {
        return Ok(Attribute::Other);
    };
    Ok(match (entry.family, entry.code, entry.fields.as_slice()) {
        (_, _, [Field::String(text)]) => {
            Attribute::String(String::from_utf8_lossy(text).into_owned())
        }
        (Family::Vhlo, 2, [Field::Number(value)]) => Attribute::Bool(*value != 0),
        (Family::Vhlo, 9, [Field::Type(ty), Field::Bytes(value)])
        | (Family::Builtin, 8, [Field::Type(ty), Field::Bytes(value)]) => {
            integer(artifact, *ty, value, at)?
        }
        _ => Attribute::Other,
    })
}

/// An integer as wide as its type: one byte up to 8 bits, else a signed varint. Only the widths that attributes have here.
fn integer(
    artifact: &Artifact<'_>,
    ty: u64,
    value: &[u8],
    at: &Cursor<'_>,
) -> Result<Attribute, Error> {
    let (family, code, fields) = type_entry(artifact, ty, at)?;
    let width = match (family, code, fields.as_slice()) {
        (Family::Builtin, 0, [Field::Number(width_and_sign)]) => width_and_sign >> 2,
        (Family::Vhlo, 0, _) => 1,
        (Family::Vhlo, 11 | 16, _) => 8,
        (Family::Builtin, 1, _) | (Family::Vhlo, 9 | 12..=14 | 17..=19, _) => 64,
        _ => return Ok(Attribute::Other),
    };
    let mut value = Cursor::new(value, at.offset());
    Ok(match width {
        1 => Attribute::Bool(value.byte()? != 0),
        2..=8 => Attribute::Integer(i64::from(value.byte()? as i8)),
        9..=64 => Attribute::Integer(value.signed()?),
        _ => Attribute::Other,
    })
}
