//! The double in the process of a test.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use bytes::Bytes;
use serde_json::value::RawValue;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::control;
use crate::fault::Fault;
use crate::object::{About, Conditions};
use crate::serve::{Server, serve};
use crate::state::Logged;

/// A running double. It ends when this is dropped.
#[derive(Debug)]
pub struct Double {
    address: SocketAddr,
    server: Server,
    task: JoinHandle<()>,
}

impl Drop for Double {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Double {
    /// Serves on a free port of the loopback, with these buckets in it.
    ///
    /// # Errors
    /// Where no port can be had.
    pub async fn start(buckets: &[&str]) -> std::io::Result<Double> {
        let double = Double::listen(TcpListener::bind("127.0.0.1:0").await?)?;
        for bucket in buckets {
            // A name given twice is one bucket.
            let _ = double.server.state().create_bucket(bucket);
        }
        Ok(double)
    }

    /// Serves on a listener.
    ///
    /// # Errors
    /// Where the listener has no address.
    pub fn listen(listener: TcpListener) -> std::io::Result<Double> {
        let address = listener.local_addr()?;
        let server = Server::default();
        let router = Router::new().fallback(serve).with_state(server.clone());
        let task = tokio::spawn(async move {
            // Fails with the listener only, and then every client sees it.
            let _ = axum::serve(listener, router).await;
        });
        Ok(Double {
            address,
            server,
            task,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// `http://HOST:PORT`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The variables that lead `object_store` here, under `gs://` with a fixed token and under `s3://`.
    pub fn variables(&self) -> Vec<(String, String)> {
        let url = self.url();
        let fixed = [
            ("GOOGLE_BASE_URL", url.as_str()),
            ("GOOGLE_BEARER_TOKEN", "token"),
            ("AWS_ENDPOINT", url.as_str()),
            ("AWS_ALLOW_HTTP", "true"),
            ("AWS_ACCESS_KEY_ID", "id"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
        ];
        fixed
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .to_vec()
    }

    /// Waits until the serving task has ended, which takes somebody else to end it.
    pub async fn wait(mut self) {
        let _ = (&mut self.task).await;
    }

    /// Takes a bucket away, with all that is in it.
    pub fn remove_bucket(&self, bucket: &str) {
        self.server.state().buckets.remove(bucket);
    }

    /// Puts a bucket (back) there, empty.
    pub fn create_bucket(&self, bucket: &str) {
        // One that is there stays.
        let _ = self.server.state().create_bucket(bucket);
    }

    /// Names of all objects.
    pub fn names(&self, bucket: &str) -> Vec<String> {
        let state = self.server.state();
        let found = state.buckets.get(bucket);
        found
            .map(|bucket| bucket.objects.keys().cloned().collect())
            .unwrap_or_default()
    }

    /// The bytes of an object.
    pub fn object(&self, bucket: &str, name: &str) -> Option<Bytes> {
        let state = self.server.state();
        Some(state.buckets.get(bucket)?.objects.get(name)?.data.clone())
    }

    /// Puts an object there, whatever was there, without permissions, pace and faults.
    pub fn put(&self, bucket: &str, name: &str, data: impl Into<Bytes>) {
        let mut state = self.server.state();
        let now = state.now();
        if let Ok(bucket) = state.bucket(bucket) {
            let paced = std::mem::replace(&mut bucket.paced, false);
            let about = About::default();
            // Only a name that is none is refused.
            let _ = bucket.put(name, data.into(), about, &Conditions::default(), now);
            bucket.paced = paced;
        }
    }

    /// Takes an object away.
    pub fn remove(&self, bucket: &str, name: &str) {
        if let Ok(bucket) = self.server.state().bucket(bucket) {
            bucket.objects.remove(name);
        }
    }

    /// The lifecycle member of a bucket, as it was sent.
    pub fn lifecycle(&self, bucket: &str) -> Option<String> {
        let state = self.server.state();
        let lifecycle = state.buckets.get(bucket)?.lifecycle.as_ref()?;
        Some(lifecycle.get().to_owned())
    }

    /// Puts a lifecycle there as somebody else left it, in whatever form.
    ///
    /// # Errors
    /// Where the text is no JSON or the bucket is missing.
    pub fn seed_lifecycle(&self, bucket: &str, text: &str) -> Result<(), String> {
        let raw = RawValue::from_string(text.to_owned()).map_err(|error| error.to_string())?;
        let seeded = control::seed_lifecycle(&mut self.server.state(), bucket, Some(raw));
        seeded.map_err(|refusal| format!("{refusal:?}"))
    }

    /// Bodies of all updates of buckets that were asked for, in order.
    pub fn patches(&self) -> Vec<String> {
        self.server.state().patches.clone()
    }

    /// Moves the clock on, and lets lifecycle rules act.
    pub fn advance(&self, by: Duration) {
        self.server.state().advance(by);
    }

    /// Makes all objects older, and lets lifecycle rules act: as [`Double::advance`], for who goes by a clock of his own.
    pub fn age(&self, by: Duration) {
        let mut state = self.server.state();
        let now = state.now();
        for bucket in state.buckets.values_mut() {
            bucket.age(by);
            bucket.expire(now);
        }
    }

    /// Leaves a token, or everybody without an entry of his own, these permissions only; None: all.
    pub fn grant(&self, bucket: &str, token: Option<&str>, permissions: Option<&[&str]>) {
        let permissions = permissions.map(|list| {
            list.iter()
                .map(|&permission| permission.to_owned())
                .collect()
        });
        self.server.state().grants.set(bucket, token, permissions);
    }

    /// Orders a fault.
    pub fn fault(&self, fault: Fault) {
        self.server.state().faults.order(fault);
    }

    /// Ends all faults. Who waits in silence goes on waiting.
    pub fn clear_faults(&self) {
        self.server.state().faults.clear();
    }

    /// Whether one name takes one write a second (as it does when nothing is said).
    pub fn pace(&self, bucket: &str, paced: bool) {
        if let Ok(bucket) = self.server.state().bucket(bucket) {
            bucket.paced = paced;
        }
    }

    /// How many entries a list has in a page.
    pub fn page(&self, entries: usize) {
        self.server.state().page = Some(entries);
    }

    /// Whether requests need a token of the metadata server or of a service account, and how long a new one is good.
    pub fn require_tokens(&self, required: bool, lifetime: Duration) {
        let tokens = &mut self.server.state().tokens;
        tokens.required = required;
        tokens.lifetime = lifetime;
    }

    /// Makes every token that was handed out worthless.
    pub fn revoke_tokens(&self) {
        self.server.state().tokens.revoke();
    }

    /// How many tokens were handed out.
    pub fn tokens_issued(&self) -> u64 {
        self.server.state().tokens.issued()
    }

    /// What was asked, without orders to the double itself.
    pub fn log(&self) -> Vec<Logged> {
        self.server.state().log.iter().cloned().collect()
    }
}
