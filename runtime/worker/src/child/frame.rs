//! Frames of the socket between a worker and its compile child: the length of a message in eight bytes, then the message.

use std::io::{self, Read as _};

use bytes::{BufMut as _, Bytes, BytesMut};
use prost::Message;
use tokio::io::{AsyncRead, AsyncReadExt as _};

/// The largest message. XLA's own messages end at 2 GiB, and a job or its result holds two of them at most.
const MAX_BYTES: u64 = 4 << 30;

/// A reader's memory before the bytes are there: a length alone takes no more.
const FIRST_BYTES: u64 = 1 << 20;

/// A message with its length in front.
pub(super) fn encode(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut frame = BytesMut::with_capacity(8 + length);
    frame.put_u64_le(length as u64);
    // Fails only for lack of room.
    let _ = message.encode(&mut frame);
    frame.freeze()
}

/// Reads the next message; `None` when the other side has closed between two.
pub(super) async fn read<M: Message + Default>(
    from: &mut (impl AsyncRead + Unpin),
) -> io::Result<Option<M>> {
    let length = match from.read_u64_le().await {
        Ok(length) => length,
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::with_capacity(room(length)?);
    from.take(length).read_to_end(&mut bytes).await?;
    decode(bytes, length)
}

/// As [`read`], blocking.
pub(super) fn read_blocking<M: Message + Default>(
    mut from: impl io::Read,
) -> io::Result<Option<M>> {
    let mut length = [0; 8];
    match from.read_exact(&mut length) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let length = u64::from_le_bytes(length);
    let mut bytes = Vec::with_capacity(room(length)?);
    from.take(length).read_to_end(&mut bytes)?;
    decode(bytes, length)
}

fn room(length: u64) -> io::Result<usize> {
    if length > MAX_BYTES {
        let what = format!("a message of {length} bytes, more than {MAX_BYTES}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    Ok(usize::try_from(length.min(FIRST_BYTES)).unwrap_or_default())
}

fn decode<M: Message + Default>(bytes: Vec<u8>, length: u64) -> io::Result<Option<M>> {
    if bytes.len() as u64 != length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let message = M::decode(Bytes::from(bytes));
    message
        .map(Some)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

#[cfg(test)]
mod tests {
    use waystation_proto::waystation::compile::Job;

    use super::*;

    fn job() -> Job {
        Job {
            id: 7,
            program: vec![3; 3 << 20].into(),
            ..Job::default()
        }
    }

    #[tokio::test]
    async fn messages_come_through_both_readers() {
        let frames = [encode(&job()), encode(&Job::default())].concat();
        let mut blocking = frames.as_slice();
        let mut waiting = frames.as_slice();
        for expected in [Some(job()), Some(Job::default()), None] {
            assert_eq!(read_blocking::<Job>(&mut blocking).expect("read"), expected);
            assert_eq!(read::<Job>(&mut waiting).await.expect("read"), expected);
        }
    }

    #[tokio::test]
    async fn what_is_cut_off_or_too_long_is_an_error() {
        let frame = encode(&job());
        let cut = &frame[..frame.len() - 1];
        let error = read::<Job>(&mut &cut[..]).await.expect_err("cut off");
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        let error = read_blocking::<Job>(cut).expect_err("cut off");
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        let long = u64::MAX.to_le_bytes();
        let error = read::<Job>(&mut &long[..]).await.expect_err("too long");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        let error = read_blocking::<Job>(&long[..]).expect_err("too long");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
}
