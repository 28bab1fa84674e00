//! Arrays of strings. No plugin has them, so their values stay in the proxy, in the form in which clients send and fetch
//! them: a serialized `StringArrayContents` for each shard. They count against the bound on host-buffer memory for as long
//! as an array refers to them.

use std::{fmt, sync::Arc};

use bytes::{Buf, Bytes};
use futures::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};
use prost::encoding::{DecodeContext, WireType, decode_key, skip_field};

use crate::{
    host_buffers::{Held, HostMemory, Incoming},
    status::{self, Status},
};

/// The field of `StringArrayContents` that holds the strings.
const STRINGS: u32 = 1;

/// The strings of one shard.
#[derive(Debug)]
pub(crate) struct Strings {
    bytes: Bytes,
    _held: Held,
}

impl Strings {
    /// Their `StringArrayContents`, serialized.
    pub(crate) fn bytes(&self) -> &Bytes {
        &self.bytes
    }
}

/// Strings that may still be on their way. Clones share one value.
#[derive(Clone)]
pub(crate) struct Coming(Shared<BoxFuture<'static, Result<Arc<Strings>, Status>>>);

impl Coming {
    /// The strings of a host buffer, which must be `count`.
    pub(crate) fn of_buffer(
        buffer: Arc<Incoming>,
        memory: Arc<HostMemory>,
        count: u64,
        user_context: u64,
    ) -> Self {
        let received = async move {
            receive(&buffer, &memory, count)
                .await
                .map_err(|status| status::with_user_context(status, user_context))
        };
        Self(received.boxed().shared())
    }

    /// Waits for them.
    ///
    /// # Errors
    /// What kept them from coming.
    pub(crate) async fn wait(&self) -> Result<Arc<Strings>, Status> {
        self.0.clone().await
    }
}

impl fmt::Debug for Coming {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("Coming").field(&self.0.peek()).finish()
    }
}

async fn receive(
    buffer: &Incoming,
    memory: &Arc<HostMemory>,
    count: u64,
) -> Result<Arc<Strings>, Status> {
    let size = buffer.size().await?;
    let no_room = || {
        status::resource_exhausted(format!(
            "no room for {size} bytes of strings: arrays of strings are kept in the proxy's memory, within \
             --host_buffer_memory"
        ))
    };
    let size = usize::try_from(size).map_err(|_| no_room())?;
    let held = memory.try_hold(size).ok_or_else(no_room)?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(size).map_err(|_| no_room())?;
    let mut index = 0;
    while let Some(chunk) = buffer.chunk(index).await? {
        bytes.extend_from_slice(&chunk);
        index += 1;
    }
    let found = number_of_strings(&bytes)?;
    if found != count {
        return Err(status::invalid_argument(format!(
            "a host buffer of {found} strings came for a shard of {count} elements"
        )));
    }
    Ok(Arc::new(Strings {
        bytes: bytes.into(),
        _held: held,
    }))
}

/// Counts the strings of a serialized `StringArrayContents` without taking memory for them.
fn number_of_strings(mut bytes: &[u8]) -> Result<u64, Status> {
    let bad = |e: prost::DecodeError| {
        status::invalid_argument(format!("malformed contents of an array of strings: {e}"))
    };
    let mut count = 0;
    while bytes.has_remaining() {
        let (field, wire) = decode_key(&mut bytes).map_err(bad)?;
        count += u64::from(field == STRINGS && wire == WireType::LengthDelimited);
        skip_field(wire, field, &mut bytes, DecodeContext::default()).map_err(bad)?;
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use prost::Message as _;
    use waystation_proto::xla::ifrt::proto::StringArrayContents;

    use super::*;
    use crate::{counters::Counters, host_buffers::HostBuffers};

    fn contents(strings: &[&[u8]]) -> Bytes {
        let strings = strings.iter().map(|s| s.to_vec()).collect();
        StringArrayContents { strings }.encode_to_vec().into()
    }

    #[test]
    fn strings_are_counted_as_they_are_decoded() {
        for strings in [
            &[][..],
            &[b"".as_slice()],
            &[b"a", b"", b"zwei\0drei", &[b'x'; 300]],
        ] {
            let counted = number_of_strings(&contents(strings)).expect("well-formed");
            assert_eq!(counted, strings.len() as u64);
        }
        // Another field is no string; a length beyond the end is an error.
        assert_eq!(number_of_strings(&[0x10, 7, 0x0a, 0]).expect("fine"), 1);
        assert_eq!(number_of_strings(&[0x0a, 9, 1]).expect_err("short").code, 3);
        assert_eq!(number_of_strings(&[0xff]).expect_err("no key").code, 3);
    }

    #[tokio::test]
    async fn what_comes_is_checked_against_the_shape_and_the_bound() {
        let counters = Arc::new(Counters::default());
        let memory = Arc::new(HostMemory::new(16384, counters));
        let buffers = Arc::new(HostBuffers::new(Arc::clone(&memory)));
        let coming = |handle, count| {
            let buffer = buffers.consume(handle).expect("free");
            Coming::of_buffer(buffer, Arc::clone(&memory), count, 7)
        };
        let put = async |handle, bytes: Bytes| {
            let store = buffers.store(handle, bytes.len() as u64).expect("free");
            store.push(bytes).await.expect("kept");
            store.finish().expect("complete");
        };
        let two = contents(&[b"one", b"two"]);
        put(1, two.clone()).await;
        let kept = coming(1, 2).wait().await.expect("right");
        assert_eq!(kept.bytes(), &two);

        put(2, two.clone()).await;
        let error = coming(2, 3).wait().await.expect_err("one is missing");
        assert_eq!(error.code, 3);
        assert!(
            error.payload.values().any(|v| v == b"7"),
            "the user's line is named"
        );

        // Of four units the strings above have one, the buffer has two, and its strings want as many.
        put(3, contents(&[&[b'x'; 5000]])).await;
        let error = coming(3, 1).wait().await.expect_err("too large");
        assert_eq!(error.code, 8);
        drop(kept);
        put(4, contents(&[&[b'x'; 5000]])).await;
        coming(4, 1).wait().await.expect("there is room again");
    }
}
