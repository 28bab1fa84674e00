//! Large arrays from worker to worker: their bytes come over plain TCP connections, to the same port as all calls.
//!
//! Who fetches a transfer calls `FetchData` as ever. The answer to a large one has no bytes but a *ticket*: random, good for this
//! transfer alone, and void when the call ends. With it the caller asks for ranges of the transfer over a few connections at a time,
//! which it keeps for the next transfers. So a call that breaks ends what is sent for it, and a worker that is gone is found out
//! by the call's own signs of life.
//!
//! A connection begins with [`GREETING`], by whose first byte the port's listener tells it from gRPC's (`crate::incoming`). Then come
//! requests, each a ticket, an offset and a length, the numbers in eight bytes, the lowest first; each is answered with the bytes
//! and nothing else. To anything wrong the answer is the end of the connection. Bytes are written from where they lie and read to
//! where they belong.

mod fetch;
mod offers;
mod serve;
#[cfg(test)]
mod tests;

use std::{ops::Range, time::Duration};

pub(crate) use self::{
    fetch::Connections,
    offers::Offers,
    serve::{serve, strangers},
};

/// What a connection begins with. Another protocol gets another number at its end.
pub(crate) const GREETING: &[u8; 8] = b"WSTNDAT1";

/// A secret between the two workers of one transfer.
pub(crate) type Ticket = [u8; 32];

/// Bytes that are written and read at a time, between which others have their turn.
const CHUNK_BYTES: usize = 1 << 20;

/// How long a connection may stand still while bytes are to come over it.
const STALL: Duration = Duration::from_secs(60);

const REQUEST_BYTES: usize = 32 + 8 + 8;

/// Asks for a range of a transfer.
fn request(ticket: &Ticket, range: &Range<usize>) -> [u8; REQUEST_BYTES] {
    let mut out = [0; REQUEST_BYTES];
    out[..32].copy_from_slice(ticket);
    out[32..40].copy_from_slice(&(range.start as u64).to_le_bytes());
    out[40..].copy_from_slice(&(range.len() as u64).to_le_bytes());
    out
}

/// The ticket and the range of a request; no range where no memory could have it.
fn asked(request: &[u8; REQUEST_BYTES]) -> (Ticket, Option<Range<usize>>) {
    let mut ticket = [0; 32];
    ticket.copy_from_slice(&request[..32]);
    let number = |at: usize| {
        let mut eight = [0; 8];
        eight.copy_from_slice(&request[at..at + 8]);
        usize::try_from(u64::from_le_bytes(eight)).ok()
    };
    let range = || {
        let start = number(32)?;
        Some(start..start.checked_add(number(40)?)?)
    };
    (ticket, range())
}
