//! A clock that tests may put forward. Never back.

use std::time::{Duration, SystemTime};

use chrono::{DateTime, SecondsFormat, Utc};

pub(crate) type Time = DateTime<Utc>;

/// The machine's time, and what was added to it.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    ahead: Duration,
}

impl Clock {
    pub(crate) fn now(&self) -> Time {
        (SystemTime::now() + self.ahead).into()
    }

    pub(crate) fn advance(&mut self, by: Duration) {
        self.ahead += by;
    }
}

/// As the JSON API and lists write it.
pub(crate) fn rfc3339(time: Time) -> String {
    time.to_rfc3339_opts(SecondsFormat::Millis, true)
}

/// As headers write it.
pub(crate) fn http_date(time: Time) -> String {
    time.format("%a, %d %b %Y %H:%M:%S GMT").to_string()
}

pub(crate) fn parse_rfc3339(text: &str) -> Option<Time> {
    Some(DateTime::parse_from_rfc3339(text).ok()?.with_timezone(&Utc))
}

/// A date as lifecycle rules write it: the midnight at which it begins.
pub(crate) fn parse_date(text: &str) -> Option<Time> {
    parse_rfc3339(&format!("{text}T00:00:00Z"))
}
