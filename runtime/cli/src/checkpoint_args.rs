//! What a worker is told of checkpoints: its flags, and those of commands that start workers.

use std::ffi::OsString;

use waystation_checkpoint::{Layout, zarr::Codec};

use crate::size::parse_some_bytes;

/// How workers save and restore.
#[derive(Clone, Debug, PartialEq, Eq, clap::Args)]
pub(crate) struct CheckpointArgs {
    /// Host memory of each worker for arrays on their way between devices and checkpoints
    #[arg(long = "checkpoint_host_memory", value_name = "SIZE", default_value = "1GiB", value_parser = parse_some_bytes)]
    pub(crate) checkpoint_host_memory: u64,
    /// How workers lay arrays out in a checkpoint: zarr2 with use_ocdbt=False, as Pathways asks; ocdbt with Orbax's defaults; zarr3 and ocdbt_zarr3 with use_zarr3=True
    #[arg(
        long = "checkpoint_format",
        value_name = "zarr2|zarr3|ocdbt|ocdbt_zarr3",
        default_value = "zarr2"
    )]
    pub(crate) checkpoint_format: Layout,
    /// How workers compress arrays in a checkpoint: none, or a level of zstd from -7 to 22 [default: Orbax's, 1 for zarr v2 and 3 for v3]
    #[arg(long = "checkpoint_compression", value_name = "LEVEL|none", value_parser = parse_compression, allow_hyphen_values = true)]
    pub(crate) checkpoint_compression: Option<Codec>,
}

/// `none`, or a level of zstd.
pub(crate) fn parse_compression(text: &str) -> Result<Codec, String> {
    if text == "none" {
        return Ok(Codec::Raw);
    }
    match text.parse() {
        Ok(level @ -7..=22) => Ok(Codec::Zstd { level }),
        _ => Err(format!(
            "{text:?} is neither none nor a level from -7 to 22"
        )),
    }
}

impl CheckpointArgs {
    /// These flags for a worker's command line.
    pub(crate) fn flags(&self) -> Vec<OsString> {
        let memory = self.checkpoint_host_memory;
        let compression = self.checkpoint_compression.map(|codec| match codec {
            Codec::Raw => "--checkpoint_compression=none".into(),
            Codec::Zstd { level } => format!("--checkpoint_compression={level}").into(),
        });
        [
            format!("--checkpoint_host_memory={memory}").into(),
            format!("--checkpoint_format={}", self.checkpoint_format).into(),
        ]
        .into_iter()
        .chain(compression)
        .collect()
    }

    /// Sets what they say.
    pub(crate) fn apply(&self, limits: &mut waystation_worker::Limits) {
        limits.checkpoint_host_memory =
            usize::try_from(self.checkpoint_host_memory).unwrap_or(usize::MAX);
        limits.checkpoint_format = self.checkpoint_format;
        limits.checkpoint_codec = self.checkpoint_compression;
    }
}
