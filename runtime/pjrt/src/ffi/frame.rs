//! The operands, results and attributes of one call.

use super::element::{PRED, bits, describe};
use super::{Element, Failure};
use crate::api::slice;
use crate::error::Code;
use crate::sys;
use std::borrow::Cow;
use std::ffi::{c_int, c_void};
use std::marker::PhantomData;

/// Operands or results of one call at most. JAX's targets have up to ten.
const MOST_BUFFERS: i64 = 64;
/// Attributes of one call at most.
const MOST_ATTRIBUTES: i64 = 256;
/// Dimensions of an array at most.
const MOST_DIMENSIONS: i64 = 64;

/// One call of a target.
///
/// Operand and result may be the same memory, when the program says that a result takes an operand's place. Results
/// never overlap each other. Each result is lent once; an operand in a result's place can be read only before that.
#[derive(Debug)]
pub struct Frame<'a> {
    inputs: Vec<Buffer>,
    outputs: Vec<Buffer>,
    /// For each output, whether it is lent.
    lent: Vec<bool>,
    attributes: Vec<(&'a str, Scalar)>,
    memory: PhantomData<&'a mut [u8]>,
}

/// A dense array in memory.
#[derive(Debug)]
pub(super) struct Buffer {
    ty: i32,
    dims: Vec<usize>,
    /// Product of `dims`.
    count: usize,
    pub(super) start: usize,
    /// At most `isize::MAX`; `start + bytes` does not overflow. Nothing is here if `data` is null.
    pub(super) bytes: usize,
    pub(super) data: *mut u8,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Scalar {
    Bool(bool),
    U8(u8),
    S32(i32),
    Other,
}

impl Buffer {
    /// # Safety
    ///
    /// `raw` is null or a buffer of XLA's FFI, valid with what it points to; `bits` is how wide elements of a type are there, or
    /// less.
    unsafe fn new(
        raw: *const sys::XLA_FFI_Buffer,
        bits: fn(i32) -> Option<usize>,
    ) -> Result<Self, Failure> {
        let wrong = |what: &str| Failure::invalid(format!("XLA passes a buffer {what}"));
        if raw.is_null() {
            return Err(wrong("that is null"));
        }
        // SAFETY: every buffer starts with its size.
        if unsafe { (*raw).struct_size } < size_of::<sys::XLA_FFI_Buffer>() {
            return Err(wrong("shorter than any version that waystation knows"));
        }
        // SAFETY: it has all fields.
        let (ty, data, rank, dims) = unsafe {
            let raw = &*raw;
            (raw.dtype, raw.data.cast::<u8>(), raw.rank, raw.dims)
        };
        if !(0..=MOST_DIMENSIONS).contains(&rank) || (rank > 0 && dims.is_null()) {
            return Err(wrong(&format!("of {rank} dimensions")));
        }
        // SAFETY: `dims` has `rank` values.
        let dims: Vec<usize> = unsafe { slice(dims, usize::try_from(rank).unwrap_or_default()) }
            .iter()
            .map(|dim| usize::try_from(*dim))
            .collect::<Result<_, _>>()
            .map_err(|_| wrong("with a negative dimension"))?;
        let width = bits(ty).ok_or_else(|| wrong(&format!("of elements of type number {ty}")))?;
        let bytes = |dims: &[usize]| {
            let count = dims
                .iter()
                .try_fold(1_usize, |count, dim| count.checked_mul(*dim))?;
            let bytes = count.checked_mul(width)?.div_ceil(8);
            let end = data.addr().checked_add(bytes)?;
            (isize::try_from(bytes).is_ok() && isize::try_from(end).is_ok())
                .then_some((count, bytes))
        };
        let (count, bytes) = bytes(&dims).ok_or_else(|| wrong("larger than the address space"))?;
        if data.is_null() && bytes > 0 {
            return Err(wrong("without memory"));
        }
        Ok(Self {
            ty,
            dims,
            count,
            start: data.addr(),
            bytes,
            data,
        })
    }

    /// # Safety
    ///
    /// As [`Buffer::new`] for each; the lists are as long as `raw.size` says.
    pub(super) unsafe fn list(
        raw: &sys::XLA_FFI_Buffers,
        what: &str,
        most: i64,
        bits: fn(i32) -> Option<usize>,
    ) -> Result<Vec<Self>, Failure> {
        if !(0..=most).contains(&raw.size) {
            return Err(Failure::invalid(format!(
                "XLA passes {} {what}; at most {most} are taken",
                raw.size
            )));
        }
        let size = usize::try_from(raw.size).unwrap_or_default();
        // SAFETY: passed on from this function's contract.
        let (kinds, buffers) = unsafe { (slice(raw.kinds, size), slice(raw.buffers, size)) };
        if kinds.len() != size || buffers.len() != size {
            return Err(Failure::invalid(format!("XLA passes no list of {what}")));
        }
        kinds
            .iter()
            .zip(buffers)
            .map(|(kind, buffer)| {
                if *kind != sys::FFI_BUFFER {
                    return Err(Failure::invalid(format!(
                        "XLA passes {what} of a kind numbered {kind}, which is no buffer"
                    )));
                }
                // SAFETY: passed on from this function's contract.
                unsafe { Self::new(*buffer, bits) }
            })
            .collect()
    }

