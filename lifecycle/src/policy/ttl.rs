//! A time to live as users write it.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

const MINUTE: u64 = 60;
const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;

/// Longer is no time to live any more.
const LONGEST_DAYS: u64 = 3650;

/// How long something that is not used is kept. At least a minute, at most ten years.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ttl {
    seconds: u64,
}

/// A text that is no time to live.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no time to live: write days, hours or minutes, as in 30d, 12h or 90m, up to {LONGEST_DAYS}d"
)]
pub struct BadTtl {
    text: String,
}

impl Default for Ttl {
    /// 30 days.
    fn default() -> Ttl {
        Ttl { seconds: 30 * DAY }
    }
}

impl Ttl {
    /// As it was given.
    pub fn duration(self) -> Duration {
        Duration::from_secs(self.seconds)
    }

    /// In whole days, as lifecycle rules count: rounded up.
    pub fn days(self) -> u64 {
        self.seconds.div_ceil(DAY)
    }

    /// [`Ttl::days`] as a time.
    pub fn in_days(self) -> Duration {
        Duration::from_secs(self.days() * DAY)
    }

    /// Whether [`Ttl::days`] is longer than what was given.
    pub fn is_rounded(self) -> bool {
        self.days() * DAY != self.seconds
    }
}

impl FromStr for Ttl {
    type Err = BadTtl;

    fn from_str(text: &str) -> Result<Ttl, BadTtl> {
        let bad = || BadTtl {
            text: text.to_owned(),
        };
        let trimmed = text.trim();
        let digits = trimmed
            .find(|c: char| !c.is_ascii_digit())
            .ok_or_else(bad)?;
        let (number, unit) = trimmed.split_at(digits);
        let number: u64 = number.parse().map_err(|_| bad())?;
        let unit = match unit {
            "d" => DAY,
            "h" => HOUR,
            "m" => MINUTE,
            _ => return Err(bad()),
        };
        let seconds = number.checked_mul(unit).ok_or_else(bad)?;
        if (MINUTE..=LONGEST_DAYS * DAY).contains(&seconds) {
            Ok(Ttl { seconds })
        } else {
            Err(bad())
        }
    }
}

impl fmt::Display for Ttl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, name) = [(DAY, 'd'), (HOUR, 'h'), (MINUTE, 'm')]
            .into_iter()
            .find(|(unit, _)| self.seconds.is_multiple_of(*unit))
            .unwrap_or((MINUTE, 'm'));
        write!(f, "{}{name}", self.seconds / unit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_and_writes_what_people_write_and_rounds_up_to_days() {
        for (text, days, rounded) in [
            ("30d", 30, false),
            ("12h", 1, true),
            ("24h", 1, false),
            ("25h", 2, true),
            ("90m", 1, true),
            ("3650d", 3650, false),
        ] {
            let ttl: Ttl = text.parse().unwrap();
            assert_eq!((ttl.days(), ttl.is_rounded()), (days, rounded), "{text}");
            assert_eq!(ttl.to_string().parse(), Ok(ttl), "{text}");
        }
        assert_eq!("24h".parse::<Ttl>().unwrap().to_string(), "1d");
        assert_eq!(Ttl::default().to_string(), "30d");
    }

    #[test]
    fn refuses_the_rest_and_says_what_to_write() {
        for text in [
            "",
            "30",
            "d",
            "0d",
            "0h",
            "-1d",
            "1.5d",
            "30 days",
            "30D",
            "1s",
            "3651d",
            "99999999999999999999d",
        ] {
            let bad = text.parse::<Ttl>().expect_err(text);
            assert!(bad.to_string().contains("30d"), "{bad}");
        }
    }
}
