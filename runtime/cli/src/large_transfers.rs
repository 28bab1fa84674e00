//! The directory in which clients leave large host buffers as files.

use std::path::Path;

use crate::error::Failure;

/// The variable in which jaxlib's client looks for it.
pub(crate) const VARIABLE: &str = "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY";

/// Looks whether the proxy could use it.
///
/// # Errors
/// [`Failure::usage`] when it is no directory.
pub(crate) fn check(directory: &Path) -> Result<(), Failure> {
    let metadata = std::fs::metadata(directory);
    match metadata {
        Ok(metadata) if metadata.is_dir() => Ok(()),
        Ok(_) => Err(Failure::usage(format!(
            "--large_transfer_directory {} is no directory",
            directory.display()
        ))),
        Err(error) => Err(Failure::usage(format!(
            "--large_transfer_directory {} cannot be used ({error}): make it, or give another one",
            directory.display()
        ))),
    }
}
