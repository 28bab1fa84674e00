//! Programs and checkpoints changed at random: a result or an error, no panic, and no more memory than the engine's limits.
//! `WAYSTATION_SOAK` makes it long. (The nodes of OCDBT, checksums made right again, are in that crate's tests.)

#![allow(
    clippy::unwrap_used,
    reason = "a test's helpers fail as its assertions do"
)]

mod mutate;

use std::path::{Path, PathBuf};
use std::time::Duration;

use proptest::prelude::Rng as _;
use proptest::test_runner::TestRng;
use waystation_checkpoint::persistence::{self, Request, check_name};
use waystation_checkpoint::zarr::{Format, Metadata};
use waystation_checkpoint::{
    Checkpoint, Config, Engine, Error, IndexDomain, Layout, SaveArray, within,
};
use waystation_proto::xla::PrimitiveType;

use self::mutate::{bytes, pick, random, rounds, text};

const WRITE: &str = r#"{"bulk_persistence_write_request": {"write_requests": [
    {"b64_location": "L3RtcC9j", "b64_name": "cGFyYW1zLncvYg==", "b64_hlo_sharding_string": "CAMaAQRKAQRSAQA=",
     "shape": [16], "devices": {"device_ids": [0, 1, 2, 3]}, "timeout": {"seconds": 600, "nanos": 5}},
    {"b64_location": "L3RtcC9j", "b64_name": "dw==", "b64_hlo_sharding_string": "", "shape": [],
     "devices": {"device_ids": [7]}}]}}"#;
const READ: &str = r#"{"persistenceReadRequest": {"b64_location": "Z3M6Ly9iL2M=", "b64_name": "dw==",
    "b64_hlo_sharding_string": "", "shape": {"xla_primitive_type_str": "BF16", "dimensions": [4, 6]},
    "devices": {"device_ids": [0, 1, 2, 3]}, "timeout": {"seconds": 1}}}"#;

#[test]
fn changed_programs_are_understood_or_refused() {
    persistence::parse(WRITE).unwrap();
    persistence::parse(READ).unwrap();
    let mut random = random();
    let (mut good, mut bad) = (0, 0);
    for round in 0..rounds(20_000) {
        let mut program = [WRITE, READ][round % 2].to_owned();
        for _ in 0..1 + random.next_u32() % 3 {
            program = text(&program, &mut random);
        }
        match persistence::parse(&program) {
            Ok(request) => {
                good += 1;
                let named: Vec<(String, String)> = match request {
                    Request::Write(items) => {
                        let named = items.into_iter();
                        named.map(|item| (item.location, item.name)).collect()
                    }
                    Request::Read(items) => {
                        let named = items.into_iter();
                        named.map(|item| (item.location, item.name)).collect()
                    }
                };
                for (location, name) in named {
                    assert!(!location.is_empty());
                    assert_eq!(check_name(&name), Ok(()), "{program}");
                }
            }
            Err(error) => {
                bad += 1;
                assert!(
                    error.to_string().contains("Bad PluginProgram"),
                    "{error} {program}"
                );
                assert!(error.to_string().len() < 2000, "{error}");
            }
        }
    }
    assert!(good > 100 && bad > 1000, "{good} {bad}");
}

#[test]
fn changed_metadata_is_decoded_or_refused() {
    let mut random = random();
    let mut good = 0;
    for round in 0..rounds(20_000) {
        let format = Format::ALL[round % 2];
        let dtype = waystation_checkpoint::zarr::DType::of(PrimitiveType::Bf16).unwrap();
        let metadata = Metadata::new(format, &[6, 40], &[2, 40], dtype, format.orbax_codec());
        let mut json = String::from_utf8(metadata.unwrap().encode().unwrap()).unwrap();
        for _ in 0..1 + random.next_u32() % 3 {
            json = text(&json, &mut random);
        }
        if let Ok(metadata) = Metadata::decode(format, json.as_bytes()) {
            good += 1;
            let again = metadata.encode().unwrap();
            assert_eq!(Metadata::decode(format, &again).unwrap(), metadata);
        }
    }
    assert!(good > 100, "{good}");
}

fn engine(layout: Layout) -> Engine {
    Engine::new(Config {
        format: layout,
        host_memory_bytes: 64 << 20,
        requests: 4,
        threads: 1,
        ..Config::default()
    })
}

