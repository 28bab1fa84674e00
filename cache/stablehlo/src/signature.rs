//! The types of a program's `main`: what it takes and gives, in global shapes.

use std::collections::BTreeMap;

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

/// How deep tuples may nest, and how many types a signature may name in all. A tuple may name the same type often, so without a
/// bound a short program could ask for any amount of memory.
const MAX_TUPLE_DEPTH: usize = 8;
const MAX_TYPES: usize = 1 << 20;

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
    let mut types = Types {
        artifact: &artifact,
        left: MAX_TYPES,
    };
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

fn type_entry<'a>(
    artifact: &Artifact<'a>,
    index: u64,
    at: &Cursor<'_>,
) -> Result<(Family, u64, Vec<Field<'a>>), Error> {
    let entry =
        lookup(&artifact.types, index).ok_or_else(|| at.damaged("type index out of range"))?;
    let dialect = artifact.dialects[entry.dialect].name;
    let unknown = |what: String| {
        Error::unsupported(format!(
            "a type of dialect {} {what}",
            String::from_utf8_lossy(dialect)
        ))
    };
    let family = Family::of(dialect).ok_or_else(|| unknown("(dialect not read)".into()))?;
    if !entry.binary {
        return Err(unknown("in text form".into()));
    }
    let mut content = entry.content.clone();
    let code = content.varint()?;
    let letters =
        schema::type_fields(family, code).ok_or_else(|| unknown(format!("with code {code}")))?;
    let fields = schema::decode(artifact, letters, &mut content)?;
    content.finish("bytes behind a type")?;
    Ok((family, code, fields))
}

/// Decodes types under a bound on how many there may be.
struct Types<'s, 'a> {
    artifact: &'s Artifact<'a>,
    left: usize,
}

impl Types<'_, '_> {
    /// Parameters and results of a function type.
    fn function(&mut self, index: u64) -> Result<(Vec<ValueType>, Vec<ValueType>), Error> {
        let (family, code, fields) = type_entry(self.artifact, index, &self.artifact.ir)?;
        match (family, code, fields.as_slice()) {
            (Family::Vhlo, 8, [Field::Types(parameters), Field::Types(results)])
            | (Family::Builtin, 2, [Field::Types(parameters), Field::Types(results)]) => {
                Ok((self.values(parameters, 0)?, self.values(results, 0)?))
            }
            _ => Err(Error::NoMain),
        }
    }

    fn values(&mut self, indices: &[u64], depth: usize) -> Result<Vec<ValueType>, Error> {
        indices
            .iter()
            .map(|index| self.value(*index, depth))
            .collect()
    }

    fn value(&mut self, index: u64, depth: usize) -> Result<ValueType, Error> {
        self.left = self
            .left
            .checked_sub(1)
            .ok_or_else(|| Error::unsupported("more types than a signature may have"))?;
        let (family, code, fields) = type_entry(self.artifact, index, &self.artifact.ir)?;
        match (family, code, fields.as_slice()) {
            (Family::Vhlo, 22, _) => Ok(ValueType::Token),
            (Family::Vhlo, 23, [Field::Types(elements)])
            | (Family::Builtin, 15, [Field::Types(elements)]) => {
                if depth == MAX_TUPLE_DEPTH {
                    return Err(Error::unsupported(format!(
                        "tuples nested deeper than {MAX_TUPLE_DEPTH}"
                    )));
                }
                Ok(ValueType::Tuple(self.values(elements, depth + 1)?))
            }
            // An encoding, where there is one, bounds dynamic dimensions; the shape stands beside it.
            (Family::Vhlo, 20 | 21, [.., Field::Signeds(dims), Field::Type(element)])
            | (Family::Builtin, 13 | 14, [.., Field::Signeds(dims), Field::Type(element)]) => {
                self.left = self
                    .left
                    .checked_sub(dims.len())
                    .ok_or_else(|| Error::unsupported("too many dimensions"))?;
                let dims = dims
                    .iter()
                    .map(|dim| dimension(*dim))
                    .collect::<Result<_, _>>()?;
                Ok(ValueType::Tensor(TensorType {
                    element: self.element(*element)?,
                    dims,
                }))
            }
            _ => Err(Error::unsupported(format!(
                "an argument or result of {family:?} type code {code}"
            ))),
        }
    }

