//! Clients that break off, lie, flood and never listen. Each ends with the server having said what is to be said, and
//! leaves it to the caller to see that nothing is left behind.

use std::time::Duration;

use bytes::Bytes;
use prost::Message as _;
use tokio::sync::mpsc;
use tokio_stream::{StreamExt as _, wrappers::ReceiverStream};
use tonic::{codegen::http::HeaderValue, metadata::BinaryMetadataValue};
use waystation_client::{Client, Request, Response, request};
use waystation_proto::xla::ifrt::proxy::{
    GrpcGetVersionRequest, GrpcHostBufferStoreMetadata, GrpcHostBufferStoreRequest,
    IfrtProxyVersion, IfrtRequest, InitRequest, LoadedExecutableHumanReadableProgramTextRequest,
    RequestMetadata,
};

use crate::raw::{self, Raw};

const INVALID_ARGUMENT: i32 = 3;
const FAILED_PRECONDITION: i32 = 9;
const UNIMPLEMENTED: i32 = 12;
const UNAVAILABLE: i32 = 14;
const STORE_METADATA: &str = "ifrt-proxy-grpc-host-buffer-store-metadata-bin";
const SESSION_METADATA: &str = "ifrt-proxy-grpc-ifrt-session-metadata-bin";

/// An InitRequest, encoded.
fn init() -> Vec<u8> {
    request_bytes(1, Request::InitRequest(InitRequest {}))
}

fn request_bytes(op_id: u64, request: Request) -> Vec<u8> {
    IfrtRequest {
        request_metadata: Some(RequestMetadata {
            op_id,
            user_context_id: 0,
        }),
        request: Some(request),
    }
    .encode_to_vec()
}

/// Begins a store whose bytes go through the sender; the result is that of the call.
pub fn open_store(
    client: &Client,
    handle: u64,
    size: i64,
) -> (
    mpsc::Sender<Bytes>,
    tokio::task::JoinHandle<Result<(), tonic::Status>>,
) {
    let (sender, receiver) = mpsc::channel(1);
    let chunks = ReceiverStream::new(receiver).map(|data| GrpcHostBufferStoreRequest { data });
    let mut request = tonic::Request::new(chunks);
    let metadata = GrpcHostBufferStoreMetadata {
        session_id: client.init().session_id,
        handle,
        buffer_size: size,
    };
    request.metadata_mut().insert_bin(
        STORE_METADATA,
        BinaryMetadataValue::from_bytes(&metadata.encode_to_vec()),
    );
    let mut service = client.service();
    let call = tokio::spawn(async move { service.host_buffer_store(request).await.map(drop) });
    (sender, call)
}

/// Versions that nobody has.
///
/// # Panics
/// When the server answers with a version outside the range asked for.
pub async fn versions(client: &Client) {
    let edges = [i32::MIN, -1, 0, 1, 15, 16, 25, 26, i32::MAX];
    for min in edges {
        for max in edges {
            let version = |n| {
                Some(IfrtProxyVersion {
                    protocol_version: n,
                    ifrt_serdes_version_number: n.clamp(0, 6),
                })
            };
            let offer = GrpcGetVersionRequest {
                min_version: version(min),
                max_version: version(max),
            };
            match client.service().get_version(offer).await {
                Ok(answer) => {
                    let chosen = answer.into_inner().version.expect("a version");
                    assert!(
                        (min..=max).contains(&chosen.protocol_version),
                        "{min}..{max}: {chosen:?}"
                    );
                }
                Err(status) => {
                    assert_eq!(
                        status.code() as i32,
                        FAILED_PRECONDITION,
                        "{min}..{max}: {status}"
                    );
                }
            }
        }
    }
}

