//! Streams that end with their session.

use std::{
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
};

use futures::{Stream, stream::BoxStream, task::AtomicWaker};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::lock::lock;

struct Shared<T> {
    /// Taken out when the session ends.
    inner: Mutex<Option<BoxStream<'static, T>>>,
    reader: AtomicWaker,
}

impl<T> Shared<T> {
    fn with<R>(&self, look: impl FnOnce(&mut Option<BoxStream<'static, T>>) -> R) -> R {
        // Nothing that holds this lock can panic half-way through a change.
        look(&mut lock(&self.inner))
    }
}

/// See [`until`].
struct Until<T> {
    shared: Arc<Shared<T>>,
    last: Option<T>,
    _done: DropGuard,
}

/// The items of `inner` until `end` is cancelled, and then `last`. What `inner` holds is let go at that moment, also where
/// flow control keeps the client, and with it everybody, from asking for the next item.
pub(crate) fn until<T: Send + Unpin + 'static>(
    inner: BoxStream<'static, T>,
    end: CancellationToken,
    last: T,
) -> BoxStream<'static, T> {
    let shared = Arc::new(Shared {
        inner: Mutex::new(Some(inner)),
        reader: AtomicWaker::new(),
    });
    let done = CancellationToken::new();
    let until = Until {
        shared: Arc::clone(&shared),
        last: Some(last),
        _done: done.clone().drop_guard(),
    };
    tokio::spawn(async move {
        tokio::select! {
            () = done.cancelled() => {}
            () = end.cancelled() => {
                // Dropped outside the lock.
                let inner = shared.with(Option::take);
                drop(inner);
                shared.reader.wake();
            }
        }
    });
    Box::pin(until)
}

impl<T: Unpin> Stream for Until<T> {
    type Item = T;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        self.shared.reader.register(context.waker());
        let polled = self.shared.with(|inner| {
            inner
                .as_mut()
                .map(|inner| inner.as_mut().poll_next(context))
        });
        polled.unwrap_or_else(|| Poll::Ready(self.last.take()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use futures::StreamExt as _;
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn what_the_stream_holds_is_let_go_without_anybody_reading() {
        let end = CancellationToken::new();
        let (held, gone) = oneshot::channel::<()>();
        let inner = futures::stream::iter([1, 2]).chain(futures::stream::once(async move {
            let _held = held;
            std::future::pending().await
        }));
        let mut stream = until(inner.boxed(), end.clone(), 9);
        assert_eq!(stream.next().await, Some(1));
        end.cancel();
        assert!(gone.await.is_err(), "the sender was dropped");
        assert_eq!(stream.next().await, Some(9));
        assert_eq!(stream.next().await, None);
    }

    #[tokio::test]
    async fn a_reader_that_waits_is_told() {
        let end = CancellationToken::new();
        let mut stream = until(futures::stream::pending().boxed(), end.clone(), 9);
        let reader = tokio::spawn(async move { stream.next().await });
        tokio::task::yield_now().await;
        end.cancel();
        assert_eq!(reader.await.expect("no panic"), Some(9));
    }

    #[tokio::test]
    async fn without_an_end_all_comes_and_no_more() {
        let token = Arc::new(CancellationToken::new());
        let stream = until(
            futures::stream::iter([1, 2, 3]).boxed(),
            (*token).clone(),
            9,
        );
        assert_eq!(stream.collect::<Vec<_>>().await, vec![1, 2, 3]);
    }
}
