use std::path::Path;

use proptest::prelude::*;
use waystation_stablehlo::{compile_options::device_assignment, wire::Value};

use super::*;

const NUM_REPLICAS: u32 = 4;
const NUM_PARTITIONS: u32 = 5;

fn entry(key: &str, value: &str) -> Vec<u8> {
    let mut inner = Message::default();
    inner.push_bytes(1, value.as_bytes());
    let mut entry = Message::default();
    entry.push_bytes(1, key.as_bytes());
    entry.push_bytes(2, &inner.encode());
    entry.encode()
}

/// Options as a client writes them: an unknown field on each level, dump options, paths, maps, an assignment.
fn client(
    ids: &[i32],
    change: impl Fn(&mut Message<'_>, &mut Message<'_>, &mut Message<'_>),
) -> Vec<u8> {
    let (mut options, mut build, mut debug) =
        (Message::default(), Message::default(), Message::default());
    debug.push_varint(31, 3);
    debug.push_bytes(61, b"/home/me/cuda");
    debug.push_bytes(109, b"/home/me/dump");
    debug.push_varint(112, 1);
    debug.push_varint(132, u64::MAX);
    debug.push_bytes(210, b"/home/me/profile");
    debug.push_varint(253, 1);
    debug.push_bytes(357, &entry("b", "1"));
    debug.push_bytes(357, &entry("a", "2"));
    debug.push_varint(9_999, 7);
    build.push_varint(1, u64::MAX);
    build.push_varint(NUM_REPLICAS, 1);
    build.push_varint(NUM_PARTITIONS, ids.len() as u64);
    let assignment = DeviceAssignment {
        num_replicas: 1,
        num_partitions: ids.len() as u32,
        device_ids: ids.to_vec(),
    };
    build.push_bytes(
        DEVICE_ASSIGNMENT,
        &compile_options::encode_assignment(&assignment),
    );
    build.push_varint(8_888, 1);
    options.push_varint(5, u64::MAX);
    options.push_bytes(ENV_OPTION_OVERRIDES, &entry("xla_b", "1"));
    options.push_bytes(ENV_OPTION_OVERRIDES, &entry("xla_a", "1"));
    options.push_bytes(
        ENV_OPTION_OVERRIDES,
        &entry("xla_dump_to", "/home/me/dump2"),
    );
    options.push_bytes(
        ENV_OPTION_OVERRIDES,
        &entry("xla_gpu_kernel_cache_file", "/home/me/kernels"),
    );
    options.push_varint(7_777, 1);
    change(&mut options, &mut build, &mut debug);
    build.push_bytes(DEBUG_OPTIONS, &debug.encode());
    options.push_bytes(EXECUTABLE_BUILD_OPTIONS, &build.encode());
    options.encode()
}

fn plain(ids: &[i32]) -> Vec<u8> {
    client(ids, |_, _, _| {})
}

/// Global ids 8, 9, ... are the plugin's 0, 1, ...
fn local(id: i32) -> Option<i32> {
    (8..16).contains(&id).then(|| id - 8)
}

fn prepared(options: &[u8], ids: &[i32], flags: &[&str]) -> Prepared {
    let flags: Vec<_> = flags.iter().map(|flag| (*flag).to_owned()).collect();
    prepare(options, ids, local, &flags).expect("valid")
}

fn contains(bytes: &[u8], text: &str) -> bool {
    bytes
        .windows(text.len())
        .any(|window| window == text.as_bytes())
}

/// The fields of the debug options inside.
fn debug_fields(options: &[u8]) -> Vec<(u32, Vec<u8>)> {
    let options = Message::parse(options).expect("options");
    let build = options
        .message(EXECUTABLE_BUILD_OPTIONS)
        .expect("build")
        .expect("there")
        .into_owned();
    let build = Message::parse(&build).expect("build");
    let debug = build
        .message(DEBUG_OPTIONS)
        .expect("debug")
        .expect("there")
        .into_owned();
    let debug = Message::parse(&debug).expect("debug");
    let bytes = |value: Value<'_>| match value {
        Value::Varint(value) => value.to_le_bytes().to_vec(),
        Value::Bytes(bytes) => bytes.to_vec(),
        _ => Vec::new(),
    };
    debug
        .fields()
        .map(|(number, value)| (number, bytes(value)))
        .collect()
}

fn overrides(options: &[u8]) -> Vec<String> {
    let options = Message::parse(options).expect("options");
    let entries = options.repeated(ENV_OPTION_OVERRIDES).expect("entries");
    let name =
        |entry: &&[u8]| String::from_utf8(flags::name_of(entry).expect("entry")).expect("text");
    entries.iter().map(name).collect()
}

