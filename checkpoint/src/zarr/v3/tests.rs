use proptest::prelude::*;
use waystation_proto::xla::PrimitiveType;

use super::*;
use crate::zarr::{Codec, Shards};

/// As Orbax 0.12.8 with TensorStore 0.1.86 wrote it.
const ORBAX: &str = r#"{"chunk_grid":{"configuration":{"chunk_shape":[6,4]},"name":"regular"},"chunk_key_encoding":{"name":"default"},"codecs":[{"configuration":{"chunk_shape":[6,4],"codecs":[{"configuration":{"endian":"little"},"name":"bytes"},{"configuration":{"checksum":false,"level":3},"name":"zstd"}],"index_codecs":[{"configuration":{"endian":"little"},"name":"bytes"},{"name":"crc32c"}]},"name":"sharding_indexed"}],"data_type":"bfloat16","fill_value":0.0,"node_type":"array","shape":[12,8],"zarr_format":3}"#;

fn orbax() -> Metadata {
    let dtype = DType::of(PrimitiveType::Bf16).unwrap();
    let codec = Format::Zarr3.orbax_codec();
    Metadata::new(Format::Zarr3, &[12, 8], &[6, 4], dtype, codec).unwrap()
}

#[test]
fn writes_what_orbax_writes_but_for_checksums() {
    let text = String::from_utf8(orbax().encode().unwrap()).unwrap();
    assert_eq!(text.replace("true", "false"), ORBAX);
    assert_eq!(decode(ORBAX.as_bytes()).unwrap(), orbax());
    assert_eq!(decode(text.as_bytes()).unwrap(), orbax());
}

#[test]
fn every_element_type_is_read_back() {
    for dtype in DType::all() {
        for codec in [Codec::Raw, Codec::Zstd { level: 3 }] {
            let written = Metadata::new(Format::Zarr3, &[0, 8], &[0, 4], dtype, codec).unwrap();
            let read = decode(&written.encode().unwrap()).unwrap();
            assert_eq!(read, written);
            assert_eq!(read.grid.chunks(), [1, 4]);
        }
    }
}

fn changed(from: &str, to: &str) -> Result<Metadata> {
    assert!(ORBAX.contains(from), "{from}");
    decode(ORBAX.replacen(from, to, 1).as_bytes())
}

