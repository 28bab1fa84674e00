//! Texts as pathwaysutils 0.1.13's helper makes them, and texts that are wrong in one place.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use proptest::prelude::*;
use waystation_proto::tensorflow::error::Code;
use waystation_proto::xla::{PrimitiveType, op_sharding::Type};

use super::*;

const WRITE: &str = r#"{"persistenceWriteRequest": {"b64_location": "L3RtcC9jay9zdGVw", "b64_name": "cGFyYW1zLnc=", "b64_hlo_sharding_string": "CAMaAgICSgICAlICAQA=", "shape": [8, 4], "devices": {"device_ids": [0, 1, 2, 3]}, "timeout": {"seconds": 90, "nanos": 500000000}}}"#;
const BULK_WRITE: &str = r#"{"bulk_persistence_write_request": {"write_requests": [{"b64_location": "Z3M6Ly9iL3A=", "b64_name": "cGFyYW1zLnc=", "b64_hlo_sharding_string": "CAMaAgICSgICAlICAQA=", "shape": [8, 4], "devices": {"device_ids": [0, 1, 2, 3]}, "timeout": {"seconds": 90, "nanos": 500000000}}, {"b64_location": "Z3M6Ly9iL3A=", "b64_name": "Yi/DvA==", "b64_hlo_sharding_string": "", "shape": [], "devices": {"device_ids": [0]}, "timeout": {"seconds": 90, "nanos": 500000000}}]}}"#;
const BULK_READ: &str = r#"{"bulk_persistence_read_request": {"read_requests": [{"b64_location": "L3RtcC9jay9zdGVw", "shape": {"xla_primitive_type_str": "BF16", "dimensions": [8, 4]}, "b64_name": "cGFyYW1zLnc=", "b64_hlo_sharding_string": "CAMaAgICSgICAlICAQA=", "devices": {"device_ids": [0, 1, 2, 3]}, "timeout": {"seconds": 90, "nanos": 500000000}}]}}"#;
const READ: &str = r#"{"persistenceReadRequest": {"b64_location": "L3RtcC9jay9zdGVw", "shape": {"xla_primitive_type_str": "S32", "dimensions": [8, 4]}, "b64_name": "cGFyYW1zLnc=", "b64_hlo_sharding_string": "CAMaAgICSgICAlICAQA=", "devices": {"device_ids": [0, 1, 2, 3]}, "timeout": {"seconds": 90, "nanos": 500000000}}}"#;

fn refusal(program: &str) -> Error {
    let error = parse(program).unwrap_err();
    assert!(error.to_string().contains("Bad PluginProgram"), "{error}");
    error
}

/// The single write program with one text in it replaced.
fn changed(from: &str, to: &str) -> String {
    assert!(WRITE.contains(from), "{from}");
    WRITE.replace(from, to)
}

fn named(name: &str) -> String {
    changed("cGFyYW1zLnc=", &BASE64_STANDARD.encode(name))
}

