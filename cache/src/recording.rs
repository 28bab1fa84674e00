//! Compile requests as clients sent them, kept in a bucket, so that `cache warm` can have the programs compiled without
//! the clients.
//!
//! An object of `programs/v1/`; integers are little-endian:
//!
//! ```text
//! offset  bytes  what
//! 0       8      magic "WAYSTREC"
//! 8       4      format number, 1
//! 12      32     SHA-256 of all that follows
//! 44             the proto `waystation.recording.Recording`, zstd
//! ```
//!
//! Its name is a digest of what it holds, of the program by its structure: from another directory or with other line
//! numbers it is the same, and stored once. Nothing in a recording is believed before it has been checked, and what it
//! holds goes through the same hands as a client's request.

mod recorder;

use std::io::Read as _;

use bytes::Bytes;
use futures::{Stream, StreamExt as _};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStoreExt as _};
use prost::Message as _;
use sha2::{Digest as _, Sha256};
use waystation_lifecycle::bucket::Bucket;
use waystation_lifecycle::bucket::layout::{self, Digest};
use waystation_proto::waystation::recording::Recording;
use waystation_stablehlo::Refusal;

pub use recorder::{NotRecorded, Recorded, Recorder};

/// First bytes of every recording.
pub const MAGIC: [u8; 8] = *b"WAYSTREC";

/// The format number that this build writes, and the only one it reads.
pub const FORMAT: u32 = 1;

const HEADER_BYTES: usize = 44;

/// Larger recordings are neither written nor read; protos end at 2 GiB.
const MAX_BYTES: u64 = 2 << 30;

/// Fast, and programs are mostly names.
const LEVEL: i32 = 3;

/// Why an object is no recording.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Bad {
    /// Other first bytes.
    #[error("it is no recording: its first bytes are others")]
    Foreign,
    /// Another format.
    #[error("it has format {found}, this build reads {FORMAT}")]
    UnknownFormat {
        /// The number found.
        found: u32,
    },
    /// Cut, or a bit is not as it was written.
    #[error("it does not match its checksum")]
    Checksum,
    /// Larger than any recording.
    #[error("it is larger than the limit of {MAX_BYTES} bytes")]
    TooLarge,
    /// It does not decode.
    #[error("it does not decode: {0}")]
    Content(String),
}

/// A recording's name. `None` for a program that calls into the process that made it, which nobody else can compile.
/// Reads the whole program.
pub fn name(recording: &Recording) -> Option<Digest> {
    let mut hash = Sha256::new();
    let mut part = |bytes: &[u8]| {
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(bytes);
    };
    part(b"waystation recording 1");
    match waystation_stablehlo::digest(&recording.program) {
        Ok(digest) => {
            part(b"structural");
            part(&digest);
        }
        Err(Refusal::Uncacheable { .. }) => return None,
        Err(_) => {
            part(b"raw");
            part(&recording.program);
        }
    }
    let rest = Recording {
        program: Bytes::new(),
        ..recording.clone()
    };
    part(&rest.encode_to_vec());
    Some(hash.finalize().into())
}

/// A recording as it is stored. Takes time in proportion to it.
///
/// # Errors
/// [`Bad::TooLarge`], and what the compressor says.
pub fn seal(recording: &Recording) -> Result<Bytes, Bad> {
    if recording.encoded_len() as u64 > MAX_BYTES {
        return Err(Bad::TooLarge);
    }
    let packed = zstd::encode_all(recording.encode_to_vec().as_slice(), LEVEL)
        .map_err(|error| Bad::Content(error.to_string()))?;
    let mut object = Vec::with_capacity(HEADER_BYTES + packed.len());
    object.extend_from_slice(&MAGIC);
    object.extend_from_slice(&FORMAT.to_le_bytes());
    object.extend_from_slice(&Sha256::digest(&packed));
    object.extend_from_slice(&packed);
    Ok(object.into())
}

/// Reads a recording. Takes time in proportion to it.
///
/// # Errors
/// [`Bad`] for whatever is not one, to the last bit.
pub fn open(object: &[u8]) -> Result<Recording, Bad> {
    let seen = object.len().min(MAGIC.len());
    if object[..seen] != MAGIC[..seen] {
        return Err(Bad::Foreign);
    }
    let Some((header, packed)) = object.split_at_checked(HEADER_BYTES) else {
        return Err(Bad::Checksum);
    };
    let mut found = [0; 4];
    found.copy_from_slice(&header[8..12]);
    let found = u32::from_le_bytes(found);
    if found != FORMAT {
        return Err(Bad::UnknownFormat { found });
    }
    if Sha256::digest(packed).as_slice() != &header[12..] {
        return Err(Bad::Checksum);
    }
    let content = |error: String| Bad::Content(error);
    let unpacked = zstd::Decoder::new(packed).map_err(|error| content(error.to_string()))?;
    let mut bytes = Vec::new();
    unpacked
        .take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| content(error.to_string()))?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(Bad::TooLarge);
    }
    Recording::decode(Bytes::from(bytes)).map_err(|error| content(error.to_string()))
}

