//! Scratch memory for LAPACK.

use crate::scalar::Scalar;
use waystation_pjrt::Code;
use waystation_pjrt::ffi::Failure;

/// `size` zeros.
pub(crate) fn scratch<T: Copy + Default>(size: usize) -> Result<Vec<T>, Failure> {
    let mut memory = Vec::new();
    memory.try_reserve_exact(size).map_err(|_| {
        Failure::new(
            Code::ResourceExhausted,
            format!("no memory for {size} numbers of scratch space"),
        )
    })?;
    memory.resize(size, T::default());
    Ok(memory)
}

/// A workspace as large as the routine asks for: `query` calls it with a length of -1 and a place for the answer, and
/// gives its `info`. The second value is the workspace's length for the routine.
pub(crate) fn workspace<T: Scalar>(
    query: impl FnOnce(&mut [T], i32) -> i32,
) -> Result<(Vec<T>, i32), Failure> {
    let mut answer = [T::default()];
    let info = query(&mut answer, -1);
    if info != 0 {
        return Err(Failure::invalid(format!(
            "LAPACK refuses its argument number {}",
            info.unsigned_abs()
        )));
    }
    let size: f64 = answer[0].re().into();
    let size = size.ceil().max(1.0);
    // The answer is exact up to 2^24 in single precision; beyond it LAPACK rounds up.
    if size.is_nan() || size > f64::from(i32::MAX) {
        return Err(Failure::new(
            Code::ResourceExhausted,
            format!(
                "LAPACK asks for {size} numbers of scratch space, more than its 32-bit integers hold"
            ),
        ));
    }
    #[expect(clippy::cast_possible_truncation, reason = "in range, just checked")]
    let length = size as i32;
    Ok((scratch(usize::try_from(length).unwrap_or(1))?, length))
}
