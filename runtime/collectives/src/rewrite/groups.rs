//! Which partitions act together: the four ways in which XLA writes it, and the four in which it means it.

use super::Refusal;
use super::wire::fields;
use crate::op::MOST_PARTITIONS;

type Groups = Vec<Vec<u32>>;

const MALFORMED: Refusal = Refusal::Groups("that do not fit each other");

/// The partitions of a program: those of all replicas, numbered replica by replica.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    replicas: u32,
    partitions: u32,
}

/// What the numbers in an instruction's groups are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// Replicas; each partition acts with the same ones of others.
    Replicas,
    /// Partitions; each replica acts by itself.
    Partitions,
    /// Replicas, each with all its partitions.
    Whole,
    /// Partitions, numbered through all replicas.
    Flat,
}

impl Grid {
    /// # Errors
    /// [`Refusal::Partitions`] for none or too many.
    pub(super) fn new(replicas: u32, partitions: u32) -> Result<Self, Refusal> {
        let grid = Self {
            replicas,
            partitions,
        };
        let all = replicas.checked_mul(partitions);
        match all.filter(|all| (1..=MOST_PARTITIONS).contains(all)) {
            Some(_) => Ok(grid),
            None => Err(Refusal::Partitions(replicas.saturating_mul(partitions))),
        }
    }

    /// The partitions of each replica; none where there is one replica.
    pub(super) fn by_replica(self) -> Groups {
        if self.replicas == 1 {
            return Vec::new();
        }
        let all = (0..self.partitions).collect();
        self.expand(vec![all], Mode::Partitions)
    }

    /// How many there are of what a mode's groups name.
    pub(super) fn limit(self, mode: Mode) -> u32 {
        match mode {
            Mode::Replicas | Mode::Whole => self.replicas,
            Mode::Partitions => self.partitions,
            // Bounded when the grid was made.
            Mode::Flat => self.replicas * self.partitions,
        }
    }

    /// Groups as they are written, of numbers below the mode's limit, by the numbers of all partitions.
    pub(super) fn expand(self, groups: Groups, mode: Mode) -> Groups {
        let number = |replica: u32, partition: u32| replica * self.partitions + partition;
        let each = |count: u32, number: &dyn Fn(u32, u32) -> u32| {
            groups
                .iter()
                .flat_map(|group| (0..count).map(move |other| (group, other)))
                .map(|(group, other)| group.iter().map(|id| number(*id, other)).collect())
                .collect()
        };
        match mode {
            Mode::Flat => groups,
            Mode::Replicas => each(self.partitions, &number),
            Mode::Partitions => each(self.replicas, &|partition, replica| {
                number(replica, partition)
            }),
            Mode::Whole => groups
                .iter()
                .map(|group| {
                    let replicas = group.iter();
                    replicas
                        .flat_map(|id| (0..self.partitions).map(|each| number(*id, each)))
                        .collect()
                })
                .collect(),
        }
    }
}

/// How the groups of one instruction are written.
#[derive(Default)]
pub(super) struct Written<'a> {
    /// `replica_groups`, one each.
    plain: Vec<&'a [u8]>,
    /// `collective_device_list`.
    list: Option<&'a [u8]>,
    /// `iota_collective_device_list`.
    iota: Option<&'a [u8]>,
    /// `mesh_axes_replica_group_list`.
    mesh: Option<&'a [u8]>,
}

impl<'a> Written<'a> {
    /// Takes a field of the instruction if it is one of these.
    pub(super) fn take(&mut self, field: &super::wire::Field<'a>) -> Result<(), Refusal> {
        match field.number {
            49 => self.plain.push(field.bytes()?),
            87 => self.list = Some(field.bytes()?),
            92 => self.iota = Some(field.bytes()?),
            93 => self.mesh = Some(field.bytes()?),
            _ => {}
        }
        Ok(())
    }

    /// The groups, of numbers below `limit`; empty where none are written, which means all.
    pub(super) fn groups(&self, limit: u32) -> Result<Groups, Refusal> {
        // The later ones came to be instead of the earlier ones, which old readers may still find beside them.
        let groups = if let Some(mesh) = self.mesh {
            of_mesh(mesh)?
        } else if let Some(iota) = self.iota {
            of_iota(iota)?
        } else {
            let mut plain = self.plain.clone();
            if let (Some(list), true) = (self.list, plain.is_empty()) {
                for field in fields(list) {
                    let field = field?;
                    if field.number == 1 {
                        plain.push(field.bytes()?);
                    }
                }
            }
            plain
                .into_iter()
                .map(of_plain)
                .collect::<Result<Groups, _>>()?
        };
        // One empty group is all partitions too.
        if groups.iter().all(Vec::is_empty) {
            return Ok(Vec::new());
        }
        distinct(groups.iter().flatten().copied(), limit)?;
        if groups.iter().any(Vec::is_empty) {
            return Err(Refusal::Groups("of which one is empty"));
        }
        Ok(groups)
    }
}

