//! Host memory for transfers, and secrets in it.

use waystation_pjrt::AlignedBytes;
use waystation_proto::tensorflow::StatusProto;

use crate::status;

/// `bytes` bytes of zero, aligned so that a plugin can use them in place.
pub(crate) fn zeroed(bytes: usize) -> Result<AlignedBytes, StatusProto> {
    AlignedBytes::zeroed(bytes).map_err(|error| status::of_plugin(&error, 0))
}

/// An aligned copy.
pub(crate) fn copy(bytes: &[u8]) -> Result<AlignedBytes, StatusProto> {
    let mut copy = zeroed(bytes.len())?;
    copy.copy_from_slice(bytes);
    Ok(copy)
}

/// Fills `bytes` with what nobody can guess.
pub(crate) fn randomize(bytes: &mut [u8]) -> rustix::io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        let flags = rustix::rand::GetRandomFlags::empty();
        match rustix::rand::getrandom(&mut bytes[filled..], flags) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
