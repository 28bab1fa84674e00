//! The other side of the service: a proxy's watch on its workers, and the status.

use std::{
    hash::{BuildHasher as _, RandomState},
    time::Duration,
};

use tokio::{sync::watch, time::timeout};
use tokio_util::sync::CancellationToken;
use tonic::{
    Code, Status,
    transport::{Channel, Endpoint},
};
use tracing::{info, warn};
use waystation_proto::waystation::scheduler::{
    AllotRequest, Allotment, GetLeaseRequest, GiveBackRequest, IntroduceReply, IntroduceRequest,
    SchedulerStatus, SchedulerStatusRequest, resource_manager_client::ResourceManagerClient,
};

use crate::serve::{CONNECTION_WINDOW_BYTES, STREAM_WINDOW_BYTES};

/// First pause before another try.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Longest pause before another try, unless the lease is short: a proxy must be back before it ends.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// For the TCP connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// HTTP/2 pings, so that a vanished resource manager is noticed: for short questions, and for streams under the usual lease.
const PING: Duration = Duration::from_secs(5);
/// For the goodbye, which a resource manager that does not answer must not hold up.
const GOODBYE: Duration = Duration::from_secs(1);

/// Why a resource manager could not be asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Not "host:port".
    #[error("{address:?} is not a resource manager's address: give HOST:PORT")]
    Address {
        /// As given.
        address: String,
        /// Why.
        #[source]
        source: tonic::transport::Error,
    },
    /// Nobody answers there.
    #[error("the resource manager at {address} cannot be reached")]
    Unreachable {
        /// As given.
        address: String,
        /// Why.
        #[source]
        source: tonic::transport::Error,
    },
    /// It answered with an error.
    #[error("the resource manager at {address} refused")]
    Refused {
        /// As given.
        address: String,
        /// What it said.
        #[source]
        status: Box<Status>,
    },
}

/// Asks the resource manager at `address` ("host:port") for its workers and keeps asking: the returned value is none
/// until something is known, then always the newest allotment. As long as none has come, or the last one had no workers, its
/// `progress` also says why the resource manager cannot be asked.
///
/// While the resource manager cannot be reached the last allotment stays in place: it is off the data path, and workers
/// are used without it. After a reconnect the next allotment has the same epoch, or a greater one when another proxy had
/// the slices meanwhile; then all that this proxy had on them is gone. An allotment with `epoch == 0` has
/// no workers: the proxy waits for slices, `progress` says for which; those that it had are lost. When this proxy is refused
/// (another link version) that is logged and tried again, since the resource manager may be replaced by a matching one.
///
/// Must be called within a tokio runtime. The watch ends when `shutdown` is cancelled or every receiver is gone. It says goodbye
/// then, so that others may have the slices at once; [`Watch::ended`] waits for that. It ends at once when `address` is
/// not one; the receiver's `changed` then fails.
pub fn watch(address: String, request: AllotRequest, shutdown: CancellationToken) -> Watch {
    let (sender, allotments) = watch::channel(None);
    let request = AllotRequest {
        // Seeded by the system for each process and each call.
        instance: RandomState::new().hash_one(&request.proxy).max(1),
        ..request
    };
    let ended = tokio::spawn(async move {
        let asked = tokio::select! {
            () = shutdown.cancelled() => true,
            () = sender.closed() => true,
            () = follow(&address, &request, &sender) => false,
        };
        if asked && knows_us(sender.borrow().as_ref()) {
            // What was not heard ends with the lease.
            if let Ok(Err(error)) = timeout(GOODBYE, give_back(&address, request.instance)).await {
                info!(error = chain(&error), "no goodbye to the resource manager");
            }
        }
    });
    Watch { allotments, ended }
}

/// What [`watch()`] gives.
#[derive(Debug)]
pub struct Watch {
    /// The newest allotment.
    pub allotments: watch::Receiver<Option<Allotment>>,
    /// Ends with the watch, after its goodbye.
    pub ended: tokio::task::JoinHandle<()>,
}

/// Whether a resource manager has answered: each answer has a ticket.
fn knows_us(last: Option<&Allotment>) -> bool {
    last.is_some_and(|last| last.ticket != 0)
}

async fn give_back(address: &str, instance: u64) -> Result<(), Error> {
    let mut client = connect(address).await?;
    let said = client.give_back(GiveBackRequest { instance }).await;
    said.map(|_| ()).map_err(|status| refused(address, status))
}

/// The state of the resource manager at `address` ("host:port").
///
/// # Errors
/// When the address is not one, when nobody answers there, or when the answer is an error.
pub async fn status(address: &str) -> Result<SchedulerStatus, Error> {
    let answer = connect(address)
        .await?
        .get_status(SchedulerStatusRequest {})
        .await;
    Ok(answer
        .map_err(|status| refused(address, status))?
        .into_inner())
}

/// Introduces a worker to the resource manager at `address` ("host:port"), and gives what its plugin is to find.
///
/// # Errors
/// When the address is not one, when nobody answers there, or when the answer is an error.
pub async fn introduce(address: &str, request: IntroduceRequest) -> Result<IntroduceReply, Error> {
    let answer = connect(address).await?.introduce(request).await;
    Ok(answer
        .map_err(|status| refused(address, status))?
        .into_inner())
}

impl Error {
    /// Whether the same question would get the same answer: what was said is wrong, or of another release.
    #[must_use]
    pub fn is_final(&self) -> bool {
        let Error::Refused { status, .. } = self else {
            return false;
        };
        matches!(
            status.code(),
            Code::InvalidArgument | Code::FailedPrecondition | Code::Unimplemented
        )
    }
}

