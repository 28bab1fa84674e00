//! Frames as XLA would never make them, and those that it makes.

use super::*;
use std::ffi::{CStr, c_int, c_void};
use std::ptr::null;

/// Stands for XLA's error.
struct Reported {
    code: c_int,
    message: String,
}

unsafe extern "C" fn create(args: *mut sys::XLA_FFI_Error_Create_Args) -> *mut sys::XLA_FFI_Error {
    // SAFETY: `report` passes complete arguments.
    let (code, message) = unsafe { ((*args).code, CStr::from_ptr((*args).message)) };
    let message = message.to_string_lossy().into_owned();
    Box::into_raw(Box::new(Reported { code, message })).cast()
}

/// A table may be seen by every thread.
struct Shared(sys::XLA_FFI_Api);

// SAFETY: it is constant.
unsafe impl Sync for Shared {}

static API: Shared = Shared(sys::XLA_FFI_Api {
    struct_size: size_of::<sys::XLA_FFI_Api>(),
    extension_start: null_mut(),
    api_version: sys::XLA_FFI_Api_Version {
        struct_size: size_of::<sys::XLA_FFI_Api_Version>(),
        extension_start: null_mut(),
        major_version: 0,
        minor_version: 3,
    },
    internal_api: null(),
    error_create: Some(create),
});

/// A buffer of `ty` with these dimensions at `data`, and its dimensions.
struct Made {
    raw: sys::XLA_FFI_Buffer,
    _dims: Box<[i64]>,
}

fn made(ty: c_int, dims: &[i64], data: *mut c_void) -> Made {
    let dims: Box<[i64]> = dims.into();
    let raw = sys::XLA_FFI_Buffer {
        struct_size: size_of::<sys::XLA_FFI_Buffer>(),
        extension_start: null_mut(),
        dtype: ty,
        data,
        rank: i64::try_from(dims.len()).expect("few"),
        dims: dims.as_ptr(),
    };
    Made { raw, _dims: dims }
}

const F32: c_int = 11;
const S32: c_int = 4;
static SCALAR: c_int = sys::FFI_SCALAR;