#[test]
fn the_plugin_sees_its_own_device_ids() {
    let options = prepared(&plain(&[10, 8, 9]), &[10, 8, 9], &[]);
    assert_eq!((options.num_replicas, options.num_partitions), (1, 3));
    assert_eq!(
        device_assignment(&options.plugin_options)
            .expect("valid")
            .device_ids,
        [2, 0, 1]
    );
}

#[test]
fn no_path_of_the_client_reaches_the_plugin() {
    let options = prepared(&plain(&[8]), &[8], &[]);
    for bytes in [&options.plugin_options, &options.key_options] {
        assert!(!contains(bytes, "/home/me"));
        assert!(!contains(bytes, "xla_dump_to"));
        assert!(!contains(bytes, "xla_gpu_kernel_cache_file"));
    }
    let numbers: Vec<_> = debug_fields(&options.plugin_options)
        .into_iter()
        .map(|(number, _)| number)
        .collect();
    assert_eq!(numbers, [31, 253, 357, 357, 9_999, 61]);
    assert!(debug_fields(&options.plugin_options).contains(&(61, b"./cuda_sdk_lib".to_vec())));
}

#[test]
fn fields_nobody_knows_reach_the_plugin() {
    let options = prepared(&plain(&[8]), &[8], &[]);
    let message = Message::parse(&options.plugin_options).expect("options");
    assert_eq!(message.varint(7_777), Ok(Some(1)));
    assert_eq!(message.varint(5), Ok(Some(u64::MAX)));
    let build = message
        .message(EXECUTABLE_BUILD_OPTIONS)
        .expect("build")
        .expect("there")
        .into_owned();
    assert_eq!(
        Message::parse(&build).expect("build").varint(8_888),
        Ok(Some(1))
    );
}

#[test]
fn flags_win_over_the_clients_overrides() {
    let flags = [
        "--xla_a=5",
        "--xla_c",
        "--xla_c=false",
        "--xla_dump_to=/operator",
    ];
    let options = prepared(&plain(&[8]), &[8], &flags);
    assert_eq!(
        overrides(&options.plugin_options),
        ["xla_b", "xla_a", "xla_c", "xla_dump_to"]
    );
    assert!(
        contains(&options.plugin_options, "\x12\x03\x0a\x015"),
        "xla_a has the flag's value"
    );
    assert!(
        contains(&options.plugin_options, "/operator"),
        "the operator may dump"
    );
    assert_eq!(overrides(&options.key_options), ["xla_a", "xla_b", "xla_c"]);
}

#[test]
fn the_key_depends_on_what_is_compiled_and_on_nothing_else() {
    let key =
        |options: &[u8], ids: &[i32], flags: &[&str]| prepared(options, ids, flags).key_options;
    let base = key(&plain(&[8, 9]), &[8, 9], &[]);
    assert_eq!(
        key(&plain(&[13, 11]), &[13, 11], &[]),
        base,
        "other devices"
    );
    assert_eq!(
        key(&plain(&[8, 9]), &[8, 9], &["--xla_dump_to=/x"]),
        base,
        "a dump"
    );
    let descending = |value: Value<'_>| -> Vec<u8> {
        match value {
            Value::Bytes(entry) => entry.iter().map(|byte| !*byte).collect(),
            _ => Vec::new(),
        }
    };
    let reordered = client(&[8, 9], |options, _, debug| {
        options.sort_occurrences(ENV_OPTION_OVERRIDES, descending);
        debug.sort_occurrences(357, flags::map_key);
    });
    assert_eq!(
        key(&reordered, &[8, 9], &[]),
        base,
        "another order of map entries"
    );
    let undumped = client(&[8, 9], |_, _, debug| {
        [61, 109, 112, 132, 210, 253]
            .into_iter()
            .for_each(|number| debug.remove(number));
        debug.push_bytes(61, b"./cuda_sdk_lib");
    });
    assert_eq!(key(&undumped, &[8, 9], &[]), base, "no dump at all");

    let others = [
        key(&plain(&[8]), &[8], &[]),
        key(
            &client(&[8, 9], |_, _, debug| debug.set_varint(31, 2)),
            &[8, 9],
            &[],
        ),
        key(
            &client(&[8, 9], |_, _, debug| {
                debug.push_bytes(357, &entry("c", "1"))
            }),
            &[8, 9],
            &[],
        ),
        key(
            &client(&[8, 9], |_, build, _| build.push_varint(6, 1)),
            &[8, 9],
            &[],
        ),
        key(
            &client(&[8, 9], |options, _, _| {
                options.push_bytes(7, &entry("xla_z", "1"))
            }),
            &[8, 9],
            &[],
        ),
        key(&plain(&[8, 9]), &[8, 9], &["--xla_a=2"]),
    ];
    for (index, other) in others.iter().enumerate() {
        assert_ne!(*other, base, "change {index}");
        assert!(
            !others[..index].contains(other),
            "change {index} looks like another"
        );
    }
}

