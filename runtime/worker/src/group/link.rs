//! The connection to the resource manager for groups, and the store behind it.
//!
//! The plugin's threads block in the store while tasks of the worker's runtime ask for them. The resource manager may start anew
//! meanwhile: the stream is dialled again, names the group it is of, and what this worker had put is put again.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use tokio::{runtime::Handle, sync::watch, task::AbortHandle};
use tonic::{Status, transport::Channel};
use waystation_pjrt::{Code, KeyValueStore, ffi::Failure};
use waystation_proto::waystation::group::{
    GatherRequest, GetRequest, LeaveRequest, PutRequest, groups_client::GroupsClient,
};

use crate::manager;

const FIRST_RETRY: Duration = Duration::from_millis(100);
/// Well within the shortest leases: a group of which not all are back at a new resource manager after one is no more.
const LAST_RETRY: Duration = Duration::from_millis(500);
/// How long one request for a value waits at the resource manager.
const ONE_WAIT: Duration = Duration::from_secs(20);
/// How long one request may take beyond its wait.
const ANSWERS: Duration = Duration::from_secs(20);
/// How long a put, or a look without waiting, is tried while the resource manager is away.
const TRIES: Duration = Duration::from_secs(60);
/// How long the answer may take that there was no value in time.
const LATE: Duration = Duration::from_secs(2);

/// Where a worker stands.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    /// "host:port".
    pub(crate) manager: String,
    pub(crate) slice: u32,
    pub(crate) task: u32,
    /// Workers of the slice; 0: the resource manager knows.
    pub(crate) slice_tasks: u32,
    /// How others reach the worker, for messages.
    pub(crate) address: String,
}

/// Of the group, as the stream tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum State {
    Gathering,
    Formed { id: u64, nodes: u32 },
    Gone(String),
}

/// See the module.
pub(super) struct Link {
    place: Place,
    /// That of the stream, once there is one.
    channel: Mutex<Channel>,
    runtime: Handle,
    state: watch::Sender<State>,
    /// What this worker has put, for a resource manager that starts anew. As bounded as the store.
    journal: Mutex<Vec<PutRequest>>,
    numbers: AtomicU64,
}

/// The stream, until this is dropped.
pub(super) struct Stream(AbortHandle);

impl Drop for Stream {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A store that the plugin may keep: it does not keep the worker in its group.
#[derive(Clone)]
pub(super) struct Shared(pub(super) Arc<Link>);

impl Link {
    /// Starts to be of the group, until the stream is dropped.
    pub(super) fn start(
        place: Place,
    ) -> Result<(Arc<Link>, watch::Receiver<State>, Stream), String> {
        let endpoint = manager::endpoint(&place.manager)?;
        let (state, receiver) = watch::channel(State::Gathering);
        let link = Arc::new(Link {
            place,
            channel: Mutex::new(endpoint.connect_lazy()),
            runtime: Handle::current(),
            state,
            journal: Mutex::default(),
            numbers: AtomicU64::new(1),
        });
        let task = tokio::spawn(stay(Arc::clone(&link)));
        Ok((link, receiver, Stream(task.abort_handle())))
    }

    fn journal(&self) -> std::sync::MutexGuard<'_, Vec<PutRequest>> {
        self.journal.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn channel(&self) -> std::sync::MutexGuard<'_, Channel> {
        self.channel.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn client(&self) -> GroupsClient<Channel> {
        let channel = self.channel().clone();
        GroupsClient::new(channel).max_decoding_message_size(usize::MAX)
    }

    /// The group is no more, for this worker. The first reason stays.
    fn gone(&self, why: String) {
        self.state.send_if_modified(|state| {
            let news = !matches!(state, State::Gone(_));
            if news {
                *state = State::Gone(why);
            }
            news
        });
    }

    /// Tells the others that the group is no more, with the reason, as far as the resource manager can be reached.
    pub(super) fn leave(self: &Arc<Self>, why: &str) {
        let Ok(group) = self.id() else {
            // It is no more, or has never been.
            return self.gone(why.to_owned());
        };
        self.gone(why.to_owned());
        let request = LeaveRequest {
            group,
            task: self.place.task,
            reason: why.to_owned(),
        };
        let mut client = self.client();
        self.runtime.spawn(async move {
            // Without an answer the others find out by themselves.
            let _ = tokio::time::timeout(ANSWERS, client.leave(request)).await;
        });
    }

