//! The side that has the bytes.

use std::{io, time::Duration};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};
use waystation_collectives::transport::{Stranger, Strangers};

use super::{CHUNK_BYTES, GREETING, Offers, REQUEST_BYTES, STALL, asked, offers::Offer};

/// How long a connection may take to show its first ticket.
const HELLO: Duration = Duration::from_secs(10);
/// How long one waits for the next request: longer than the other side keeps one that it does not use.
const IDLE: Duration = Duration::from_secs(120);
/// Connections that have shown no ticket, at a time; more take the place of the oldest.
const STRANGERS: usize = 64;
/// The same from one address.
const STRANGERS_OF_ADDRESS: usize = 32;

/// A port's connections that have shown no ticket; none yet.
pub(crate) fn strangers() -> Strangers {
    Strangers::new(STRANGERS, STRANGERS_OF_ADDRESS)
}

/// Answers what is asked over a connection that begins with the greeting, until it ends or asks for what is not there.
pub(crate) async fn serve(mut stream: TcpStream, offers: &Offers, stranger: Stranger) {
    let error = match first(&mut stream, offers, stranger).await {
        Ok(first) => answer(&mut stream, offers, first).await,
        Err(error) => Err(error),
    };
    match error {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {}
        Err(error) => tracing::debug!(%error, "a connection for arrays has ended"),
        Ok(never) => match never {},
    }
}

/// What is asked for.
type Asked = (Offer, std::ops::Range<usize>);

/// Takes the first request; `stranger` until then.
async fn first(stream: &mut TcpStream, offers: &Offers, stranger: Stranger) -> io::Result<Asked> {
    let hello = async {
        let mut greeting = [0; GREETING.len()];
        stream.read_exact(&mut greeting).await?;
        if greeting != *GREETING {
            return Err(refused("it speaks another protocol"));
        }
        next(stream, offers).await
    };
    tokio::select! {
        // Who has shown a ticket by now is welcome all the same.
        biased;
        first = hello => first,
        () = tokio::time::sleep(HELLO) => Err(io::ErrorKind::TimedOut.into()),
        () = stranger.displaced() => Err(refused("it showed no ticket, and others came")),
    }
}

async fn answer(
    stream: &mut TcpStream,
    offers: &Offers,
    first: Asked,
) -> io::Result<std::convert::Infallible> {
    let (mut offer, mut range) = first;
    loop {
        let bytes = offer.bytes.slice(range);
        tokio::select! {
            biased;
            sent = send(stream, &bytes) => sent?,
            () = offer.over.cancelled() => return Err(refused("nobody wants the array any more")),
        }
        // The array is let go of before the next one is waited for.
        drop((bytes, offer));
        let next = tokio::time::timeout(IDLE, next(stream, offers)).await;
        (offer, range) = next.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
    }
}

async fn next(stream: &mut TcpStream, offers: &Offers) -> io::Result<Asked> {
    let mut request = [0; REQUEST_BYTES];
    stream.read_exact(&mut request).await?;
    let (ticket, range) = asked(&request);
    let offer = offers
        .find(&ticket)
        .ok_or_else(|| refused("no array is offered under that ticket"))?;
    let range = range
        .filter(|range| range.end <= offer.bytes.len())
        .ok_or_else(|| refused("the array ends before the range that was asked for"))?;
    Ok((offer, range))
}

async fn send(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
    for chunk in bytes.chunks(CHUNK_BYTES) {
        let sent = tokio::time::timeout(STALL, stream.write_all(chunk)).await;
        sent.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
    }
    Ok(())
}

fn refused(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionRefused, why)
}
