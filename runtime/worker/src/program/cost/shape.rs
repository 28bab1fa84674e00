//! Elements and bytes of a shape.

use waystation_proto::xla::{PrimitiveType, ShapeProto};

use super::Error;

/// What XLA counts for a tuple's table, for each of its parts.
const TABLE_ENTRY_BYTES: usize = 4;

/// The arrays of a shape: itself, or those of its parts. Tokens and the like are none.
pub(super) fn arrays(shape: &ShapeProto) -> Vec<&ShapeProto> {
    match shape.element_type() {
        // No deeper than the decoder lets messages nest.
        PrimitiveType::Tuple => shape.tuple_shapes.iter().flat_map(arrays).collect(),
        PrimitiveType::Token | PrimitiveType::OpaqueType | PrimitiveType::Buffer => Vec::new(),
        _ => vec![shape],
    }
}

/// The product of the dimensions.
pub(super) fn elements(shape: &ShapeProto) -> Result<u64, Error> {
    product(&shape.dimensions)
}

/// The elements of the arrays of a shape, together.
pub(super) fn all_elements(shape: &ShapeProto) -> Result<f64, Error> {
    arrays(shape)
        .into_iter()
        .map(|array| Ok(count(elements(array)?)))
        .sum()
}

/// The elements of a result that is an array, or a tuple of arrays of one shape.
pub(super) fn elements_of_first(shape: &ShapeProto) -> Result<u64, Error> {
    arrays(shape).first().map_or(Ok(0), |array| elements(array))
}

pub(super) fn product(sizes: &[i64]) -> Result<u64, Error> {
    sizes
        .iter()
        .try_fold(1u64, |product, &size| {
            product.checked_mul(u64::try_from(size).ok()?)
        })
        .ok_or(Error::Size)
}

/// A number of things as a cost. Costs are estimates: what a double rounds off does not matter.
#[expect(clippy::cast_precision_loss, reason = "costs are estimates")]
pub(super) fn count(number: u64) -> f64 {
    number as f64
}

/// The bytes of an operand: an array's, or a tuple's table, whose parts are counted where they are used.
pub(super) fn operand_bytes(shape: &ShapeProto) -> Result<f64, Error> {
    if shape.element_type() == PrimitiveType::Tuple {
        return table_bytes(shape.tuple_shapes.len());
    }
    result_bytes(shape)
}

/// The bytes of a tuple's table.
pub(super) fn table_bytes(parts: usize) -> Result<f64, Error> {
    let bytes = parts.checked_mul(TABLE_ENTRY_BYTES).ok_or(Error::Size)?;
    Ok(count(u64::try_from(bytes).map_err(|_| Error::Size)?))
}

/// The bytes of a result: those of its arrays.
pub(super) fn result_bytes(shape: &ShapeProto) -> Result<f64, Error> {
    arrays(shape).into_iter().map(array_bytes).sum()
}

fn array_bytes(shape: &ShapeProto) -> Result<f64, Error> {
    let elements = elements(shape)?;
    let packed = shape
        .layout
        .as_ref()
        .map_or(0, |layout| layout.element_size_in_bits);
    if packed > 0 {
        let bits = elements
            .checked_mul(packed.unsigned_abs())
            .ok_or(Error::Size)?;
        return Ok(count(bits.div_ceil(8)));
    }
    Ok(count(elements) * f64::from(element_bytes(shape.element_type())))
}

/// Bytes of one element that is not packed: whole ones for the types of less.
fn element_bytes(element: PrimitiveType) -> u8 {
    match element {
        PrimitiveType::C128 => 16,
        PrimitiveType::C64 | PrimitiveType::F64 | PrimitiveType::S64 | PrimitiveType::U64 => 8,
        PrimitiveType::F32 | PrimitiveType::S32 | PrimitiveType::U32 => 4,
        PrimitiveType::F16 | PrimitiveType::Bf16 | PrimitiveType::S16 | PrimitiveType::U16 => 2,
        PrimitiveType::Invalid
        | PrimitiveType::Tuple
        | PrimitiveType::Token
        | PrimitiveType::OpaqueType
        | PrimitiveType::Buffer => 0,
        _ => 1,
    }
}
