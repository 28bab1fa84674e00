//! HTTP/2 by hand, for what no gRPC library would send.

use bytes::{BufMut as _, Bytes, BytesMut};
use h2::{
    SendStream,
    client::{ResponseFuture, SendRequest},
};
use tokio::{net::TcpStream, task::JoinHandle};
use tonic::codegen::http::{HeaderValue, Request};

/// One connection to a server; it ends when dropped.
#[derive(Debug)]
pub struct Raw {
    requests: SendRequest<Bytes>,
    connection: JoinHandle<Result<(), h2::Error>>,
    address: String,
}

impl Drop for Raw {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Raw {
    /// Connects to `host:port`.
    ///
    /// # Panics
    /// When nobody listens there.
    pub async fn connect(address: &str) -> Self {
        let stream = TcpStream::connect(address).await.expect("somebody listens");
        let (requests, connection) = h2::client::handshake(stream)
            .await
            .expect("the server speaks HTTP/2");
        Self {
            requests,
            connection: tokio::spawn(connection),
            address: address.to_owned(),
        }
    }

    /// Begins a call of a method of the IFRT service, its request still open.
    ///
    /// # Errors
    /// When the server has ended the connection.
    pub async fn call(
        &mut self,
        method: &str,
        headers: &[(&'static str, HeaderValue)],
    ) -> Result<(ResponseFuture, SendStream<Bytes>), h2::Error> {
        let mut request = Request::builder()
            .method("POST")
            .uri(format!(
                "http://{}/xla.ifrt.proxy.GrpcIfrtService/{method}",
                self.address
            ))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        let request = request.body(()).expect("a request that can be spelled");
        self.requests
            .clone()
            .ready()
            .await?
            .send_request(request, false)
    }
}

/// A gRPC message as a DATA frame carries it.
pub fn message(body: &[u8]) -> Bytes {
    let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
    let mut frame = BytesMut::from(claim(length));
    frame.put_slice(body);
    frame.freeze()
}

/// The beginning of a gRPC message of `length` bytes.
pub fn claim(length: u32) -> Bytes {
    let mut frame = BytesMut::new();
    frame.put_u8(0);
    frame.put_u32(length);
    frame.freeze()
}

/// The code of a call that has ended: its own, or -1 where the answer has none.
///
/// # Errors
/// When the stream was reset instead.
pub async fn code(answer: ResponseFuture) -> Result<i32, h2::Error> {
    let answer = answer.await?;
    let status = |headers: &tonic::codegen::http::HeaderMap| {
        headers
            .get("grpc-status")
            .and_then(|value| value.to_str().ok()?.parse().ok())
    };
    // An error without a body comes in the headers.
    if let Some(code) = status(answer.headers()) {
        return Ok(code);
    }
    let mut body = answer.into_body();
    while let Some(data) = body.data().await {
        let length = data?.len();
        body.flow_control().release_capacity(length)?;
    }
    Ok(body
        .trailers()
        .await?
        .as_ref()
        .and_then(status)
        .unwrap_or(-1))
}