/// Checks that each id is below `limit` and comes once.
pub(super) fn distinct(ids: impl Iterator<Item = u32>, limit: u32) -> Result<(), Refusal> {
    let mut seen = vec![false; limit as usize];
    for id in ids {
        match seen.get_mut(id as usize) {
            None => return Err(Refusal::Groups("of partitions that the program has not")),
            Some(seen) if *seen => return Err(Refusal::Groups("that name a partition twice")),
            Some(seen) => *seen = true,
        }
    }
    Ok(())
}

fn id(id: i64) -> Result<u32, Refusal> {
    u32::try_from(id).map_err(|_| Refusal::Groups("of partitions that the program has not"))
}

fn of_plain(group: &[u8]) -> Result<Vec<u32>, Refusal> {
    let mut ids = Vec::new();
    for field in fields(group) {
        let field = field?;
        if field.number == 1 {
            field.ints(&mut ids)?;
        }
    }
    ids.into_iter().map(id).collect()
}

/// The sizes of an array, whose product is no more than the partitions that are taken.
fn sizes(dims: &[i64]) -> Result<Vec<usize>, Refusal> {
    let mut product = 1_u64;
    if dims.len() > 64 {
        return Err(MALFORMED);
    }
    dims.iter()
        .map(|dim| {
            let dim = u64::try_from(*dim).ok().filter(|dim| *dim > 0);
            let dim = dim.ok_or(MALFORMED)?;
            product = product
                .checked_mul(dim)
                .filter(|product| *product <= u64::from(MOST_PARTITIONS))
                .ok_or(MALFORMED)?;
            usize::try_from(dim).map_err(|_| MALFORMED)
        })
        .collect()
}

/// `values`, an array of `dims`, with its dimensions in the order `order`.
fn transposed(values: &[u32], dims: &[usize], order: &[usize]) -> Result<Vec<u32>, Refusal> {
    let mut sorted = order.to_vec();
    sorted.sort_unstable();
    if !sorted.into_iter().eq(0..dims.len()) || dims.iter().product::<usize>() != values.len() {
        return Err(MALFORMED);
    }
    let mut strides = vec![1; dims.len()];
    for dim in (1..dims.len()).rev() {
        strides[dim - 1] = strides[dim] * dims[dim];
    }
    let mut at = vec![0; order.len()];
    let mut result = Vec::with_capacity(values.len());
    for _ in 0..values.len() {
        let index: usize = order
            .iter()
            .zip(&at)
            .map(|(dim, at)| strides[*dim] * at)
            .sum();
        result.push(values[index]);
        for (dim, at) in order.iter().zip(&mut at).rev() {
            *at += 1;
            if *at < dims[*dim] {
                break;
            }
            *at = 0;
        }
    }
    Ok(result)
}

/// The first numbers, as an array of `dims` with its dimensions in the order `order`.
fn iota(dims: &[i64], order: &[i64]) -> Result<Vec<u32>, Refusal> {
    let dims = sizes(dims)?;
    let count: usize = dims.iter().product();
    let order: Vec<usize> = if order.is_empty() {
        (0..dims.len()).collect()
    } else {
        order
            .iter()
            .map(|dim| usize::try_from(*dim).unwrap_or(usize::MAX))
            .collect()
    };
    let values: Vec<u32> = (0..count)
        .map(|value| u32::try_from(value).unwrap_or(u32::MAX))
        .collect();
    transposed(&values, &dims, &order)
}

fn split(values: &[u32], size: usize) -> Groups {
    values.chunks(size.max(1)).map(<[u32]>::to_vec).collect()
}

fn of_iota(list: &[u8]) -> Result<Groups, Refusal> {
    let (mut groups, mut size, mut dims, mut order) = (0, 0, Vec::new(), Vec::new());
    for field in fields(list) {
        let field = field?;
        match field.number {
            1 => groups = field.int()?,
            2 => size = field.int()?,
            3 => field.ints(&mut dims)?,
            4 => field.ints(&mut order)?,
            _ => {}
        }
    }
    if groups == 0 && size == 0 && dims.is_empty() {
        return Ok(Vec::new());
    }
    let shape = sizes(&[groups, size])?;
    if dims.is_empty() {
        dims = vec![groups, size];
    }
    let values = iota(&dims, &order)?;
    if values.len() != shape[0] * shape[1] {
        return Err(MALFORMED);
    }
    Ok(split(&values, shape[1]))
}

/// An axis of a mesh, or of its `size` only the part behind the first `before`.
struct Axis {
    index: usize,
    part: Option<(i64, i64)>,
}

