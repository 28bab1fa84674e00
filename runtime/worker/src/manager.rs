//! Connections to the resource manager.

use std::time::Duration;

use tonic::{
    Status,
    transport::{Channel, Endpoint},
};
use waystation_proto::waystation::scheduler::{
    GetLeaseRequest, resource_manager_client::ResourceManagerClient,
};

use crate::{error::chain, peers};

/// After this long without a word the resource manager is asked for one, and given as long again: right for the usual lease.
const PING: Duration = Duration::from_secs(5);

/// How it is dialled until its lease is known.
///
/// # Errors
/// That the address is none.
pub(crate) fn endpoint(address: &str) -> Result<Endpoint, String> {
    let endpoint =
        peers::endpoint(address).map_err(|error| format!("{address:?} is no address: {error}"))?;
    Ok(pinged(endpoint, PING))
}

fn pinged(endpoint: Endpoint, ping: Duration) -> Endpoint {
    endpoint
        .http2_keep_alive_interval(ping)
        .keep_alive_timeout(ping)
        .keep_alive_while_idle(true)
}

/// A connection for a stream: a connection that broke without a word is noticed within the lease, as it is by the other side.
///
/// # Errors
/// That the address is none, or nobody answers there.
pub(crate) async fn connect(address: &str) -> Result<Channel, Status> {
    let endpoint = endpoint(address).map_err(Status::invalid_argument)?;
    let unreachable = |error: tonic::transport::Error| {
        Status::unavailable(format!("no connection: {}", chain(&error)))
    };
    let channel = endpoint.connect().await.map_err(unreachable)?;
    let mut client = ResourceManagerClient::new(channel.clone());
    let lease = client.get_lease(GetLeaseRequest {}).await?.into_inner();
    match Duration::from_millis(lease.lease_ms.into()) / 2 {
        PING | Duration::ZERO => Ok(channel),
        ping => pinged(endpoint, ping).connect().await.map_err(unreachable),
    }
}
