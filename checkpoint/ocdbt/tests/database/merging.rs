//! One database over others, as Orbax makes of those of its processes.

use futures::executor::block_on;
use waystation_ocdbt::{Builder, Config, Database, Error, Limits, Value, merge};

use crate::support::{Memory, Pairs, build, config, everything, ids, open, pairs};

fn children(memory: &mut Memory, parts: &[(&str, Pairs, Config)]) {
    for (seed, (folder, pairs, config)) in parts.iter().enumerate() {
        memory.add(folder, &build(pairs, config.clone(), 20 + seed as u8));
    }
}

fn merge_all(memory: &mut Memory, folders: &[&str]) -> Result<waystation_ocdbt::Merged, Error> {
    let mut builder = Builder::new(Config::orbax([3; 16]), ids(99))?;
    let merged = {
        let open =
            |folder: &&str| block_on(Database::open_under(&*memory, folder, Limits::default()));
        let databases: Vec<_> = folders.iter().map(open).collect::<Result<_, _>>()?;
        block_on(merge(&databases, &mut builder))?
    };
    memory.add("", &builder.finish(2)?);
    Ok(merged)
}

#[test]
fn values_out_of_line_stay_where_they_are() {
    let all = pairs(600);
    let part = |rest: usize| -> Pairs {
        let own = all
            .iter()
            .enumerate()
            .filter(|(index, _)| index % 3 == rest);
        own.map(|(_, (key, value))| (key.clone(), value.clone()))
            .collect()
    };
    let mut memory = Memory::default();
    let folders = ["ocdbt.process_0/", "ocdbt.process_1/", "ocdbt.process_2/"];
    children(
        &mut memory,
        &[
            (folders[0], part(0), Config::orbax([1; 16])),
            (folders[1], part(1), config(600, 10, false)),
            (folders[2], part(2), config(2000, 0, true)),
        ],
    );
    let files = memory.files.len();
    let merged = merge_all(&mut memory, &folders).unwrap();
    assert_eq!((merged.keys, merged.repeated), (600, 0));
    assert_eq!(memory.files.len(), files + 2, "a manifest and a node");
    let database = open(&memory);
    assert_eq!(everything(&database), all);
    let report = block_on(database.check(10)).unwrap();
    assert_eq!((report.nodes, report.statistics.keys), (1, 600));
    for (index, key) in all.keys().enumerate() {
        if let Value::Stored(location) = block_on(database.get(key)).unwrap().unwrap() {
            assert_eq!(location.file().base(), folders[index % 3]);
            assert!(location.file().name().starts_with("d/"));
        }
    }
}

/// What Orbax does twice: a database over databases over databases.
#[test]
fn base_paths_add_up() {
    let mut memory = Memory::default();
    let all = pairs(20);
    children(&mut memory, &[("a/b/", all.clone(), config(400, 0, true))]);
    // Over a/b/ in a/.
    let mut builder = Builder::new(config(400, 0, true), ids(40)).unwrap();
    let below = Memory {
        files: memory
            .files
            .iter()
            .map(|(path, file)| (path[2..].to_owned(), file.clone()))
            .collect(),
        ..Memory::default()
    };
    let child = block_on(Database::open_under(&below, "b/", Limits::default())).unwrap();
    block_on(merge(&[child], &mut builder)).unwrap();
    memory.add("a/", &builder.finish(1).unwrap());
    merge_all(&mut memory, &["a/"]).unwrap();
    let database = open(&memory);
    assert_eq!(everything(&database), all);
    let value = block_on(database.get(all.keys().next().unwrap()))
        .unwrap()
        .unwrap();
    let Value::Stored(location) = value else {
        panic!("{value:?}");
    };
    assert_eq!(location.file().base(), "a/b/");
}

#[test]
fn a_key_of_two_databases_must_be_the_same_inline() {
    let one = |value: &[u8]| Pairs::from([(b"w/.zarray".to_vec(), value.to_vec())]);
    let merged = |a: &[u8], b: &[u8], inline| {
        let mut memory = Memory::default();
        children(
            &mut memory,
            &[
                ("a/", one(a), config(400, inline, true)),
                ("b/", one(b), config(400, inline, true)),
            ],
        );
        merge_all(&mut memory, &["a/", "b/"])
    };
    let same = merged(b"{}", b"{}", 10).unwrap();
    assert_eq!((same.keys, same.repeated), (1, 1));
    assert!(matches!(
        merged(b"{}", b"[]", 10),
        Err(Error::Conflict { .. })
    ));
    // Out of line, nobody knows whether they are the same.
    assert!(matches!(
        merged(b"{}", b"{}", 0),
        Err(Error::Conflict { .. })
    ));
}

#[test]
fn no_database_and_empty_ones() {
    let mut memory = Memory::default();
    children(&mut memory, &[("a/", Pairs::new(), config(400, 0, true))]);
    assert_eq!(merge_all(&mut memory, &["a/"]).unwrap().keys, 0);
    assert!(everything(&open(&memory)).is_empty());
    let mut memory = Memory::default();
    assert_eq!(merge_all(&mut memory, &[]).unwrap().keys, 0);
    for folder in ["/a/", "../a/", "a/../b/"] {
        let refused = block_on(Database::open_under(&memory, folder, Limits::default()));
        assert!(matches!(refused, Err(Error::Path { .. })), "{folder}");
    }
}