#[test]
fn reads_what_the_format_allows() {
    for (from, to) in [
        (r#"{"name":"default"}"#, r#""default""#),
        (r#"{"name":"crc32c"}"#, r#""crc32c""#),
        (
            r#"{"name":"crc32c"}"#,
            r#"{"configuration":{},"name":"crc32c"}"#,
        ),
        (r#""fill_value":0.0"#, r#""fill_value":"NaN""#),
        (r#""fill_value":0.0"#, r#""fill_value":"0x7fc0""#),
        (r#""checksum":false,"level":3"#, r#""level":3"#),
        (
            r#""shape""#,
            r#""attributes":{"a":1},"dimension_names":["x",null],"shape""#,
        ),
        (r#""shape""#, r#""storage_transformers":[],"shape""#),
        (r#""shape""#, r#""new":{"must_understand":false},"shape""#),
        (r#"crc32c"}]}"#, r#"crc32c"}],"index_location":"end"}"#),
    ] {
        assert_eq!(changed(from, to).unwrap(), orbax(), "{to}");
    }

    let mut shards = Shards::new(&[6, 4], &[3, 2]).unwrap();
    let inner = changed(r#"[6,4],"codecs""#, r#"[3,2],"codecs""#).unwrap();
    assert_eq!(inner.shards, Some(shards.clone()));
    assert_eq!(
        (inner.block(), inner.block_bytes()),
        (&[3, 2][..], Some(12))
    );
    shards = Shards::new(&[6, 4], &[6, 4]).unwrap();
    shards.checksum = false;
    let unchecked = changed(r#",{"name":"crc32c"}"#, "").unwrap();
    assert_eq!(unchecked.shards, Some(shards.clone()));
    (shards.checksum, shards.index_at_start) = (true, true);
    let start = changed(r#"crc32c"}]}"#, r#"crc32c"}],"index_location":"start"}"#).unwrap();
    assert_eq!(start.shards, Some(shards));

    let keys = changed(
        r#"{"name":"default"}"#,
        r#"{"name":"v2","configuration":{"separator":"/"}}"#,
    )
    .unwrap();
    assert_eq!(keys.keys.key(&[0, 1]), "0/1");
    let dots = changed(
        r#"{"name":"default"}"#,
        r#"{"name":"default","configuration":{"separator":"."}}"#,
    )
    .unwrap();
    assert_eq!(dots.keys.key(&[0, 1]), "c.0.1");
    let big = changed("little", "big").unwrap();
    assert!(big.big_endian);
    for metadata in [inner, unchecked, start, keys, dots, big] {
        assert_eq!(decode(&metadata.encode().unwrap()).unwrap(), metadata);
    }

    // Chunks that are no shards.
    let (from, to) = (
        ORBAX
            .find(r#"[{"configuration":{"chunk_shape":[6,4],"codecs""#)
            .unwrap(),
        ORBAX.find(r#","data_type""#).unwrap(),
    );
    for (codecs, codec) in [
        (
            r#"[{"name":"bytes","configuration":{"endian":"big"}}]"#,
            Codec::Raw,
        ),
        (
            r#"[{"name":"bytes","configuration":{"endian":"big"}},{"name":"zstd","configuration":{"level":5}}]"#,
            Codec::Zstd { level: 5 },
        ),
    ] {
        let plain =
            decode(format!("{}{codecs}{}", &ORBAX[..from], &ORBAX[to..]).as_bytes()).unwrap();
        assert_eq!(
            (plain.shards.clone(), plain.codec, plain.big_endian),
            (None, codec, true)
        );
        assert_eq!(decode(&plain.encode().unwrap()).unwrap(), plain);
    }
}

#[test]
fn each_wrong_member_is_refused() {
    for (from, to, unsupported) in [
        (r#""zarr_format":3"#, r#""zarr_format":2"#, false),
        (r#""node_type":"array""#, r#""node_type":"group""#, false),
        (r#","fill_value":0.0"#, "", false),
        (r#""fill_value":0.0"#, r#""fill_value":null"#, false),
        (r#""fill_value":0.0"#, r#""fill_value":"zero""#, false),
        (r#""fill_value":0.0"#, r#""fill_value":false"#, false),
        (
            r#""data_type":"bfloat16","fill_value":0.0"#,
            r#""data_type":"int4","fill_value":8"#,
            false,
        ),
        (
            r#""data_type":"bfloat16","fill_value":0.0"#,
            r#""data_type":"uint8","fill_value":-1"#,
            false,
        ),
        (
            r#""data_type":"bfloat16","fill_value":0.0"#,
            r#""data_type":"int64","fill_value":9223372036854775808"#,
            false,
        ),
        (
            r#""data_type":"bfloat16","fill_value":0.0"#,
            r#""data_type":"complex64","fill_value":[0.0]"#,
            false,
        ),
        (r#""shape":[12,8]"#, r#""shape":[12]"#, false),
        (r#""shape":[12,8]"#, r#""shape":[12,-8]"#, false),
        (r#""shape":[12,8]"#, r#""shape":[12,8.5]"#, false),
        (
            r#""shape":[12,8]"#,
            r#""shape":[12,99999999999999999999]"#,
            false,
        ),
        (
            r#""shape":[12,8]"#,
            r#""shape":[4611686018427387904,4611686018427387904]"#,
            false,
        ),
        (r#""chunk_shape":[6,4]"#, r#""chunk_shape":[0,4]"#, false),
        (
            r#""chunk_shape":[6,4]},"name":"regular""#,
            r#""chunk_shape":[6,4],"x":1},"name":"regular""#,
            false,
        ),
        (r#"[6,4],"codecs""#, r#"[4,4],"codecs""#, false),
        (r#"[6,4],"codecs""#, r#"[12,8],"codecs""#, false),
        (r#"[6,4],"codecs""#, r#"[6],"codecs""#, false),
        (r#""endian":"little""#, r#""endian":"middle""#, false),
        (
            r#"{"configuration":{"endian":"little"},"name":"bytes"}"#,
            r#"{"name":"bytes"}"#,
            false,
        ),
        (r#""level":3"#, r#""level":"high""#, false),
        (
            r#"crc32c"}]}"#,
            r#"crc32c"}],"index_location":"middle"}"#,
            false,
        ),
        (r#""name":"regular""#, r#""name":"rectangular""#, true),
        (r#"{"name":"default"}"#, r#"{"name":"suffix"}"#, true),
        (r#""bfloat16""#, r#""uint4""#, true),
        (r#""bfloat16""#, r#"{"name":"numpy.datetime64"}"#, true),
        (r#""name":"zstd""#, r#""name":"gzip""#, true),
        (r#""name":"crc32c""#, r#""name":"crc32""#, true),
        (r#""name":"bytes""#, r#""name":"transpose""#, true),
        (
            r#""shape""#,
            r#""storage_transformers":[{"name":"x"}],"shape""#,
            true,
        ),
        (
            r#""shape""#,
            r#""new":{"must_understand":true},"shape""#,
            true,
        ),
        (r#""shape""#, r#""new":1,"shape""#, true),
    ] {
        let error = changed(from, to).unwrap_err();
        assert_eq!(
            matches!(error, Error::Unsupported(_)),
            unsupported,
            "{from} -> {to}: {error}"
        );
    }
    // A shard of more chunks than anybody makes, and a nest of shards.
    let many = ORBAX
        .replace(
            "[6,4]},\"name\":\"regular",
            "[6291456,4]},\"name\":\"regular",
        )
        .replace("[6,4],\"codecs", "[1,1],\"codecs");
    assert!(decode(many.as_bytes()).is_err());
    let (from, to) = (
        ORBAX.find(r#"[{"configuration":{"endian"#).unwrap(),
        ORBAX.find(r#","index_codecs""#).unwrap(),
    );
    let codecs = ORBAX
        .find(r#"[{"configuration":{"chunk_shape":[6,4],"codecs""#)
        .unwrap();
    let end = ORBAX.find(r#","data_type""#).unwrap();
    let nested = format!("{}{}{}", &ORBAX[..from], &ORBAX[codecs..end], &ORBAX[to..]);
    assert!(matches!(
        decode(nested.as_bytes()),
        Err(Error::Unsupported(_))
    ));
    let deep = ORBAX.replace("0.0", &"[".repeat(1 << 16));
    assert!(decode(deep.as_bytes()).is_err());
    assert!(decode(b"").is_err() && decode(b"{}").is_err());
}

proptest! {
    #[test]
    fn no_change_of_a_few_bytes_panics(changes in proptest::collection::vec((0..ORBAX.len(), any::<u8>()), 1..4)) {
        let mut bytes = ORBAX.as_bytes().to_vec();
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        check(&bytes)?;
    }

    /// Numbers are what a grid is made of: any of them, anywhere.
    #[test]
    fn no_number_panics(numbers in proptest::collection::vec(prop_oneof![-2..20i64, any::<i64>(), (0..63u32).prop_map(|bit| 1 << bit)], 6)) {
        let [a, b, c, d, e, f] = numbers[..] else { unreachable!() };
        let text = ORBAX
            .replacen("[6,4]", &format!("[{a},{b}]"), 1)
            .replacen("[6,4]", &format!("[{c},{d}]"), 1)
            .replacen("[12,8]", &format!("[{e},{f}]"), 1);
        check(text.as_bytes())?;
    }
}

/// What is taken can be laid out, and written and read again.
fn check(bytes: &[u8]) -> std::result::Result<(), TestCaseError> {
    if let Ok(metadata) = decode(bytes) {
        let _ = (metadata.block_bytes(), metadata.block_strides());
        prop_assert!(
            metadata
                .shards
                .as_ref()
                .is_none_or(|shards| shards.index_bytes() <= (16 << 20) + 4)
        );
        prop_assert_eq!(decode(&metadata.encode().unwrap()).unwrap(), metadata);
    }
    Ok(())
}