    /// The group's number.
    fn id(&self) -> Result<u64, Failure> {
        match &*self.state.borrow() {
            State::Formed { id, .. } => Ok(*id),
            State::Gathering => Err(Failure::new(
                Code::Unavailable,
                "the group of this worker's slice has not formed",
            )),
            State::Gone(why) => Err(Failure::new(Code::Unavailable, why.clone())),
        }
    }

    /// One life of the stream. Returns whether another one may do better.
    async fn gather(&self, pause: &mut Duration) -> Result<Status, String> {
        let resume = match &*self.state.borrow() {
            State::Formed { id, .. } => *id,
            State::Gathering => 0,
            State::Gone(why) => return Err(why.clone()),
        };
        let request = GatherRequest {
            link_version: waystation_proto::LINK_VERSION,
            build_id: waystation_proto::BUILD_ID.to_owned(),
            slice: self.place.slice,
            task: self.place.task,
            slice_tasks: self.place.slice_tasks,
            address: self.place.address.clone(),
            resume,
        };
        let ended = async {
            let channel = manager::connect(&self.place.manager).await?;
            *self.channel() = channel;
            let mut stream = self.client().gather(request).await?.into_inner();
            // The resource manager may know nothing of what was put before.
            if resume != 0 {
                self.put_again().await?;
            }
            while let Some(gathered) = stream.message().await? {
                *pause = FIRST_RETRY;
                let formed = State::Formed {
                    id: gathered.group,
                    nodes: gathered.nodes,
                };
                self.state.send_if_modified(|state| {
                    let news = *state == State::Gathering;
                    if news {
                        *state = formed;
                    }
                    news
                });
            }
            Err::<(), Status>(Status::unavailable("the stream has ended"))
        };
        let status = match ended.await {
            Ok(()) => Status::unavailable("the stream has ended"),
            Err(status) => status,
        };
        match status.code() {
            tonic::Code::Aborted if resume != 0 || self.id().is_ok() => {
                Err(status.message().to_owned())
            }
            tonic::Code::FailedPrecondition | tonic::Code::Unimplemented => {
                Err(status.message().to_owned())
            }
            _ => Ok(status),
        }
    }

    async fn put_again(&self) -> Result<(), Status> {
        let puts = self.journal().clone();
        for put in puts {
            match self.client().put(put).await {
                Ok(_) => {}
                // Of a put that another worker came before with, and that fails in its turn.
                Err(status) if status.code() == tonic::Code::AlreadyExists => {}
                Err(status) => return Err(status),
            }
        }
        Ok(())
    }

    /// Asks until there is an answer, the group is gone, or the time is up. A resource manager that does not know the group is one
    /// that this worker, or the stream, has yet to tell of it.
    async fn ask<T, F>(
        &self,
        until: Instant,
        once: impl Fn(GroupsClient<Channel>, u64) -> F,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, Status>>,
    {
        let mut pause = FIRST_RETRY;
        loop {
            let id = self.id()?;
            let mut state = self.state.subscribe();
            let limit = (ONE_WAIT + ANSWERS).min(until.saturating_duration_since(Instant::now()));
            let answer = tokio::select! {
                answer = tokio::time::timeout(limit, once(self.client(), id)) => answer,
                _ = state.wait_for(|state| matches!(state, State::Gone(_))) => continue,
            };
            let status = match answer {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(status)) => status,
                Err(_) => Status::unavailable("the resource manager does not answer"),
            };
            let again = matches!(
                status.code(),
                tonic::Code::Unavailable
                    | tonic::Code::Aborted
                    | tonic::Code::Cancelled
                    | tonic::Code::Unknown
            );
            if !again || Instant::now() + pause >= until {
                return Err(Failure::new(
                    Code::from_number(status.code() as i32),
                    format!(
                        "the resource manager at {}: {}",
                        self.place.manager,
                        status.message()
                    ),
                ));
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LAST_RETRY);
        }
    }

