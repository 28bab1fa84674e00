//! What a session's arrays hold.

use bytes::Bytes;
use waystation_client::{Client, Error, Request, request};
use waystation_proto::xla::ifrt::proxy::DisassembleIntoSingleDeviceArraysRequest;

/// The bytes of each shard of an array.
///
/// # Errors
/// What the server answers, as when the array has failed.
pub async fn shards(client: &Client, array: u64, devices: usize) -> Result<Vec<Bytes>, Error> {
    let handles: Vec<u64> = (0..devices).map(|_| client.handle()).collect();
    let request = DisassembleIntoSingleDeviceArraysRequest {
        array_handle: array,
        result_handles: handles.clone(),
        ..Default::default()
    };
    client
        .call(Request::DisassembleIntoSingleDeviceArraysRequest(request))
        .await?;
    let mut bytes = Vec::new();
    for handle in handles {
        let buffer = client.handle();
        client.call(request::copy_to_host(handle, buffer)).await?;
        bytes.push(client.lookup(buffer).await?);
        client.delete(buffer).await?;
    }
    Ok(bytes)
}
