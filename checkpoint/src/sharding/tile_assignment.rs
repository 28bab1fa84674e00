//! Which tile lies at which position of the device list: the tile assignment of an `OpSharding`, in either spelling.
//!
//! An assignment is an array of device positions with the dimensions `tile_assignment_dimensions`. It is written out in
//! `tile_assignment_devices`, or generated: the numbers 0.. in the shape `iota_reshape_dims`, transposed by
//! `iota_transpose_perm`, and read in row-major order. The entries are positions in the device list, not device ids.

use waystation_proto::xla::OpSharding;

use super::MAX_RANK;
use crate::{Error, Result};

/// The entries of the assignment in row-major order, checked to be a permutation of `0..num_devices`.
pub(super) fn positions(proto: &OpSharding, num_devices: usize) -> Result<Vec<usize>> {
    let product = checked_product(
        &proto.tile_assignment_dimensions,
        "tile_assignment_dimensions",
    )?;
    if product != num_devices {
        return malformed(format!("{product} tiles for {num_devices} devices"));
    }
    let entries = if proto.iota_reshape_dims.is_empty() {
        explicit(proto, num_devices)?
    } else {
        iota(proto, num_devices)?
    };

    let mut seen = vec![false; num_devices];
    for &entry in &entries {
        match seen.get_mut(entry) {
            Some(seen) if !*seen => *seen = true,
            Some(_) => return malformed(format!("device position {entry} is named twice")),
            None => return malformed(format!("device position {entry} of {num_devices} devices")),
        }
    }
    Ok(entries)
}

fn explicit(proto: &OpSharding, num_devices: usize) -> Result<Vec<usize>> {
    let devices = &proto.tile_assignment_devices;
    if devices.len() != num_devices {
        return malformed(format!(
            "{} entries in tile_assignment_devices for {num_devices} devices",
            devices.len()
        ));
    }
    devices
        .iter()
        .map(|&device| {
            usize::try_from(device).or_else(|_| malformed(format!("device position {device}")))
        })
        .collect()
}

fn iota(proto: &OpSharding, num_devices: usize) -> Result<Vec<usize>> {
    if !proto.tile_assignment_devices.is_empty() {
        return malformed("both tile_assignment_devices and iota_reshape_dims are set".to_owned());
    }
    let reshape = &proto.iota_reshape_dims;
    let product = checked_product(reshape, "iota_reshape_dims")?;
    if product != num_devices {
        return malformed(format!(
            "iota_reshape_dims of {product} entries for {num_devices} devices"
        ));
    }
    let perm = permutation(&proto.iota_transpose_perm, reshape.len())?;

    // Extents and row-major strides as sizes: each is at most num_devices, which the product bounds.
    let extents: Vec<usize> = reshape
        .iter()
        .map(|&extent| usize::try_from(extent).unwrap_or(0))
        .collect();
    let mut strides = vec![1usize; extents.len()];
    for d in (1..extents.len()).rev() {
        strides[d - 1] = strides[d] * extents[d];
    }
    // Count up through the transposed array, following each of its dimensions with its stride in the untransposed one.
    let mut entries = Vec::with_capacity(num_devices);
    let mut index = vec![0usize; perm.len()];
    loop {
        entries.push(
            index
                .iter()
                .zip(&perm)
                .map(|(&i, &source)| i * strides[source])
                .sum(),
        );
        let mut d = perm.len();
        loop {
            if d == 0 {
                return Ok(entries);
            }
            d -= 1;
            index[d] += 1;
            if index[d] < extents[perm[d]] {
                break;
            }
            index[d] = 0;
        }
    }
}

/// `perm` as indices, checked to hold each of `0..rank` once.
fn permutation(perm: &[i32], rank: usize) -> Result<Vec<usize>> {
    let mut seen = vec![false; rank];
    let indices: Option<Vec<usize>> = perm
        .iter()
        .map(|&p| {
            let p = usize::try_from(p).ok()?;
            let seen = seen.get_mut(p)?;
            (!std::mem::replace(seen, true)).then_some(p)
        })
        .collect();
    match indices {
        Some(indices) if indices.len() == rank => Ok(indices),
        _ => malformed(format!(
            "iota_transpose_perm is not a permutation of {rank} dimensions"
        )),
    }
}

/// The product of extents that are all at least 1.
fn checked_product(extents: &[i64], field: &str) -> Result<usize> {
    if extents.len() > MAX_RANK {
        return malformed(format!(
            "{} dimensions in {field}, at most {MAX_RANK} are taken",
            extents.len()
        ));
    }
    let mut product = 1usize;
    for &extent in extents {
        if extent < 1 {
            return malformed(format!("an extent of {extent} in {field}"));
        }
        let next = usize::try_from(extent)
            .ok()
            .and_then(|extent| product.checked_mul(extent));
        match next {
            Some(next) => product = next,
            None => return malformed(format!("the product of {field} overflows")),
        }
    }
    Ok(product)
}

fn malformed<T>(what: String) -> Result<T> {
    Err(Error::MalformedSharding(what))
}