/// Stores and sessions with headers that are missing, malformed or huge.
///
/// # Panics
/// When the server takes what it cannot understand.
pub async fn headers(address: &str) {
    let huge = HeaderValue::try_from("A".repeat(1 << 20)).expect("printable");
    let bad = [
        Vec::new(),
        vec![(STORE_METADATA, HeaderValue::from_static("%%%"))],
        vec![(STORE_METADATA, HeaderValue::from_static("////////"))],
        // Well formed, but of no session.
        vec![(STORE_METADATA, HeaderValue::from_static("CAEQAhgD"))],
    ];
    let mut raw = Raw::connect(address).await;
    for headers in bad {
        let (answer, mut body) = raw.call("HostBufferStore", &headers).await.expect("open");
        // The answer may have come before the body.
        let _ = body.send_data(raw::message(&[]), true);
        let code = raw::code(answer).await.expect("an answer");
        assert_eq!(code, INVALID_ARGUMENT, "{headers:?}");
    }
    // Nothing in a session's metadata is needed.
    for headers in [
        Vec::new(),
        vec![(SESSION_METADATA, HeaderValue::from_static("%%%"))],
    ] {
        let (answer, mut body) = raw.call("IfrtSession", &headers).await.expect("open");
        body.send_data(raw::message(&init()), true).expect("open");
        assert_eq!(
            raw::code(answer).await.expect("an answer"),
            0,
            "{headers:?}"
        );
    }
    // Whatever becomes of a connection with such a header: it is refused, with or without a word.
    for name in [STORE_METADATA, SESSION_METADATA] {
        let mut raw = Raw::connect(address).await;
        if let Ok((answer, _body)) = raw.call("HostBufferStore", &[(name, huge.clone())]).await {
            let answered = raw::code(answer).await;
            assert!(!matches!(answered, Ok(0)), "{name}: {answered:?}");
        }
    }
}

/// Messages whose announced length never comes.
///
/// # Panics
/// When the server does not take the streams.
pub async fn claims(address: &str) {
    for length in [1 << 20, 300 << 20, u32::MAX] {
        let mut raw = Raw::connect(address).await;
        let mut open = Vec::new();
        for _ in 0..8 {
            let (answer, mut body) = raw.call("IfrtSession", &[]).await.expect("open");
            body.send_data(raw::message(&init()), false).expect("open");
            body.send_data(raw::claim(length), false).expect("open");
            body.send_data(Bytes::from_static(&[0; 1000]), false)
                .expect("open");
            // The session is there and has read so far.
            let answer = answer.await.expect("a session");
            open.push((answer.into_body(), body));
        }
        for (replies, _) in &mut open {
            assert!(replies.data().await.is_some());
        }
    }
}

/// Streams that are reset as soon as they are opened.
///
/// # Panics
/// Never; a server may end such a connection.
pub async fn resets(address: &str, streams: usize) {
    let mut raw = Raw::connect(address).await;
    for _ in 0..streams {
        match raw.call("IfrtSession", &[]).await {
            Ok((_, mut body)) => body.send_reset(h2::Reason::CANCEL),
            Err(_) => raw = Raw::connect(address).await,
        }
    }
}

/// Sessions that are opened and never used, all at once.
///
/// # Panics
/// When the server does not take them.
pub async fn never_used(address: &str, sessions: usize) {
    let mut open = Vec::new();
    for _ in 0..sessions {
        let mut raw = Raw::connect(address).await;
        let (answer, body) = raw.call("IfrtSession", &[]).await.expect("open");
        open.push((answer.await.expect("a session"), body, raw));
    }
}

/// Whole sessions, one after the other; some leave arrays behind.
///
/// # Panics
/// When one is not served.
pub async fn come_and_go(address: &str, sessions: usize) {
    for n in 0..sessions {
        let client = Client::connect(address).await.expect("a session");
        if n % 2 == 0 {
            let device = client.init().primary_device_ids[0];
            let handle = client.handle();
            client
                .store(handle, Bytes::from(vec![1; 4096]))
                .await
                .expect("stored");
            client
                .call(request::make_array(handle, &[1024], &[device], None))
                .await
                .expect("made");
        }
    }
}

