use std::path::Path;

use proptest::prelude::*;
use waystation_stablehlo::compile_options::device_assignment;

use super::*;

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

/// The debug options inside.
fn debug_options(options: &[u8]) -> Option<Vec<u8>> {
    let options = Message::parse(options).expect("options");
    let build = part(&options, EXECUTABLE_BUILD_OPTIONS, "build").expect("build");
    let build = Message::parse(&build).expect("build");
    let debug = build.message(DEBUG_OPTIONS).expect("readable");
    debug.map(Cow::into_owned)
}

fn overrides(options: &[u8]) -> Vec<String> {
    let options = Message::parse(options).expect("options");
    let entries = options.repeated(ENV_OPTION_OVERRIDES).expect("entries");
    let name = |entry: &&[u8]| Override::decode(entry).expect("entry").name;
    entries.iter().map(name).collect()
}

/// Everything that goes into a key.
fn keyed(options: &[u8], ids: &[i32], flags: &[&str]) -> (Vec<u8>, Vec<(String, String)>) {
    let prepared = prepared(options, ids, flags);
    let flags = prepared.key_flags(None);
    (prepared.key_options, flags)
}

fn key_flags(options: &[u8], flags: &[&str]) -> Vec<String> {
    let (_, flags) = keyed(options, &[8], flags);
    let flat = |(name, value)| format!("{name} = {value}");
    flags.into_iter().map(flat).collect()
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
}

/// An empty `DebugOptions` would set every option to zero, and XLA would then refuse to compile.
#[test]
fn the_clients_debug_options_stay_away() {
    let options = prepared(&plain(&[8]), &[8], &[]);
    assert_eq!(debug_options(&options.plugin_options), None);
    assert_eq!(debug_options(&options.key_options), None);
}