    /// Bytes that are not there.
    #[cfg(test)]
    pub(super) fn at(start: usize, bytes: usize) -> Self {
        Self {
            ty: 6,
            dims: vec![bytes],
            count: bytes,
            start,
            bytes,
            data: std::ptr::without_provenance_mut(start),
        }
    }

    fn overlaps(&self, other: &Self) -> bool {
        self.bytes > 0
            && other.bytes > 0
            && self.start < other.start + other.bytes
            && other.start < self.start + self.bytes
    }

    /// Type and dimensions for messages: `f32[2,3]`.
    fn shape(&self) -> String {
        let name = describe(self.ty).map_or("?", |(_, name)| name);
        format!("{name}{}", text(&self.dims))
    }

    fn check<T: Element>(&self, what: &str, index: usize) -> Result<(), Failure> {
        if self.ty != T::TYPE {
            let wanted = describe(T::TYPE).map_or("?", |(_, name)| name);
            return Err(Failure::invalid(format!(
                "{what} {index} is {}, and {wanted} is wanted",
                self.shape()
            )));
        }
        if !self.start.is_multiple_of(align_of::<T>()) {
            return Err(Failure::invalid(format!(
                "{what} {index} begins between two elements"
            )));
        }
        Ok(())
    }
}

/// `[2,3]`.
fn text(dims: &[usize]) -> String {
    let dims: Vec<_> = dims.iter().map(ToString::to_string).collect();
    format!("[{}]", dims.join(","))
}

impl<'a> Frame<'a> {
    /// Checks all of a frame that can be checked without knowing the target.
    ///
    /// # Safety
    ///
    /// `raw` is a frame of XLA's FFI, valid during `'a` with all that it points to, and nobody but the caller uses the
    /// results' memory, or writes to the operands', during it.
    pub(super) unsafe fn new(raw: &'a sys::XLA_FFI_CallFrame) -> Result<Self, Failure> {
        if raw.stage != sys::FFI_STAGE_EXECUTE {
            return Err(Failure::invalid(format!(
                "the target runs in stage {} only, and XLA calls it in stage {}",
                sys::FFI_STAGE_EXECUTE,
                raw.stage
            )));
        }
        // SAFETY: passed on from this function's contract.
        let (inputs, outputs, attributes) = unsafe {
            (
                Buffer::list(&raw.args, "operands", MOST_BUFFERS, bits)?,
                Buffer::list(&raw.rets, "results", MOST_BUFFERS, bits)?,
                attributes(&raw.attrs)?,
            )
        };
        for (index, output) in outputs.iter().enumerate() {
            if outputs[..index].iter().any(|other| other.overlaps(output)) {
                return Err(Failure::invalid(format!(
                    "result {index} lies where another result lies"
                )));
            }
        }
        let lent = vec![false; outputs.len()];
        Ok(Self {
            inputs,
            outputs,
            lent,
            attributes,
            memory: PhantomData,
        })
    }

    /// Checks how many operands and results there are.
    ///
    /// # Errors
    ///
    /// [`Code::InvalidArgument`] if not as many.
    pub fn expect(&self, inputs: usize, outputs: usize) -> Result<(), Failure> {
        if (self.inputs.len(), self.outputs.len()) == (inputs, outputs) {
            return Ok(());
        }
        Err(Failure::invalid(format!(
            "{inputs} operands and {outputs} results are wanted, and the program has {} and {}",
            self.inputs.len(),
            self.outputs.len()
        )))
    }

    fn operand(&self, index: usize) -> Result<&Buffer, Failure> {
        self.inputs
            .get(index)
            .ok_or_else(|| Failure::invalid(format!("there is no operand {index}")))
    }

    /// The dimensions of an operand.
    ///
    /// # Errors
    ///
    /// [`Code::InvalidArgument`] if there is no such operand.
    pub fn dims(&self, index: usize) -> Result<&[usize], Failure> {
        Ok(&self.operand(index)?.dims)
    }

    /// The dimensions of a result.
    ///
    /// # Errors
    ///
    /// [`Code::InvalidArgument`] if there is no such result.
    pub fn output_dims(&self, index: usize) -> Result<&[usize], Failure> {
        self.outputs
            .get(index)
            .map(|output| output.dims.as_slice())
            .ok_or_else(|| Failure::invalid(format!("there is no result {index}")))
    }