/// Requests that are no requests, and streams that end half-way.
///
/// # Panics
/// When the server does not end such a session, or ends it as if all were well.
pub async fn broken_streams(address: &str) {
    let mut raw = Raw::connect(address).await;
    let cases: [(&str, Vec<Bytes>, i32); 4] = [
        ("nothing at all", Vec::new(), 0),
        (
            "ends after its first request",
            vec![raw::message(&init())],
            0,
        ),
        (
            "no protobuf",
            vec![raw::message(&init()), raw::message(&[0xff; 64])],
            INVALID_ARGUMENT,
        ),
        (
            "a compression nobody knows",
            vec![
                raw::message(&init()),
                Bytes::from_static(&[7, 0, 0, 0, 1, 0]),
            ],
            INVALID_ARGUMENT,
        ),
    ];
    for (case, frames, wanted) in cases {
        let (answer, mut body) = raw.call("IfrtSession", &[]).await.expect("open");
        for frame in frames {
            body.send_data(frame, false).expect("open");
        }
        // A stream that is broken is ended by the server; the others are half closed.
        if wanted == 0 {
            body.send_data(Bytes::new(), true).expect("open");
        }
        assert_eq!(
            raw::code(answer).await.expect("an answer"),
            wanted,
            "{case}"
        );
    }
}

/// What is no message, to the calls that the proxy reads without a codec; and good messages cut anywhere.
///
/// # Panics
/// When the server takes what it cannot understand, or not what it can.
pub async fn raw_messages(address: &str) {
    let client = Client::connect(address).await.expect("a session");
    let mut raw = Raw::connect(address).await;
    let lookups: [(&[u8], i32); 6] = [
        (&[], INVALID_ARGUMENT),
        (&[0, 0, 0], INVALID_ARGUMENT),
        (&[1, 0, 0, 0, 0], UNIMPLEMENTED),
        (&[0, 0, 0, 0, 9, 8, 1], INVALID_ARGUMENT),
        (&[0, 0, 0, 0, 1, 0xff], INVALID_ARGUMENT),
        (&[0; 1 << 20], INVALID_ARGUMENT),
    ];
    for (bytes, wanted) in lookups {
        let (answer, mut body) = raw.call("HostBufferLookup", &[]).await.expect("open");
        // The answer may have come before the body.
        let _ = body.send_data(Bytes::from_static(bytes), true);
        let code = raw::code(answer).await.expect("an answer");
        assert_eq!(code, wanted, "{} bytes", bytes.len());
    }
    let six = GrpcHostBufferStoreRequest {
        data: Bytes::from_static(b"sixsix"),
    };
    let good = raw::message(&six.encode_to_vec());
    let two = [&good[..], &good[..]].concat();
    let stores: [(&[u8], i32); 9] = [
        (&good, 0),
        (&[], INVALID_ARGUMENT),
        (&good[..good.len() - 1], INVALID_ARGUMENT),
        (&two, INVALID_ARGUMENT),
        (&[1, 0, 0, 0, 8], UNIMPLEMENTED),
        (&[0, 0, 0, 0, 2, 0x0a, 6], INVALID_ARGUMENT),
        (&[0, 0, 0, 0, 3, 0x0a, 0x80, 0x80], INVALID_ARGUMENT),
        (&[0, 0xff, 0xff, 0xff, 0xff, 0x0b], INVALID_ARGUMENT),
        // Five bytes for the length of nothing, and then the six.
        (
            &[&[0, 0, 0, 0, 6, 0x0a, 0x80, 0x80, 0x80, 0x80, 0][..], &good].concat(),
            0,
        ),
    ];
    for (bytes, wanted) in stores {
        for cut in [1, 4, bytes.len().max(1)] {
            let metadata = GrpcHostBufferStoreMetadata {
                session_id: client.init().session_id,
                handle: client.handle(),
                buffer_size: 6,
            };
            let header = BinaryMetadataValue::from_bytes(&metadata.encode_to_vec());
            let header = HeaderValue::from_bytes(header.as_encoded_bytes()).expect("base64");
            let (answer, mut body) = raw
                .call("HostBufferStore", &[(STORE_METADATA, header)])
                .await
                .expect("open");
            for piece in bytes.chunks(cut) {
                let _ = body.send_data(Bytes::copy_from_slice(piece), false);
            }
            let _ = body.send_data(Bytes::new(), true);
            let code = raw::code(answer).await.expect("an answer");
            assert_eq!(code, wanted, "{bytes:?} by {cut}");
        }
    }
}

