//! The operator's compiler flags: the plugin alone knows which there are, so it is asked before a client is served.

use std::sync::Arc;

use waystation_proto::{
    tensorflow::error::Code,
    waystation::worker::{CheckFlags, op},
};

use crate::{
    link::{Ids, Link},
    status::Status,
};

/// Flags to be asked about.
#[derive(Debug)]
pub(crate) struct Flags(Vec<String>);

/// What the plugin says.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// It knows them all.
    Taken,
    /// Why it does not take one.
    Refused(String),
}

impl Flags {
    pub(crate) fn new(flags: Vec<String>) -> Flags {
        Flags(flags)
    }

    /// Asks the plugin of one worker.
    ///
    /// # Errors
    /// When it cannot be asked now.
    pub(crate) async fn check(
        &self,
        link: Option<&Arc<Link>>,
        ids: &Ids,
    ) -> Result<Verdict, Status> {
        let (Some(link), false) = (link, self.0.is_empty()) else {
            return Ok(Verdict::Taken);
        };
        let request = ids.next();
        let op = op::Op::CheckFlags(CheckFlags {
            request,
            xla_flags: self.0.clone(),
        });
        match link.call(request, op).await.wait().await {
            Ok(_) => Ok(Verdict::Taken),
            Err(status) if status.code == Code::InvalidArgument as i32 => {
                Ok(Verdict::Refused(status.message))
            }
            Err(status) => Err(status),
        }
    }
}
