//! The little HTTP that `status` needs.

use std::time::Duration;

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use url::Url;

use crate::error::{Failure, chain};

/// For the whole exchange.
const DEADLINE: Duration = Duration::from_secs(10);
/// A status page is kilobytes.
const MAX_ANSWER_BYTES: u64 = 64 << 20;

/// The body of `http://HOST:PORT/PATH`.
///
/// # Errors
/// [`Failure::usage`] when the URL is not one or nobody answers there; otherwise when the answer is not 200.
pub(crate) async fn get(url: &str) -> Result<String, Failure> {
    let not_a_url = || {
        Failure::usage(format!(
            "{url:?} is no status URL: write http://HOST:PORT/status"
        ))
    };
    let parsed = Url::parse(url).map_err(|_| not_a_url())?;
    let (Some(host), Some(port), "http") = (
        parsed.host_str(),
        parsed.port_or_known_default(),
        parsed.scheme(),
    ) else {
        return Err(not_a_url());
    };
    // HTTP/1.0: the body ends with the connection and comes in no chunks.
    let request = format!(
        "GET {} HTTP/1.0\r\nHost: {host}:{port}\r\nAccept: application/json\r\n\r\n",
        parsed.path()
    );
    let exchange = async {
        let mut stream = TcpStream::connect((host.trim_matches(['[', ']']), port)).await?;
        stream.write_all(request.as_bytes()).await?;
        let mut answer = Vec::new();
        stream
            .take(MAX_ANSWER_BYTES)
            .read_to_end(&mut answer)
            .await?;
        Ok::<_, std::io::Error>(answer)
    };
    let answer = match timeout(DEADLINE, exchange).await {
        Ok(Ok(answer)) => answer,
        Ok(Err(error)) => {
            return Err(Failure::usage(format!(
                "nothing answers at {url} ({}): is the proxy running with --status_port?",
                chain(&error)
            )));
        }
        Err(_) => {
            return Err(Failure::internal(format!(
                "{url} did not answer within {DEADLINE:?}"
            )));
        }
    };
    body(&answer).ok_or_else(|| {
        let first = String::from_utf8_lossy(&answer);
        let first = first.lines().next().unwrap_or("nothing");
        Failure::internal(format!("{url} answered {first:?}"))
    })
}

/// The body of a 200 answer.
fn body(answer: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(answer).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split_whitespace().nth(1)?;
    (head.starts_with("HTTP/1.") && status == "200").then(|| body.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::USAGE;

    async fn answer(text: &'static str) -> Result<String, Failure> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/status", listener.local_addr().unwrap());
        let server = async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = [0; 1024];
            let length = stream.read(&mut request).await.unwrap();
            assert!(request[..length].starts_with(b"GET /status HTTP/1.0\r\n"));
            stream.write_all(text.as_bytes()).await.unwrap();
        };
        tokio::join!(server, get(&url)).1
    }

    #[tokio::test]
    async fn reads_a_body_and_nothing_else() {
        let text = "HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n\r\n{\"a\":1}";
        assert_eq!(answer(text).await.unwrap(), "{\"a\":1}");
        assert!(
            answer("HTTP/1.0 404 Not Found\r\n\r\n")
                .await
                .unwrap_err()
                .message
                .contains("404")
        );
        answer("").await.unwrap_err();
    }

    #[tokio::test]
    async fn a_wrong_url_is_the_users_to_mend() {
        for url in [
            "",
            "localhost:1/status",
            "https://localhost/status",
            "http:///x",
        ] {
            assert_eq!(get(url).await.expect_err(url).status, USAGE);
        }
        let closed = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap();
        assert_eq!(
            get(&format!("http://{closed}/status"))
                .await
                .unwrap_err()
                .status,
            USAGE
        );
    }
}