    /// Runs a request on the worker's runtime, and waits for it. The thread is one of the plugin's, or one that may block.
    fn block<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, Failure>> + Send + 'static,
    ) -> Result<T, Failure> {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        self.runtime.spawn(async move {
            // The receiver waits below.
            let _ = sender.send(work.await);
        });
        receiver
            .recv()
            .unwrap_or_else(|_| Err(Failure::new(Code::Cancelled, "the worker is going down")))
    }

    async fn value(&self, key: Bytes, timeout: Duration) -> Result<Option<Bytes>, Failure> {
        let deadline = Instant::now() + timeout;
        let until = match timeout {
            Duration::ZERO => deadline + TRIES,
            _ => deadline + LATE,
        };
        loop {
            let wait = deadline
                .saturating_duration_since(Instant::now())
                .min(ONE_WAIT);
            let wait_ms = u32::try_from(wait.as_millis()).unwrap_or(u32::MAX);
            let value = self
                .ask(until, |mut client, group| {
                    let request = GetRequest {
                        group,
                        key: key.clone(),
                        wait_ms,
                    };
                    async move { Ok(client.get(request).await?.into_inner().value) }
                })
                .await?;
            if value.is_some() || Instant::now() >= deadline {
                return Ok(value);
            }
        }
    }
}

impl KeyValueStore for Shared {
    fn get(&self, key: &[u8], timeout: Duration) -> Result<Vec<u8>, Failure> {
        let (link, key) = (Arc::clone(&self.0), Bytes::copy_from_slice(key));
        let name = key.clone();
        let value = self
            .0
            .block(async move { link.value(key, timeout).await })?;
        value.map(Vec::from).ok_or_else(|| {
            let name = String::from_utf8_lossy(&name).into_owned();
            Failure::new(
                Code::DeadlineExceeded,
                format!("no worker of the slice has put {name:?} within {timeout:?}"),
            )
        })
    }

    fn try_get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, Failure> {
        let (link, key) = (Arc::clone(&self.0), Bytes::copy_from_slice(key));
        let value = self
            .0
            .block(async move { link.value(key, Duration::ZERO).await })?;
        Ok(value.map(Vec::from))
    }

    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), Failure> {
        let link = Arc::clone(&self.0);
        let number = link.numbers.fetch_add(1, Relaxed);
        let put = PutRequest {
            group: link.id()?,
            key: Bytes::copy_from_slice(key),
            value: Bytes::copy_from_slice(value),
            task: link.place.task,
            number,
        };
        // Before it is sent: a resource manager that has taken it may be gone when the answer should come.
        link.journal().push(put.clone());
        let done = self.0.block(async move {
            link.ask(Instant::now() + TRIES, |mut client, _| {
                let put = put.clone();
                async move { client.put(put).await.map(|_| ()) }
            })
            .await
        });
        if done.is_err() {
            self.0.journal().retain(|put| put.number != number);
        }
        done
    }
}

/// Keeps the stream until the group is gone.
async fn stay(link: Arc<Link>) {
    let mut pause = FIRST_RETRY;
    let mut said = String::new();
    loop {
        match link.gather(&mut pause).await {
            Ok(status) if pause > FIRST_RETRY && status.message() == said => {}
            Ok(status) => {
                status.message().clone_into(&mut said);
                tracing::warn!(
                    resource_manager = link.place.manager,
                    error = status.message(),
                    "not in the group of its slice; dialling again"
                );
            }
            Err(why) => return link.gone(why),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LAST_RETRY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// At a port where nobody listens.
    fn nobody() -> Place {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        Place {
            manager: listener.local_addr().unwrap().to_string(),
            slice: 0,
            task: 0,
            slice_tasks: 2,
            address: "here:1".to_owned(),
        }
    }

    #[tokio::test]
    async fn a_value_is_not_waited_for_beyond_its_time_while_nobody_answers() {
        let (link, _state, _stream) = Link::start(nobody()).unwrap();
        link.state.send_replace(State::Formed { id: 7, nodes: 2 });
        let shared = Shared(Arc::clone(&link));
        let got = tokio::task::spawn_blocking(move || shared.get(b"k", Duration::from_millis(50)));
        // Against a hang: without the value's own time it would be asked for during a minute.
        let got = tokio::time::timeout(TRIES / 2, got).await;
        let failure = got.expect("it ends").unwrap().expect_err("nobody answers");
        assert_eq!(failure.code(), Code::Unavailable);
    }
}
