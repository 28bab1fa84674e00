//! Connections that a test can break.

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
