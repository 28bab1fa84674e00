//! Counting what is sent again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use async_trait::async_trait;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};

/// How often requests of a store have failed in a way for which they are sent again: 408, 429, 5xx, or no answer.
///
/// The last failure of a request that is given up is counted as well. Clones share the number.
#[derive(Debug, Clone, Default)]
pub struct Retries(Arc<AtomicU64>);

impl Retries {
    /// The number so far.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// One more, which somebody else sends again.
    pub fn one(&self) {
        self.0.fetch_add(1, Relaxed);
    }
}

/// Makes clients that count.
#[derive(Debug)]
pub(super) struct Counting(pub(super) Retries);

impl HttpConnector for Counting {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Counted {
            client: ReqwestConnector::default().connect(options)?,
            retries: self.0.clone(),
        }))
    }
}

#[derive(Debug)]
struct Counted {
    client: HttpClient,
    retries: Retries,
}

#[async_trait]
impl HttpService for Counted {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let answer = self.client.execute(request).await;
        let failed = match &answer {
            Ok(answer) => {
                let status = answer.status();
                status.is_server_error() || matches!(status.as_u16(), 408 | 429)
            }
            Err(_) => true,
        };
        if failed {
            self.retries.one();
        }
        answer
    }
}
