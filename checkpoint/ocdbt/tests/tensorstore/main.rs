//! What is built here, TensorStore reads and goes on writing, and what it writes is read here.
//!
//! The other side is `peer.py`, run with the Python of `WAYSTATION_TEST_PYTHON`, else of `.venv` at the top of the repository.

#![allow(
    clippy::unwrap_used,
    reason = "a test's helpers fail as its assertions do"
)]

mod peer;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use futures::executor::block_on;
use waystation_ocdbt::{
    Builder, Built, Compression, Config, Database, Error, Limits, Source, SourceError, Value,
    merge, numbered_manifest_generation,
};

use self::peer::peer;

type Pairs = BTreeMap<Vec<u8>, Vec<u8>>;

struct Folder(PathBuf);

impl Source for Folder {
    async fn read(&self, path: &str, range: Range<u64>) -> Result<Option<Bytes>, SourceError> {
        let content = match std::fs::read(self.0.join(path)) {
            Ok(content) => Bytes::from(content),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let end = (content.len() as u64).min(range.end);
        Ok(Some(
            content.slice(range.start.min(end) as usize..end as usize),
        ))
    }
}

/// The pairs as both sides put them beside a database.
fn expected(folder: &Path, name: &str) -> Pairs {
    let text = std::fs::read(folder.join(format!("{name}.json"))).unwrap();
    let pairs: BTreeMap<String, String> = serde_json::from_slice(&text).unwrap();
    let decode = |text: &String| hex::decode(text).unwrap();
    pairs
        .iter()
        .map(|(key, value)| (decode(key), decode(value)))
        .collect()
}

fn expect(folder: &Path, name: &str, pairs: &Pairs) {
    let pairs: BTreeMap<_, _> = pairs
        .iter()
        .map(|(key, value)| (hex::encode(key), hex::encode(value)))
        .collect();
    let path = folder.join(format!("{name}.json"));
    std::fs::write(path, serde_json::to_vec(&pairs).unwrap()).unwrap();
}

fn write(folder: &Path, built: &Built) {
    for file in &built.files {
        let path = folder.join(file.file.path());
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, file.parts.concat()).unwrap();
    }
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join(Built::MANIFEST), &built.manifest).unwrap();
}

fn pairs(count: usize) -> Pairs {
    let pair = |number: usize| {
        let length = if number.is_multiple_of(4) {
            3000
        } else {
            number % 90
        };
        let key = format!(
            "params.layers_{}.kernel/{}.{}",
            number / 50,
            number / 7,
            number % 7
        );
        (
            key.into_bytes(),
            (0..length).map(|at| (at * number) as u8).collect(),
        )
    };
    (0..count).map(pair).collect()
}

fn ids(seed: u8) -> impl FnMut() -> [u8; 16] + Send + 'static {
    let mut number = 0;
    move || {
        number += 1;
        [
            seed, number, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,
        ]
    }
}

fn build(pairs: &Pairs, config: Config, seed: u8) -> Built {
    let mut builder = Builder::new(config, ids(seed)).unwrap();
    for (key, value) in pairs {
        builder
            .put(key.clone().into(), value.clone().into())
            .unwrap();
    }
    builder.finish(1_700_000_000_000_000_000).unwrap()
}

fn config(node_bytes: u32, inline: u32, compression: Compression) -> Config {
    let mut config = Config::orbax([5; 16]);
    config.max_decoded_node_bytes = node_bytes;
    config.max_inline_value_bytes = inline;
    config.compression = compression;
    config
}

#[test]
fn tensorstore_reads_what_is_built_here_and_writes_on() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let zstd = Compression::Zstd { level: 0 };
    let mut odd = pairs(3);
    odd.extend([
        (vec![], vec![1]),
        (vec![0, 0xff], vec![2; 2000]),
        (vec![0xff; 300], vec![]),
    ]);
    let shapes = [
        ("orbax", pairs(400), Config::orbax([6; 16]), 0),
        ("inline", pairs(400), config(100_000_000, 1 << 20, zstd), 0),
        (
            "out_of_line",
            pairs(400),
            config(100_000_000, 0, Compression::None),
            0,
        ),
        ("levels", pairs(400), config(1500, 100, zstd), 2),
        ("small", pairs(400), config(600, 50, Compression::None), 3),
        ("smallest", pairs(60), config(1, 10, zstd), 5),
        ("one", pairs(1), config(1000, 10, zstd), 0),
        ("none", Pairs::new(), config(1000, 10, zstd), 0),
        ("odd", odd, config(300, 100, zstd), 1),
    ];
    for (seed, (name, pairs, config, least_height)) in shapes.iter().enumerate() {
        let built = build(pairs, config.clone(), seed as u8);
        assert!(built.height >= *least_height, "{name}: {}", built.height);
        write(&folder.join(name), &built);
        expect(folder, name, pairs);
    }
    peer("read", folder);
    // It has added a key to each, which took its own nodes and versions, and parts of ours.
    for (name, mut pairs, config, _) in shapes {
        pairs.insert(b"params.layers_1.new".to_vec(), b"added".to_vec());
        let database =
            block_on(Database::open(Folder(folder.join(name)), Limits::default())).unwrap();
        assert_eq!(everything(&database), pairs, "{name}");
        block_on(database.check(10_000)).unwrap();
        assert_eq!(database.version().generation, 2);
        assert_eq!(database.config(), &config);
    }
}

