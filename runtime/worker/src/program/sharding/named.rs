//! Shardings by mesh axes, turned into tile assignments.
//!
//! Newer XLA builds give a compiled module's shardings as `xla.NamedShardingProto` and leave the rest of the `OpSharding`
//! empty. To whoever does not know that field, older clients among them, such a sharding looks replicated. Tile assignments say
//! the same and everybody reads them.
//!
//! A mesh is a list of axes with sizes; its devices lie in it row-major, in order or permuted. A dimension names the axes that
//! cut it, major to minor, whole axes or factors of one. A tile assignment lists devices by piece: the array's dimensions first,
//! then one dimension for each way in which devices share a piece.

use waystation_proto::xla::{
    AxisRefProto, MeshProto, NamedShardingProto, OpMetadata, OpSharding,
    named_sharding_proto::ReductionOpProto, op_sharding::Type,
};

/// More devices than a program can have are taken for damage before anything is allocated.
const MAX_DEVICES: i64 = 65_536;

/// A part of a mesh axis: which axis, and the range of its divisors that it stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    axis: usize,
    /// Product of the sizes before it in the axis.
    before: i64,
    size: i64,
}

/// How XLA says in a tile assignment's metadata by what the parts of an unreduced array are put together; without it they are
/// summed (as jaxlib writes it: `HloSharding.to_proto` of an unreduced `NamedSharding`).
const REDUCTION_OP: &str = "sdy::reduction_op";

/// The same sharding as a tile assignment. `None` when it contradicts itself.
pub(super) fn tiled(named: &NamedShardingProto) -> Option<OpSharding> {
    let mut sharding = assignment(named)?;
    let unreduced = Type::Unreduced as i32;
    let is_unreduced = sharding.r#type == unreduced || sharding.last_tile_dims.contains(&unreduced);
    if is_unreduced && named.reduction_op() != ReductionOpProto::Sum {
        sharding.metadata.push(OpMetadata {
            op_type: REDUCTION_OP.to_owned(),
            op_name: named.reduction_op().as_str_name().to_owned(),
        });
    }
    Some(sharding)
}

fn assignment(named: &NamedShardingProto) -> Option<OpSharding> {
    let no_mesh = MeshProto::default();
    let mesh = named.mesh.as_ref().unwrap_or(&no_mesh);
    if let ([], [device]) = (mesh.axes.as_slice(), mesh.device_ids.as_slice()) {
        return Some(OpSharding {
            r#type: Type::Maximal.into(),
            tile_assignment_dimensions: vec![1],
            tile_assignment_devices: vec![*device],
            ..Default::default()
        });
    }
    let sizes: Vec<i64> = mesh.axes.iter().map(|axis| axis.size).collect();
    let devices = sizes.iter().try_fold(1_i64, |product, size| {
        product
            .checked_mul(*size)
            .filter(|product| *size > 0 && *product <= MAX_DEVICES)
    })?;
    let parts = |axes: &[AxisRefProto]| {
        axes.iter()
            .map(|axis| part(axis, &sizes))
            .collect::<Option<Vec<_>>>()
    };
    let cuts = named
        .dim_shardings
        .iter()
        .map(|dimension| parts(&dimension.axes))
        .collect::<Option<Vec<_>>>()?;
    let manual = parts(&named.manual_axes)?;
    let unreduced = parts(&named.unreduced_axes)?;

    // Split every axis at every boundary that some part has, so that each part is a run of whole pieces.
    let used = || cuts.iter().flatten().chain(&manual).chain(&unreduced);
    let pieces = split(&sizes, used())?;
    let mut order = Vec::with_capacity(pieces.len());
    let mut taken = vec![false; pieces.len()];
    let mut dimension = |parts: &[Part]| -> Option<i64> {
        for part in parts {
            let end = part.before.checked_mul(part.size)?;
            for (index, piece) in pieces.iter().enumerate() {
                if piece.axis == part.axis && piece.before >= part.before && piece.before < end {
                    if std::mem::replace(&mut taken[index], true) {
                        return None;
                    }
                    order.push(index);
                }
            }
        }
        parts
            .iter()
            .try_fold(1_i64, |product, part| product.checked_mul(part.size))
    };
    let mut dims = cuts
        .iter()
        .map(|parts| dimension(parts))
        .collect::<Option<Vec<_>>>()?;
    let rank = dims.len();
    let is_cut = dims.iter().any(|pieces| *pieces > 1);
    let mut shared = vec![
        (Type::Manual, dimension(&manual)?),
        (Type::Unreduced, dimension(&unreduced)?),
    ];
    let rest: Vec<Part> = pieces
        .iter()
        .zip(&taken)
        .filter(|(_, taken)| !**taken)
        .map(|(piece, _)| *piece)
        .collect();
    order.extend((0..pieces.len()).filter(|index| !taken[*index]));
    shared.push((
        Type::Replicated,
        rest.iter().map(|piece| piece.size).product(),
    ));
    shared.retain(|(_, size)| *size > 1);

    match shared.as_slice() {
        [] if !is_cut => return Some(OpSharding::default()),
        [(only, _)] if !is_cut => {
            return Some(OpSharding {
                r#type: (*only).into(),
                ..Default::default()
            });
        }
        _ => {}
    }
    dims.extend(shared.iter().map(|(_, size)| size));
    let mut sharding = OpSharding {
        r#type: Type::Other.into(),
        tile_assignment_dimensions: dims,
        ..Default::default()
    };
    match shared.as_slice() {
        [(Type::Replicated, _)] => sharding.replicate_on_last_tile_dim = true,
        kinds => sharding.last_tile_dims = kinds.iter().map(|(kind, _)| (*kind).into()).collect(),
    }
    debug_assert!(sharding.tile_assignment_dimensions.len() >= rank);
    let sizes: Vec<i64> = pieces.iter().map(|piece| piece.size).collect();
    if mesh.device_ids.is_empty() && mesh.iota_transform.is_none() {
        (sharding.iota_reshape_dims, sharding.iota_transpose_perm) = simplified(&sizes, &order)?;
    } else {
        let ids = mesh_devices(mesh, devices)?;
        let places = transposed(&sizes, &order)?;
        sharding.tile_assignment_devices = places
            .into_iter()
            .map(|place| ids.get(place).copied())
            .collect::<Option<_>>()?;
    }
    Some(sharding)
}

