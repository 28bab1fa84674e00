//! Whose the lease is that a session serves, as transfers need to know it.

use bytes::Bytes;
use tokio_util::sync::CancellationToken;
use waystation_collectives::transport::Secret;
use waystation_proto::tensorflow::{StatusProto, error::Code};

use crate::status;

/// Shared by clones.
#[derive(Clone)]
pub(crate) struct Holder {
    /// What the lease's proxy and workers know, and nobody else.
    pub(crate) secret: Bytes,
    /// Cancelled when the session has ended: nobody wants what is under way for it.
    pub(crate) over: CancellationToken,
}

impl Holder {
    pub(crate) fn new(secret: Bytes) -> Holder {
        Holder {
            secret,
            over: CancellationToken::new(),
        }
    }

    /// Refuses who does not know the secret; everybody, where there is none.
    pub(crate) fn check(&self, shown: &[u8]) -> Result<(), StatusProto> {
        let secret = <[u8; 32]>::try_from(&self.secret[..]).map(Secret::new);
        if secret.is_ok_and(|secret| secret.is(shown)) {
            return Ok(());
        }
        Err(status::of(
            Code::PermissionDenied,
            "this is for the proxy and the workers of the lease only, which know its secret",
        ))
    }
}