#[test]
fn tensorstore_reads_a_database_over_others() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let all = pairs(300);
    let part = |rest: usize| -> Pairs {
        let own = all
            .iter()
            .enumerate()
            .filter(|(index, _)| index % 2 == rest);
        own.map(|(_, (key, value))| (key.clone(), value.clone()))
            .collect()
    };
    let parent = folder.join("merged");
    let zstd = Compression::Zstd { level: 0 };
    let folders = ["ocdbt.process_w0/", "ocdbt.process_w1/"];
    write(
        &parent.join(folders[0]),
        &build(&part(0), Config::orbax([7; 16]), 1),
    );
    write(
        &parent.join(folders[1]),
        &build(&part(1), config(900, 20, zstd), 2),
    );
    let source = Folder(parent.clone());
    let open =
        |folder: &&str| block_on(Database::open_under(&source, folder, Limits::default())).unwrap();
    let databases: Vec<_> = folders.iter().map(open).collect();
    let mut builder = Builder::new(Config::orbax([8; 16]), ids(3)).unwrap();
    assert_eq!(block_on(merge(&databases, &mut builder)).unwrap().keys, 300);
    write(&parent, &builder.finish(1).unwrap());
    expect(folder, "merged", &all);
    // And what TensorStore merges of ours, as Orbax does at the end of a save.
    let theirs = folder.join("theirs");
    write(
        &theirs.join(folders[0]),
        &build(&part(0), Config::orbax([7; 16]), 1),
    );
    write(
        &theirs.join(folders[1]),
        &build(&part(1), config(900, 20, zstd), 2),
    );
    peer("merge", folder);
    let database = block_on(Database::open(Folder(theirs), Limits::default())).unwrap();
    assert_eq!(everything(&database), all);
    block_on(database.check(10_000)).unwrap();
    let bases = bases(&database);
    assert_eq!(bases, folders);
    peer("read", folder);
}

fn bases<S: Source>(database: &Database<S>) -> Vec<String> {
    let mut bases = std::collections::BTreeSet::new();
    for entry in block_on(database.list(b"").collect(usize::MAX)).unwrap() {
        if let Value::Stored(location) = entry.value {
            bases.insert(location.file().base().to_owned());
        }
    }
    bases.into_iter().collect()
}

fn everything<S: Source>(database: &Database<S>) -> Pairs {
    let entries = block_on(database.list(b"").collect(usize::MAX)).unwrap();
    let read = |entry: waystation_ocdbt::Entry| {
        assert_eq!(
            block_on(database.get(&entry.key)).unwrap().as_ref(),
            Some(&entry.value)
        );
        let value = block_on(database.value(&entry.value, 1 << 30)).unwrap();
        (entry.key.to_vec(), value.to_vec())
    };
    entries.into_iter().map(read).collect()
}

/// The database in a folder, by its latest manifest where they are numbered.
fn open(folder: &Path) -> Database<Folder> {
    let source = || Folder(folder.to_owned());
    match block_on(Database::open(source(), Limits::default())) {
        Err(Error::Numbered) => {
            let names = std::fs::read_dir(folder)
                .unwrap()
                .map(|entry| entry.unwrap().file_name());
            let generations = names.filter_map(|name| numbered_manifest_generation(name.to_str()?));
            let latest = generations.max().unwrap();
            block_on(Database::open_generation(
                source(),
                "",
                latest,
                Limits::default(),
            ))
            .unwrap()
        }
        opened => opened.unwrap(),
    }
}

#[test]
fn what_tensorstore_writes_is_read_here() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    peer("write", folder);
    let mut heights = BTreeMap::new();
    for name in std::fs::read_dir(folder).unwrap() {
        let name = name.unwrap().file_name().into_string().unwrap();
        let Some(name) = name.strip_suffix(".json") else {
            continue;
        };
        let database = open(&folder.join(name));
        let pairs = expected(folder, name);
        assert_eq!(everything(&database), pairs, "{name}");
        let report = block_on(database.check(100_000)).unwrap();
        assert_eq!(report.statistics.keys, pairs.len() as u64);
        let some = block_on(database.list(b"params.layers_1").collect(10_000)).unwrap();
        let listed = pairs
            .keys()
            .filter(|key| key.starts_with(b"params.layers_1"));
        assert!(
            some.iter()
                .map(|entry| entry.key.to_vec())
                .eq(listed.cloned())
        );
        heights.insert(name.to_owned(), database.version().root_height);
    }
    assert_eq!(heights.len(), 8, "{heights:?}");
    assert_eq!((heights["orbax"], heights["empty"]), (0, 0));
    assert!(
        heights["levels"] >= 1 && heights["small"] >= 3,
        "{heights:?}"
    );
}
