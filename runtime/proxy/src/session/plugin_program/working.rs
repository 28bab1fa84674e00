//! Saves and restores that workers are at.

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::Arc,
};

use futures::future::{BoxFuture, join_all, try_join_all};

use crate::{
    link::{Answer, Link},
    status::Status,
};

/// What one plugin program has set going. Dropped before it has ended, the workers are told that nobody waits for it.
#[derive(Default)]
pub(super) struct Working(Vec<(Waiting, Answer)>);

impl Working {
    pub(super) fn add(&mut self, link: &Arc<Link>, request: u64, answer: Answer) {
        let waiting = Waiting {
            link: Some(Arc::clone(link)),
            request,
        };
        self.0.push((waiting, answer));
    }

    /// When all have answered, or the first failure: what the others do is of no use then.
    pub(super) fn together(self) -> BoxFuture<'static, Result<(), Status>> {
        Box::pin(async move {
            try_join_all(self.0.into_iter().map(ended))
                .await
                .map(|_| ())
        })
    }

    /// When all have answered: what some fail to do others may have done well.
    pub(super) fn each(self) -> BoxFuture<'static, Result<(), Status>> {
        Box::pin(async move {
            let all = join_all(self.0.into_iter().map(ended)).await;
            all.into_iter().collect()
        })
    }

    /// Lets them work though nobody waits.
    pub(super) fn let_be(self) {
        for (mut waiting, _) in self.0 {
            let _ = waiting.link.take();
        }
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
