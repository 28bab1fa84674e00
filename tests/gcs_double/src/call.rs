//! A request as both APIs see it.

use axum::http::HeaderMap;
use bytes::Bytes;

use crate::object::Conditions;
use crate::reply::Refusal;

#[derive(Debug)]
pub(crate) struct Call {
    pub(crate) method: String,
    /// Between the slashes, each decoded.
    pub(crate) path: Vec<String>,
    pub(crate) query: Vec<(String, String)>,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
    /// `http://HOST` as the client knows it.
    pub(crate) base: String,
}

impl Call {
    pub(crate) fn new(
        method: &str,
        path: &str,
        query: &str,
        headers: HeaderMap,
        body: Bytes,
    ) -> Call {
        let host = headers.get("host").and_then(|host| host.to_str().ok());
        Call {
            method: method.to_owned(),
            path: path
                .trim_start_matches('/')
                .split('/')
                .map(decode)
                .collect(),
            query: url::form_urlencoded::parse(query.as_bytes())
                .into_owned()
                .collect(),
            base: format!("http://{}", host.unwrap_or("localhost")),
            headers,
            body,
        }
    }

    pub(crate) fn param(&self, name: &str) -> Option<&str> {
        let found = self.query.iter().find(|(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    pub(crate) fn params<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        let found = self.query.iter().filter(move |(known, _)| known == name);
        found.map(|(_, value)| value.as_str())
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    pub(crate) fn token(&self) -> Option<&str> {
        self.header("authorization")?.strip_prefix("Bearer ")
    }

    /// What the JSON API has in the query. `prefix`: "if", or "ifSource".
    pub(crate) fn conditions(&self, prefix: &str) -> Result<Conditions, Refusal> {
        let number = |name: &str| {
            let name = format!("{prefix}{name}");
            self.param(&name)
                .map(|value| integer(&name, value))
                .transpose()
        };
        Ok(Conditions {
            generation: number("GenerationMatch")?,
            generation_not: number("GenerationNotMatch")?,
            metageneration: number("MetagenerationMatch")?,
            metageneration_not: number("MetagenerationNotMatch")?,
        })
    }

    /// What the XML API has in headers; S3 has `If-None-Match: *` for a create.
    pub(crate) fn header_conditions(&self) -> Result<Conditions, Refusal> {
        let number = |name: &str| {
            self.header(name)
                .map(|value| integer(name, value))
                .transpose()
        };
        let create = self.method == "PUT" && self.header("if-none-match") == Some("*");
        Ok(Conditions {
            generation: number("x-goog-if-generation-match")?.or(create.then_some(0)),
            generation_not: None,
            metageneration: number("x-goog-if-metageneration-match")?,
            metageneration_not: None,
        })
    }

    /// The bytes of a body of `length` that `Range` asks for: first and one past the last. None: all.
    pub(crate) fn range(&self, length: usize) -> Result<Option<(usize, usize)>, Refusal> {
        let Some(spec) = self
            .header("range")
            .and_then(|range| range.strip_prefix("bytes="))
        else {
            return Ok(None);
        };
        let Some((first, last)) = spec.split_once('-') else {
            return Ok(None);
        };
        let range = match (first.parse::<usize>(), last.parse::<usize>()) {
            (Ok(first), Ok(last)) if first <= last => (first, last.saturating_add(1).min(length)),
            (Ok(first), Err(_)) if last.is_empty() => (first, length),
            (Err(_), Ok(last)) if first.is_empty() && last > 0 => {
                (length.saturating_sub(last), length)
            }
            _ => return Ok(None),
        };
        if range.0 >= length {
            return Err(Refusal::BadRange(length));
        }
        Ok(Some(range))
    }
}

pub(crate) fn integer(name: &str, value: &str) -> Result<i64, Refusal> {
    value
        .parse()
        .map_err(|_| Refusal::Invalid(format!("{name} is {value:?} and no number")))
}

/// Percent-decoding; what is no encoding stays.
pub(crate) fn decode(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let coded = (bytes[at] == b'%')
            .then(|| text.get(at + 1..at + 3))
            .flatten();
        match coded.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_as_http_has_them() {
        let range = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("range", text.parse().unwrap());
            Call::new("GET", "/b/o", "", headers, Bytes::new()).range(10)
        };
        assert_eq!(range("bytes=2-4"), Ok(Some((2, 5))));
        assert_eq!(range("bytes=2-"), Ok(Some((2, 10))));
        assert_eq!(range("bytes=-4"), Ok(Some((6, 10))));
        assert_eq!(range("bytes=-40"), Ok(Some((0, 10))));
        assert_eq!(range("bytes=2-400"), Ok(Some((2, 10))));
        assert_eq!(range("bytes=10-"), Err(Refusal::BadRange(10)));
        assert_eq!(range("bytes=4-2"), Ok(None));
    }

    #[test]
    fn decodes_what_is_encoded() {
        assert_eq!(decode("a%2Fb%C3%BC+c%"), "a/bü+c%");
    }
}
