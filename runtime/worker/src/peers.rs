//! Other workers' data services.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tonic::transport::{Channel, Endpoint};
use waystation_pjrt::AlignedBytes;
use waystation_proto::{
    tensorflow::{StatusProto, error::Code},
    waystation::worker::{FetchDataRequest, worker_client::WorkerClient},
};

use crate::{host, layout::Order, status};

/// Windows of every connection between our parts: with tonic's defaults h2 ends a connection that has a few thousand small
/// messages unread, and large transfers wait for each round trip.
pub(crate) const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// See [`CONNECTION_WINDOW_BYTES`].
pub(crate) const STREAM_WINDOW_BYTES: u32 = 1 << 20;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Connections by address, kept while the worker lives.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    channels: Mutex<HashMap<String, Channel>>,
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

impl Peers {
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

    /// Fetches a transfer of exactly `bytes` bytes, and how the device there laid them out.
    pub(crate) async fn fetch(
        &self,
        address: &str,
        epoch: u64,
        transfer: u64,
        bytes: usize,
    ) -> Result<(AlignedBytes, Order), StatusProto> {
        let gone = |error: &tonic::Status| {
            status::of_grpc(error).unwrap_or_else(|| {
                status::of(
                    Code::DataLoss,
                    format!(
                        "the worker at {address} is gone with its arrays: {}",
                        error.message()
                    ),
                )
            })
        };
        let mut client =
            WorkerClient::new(self.channel(address)?).max_decoding_message_size(usize::MAX);
        let request = FetchDataRequest { epoch, transfer };
        let mut frames = client
            .fetch_data(request)
            .await
            .map_err(|error| gone(&error))?
            .into_inner();
        let mut data: Option<AlignedBytes> = None;
        let mut order = None;
        let mut filled = 0usize;
        while let Some(frame) = frames.message().await.map_err(|error| gone(&error))? {
            if let Some(header) = frame.header {
                if header.size_bytes != bytes as u64 {
                    return Err(status::invalid(format!(
                        "transfer {transfer} of the worker at {address} has {} bytes, {bytes} are needed",
                        header.size_bytes
                    )));
                }
                order = Some(header.minor_to_major).filter(|order| !order.is_empty());
            }
            let data = match &mut data {
                Some(data) => data,
                None => data.insert(host::zeroed(bytes)?),
            };
            let end = filled
                .checked_add(frame.data.len())
                .filter(|&end| end <= bytes);
            let Some(end) = end else {
                return Err(status::invalid(format!(
                    "transfer {transfer} of the worker at {address} has more than {bytes} bytes"
                )));
            };
            data[filled..end].copy_from_slice(&frame.data);
            filled = end;
        }
        match data {
            Some(data) if filled == bytes => Ok((data, order)),
            _ => Err(status::of(
                Code::DataLoss,
                format!(
                    "the worker at {address} sent {filled} of the {bytes} bytes of transfer {transfer}"
                ),
            )),
        }
    }
}
