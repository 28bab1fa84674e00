//! The directory in which clients leave large host buffers as files.

use std::path::Path;

use crate::error::Failure;

/// The variable in which jaxlib's client looks for it.
pub(crate) const VARIABLE: &str = "IFRT_PROXY_GRPC_LARGE_TRANSFER_OPTIMIZATION_DIRECTORY";

/// Looks whether the proxy could use it.
///
/// # Errors
/// [`Failure::usage`] when it is no directory, or files in it cannot be removed.
pub(crate) fn check(directory: &Path) -> Result<(), Failure> {
    match std::fs::metadata(directory) {
        Ok(metadata) if metadata.is_dir() => {
            // What may make a file there may remove one; the file goes at once.
            let tried = tempfile::Builder::new()
                .prefix(".waystation-")
                .tempfile_in(directory);
            tried.map(drop).map_err(|error| {
                Failure::usage(format!(
                    "--large_transfer_directory {} cannot be used: no file can be made or removed there ({error})",
                    directory.display()
                ))
            })
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::USAGE;

    #[test]
    fn a_directory_must_take_files() {
        let folder = tempfile::tempdir().unwrap();
        check(folder.path()).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        for path in ["/proc", "/etc/passwd", "/no/such/folder"] {
            let failure = check(Path::new(path)).unwrap_err();
            assert_eq!(failure.status, USAGE, "{failure}");
            assert!(failure.message.contains(path), "{failure}");
        }
    }
}
