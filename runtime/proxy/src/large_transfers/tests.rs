use std::{fs, os::unix::fs::symlink};

use super::*;
use crate::{counters::Counters, host_buffers::HostMemory};

const FAILED_PRECONDITION: i32 = 9;

fn session() -> Arc<HostBuffers> {
    let memory = HostMemory::new(0, Arc::new(Counters::default()));
    Arc::new(HostBuffers::new(Arc::new(memory)))
}

fn shared() -> (tempfile::TempDir, LargeTransfers) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let transfers = LargeTransfers::new(Some(folder.path().to_owned()));
    (folder, transfers)
}

fn refused(transfers: &LargeTransfers, session: &Arc<HostBuffers>, handle: u64, part: &str) {
    let error = transfers.take(session, handle, 5).expect_err(part);
    assert_eq!(error.code, FAILED_PRECONDITION, "{error:?}");
    assert!(error.message.contains(part), "{}", error.message);
}

#[test]
fn a_file_is_taken_once_and_its_name_goes() {
    let (folder, transfers) = shared();
    let path = folder.path().join("lt_7");
    fs::write(&path, b"hello").expect("written");
    let file = transfers.take(&session(), 7, 5).expect("there");
    assert_eq!(io::read_to_string(file).expect("readable"), "hello");
    assert!(!path.exists());
}

#[test]
fn without_a_directory_the_flag_is_named() {
    let transfers = LargeTransfers::new(None);
    refused(&transfers, &session(), 7, "--large_transfer_directory");
}

#[test]
fn what_is_no_file_of_the_client_is_neither_read_nor_removed() {
    let (folder, transfers) = shared();
    let session = session();
    let outside = tempfile::NamedTempFile::new().expect("a file elsewhere");
    fs::write(outside.path(), b"other").expect("written");
    let at = |name: &str| folder.path().join(name);
    symlink(outside.path(), at("lt_1")).expect("linked");
    fs::write(at("secret"), b"other").expect("written");
    fs::hard_link(at("secret"), at("lt_2")).expect("linked");
    fs::create_dir(at("lt_3")).expect("made");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        at("lt_4"),
        rustix::fs::FileType::Fifo,
        Mode::RUSR | Mode::WUSR,
        0,
    )
    .expect("a FIFO");
    refused(&transfers, &session, 1, "a symbolic link");
    refused(&transfers, &session, 2, "several names");
    refused(&transfers, &session, 3, "no regular file");
    refused(&transfers, &session, 4, "no regular file");
    for name in ["lt_1", "lt_2", "lt_3", "lt_4"] {
        assert!(at(name).symlink_metadata().is_ok(), "{name} is still there");
    }
    assert!(outside.path().exists());
}

#[test]
fn a_missing_file_names_the_directory() {
    let (_folder, transfers) = shared();
    refused(&transfers, &session(), 7, "must be one directory");
}

#[test]
fn a_file_of_another_size_is_left_to_its_owner() {
    let (folder, transfers) = shared();
    fs::write(folder.path().join("lt_7"), b"six of it").expect("written");
    refused(&transfers, &session(), 7, "another client writes");
    transfers.take(&session(), 7, 9).expect("its owner's");
}

#[test]
fn a_file_taken_by_another_session_concerns_both() {
    let (folder, transfers) = shared();
    let path = folder.path().join("lt_7");
    let (bystander, before) = (session(), session());
    // Long before the second client came.
    fs::write(&path, b"third").expect("written");
    transfers.take(&before, 7, 5).expect("there");
    let (first, second) = (session(), session());
    fs::write(folder.path().join("lt_8"), b"other").expect("written");
    transfers.take(&bystander, 8, 5).expect("another number");
    // Both have written; the first announcement takes what the second client wrote.
    fs::write(&path, b"first").expect("written");
    fs::write(&path, b"secnd").expect("written");
    transfers.take(&first, 7, 5).expect("there");
    refused(&transfers, &second, 7, "one client at a time");
    let verdict = first.verdict().expect("concerned as well");
    assert!(
        verdict.message.contains("one client at a time"),
        "{verdict:?}"
    );
    assert!(bystander.verdict().is_none());
    assert!(before.verdict().is_none());
}
