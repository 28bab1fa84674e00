//! Saves and restores that workers are at.

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::Arc,
};

use futures::future::{BoxFuture, join_all, try_join_all};

use crate::{
    link::{Answer, Link},
    needs::Unmet,
    status::Status,
};

/// What one plugin program has set going. Dropped before it has ended, the workers are told that nobody waits for it.
#[derive(Default)]
pub(super) struct Working {
    parts: Vec<(Waiting, Answer)>,
    /// What arrays are in need of until it has ended.
    brings: Option<Unmet>,
}

impl Working {
    /// Arrays need what it brings.
    pub(super) fn bringing(brings: Unmet) -> Self {
        Self {
            parts: Vec::new(),
            brings: Some(brings),
        }
    }

    pub(super) fn add(&mut self, link: &Arc<Link>, request: u64, answer: Answer) {
        let waiting = Waiting {
            link: Some(Arc::clone(link)),
            request,
        };
        self.parts.push((waiting, answer));
    }

    /// When all have answered, or the first failure: what the others do is of no use then.
    pub(super) fn together(self) -> BoxFuture<'static, Result<(), Status>> {
        Box::pin(async move {
            let all = try_join_all(self.parts.into_iter().map(ended)).await;
            drop(self.brings);
            all.map(|_| ())
        })
    }

    /// When all have answered: what some fail to do others may have done well.
    pub(super) fn each(self) -> BoxFuture<'static, Result<(), Status>> {
        Box::pin(async move {
            let all = join_all(self.parts.into_iter().map(ended)).await;
            drop(self.brings);
            all.into_iter().collect()
        })
    }

    /// Lets them work though nobody waits.
    pub(super) fn let_be(self) {
        for (mut waiting, _) in self.parts {
            let _ = waiting.link.take();
        }
    }

    /// The same, until they have ended.
    pub(super) async fn unasked(mut self) {
        for (waiting, _) in &mut self.parts {
            let _ = waiting.link.take();
        }
        let _ = self.each().await;
    }
}

async fn ended((mut waiting, answer): (Waiting, Answer)) -> Result<(), Status> {
    let result = answer.wait().await;
    waiting.link = None;
    result.map(|_| ())
}

/// `link`: until it has answered.
struct Waiting {
    link: Option<Arc<Link>>,
    request: u64,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if let Some(link) = &self.link {
            link.cancel(self.request);
        }
    }
}

/// A number that no other save has, on any machine.
pub(super) fn nonce() -> String {
    let random = || RandomState::new().hash_one(std::process::id());
    format!("{:016x}{:016x}", random(), random())
}
