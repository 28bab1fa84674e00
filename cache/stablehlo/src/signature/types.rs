//! The types of arguments and results, and of their elements.

use super::{ElementType, TensorType, ValueType};
use crate::{
    artifact::{Artifact, lookup},
    cursor::Cursor,
    error::Error,
    schema::{self, Family, Field},
};

/// How deep tuples may nest, and how many types a signature may name in all. A tuple may name the same type often, so without a
/// bound a short program could ask for any amount of memory.
const MAX_TUPLE_DEPTH: usize = 8;
const MAX_TYPES: usize = 1 << 20;

/// A type's dialect, code and fields.
pub(crate) fn type_entry<'a>(
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

/// True for the ranked tensors of both dialects, with an encoding or without.
pub(crate) fn is_tensor(family: Family, code: u64) -> bool {
    matches!(
        (family, code),
        (Family::Vhlo, 20 | 21) | (Family::Builtin, 13 | 14)
    )
}

/// Decodes types under a bound on how many there may be.
pub(super) struct Types<'s, 'a> {
    artifact: &'s Artifact<'a>,
    left: usize,
}

impl<'s, 'a> Types<'s, 'a> {
    pub(super) fn new(artifact: &'s Artifact<'a>) -> Self {
        Self {
            artifact,
            left: MAX_TYPES,
        }
    }

    /// Parameters and results of a function type.
    pub(super) fn function(
        &mut self,
        index: u64,
    ) -> Result<(Vec<ValueType>, Vec<ValueType>), Error> {
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
            (_, _, [.., Field::Signeds(dims), Field::Type(element)]) if is_tensor(family, code) => {
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
