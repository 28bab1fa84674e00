//! Bytes between host and devices.

pub(crate) mod from_host;
pub(crate) mod to_host;