/// The recordings of a bucket, by object; `None` for what bears no recording's name.
pub fn list(
    bucket: &Bucket,
) -> impl Stream<Item = object_store::Result<Option<ObjectMeta>>> + use<> {
    let prefix = Path::from(layout::PROGRAMS.path);
    let found = bucket.store().list(Some(&prefix));
    found.map(|object| object.map(|object| is_recording(&object.location).then_some(object)))
}

fn is_recording(path: &Path) -> bool {
    let mut digest = [0; 32];
    let name = path.filename().unwrap_or_default();
    hex::decode_to_slice(name, &mut digest).is_ok() && layout::program(&digest) == *path
}

/// The recording in an object. The outer error is the store's.
///
/// # Errors
/// See [`Bad`] and the store's.
pub async fn read(
    bucket: &Bucket,
    object: &ObjectMeta,
) -> object_store::Result<Result<Recording, Bad>> {
    if object.size > MAX_BYTES {
        return Ok(Err(Bad::TooLarge));
    }
    let found = bucket.store().get(&object.location).await?;
    if found.meta.size > MAX_BYTES {
        return Ok(Err(Bad::TooLarge));
    }
    let bytes = found.bytes().await?;
    let opened = tokio::task::spawn_blocking(move || open(&bytes)).await;
    Ok(opened.unwrap_or_else(|error| Err(Bad::Content(error.to_string()))))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use object_store::PutPayload;
    use waystation_lifecycle::bucket::Location;

    use super::*;

    macro_rules! golden {
        ($name:literal) => {
            Bytes::from_static(include_bytes!(concat!(
                "../stablehlo/tests/golden/",
                $name,
                ".mlirbc"
            )))
        };
    }

    fn recording(program: Bytes) -> Recording {
        Recording {
            program,
            compile_options: Bytes::from_static(b"options"),
            device_ids: vec![8, 9],
            device_ordinals: vec![0, 1],
            workers: Vec::new(),
            xla_flags: vec!["--xla_a=1".to_owned()],
        }
    }

    #[test]
    fn the_name_is_what_the_request_means() {
        let here = name(&recording(golden!("step"))).unwrap();
        let elsewhere = name(&recording(golden!("step_elsewhere"))).unwrap();
        assert_eq!(here, elsewhere, "locations do not count");
        let constant = name(&recording(golden!("step_constant"))).unwrap();
        assert_ne!(here, constant);
        let flags = Recording {
            xla_flags: Vec::new(),
            ..recording(golden!("step"))
        };
        assert_ne!(here, name(&flags).unwrap());
        assert_ne!(
            name(&recording(Bytes::from_static(b"a"))),
            name(&recording(Bytes::from_static(b"b")))
        );
    }

    #[test]
    fn nothing_but_a_whole_recording_is_read() {
        let original = recording(golden!("step"));
        let sealed = seal(&original).unwrap();
        assert_eq!(open(&sealed).unwrap(), original);
        for length in 0..sealed.len().min(200) {
            open(&sealed[..length]).expect_err("cut");
        }
        for at in 0..sealed.len() {
            let mut flipped = sealed.to_vec();
            flipped[at] ^= 4;
            open(&flipped).expect_err("flipped");
        }
        assert!(matches!(open(b"module {}"), Err(Bad::Foreign)));
    }

    #[tokio::test]
    async fn a_request_is_stored_once_and_listed_among_foreign_things() {
        let bucket = Bucket::open(&Location::Memory).unwrap();
        let recorder = Recorder::start(bucket.clone());
        recorder.record(recording(golden!("step")));
        recorder.record(recording(golden!("step_elsewhere")));
        recorder.record(recording(golden!("step_constant")));
        recorder.finish(Duration::from_secs(30)).await;
        recorder.record(recording(golden!("step_layout")));
        let counts = recorder.counts();
        assert_eq!(
            (counts.stored, counts.present, counts.dropped, counts.failed),
            (2, 1, 1, 0)
        );
        let foreign = Path::from("programs/v1/aa/bb/README");
        let put = bucket.store().put(&foreign, PutPayload::new());
        put.await.unwrap();

        let mut read_back = Vec::new();
        let mut others = 0;
        let mut found = std::pin::pin!(list(&bucket));
        while let Some(object) = found.next().await {
            match object.unwrap() {
                Some(object) => read_back.push(read(&bucket, &object).await.unwrap().unwrap()),
                None => others += 1,
            }
        }
        assert_eq!(others, 1);
        assert_eq!(read_back.len(), 2);
        // Another process finds them there.
        let again = Recorder::start(bucket);
        again.record(recording(golden!("step")));
        again.finish(Duration::from_secs(30)).await;
        assert_eq!((again.counts().stored, again.counts().present), (0, 1));
    }
}
