//! Accepting connections when the process has no room for one more.

use std::{io, time::Duration};

use futures::{Stream, StreamExt as _};

/// How long a server that cannot accept waits before it tries again.
const PAUSE: Duration = Duration::from_millis(100);

/// The connections of a listener. Where one cannot be accepted for want of file descriptors or memory, the next try waits
/// a little: the connection stays first in the queue of the system, and an accept loop would find it there, and fail, as
/// often as a processor can.
pub fn patient<T>(
    incoming: impl Stream<Item = io::Result<T>>,
) -> impl Stream<Item = io::Result<T>> {
    incoming.then(|connection| async {
        if let Err(error) = &connection
            && !is_about_the_connection(error)
        {
            tracing::warn!(%error, "a connection could not be accepted; trying again soon");
            tokio::time::sleep(PAUSE).await;
        }
        connection
    })
}

/// Errors of a client that was gone before it was accepted: the next one is accepted at once.
fn is_about_the_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{
        BrokenPipe, ConnectionAborted, ConnectionReset, Interrupted, TimedOut, WouldBlock,
    };
    matches!(
        error.kind(),
        BrokenPipe | ConnectionAborted | ConnectionReset | Interrupted | TimedOut | WouldBlock
    )
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    /// EMFILE: the process has too many files open.
    const EMFILE: i32 = 24;

    async fn tries(error: fn() -> io::Error) -> usize {
        let failing = futures::stream::repeat_with(|| Err::<(), _>(error()));
        let mut connections = pin!(patient(failing));
        let until = tokio::time::Instant::now() + Duration::from_secs(1);
        let mut tries = 0;
        while tries < 1000 && tokio::time::Instant::now() < until {
            assert!(connections.next().await.is_some_and(|c| c.is_err()));
            tries += 1;
        }
        tries
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_without_files_tries_now_and_then() {
        assert_eq!(tries(|| io::Error::from_raw_os_error(EMFILE)).await, 10);
        let gone = || io::Error::from(io::ErrorKind::ConnectionAborted);
        assert_eq!(tries(gone).await, 1000);
    }
}
