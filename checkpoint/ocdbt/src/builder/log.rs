//! Data files as they are appended to (format: "Storage format"): values and nodes back to back, nothing else.

use std::sync::Arc;

use bytes::Bytes;

use super::new_file;
use crate::error::Result;
use crate::files::DataFile;
use crate::reference::Location;

/// A data file to be written.
#[derive(Debug, Clone)]
pub struct NewFile {
    /// Its path.
    pub file: Arc<DataFile>,
    /// Its content, in order.
    pub parts: Vec<Bytes>,
    /// How many bytes that is.
    pub length: u64,
}

pub(super) struct Log {
    random: Box<dyn FnMut() -> [u8; 16] + Send>,
    target_bytes: u64,
    full: Vec<NewFile>,
    open: Option<NewFile>,
}

impl Log {
    pub(super) fn new(random: Box<dyn FnMut() -> [u8; 16] + Send>, target_bytes: u64) -> Self {
        Self {
            random,
            target_bytes,
            full: Vec::new(),
            open: None,
        }
    }

    pub(super) fn target_bytes(&mut self, bytes: u64) {
        self.target_bytes = bytes;
    }

    /// Appends to the file that is open, and opens one first where none is.
    pub(super) fn append(&mut self, bytes: Bytes) -> Result<Location> {
        let mut open = self.open.take().unwrap_or_else(|| NewFile {
            file: new_file((self.random)()),
            parts: Vec::new(),
            length: 0,
        });
        let length = bytes.len() as u64;
        let location = Location::new(Arc::clone(&open.file), open.length, length)?;
        open.parts.push(bytes);
        open.length += length;
        if open.length >= self.target_bytes {
            self.full.push(open);
        } else {
            self.open = Some(open);
        }
        Ok(location)
    }

    pub(super) fn take_full(&mut self) -> Vec<NewFile> {
        std::mem::take(&mut self.full)
    }

    pub(super) fn finish(self) -> Vec<NewFile> {
        self.full.into_iter().chain(self.open).collect()
    }
}
