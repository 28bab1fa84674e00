//! What is built is read back, whatever its shape.

use futures::executor::block_on;
use proptest::prelude::*;
use waystation_ocdbt::{Builder, Error, Location, ManifestKind, NewFile, Value};

use crate::support::{
    Memory, Pairs, build, config, everything, ids, is_stored, open, pairs, stored,
};

#[test]
fn one_leaf_and_one_data_file() {
    let pairs = pairs(100);
    let (memory, built) = stored(&pairs, config(100_000_000, 10, true));
    assert_eq!(
        (built.height, built.files.len(), memory.files.len()),
        (0, 1, 2)
    );
    assert_eq!(built.statistics.keys, 100);
    assert_eq!(built.statistics.stored_value_bytes, 34 * 50);
    let database = open(&memory);
    assert_eq!(everything(&database), pairs);
    assert_eq!(database.version().generation, 1);
    let root = database.version().root.clone().unwrap();
    assert_eq!(root.statistics, built.statistics);
    // The values lie before the node, back to back.
    assert_eq!(root.location.range(), 34 * 50..built.files[0].length);
}

#[test]
fn trees_of_many_levels() {
    let pairs = pairs(500);
    for (node_bytes, height) in [(100_000, 0), (4000, 1), (700, 3)] {
        let (memory, built) = stored(&pairs, config(node_bytes, 10, false));
        assert!(built.height >= height, "{node_bytes}: {}", built.height);
        let database = open(&memory);
        assert_eq!(everything(&database), pairs);
        let report = block_on(database.check(1000)).unwrap();
        assert_eq!(report.statistics, built.statistics);
        assert_eq!(report.nodes == 1, height == 0);
        assert!(block_on(database.check(report.nodes)).is_ok());
        let fewer = block_on(database.check(report.nodes - 1));
        assert!(matches!(fewer, Err(Error::TooLarge { .. })));
    }
    // No bound is too small: the tree still ends.
    let (memory, built) = stored(&pairs, config(1, 10, false));
    assert_eq!(built.height, 9);
    assert_eq!(everything(&open(&memory)), pairs);
}

#[test]
fn a_database_without_keys() {
    let (memory, built) = stored(&Pairs::new(), config(1000, 10, true));
    assert!(built.files.is_empty());
    let database = open(&memory);
    assert!(database.version().root.is_none());
    assert!(everything(&database).is_empty());
    assert_eq!(block_on(database.get(b"a")).unwrap(), None);
    assert_eq!(block_on(database.check(0)).unwrap().nodes, 0);
}

#[test]
fn values_up_to_the_limit_are_inline() {
    let pairs = Pairs::from([
        (b"a".to_vec(), vec![1; 1024]),
        (b"b".to_vec(), vec![2; 1025]),
        (b"c".to_vec(), vec![]),
    ]);
    let (memory, _) = stored(&pairs, config(100_000_000, 1024, true));
    let database = open(&memory);
    let is_out = |key: &[u8]| is_stored(&block_on(database.get(key)).unwrap().unwrap());
    assert_eq!(
        (is_out(b"a"), is_out(b"b"), is_out(b"c")),
        (false, true, false)
    );
    assert_eq!(everything(&database), pairs);
}

#[test]
fn data_files_get_no_more_when_they_have_their_target() {
    let mut builder = Builder::new(config(1 << 20, 0, true), ids(7))
        .unwrap()
        .target_data_file_bytes(100);
    let mut files: Vec<NewFile> = Vec::new();
    for number in 0..10_u8 {
        builder
            .put(vec![number].into(), vec![number; 40].into())
            .unwrap();
        files.extend(builder.take_full_files());
    }
    assert_eq!(
        files.iter().map(|file| file.length).collect::<Vec<_>>(),
        [120; 3]
    );
    let mut built = builder.finish(1).unwrap();
    files.append(&mut built.files);
    built.files = files;
    assert_eq!(built.files.len(), 4);
    let mut memory = Memory::default();
    memory.add("", &built);
    assert_eq!(everything(&open(&memory)).len(), 10);
}

