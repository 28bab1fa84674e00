//! Folders that the fuzzed server shares with its clients, and what lies in wait there.

use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use rustix::fs::{CWD, FileType, Mode};

/// An array of four f32 whose only chunk is a FIFO.
pub const FIFO: &str = "fifo";
/// A symbolic link from the bucket to a folder outside of it.
pub const LINK: &str = "link";
/// A symbolic link to itself.
pub const LOOP: &str = "loop";
/// A file where a folder should be.
pub const FILE: &str = "file";
/// What describes an array of zarr v2.
const ARRAY: &str = r#"{"chunks":[4],"compressor":null,"dimension_separator":".","dtype":"<f4","fill_value":null,"filters":null,"order":"C","shape":[4],"zarr_format":2}"#;

/// See the module.
#[derive(Clone, Debug)]
pub struct Folders {
    root: PathBuf,
}

impl Folders {
    /// Prepares `root`, which is empty.
    ///
    /// # Panics
    /// When it cannot be written to.
    pub fn new(root: &Path) -> Self {
        let folders = Self {
            root: root.to_owned(),
        };
        folders.prepare().expect("a folder to write to");
        folders
    }

    fn prepare(&self) -> io::Result<()> {
        let bucket = self.bucket();
        fs::create_dir_all(self.large_transfers())?;
        fs::create_dir_all(bucket.join(FIFO))?;
        fs::create_dir_all(self.root.join("outside"))?;
        fs::write(self.secret(), [7; 16])?;
        fs::write(bucket.join(FIFO).join(".zarray"), ARRAY)?;
        make_fifo(&bucket.join(FIFO).join("0"))?;
        symlink(self.root.join("outside"), bucket.join(LINK))?;
        symlink(bucket.join(LOOP), bucket.join(LOOP))?;
        fs::write(bucket.join(FILE), b"no folder")
    }

    /// The directory of large transfers, for the server's `--large_transfer_directory`.
    pub fn large_transfers(&self) -> PathBuf {
        self.root.join("large")
    }

    /// Where arrays are kept.
    pub fn bucket(&self) -> PathBuf {
        self.root.join("bucket")
    }

    /// Sixteen bytes that no client was given.
    pub fn secret(&self) -> PathBuf {
        self.root.join("outside").join("secret")
    }

    /// The file in which a client leaves a host buffer.
    pub fn large_transfer(&self, handle: u64) -> PathBuf {
        // As jaxlib names it.
        #[expect(clippy::cast_possible_truncation, reason = "as jaxlib does")]
        let number = handle as i32;
        self.large_transfers().join(format!("lt_{number}"))
    }

    /// Fails when something outside has changed.
    ///
    /// # Errors
    /// What has changed.
    pub fn untouched(&self) -> Result<(), String> {
        let secret = fs::read(self.secret()).map_err(|e| format!("the file outside: {e}"))?;
        if secret != [7; 16] {
            return Err(format!("the file outside now holds {secret:?}"));
        }
        Ok(())
    }
}

/// Makes a FIFO: whoever opens it to read waits for a writer.
pub(super) fn make_fifo(path: &Path) -> io::Result<()> {
    rustix::fs::mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
    Ok(())
}
