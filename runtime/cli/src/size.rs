//! Sizes as users write them.

/// A number of bytes: `2147483648`, `2GiB`, `500 MB`. Units are B, KB, MB, GB, TB (powers of 1000) and KiB, MiB, GiB,
/// TiB (powers of 1024), in any case. A bare K, M or G is refused: tools disagree on what it means.
///
/// # Errors
/// A text for the user.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    let text = text.trim();
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| {
        format!("{text:?} is no size: write a whole number of bytes or a size like 2GiB")
    })?;
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        _ => {
            let unit = unit.trim();
            return Err(format!(
                "{unit:?} is no unit of size: write B, KB, MB, GB, TB, KiB, MiB, GiB or TiB"
            ));
        }
    };
    number
        .checked_mul(factor)
        .ok_or_else(|| format!("{text:?} is more bytes than 64 bits can count"))
}

/// As [`parse_bytes`], of which there must be some.
///
/// # Errors
/// A text for the user.
pub(crate) fn parse_some_bytes(text: &str) -> Result<u64, String> {
    match parse_bytes(text)? {
        0 => Err("leave it out for no limit; 0 bytes would hold nothing".to_owned()),
        bytes => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_plain_decimal_and_binary_sizes() {
        assert_eq!(parse_bytes("2147483648"), Ok(2 << 30));
        assert_eq!(parse_bytes("2GiB"), Ok(2 << 30));
        assert_eq!(parse_bytes(" 500 mb "), Ok(500_000_000));
        assert_eq!(parse_bytes("16kib"), Ok(16 << 10));
        assert_eq!(parse_bytes("0"), Ok(0));
        assert_eq!(parse_bytes("1TB"), Ok(1_000_000_000_000));
    }

    #[test]
    fn refuses_what_is_no_size() {
        for text in ["", "GiB", "-1", "1.5GiB", "2G", "2 parsecs", "0x10"] {
            parse_bytes(text).expect_err(text);
        }
        assert!(parse_bytes("2G").unwrap_err().contains("GiB"));
        assert!(parse_bytes("2 M").unwrap_err().contains("\"M\""));
        assert!(parse_bytes("17000000TiB").unwrap_err().contains("64 bits"));
        assert!(parse_bytes("99999999999999999999").is_err());
        assert!(parse_some_bytes("0KiB").is_err());
        assert_eq!(parse_some_bytes("1KiB"), Ok(1024));
    }
}
