//! What comes over a connection.
//!
//! Bytes of results are read to where they belong, and others into a buffer. With them the head of the next frame is read,
//! so that a frame costs one call of the system if it is there already.

use super::frame::{HEAD, Head};
use super::{Message, Process};
use crate::call::Failure;
use crate::engine::{Engine, Landing};
use crate::scratch::Scratch;
use std::io::{self, IoSliceMut};
use tokio::net::{tcp, unix};

/// What bytes come from.
pub(super) trait Incoming: Send + Sync + 'static {
    /// Waits until there may be some.
    fn readable(&self) -> impl Future<Output = io::Result<()>> + Send;
    /// Reads those that are there.
    fn try_read_vectored(&self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize>;
}

impl Incoming for tcp::OwnedReadHalf {
    async fn readable(&self) -> io::Result<()> {
        self.readable().await
    }

    fn try_read_vectored(&self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.try_read_vectored(into)
    }
}

impl Incoming for unix::OwnedReadHalf {
    async fn readable(&self) -> io::Result<()> {
        self.readable().await
    }

    fn try_read_vectored(&self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        self.try_read_vectored(into)
    }
}

/// The stream, and what was read of the next head.
struct Source<'a, I> {
    stream: &'a I,
    head: [u8; HEAD],
    have: usize,
}

/// Hands what comes to the engine, until the connection breaks.
pub(super) async fn read(stream: &impl Incoming, from: Process, engine: &Engine) -> io::Error {
    let mut source = Source {
        stream,
        head: [0; HEAD],
        have: 0,
    };
    loop {
        if let Err(error) = source.frame(from, engine).await {
            return error;
        }
    }
}

impl<I: Incoming> Source<'_, I> {
    async fn frame(&mut self, from: Process, engine: &Engine) -> io::Result<()> {
        while self.have < HEAD {
            self.some(|_| None).await?;
        }
        self.have = 0;
        let head = Head::read(&self.head).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "it sent what is no message")
        })?;
        match head {
            Head::Ready(key) => engine.receive(from, Message::Ready(key)),
            Head::Here(launch) => engine.receive(from, Message::Here(launch)),
            Head::Fail(launch, code, length) => {
                let text = self.buffer(length, engine).await?;
                let failure = Failure::new(code, String::from_utf8_lossy(&text));
                engine.receive(from, Message::Fail(launch, failure));
            }
            Head::Data(key, offset, length) => match engine.expect(from, key, offset, length) {
                Landing::Memory(place) => {
                    let mut at = 0;
                    while at < length {
                        let mut scratch = None;
                        at += self
                            .some(|read| {
                                let lent = place.lend(at, |memory| read(memory));
                                // The launch has failed; the bytes come all the same.
                                Some(lent.unwrap_or_else(|| {
                                    read(scratch.get_or_insert_with(|| engine.scratch(length - at)))
                                }))
                            })
                            .await?;
                    }
                    place.done();
                }
                Landing::Nowhere => drop(self.buffer(length, engine).await?),
                Landing::Buffer => {
                    let chunk = self.buffer(length, engine).await?;
                    engine.take(from, key, offset, chunk);
                }
            },
        }
        Ok(())
    }

    async fn buffer(&mut self, length: usize, engine: &Engine) -> io::Result<Scratch> {
        let mut buffer = engine.scratch(length);
        let mut at = 0;
        while at < length {
            at += self.some(|read| Some(read(&mut buffer[at..]))).await?;
        }
        Ok(buffer)
    }

    /// Reads into the memory that `lend` hands to the function it is given, and beyond its end into the next head; into the head
    /// alone if it hands none. Gives how many bytes of the memory were read.
    async fn some(
        &mut self,
        mut lend: impl FnMut(
            &mut dyn FnMut(&mut [u8]) -> io::Result<usize>,
        ) -> Option<io::Result<usize>>,
    ) -> io::Result<usize> {
        loop {
            // To wait for bytes that are there takes no part of the task's turn, and of a peer that sends without a pause they
            // always are.
            tokio::task::coop::consume_budget().await;
            self.stream.readable().await?;
            let (stream, head, have) = (self.stream, &mut self.head, &mut self.have);
            let mut read = |memory: &mut [u8]| {
                let len = memory.len();
                let mut both = [IoSliceMut::new(memory), IoSliceMut::new(&mut head[*have..])];
                let count = stream.try_read_vectored(&mut both)?;
                if count == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                *have += count.saturating_sub(len);
                Ok(count.min(len))
            };
            let outcome = lend(&mut read).unwrap_or_else(|| read(&mut []));
            match outcome {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                outcome => return outcome,
            }
        }
    }
}