#[test]
fn a_single_write_is_read_in_full() {
    let Request::Write(items) = parse(WRITE).unwrap() else {
        panic!("not a write")
    };
    let [item] = items.as_slice() else {
        panic!("{} items", items.len())
    };
    assert_eq!(item.location, "/tmp/ck/step");
    assert_eq!(item.name, "params.w");
    assert_eq!(item.dims, [8, 4]);
    assert_eq!(item.device_ids, [0, 1, 2, 3]);
    assert_eq!(item.timeout, Some(Duration::from_millis(90_500)));
    assert_eq!(item.sharding.r#type(), Type::Other);
    assert_eq!(item.sharding.iota_transpose_perm, [1, 0]);
}

#[test]
fn a_bulk_write_keeps_order_and_takes_the_empty_sharding() {
    let Request::Write(items) = parse(BULK_WRITE).unwrap() else {
        panic!("not a write")
    };
    assert_eq!(items.len(), 2);
    assert_eq!(
        (items[0].location.as_str(), items[0].name.as_str()),
        ("gs://b/p", "params.w")
    );
    assert_eq!(items[1].name, "b/ü");
    assert_eq!(items[1].sharding, OpSharding::default());
    assert!(items[1].dims.is_empty());
}

#[test]
fn reads_carry_the_type_asked_for() {
    for (program, dtype) in [(BULK_READ, PrimitiveType::Bf16), (READ, PrimitiveType::S32)] {
        let Request::Read(items) = parse(program).unwrap() else {
            panic!("not a read")
        };
        assert_eq!(items.len(), 1);
        assert_eq!(items[0].dtype, dtype);
        assert_eq!(items[0].dims, [8, 4]);
        assert_eq!(items[0].timeout, Some(Duration::from_millis(90_500)));
    }
    for (name, dtype) in [
        ("PRED", PrimitiveType::Pred),
        ("F8E4M3FN", PrimitiveType::F8e4m3fn),
        ("s4", PrimitiveType::S4),
    ] {
        let Request::Read(items) = parse(&READ.replace("S32", name)).unwrap() else {
            panic!("not a read")
        };
        assert_eq!(items[0].dtype, dtype);
    }
    for name in [
        "TUPLE",
        "TOKEN",
        "OPAQUE_TYPE",
        "BUFFER",
        "PRIMITIVE_TYPE_INVALID",
        "float32",
        "",
    ] {
        refusal(&READ.replace("S32", name));
    }
}

#[test]
fn every_type_that_can_be_stored_can_be_asked_for_by_name() {
    let mut asked_for = 0;
    for dtype in crate::zarr::DType::all() {
        let dtype = dtype.primitive();
        let program = READ.replace("S32", dtype.as_str_name());
        let Ok(Request::Read(items)) = parse(&program) else {
            panic!("{program}");
        };
        assert_eq!(items[0].dtype, dtype);
        asked_for += usize::from(is_asked_for(dtype));
    }
    assert_eq!(asked_for, 11);
}

#[test]
fn other_programs_are_refused_by_name() {
    for request in ["profileRequest", "reshardRequest"] {
        let error = refusal(&format!(r#"{{"{request}": {{}}}}"#));
        assert!(error.to_string().contains(request), "{error}");
        assert_eq!(error.code(), Code::Unimplemented);
    }
    let long = refusal(&format!(r#"{{"{}": 1}}"#, "é".repeat(100_000)));
    assert!(long.to_string().len() < 1000);
}

#[test]
fn what_is_no_program_is_refused() {
    for program in [
        "",
        "{}",
        "[]",
        "null",
        "profileRequest",
        "{\"a\":1,\"b\":2}",
        &WRITE[..100],
        &format!("{WRITE}x"),
    ] {
        assert_eq!(refusal(program).code(), Code::InvalidArgument, "{program}");
    }
    // Nesting deeper than the parser's limit is an error, not an exhausted stack.
    refusal(&format!(
        "{{\"persistenceWriteRequest\":{}",
        "[".repeat(1_000_000)
    ));
}

#[test]
fn each_wrong_field_is_refused() {
    for (from, to) in [
        ("\"L3RtcC9jay9zdGVw\"", "\"\""),
        ("L3RtcC9jay9zdGVw", "not base64!"),
        ("L3RtcC9jay9zdGVw", "/w=="),
        ("cGFyYW1zLnc=", "/w=="),
        ("CAMaAgICSgICAlICAQA=", "//////8="),
        ("CAMaAgICSgICAlICAQA=", "CAQ="),
        ("[8, 4]", "[8]"),
        ("[8, 4]", "[8, -4]"),
        ("[8, 4]", "[8, 9223372036854775808]"),
        ("[8, 4]", "[8, 9223372036854775807]"),
        ("[8, 4]", "8"),
        ("[8, 4]", "null"),
        ("[0, 1, 2, 3]", "[0, 1, 2]"),
        ("[0, 1, 2, 3]", "[]"),
        ("[0, 1, 2, 3]", "[0, 1, 2, 2147483648]"),
        ("\"devices\"", "\"gadgets\""),
        ("90", "-1"),
        ("500000000", "1000000000"),
    ] {
        let error = refusal(&changed(from, to));
        assert_eq!(error.code(), Code::InvalidArgument, "{from} -> {to}");
        assert!(
            error.to_string().contains("persistenceWriteRequest"),
            "{error}"
        );
    }
}

#[test]
fn names_stay_below_the_location() {
    for name in [
        "a",
        "a/b.c",
        "odd name/%2F",
        "...",
        "..a/b..",
        "ü",
        "",
        "~",
        "a\\..\\b",
    ] {
        let Request::Write(items) = parse(&named(name)).unwrap() else {
            panic!("not a write")
        };
        assert_eq!(items[0].name, name);
    }
    for name in [
        "..",
        "../a",
        "a/../b",
        "a/..",
        ".",
        "./a",
        "/a",
        "/",
        "a//b",
        "a/",
        "a\0b",
        "a\nb",
        &"a".repeat(5000),
    ] {
        let error = refusal(&named(name));
        assert!(error.to_string().contains("name"), "{error}");
    }
}

#[test]
fn one_array_is_not_written_twice() {
    let error = refusal(&BULK_WRITE.replace("Yi/DvA==", "cGFyYW1zLnc="));
    assert!(
        error.to_string().contains("params.w") && error.to_string().contains("twice"),
        "{error}"
    );
}

#[test]
fn a_timeout_may_be_absent() {
    let Request::Write(items) = parse(&changed(
        r#", "timeout": {"seconds": 90, "nanos": 500000000}"#,
        "",
    ))
    .unwrap() else {
        panic!("not a write")
    };
    assert_eq!(items[0].timeout, None);
}

proptest! {
    #[test]
    fn no_text_panics(text in "\\PC{0,200}") {
        let _ = parse(&text);
    }

    #[test]
    fn no_change_of_one_byte_panics(at in 0..BULK_WRITE.len(), byte in any::<u8>()) {
        let mut bytes = BULK_WRITE.as_bytes().to_vec();
        bytes[at] = byte;
        if let Ok(text) = std::str::from_utf8(&bytes) {
            let _ = parse(text);
        }
    }
}
