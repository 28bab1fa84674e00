//! The memory of a worker on this machine: files that the worker names, opened through the process file system.
//!
//! The system opens a process's files for processes of the same user and for root. A worker in another container, namespace
//! or machine has a number that means nothing here, or another process: what tells is a secret, told over the link, that the
//! worker keeps in one such file. Each file is checked to be the one that the worker meant before it is touched, and to be
//! memory that was sealed for this: a process that only says it is a worker cannot have another file opened or written.

use std::{
    fs::File,
    io,
    os::{
        fd::OwnedFd,
        unix::fs::{FileExt as _, MetadataExt as _},
    },
};

use rustix::fs::{FileType, Mode, OFlags, SealFlags};
use waystation_proto::waystation::worker::{LocalMemory as Announced, Segment};

/// Transfers below this size, in bytes, go by the data service: they cost less than the questions and answers here.
pub(crate) const LOCAL_FROM_BYTES: u64 = 1 << 20;

/// Bytes of a worker's secret.
const SECRET_BYTES: usize = 32;

/// What a worker's memory is sealed with: no disk file is, and nothing else that a process is likely to have open.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Access to the files of a worker's process.
#[derive(Debug)]
pub(crate) struct LocalMemory {
    /// `/proc/PID/fd`, which stays the worker's even when another process gets its number.
    files: OwnedFd,
}

impl LocalMemory {
    /// Finds out whether the worker's memory can be reached from here.
    ///
    /// # Errors
    /// Why not, for people.
    pub(crate) fn reach(announced: &Announced) -> Result<Self, String> {
        let path = format!("/proc/{}/fd", announced.pid);
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let files = rustix::fs::open(&path, flags, Mode::empty())
            .map_err(|error| format!("{path}: {error}"))?;
        let local = Self { files };
        let segment = announced.segment.unwrap_or_default();
        let file = local
            .find(&segment, announced.secret.len() as u64)
            .map_err(|error| format!("{path}/{}: {error}", segment.fd))?;
        let mut secret = vec![0; announced.secret.len()];
        file.read_exact_at(&mut secret, 0)
            .map_err(|error| format!("{path}/{}: {error}", segment.fd))?;
        if secret.len() != SECRET_BYTES || secret != announced.secret {
            return Err(format!("process {} here is not the worker", announced.pid));
        }
        Ok(local)
    }

    /// Opens a segment that must have so many bytes; `None` where it cannot be had.
    pub(crate) fn open(&self, segment: &Segment, bytes: u64) -> Option<File> {
        self.find(segment, bytes)
            .inspect_err(|error| {
                tracing::debug!(%error, "a segment of the worker cannot be opened");
            })
            .ok()
    }

    fn find(&self, segment: &Segment, bytes: u64) -> io::Result<File> {
        let name = segment.fd.to_string();
        let another = || io::Error::other("another file than the worker meant");
        // Looked at first: whatever else may lie under that number by now is not even opened.
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let place = rustix::fs::openat(&self.files, name.as_str(), flags, Mode::empty())?;
        let stat = rustix::fs::fstat(&place)?;
        if !FileType::from_raw_mode(stat.st_mode).is_file() {
            return Err(another());
        }
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.files, name.as_str(), flags, Mode::empty())?;
        let seals = rustix::fs::fcntl_get_seals(&file).unwrap_or(SealFlags::empty());
        let file = File::from(file);
        let metadata = file.metadata()?;
        let is_the_one = seals.contains(SEALS)
            && (metadata.dev(), metadata.ino()) == (segment.device, segment.inode)
            && metadata.len() >= bytes;
        if !is_the_one {
            return Err(another());
        }
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    const SECRET: &[u8] = b"secret that takes thirty-two byt";
    const WRONG: &[u8] = b"Secret that takes thirty-two byt";

    /// A file of this process with a secret in it, and how a worker would announce it.
    fn announced(secret: &[u8]) -> (File, Announced) {
        of(sealed(secret), secret)
    }

    fn sealed(secret: &[u8]) -> File {
        let file = memory(secret);
        rustix::fs::fcntl_add_seals(&file, SEALS).expect("sealed");
        file
    }

    fn memory(secret: &[u8]) -> File {
        let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("test", flags).expect("memory"));
        file.write_all_at(secret, 0).expect("written");
        file
    }

    fn of(file: File, secret: &[u8]) -> (File, Announced) {
        let metadata = file.metadata().expect("a file");
        let segment = Segment {
            fd: file.as_raw_fd(),
            device: metadata.dev(),
            inode: metadata.ino(),
        };
        let announced = Announced {
            pid: std::process::id(),
            segment: Some(segment),
            secret: secret.to_vec().into(),
        };
        (file, announced)
    }

    #[test]
    fn who_reads_the_secret_reaches_the_memory() {
        let (file, announced) = announced(SECRET);
        let local = LocalMemory::reach(&announced).expect("this machine");
        let segment = announced.segment.expect("set");
        let again = local.open(&segment, 32).expect("the same file");
        again.write_all_at(b"S", 0).expect("written");
        let mut bytes = [0; 32];
        file.read_exact_at(&mut bytes, 0).expect("read");
        assert_eq!(&bytes, WRONG);
        assert!(local.open(&segment, 33).is_none(), "too small");
        let other = Segment {
            inode: segment.inode + 1,
            ..segment
        };
        assert!(local.open(&other, 32).is_none(), "another file");
        drop(file);
        assert!(local.open(&segment, 32).is_none(), "closed");
    }

    /// A log, say, that somebody who plays a worker would have the proxy write to.
    #[test]
    fn a_file_that_is_no_sealed_memory_is_not_opened() {
        let disk = tempfile::tempfile().expect("a file");
        disk.write_all_at(SECRET, 0).expect("written");
        let (pipe, _writer) = io::pipe().expect("a pipe");
        for file in [disk, memory(SECRET), File::from(OwnedFd::from(pipe))] {
            let (_file, announced) = of(file, SECRET);
            LocalMemory::reach(&announced).expect_err("not sealed");
        }
        let (_file, short) = of(sealed(&SECRET[..1]), &SECRET[..1]);
        LocalMemory::reach(&short).expect_err("one byte is no secret");
    }

    #[test]
    fn another_process_is_not_taken_for_the_worker() {
        let (_file, good) = announced(SECRET);
        let wrong = [
            Announced {
                secret: WRONG.to_vec().into(),
                ..good.clone()
            },
            Announced {
                secret: Vec::new().into(),
                ..good.clone()
            },
            Announced {
                // The kernel's first thread, which nobody can look into; or a process that has no such file.
                pid: 2,
                ..good.clone()
            },
            Announced {
                pid: u32::MAX,
                ..good.clone()
            },
            Announced {
                segment: None,
                ..good
            },
        ];
        for announced in wrong {
            assert!(LocalMemory::reach(&announced).is_err(), "{announced:?}");
        }
    }
}
