//! Puts of a proxy on this machine, which writes their bytes into a segment.

use std::sync::Arc;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};
use waystation_proto::waystation::worker::{LocalPut, LocalPutReply, local_put::Step};

use super::{Service, header_of};
use crate::{core::Core, segments::Block, session::Broken};

/// The replies of one put.
pub(super) type Replies = ReceiverStream<Result<LocalPutReply, Status>>;

impl Service {
    /// Takes a transfer by a segment, or says that there is none to be had.
    pub(super) async fn take_locally(
        &self,
        mut steps: Streaming<LocalPut>,
    ) -> Result<Replies, Status> {
        let Some(Step::Header(header)) = steps.message().await?.and_then(|put| put.step) else {
            return Err(Status::invalid_argument(
                "the first message of a local put must carry its header",
            ));
        };
        let header = header_of(Some(header))?;
        let (sender, replies) = mpsc::channel(2);
        // No page of it is touched before the transfer is announced.
        let block = usize::try_from(header.size_bytes)
            .ok()
            .and_then(|size| self.core.segments.take(size));
        let Some(block) = block else {
            let _ = sender.try_send(Ok(LocalPutReply { segment: None }));
            return Ok(ReceiverStream::new(replies));
        };
        self.put_begins(&header).await?;
        let _ = sender.try_send(Ok(LocalPutReply {
            segment: block.lend(),
        }));
        // Not as part of the replies: they are dropped when the proxy is gone, and the end must be told all the same.
        let core = Arc::clone(&self.core);
        tokio::spawn(async move {
            if let Err(status) = finish(&core, header.epoch, header.transfer, steps, block).await {
                let _ = sender.send(Err(status)).await;
            }
        });
        Ok(ReceiverStream::new(replies))
    }
}

/// Waits until the bytes are there or will not come, and says so to the session.
async fn finish(
    core: &Core,
    epoch: u64,
    transfer: u64,
    mut steps: Streaming<LocalPut>,
    block: Block,
) -> Result<(), Status> {
    let last = steps
        .message()
        .await
        .ok()
        .flatten()
        .and_then(|put| put.step);
    let data = match last {
        Some(Step::Written(true)) => {
            block.is_back();
            Ok(block)
        }
        Some(Step::GivenUp(true)) => {
            block.is_back();
            Err(Broken::Off)
        }
        _ => Err(Broken::Off),
    };
    core.with_session(epoch, move |session| {
        session.put_ends(transfer, data);
        Ok(())
    })
    .await?
}