    /// Whether an operand's elements are `T`.
    ///
    /// # Errors
    ///
    /// [`Code::InvalidArgument`] if there is no such operand.
    pub fn is<T: Element>(&self, index: usize) -> Result<bool, Failure> {
        Ok(self.operand(index)?.ty == T::TYPE)
    }

    /// An operand's elements; a copy if a result takes its place.
    ///
    /// # Errors
    ///
    /// [`Code::InvalidArgument`] if there is no such operand, its elements are not `T`, or the result in its place is
    /// lent already; [`Code::ResourceExhausted`] if there is no memory for a copy.
    pub fn input<T: Element>(&self, index: usize) -> Result<Cow<'a, [T]>, Failure> {
        let input = self.operand(index)?;
        input.check::<T>("operand", index)?;
        self.check_readable(index, input)?;
        if input.count == 0 {
            return Ok(Cow::Borrowed(&[]));
        }
        // SAFETY: `Buffer::new` has checked pointer and size, `check` type and alignment, any bits are a valid `T`; the
        // memory is valid during `'a` (contract of `Frame::new`) and nobody writes to it: if it overlaps a result, this
        // reference ends before that result can be lent.
        let data: &'a [T] =
            unsafe { std::slice::from_raw_parts(input.data.cast::<T>(), input.count) };
        if !self.outputs.iter().any(|output| output.overlaps(input)) {
            return Ok(Cow::Borrowed(data));
        }
        let mut copy = Vec::new();
        copy.try_reserve_exact(data.len())
            .map_err(|_| out_of_memory(input.bytes))?;
        copy.extend_from_slice(data);
        Ok(Cow::Owned(copy))
    }

    fn check_readable(&self, index: usize, input: &Buffer) -> Result<(), Failure> {
        let mut lent = self.outputs.iter().zip(&self.lent);
        if lent.any(|(output, lent)| *lent && output.overlaps(input)) {
            return Err(Failure::invalid(format!(
                "operand {index} lies where a result lies that takes another operand's place"
            )));
        }
        Ok(())
    }

    /// A result's elements, to be written. What they hold before is any value. Each result is lent once.
    ///
    /// # Errors
    ///
    /// [`Code::InvalidArgument`] if there is no such result, its elements are not `T`, its dimensions not `dims`, or it
    /// was lent before.
    pub fn output<T: Element>(
        &mut self,
        index: usize,
        dims: &[usize],
    ) -> Result<&'a mut [T], Failure> {
        let (Some(output), Some(lent)) = (self.outputs.get(index), self.lent.get_mut(index)) else {
            return Err(Failure::invalid(format!("there is no result {index}")));
        };
        output.check::<T>("result", index)?;
        if output.dims != dims {
            return Err(Failure::invalid(format!(
                "result {index} is {}, and {} is wanted",
                output.shape(),
                text(dims)
            )));
        }
        if std::mem::replace(lent, true) {
            return Err(Failure::invalid(format!("result {index} was lent before")));
        }
        if output.count == 0 {
            return Ok(&mut []);
        }
        // SAFETY: `Buffer::new` has checked pointer and size, `check` type and alignment, any bits are a valid `T`; the
        // memory is valid and nobody else's during `'a` (contract of `Frame::new`), no other result overlaps it, this
        // one is lent only here, and operands that overlap it are not lent but copied, and no longer after this.
        Ok(unsafe { std::slice::from_raw_parts_mut(output.data.cast::<T>(), output.count) })
    }

    /// A result that starts as a copy of an operand with the same dimensions; nothing is copied if the result takes the
    /// operand's place.
    ///
    /// # Errors
    ///
    /// As [`Frame::input`] and [`Frame::output`].
    pub fn output_from<T: Element>(
        &mut self,
        index: usize,
        input: usize,
    ) -> Result<&'a mut [T], Failure> {
        let source = self.operand(input)?;
        source.check::<T>("operand", input)?;
        self.check_readable(input, source)?;
        let (data, count, dims) = (source.data, source.count, source.dims.clone());
        let output = self.output::<T>(index, &dims)?;
        if count > 0 && output.as_ptr().cast() != data.cast_const() {
            let start = output.as_mut_ptr();
            // SAFETY: both hold `count` elements (`output` has the operand's dimensions); they may overlap, `copy` takes
            // that; the pointer is used before the reference it comes from is handed out.
            unsafe { std::ptr::copy(data.cast::<T>().cast_const(), start, count) };
        }
        Ok(output)
    }

    fn attribute(&self, name: &str) -> Result<Scalar, Failure> {
        self.attributes
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, value)| *value)
            .ok_or_else(|| Failure::invalid(format!("the attribute {name} is missing")))
    }

    /// An attribute that is a letter of `allowed`, as a `u8`.
    ///
    /// # Errors
    ///
    /// [`Code::InvalidArgument`] if it is missing or none of them.
    pub fn letter(&self, name: &str, allowed: &[u8]) -> Result<u8, Failure> {
        match self.attribute(name)? {
            Scalar::U8(letter) if allowed.contains(&letter) => Ok(letter),
            other => Err(Failure::invalid(format!(
                "the attribute {name} is {other:?}, and one of the letters {} as a u8 is wanted",
                String::from_utf8_lossy(allowed)
            ))),
        }
    }

    /// An attribute that is a `bool`.
    ///
    /// # Errors
    ///
    /// [`Code::InvalidArgument`] if it is missing or no `bool`.
    pub fn flag(&self, name: &str) -> Result<bool, Failure> {
        match self.attribute(name)? {
            Scalar::Bool(flag) => Ok(flag),
            other => Err(Failure::invalid(format!(
                "the attribute {name} is {other:?}, and a bool is wanted"
            ))),
        }
    }

    /// An attribute that is an `i32`.
    ///
    /// # Errors
    ///
    /// [`Code::InvalidArgument`] if it is missing or no `i32`.
    pub fn number(&self, name: &str) -> Result<i32, Failure> {
        match self.attribute(name)? {
            Scalar::S32(number) => Ok(number),
            other => Err(Failure::invalid(format!(
                "the attribute {name} is {other:?}, and an i32 is wanted"
            ))),
        }
    }
}

