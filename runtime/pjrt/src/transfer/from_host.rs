//! From the host to a device.

use crate::buffer::Buffer;
use crate::client::Client;
use crate::device::Memory;
use crate::element::ElementType;
use crate::error::Error;
use crate::event::RawEvent;
use crate::host::{ALIGNMENT, HostBytes};
use crate::sys::{self, host_semantics};
use std::ptr::{null, null_mut};

const FUNCTION: &str = "PJRT_Client_BufferFromHostBuffer";

/// See [`Client::buffer_from_host`].
pub(crate) fn from_host(
    client: &Client,
    host: HostBytes,
    ty: ElementType,
    dims: &[i64],
    byte_strides: Option<&[i64]>,
    minor_to_major: Option<&[i64]>,
    memory: &Memory,
) -> Result<Buffer, Error> {
    client.0.owns(memory.client, FUNCTION)?;
    client.takes(ty, FUNCTION)?;
    let bytes = (*host).as_ref();
    let start = first_element(bytes.len(), ty, dims, byte_strides)?;
    let data = bytes.as_ptr().wrapping_add(start);
    if let Some(order) = minor_to_major {
        check_order(order, dims)?;
    }
    let mut layout = minor_to_major.map(sys::PJRT_Buffer_MemoryLayout::of);
    let aligned = data.align_offset(ALIGNMENT) == 0;

    let mut args = sys::PJRT_Client_BufferFromHostBuffer_Args::new();
    args.client = client.0.raw();
    args.data = data.cast();
    args.element_type = ty.number();
    args.dims = dims.as_ptr();
    args.num_dims = dims.len();
    args.byte_strides = byte_strides.map_or(null(), <[i64]>::as_ptr);
    args.num_byte_strides = byte_strides.map_or(0, <[i64]>::len);
    args.host_buffer_semantics = if aligned {
        host_semantics::IMMUTABLE_ZERO_COPY
    } else {
        host_semantics::IMMUTABLE_UNTIL_TRANSFER_COMPLETES
    };
    args.device = memory.device;
    args.memory = memory.raw;
    args.device_layout = layout.as_mut().map_or(null_mut(), std::ptr::from_mut);
    // SAFETY: the client, device and memory are live and belong together; the bytes at `data` reach as far as
    // type, dims and strides say (`first_element`), are immutable, and live until the event below is ready; the layout
    // is an order of the dims and lives across the call.
    unsafe { client.0.api().call(&mut args)? };
    // SAFETY: both come from the call just made, which handed them over.
    let (done, buffer) = unsafe {
        let done = RawEvent::take(client.plugin(), args.done_with_host_buffer, FUNCTION);
        (done, Buffer::take(&client.0, args.buffer, FUNCTION))
    };
    match done {
        Ok(done) => {
            if let Err((_, done, held)) = done.on_ready(move |_| drop(host)) {
                // Nobody will tell when the bytes may go, so they stay.
                std::mem::forget((done, held));
            }
        }
        Err(error) => {
            // As above.
            std::mem::forget(host);
            return Err(error);
        }
    }
    buffer
}

/// Refuses what does not name each dimension once, and layouts of empty arrays, on which some plugins break.
fn check_order(order: &[i64], dims: &[i64]) -> Result<(), Error> {
    let mut sorted = order.to_vec();
    sorted.sort_unstable();
    if !sorted.into_iter().eq((0_i64..).take(dims.len())) || dims.contains(&0) {
        return Err(Error::invalid(
            FUNCTION,
            format!("{order:?} is no layout for an array of {dims:?}"),
        ));
    }
    Ok(())
}

