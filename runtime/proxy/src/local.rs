//! The memory of a worker on this machine: files that the worker names, opened through the process file system.
//!
//! The system opens a process's files for processes of the same user and for root. A worker in another container, namespace
//! or machine has a number that means nothing here, or another process: what tells is a secret, told over the link, that the
//! worker keeps in one such file. Each file is checked to be the one that the worker meant before it is touched.

use std::{
    fs::File,
    io,
    os::{
        fd::OwnedFd,
        unix::fs::{FileExt as _, MetadataExt as _},
    },
};

use rustix::fs::{Mode, OFlags};
use waystation_proto::waystation::worker::{LocalMemory as Announced, Segment};

/// Transfers below this size, in bytes, go by the data service: they cost less than the questions and answers here.
pub(crate) const LOCAL_FROM_BYTES: u64 = 1 << 20;

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
        if secret.is_empty() || secret != announced.secret {
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
        // Whatever else may lie under that number by now: opening it must not wait for anybody.
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let name = segment.fd.to_string();
        let file = File::from(rustix::fs::openat(
            &self.files,
            name.as_str(),
            flags,
            Mode::empty(),
        )?);
        let metadata = file.metadata()?;
        let is_the_one = metadata.is_file()
            && (metadata.dev(), metadata.ino()) == (segment.device, segment.inode)
            && metadata.len() >= bytes;
        if !is_the_one {
            return Err(io::Error::other("another file than the worker meant"));
        }
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;

    use super::*;

    /// A file of this process with a secret in it, and how a worker would announce it.
    fn announced(secret: &[u8]) -> (File, Announced) {
        let file = tempfile::tempfile().expect("a file");
        file.write_all_at(secret, 0).expect("written");
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
        let (file, announced) = announced(b"secret");
        let local = LocalMemory::reach(&announced).expect("this machine");
        let segment = announced.segment.expect("set");
        let again = local.open(&segment, 6).expect("the same file");
        again.write_all_at(b"S", 0).expect("written");
        let mut bytes = [0; 6];
        file.read_exact_at(&mut bytes, 0).expect("read");
        assert_eq!(&bytes, b"Secret");
        assert!(local.open(&segment, 7).is_none(), "too small");
        let other = Segment {
            inode: segment.inode + 1,
            ..segment
        };
        assert!(local.open(&other, 6).is_none(), "another file");
        drop(file);
        assert!(local.open(&segment, 6).is_none(), "closed");
    }

    #[test]
    fn another_process_is_not_taken_for_the_worker() {
        let (_file, good) = announced(b"secret");
        let wrong = [
            Announced {
                secret: b"Secret".to_vec().into(),
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
