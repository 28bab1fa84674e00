//! Shapes: how many bytes an array has, and how they lie.

use super::Refusal;
use super::wire::fields;
use crate::op::MOST_BUFFERS;

const TUPLE: i64 = 13;
const TOKEN: i64 = 17;
const MOST_DIMENSIONS: usize = 64;

/// An array in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Array {
    pub(super) element: i32,
    pub(super) dims: Vec<u64>,
    /// Dimensions, the one that varies fastest first.
    minor_to_major: Vec<usize>,
    element_bits: u64,
}

/// Bits of an element of this type where the layout says nothing else.
fn natural_bits(element: i64) -> Option<u64> {
    Some(match element {
        // Types narrower than a byte take one, unless the layout says that they are packed.
        1 | 2 | 6 | 19..=32 => 8,
        33 => 8,
        3 | 7 | 10 | 16 => 16,
        4 | 8 | 11 => 32,
        5 | 9 | 12 | 15 => 64,
        18 => 128,
        _ => return None,
    })
}

/// The arrays of a shape: one, or those of a tuple.
pub(super) fn arrays(shape: &[u8]) -> Result<Vec<Array>, Refusal> {
    let mut tuple = false;
    let mut parts = Vec::new();
    for field in fields(shape) {
        let field = field?;
        match field.number {
            2 => tuple = field.int()? == TUPLE,
            4 => parts.push(field.bytes()?),
            _ => {}
        }
        if parts.len() > MOST_BUFFERS {
            return Err(Refusal::Shape("of more results than are taken"));
        }
    }
    if tuple {
        parts.into_iter().map(array).collect()
    } else {
        Ok(vec![array(shape)?])
    }
}

fn array(shape: &[u8]) -> Result<Array, Refusal> {
    let (mut element, mut dims, mut layout) = (0, Vec::new(), None);
    for field in fields(shape) {
        let field = field?;
        match field.number {
            2 => element = field.int()?,
            3 => field.ints(&mut dims)?,
            5 => layout = Some(field.bytes()?),
            6 => {
                let mut dynamic = Vec::new();
                field.ints(&mut dynamic)?;
                if dynamic.iter().any(|each| *each != 0) {
                    return Err(Refusal::Shape("of dynamic size"));
                }
            }
            _ => {}
        }
    }
    if element == TUPLE || element == TOKEN {
        return Err(Refusal::Shape("that is no array"));
    }
    let mut element_bits =
        natural_bits(element).ok_or(Refusal::Shape("of an element type that is not known"))?;
    if dims.len() > MOST_DIMENSIONS {
        return Err(Refusal::Shape("of more dimensions than are taken"));
    }
    let dims: Vec<u64> = dims
        .into_iter()
        .map(|dim| u64::try_from(dim).map_err(|_| Refusal::Shape("of negative size")))
        .collect::<Result<_, _>>()?;
    let mut order = Vec::new();
    for field in fields(layout.unwrap_or_default()) {
        let field = field?;
        match field.number {
            1 => field.ints(&mut order)?,
            6 | 10 | 15 | 17 => return Err(Refusal::Shape("laid out in tiles or parts")),
            16 if field.int()? > 1 => return Err(Refusal::Shape("laid out with padding")),
            7 => match field.int()? {
                0 => {}
                bits @ (1 | 2 | 4 | 8 | 16 | 32 | 64 | 128) => element_bits = bits.unsigned_abs(),
                _ => return Err(Refusal::Shape("of an element size that is not known")),
            },
            _ => {}
        }
    }
    let minor_to_major: Vec<usize> = if layout.is_none() && dims.len() <= 1 {
        (0..dims.len()).collect()
    } else {
        order
            .iter()
            .map(|dim| usize::try_from(*dim).unwrap_or(usize::MAX))
            .collect()
    };
    let mut sorted = minor_to_major.clone();
    sorted.sort_unstable();
    if !sorted.into_iter().eq(0..dims.len()) {
        return Err(Refusal::Shape("without a layout"));
    }
    let array = Array {
        element: i32::try_from(element).unwrap_or_default(),
        dims,
        minor_to_major,
        element_bits,
    };
    array.bytes()?;
    Ok(array)
}

impl Array {
    fn bits(&self, mut dims: impl Iterator<Item = u64>) -> Result<u64, Refusal> {
        dims.try_fold(self.element_bits, u64::checked_mul)
            .filter(|bits| *bits <= i64::MAX.unsigned_abs())
            .ok_or(Refusal::Shape("larger than the address space"))
    }

    pub(super) fn bytes(&self) -> Result<u64, Refusal> {
        Ok(self.bits(self.dims.iter().copied())?.div_ceil(8))
    }

    /// Bytes that lie together along `dim` and all that varies faster, with `parts` parts along `dim`.
    pub(super) fn run(&self, dim: usize, parts: u64) -> Result<u64, Refusal> {
        let position = self
            .minor_to_major
            .iter()
            .position(|each| *each == dim)
            .ok_or(Refusal::Shape("without the dimension that is split"))?;
        if parts == 0 || !self.dims[dim].is_multiple_of(parts) {
            return Err(Refusal::Shape("that does not split evenly"));
        }
        let faster = self.minor_to_major[..position]
            .iter()
            .map(|dim| self.dims[*dim]);
        let bits = self.bits(faster.chain([self.dims[dim] / parts]))?;
        if !bits.is_multiple_of(8) {
            return Err(Refusal::Shape("whose parts end within a byte"));
        }
        Ok(bits / 8)
    }

    /// Whether `self` is `part` but for being `times` as long along `dim`, in the same order.
    pub(super) fn is_times(&self, part: &Self, dim: usize, times: u64) -> bool {
        self.element == part.element
            && self.element_bits == part.element_bits
            && self.minor_to_major == part.minor_to_major
            && dim < self.dims.len()
            && self
                .dims
                .iter()
                .zip(&part.dims)
                .enumerate()
                .all(|(index, (whole, part))| {
                    if index == dim {
                        part.checked_mul(times) == Some(*whole)
                    } else {
                        whole == part
                    }
                })
    }

    /// Whether elements can be told apart by bytes.
    pub(super) fn is_packed(&self) -> bool {
        self.element_bits < 8
    }
}
