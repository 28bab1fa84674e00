//! Handles that clients mint for results that they will use before they have a reply.

use std::sync::Arc;

use waystation_proto::xla::ifrt::proxy::ifrt_request::Request;

use super::{FIRST_SERVER_HANDLE, Future, Session, UserContext, lock};
use crate::{
    array::Failure,
    status::{self, Status},
};

impl Session {
    /// Refuses handles that stand for something already, before a failure could be bound in its place.
    pub(super) fn check_free(&self, minted: &Minted) -> Result<(), Status> {
        let taken =
            |&handle: &u64| handle >= FIRST_SERVER_HANDLE || self.values.contains_key(&handle);
        if let Some(handle) = minted.arrays.iter().copied().find(taken) {
            return Err(status::invalid_argument(format!(
                "array handle {handle} is in use"
            )));
        }
        if let Some(handle) = minted.status
            && (handle >= FIRST_SERVER_HANDLE || lock(&self.tables.futures).contains_key(&handle))
        {
            return Err(status::invalid_argument(format!(
                "status handle {handle} is in use"
            )));
        }
        Ok(())
    }

    /// Later requests use result handles without waiting for this reply, so they must find the failure there.
    pub(super) fn bind_failure(&mut self, minted: Minted, status: &Status, context: &UserContext) {
        if minted.arrays.is_empty() && minted.status.is_none() {
            return;
        }
        let failure = Failure {
            status: Arc::new(status.clone()),
            context: context.clone(),
        };
        for handle in minted.arrays {
            self.values.insert(handle, Err(failure.clone()));
        }
        if let Some(handle) = minted.status {
            lock(&self.tables.futures).insert(handle, Future::Ready(Err(failure)));
        }
    }
}

/// The handles that the client minted for a request's results.
#[derive(Default)]
pub(super) struct Minted {
    arrays: Vec<u64>,
    status: Option<u64>,
}

impl Minted {
    pub(super) fn of(request: &Request) -> Self {
        let mut arrays = match request {
            Request::MakeArrayFromHostBufferRequest(r) => r.array_handle.into_iter().collect(),
            Request::MakeArraysFromHostBufferShardsRequest(r) => r.array_handles.clone(),
            Request::MakeErrorArraysRequest(r) => r.array_handles.clone(),
            Request::AssembleArrayFromSingleDeviceArraysRequest(r) => vec![r.result_handle],
            Request::DisassembleIntoSingleDeviceArraysRequest(r) => r.result_handles.clone(),
            Request::FullyReplicatedShardRequest(r) => vec![r.result_handle],
            Request::RemapArraysRequest(r) => r.result_handles.clone(),
            Request::BitcastArraysRequest(r) => r.result_handles.clone(),
            Request::ReshardArraysRequest(r) => r.result_handles.clone(),
            Request::CopyArraysRequest(r) => r.result_handles.clone(),
            Request::LoadedExecutableExecuteRequest(r) => r.result_array_handle.clone(),
            _ => Vec::new(),
        };
        // None: the server mints one.
        arrays.retain(|&handle| handle != 0);
        let status = match request {
            Request::LoadedExecutableExecuteRequest(r)
                if r.result_status_handle != 0
                    && r.execute_options.as_ref().is_some_and(|o| o.fill_status) =>
            {
                Some(r.result_status_handle)
            }
            _ => None,
        };
        Self { arrays, status }
    }
}
