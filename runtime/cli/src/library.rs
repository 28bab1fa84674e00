//! Whether a file that was named is the library that it should be. It is only read: loading it would run its code in a
//! process that has no use for it.

use std::{
    fs::File,
    io::{self, Read},
    path::Path,
};

use memchr::memmem;

/// Magic number, type and machine of an ELF file.
const HEADER_BYTES: usize = 20;
/// ET_DYN.
const SHARED: u8 = 3;
/// How much is looked at in one piece.
const PIECE_BYTES: usize = 1 << 20;

/// Looks for a symbol's name in a shared library for this machine.
///
/// # Errors
/// What is wrong, as the end of a sentence about the file.
pub(crate) fn check(path: &Path, symbol: &str) -> Result<(), String> {
    let unreadable = |error: io::Error| format!("cannot be read ({error})");
    let mut file = File::open(path).map_err(unreadable)?;
    let Some(header) = header(&mut file).map_err(unreadable)? else {
        return Err("is no shared library".to_owned());
    };
    let own = File::open("/proc/self/exe").and_then(|mut own| self::header(&mut own));
    if let Ok(Some(own)) = own
        && own[18..] != header[18..]
    {
        return Err("is a shared library of another machine".to_owned());
    }
    if header[16] != SHARED {
        return Err("is no shared library".to_owned());
    }
    if contains(&mut file, symbol.as_bytes()).map_err(unreadable)? {
        Ok(())
    } else {
        Err(format!("is a shared library without {symbol}"))
    }
}

/// `None` where it is no ELF file.
fn header(file: &mut File) -> io::Result<Option<[u8; HEADER_BYTES]>> {
    let mut header = [0; HEADER_BYTES];
    match file.read_exact(&mut header) {
        Ok(()) if header.starts_with(b"\x7fELF") => Ok(Some(header)),
        Ok(()) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error),
    }
}

fn contains(file: &mut impl Read, text: &[u8]) -> io::Result<bool> {
    let finder = memmem::Finder::new(text);
    let mut piece = Vec::new();
    loop {
        // The end of the last piece stays: the text may lie across.
        let kept = piece.len().min(text.len());
        piece.drain(..piece.len() - kept);
        let read = file.take(PIECE_BYTES as u64).read_to_end(&mut piece)?;
        if read == 0 {
            return Ok(false);
        }
        if finder.find(&piece).is_some() {
            return Ok(true);
        }
    }
}

/// A file that passes for a shared library of this machine, for tests.
#[cfg(test)]
pub(crate) fn pretend(symbol: &str) -> tempfile::NamedTempFile {
    use std::io::Write as _;
    let mut own = File::open("/proc/self/exe").expect("this test");
    let mut bytes = header(&mut own).expect("readable").expect("ELF").to_vec();
    bytes[16] = SHARED;
    // Across the end of a piece.
    bytes.resize(HEADER_BYTES + PIECE_BYTES - 3, 0);
    bytes.extend_from_slice(symbol.as_bytes());
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(&bytes).expect("written");
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_told_from_other_files() {
        let library = pretend("GetPjrtApi");
        assert_eq!(check(library.path(), "GetPjrtApi"), Ok(()));
        let error = check(library.path(), "dgetrf").unwrap_err();
        assert_eq!(error, "is a shared library without dgetrf");
        for path in ["/etc/passwd", "/dev/null"] {
            let error = check(Path::new(path), "dgetrf").unwrap_err();
            assert_eq!(error, "is no shared library", "{path}");
        }
        let error = check(Path::new("/proc"), "dgetrf").unwrap_err();
        assert!(error.contains("cannot be read"), "{error}");
        let mut bytes = std::fs::read(library.path()).unwrap();
        bytes[18] ^= 0x40;
        std::fs::write(library.path(), bytes).unwrap();
        let error = check(library.path(), "GetPjrtApi").unwrap_err();
        assert!(error.contains("another machine"), "{error}");
    }
}
