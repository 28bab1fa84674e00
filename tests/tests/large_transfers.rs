//! Host buffers that come as files of a directory which clients share with the proxy.

use std::{fs, path::Path};

use tempfile::TempDir;
use waystation_client::{Client, Error, request};
use waystation_tests::cluster::Cluster;

const FAILED_PRECONDITION: Option<i32> = Some(9);

async fn cluster() -> (TempDir, Cluster) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let directory = folder.path().to_owned();
    let cluster = Cluster::start_with(1, 2, |proxy| {
        proxy.large_transfer_directory = Some(directory);
    })
    .await;
    (folder, cluster)
}

/// As jaxlib does it: the file first, then the word.
fn write(folder: &Path, handle: u64, values: &[f32]) -> i64 {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    fs::write(folder.join(format!("lt_{handle}")), &bytes).expect("written");
    i64::try_from(bytes.len()).expect("small")
}

async fn make(client: &Client, handle: u64, len: usize) {
    let dims = [i64::try_from(len).expect("small")];
    client
        .call(request::make_array(handle, &dims, &[0, 1], None))
        .await
        .expect("made");
}

async fn fetch(client: &Client, array: u64) -> Result<Vec<f32>, Error> {
    let buffer = client.handle();
    client.call(request::copy_to_host(array, buffer)).await?;
    let bytes = client.lookup(buffer).await?;
    Ok(bytes
        .chunks_exact(4)
        .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_becomes_an_array_and_is_gone() {
    let (folder, cluster) = cluster().await;
    let client = cluster.client().await;
    // More than one frame, and not a whole number of them.
    let values: Vec<f32> = (0..700_001_u32)
        .map(|n| f32::from_bits(n | 1 << 30))
        .collect();
    let late = client.handle();
    make(&client, late, values.len()).await;
    for handle in [late, client.handle()] {
        let size = write(folder.path(), handle, &values);
        client.read_from_disk(handle, size).await.expect("taken");
        if handle != late {
            make(&client, handle, values.len()).await;
        }
        assert_eq!(fetch(&client, handle).await.expect("fetched"), values);
    }
    assert_eq!(fs::read_dir(folder.path()).expect("readable").count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_mix_up_their_files_are_both_told() {
    let (folder, cluster) = cluster().await;
    let (first, second, third) = (
        cluster.client().await,
        cluster.client().await,
        cluster.client().await,
    );
    let handle = 11;
    let size = write(folder.path(), handle, &[1.0, 2.0]);
    write(folder.path(), handle, &[3.0, 4.0]);
    first.read_from_disk(handle, size).await.expect("taken");
    make(&first, handle, 2).await;
    let error = second
        .read_from_disk(handle, size)
        .await
        .expect_err("the other's announcement took it");
    assert_eq!(error.code(), FAILED_PRECONDITION, "{error}");
    assert!(
        error.to_string().contains("one client at a time"),
        "{error}"
    );
    // The first one holds the bytes of the second, and must not go on with them.
    let error = fetch(&first, handle).await.expect_err("mixed up");
    assert_eq!(error.code(), FAILED_PRECONDITION, "{error}");
    assert!(
        error.to_string().contains("one client at a time"),
        "{error}"
    );
    let size = write(folder.path(), 12, &[5.0]);
    third.read_from_disk(12, size).await.expect("not concerned");
    make(&third, 12, 1).await;
    assert_eq!(fetch(&third, 12).await.expect("fetched"), [5.0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_that_cannot_be_taken_fail_their_array() {
    let (folder, cluster) = cluster().await;
    let client = cluster.client().await;
    let handle = client.handle();
    make(&client, handle, 2).await;
    write(folder.path(), handle, &[1.0]);
    let error = client.read_from_disk(handle, 8).await.expect_err("short");
    assert_eq!(error.code(), FAILED_PRECONDITION, "{error}");
    assert!(fetch(&client, handle).await.is_err());
    let error = client.read_from_disk(99, -1).await.expect_err("negative");
    assert_eq!(error.code(), Some(3), "{error}");
    let without = Cluster::start(1, 1).await;
    let client = without.client().await;
    let error = client.read_from_disk(1, 8).await.expect_err("none");
    assert!(
        error.to_string().contains("--large_transfer_directory"),
        "{error}"
    );
}
