//! What commands print.

use std::io::{self, Write as _};

use crate::error::Failure;

/// One or more lines to stdout. A reader that went away (`| head`) is no failure.
///
/// # Errors
/// When stdout cannot be written.
pub(crate) fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    match writeln!(stdout, "{}", text.trim_end()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::because("stdout cannot be written", &error))
        }
        _ => Ok(()),
    }
}
