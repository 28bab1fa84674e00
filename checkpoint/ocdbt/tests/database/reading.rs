//! What is read, how often, and what is kept.

use futures::FutureExt as _;
use futures::executor::block_on;
use futures::future::join_all;
use waystation_ocdbt::{
    Database, Error, Limits, MANIFEST_NAME, Manifest, ManifestKind, numbered_manifest_name,
};

use crate::support::{Memory, config, contents, everything, open, pairs, stored};

#[test]
fn a_get_reads_one_node_of_each_height_and_a_kept_one_not_again() {
    let (memory, built) = stored(&pairs(500), config(800, 10, true));
    assert_eq!(built.height, 2);
    let database = open(&memory);
    assert_eq!(memory.reads(), 1, "the manifest");
    let key = b"layers.2.w/21.4";
    assert!(block_on(database.get(key)).unwrap().is_some());
    assert_eq!(memory.reads(), 4);
    assert!(block_on(database.get(key)).unwrap().is_some());
    assert_eq!(memory.reads(), 4);
}

#[test]
fn many_who_ask_at_once_read_a_node_once() {
    let all = pairs(500);
    let (memory, _) = stored(&all, config(100_000_000, 10, true));
    let database = open(&memory);
    let found = block_on(join_all(all.keys().map(|key| database.get(key))));
    assert!(found.iter().all(|value| matches!(value, Ok(Some(_)))));
    assert_eq!(memory.reads(), 2, "the manifest and the root");
}

#[test]
fn nodes_beyond_the_bound_are_dropped_and_read_again() {
    let all = pairs(500);
    let (memory, _) = stored(&all, config(700, 10, true));
    let database = open(&memory);
    let nodes = block_on(database.check(1000)).unwrap().nodes as usize;
    let all_kept = memory.reads();
    assert_eq!(all_kept, 1 + nodes);
    block_on(database.check(1000)).unwrap();
    assert_eq!(memory.reads(), all_kept, "all are kept");

    let limits = Limits {
        kept_bytes: 5000,
        ..Limits::default()
    };
    let database = block_on(Database::open(&memory, limits)).unwrap();
    block_on(database.check(1000)).unwrap();
    let before = memory.reads();
    assert_eq!(before, all_kept + 1 + nodes, "each once, on the way");
    block_on(database.check(1000)).unwrap();
    assert!(memory.reads() > before + nodes / 2, "most are gone");
    assert_eq!(everything(&database), all);

    let limits = Limits {
        kept_bytes: 0,
        ..Limits::default()
    };
    let database = block_on(Database::open(&memory, limits)).unwrap();
    assert_eq!(everything(&database), all);
}

#[test]
fn a_list_holds_no_more_than_its_bound() {
    let (memory, built) = stored(&pairs(500), config(700, 1000, true));
    assert!(built.height > 2);
    let list = |list_bytes| {
        let limits = Limits {
            kept_bytes: 0,
            list_bytes,
            ..Limits::default()
        };
        let database = block_on(Database::open(&memory, limits)).unwrap();
        let listed = block_on(database.list(b"").collect(1000));
        assert_eq!(listed.is_ok(), block_on(database.check(1000)).is_ok());
        listed
    };
    assert_eq!(list(100_000).unwrap().len(), 500);
    let refused = list(2000).unwrap_err();
    assert!(
        refused.to_string().starts_with("memory of the nodes"),
        "{refused}"
    );
}

#[test]
fn a_list_reads_only_the_nodes_of_its_prefix() {
    let all = pairs(500);
    let (memory, _) = stored(&all, config(2000, 1000, true));
    let database = open(&memory);
    let before = memory.reads();
    let listed = block_on(database.list(b"layers.3.w/").collect(1000)).unwrap();
    let read = memory.reads() - before;
    assert_eq!(listed.len(), 100);
    assert_eq!(contents(&database, listed).len(), 100);
    let nodes = block_on(database.check(1000)).unwrap().nodes as usize;
    assert!(read < nodes / 2, "{read} of {nodes}");
    let too_many = block_on(database.list(b"layers.3.w/").collect(99));
    assert!(matches!(too_many, Err(Error::TooLarge { .. })));
}