/// Offset in the host's bytes of the element at index zero, once it is clear that every element lies within.
fn first_element(
    len: usize,
    ty: ElementType,
    dims: &[i64],
    byte_strides: Option<&[i64]>,
) -> Result<usize, Error> {
    if let Some(negative) = dims.iter().find(|dim| **dim < 0) {
        return Err(Error::invalid(
            FUNCTION,
            format!("an array cannot have a dimension of {negative}"),
        ));
    }
    let too_large = || {
        Error::invalid(
            FUNCTION,
            format!("an array of {ty:?}{dims:?} is larger than any memory"),
        )
    };
    let width = i128::try_from(ty.host_bytes()).map_err(|_| too_large())?;
    let mut count = 1_i128;
    for dim in dims {
        // Zero anywhere makes the whole array empty, but the other dims must still be sane.
        count = count.checked_mul(i128::from(*dim)).ok_or_else(too_large)?;
    }
    let Some(strides) = byte_strides else {
        let needed = count.checked_mul(width).ok_or_else(too_large)?;
        return within(len, ty, dims, needed).map(|()| 0);
    };
    if strides.len() != dims.len() {
        return Err(Error::invalid(
            FUNCTION,
            format!(
                "{} byte strides do not fit {} dimensions",
                strides.len(),
                dims.len()
            ),
        ));
    }
    if count == 0 {
        return Ok(0);
    }
    let (mut below, mut above) = (0_i128, 0_i128);
    for (dim, stride) in dims.iter().zip(strides) {
        // At most 2^63 * 2^63 each; dims.len() of them stay far below the limit of 128 bits for any sane rank,
        // and the sum is checked all the same.
        let reach = (i128::from(*dim) - 1) * i128::from(*stride);
        let side = if reach < 0 { &mut below } else { &mut above };
        *side = side.checked_add(reach).ok_or_else(too_large)?;
    }
    let needed = above
        .checked_sub(below)
        .and_then(|span| span.checked_add(width))
        .ok_or_else(too_large)?;
    within(len, ty, dims, needed)?;
    usize::try_from(-below).map_err(|_| too_large())
}

fn within(len: usize, ty: ElementType, dims: &[i64], needed: i128) -> Result<(), Error> {
    if i128::try_from(len).is_ok_and(|len| needed <= len) {
        return Ok(());
    }
    Err(Error::invalid(
        FUNCTION,
        format!("an array of {ty:?}{dims:?} takes {needed} bytes on the host and {len} were given"),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Code;

    fn first(len: usize, dims: &[i64], strides: Option<&[i64]>) -> Result<usize, Code> {
        first_element(len, ElementType::F32, dims, strides).map_err(|error| error.code())
    }

    #[test]
    fn dense_arrays_need_all_their_bytes() {
        assert_eq!(first(24, &[2, 3], None), Ok(0));
        assert_eq!(first(23, &[2, 3], None), Err(Code::InvalidArgument));
        assert_eq!(first(4, &[], None), Ok(0));
        assert_eq!(first(3, &[], None), Err(Code::InvalidArgument));
        assert_eq!(first(0, &[0, 1 << 40], None), Ok(0));
        assert_eq!(first(0, &[-1], None), Err(Code::InvalidArgument));
        assert_eq!(
            first(8, &[i64::MAX, i64::MAX, i64::MAX], None),
            Err(Code::InvalidArgument)
        );
    }

    #[test]
    fn a_layout_names_each_dimension_once() {
        assert!(check_order(&[0, 1], &[2, 3]).is_ok());
        assert!(check_order(&[1, 2, 0], &[2, 3, 4]).is_ok());
        for (order, dims) in [
            (&[0, 0][..], &[2, 3][..]),
            (&[0], &[2, 3]),
            (&[0, 2], &[2, 3]),
            (&[0, 1], &[0, 3]),
        ] {
            let error = check_order(order, dims).expect_err("no layout");
            assert_eq!(error.code(), Code::InvalidArgument, "{order:?} {dims:?}");
        }
    }

    #[test]
    fn strides_reach_as_far_as_they_say() {
        // Every second row of four.
        assert_eq!(first(36, &[2, 3], Some(&[24, 4])), Ok(0));
        assert_eq!(
            first(35, &[2, 3], Some(&[24, 4])),
            Err(Code::InvalidArgument)
        );
        // Backwards: index zero is the last.
        assert_eq!(first(12, &[3], Some(&[-4])), Ok(8));
        assert_eq!(first(11, &[3], Some(&[-4])), Err(Code::InvalidArgument));
        // Broadcast.
        assert_eq!(first(4, &[1000], Some(&[0])), Ok(0));
        assert_eq!(
            first(4, &[2], Some(&[i64::MAX])),
            Err(Code::InvalidArgument)
        );
        assert_eq!(first(4, &[2], Some(&[4, 4])), Err(Code::InvalidArgument));
        assert_eq!(first(0, &[0], Some(&[4])), Ok(0));
    }
}
