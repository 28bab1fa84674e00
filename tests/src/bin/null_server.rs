//! The bench's null server as a process; see [`waystation_tests::null_server`].

use std::{io, path::PathBuf};

use clap::Parser;
use tokio::net::TcpListener;
use waystation_tests::null_server;

/// A bench part: an IFRT proxy front that computes nothing. Not a server for work.
#[derive(Debug, Parser)]
struct Options {
    /// Loopback port; 0 takes a free one.
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// CPU devices to pretend.
    #[arg(long, default_value_t = 8)]
    devices: u16,
    /// File that gets "host:port" once clients can connect.
    #[arg(long)]
    ready_file: Option<PathBuf>,
}

#[tokio::main]
async fn main() -> io::Result<()> {
    let options = Options::parse();
    let listener = TcpListener::bind(("127.0.0.1", options.port)).await?;
    if let Some(file) = options.ready_file {
        let address = listener.local_addr()?.to_string();
        let unfinished = file.with_extension("tmp");
        std::fs::write(&unfinished, address + "\n")?;
        std::fs::rename(unfinished, file)?;
    }
    null_server::serve(listener, options.devices)
        .await
        .map_err(io::Error::other)
}
