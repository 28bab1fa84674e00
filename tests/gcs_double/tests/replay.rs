//! What real TensorStore, gcsfs and Orbax asked of an emulator, asked of the double: the same statuses, bodies and bytes.
//!
//! The recording is made by tests/tools/record_gcs.py. Generations and the names of uploads are each server's own; they are
//! translated. Where Cloud Storage's documents and the emulator differ, the double does as the documents say, and the
//! difference is named in [`documented`].

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use waystation_gcs_double::Double;

#[derive(Deserialize)]
struct Exchange {
    method: String,
    target: String,
    headers: BTreeMap<String, String>,
    body: Body,
    status: u16,
    answer_headers: BTreeMap<String, String>,
    answer: Body,
}

#[derive(Deserialize, Default)]
struct Body {
    text: Option<String>,
    base64: Option<String>,
    json: Option<Value>,
}

impl Body {
    fn bytes(&self) -> Vec<u8> {
        match (&self.text, &self.base64) {
            (Some(text), _) => text.clone().into_bytes(),
            (None, Some(coded)) => STANDARD.decode(coded).unwrap(),
            (None, None) => Vec::new(),
        }
    }
}

/// What the recorder leaves out: times, addresses, and what only one of the two servers has.
const LEFT_OUT: [&str; 13] = [
    "acl",
    "defaultEventBasedHold",
    "etag",
    "id",
    "mediaLink",
    "rewriteToken",
    "selfLink",
    "timeCreated",
    "timeStorageClassUpdated",
    "updated",
    "versioning",
    "errors",
    "message",
];

/// The status that Cloud Storage documents where the emulator gives another.
fn documented(exchange: &Exchange) -> u16 {
    match (exchange.method.as_str(), exchange.status) {
        ("DELETE", 200) => 204,
        // It does not look at the condition. TensorStore asks whether what it has just read is still there.
        ("GET", 200) if exchange.target.contains("ifGenerationNotMatch") => 304,
        (_, status) => status,
    }
}

/// Texts of the recording, and what the double has in their place.
#[derive(Default)]
struct Names(BTreeMap<String, String>);

impl Names {
    fn translate(&self, text: &str) -> String {
        self.0
            .iter()
            .fold(text.to_owned(), |text, (recorded, ours)| {
                text.replace(recorded, ours)
            })
    }

    /// Takes in a pair, which must not contradict an earlier one.
    fn meet(&mut self, recorded: &str, ours: &str) {
        let known = self
            .0
            .entry(recorded.to_owned())
            .or_insert_with(|| ours.to_owned());
        assert_eq!(known, ours, "of {recorded}");
    }

    fn compare(&mut self, recorded: &Value, ours: &Value, at: &str) {
        match (recorded, ours) {
            (Value::Object(recorded), Value::Object(ours)) => {
                let names = |object: &serde_json::Map<String, Value>| -> Vec<String> {
                    let kept = object
                        .keys()
                        .filter(|name| !LEFT_OUT.contains(&name.as_str()));
                    let mut kept: Vec<_> = kept.cloned().collect();
                    kept.sort();
                    kept
                };
                assert_eq!(names(recorded), names(ours), "{at}");
                for name in names(recorded) {
                    self.compare(&recorded[&name], &ours[&name], &format!("{at}.{name}"));
                }
            }
            (Value::Array(recorded), Value::Array(ours)) => {
                assert_eq!(recorded.len(), ours.len(), "{at}");
                for (index, (recorded, ours)) in recorded.iter().zip(ours).enumerate() {
                    self.compare(recorded, ours, &format!("{at}[{index}]"));
                }
            }
            (Value::String(recorded), Value::String(ours)) if at.ends_with(".generation") => {
                self.meet(recorded, ours);
            }
            _ => assert_eq!(recorded, ours, "{at}"),
        }
    }
}

/// Entries of a list: names of objects, and prefixes.
fn entries(list: &Value) -> Vec<&Value> {
    let members = |name: &str| list[name].as_array().into_iter().flatten();
    let names = members("items").map(|item| &item["name"]);
    names.chain(members("prefixes")).collect()
}

