//! Other workers' data services.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::{Bytes, BytesMut};
use tokio::sync::watch;
use tonic::transport::{Channel, Endpoint};
use waystation_checkpoint::Term;
use waystation_proto::{
    tensorflow::{StatusProto, error::Code},
    waystation::worker::{
        DataFrame, ExecutableFrame, ExecutableHeader, FetchDataRequest, FetchExecutableRequest,
        worker_client::WorkerClient,
    },
};

use crate::{
    data::{Connections, Ticket},
    holder::Holder,
    layout::Order,
    slabs::{Slab, Slabs},
    status,
};

/// Windows of every connection between our parts: with tonic's defaults h2 ends a connection that has a few thousand small
/// messages unread, and large transfers wait for each round trip.
pub(crate) const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// See [`CONNECTION_WINDOW_BYTES`].
pub(crate) const STREAM_WINDOW_BYTES: u32 = 1 << 20;

/// The largest executable that is fetched.
const MOST_EXECUTABLE_BYTES: u64 = 8 << 30;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long after one connection to a worker has broken another one may take to show that the worker has ended.
const LAST_WORD: Duration = Duration::from_secs(1);

/// Connections by address.
#[derive(Debug)]
pub(crate) struct Peers {
    /// Kept while the worker lives.
    channels: Mutex<HashMap<String, Channel>>,
    connections: Connections,
    /// Tells the fetches under way from an address that the worker there is lost, by its name.
    lost: Mutex<HashMap<String, watch::Sender<Option<String>>>>,
    slabs: Arc<Slabs>,
}

/// A transfer of another worker.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Elsewhere<'a> {
    /// The worker's data service.
    pub(crate) address: &'a str,
    /// The lease's epoch there.
    pub(crate) epoch: u64,
    pub(crate) transfer: u64,
}

/// How to reach a service of ours at "host:port".
pub(crate) fn endpoint(address: &str) -> Result<Endpoint, tonic::transport::Error> {
    Ok(Endpoint::from_shared(format!("http://{address}"))?
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(Duration::from_secs(10))
        .keep_alive_timeout(Duration::from_secs(20))
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .initial_stream_window_size(STREAM_WINDOW_BYTES))
}

/// An executable of another worker, of which the header has come.
pub(crate) struct Coming {
    pub(crate) header: ExecutableHeader,
    first: Bytes,
    frames: tonic::Streaming<ExecutableFrame>,
    address: String,
}

impl Coming {
    /// Waits for the rest.
    pub(crate) async fn bytes(mut self) -> Result<Bytes, StatusProto> {
        let size = self.header.size_bytes;
        let wrong = |what: &str| {
            status::invalid(format!(
                "the executable of the worker at {} {what} the {size} bytes that it announced",
                self.address
            ))
        };
        if size > MOST_EXECUTABLE_BYTES {
            return Err(status::exhausted(format!(
                "the executable of the worker at {} has {size} bytes; at most {MOST_EXECUTABLE_BYTES} are taken",
                self.address
            )));
        }
        // Grows with what comes, whatever was announced.
        let mut data = BytesMut::new();
        let mut next = Some(std::mem::take(&mut self.first));
        while let Some(bytes) = next {
            if (data.len() + bytes.len()) as u64 > size {
                return Err(wrong("has more than"));
            }
            data.extend_from_slice(&bytes);
            let frame = self.frames.message().await;
            let frame = frame.map_err(|error| gone_with(&self.address, "programs", &error))?;
            next = frame.map(|frame| frame.data);
        }
        if data.len() as u64 != size {
            return Err(wrong("has fewer than"));
        }
        Ok(data.freeze())
    }
}

/// What a call to another worker says that did not come through: the worker's own words, or that it is gone.
fn gone_with(address: &str, what: &str, error: &tonic::Status) -> StatusProto {
    status::of_grpc(error).unwrap_or_else(|| {
        status::of(
            Code::DataLoss,
            format!(
                "the worker at {address} is gone with its {what}: {}",
                error.message()
            ),
        )
    })
}

impl Peers {
    /// What is fetched comes into these slabs.
    pub(crate) fn new(slabs: Arc<Slabs>) -> Arc<Peers> {
        Arc::new(Peers {
            channels: Mutex::default(),
            connections: Connections::default(),
            lost: Mutex::default(),
            slabs,
        })
    }

    /// Begins to fetch an executable that another worker has loaded.
    pub(crate) async fn executable(
        &self,
        address: &str,
        epoch: u64,
        executable: u64,
        secret: Bytes,
    ) -> Result<Coming, StatusProto> {
        let gone = |error: &tonic::Status| gone_with(address, "programs", error);
        let mut client =
            WorkerClient::new(self.channel(address)?).max_decoding_message_size(usize::MAX);
        let request = FetchExecutableRequest {
            epoch,
            executable,
            secret,
        };
        let frames = client.fetch_executable(request).await;
        let mut frames = frames.map_err(|error| gone(&error))?.into_inner();
        let first = frames.message().await.map_err(|error| gone(&error))?;
        let ExecutableFrame { header, data } = first.unwrap_or_default();
        Ok(Coming {
            header: header.ok_or_else(|| {
                status::invalid(format!(
                    "the worker at {address} sent an executable without its header"
                ))
            })?,
            first: data,
            frames,
            address: address.to_owned(),
        })
    }

