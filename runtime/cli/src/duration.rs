//! Times as users write them.

use std::time::Duration;

/// A century is for ever, and no sum of two overflows a clock.
const LONGEST_SECONDS: u64 = 100 * 366 * 24 * 3600;

/// A time: `30`, `30s`, `500ms`, `10m`, `1h`, `30d`. A bare number is seconds.
///
/// # Errors
/// A text for the user.
pub(crate) fn parse_duration(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let bad =
        || format!("{text:?} is no time: write a whole number with ms, s, m, h or d, as in 30s");
    let number: u64 = number.parse().map_err(|_| bad())?;
    let seconds = |each: u64| number.checked_mul(each).map(Duration::from_secs);
    let time = match unit.trim() {
        "ms" => Some(Duration::from_millis(number)),
        "" | "s" => seconds(1),
        "m" => seconds(60),
        "h" => seconds(3600),
        "d" => seconds(24 * 3600),
        _ => return Err(bad()),
    };
    time.filter(|time| time.as_secs() <= LONGEST_SECONDS)
        .ok_or_else(bad)
}

/// As [`parse_duration`] reads it.
pub(crate) fn show_duration(time: Duration) -> String {
    format!("{}ms", time.as_millis())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        for (text, millis) in [
            ("0", 0),
            ("30", 30_000),
            ("500ms", 500),
            ("2 s", 2000),
            ("3m", 180_000),
            ("1h", 3_600_000),
            ("30d", 2_592_000_000),
        ] {
            let time = Duration::from_millis(millis);
            assert_eq!(parse_duration(text), Ok(time), "{text}");
            assert_eq!(parse_duration(&show_duration(time)), Ok(time), "{text}");
        }
        for text in [
            "",
            "s",
            "-1",
            "1.5s",
            "1 week",
            "99999999999d",
            "18446744073709551615",
        ] {
            parse_duration(text).expect_err(text);
        }
    }
}