/// Returns only when the address is of no use.
async fn follow(
    address: &str,
    request: &AllotRequest,
    allotments: &watch::Sender<Option<Allotment>>,
) {
    let mut pause = FIRST_PAUSE;
    let mut said = String::new();
    loop {
        let error = match stream_allotments(address, request, allotments, &mut pause).await {
            Ok(()) => "the resource manager ended the stream".to_owned(),
            Err(error @ Error::Address { .. }) => {
                tracing::error!(error = chain(&error), "allotment cannot be asked for");
                return;
            }
            Err(error) => chain(&error),
        };
        // Once a reason, not once a try.
        if error != said {
            warn!(%error, "no allotment from the resource manager, trying again");
            // Whoever waits for slices is to know. Those that the proxy has are not touched by it.
            allotments.send_if_modified(|last| {
                let waits = last.as_ref().is_none_or(|last| last.epoch == 0);
                if waits {
                    last.get_or_insert_default().progress.clone_from(&error);
                }
                waits
            });
            said = error;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(longest_pause(allotments.borrow().as_ref()));
    }
}

fn longest_pause(last: Option<&Allotment>) -> Duration {
    let lease = last.map(|last| Duration::from_millis(last.lease_ms.into()));
    let lease = lease.filter(|lease| !lease.is_zero());
    lease.map_or(LONGEST_PAUSE, |lease| LONGEST_PAUSE.min(lease / 8))
}

async fn stream_allotments(
    address: &str,
    request: &AllotRequest,
    allotments: &watch::Sender<Option<Allotment>>,
    pause: &mut Duration,
) -> Result<(), Error> {
    let mut client = connect_for_stream(address).await?;
    let mut request = request.clone();
    if let Some(last) = allotments.borrow().as_ref() {
        request.resume_epoch = last.epoch;
        request.resume_slices.clone_from(&last.slices);
        request.ticket = last.ticket;
    }
    let answer = client.allot(request).await;
    let mut stream = answer
        .map_err(|status| refused(address, status))?
        .into_inner();
    while let Some(allotment) = stream
        .message()
        .await
        .map_err(|status| refused(address, status))?
    {
        *pause = FIRST_PAUSE;
        info!(
            epoch = allotment.epoch,
            complete = allotment.complete,
            progress = allotment.progress,
            "allotment"
        );
        allotments.send_replace(Some(allotment));
    }
    Ok(())
}

/// A connection whose silence is noticed within the lease, as the resource manager notices ours.
async fn connect_for_stream(address: &str) -> Result<ResourceManagerClient<Channel>, Error> {
    let mut client = connect(address).await?;
    let answer = client.get_lease(GetLeaseRequest {}).await;
    let lease = answer
        .map_err(|status| refused(address, status))?
        .into_inner();
    match Duration::from_millis(lease.lease_ms.into()) / 2 {
        PING | Duration::ZERO => Ok(client),
        ping => dial(address, ping).await,
    }
}

async fn connect(address: &str) -> Result<ResourceManagerClient<Channel>, Error> {
    dial(address, PING).await
}

async fn dial(address: &str, ping: Duration) -> Result<ResourceManagerClient<Channel>, Error> {
    let endpoint =
        Endpoint::from_shared(format!("http://{address}")).map_err(|source| Error::Address {
            address: address.to_owned(),
            source,
        })?;
    let channel = endpoint
        .tcp_nodelay(true)
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(ping)
        .keep_alive_timeout(ping)
        .keep_alive_while_idle(true)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .connect()
        .await
        .map_err(|source| Error::Unreachable {
            address: address.to_owned(),
            source,
        })?;
    Ok(ResourceManagerClient::new(channel)
        .max_decoding_message_size(usize::MAX)
        .max_encoding_message_size(usize::MAX))
}

fn refused(address: &str, status: Status) -> Error {
    Error::Refused {
        address: address.to_owned(),
        status: Box::new(status),
    }
}

/// The error with its sources on one line.
fn chain(error: &dyn std::error::Error) -> String {
    let sources = std::iter::successors(error.source(), |source| source.source());
    sources.fold(error.to_string(), |text, source| {
        format!("{text}: {source}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_was_never_answered_says_no_goodbye() {
        // Nobody listens on what a listener had that is gone.
        let gone = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = gone.local_addr().unwrap().to_string();
        drop(gone);
        let stop = CancellationToken::new();
        let mut watch = watch(address.clone(), AllotRequest::default(), stop.clone());
        watch.allotments.changed().await.unwrap();
        let last = watch.allotments.borrow().clone();
        let told = last.as_ref().map(|last| last.progress.as_str());
        assert!(told.is_some_and(|told| told.contains(&address)), "{told:?}");
        assert!(!knows_us(last.as_ref()));
        let answered = Allotment {
            ticket: 1,
            ..Allotment::default()
        };
        assert!(knows_us(Some(&answered)) && !knows_us(None));
        stop.cancel();
        watch.ended.await.unwrap();
    }

    #[test]
    fn a_proxy_tries_again_several_times_a_lease() {
        let told = |lease_ms| Allotment {
            lease_ms,
            ..Allotment::default()
        };
        assert_eq!(longest_pause(None), LONGEST_PAUSE);
        assert_eq!(longest_pause(Some(&told(0))), LONGEST_PAUSE);
        assert_eq!(longest_pause(Some(&told(60_000))), LONGEST_PAUSE);
        assert_eq!(
            longest_pause(Some(&told(2_000))),
            Duration::from_millis(250)
        );
    }
}