fn call(
    inputs: &[&sys::XLA_FFI_Buffer],
    outputs: &[&sys::XLA_FFI_Buffer],
    change: impl FnOnce(&mut sys::XLA_FFI_CallFrame),
    target: fn(&mut Frame<'_>) -> Result<(), Failure>,
) -> Result<(), (c_int, String)> {
    // SAFETY: the frame is whole, or wrong in ways that are to be found.
    call_with(inputs, outputs, change, |frame| unsafe {
        enter(frame, target)
    })
}

fn call_with(
    inputs: &[&sys::XLA_FFI_Buffer],
    outputs: &[&sys::XLA_FFI_Buffer],
    change: impl FnOnce(&mut sys::XLA_FFI_CallFrame),
    enter: impl FnOnce(*mut sys::XLA_FFI_CallFrame) -> *mut sys::XLA_FFI_Error,
) -> Result<(), (c_int, String)> {
    let kinds = vec![sys::FFI_BUFFER; inputs.len() + outputs.len()];
    let list = |buffers: &[&sys::XLA_FFI_Buffer]| -> Vec<*const sys::XLA_FFI_Buffer> {
        buffers
            .iter()
            .map(|buffer| std::ptr::from_ref(*buffer))
            .collect()
    };
    let (inputs, outputs) = (list(inputs), list(outputs));
    let buffers = |buffers: &Vec<*const sys::XLA_FFI_Buffer>| sys::XLA_FFI_Buffers {
        struct_size: size_of::<sys::XLA_FFI_Buffers>(),
        extension_start: null_mut(),
        size: i64::try_from(buffers.len()).expect("few"),
        kinds: kinds.as_ptr(),
        buffers: buffers.as_ptr(),
    };
    let letter = b'L';
    let scalar = sys::XLA_FFI_Scalar {
        dtype: 6,
        value: (&raw const letter).cast(),
    };
    let name = sys::XLA_FFI_ByteSpan {
        ptr: c"uplo".as_ptr(),
        len: 4,
    };
    let (names, values): ([*const _; 1], [*const c_void; 1]) =
        ([&raw const name], [(&raw const scalar).cast()]);
    let mut frame = sys::XLA_FFI_CallFrame {
        struct_size: size_of::<sys::XLA_FFI_CallFrame>(),
        extension_start: null_mut(),
        api: &raw const API.0,
        context: null_mut(),
        stage: sys::FFI_STAGE_EXECUTE,
        args: buffers(&inputs),
        rets: buffers(&outputs),
        attrs: sys::XLA_FFI_Attrs {
            struct_size: size_of::<sys::XLA_FFI_Attrs>(),
            extension_start: null_mut(),
            size: 1,
            kinds: &raw const SCALAR,
            names: names.as_ptr(),
            attrs: values.as_ptr(),
        },
    };
    change(&mut frame);
    let error = enter(&raw mut frame);
    if error.is_null() {
        return Ok(());
    }
    // SAFETY: from `create`, and taken back once.
    let reported = unsafe { Box::from_raw(error.cast::<Reported>()) };
    Err((reported.code, reported.message))
}

/// Doubles operand 0 into result 0.
fn double(frame: &mut Frame<'_>) -> Result<(), Failure> {
    frame.expect(1, 1)?;
    frame.letter("uplo", b"L")?;
    for value in frame.output_from::<f32>(0, 0)? {
        *value *= 2.0;
    }
    Ok(())
}

fn at<T>(memory: &mut [T]) -> *mut c_void {
    memory.as_mut_ptr().cast()
}

#[test]
fn results_take_an_operands_place_or_their_own() {
    let (mut x, mut y) = ([1_f32, 2., 3.], [0_f32; 3]);
    let input = made(F32, &[3], at(&mut x));
    let output = made(F32, &[3], at(&mut y));
    let before = calls();
    assert_eq!(call(&[&input.raw], &[&output.raw], |_| (), double), Ok(()));
    assert!(calls() > before);
    assert_eq!((x, y), ([1., 2., 3.], [2., 4., 6.]));
    assert_eq!(call(&[&input.raw], &[&input.raw], |_| (), double), Ok(()));
    assert_eq!(x, [2., 4., 6.]);
    // Half over each other.
    let mut z = [1_f32, 2., 3., 4.];
    let input = made(F32, &[3], at(&mut z));
    let output = made(F32, &[3], at(&mut z[1..]));
    assert_eq!(call(&[&input.raw], &[&output.raw], |_| (), double), Ok(()));
    assert_eq!(z, [1., 2., 4., 6.]);
}

#[test]
fn memory_is_lent_once() {
    let (mut x, mut y) = ([1_f32; 4], [0_f32; 4]);
    let input = made(F32, &[4], at(&mut x));
    let output = made(F32, &[4], at(&mut y));
    let result = call(
        &[&input.raw],
        &[&output.raw],
        |_| (),
        |frame| {
            frame.output::<f32>(0, &[4])?;
            frame.output::<f32>(0, &[4])?;
            Ok(())
        },
    );
    assert!(result.expect_err("twice").1.contains("was lent before"));
    let result = call(&[&input.raw], &[&output.raw, &output.raw], |_| (), double);
    assert!(
        result
            .expect_err("two")
            .1
            .contains("where another result lies")
    );
    // An operand under a result is a copy before, and gone after.
    let result = call(
        &[&input.raw],
        &[&input.raw],
        |_| (),
        |frame| {
            let before = frame.input::<f32>(0)?;
            frame.output::<f32>(0, &[4])?.fill(7.0);
            assert_eq!(*before, [1.0; 4]);
            frame.input::<f32>(0)?;
            Ok(())
        },
    );
    assert!(result.expect_err("gone").1.contains("operand 0 lies where"));
    assert_eq!(x, [7.0; 4]);
}

#[test]
fn wrong_buffers_are_refused() {
    let mut x = [1_f32; 4];
    let data = at(&mut x);
    let good = made(F32, &[4], data);
    let refused = |buffer: &sys::XLA_FFI_Buffer| {
        let (code, message) = call(&[buffer], &[&good.raw], |_| (), double).expect_err("wrong");
        assert_eq!(code, Code::InvalidArgument.number(), "{message}");
        message
    };
    assert!(refused(&made(F32, &[-1], data).raw).contains("negative"));
    assert!(refused(&made(F32, &[4], null_mut()).raw).contains("without memory"));
    assert!(refused(&made(99, &[4], data).raw).contains("type number 99"));
    assert!(refused(&made(S32, &[4], data).raw).contains("operand 0 is s32[4], and f32"));
    assert!(refused(&made(F32, &[3], data).raw).contains("result 0 is f32[4], and [3]"));
    let huge = made(F32, &[1 << 40, 1 << 40], data);
    assert!(refused(&huge.raw).contains("address space"));
    let long = made(F32, &[1 << 61, 2, 1], data);
    assert!(refused(&long.raw).contains("address space"));
    let odd = made(F32, &[2], data.wrapping_byte_add(2));
    assert!(refused(&odd.raw).contains("between two elements"));
    let mut deep = made(F32, &[4], data);
    deep.raw.rank = 65;
    assert!(refused(&deep.raw).contains("65 dimensions"));
    let mut short = made(F32, &[4], data);
    short.raw.struct_size = 40;
    assert!(refused(&short.raw).contains("shorter"));
    // Nothing needs no memory.
    let nothing = made(F32, &[0, 7], null_mut());
    assert_eq!(
        call(&[&nothing.raw], &[&nothing.raw], |_| (), double),
        Ok(())
    );
}

#[test]
fn wrong_frames_are_refused() {
    let mut x = [1_f32; 4];
    let good = made(F32, &[4], at(&mut x));
    let refused = |change: fn(&mut sys::XLA_FFI_CallFrame)| {
        call(&[&good.raw], &[&good.raw], change, double)
            .expect_err("wrong")
            .1
    };
    assert!(refused(|frame| frame.struct_size = 100).contains("100 bytes"));
    assert!(refused(|frame| frame.stage = 1).contains("stage 1"));
    assert!(refused(|frame| frame.args.size = -1).contains("-1 operands"));
    assert!(refused(|frame| frame.rets.size = 65).contains("65 results"));
    assert!(refused(|frame| frame.args.buffers = null()).contains("no list"));
    assert!(refused(|frame| frame.args.size = 0).contains("1 operands and 1 results"));
    assert!(refused(|frame| frame.attrs.size = 0).contains("attribute uplo is missing"));
    assert!(refused(|frame| frame.attrs.size = 1 << 40).contains("attributes"));
    assert!(refused(|frame| frame.attrs.names = null()).contains("no list"));
    // SAFETY: null is asked for.
    assert!(unsafe { enter(null_mut(), double) }.is_null());
}

#[test]
fn a_panic_goes_no_further() {
    let result = call(&[], &[], |_| (), |_| panic!("a test"));
    let (code, message) = result.expect_err("it panicked");
    assert_eq!(code, Code::Unknown.number());
    assert!(message.contains("panicked"), "{message}");
}

#[test]
fn a_target_tells_what_it_is() {
    let mut metadata = sys::XLA_FFI_Metadata {
        struct_size: size_of::<sys::XLA_FFI_Metadata>(),
        api_version: sys::XLA_FFI_Api_Version {
            struct_size: 0,
            extension_start: null_mut(),
            major_version: 7,
            minor_version: 7,
        },
        traits: 7,
        state_type_id: 7,
    };
    let mut question = sys::XLA_FFI_Metadata_Extension {
        base: sys::XLA_FFI_InternalExtension {
            struct_size: size_of::<sys::XLA_FFI_Metadata_Extension>(),
            kind: sys::FFI_EXTENSION_METADATA,
            next: null_mut(),
        },
        metadata: &raw mut metadata,
    };
    let start = (&raw mut question).cast::<sys::XLA_FFI_InternalExtension>();
    let asked = call(
        &[],
        &[],
        |frame| frame.extension_start = start,
        |_| panic!("not a call"),
    );
    assert_eq!(asked, Ok(()));
    let version = &metadata.api_version;
    assert_eq!((version.major_version, version.minor_version), (0, 3));
    assert_eq!((metadata.traits, metadata.state_type_id), (0, 0));
    // SAFETY: `metadata` lives, and nobody else looks at it.
    unsafe { (*question.metadata).struct_size = 20 };
    let asked = call(&[], &[], |frame| frame.extension_start = start, |_| Ok(()));
    assert!(asked.expect_err("short").1.contains("shorter"));
}

/// As `call`, for a target that ends its calls later; XLA's table is too old for these.
#[test]
fn a_plugin_too_old_for_later_ends_is_told() {
    let error = call_with(
        &[],
        &[],
        |_| (),
        |frame| {
            // SAFETY: the frame is whole.
            unsafe { super::call::enter(frame, |_| panic!("not a call")) }
        },
    );
    assert_eq!(error.expect_err("too old").0, Code::Unimplemented.number());
    // In the other stages there is nothing to do.
    let done = call_with(
        &[],
        &[],
        |frame| frame.stage = 0,
        |frame| {
            // SAFETY: the frame is whole.
            unsafe { super::call::enter(frame, |_| panic!("not a call")) }
        },
    );
    assert_eq!(done, Ok(()));
}
