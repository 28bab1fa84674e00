//! The double: one bucket named "bucket" in memory, behind HTTP.
//!
//! What both clouds share is served once: objects under `/bucket/<name, percent-encoded>`, lists by `list-type=2` in
//! pages of two. They differ in the header of a create that must not write over, and in how many objects one delete
//! takes.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, Response, StatusCode, header};

const PAGE: usize = 2;

pub(crate) struct Double {
    pub(crate) address: SocketAddr,
    bucket: Shared,
}

type Shared = Arc<Mutex<Contents>>;

#[derive(Default)]
struct Contents {
    objects: BTreeMap<String, (u64, Vec<u8>)>,
    generation: u64,
    failures: usize,
    failure: u16,
}

impl Double {
    pub(crate) async fn start() -> Double {
        let bucket = Shared::default();
        let router = Router::new()
            .fallback(serve)
            .with_state(Arc::clone(&bucket));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        Double { address, bucket }
    }

    /// Names of all objects.
    pub(crate) fn names(&self) -> Vec<String> {
        self.bucket
            .lock()
            .unwrap()
            .objects
            .keys()
            .cloned()
            .collect()
    }

    /// The next requests get this status and nothing else.
    pub(crate) fn fail_next(&self, requests: usize, status: u16) {
        let mut bucket = self.bucket.lock().unwrap();
        bucket.failures = requests;
        bucket.failure = status;
    }
}

async fn serve(State(bucket): State<Shared>, request: Request) -> Response<Body> {
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, usize::MAX).await.unwrap();
    let mut bucket = bucket.lock().unwrap();
    if bucket.failures > 0 {
        bucket.failures -= 1;
        let status = StatusCode::from_u16(bucket.failure).unwrap();
        return answer(status, "ordered");
    }
    let path = parts.uri.path().trim_start_matches('/');
    let (bucket_name, name) = path.split_once('/').unwrap_or((path, ""));
    if bucket_name != "bucket" {
        return answer(
            StatusCode::NOT_FOUND,
            "<Error><Code>NoSuchBucket</Code></Error>",
        );
    }
    let name = decode(name);
    let query = query(parts.uri.query().unwrap_or_default());
    match parts.method {
        Method::GET if query.contains_key("list-type") => bucket.list(&query),
        Method::GET | Method::HEAD => bucket.get(&name, &parts.headers),
        Method::PUT => bucket.put(name, &parts.headers, body.to_vec()),
        Method::DELETE => {
            bucket.objects.remove(&name);
            answer(StatusCode::NO_CONTENT, "")
        }
        Method::POST if query.contains_key("delete") => bucket.delete_all(&body),
        method => answer(StatusCode::NOT_IMPLEMENTED, method.as_str()),
    }
}

impl Contents {
    fn put(&mut self, name: String, headers: &HeaderMap, body: Vec<u8>) -> Response<Body> {
        let says = |name: &str, value: &str| headers.get(name).is_some_and(|v| v == value);
        let create = says("x-goog-if-generation-match", "0") || says("if-none-match", "*");
        if create && self.objects.contains_key(&name) {
            return answer(StatusCode::PRECONDITION_FAILED, "");
        }
        self.generation += 1;
        let generation = self.generation;
        self.objects.insert(name, (generation, body));
        described(StatusCode::OK, generation)
            .body(Body::empty())
            .unwrap()
    }

    fn get(&self, name: &str, headers: &HeaderMap) -> Response<Body> {
        let Some((generation, object)) = self.objects.get(name) else {
            return answer(
                StatusCode::NOT_FOUND,
                "<Error><Code>NoSuchKey</Code></Error>",
            );
        };
        let range = headers.get(header::RANGE).map(|range| {
            let range = range.to_str().unwrap().strip_prefix("bytes=").unwrap();
            let (first, last) = range.split_once('-').unwrap();
            (
                first.parse::<usize>().unwrap(),
                last.parse::<usize>().unwrap(),
            )
        });
        let Some((first, last)) = range else {
            return described(StatusCode::OK, *generation)
                .header(header::CONTENT_LENGTH, object.len())
                .body(object.clone().into())
                .unwrap();
        };
        let part = object[first..=last].to_vec();
        described(StatusCode::PARTIAL_CONTENT, *generation)
            .header(
                header::CONTENT_RANGE,
                format!("bytes {first}-{last}/{}", object.len()),
            )
            .header(header::CONTENT_LENGTH, part.len())
            .body(part.into())
            .unwrap()
    }

    fn list(&self, query: &BTreeMap<String, String>) -> Response<Body> {
        let prefix = query.get("prefix").map_or("", String::as_str);
        let after = query.get("continuation-token").map_or("", String::as_str);
        let mut names = self
            .objects
            .iter()
            .filter(|(name, _)| name.starts_with(prefix) && name.as_str() > after);
        let page: Vec<_> = names.by_ref().take(PAGE).collect();
        let mut xml = String::from("<ListBucketResult>");
        for (name, (generation, object)) in &page {
            let size = object.len();
            xml += &format!(
                "<Contents><Key>{name}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>\
                 <ETag>\"{generation}\"</ETag><Size>{size}</Size></Contents>"
            );
        }
        if let (Some((last, _)), true) = (page.last(), names.next().is_some()) {
            xml += &format!("<NextContinuationToken>{last}</NextContinuationToken>");
        }
        answer(StatusCode::OK, &(xml + "</ListBucketResult>"))
    }

    fn delete_all(&mut self, body: &[u8]) -> Response<Body> {
        let body = std::str::from_utf8(body).unwrap();
        let mut xml = String::from("<DeleteResult>");
        for rest in body.split("<Key>").skip(1) {
            let name = rest.split("</Key>").next().unwrap();
            self.objects.remove(name);
            xml += &format!("<Deleted><Key>{name}</Key></Deleted>");
        }
        answer(StatusCode::OK, &(xml + "</DeleteResult>"))
    }
}

fn described(status: StatusCode, generation: u64) -> axum::http::response::Builder {
    Response::builder()
        .status(status)
        .header(header::ETAG, format!("\"{generation}\""))
        .header("x-goog-generation", generation)
        .header(header::LAST_MODIFIED, "Thu, 01 Jan 2026 00:00:00 GMT")
}

fn answer(status: StatusCode, body: &str) -> Response<Body> {
    Response::builder()
        .status(status)
        .body(body.to_owned().into())
        .unwrap()
}

fn query(text: &str) -> BTreeMap<String, String> {
    text.split('&')
        .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
        .map(|(name, value)| (decode(name), decode(value)))
        .collect()
}

fn decode(text: &str) -> String {
    let mut out = Vec::new();
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte == b'%' {
            let hex = [bytes.next().unwrap(), bytes.next().unwrap()];
            let hex = std::str::from_utf8(&hex).unwrap();
            out.push(u8::from_str_radix(hex, 16).unwrap());
        } else {
            out.push(byte);
        }
    }
    String::from_utf8(out).unwrap()
}