/// A reference to an axis or a factor of one.
fn part(axis: &AxisRefProto, sizes: &[i64]) -> Option<Part> {
    let index = usize::try_from(axis.mesh_axis_index).ok()?;
    let whole = *sizes.get(index)?;
    let (before, size) = match &axis.sub_axis_info {
        Some(sub) => (sub.pre_size, sub.size),
        None => (1, whole),
    };
    let end = before
        .checked_mul(size)
        .filter(|_| before > 0 && size > 0)?;
    (whole % end == 0).then_some(Part {
        axis: index,
        before,
        size,
    })
}

/// The axes split at the boundaries of the parts, in mesh order, pieces of one device left out.
fn split<'p>(sizes: &[i64], parts: impl Iterator<Item = &'p Part> + Clone) -> Option<Vec<Part>> {
    let mut pieces = Vec::new();
    for (axis, size) in sizes.iter().enumerate() {
        let of_axis = parts.clone().filter(|part| part.axis == axis);
        let mut bounds: Vec<i64> = of_axis
            .flat_map(|part| [part.before, part.before * part.size])
            .collect();
        bounds.extend([1, *size]);
        bounds.sort_unstable();
        bounds.dedup();
        for pair in bounds.windows(2) {
            if pair[1] % pair[0] != 0 {
                return None;
            }
            pieces.push(Part {
                axis,
                before: pair[0],
                size: pair[1] / pair[0],
            });
        }
    }
    Some(pieces)
}

/// Reshape dimensions and permutation of the iota that lists devices in that order of pieces, neighbours that stay neighbours
/// merged: a permutation that changes nothing is one dimension.
fn simplified(sizes: &[i64], order: &[usize]) -> Option<(Vec<i64>, Vec<i32>)> {
    // Runs of pieces that follow each other in both orders.
    let mut runs: Vec<(usize, i64)> = Vec::new();
    let mut previous = None;
    for piece in order {
        let size = *sizes.get(*piece)?;
        match runs.last_mut() {
            Some((_, product))
                if previous.is_some_and(|previous: usize| previous + 1 == *piece) =>
            {
                *product *= size
            }
            _ => runs.push((*piece, size)),
        }
        previous = Some(*piece);
    }
    let mut in_mesh_order = runs.clone();
    in_mesh_order.sort_unstable();
    let place = |start: usize| in_mesh_order.iter().position(|(other, _)| *other == start);
    let permutation = runs
        .iter()
        .map(|(start, _)| i32::try_from(place(*start)?).ok())
        .collect::<Option<_>>()?;
    Some((
        in_mesh_order.into_iter().map(|(_, size)| size).collect(),
        permutation,
    ))
}

/// Positions in the mesh, in that order of pieces.
fn transposed(sizes: &[i64], order: &[usize]) -> Option<Vec<usize>> {
    let mut strides = vec![1_usize; sizes.len()];
    for piece in (1..sizes.len()).rev() {
        strides[piece - 1] = strides[piece].checked_mul(usize::try_from(sizes[piece]).ok()?)?;
    }
    let mut places = vec![0_usize];
    for piece in order {
        let (size, stride) = (
            usize::try_from(*sizes.get(*piece)?).ok()?,
            *strides.get(*piece)?,
        );
        places = places
            .iter()
            .flat_map(|place| (0..size).map(move |step| place + step * stride))
            .collect();
    }
    Some(places)
}

/// The device at each position of a mesh that lists or permutes its devices.
fn mesh_devices(mesh: &MeshProto, count: i64) -> Option<Vec<i64>> {
    let count = usize::try_from(count).ok()?;
    if !mesh.device_ids.is_empty() {
        return (mesh.device_ids.len() == count).then(|| mesh.device_ids.clone());
    }
    let transform = mesh.iota_transform.as_ref()?;
    let dims = &transform.reshape_dims;
    let total = dims.iter().try_fold(1_i64, |product, size| {
        product.checked_mul(*size).filter(|_| *size > 0)
    })?;
    let order = transform
        .transpose_perm
        .iter()
        .map(|dim| usize::try_from(*dim).ok())
        .collect::<Option<Vec<_>>>()?;
    let mut sorted = order.clone();
    sorted.sort_unstable();
    if total != i64::try_from(count).ok()? || !sorted.into_iter().eq(0..dims.len()) {
        return None;
    }
    let places = transposed(dims, &order)?;
    places
        .into_iter()
        .map(|place| i64::try_from(place).ok())
        .collect()
}

#[cfg(test)]
mod tests;
