//! Host buffers that come as files: a client told to do so writes `lt_<handle>` in a directory that it shares with the
//! proxy, and announces no more than handle and size.
//!
//! The client names no path; the proxy knows the one directory from its own command line. What a hostile client or
//! another user of the machine could put there is not trusted: only regular files of that name with one link are opened,
//! symbolic links are not followed, and nothing else is ever removed.
//!
//! The name says nothing of the session, so two clients that share the directory write over each other when their
//! handles meet. That cannot be prevented here, only noticed: a file of the wrong size, or one that is gone because the
//! other session's announcement came first. Then whoever took a file of that name in the meantime may hold the other's
//! bytes, and its session is refused everything from then on: an error that names the cure rather than a wrong array.

use std::{
    collections::VecDeque,
    fs::File,
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, Weak},
    time::Instant,
};

use rustix::fs::{Mode, OFlags};

use crate::lock::lock;
use crate::{
    host_buffers::HostBuffers,
    status::{self, Status},
};

/// Announcements that are remembered, to tell whom a lost file concerns.
const REMEMBERED: usize = 1 << 16;

/// What to do about two clients in one directory.
const CURE: &str = "one client at a time may use the directory: unset \
    IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_THRESHOLD_BYTES in all others, or give each client a proxy and directory \
    of its own";

/// The directory, where one is shared.
#[derive(Debug, Default)]
pub(crate) struct LargeTransfers {
    directory: Option<PathBuf>,
    taken: Mutex<VecDeque<Taken>>,
}

/// A file that was taken, or looked for.
#[derive(Debug)]
struct Taken {
    number: i32,
    at: Instant,
    by: Weak<HostBuffers>,
}

impl LargeTransfers {
    pub(crate) fn new(directory: Option<PathBuf>) -> Self {
        Self {
            directory,
            taken: Mutex::default(),
        }
    }

    /// Opens the announced file and removes its name. Blocks on the file system.
    ///
    /// # Errors
    /// FAILED_PRECONDITION where there is no directory, or not this file in it.
    pub(crate) fn take(
        &self,
        session: &Arc<HostBuffers>,
        handle: u64,
        size: u64,
    ) -> Result<File, Status> {
        let directory = self.directory.as_deref().ok_or_else(|| {
            status::failed_precondition(
                "this proxy reads no large transfers from disk: start it with --large_transfer_directory=DIR, the \
                 directory in the client's IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY, or unset \
                 IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_THRESHOLD_BYTES in the client",
            )
        })?;
        // The client writes the number as a C++ int.
        #[expect(clippy::cast_possible_truncation, reason = "as the client does")]
        let number = handle as i32;
        let path = directory.join(format!("lt_{number}"));
        // Before the name goes, so that a session that misses it finds the one that took it.
        self.remember(session, number);
        match open(&path, size) {
            Ok(file) => Ok(file),
            Err(Refusal::Missing) => Err(self.missing(session, number, directory)),
            Err(Refusal::Unsafe(what)) => Err(status::failed_precondition(format!(
                "{} is {what}; large transfers are taken from regular files with one link only",
                path.display()
            ))),
            Err(Refusal::Size(found)) => Err(status::failed_precondition(format!(
                "{} has {found} bytes where {size} were announced: another client writes in the same directory; {CURE}",
                path.display()
            ))),
            Err(Refusal::Io(e)) => Err(status::failed_precondition(format!(
                "{} cannot be read ({e}): the proxy must be allowed to open and remove what the client writes there",
                path.display()
            ))),
        }
    }

    fn remember(&self, session: &Arc<HostBuffers>, number: i32) {
        let mut taken = lock(&self.taken);
        if taken.len() == REMEMBERED {
            taken.pop_front();
        }
        taken.push_back(Taken {
            number,
            at: Instant::now(),
            by: Arc::downgrade(session),
        });
    }

    /// The session has written a file that is not there. Another one's announcement took it, if one of the same name came
    /// since this session began; that one cannot go on either.
    fn missing(&self, session: &Arc<HostBuffers>, number: i32, directory: &Path) -> Status {
        let taken = lock(&self.taken);
        let mut mixed_up = false;
        let own = Arc::downgrade(session);
        for other in taken.iter().filter(|other| {
            other.number == number && other.at >= session.opened() && !other.by.ptr_eq(&own)
        }) {
            mixed_up = true;
            if let Some(other) = other.by.upgrade() {
                other.condemn(status::failed_precondition(format!(
                    "the bytes of host buffer {number} may be another client's: two clients write to {}; {CURE}",
                    directory.display()
                )));
            }
        }
        let directory = directory.display();
        status::failed_precondition(if mixed_up {
            format!(
                "lt_{number} is not in {directory}: another client's announcement took it; {CURE}"
            )
        } else {
            format!(
                "lt_{number} is not in {directory}: the client's IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY and the \
                 proxy's --large_transfer_directory must be one directory, on one machine or file system"
            )
        })
    }
}

/// Why a file is not taken.
#[derive(Debug)]
enum Refusal {
    Missing,
    Unsafe(&'static str),
    Size(u64),
    Io(io::Error),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::Missing,
            _ => Self::Io(error),
        }
    }
}

/// Opens a file of that size, and removes its name.
fn open(path: &Path, size: u64) -> Result<File, Refusal> {
    // Without NONBLOCK a FIFO would wait for its writer.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(rustix::io::Errno::LOOP) => return Err(Refusal::Unsafe("a symbolic link")),
        Err(error) => return Err(io::Error::from(error).into()),
    };
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(Refusal::Unsafe("no regular file"));
    }
    if metadata.nlink() != 1 {
        return Err(Refusal::Unsafe("a file with several names"));
    }
    if metadata.len() != size {
        return Err(Refusal::Size(metadata.len()));
    }
    std::fs::remove_file(path)?;
    // Another client that opened the file before its name went has emptied it by now.
    match file.metadata()?.len() {
        len if len == size => Ok(file),
        len => Err(Refusal::Size(len)),
    }
}

#[cfg(test)]
mod tests;