/// A checkpoint of three arrays; its files.
async fn checkpoint(layout: Layout, folder: &Path) -> Vec<PathBuf> {
    let location = folder.to_str().unwrap();
    let saving = engine(layout).saving();
    for (name, dims, chunks) in [
        ("w", &[4, 1400][..], &[2, 700][..]),
        ("layers_0.kernel", &[2, 2], &[2, 2]),
        ("step", &[], &[]),
    ] {
        let array = SaveArray {
            location: location.to_owned(),
            name: name.to_owned(),
            dtype: PrimitiveType::Bf16,
            dims: dims.to_vec(),
            chunks: chunks.to_vec(),
            codec: None,
        };
        let whole = IndexDomain::whole(dims);
        let count = whole.num_elements().unwrap() * 2;
        let elements: Vec<u8> = (0..count as u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect();
        let saved = saving.save(&array, vec![(whole, elements.into())], true);
        saved.await.unwrap();
    }
    saving.finish().await.unwrap();
    let mut files = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else {
                files.push(path);
            }
        }
    }
    files.sort();
    files
}

/// Reads what there is to be read, as far as it goes; how much that was.
async fn read_all(checkpoint: &Checkpoint) -> Result<usize, Error> {
    let mut read = 0;
    for child in checkpoint.children().await? {
        // As far as the nodes of a small checkpoint go.
        let _ = child.opened().check(100).await;
    }
    for found in checkpoint.arrays().await? {
        let array = checkpoint.array(&found.name).await?;
        for chunk in array.chunks().take(20) {
            array.chunk_size(&chunk).await?;
            array.check_chunk(&chunk).await?;
            read += 1;
        }
        let mut corner = IndexDomain::whole(array.metadata().grid.shape());
        for extent in &mut corner.shape {
            *extent = (*extent).min(3);
        }
        array.restore(&[corner]).await?;
    }
    Ok(read)
}

/// The most memory that the process has had, in bytes.
fn most_memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    let kilobytes = line.unwrap().split_whitespace().nth(1).unwrap();
    kilobytes.parse::<usize>().unwrap() << 10
}

#[tokio::test]
async fn changed_checkpoints_are_read_or_refused_within_memory_bounds() {
    let mut random = random();
    let (mut good, mut bad) = (0, 0);
    for layout in Layout::ALL {
        let folder = tempfile::tempdir().unwrap();
        let files = checkpoint(layout, folder.path()).await;
        let engine = engine(layout);
        let location = folder.path().to_str().unwrap();
        for _ in 0..rounds(800) {
            let file = &files[pick(&mut random, files.len())];
            let sound = std::fs::read(file).unwrap();
            let changed = change(file, &sound, &mut random);
            std::fs::write(file, &changed).unwrap();
            let read = async {
                let checkpoint = engine.open_checkpoint(location).await?;
                read_all(&checkpoint).await
            };
            // A time-out stands for a read without end, which is an error of its own.
            match within(Some(Duration::from_secs(60)), "reading", read).await {
                Ok(_) => good += 1,
                Err(error @ Error::TimedOut { .. }) => panic!("{error} {layout} {file:?}"),
                Err(error) => {
                    bad += 1;
                    assert!(error.report().len() < 10_000, "{}", error.report());
                }
            }
            std::fs::write(file, &sound).unwrap();
        }
        // What was changed is as it was: the engine has kept nothing of it.
        let checkpoint = engine.open_checkpoint(location).await.unwrap();
        assert_eq!(read_all(&checkpoint).await.unwrap(), 6);
    }
    assert!(good > 100 && bad > 1000, "{good} {bad}");
    // The tests' own, the budget, and room for what the allocator does.
    let most = most_memory();
    assert!(most < 512 << 20, "{most} bytes");
}

/// Another content of a file: text token by token, the rest byte by byte.
fn change(file: &Path, sound: &[u8], random: &mut TestRng) -> Vec<u8> {
    let name = file.file_name().unwrap().to_str().unwrap();
    let mut changed = sound.to_vec();
    for _ in 0..1 + random.next_u32() % 3 {
        changed = match std::str::from_utf8(&changed) {
            Ok(json) if name == ".zarray" || name == "zarr.json" => text(json, random).into_bytes(),
            _ => bytes(&changed, random),
        };
    }
    changed
}