fn out_of_memory(bytes: usize) -> Failure {
    Failure::new(
        Code::ResourceExhausted,
        format!("no memory for a copy of an operand of {bytes} bytes"),
    )
}

/// # Safety
///
/// `raw` is valid with what it points to.
unsafe fn attributes(raw: &sys::XLA_FFI_Attrs) -> Result<Vec<(&str, Scalar)>, Failure> {
    // SAFETY: passed on from this function's contract.
    let attributes = unsafe { raw_attributes(raw)? };
    Ok(attributes
        .into_iter()
        .map(|(name, kind, value)| {
            let value = if kind == sys::FFI_SCALAR {
                // SAFETY: the kind says that this is a scalar.
                unsafe { scalar(&*value.cast::<sys::XLA_FFI_Scalar>()) }
            } else {
                Scalar::Other
            };
            (name, value)
        })
        .collect())
}

/// Name, kind and value of each attribute; no value is null.
///
/// # Safety
///
/// `raw` is valid with what it points to.
pub(super) unsafe fn raw_attributes(
    raw: &sys::XLA_FFI_Attrs,
) -> Result<Vec<(&str, c_int, *const c_void)>, Failure> {
    if !(0..=MOST_ATTRIBUTES).contains(&raw.size) {
        return Err(Failure::invalid(format!(
            "XLA passes {} attributes; at most {MOST_ATTRIBUTES} are taken",
            raw.size
        )));
    }
    let size = usize::try_from(raw.size).unwrap_or_default();
    // SAFETY: the lists are as long as `size` says.
    let (kinds, names, values) = unsafe {
        (
            slice(raw.kinds, size),
            slice(raw.names, size),
            slice(raw.attrs, size),
        )
    };
    if kinds.len() != size || names.len() != size || values.len() != size {
        return Err(Failure::invalid("XLA passes no list of attributes"));
    }
    let mut attributes = Vec::with_capacity(size);
    for ((kind, name), value) in kinds.iter().zip(names).zip(values) {
        if name.is_null() || value.is_null() {
            return Err(Failure::invalid("XLA passes an attribute that is null"));
        }
        // SAFETY: a span that is not null, of `len` bytes.
        let name: &[u8] = unsafe { slice((**name).ptr.cast::<u8>(), (**name).len) };
        let name = std::str::from_utf8(name)
            .map_err(|_| Failure::invalid("XLA passes an attribute whose name is not UTF-8"))?;
        attributes.push((name, *kind, *value));
    }
    Ok(attributes)
}

/// # Safety
///
/// The value is null or of the type that the scalar says.
unsafe fn scalar(raw: &sys::XLA_FFI_Scalar) -> Scalar {
    const U8: c_int = 6;
    const S32: c_int = 4;
    if raw.value.is_null() {
        return Scalar::Other;
    }
    // SAFETY: the type says what is there; a bool is read as a byte, which any bits are.
    unsafe {
        match raw.dtype {
            PRED => Scalar::Bool(raw.value.cast::<u8>().read() != 0),
            U8 => Scalar::U8(raw.value.cast::<u8>().read()),
            S32 => Scalar::S32(raw.value.cast::<i32>().read_unaligned()),
            _ => Scalar::Other,
        }
    }
}