#[test]
fn options_without_an_assignment_get_the_requests_devices() {
    let options = prepare(&[], &[9], local, &[]).expect("valid");
    assert_eq!(
        device_assignment(&options.plugin_options)
            .expect("valid")
            .device_ids,
        [1]
    );
    let portable = [0x20, 0x01];
    let options = prepare(&portable, &[9], local, &[]).expect("valid");
    let message = Message::parse(&options.plugin_options).expect("options");
    assert_eq!(
        message.varint(COMPILE_PORTABLE_EXECUTABLE),
        Ok(None),
        "XLA refuses both together"
    );
}

#[test]
fn what_does_not_fit_is_refused() {
    let options = plain(&[8, 9]);
    let refused = |ids: &[i32], flag: &str| {
        prepare(&options, ids, local, &[flag.to_owned()]).expect_err("refused")
    };
    assert!(matches!(
        refused(&[9, 8], "--xla_a"),
        Error::OtherDevices { .. }
    ));
    assert!(matches!(
        refused(&[8], "--xla_a"),
        Error::OtherDevices { .. }
    ));
    assert!(matches!(refused(&[8, 9], "-a"), Error::Flag { .. }));
    assert!(matches!(
        prepare(&plain(&[3]), &[3], local, &[]),
        Err(Error::NotLocal { id: 3 })
    ));
    assert!(matches!(
        prepare(&[0x1a, 9], &[8], local, &[]),
        Err(Error::Devices(_))
    ));
    let broken = client(&[8], |options, _, _| {
        options.push_bytes(ENV_OPTION_OVERRIDES, &[0x0a])
    });
    assert!(matches!(
        prepare(&broken, &[8], local, &[]),
        Err(Error::Options {
            part: "env_option_overrides",
            ..
        })
    ));
}

#[test]
fn the_workers_dump_replaces_every_other() {
    let options = prepared(
        &plain(&[8]),
        &[8],
        &["--xla_dump_to=/operator", "--xla_a=5"],
    );
    let dumped =
        super::super::with_dump(&options.plugin_options, Path::new("/private/dir")).expect("valid");
    assert_eq!(overrides(&dumped), ["xla_b", "xla_a"]);
    let fields = debug_fields(&dumped);
    let of = |number: u32| {
        fields
            .iter()
            .filter(|(n, _)| *n == number)
            .map(|(_, value)| value.clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(of(109), [b"/private/dir".to_vec()]);
    assert_eq!(of(112), [1_u64.to_le_bytes().to_vec()]);
    assert_eq!(of(132), [u64::MAX.to_le_bytes().to_vec()]);
    assert_eq!(of(253), [1_u64.to_le_bytes().to_vec()]);
    assert_eq!(of(9_999).len(), 1, "the rest stays");
}

proptest! {
    #[test]
    fn any_bytes_are_prepared_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = prepare(&bytes, &[8], local, &[]);
        let _ = super::super::with_dump(&bytes, Path::new("/d"));
    }

    #[test]
    fn a_flipped_bit_does_no_harm(bit in any::<proptest::sample::Index>()) {
        let mut options = plain(&[8, 9]);
        let bit = bit.index(options.len() * 8);
        options[bit / 8] ^= 1 << (bit % 8);
        if let Ok(prepared) = prepare(&options, &[8, 9], local, &[]) {
            prop_assert_eq!(device_assignment(&prepared.plugin_options).expect("valid").device_ids, vec![0, 1]);
        }
    }
}

/// An empty `DebugOptions` sets every option to zero, and XLA then refuses to compile.
#[test]
fn debug_options_that_are_not_there_stay_away() {
    let mut build = Message::default();
    build.push_varint(NUM_REPLICAS, 1);
    build.push_varint(NUM_PARTITIONS, 1);
    let mut options = Message::default();
    options.push_bytes(EXECUTABLE_BUILD_OPTIONS, &build.encode());
    let prepared = prepare(&options.encode(), &[0], Some, &[]).expect("valid");
    let dumping = dump::with_dump(&prepared.plugin_options, Path::new("/tmp/dump")).expect("valid");
    for options in [&prepared.plugin_options, &prepared.key_options, &dumping] {
        let options = Message::parse(options).expect("options");
        let build = options
            .message(EXECUTABLE_BUILD_OPTIONS)
            .expect("build")
            .expect("there")
            .into_owned();
        let build = Message::parse(&build).expect("build");
        assert_eq!(build.message(DEBUG_OPTIONS).expect("readable"), None);
    }
    assert!(contains(&dumping, "xla_dump_to") && contains(&dumping, "/tmp/dump"));
}