#[test]
fn keys_that_do_not_come_in_order_are_refused_and_change_nothing() {
    let mut builder = Builder::new(config(1000, 0, true), ids(7)).unwrap();
    builder.put("b".into(), "1".into()).unwrap();
    for key in ["b", "a", ""] {
        let refused = builder.put(key.into(), "2".into());
        assert!(matches!(refused, Err(Error::Order { .. })), "{key}");
    }
    let long = vec![b'c'; 65536];
    assert!(matches!(
        builder.put(long.into(), "2".into()),
        Err(Error::TooLarge { .. })
    ));
    let large = Value::Inline(vec![0; (1 << 20) + 1].into());
    assert!(builder.put_value("c".into(), large).is_err());
    let built = builder.finish(1).unwrap();
    let mut memory = Memory::default();
    memory.add("", &built);
    let expected = Pairs::from([(b"b".to_vec(), b"1".to_vec())]);
    assert_eq!(everything(&open(&memory)), expected);
}

#[test]
fn only_single_manifests_are_built() {
    let mut numbered = config(1000, 0, true);
    numbered.manifest_kind = ManifestKind::Numbered;
    assert!(matches!(
        Builder::new(numbered, ids(1)),
        Err(Error::Numbered)
    ));
    let mut odd = config(1000, 0, true);
    odd.version_tree_arity_log2 = 0;
    assert!(Builder::new(odd, ids(1)).is_err());
}

#[test]
fn an_end_past_64_bits_is_no_location() {
    let built = build(&pairs(1), config(1000, 0, true), 1);
    let file = &built.files[0].file;
    assert!(Location::new(file.clone(), u64::MAX - 5, 5).is_ok());
    assert!(Location::new(file.clone(), u64::MAX - 5, 6).is_err());
}

fn any_pairs() -> impl Strategy<Value = Pairs> {
    let key = prop_oneof![
        prop::collection::vec(prop_oneof![Just(0_u8), Just(b'a'), Just(0xff)], 0..5),
        "[a-c]{0,2}/[a-c]{0,3}".prop_map(String::into_bytes),
        "layers\\.[0-3]\\.[wb]/[0-3]\\.[0-3]".prop_map(String::into_bytes),
    ];
    let value = prop::collection::vec(any::<u8>(), 0..40);
    prop::collection::btree_map(key, value, 0..120)
}

proptest! {
    #[test]
    fn databases_round_trip(
        pairs in any_pairs(),
        node_bytes in prop_oneof![1..300_u32, 300..3000_u32, Just(100_000_000)],
        inline in 0..40_u32,
        zstd in any::<bool>(),
        bounds in (prop::collection::vec(any::<u8>(), 0..3), prop::option::of("[a-c/l]{0,3}")),
        prefix in "[a-c/l]{0,3}",
    ) {
        let (memory, built) = stored(&pairs, config(node_bytes, inline, zstd));
        let database = open(&memory);
        prop_assert_eq!(&everything(&database), &pairs);
        let report = block_on(database.check(u64::MAX)).unwrap();
        prop_assert_eq!(report.statistics, built.statistics);
        for key in pairs.keys() {
            let value = block_on(database.get(key)).unwrap().unwrap();
            let value = block_on(database.value(&value, 100)).unwrap();
            prop_assert_eq!(&value[..], &pairs[key][..]);
            // A key that is not there.
            let other = [&key[..], b"!"].concat();
            prop_assert_eq!(block_on(database.get(&other)).unwrap().is_some(), pairs.contains_key(&other));
        }

        let keys = |entries: Vec<waystation_ocdbt::Entry>| -> Vec<Vec<u8>> {
            entries.into_iter().map(|entry| entry.key.to_vec()).collect()
        };
        let (start, end) = (&bounds.0[..], bounds.1.as_ref().map(|end| end.as_bytes()));
        let listed = block_on(database.range(start, end).collect(1000)).unwrap();
        let within = |key: &&Vec<u8>| key[..] >= *start && end.is_none_or(|end| key[..] < *end);
        prop_assert_eq!(keys(listed), pairs.keys().filter(within).cloned().collect::<Vec<_>>());
        let listed = block_on(database.list(prefix.as_bytes()).collect(1000)).unwrap();
        let within = |key: &&Vec<u8>| key.starts_with(prefix.as_bytes());
        prop_assert_eq!(keys(listed), pairs.keys().filter(within).cloned().collect::<Vec<_>>());
    }
}
