//! A file on a disk, written block by block: each is read once, whatever lies beside it in the file.

use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use futures::{StreamExt as _, TryStreamExt as _};
use waystation_checkpoint::IndexDomain;

use super::Source;
use crate::memory::Memory;
use crate::progress::Progress;
use crate::{Error, Result};

/// Blocks on their way at the same time; memory bounds them too.
const WRITES: usize = 8;
/// What the file is called, behind its name, until it is whole.
const UNFINISHED: &str = ".waystation-unfinished";

/// A file that is not finished. It has its name once it is.
pub(super) struct File {
    file: Arc<std::fs::File>,
    path: PathBuf,
    unfinished: PathBuf,
    is_finished: bool,
}

impl File {
    pub(super) async fn create(path: PathBuf, header: Vec<u8>, len: u64) -> Result<File> {
        let mut unfinished = path.clone().into_os_string();
        unfinished.push(UNFINISHED);
        let unfinished = PathBuf::from(unfinished);
        let begun = unfinished.clone();
        let created = on_disk("creating", &unfinished, move || {
            if let Some(folder) = begun.parent() {
                std::fs::create_dir_all(folder)?;
            }
            let file = std::fs::File::create(&begun)?;
            file.set_len(len)?;
            file.write_all_at(&header, 0)?;
            Ok(file)
        });
        Ok(File {
            file: Arc::new(created.await?),
            path,
            unfinished,
            is_finished: false,
        })
    }

    /// Writes the elements of an array, which begin at `at`.
    pub(super) async fn array(
        &self,
        source: &Source,
        at: u64,
        memory: &Memory,
        progress: &Progress,
    ) -> Result<()> {
        let grid = &source.reader.grid;
        let mut written = futures::stream::iter(grid.chunks_of(&IndexDomain::whole(grid.shape())))
            .map(|block| self.block(source, at, grid.domain(&block), memory))
            .buffer_unordered(WRITES);
        while let Some(bytes) = written.try_next().await? {
            progress.did(1, bytes);
        }
        Ok(())
    }

    async fn block(
        &self,
        source: &Source,
        at: u64,
        domain: IndexDomain,
        memory: &Memory,
    ) -> Result<u64> {
        let (cost, reads) = source.cost(&domain)?;
        let _room = memory.take(cost).await;
        let elements = source.read(&domain, reads).await?;
        let (file, shape) = (Arc::clone(&self.file), source.reader.shape().to_vec());
        let item_bytes = source.dtype.item_bytes() as u64;
        on_disk("writing", &self.unfinished, move || {
            let mut rest = &elements[..];
            for (first, count) in runs(&shape, &domain) {
                let len = usize::try_from(count * item_bytes).unwrap_or(usize::MAX);
                let (run, behind) = rest.split_at(len.min(rest.len()));
                file.write_all_at(run, at + first * item_bytes)?;
                rest = behind;
            }
            Ok(elements.len() as u64)
        })
        .await
    }

    pub(super) async fn finish(mut self) -> Result<()> {
        let (file, from, to) = (
            Arc::clone(&self.file),
            self.unfinished.clone(),
            self.path.clone(),
        );
        on_disk("finishing", &self.unfinished, move || {
            file.sync_all()?;
            std::fs::rename(&from, &to)?;
            match to.parent() {
                Some(folder) => std::fs::File::open(folder)?.sync_all(),
                None => Ok(()),
            }
        })
        .await?;
        self.is_finished = true;
        Ok(())
    }
}

impl Drop for File {
    fn drop(&mut self) {
        if !self.is_finished {
            // It would only be in the way.
            let _ = std::fs::remove_file(&self.unfinished);
        }
    }
}

async fn on_disk<T: Send + 'static>(
    operation: &'static str,
    path: &std::path::Path,
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T> {
    let path = path.display().to_string();
    let done = tokio::task::spawn_blocking(work).await?;
    done.map_err(|source| Error::File {
        operation,
        path,
        source,
    })
}

/// The stretches of an array's elements, in order, that make up a box: the first element of each, and how many there are.
fn runs(shape: &[i64], domain: &IndexDomain) -> impl Iterator<Item = (u64, u64)> + use<> {
    // None of it is negative, and all of it has been counted.
    let unsigned = |number: &i64| u64::try_from(*number).unwrap_or(0);
    let dims: Vec<u64> = shape.iter().map(unsigned).collect();
    let extents: Vec<u64> = domain.shape.iter().map(unsigned).collect();
    let mut strides = vec![1; dims.len()];
    for d in (1..dims.len()).rev() {
        strides[d - 1] = strides[d] * dims[d];
    }
    let begin: u64 = domain
        .origin
        .iter()
        .zip(&strides)
        .map(|(origin, stride)| unsigned(origin) * stride)
        .sum();
    // Whole trailing dimensions, and one that is not.
    let mut outer = dims.len();
    let mut len = 1;
    while outer > 0 {
        outer -= 1;
        len *= extents[outer];
        if extents[outer] != dims[outer] {
            break;
        }
    }
    let count: u64 = extents[..outer].iter().product();
    let is_empty = extents.contains(&0);
    (0..if is_empty { 0 } else { count }).map(move |number| {
        let mut rest = number;
        let mut first = begin;
        for d in (0..outer).rev() {
            first += rest % extents[d] * strides[d];
            rest /= extents[d];
        }
        (first, len)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_where_the_elements_of_a_box_lie() {
        for (shape, origin, extent, expected) in [
            (
                &[4, 6][..],
                &[1, 2][..],
                &[2, 3][..],
                &[(8, 3), (14, 3)][..],
            ),
            (&[4, 6], &[1, 0], &[2, 6], &[(6, 12)]),
            (&[2, 2, 2], &[0, 1, 0], &[2, 1, 2], &[(2, 2), (6, 2)]),
            (
                &[2, 2, 2],
                &[0, 0, 1],
                &[2, 2, 1],
                &[(1, 1), (3, 1), (5, 1), (7, 1)],
            ),
            (&[], &[], &[], &[(0, 1)]),
            (&[0, 3], &[0, 0], &[0, 3], &[]),
        ] {
            let domain = IndexDomain {
                origin: origin.to_vec(),
                shape: extent.to_vec(),
            };
            let found: Vec<_> = runs(shape, &domain).collect();
            assert_eq!(found, expected, "{shape:?} {domain:?}");
        }
    }
}