    fn element(&self, index: u64) -> Result<ElementType, Error> {
        let (family, code, fields) = type_entry(self.artifact, index, &self.artifact.ir)?;
        let complex = matches!((family, code), (Family::Vhlo, 1) | (Family::Builtin, 9));
        if let ([Field::Type(part)], true) = (fields.as_slice(), complex) {
            let (family, code, _) = type_entry(self.artifact, *part, &self.artifact.ir)?;
            return match (family, code) {
                (Family::Vhlo, 4) | (Family::Builtin, 5) => Ok(ElementType::ComplexF32),
                (Family::Vhlo, 5) | (Family::Builtin, 6) => Ok(ElementType::ComplexF64),
                _ => Err(Error::unsupported(format!(
                    "complex numbers of {family:?} type code {code}"
                ))),
            };
        }
        let element = match family {
            Family::Vhlo => vhlo_element(code),
            Family::Builtin => builtin_element(code, &fields),
            Family::Sdy => None,
        };
        element.ok_or_else(|| {
            Error::unsupported(format!("array elements of {family:?} type code {code}"))
        })
    }
}

/// MLIR writes an unknown size as the smallest 64-bit integer.
fn dimension(dim: i64) -> Result<Option<u64>, Error> {
    match u64::try_from(dim) {
        Ok(dim) => Ok(Some(dim)),
        Err(_) if dim == i64::MIN => Ok(None),
        Err(_) => Err(Error::unsupported(format!("an array dimension of {dim}"))),
    }
}

/// Signless integers, which MLIR writes `i32`, are stored as the signed ones.
fn vhlo_element(code: u64) -> Option<ElementType> {
    Some(match code {
        0 => ElementType::Bool,
        2 => ElementType::BF16,
        3 => ElementType::F16,
        4 => ElementType::F32,
        5 => ElementType::F64,
        6 => ElementType::F8E4M3FN,
        7 => ElementType::F8E5M2,
        10 => ElementType::Si4,
        11 => ElementType::Si8,
        12 => ElementType::Si16,
        13 => ElementType::Si32,
        14 => ElementType::Si64,
        15 => ElementType::Ui4,
        16 => ElementType::Ui8,
        17 => ElementType::Ui16,
        18 => ElementType::Ui32,
        19 => ElementType::Ui64,
        27 => ElementType::F8E4M3FNUZ,
        28 => ElementType::F8E5M2FNUZ,
        29 => ElementType::F8E4M3B11FNUZ,
        31 => ElementType::Si2,
        32 => ElementType::Ui2,
        35 => ElementType::F8E4M3,
        36 => ElementType::F8E3M4,
        37 => ElementType::F4E2M1FN,
        38 => ElementType::F6E2M3FN,
        39 => ElementType::F6E3M2FN,
        40 => ElementType::F8E8M0FNU,
        _ => return None,
    })
}

fn builtin_element(code: u64, fields: &[Field<'_>]) -> Option<ElementType> {
    Some(match (code, fields) {
        (3, _) => ElementType::BF16,
        (4, _) => ElementType::F16,
        (5, _) => ElementType::F32,
        (6, _) => ElementType::F64,
        (0, [Field::Number(width_and_sign)]) => match (width_and_sign >> 2, width_and_sign & 3) {
            (1, 0) => ElementType::Bool,
            (2, 0 | 1) => ElementType::Si2,
            (4, 0 | 1) => ElementType::Si4,
            (8, 0 | 1) => ElementType::Si8,
            (16, 0 | 1) => ElementType::Si16,
            (32, 0 | 1) => ElementType::Si32,
            (64, 0 | 1) => ElementType::Si64,
            (2, 2) => ElementType::Ui2,
            (4, 2) => ElementType::Ui4,
            (8, 2) => ElementType::Ui8,
            (16, 2) => ElementType::Ui16,
            (32, 2) => ElementType::Ui32,
            (64, 2) => ElementType::Ui64,
            _ => return None,
        },
        _ => return None,
    })
}
