//! The bench's null server as a process; see [`waystation_tests::null_server`].

use std::{
    io,
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixListener},
    },
    path::PathBuf,
};

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
    /// Abstract Unix socket to listen on as well.
    #[arg(long)]
    unix_socket: Option<String>,
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
    let unix_listener = options
        .unix_socket
        .as_deref()
        .map(bind_abstract)
        .transpose()?;
    null_server::serve(listener, unix_listener, options.devices)
        .await
        .map_err(io::Error::other)
}

fn bind_abstract(name: &str) -> io::Result<tokio::net::UnixListener> {
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(name)?)?;
    listener.set_nonblocking(true)?;
    tokio::net::UnixListener::from_std(listener)
}
