//! Requests that are bytes already; replies as usual.

use bytes::{BufMut as _, Bytes};
use prost::Message as _;
use tonic::{
    Status,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
};
use waystation_proto::xla::ifrt::proxy::IfrtResponse;

/// See the module.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Encoded;

impl Codec for Encoded {
    type Encode = Bytes;
    type Decode = IfrtResponse;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for Encoded {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(item);
        Ok(())
    }
}

impl Decoder for Encoded {
    type Item = IfrtResponse;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<IfrtResponse>, Status> {
        IfrtResponse::decode(buffer)
            .map(Some)
            .map_err(|e| Status::internal(format!("malformed reply: {e}")))
    }
}
