//! The messages of the two calls. GrpcHostBufferStoreRequest and GrpcHostBufferLookupResponse look alike: `bytes data = 1` is
//! all they have.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use prost::encoding::{encode_varint, encoded_len_varint};
use tonic::Status;

/// Of gRPC: a byte that says whether the message is compressed, and its length in four.
const PREFIX_BYTES: u8 = 5;
/// Field 1 with protobuf's wire type LEN.
const DATA_TAG: u64 = 1 << 3 | LEN;
/// Wire types (protobuf's encoding). Two more stand for groups, which proto3 does not have.
const VARINT: u64 = 0;
const I64: u64 = 1;
const LEN: u64 = 2;
const I32: u64 = 5;

/// Writes what comes before `len` bytes of data. A message without data is empty.
pub(crate) fn put_header(to: &mut BytesMut, len: usize) {
    let data = len as u64;
    let fields = match len {
        0 => 0,
        _ => 1 + encoded_len_varint(data) + len,
    };
    to.put_u8(0);
    // No frame comes near 4 GiB.
    to.put_u32(u32::try_from(fields).unwrap_or(u32::MAX));
    if len > 0 {
        encode_varint(DATA_TAG, to);
        encode_varint(data, to);
    }
}

/// What the next byte of the stream belongs to.
#[derive(Debug, Clone, Copy)]
enum At {
    Prefix { seen: u8 },
    Tag,
    Length { is_data: bool },
    Data { left: u64 },
    Skipped { left: u64 },
    SkippedVarint,
}

/// Finds the data in a stream of messages that comes in pieces cut anywhere. Keeps nothing of it.
#[derive(Debug)]
pub(super) struct Messages {
    at: At,
    /// Of the message, or what is known of it so far in its prefix.
    message_left: u64,
    /// What is known of a varint so far, and how many bits that is.
    varint: (u64, u32),
}

impl Default for Messages {
    fn default() -> Self {
        Self {
            at: At::Prefix { seen: 0 },
            message_left: 0,
            varint: (0, 0),
        }
    }
}

impl Messages {
    /// Takes the next run of data from `bytes`, which are the stream's next ones; `None` when there is none in what is left
    /// of them.
    ///
    /// # Errors
    /// INVALID_ARGUMENT for what is no message, UNIMPLEMENTED for a compressed one.
    pub(super) fn next(&mut self, bytes: &mut Bytes) -> Result<Option<Bytes>, Status> {
        while bytes.has_remaining() {
            match self.at {
                At::Prefix { seen } => self.prefix(seen, bytes.get_u8())?,
                At::Data { left } => {
                    let data = bytes.split_to(at_most(bytes.len(), left));
                    let left = left - data.len() as u64;
                    self.inside(data.len() as u64, At::Data { left }, left == 0)?;
                    return Ok(Some(data));
                }
                At::Skipped { left } => {
                    let here = at_most(bytes.len(), left);
                    bytes.advance(here);
                    let left = left - here as u64;
                    self.inside(here as u64, At::Skipped { left }, left == 0)?;
                }
                At::Tag | At::Length { .. } | At::SkippedVarint => {
                    if let Some(value) = self.varint(bytes.get_u8())? {
                        self.after(value)?;
                    }
                }
            }
        }
        Ok(None)
    }

    /// The end of the stream.
    ///
    /// # Errors
    /// INVALID_ARGUMENT within a message.
    pub(super) fn end(&self) -> Result<(), Status> {
        match self.at {
            At::Prefix { seen: 0 } => Ok(()),
            _ => Err(malformed("the stream ends within it")),
        }
    }

    fn prefix(&mut self, seen: u8, byte: u8) -> Result<(), Status> {
        match (seen, byte) {
            (0, 0) => {}
            (0, 1) => return Err(compressed()),
            (0, _) => return Err(malformed("it begins with no flag of gRPC's")),
            _ => self.message_left = self.message_left << 8 | u64::from(byte),
        }
        self.at = match seen + 1 {
            PREFIX_BYTES => self.next_field(),
            seen => At::Prefix { seen },
        };
        Ok(())
    }

    /// Where a field or the next message begins.
    fn next_field(&self) -> At {
        match self.message_left {
            0 => At::Prefix { seen: 0 },
            _ => At::Tag,
        }
    }

    /// So many bytes of the message have been taken, which ends a field or not.
    fn inside(&mut self, taken: u64, otherwise: At, ends: bool) -> Result<(), Status> {
        self.message_left = self
            .message_left
            .checked_sub(taken)
            .ok_or_else(|| malformed("a field goes beyond it"))?;
        self.at = match ends {
            true => self.next_field(),
            false => otherwise,
        };
        Ok(())
    }

    fn varint(&mut self, byte: u8) -> Result<Option<u64>, Status> {
        let (value, bits) = self.varint;
        if bits == 70 {
            return Err(malformed("a number has more than ten bytes"));
        }
        let value = value | (u64::from(byte & 0x7f) << bits);
        let ends = byte & 0x80 == 0;
        self.inside(1, self.at, false)?;
        self.varint = if ends { (0, 0) } else { (value, bits + 7) };
        Ok(ends.then_some(value))
    }