/// Sessions that end while their stores are under way.
///
/// # Panics
/// When the server goes on with such a store.
pub async fn broken_stores(address: &str) {
    let client = Client::connect(address).await.expect("a session");
    let mut stores = Vec::new();
    for _ in 0..8 {
        let (bytes, call) = open_store(&client, client.handle(), 8 << 20);
        bytes
            .send(Bytes::from(vec![0; 1 << 20]))
            .await
            .expect("the store is open");
        stores.push((bytes, call));
    }
    drop(client);
    for (_bytes, call) in stores {
        let status = call
            .await
            .expect("no panic")
            .expect_err("its session has ended");
        // The store may come only when its session is gone.
        let code = status.code() as i32;
        assert!([UNAVAILABLE, INVALID_ARGUMENT].contains(&code), "{status}");
    }
}

/// Asks for long replies, `requests` times, and reads none; holds the stream for `hold` once all is sent or the server
/// takes no more.
///
/// # Panics
/// When the server does not serve the session at first.
pub async fn unread_replies(address: &str, requests: u64, hold: impl Future<Output = ()>) {
    let mut raw = Raw::connect(address).await;
    let (answer, mut body) = raw.call("IfrtSession", &[]).await.expect("open");
    body.send_data(raw::message(&init()), false).expect("open");
    let device = {
        let client = Client::connect(address).await.expect("a session");
        client.init().primary_device_ids[0]
    };
    let compile = request::compile(long_program().as_bytes(), &[device]);
    body.send_data(raw::message(&request_bytes(2, compile)), false)
        .expect("open");
    let mut replies = answer.await.expect("a session").into_body();
    // The two replies, within the first window.
    let mut received = bytes::BytesMut::new();
    let executable = loop {
        received.extend_from_slice(&replies.data().await.expect("replies").expect("replies"));
        if let Some(handle) = compiled(&received) {
            break handle;
        }
    };
    let text = Request::LoadedExecutableHumanReadableProgramTextRequest(
        LoadedExecutableHumanReadableProgramTextRequest {
            loaded_executable_handle: executable,
        },
    );
    for op_id in 3..3 + requests {
        let frame = raw::message(&request_bytes(op_id, text.clone()));
        body.reserve_capacity(frame.len());
        let room = std::future::poll_fn(|context| body.poll_capacity(context));
        // A server that reads no more has bounded the matter.
        match tokio::time::timeout(Duration::from_secs(1), room).await {
            Ok(Some(Ok(_))) => body.send_data(frame, false).expect("open"),
            _ => break,
        }
    }
    hold.await;
}

/// The executable's handle, once its reply is there.
fn compiled(mut received: &[u8]) -> Option<u64> {
    use waystation_proto::xla::ifrt::proxy::IfrtResponse;
    while received.len() >= 5 {
        let length = u32::from_be_bytes(received[1..5].try_into().ok()?) as usize;
        let reply = received.get(5..5 + length)?;
        if let Ok(IfrtResponse {
            response: Some(Response::CompileResponse(compiled)),
            ..
        }) = IfrtResponse::decode(reply)
        {
            return Some(compiled.loaded_executable_handle);
        }
        received = &received[5 + length..];
    }
    None
}

/// A program whose text is long.
fn long_program() -> String {
    let mut text = String::from(
        "module @jit_long { func.func public @main(%a0: tensor<4xf32>) -> tensor<4xf32> {\n",
    );
    for i in 0..1000 {
        let op = if i % 2 == 0 { "sine" } else { "cosine" };
        text += &format!("  %a{} = stablehlo.{op} %a{i} : tensor<4xf32>\n", i + 1);
    }
    text + "  return %a1000 : tensor<4xf32> } }"
}