fn of_mesh(list: &[u8]) -> Result<Groups, Refusal> {
    let (mut mesh, mut axes) = (&[][..], Vec::new());
    for field in fields(list) {
        let field = field?;
        match field.number {
            1 => mesh = field.bytes()?,
            2 => axes.push(axis(field.bytes()?)?),
            _ => {}
        }
    }
    let (mut dims, mut ids, mut reshape, mut order) = (vec![], vec![], vec![], vec![]);
    for field in fields(mesh) {
        let field = field?;
        match field.number {
            1 => {
                let mut size = 0;
                for field in fields(field.bytes()?) {
                    let field = field?;
                    if field.number == 2 {
                        size = field.int()?;
                    }
                }
                dims.push(size);
            }
            2 => field.ints(&mut ids)?,
            3 => {
                for field in fields(field.bytes()?) {
                    let field = field?;
                    match field.number {
                        1 => field.ints(&mut reshape)?,
                        2 => field.ints(&mut order)?,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    let shape = sizes(&dims)?;
    let count: usize = shape.iter().product();
    let values = if !ids.is_empty() {
        ids.into_iter().map(id).collect::<Result<Vec<_>, _>>()?
    } else if reshape.is_empty() {
        iota(&dims, &[])?
    } else {
        iota(&reshape, &order)?
    };
    if values.len() != count {
        return Err(MALFORMED);
    }
    // Cut each axis where a part of it begins or ends; then bring those of the groups behind the others.
    let mut cuts: Vec<Vec<usize>> = shape.iter().map(|size| vec![1, *size]).collect();
    for axis in &axes {
        let cuts = cuts.get_mut(axis.index).ok_or(MALFORMED)?;
        if let Some((before, size)) = axis.part {
            let part = sizes(&[before, size])?;
            cuts.push(part[0]);
            cuts.push(part[0] * part[1]);
        }
    }
    let mut pieces = Vec::new();
    for (index, cuts) in cuts.iter_mut().enumerate() {
        cuts.sort_unstable();
        cuts.dedup();
        for pair in cuts.windows(2) {
            if !pair[1].is_multiple_of(pair[0]) {
                return Err(MALFORMED);
            }
            pieces.push((index, pair[0], pair[1] / pair[0]));
        }
    }
    let mut grouped = Vec::new();
    for axis in &axes {
        let (before, size) = match axis.part {
            Some((before, size)) => {
                let part = sizes(&[before, size])?;
                (part[0], part[1])
            }
            None => (1, shape[axis.index]),
        };
        for (piece, (index, start, length)) in pieces.iter().enumerate() {
            if *index == axis.index && *start >= before && start * length <= before * size {
                grouped.push(piece);
            }
        }
    }
    let size: usize = grouped.iter().map(|piece| pieces[*piece].2).product();
    let mut order: Vec<usize> = (0..pieces.len())
        .filter(|piece| !grouped.contains(piece))
        .collect();
    order.extend(&grouped);
    let dims: Vec<usize> = pieces.iter().map(|(_, _, length)| *length).collect();
    Ok(split(&transposed(&values, &dims, &order)?, size))
}

fn axis(reference: &[u8]) -> Result<Axis, Refusal> {
    let (mut index, mut part) = (0, None);
    for field in fields(reference) {
        let field = field?;
        match field.number {
            1 => index = field.int()?,
            2 => {
                let (mut before, mut size) = (0, 0);
                for field in fields(field.bytes()?) {
                    let field = field?;
                    match field.number {
                        1 => before = field.int()?,
                        2 => size = field.int()?,
                        _ => {}
                    }
                }
                part = Some((before, size));
            }
            _ => {}
        }
    }
    Ok(Axis {
        index: usize::try_from(index).map_err(|_| MALFORMED)?,
        part,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rewrite::wire::{put_bytes, put_int};

    fn ints(number: u64, values: &[u64]) -> Vec<u8> {
        let mut out = Vec::new();
        for value in values {
            put_int(&mut out, number, *value);
        }
        out
    }

    fn message(number: u64, inside: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        put_bytes(&mut out, number, inside);
        out
    }

    fn read(field: &[u8], partitions: u32) -> Result<Groups, Refusal> {
        let mut written = Written::default();
        for field in fields(field) {
            written.take(&field?)?;
        }
        written.groups(partitions)
    }

    #[test]
    fn every_way_of_writing_is_read() {
        let expected = vec![vec![0, 2], vec![1, 3]];
        let plain = [
            message(49, &ints(1, &[0, 2])),
            message(49, &message(1, &[1, 3])),
        ]
        .concat();
        assert_eq!(read(&plain, 4), Ok(expected.clone()));
        let list = message(
            87,
            &[message(1, &ints(1, &[0, 2])), message(1, &ints(1, &[1, 3]))].concat(),
        );
        assert_eq!(read(&list, 4), Ok(expected.clone()));
        let iota = message(
            92,
            &[
                ints(1, &[2]),
                ints(2, &[2]),
                ints(3, &[2, 2]),
                ints(4, &[1, 0]),
            ]
            .concat(),
        );
        assert_eq!(read(&iota, 4), Ok(expected.clone()));
        let mesh = [
            message(1, &[message(1, b"a"), ints(2, &[2])].concat()),
            message(1, &ints(2, &[2])),
        ]
        .concat();
        let mesh = message(1, &mesh);
        let first_axis = message(2, &[]);
        assert_eq!(
            read(&message(93, &[mesh.clone(), first_axis].concat()), 4),
            Ok(expected)
        );
        let second_axis = message(2, &ints(1, &[1]));
        assert_eq!(
            read(&message(93, &[mesh, second_axis].concat()), 4),
            Ok(vec![vec![0, 1], vec![2, 3]])
        );
        assert_eq!(read(&[], 4), Ok(vec![]));
        assert_eq!(read(&message(49, &[]), 4), Ok(vec![]));
    }

    #[test]
    fn parts_of_axes_and_orders_of_devices_are_followed() {
        // One axis of eight; groups along its middle part of two, behind the first two.
        let mesh = message(1, &message(1, &ints(2, &[8])));
        let part = message(2, &message(2, &[ints(1, &[2]), ints(2, &[2])].concat()));
        assert_eq!(
            read(&message(93, &[mesh, part].concat()), 8),
            Ok(vec![vec![0, 2], vec![1, 3], vec![4, 6], vec![5, 7]])
        );
        // Devices 0..4 as 2x2, transposed.
        let moved = message(3, &[ints(1, &[2, 2]), ints(2, &[1, 0])].concat());
        let axes = [message(1, &ints(2, &[2])), message(1, &ints(2, &[2]))].concat();
        let mesh = message(1, &[axes, moved].concat());
        let axis = message(2, &ints(1, &[1]));
        assert_eq!(
            read(&message(93, &[mesh, axis].concat()), 4),
            Ok(vec![vec![0, 2], vec![1, 3]])
        );
        // Two axes of a group, the second before the first.
        let axes = [message(1, &ints(2, &[2])), message(1, &ints(2, &[2]))].concat();
        let mesh = message(1, &axes);
        let turned = [message(2, &ints(1, &[1])), message(2, &[])].concat();
        assert_eq!(
            read(&message(93, &[mesh, turned].concat()), 4),
            Ok(vec![vec![0, 2, 1, 3]])
        );
    }

    #[test]
    fn groups_mean_replicas_or_partitions_or_both() {
        let grid = Grid::new(2, 3).expect("six");
        let pairs = vec![vec![1, 0]];
        assert_eq!(
            grid.expand(pairs.clone(), Mode::Replicas),
            [[3, 0], [4, 1], [5, 2]]
        );
        assert_eq!(
            grid.expand(vec![vec![2, 0], vec![1]], Mode::Partitions),
            [vec![2, 0], vec![5, 3], vec![1], vec![4]]
        );
        assert_eq!(
            grid.expand(pairs.clone(), Mode::Whole),
            [[3, 4, 5, 0, 1, 2]]
        );
        assert_eq!(grid.expand(pairs.clone(), Mode::Flat), pairs);
        assert_eq!(grid.by_replica(), [[0, 1, 2], [3, 4, 5]]);
        assert_eq!(grid.limit(Mode::Flat), 6);
        assert_eq!(
            (grid.limit(Mode::Whole), grid.limit(Mode::Partitions)),
            (2, 3)
        );
        assert!(Grid::new(1, 3).expect("three").by_replica().is_empty());
        for (replicas, partitions) in [(0, 1), (1, 0), (1 << 16, 2), (1 << 31, 1 << 31)] {
            Grid::new(replicas, partitions).expect_err("none, or too many");
        }
    }

    #[test]
    fn what_makes_no_groups_is_refused() {
        let refused = |field: &[u8]| read(field, 4).expect_err("wrong");
        refused(&message(49, &ints(1, &[4])));
        refused(&message(49, &ints(1, &[1, 1])));
        refused(&[message(49, &ints(1, &[1])), message(49, &[])].concat());
        refused(&message(
            92,
            &[ints(1, &[1 << 40]), ints(2, &[1 << 40])].concat(),
        ));
        refused(&message(92, &[ints(1, &[2]), ints(2, &[0])].concat()));
        refused(&message(
            92,
            &[ints(1, &[2]), ints(2, &[2]), ints(3, &[4]), ints(4, &[3])].concat(),
        ));
        refused(&message(93, &message(2, &ints(1, &[9]))));
    }
}