    /// What comes behind a number.
    fn after(&mut self, value: u64) -> Result<(), Status> {
        let field = |left| match left {
            0 => self.next_field(),
            left => At::Skipped { left },
        };
        let at = match self.at {
            At::Tag => match value & 7 {
                LEN => At::Length {
                    is_data: value == DATA_TAG,
                },
                // Fields that a later jaxlib may have.
                VARINT if value >> 3 != 0 => At::SkippedVarint,
                I64 if value >> 3 != 0 => field(8),
                I32 if value >> 3 != 0 => field(4),
                _ => return Err(malformed("a field has no type of protobuf's")),
            },
            At::Length { is_data } if value <= self.message_left => match is_data {
                true if value > 0 => At::Data { left: value },
                _ => field(value),
            },
            At::Length { .. } => return Err(malformed("a field goes beyond it")),
            _ => self.next_field(),
        };
        // Half a field is left only where its message is not at its end.
        if self.message_left == 0 && !matches!(at, At::Prefix { .. }) {
            return Err(malformed("it ends within a field"));
        }
        self.at = at;
        Ok(())
    }
}

fn at_most(len: usize, left: u64) -> usize {
    usize::try_from(left).map_or(len, |left| left.min(len))
}

fn malformed(why: &str) -> Status {
    Status::invalid_argument(format!("malformed message of a host buffer's bytes: {why}"))
}

pub(super) fn compressed() -> Status {
    Status::unimplemented("compressed messages")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message as _;
    use tonic::Code;
    use waystation_proto::xla::ifrt::proxy::GrpcHostBufferStoreRequest;

    use super::*;

    /// Reads a stream cut into pieces of such sizes, over and over.
    fn read(stream: &[u8], cuts: &[usize]) -> Result<Vec<u8>, Status> {
        let mut messages = Messages::default();
        let (mut found, mut left) = (Vec::new(), stream);
        for cut in cuts.iter().cycle() {
            if left.is_empty() {
                break;
            }
            let (piece, rest) = left.split_at((*cut).min(left.len()));
            let mut piece = Bytes::copy_from_slice(piece);
            while let Some(data) = messages.next(&mut piece)? {
                found.extend_from_slice(&data);
            }
            left = rest;
        }
        messages.end()?;
        Ok(found)
    }

    fn framed(message: &[u8]) -> Vec<u8> {
        let mut stream = vec![0];
        stream.extend_from_slice(&u32::try_from(message.len()).expect("small").to_be_bytes());
        stream.extend_from_slice(message);
        stream
    }

    fn refused(message: &[u8]) -> Code {
        read(&framed(message), &[1]).expect_err("malformed").code()
    }

    proptest! {
        #[test]
        fn data_is_what_prost_wrote_however_it_is_cut(
            sent in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..300), 0..5),
            cuts in proptest::collection::vec(1..200_usize, 1..5),
        ) {
            let mut stream = Vec::new();
            for data in &sent {
                let message = GrpcHostBufferStoreRequest { data: data.clone().into() };
                stream.extend(framed(&message.encode_to_vec()));
            }
            prop_assert_eq!(read(&stream, &cuts).expect("messages"), sent.concat());
        }

        #[test]
        fn a_header_is_what_prost_writes(len in prop_oneof![0..300_usize, 16_000..17_000_usize]) {
            let message = GrpcHostBufferStoreRequest { data: vec![7; len].into() };
            let mut ours = BytesMut::new();
            put_header(&mut ours, len);
            ours.put_bytes(7, len);
            prop_assert_eq!(ours.to_vec(), framed(&message.encode_to_vec()));
        }

        /// Never a panic; and what is read is no more than what came.
        #[test]
        fn any_bytes_are_read_or_refused(stream in proptest::collection::vec(0..20_u8, 0..60), cut in 1..9_usize) {
            if let Ok(found) = read(&stream, &[cut]) {
                prop_assert!(found.len() <= stream.len());
            }
        }
    }

    #[test]
    fn fields_of_a_later_jaxlib_are_passed_over() {
        let message = [
            [0x10, 0xff, 0x01].as_slice(),   // 2: a varint
            &[0x0a, 2, b'a', b'b'],          // 1: the data
            &[0x19, 1, 2, 3, 4, 5, 6, 7, 8], // 3: eight bytes
            &[0x22, 3, b'x', b'y', b'z'],    // 4: bytes
            &[0x2a, 0],                      // 5: none
            &[0x35, 1, 2, 3, 4],             // 6: four bytes
        ]
        .concat();
        for cut in 1..10 {
            let found = read(&framed(&message), &[cut]).expect("a message");
            assert_eq!(found, b"ab");
        }
    }

    #[test]
    fn what_is_no_message_is_refused() {
        assert_eq!(refused(&[0x0a]), Code::InvalidArgument); // no length
        assert_eq!(refused(&[0x0a, 2, b'a']), Code::InvalidArgument); // too short
        assert_eq!(refused(&[0x0a, 0x80]), Code::InvalidArgument); // half a length
        assert_eq!(refused(&[0x19, 1, 2]), Code::InvalidArgument); // half a number
        assert_eq!(refused(&[0x10]), Code::InvalidArgument); // no number
        assert_eq!(refused(&[0x0b]), Code::InvalidArgument); // a group
        assert_eq!(refused(&[0x00, 1]), Code::InvalidArgument); // field 0
        assert_eq!(refused(&[0xff; 11]), Code::InvalidArgument); // an endless number
        let half = &framed(&[0x0a, 2, b'a', b'b'])[..8];
        assert_eq!(
            read(half, &[3]).expect_err("cut").code(),
            Code::InvalidArgument
        );
        assert_eq!(
            read(&[2, 0, 0, 0, 0], &[5]).expect_err("no flag").code(),
            Code::InvalidArgument
        );
        assert_eq!(
            read(&[1, 0, 0, 0, 0], &[5]).expect_err("compressed").code(),
            Code::Unimplemented
        );
    }
}