#[test]
fn what_jax_sets_in_them_is_heard_and_its_defaults_say_nothing() {
    assert_eq!(
        key_flags(&plain(&[8]), &[]),
        ["xla_a = text 1", "xla_b = text 1"]
    );
    let unoptimized = client(&[8], |_, _, debug| {
        debug.set_varint(31, 0);
        debug.set_varint(73, 1);
        debug.push_bytes(30, b"rematerialization");
        debug.push_bytes(30, b"dce");
    });
    assert_eq!(
        key_flags(&unoptimized, &[])[2..],
        [
            "xla_backend_optimization_level = int 0",
            "xla_disable_hlo_passes = text rematerialization,dce",
            "xla_llvm_disable_expensive_passes = bool true"
        ]
    );
    let spelled_out = client(&[8], |_, _, debug| debug.set_varint(73, 0));
    assert_eq!(
        keyed(&spelled_out, &[8], &[]),
        keyed(&plain(&[8]), &[8], &[])
    );
    let wrong = client(&[8], |_, _, debug| debug.set_bytes(73, b"x"));
    assert!(matches!(
        prepare(&wrong, &[8], local, &[]),
        Err(Error::Options {
            part: "DebugOptions",
            ..
        })
    ));
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
fn the_program_wins_over_the_proxy_and_the_proxy_over_debug_options() {
    let flags = [
        "--xla_a=5",
        "--xla_c",
        "--xla_c=false",
        "--xla_backend_optimization_level=2",
    ];
    let unoptimized = client(&[8], |_, _, debug| debug.set_varint(31, 0));
    assert_eq!(
        key_flags(&unoptimized, &flags),
        [
            "xla_a = text 1",
            "xla_b = text 1",
            "xla_backend_optimization_level = int 2",
            "xla_c = bool false"
        ]
    );
    let options = prepared(&unoptimized, &[8], &flags);
    assert_eq!(
        overrides(&options.plugin_options),
        ["xla_a", "xla_b", "xla_backend_optimization_level", "xla_c"]
    );
    assert!(
        contains(&options.plugin_options, "\x12\x03\x0a\x011"),
        "xla_a has the program's value"
    );
}

#[test]
fn the_operators_dumps_are_kept_apart() {
    let flags = ["--xla_dump_to=gs://b/d", "--xla_dump_hlo_as_proto"];
    let options = prepared(&plain(&[8]), &[8], &flags);
    assert!(!contains(&options.plugin_options, "xla_dump"));
    let dump = options.dump.expect("asked for");
    assert_eq!(dump.to, "gs://b/d");
    let dumping = super::super::with_dump(&options.plugin_options, Path::new("/d"), Some(&dump));
    assert_eq!(
        overrides(&dumping.expect("valid")),
        [
            "xla_a",
            "xla_b",
            "xla_dump_to",
            "xla_dump_hlo_as_text",
            "xla_dump_hlo_as_proto"
        ]
    );
    let nowhere = prepared(&plain(&[8]), &[8], &["--xla_dump_hlo_as_proto"]);
    assert_eq!(nowhere.dump, None);
}

#[test]
fn flags_without_effect_are_not_in_the_key() {
    let base = key_flags(&plain(&[8]), &[]);
    for flag in [
        "--xla_detailed_logging",
        "--xla_force_host_platform_device_count=3",
    ] {
        assert_eq!(key_flags(&plain(&[8]), &[flag]), base, "{flag}");
    }
    let mut own = Message::default();
    own.push_varint(31, 3);
    let defaults = Defaults::new(own.encode());
    let level = |value: &str| {
        let flag = format!("--xla_backend_optimization_level={value}");
        prepared(&plain(&[8]), &[8], &[&flag]).key_flags(Some(&defaults))
    };
    assert_eq!(level("3").len(), base.len(), "the plugin's own value");
    assert_eq!(level("2").len(), base.len() + 1);
}

#[test]
fn the_key_depends_on_what_is_compiled_and_on_nothing_else() {
    let key = keyed;
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
    let reordered = client(&[8, 9], |options, _, _| {
        options.sort_occurrences(ENV_OPTION_OVERRIDES, descending);
    });
    assert_eq!(
        key(&reordered, &[8, 9], &[]),
        base,
        "another order of map entries"
    );
    let other_client = client(&[8, 9], |_, _, debug| {
        debug.set_varint(9_999, 8);
        debug.set_bytes(109, b"/elsewhere");
    });
    assert_eq!(key(&other_client, &[8, 9], &[]), base, "another XLA");
    let spelled_out = client(&[8, 9], |options, build, _| {
        options.push_varint(2, 0);
        build.push_varint(6, 0);
        build.push_bytes(14, b"");
        build.remove(NUM_REPLICAS);
    });
    assert_eq!(key(&spelled_out, &[8, 9], &[]), base, "zeros");

    let others = [
        key(&plain(&[8]), &[8], &[]),
        key(
            &client(&[8, 9], |_, _, debug| debug.set_varint(31, 2)),
            &[8, 9],
            &[],
        ),
        key(
            &client(&[8, 9], |_, build, _| build.push_varint(9_998, 0)),
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
        key(&plain(&[8, 9]), &[8, 9], &["--xla_d=2"]),
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

proptest! {
    #[test]
    fn any_bytes_are_prepared_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = prepare(&bytes, &[8], local, &[]);
        let _ = super::super::with_dump(&bytes, Path::new("/d"), None);
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

/// What stands in keys: when this changes, entries in buckets are another rule's, and `waystation_cache::RULES` has to be
/// raised.
#[test]
fn the_rules_are_those_of_the_number() {
    let text = |bytes: &[u8]| {
        bytes
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>()
    };
    let (options, flags) = keyed(&plain(&[8, 9]), &[8, 9], &["--xla_cpu_enable_fast_math"]);
    assert_eq!(waystation_cache::RULES, 2);
    assert_eq!(
        text(&options),
        "1a2308ffffffffffffffffff01200128024a0e080110021a030a01001a030a0101c0ab040128ffffffffffffffffff0188e60301"
    );
    assert_eq!(
        flags,
        [
            ("xla_a", "text 1"),
            ("xla_b", "text 1"),
            ("xla_cpu_enable_fast_math", "bool true")
        ]
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
    );
}