#[test]
fn a_list_that_is_cut_off_loses_no_key() {
    let all = pairs(300);
    let (memory, _) = stored(&all, config(700, 1000, true));
    let database = open(&memory);
    let mut list = database.list(b"");
    let mut found = Vec::new();
    let mut cut_off = 0;
    loop {
        // Dropped where it first waits, again and again; a node that is read meanwhile is not read on.
        let next = match list.next().now_or_never() {
            None => {
                cut_off += 1;
                block_on(list.next())
            }
            Some(next) => next,
        };
        match next.unwrap() {
            Some(entry) => found.push(entry),
            None => break,
        }
    }
    assert!(cut_off > 10);
    assert_eq!(contents(&database, found), all);
    assert!(block_on(list.next()).unwrap().is_none());
}

#[test]
fn numbered_manifests_are_opened_by_their_number() {
    let all = pairs(10);
    let (mut memory, built) = stored(&all, config(2000, 10, true));
    let mut manifest = Manifest::decode(&built.manifest, "", 1 << 20).unwrap();
    memory
        .files
        .insert(numbered_manifest_name(1), built.manifest);
    manifest.config.manifest_kind = ManifestKind::Numbered;
    manifest.versions.clear();
    let numbered = manifest.encode().unwrap();
    memory.files.insert(MANIFEST_NAME.into(), numbered);
    let refused = block_on(Database::open(&memory, Limits::default()));
    assert!(matches!(refused, Err(Error::Numbered)));
    let database = block_on(Database::open_generation(&memory, "", 1, Limits::default())).unwrap();
    assert_eq!(everything(&database), all);
    let missing = block_on(Database::open_generation(&memory, "", 2, Limits::default()));
    assert!(matches!(missing, Err(Error::Missing { .. })));
}

#[test]
fn what_is_not_there_or_ends_early_is_named() {
    let nothing = block_on(Database::open(Memory::default(), Limits::default()));
    assert_eq!(
        nothing.unwrap_err().to_string(),
        "there is no manifest.ocdbt"
    );

    let all = pairs(10);
    let (mut memory, built) = stored(&all, config(2000, 10, true));
    let path = built.files[0].file.path();
    let whole = memory.files.remove(path).unwrap();
    let missing = block_on(open(&memory).get(b"a")).unwrap_err();
    assert_eq!(missing.to_string(), format!("there is no {path}"));

    // Without its last byte, the node is cut short; with the node alone, the values are.
    memory
        .files
        .insert(path.into(), whole.slice(..whole.len() - 1));
    let error = block_on(open(&memory).get(b"a")).unwrap_err();
    assert!(matches!(error, Error::CutShort { .. }), "{error:?}");
    memory.files.insert(path.into(), whole);
    let database = open(&memory);
    let listed = block_on(database.list(b"").collect(10)).unwrap();
    a_value_is_bounded(&database, &listed);
}

fn a_value_is_bounded(database: &Database<&Memory>, listed: &[waystation_ocdbt::Entry]) {
    let stored = listed
        .iter()
        .find(|entry| entry.value.length() == 50)
        .unwrap();
    assert!(matches!(
        block_on(database.value(&stored.value, 49)),
        Err(Error::In { .. })
    ));
    assert_eq!(
        block_on(database.value(&stored.value, 50)).unwrap().len(),
        50
    );
}

#[test]
fn errors_tell_where_and_why() {
    let (mut memory, built) = stored(&pairs(10), config(2000, 10, false));
    let root = open(&memory).version().root.clone().unwrap().location;
    memory.put(root.path(), root.offset(), &[0]);
    let error = block_on(open(&memory).get(b"a")).unwrap_err();
    assert_eq!(
        error.report(),
        format!(
            "{} at {}, {} bytes: begins with 0x00db20de instead of 0x0cdb20de",
            built.files[0].file.path(),
            root.offset(),
            root.length()
        )
    );
}