/// The documents count prefixes in a page, the emulator does not. Whether its page is too long by that; ours is part of it.
fn too_long(exchange: &Exchange, recorded: &Value, ours: &Value) -> bool {
    let limit = exchange.target.split("maxResults=").nth(1);
    let limit = limit.and_then(|rest| rest.split('&').next()?.parse().ok());
    let Some(limit) = limit.filter(|limit: &usize| entries(recorded).len() > *limit) else {
        return false;
    };
    assert_eq!(entries(ours).len(), limit);
    assert!(
        entries(ours)
            .iter()
            .all(|entry| entries(recorded).contains(entry))
    );
    assert!(ours["nextPageToken"].is_string());
    true
}

struct Answer {
    status: u16,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

async fn ask(double: &Double, exchange: &Exchange, names: &Names) -> Answer {
    let body = exchange.body.bytes();
    let mut request = format!(
        "{} {} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\ncontent-length: {}\r\n",
        exchange.method,
        names.translate(&exchange.target),
        double.address(),
        body.len()
    );
    for (name, value) in &exchange.headers {
        request += &format!("{name}: {value}\r\n");
    }
    let mut connection = tokio::net::TcpStream::connect(double.address())
        .await
        .unwrap();
    connection
        .write_all(format!("{request}\r\n").as_bytes())
        .await
        .unwrap();
    connection.write_all(&body).await.unwrap();
    let mut answer = Vec::new();
    connection.read_to_end(&mut answer).await.unwrap();
    let gap = answer
        .windows(4)
        .position(|window| window == b"\r\n\r\n")
        .unwrap();
    let head = String::from_utf8(answer[..gap].to_vec()).unwrap();
    let mut lines = head.lines();
    let status = lines
        .next()
        .unwrap()
        .split(' ')
        .nth(1)
        .unwrap()
        .parse()
        .unwrap();
    let headers = lines.filter_map(|line| line.split_once(": "));
    Answer {
        status,
        headers: headers
            .map(|(a, b)| (a.to_ascii_lowercase(), b.to_owned()))
            .collect(),
        body: answer[gap + 4..].to_vec(),
    }
}

fn upload_id(location: &str) -> &str {
    location.split("upload_id=").nth(1).unwrap()
}

#[tokio::test]
async fn recorded_requests_of_real_clients_get_the_same_answers() {
    let double = Double::start(&[]).await.unwrap();
    let mut names = Names::default();
    let mut compared = 0;
    for (number, line) in include_str!("recorded.jsonl").lines().enumerate() {
        let exchange: Exchange = serde_json::from_str(line).unwrap();
        let at = format!("exchange {number}, {} {}", exchange.method, exchange.target);
        let answer = ask(&double, &exchange, &names).await;
        assert_eq!(answer.status, documented(&exchange), "{at}");
        if number == 0 {
            // As fast as the clients were, or faster.
            double.pace("shared", false);
        }
        if answer.status == 304 {
            continue;
        }
        for (name, recorded) in &exchange.answer_headers {
            let ours = answer.headers.get(name);
            match name.as_str() {
                "location" => {
                    let ours = ours.unwrap_or_else(|| panic!("{at}: no location"));
                    names.meet(upload_id(recorded), upload_id(ours));
                }
                "content-range" | "x-goog-stored-content-encoding" => {
                    assert_eq!(ours, Some(recorded), "{at}: {name}");
                }
                // The emulator's is of the part that was read.
                "x-goog-hash" if answer.status == 200 => {
                    assert_eq!(ours, Some(recorded), "{at}: {name}");
                }
                _ => {}
            }
        }
        // The emulator has a body where a resumable upload begins, the documents have none.
        if exchange.answer_headers.contains_key("location") {
            continue;
        }
        match &exchange.answer.json {
            Some(recorded) => {
                let ours: Value = serde_json::from_slice(&answer.body).unwrap();
                if !too_long(&exchange, recorded, &ours) {
                    names.compare(recorded, &ours, &at);
                }
            }
            None if answer.status < 300 => {
                assert!(
                    answer.body == exchange.answer.bytes(),
                    "{at}: the bytes differ"
                );
            }
            None => {}
        }
        compared += 1;
    }
    assert!(compared > 200, "{compared}");
}