    fn channel(&self, address: &str) -> Result<Channel, StatusProto> {
        let mut channels = self.channels.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(channel) = channels.get(address) {
            return Ok(channel.clone());
        }
        let endpoint = endpoint(address).map_err(|error| {
            status::invalid(format!("{address:?} is no address of a worker: {error}"))
        })?;
        let channel = endpoint.connect_lazy();
        channels.insert(address.to_owned(), channel.clone());
        Ok(channel)
    }

    /// Ends what is fetched from a worker that the proxy has lost: one that hangs would not end it.
    pub(crate) fn lose(&self, address: &str, name: &str) {
        let mut lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(fetches) = lost.remove(address) {
            fetches.send_replace(Some(name.to_owned()));
        }
    }

    /// Waits until the worker at an address is lost.
    async fn loss(&self, address: &str) -> StatusProto {
        let mut lost = {
            let mut lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
            lost.entry(address.to_owned()).or_default().subscribe()
        };
        let name = match lost.wait_for(Option::is_some).await {
            Ok(name) => name.clone(),
            // The sender goes only after its word.
            Err(_) => None,
        };
        status::of(
            Code::DataLoss,
            format!(
                "worker {} is gone, with arrays that were fetched from it",
                name.unwrap_or_else(|| format!("at {address}"))
            ),
        )
    }

    /// Fetches a transfer of exactly `bytes` bytes, and how the device there laid them out. Ends with the lease that it is for.
    pub(crate) async fn fetch(
        &self,
        holder: &Holder,
        from: Elsewhere<'_>,
        bytes: usize,
        term: Term,
    ) -> Result<(Slab, Order), StatusProto> {
        tokio::select! {
            biased;
            fetched = self.fetch_from(holder, from, bytes, term) => fetched,
            lost = self.loss(from.address) => Err(lost),
            () = holder.over.cancelled() => Err(status::of(
                Code::Cancelled,
                "the lease has ended for which an array was fetched",
            )),
        }
    }

    async fn fetch_from(
        &self,
        holder: &Holder,
        Elsewhere {
            address,
            epoch,
            transfer,
        }: Elsewhere<'_>,
        bytes: usize,
        term: Term,
    ) -> Result<(Slab, Order), StatusProto> {
        let gone = |error: &tonic::Status| gone_with(address, "arrays", error);
        let lost = |why: &dyn std::fmt::Display| {
            let what = format!("the worker at {address} is gone with its arrays: {why}");
            status::of(Code::DataLoss, what)
        };
        let mut client =
            WorkerClient::new(self.channel(address)?).max_decoding_message_size(usize::MAX);
        let request = FetchDataRequest {
            epoch,
            transfer,
            by_connection: true,
            secret: holder.secret.clone(),
        };
        let frames = client.fetch_data(request).await;
        let mut frames = frames.map_err(|error| gone(&error))?.into_inner();
        let frame = frames.message().await.map_err(|error| gone(&error))?;
        let DataFrame { header, data, .. } = frame.unwrap_or_default();
        let header = header.ok_or_else(|| {
            status::invalid(format!(
                "the worker at {address} sent transfer {transfer} without its header"
            ))
        })?;
        let differs = |size: u64| {
            status::invalid(format!(
                "transfer {transfer} of the worker at {address} has {size} bytes, {bytes} are needed"
            ))
        };
        if header.size_bytes != bytes as u64 {
            return Err(differs(header.size_bytes));
        }
        let order = Some(header.minor_to_major).filter(|order| !order.is_empty());
        let taken = self.slabs.take(bytes, term);
        let mut slab = taken.map_err(|error| status::of_plugin(&error, 0))?;
        if header.ticket.is_empty() {
            if data.len() != bytes {
                return Err(differs(data.len() as u64));
            }
            slab.bytes.copy_from_slice(&data);
            return Ok((slab, order));
        }
        let ticket = Ticket::try_from(&header.ticket[..]).map_err(|_| {
            status::invalid(format!("the worker at {address} sent what is no ticket"))
        })?;
        let memory = std::mem::take(&mut slab.bytes);
        // It stays open as long as the worker lives, and this end has not closed it.
        let ended = async {
            match frames.message().await {
                Err(error) => gone(&error),
                Ok(_) => lost(&"it broke off"),
            }
        };
        tokio::pin!(ended);
        let broken = tokio::select! {
            biased;
            fetched = self.connections.fetch(address, ticket, memory) => match fetched {
                Ok(bytes) => {
                    slab.bytes = bytes;
                    return Ok((slab, order));
                }
                Err(error) => error,
            },
            gone = &mut ended => return Err(gone),
        };
        // Was it the worker, or that connection alone?
        match tokio::time::timeout(LAST_WORD, ended).await {
            Ok(gone) => Err(gone),
            Err(_) => Err(status::of(
                Code::Unavailable,
                format!("an array of the worker at {address} did not come whole: {broken}"),
            )),
        }
    }
}
