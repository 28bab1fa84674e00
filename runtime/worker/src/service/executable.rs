//! Executables of programs over several workers, for those of them that have not compiled it.

use std::pin::Pin;

use bytes::Bytes;
use tokio_stream::Stream;
use tonic::Status;
use waystation_proto::waystation::worker::{
    ExecutableFrame, ExecutableHeader, FetchExecutableRequest,
};

use super::{FRAME_BYTES, Service};

pub(super) type Frames = Pin<Box<dyn Stream<Item = Result<ExecutableFrame, Status>> + Send>>;

impl Service {
    pub(super) async fn send_executable(
        &self,
        request: FetchExecutableRequest,
    ) -> Result<Frames, Status> {
        let FetchExecutableRequest {
            epoch,
            executable,
            secret,
        } = request;
        let artifact = self
            .core
            .with_lease(epoch, secret, move |session| session.artifact(executable))
            .await??;
        let header = self.core.compiler.header(&artifact);
        Ok(Box::pin(tokio_stream::iter(frames(header, artifact.bytes))))
    }
}

/// The frames of an executable; they share its bytes.
fn frames(
    header: ExecutableHeader,
    bytes: Bytes,
) -> impl Iterator<Item = Result<ExecutableFrame, Status>> + Send {
    let mut header = Some(header);
    let count = bytes.len().div_ceil(FRAME_BYTES).max(1);
    (0..count).map(move |frame| {
        let start = frame * FRAME_BYTES;
        let end = bytes.len().min(start + FRAME_BYTES);
        Ok(ExecutableFrame {
            header: header.take(),
            data: bytes.slice(start..end),
        })
    })
}
