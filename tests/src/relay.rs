//! Connections that a test can break.

use std::{collections::BTreeMap, sync::Arc};

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::watch,
};

/// A way to `to`, under an address of its own: open while the value is true. Once it is false all connections break, and new
/// ones are accepted and hear nothing.
pub fn relay(to: String) -> (String, watch::Sender<bool>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free loopback port");
    let address = listener.local_addr().expect("bound").to_string();
    listener.set_nonblocking(true).expect("a socket");
    let (open, mut is_open) = watch::channel(true);
    tokio::spawn(async move {
        let listener = TcpListener::from_std(listener).expect("in a runtime");
        while let Ok((mut near, _)) = listener.accept().await {
            if is_open.wait_for(|open| *open).await.is_err() {
                return;
            }
            let Ok(mut far) = TcpStream::connect(&to).await else {
                continue;
            };
            let mut is_open = is_open.clone();
            tokio::spawn(async move {
                tokio::select! {
                    _ = copy_bidirectional(&mut near, &mut far) => {}
                    _ = is_open.wait_for(|open| !*open) => {}
                }
            });
        }
    });
    (address, open)
}

/// Connections that can fall silent without breaking, as when a machine or a cable is gone.
#[derive(Debug, Default)]
pub struct Silence {
    /// How often they have.
    times: watch::Sender<usize>,
    /// Connections that have not ended, by the times before they were made.
    live: watch::Sender<BTreeMap<usize, usize>>,
}

impl Silence {
    /// A way to `to`, under an address of its own.
    ///
    /// # Panics
    /// When there is no free port.
    pub fn relay(self: &Arc<Self>, to: String) -> String {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free loopback port");
        let address = listener.local_addr().expect("bound").to_string();
        listener.set_nonblocking(true).expect("a socket");
        let silence = Arc::clone(self);
        tokio::spawn(async move {
            let listener = TcpListener::from_std(listener).expect("in a runtime");
            while let Ok((near, _)) = listener.accept().await {
                if let Ok(far) = TcpStream::connect(&to).await {
                    tokio::spawn(Arc::clone(&silence).carry(near, far));
                }
            }
        });
        address
    }

    async fn carry(self: Arc<Self>, mut near: TcpStream, mut far: TcpStream) {
        let mut times = self.times.subscribe();
        let made = *times.borrow_and_update();
        self.count(made, |live| live + 1);
        tokio::select! {
            _ = copy_bidirectional(&mut near, &mut far) => {}
            _ = times.changed() => {
                // What comes is heard by nobody. That the near side ends it is seen here, and not on the far side.
                let _ = tokio::io::copy(&mut near, &mut tokio::io::sink()).await;
            }
        }
        self.count(made, |live| live - 1);
    }

    fn count(&self, made: usize, change: impl FnOnce(usize) -> usize) {
        self.live.send_modify(|live| {
            let live = live.entry(made).or_default();
            *live = change(*live);
        });
    }

    /// All connections that there are fall silent; those made later do not. Returns when the near sides have ended them.
    pub async fn fall(&self) {
        let mut before = 0;
        self.times.send_modify(|times| {
            before = *times;
            *times += 1;
        });
        let mut live = self.live.subscribe();
        let ended =
            live.wait_for(|live| live.iter().all(|(made, live)| *made > before || *live == 0));
        // The sender lives as long as this.
        let _ = ended.await;
    }
}
