//! The two checksums that Cloud Storage tells of an object.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use md5::Digest as _;

/// CRC-32C (Castagnoli), bit by bit: objects of tests are small.
pub(crate) fn crc32c(data: &[u8]) -> u32 {
    const TABLE: [u32; 256] = table();
    let step = |crc: u32, byte: &u8| TABLE[usize::from(crc as u8 ^ byte)] ^ (crc >> 8);
    !data.iter().fold(!0, step)
}

const fn table() -> [u32; 256] {
    let mut table = [0; 256];
    let mut index = 0;
    while index < 256 {
        let mut crc = index as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 {
                0x82F6_3B78 ^ (crc >> 1)
            } else {
                crc >> 1
            };
            bit += 1;
        }
        table[index] = crc;
        index += 1;
    }
    table
}

/// As the JSON API writes it.
pub(crate) fn crc32c_text(crc: u32) -> String {
    STANDARD.encode(crc.to_be_bytes())
}

pub(crate) fn md5(data: &[u8]) -> [u8; 16] {
    md5::Md5::digest(data).into()
}

/// As the JSON API writes it.
pub(crate) fn md5_text(md5: &[u8; 16]) -> String {
    STANDARD.encode(md5)
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        // From RFC 3720 and RFC 1321.
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        assert_eq!(hex(&md5(b"abc")), "900150983cd24fb0d6963f7d28e17f72");
    }
}
