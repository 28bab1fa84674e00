//! Which pieces go where when an array changes its sharding.

use std::collections::{BTreeMap, HashMap};

use waystation_checkpoint::sharding::IndexDomain;

use crate::status::{self, Status};

/// One position of a sharding.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// Index of the worker.
    pub(crate) worker: usize,
    /// Global id.
    pub(crate) device: i32,
    /// The elements that lie there.
    pub(crate) domain: IndexDomain,
}

/// Where a target position's shard comes from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Make {
    /// The shard of this source position, which lies on the same device.
    Same(usize),
    /// A copy of the shard of this source position, which the same worker holds.
    Copy(usize),
    /// This part of what the position's worker gathers.
    Part(usize),
}

/// What one worker gathers.
#[derive(Debug, Default)]
pub(crate) struct Gather {
    /// Distinct pieces of the new array.
    pub(crate) parts: Vec<IndexDomain>,
    /// Source positions, and which of their elements are needed.
    pub(crate) sources: Vec<(usize, Vec<Piece>)>,
}

/// Elements of a source that go into a part.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Piece {
    pub(crate) size: Vec<i64>,
    /// In the source's shard.
    pub(crate) from: Vec<i64>,
    pub(crate) part: usize,
    /// In the part.
    pub(crate) to: Vec<i64>,
}

#[derive(Debug)]
pub(crate) struct Plan {
    /// By target position.
    pub(crate) makes: Vec<Make>,
    /// By worker.
    pub(crate) gathers: BTreeMap<usize, Gather>,
}

/// Plans the way from one sharding to another. Where several positions hold the same piece, the nearest gives it: one on the
/// same device, else on the same worker, else one of the others, each worker another one.
///
/// # Errors
/// INVALID_ARGUMENT where the source's pieces do not make up what the target needs.
pub(crate) fn plan(from: &[Place], to: &[Place]) -> Result<Plan, Status> {
    let tiles = tiles(from);
    let mut known: HashMap<(usize, &IndexDomain), usize> = HashMap::new();
    let mut gathers: BTreeMap<usize, Gather> = BTreeMap::new();
    let mut makes = Vec::with_capacity(to.len());
    for target in to {
        if let Some(make) = whole(from, &tiles, target) {
            makes.push(make);
            continue;
        }
        let gather = gathers.entry(target.worker).or_default();
        let part = *known
            .entry((target.worker, &target.domain))
            .or_insert_with(|| {
                gather.parts.push(target.domain.clone());
                gather.parts.len() - 1
            });
        makes.push(Make::Part(part));
    }
    for (&worker, gather) in &mut gathers {
        let mut missing: Vec<i64> = gather.parts.iter().map(elements).collect();
        for (domain, holders) in &tiles {
            let pieces: Vec<Piece> = gather
                .parts
                .iter()
                .enumerate()
                .filter_map(|(part, wanted)| piece(domain, part, wanted))
                .collect();
            if pieces.is_empty() {
                continue;
            }
            for piece in &pieces {
                missing[piece.part] -= piece.size.iter().product::<i64>();
            }
            let near = holders.iter().find(|&&h| from[h].worker == worker);
            let Some(&holder) = near.or_else(|| holders.get(worker % holders.len())) else {
                continue;
            };
            gather.sources.push((holder, pieces));
        }
        if missing.iter().any(|&elements| elements != 0) {
            return Err(status::invalid_argument(
                "the array's shards do not make up the whole array",
            ));
        }
    }
    Ok(Plan { makes, gathers })
}

/// The distinct pieces and the positions that hold them, in the order of the positions.
fn tiles(from: &[Place]) -> Vec<(&IndexDomain, Vec<usize>)> {
    let mut index: HashMap<&IndexDomain, usize> = HashMap::new();
    let mut tiles: Vec<(&IndexDomain, Vec<usize>)> = Vec::new();
    for (position, place) in from.iter().enumerate() {
        let tile = *index.entry(&place.domain).or_insert_with(|| {
            tiles.push((&place.domain, Vec::new()));
            tiles.len() - 1
        });
        tiles[tile].1.push(position);
    }
    tiles
}

/// A shard of the target's own worker that is all that the target needs.
fn whole(from: &[Place], tiles: &[(&IndexDomain, Vec<usize>)], target: &Place) -> Option<Make> {
    let (_, holders) = tiles.iter().find(|(domain, _)| **domain == target.domain)?;
    let on_device = |&&holder: &&usize| from[holder].device == target.device;
    if let Some(&holder) = holders.iter().find(on_device) {
        return Some(Make::Same(holder));
    }
    holders
        .iter()
        .find(|&&holder| from[holder].worker == target.worker)
        .map(|&holder| Make::Copy(holder))
}

fn piece(tile: &IndexDomain, part: usize, wanted: &IndexDomain) -> Option<Piece> {
    let shared = tile.intersect(wanted)?;
    let within = |outer: &IndexDomain| {
        shared
            .origin
            .iter()
            .zip(&outer.origin)
            .map(|(a, b)| a - b)
            .collect()
    };
    Some(Piece {
        from: within(tile),
        to: within(wanted),
        part,
        size: shared.shape,
    })
}

/// The number of elements; arrays are checked to have a number of them that fits.
fn elements(domain: &IndexDomain) -> i64 {
    domain.shape.iter().product()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(worker: usize, device: i32, origin: &[i64], shape: &[i64]) -> Place {
        Place {
            worker,
            device,
            domain: IndexDomain {
                origin: origin.to_vec(),
                shape: shape.to_vec(),
            },
        }
    }

    #[test]
    fn rows_become_columns_piece_by_piece() {
        let from = [place(0, 0, &[0, 0], &[2, 4]), place(1, 1, &[2, 0], &[2, 4])];
        let to = [place(0, 0, &[0, 0], &[4, 2]), place(1, 1, &[0, 2], &[4, 2])];
        let plan = plan(&from, &to).expect("complete");
        assert_eq!(plan.makes, [Make::Part(0), Make::Part(0)]);
        let gather = &plan.gathers[&1];
        let piece = |from: &[i64], to: &[i64]| Piece {
            size: vec![2, 2],
            from: from.to_vec(),
            part: 0,
            to: to.to_vec(),
        };
        assert_eq!(
            gather.sources,
            [
                (0, vec![piece(&[0, 2], &[0, 0])]),
                (1, vec![piece(&[0, 2], &[2, 0])])
            ]
        );
    }

    #[test]
    fn the_nearest_copy_is_taken_and_each_piece_comes_once_to_a_worker() {
        // The whole array on devices 0 and 1 of worker 0 and on device 2 of worker 1.
        let whole = |worker, device| place(worker, device, &[0], &[6]);
        let from = [whole(0, 0), whole(0, 1), whole(1, 2)];
        let to = [whole(0, 1), whole(1, 3), whole(2, 4), whole(2, 5)];
        let made = plan(&from, &to).expect("complete");
        assert_eq!(
            made.makes,
            [Make::Same(1), Make::Copy(2), Make::Part(0), Make::Part(0)]
        );
        let gather = &made.gathers[&2];
        assert_eq!((gather.parts.len(), gather.sources.len()), (1, 1));
        // Of halves, the worker's own copy serves before another's.
        let halves = [place(1, 3, &[0], &[3]), place(1, 2, &[3], &[3])];
        let made = plan(&from, &halves).expect("complete");
        assert_eq!(made.gathers[&1].sources[0].0, 2);
        assert_eq!(made.gathers[&1].sources.len(), 1);
    }

    #[test]
    fn empty_pieces_need_nothing_and_gaps_are_found() {
        let from = [place(0, 0, &[0], &[3]), place(0, 1, &[3], &[0])];
        let to = [
            place(0, 2, &[0], &[2]),
            place(0, 3, &[2], &[1]),
            place(0, 4, &[2], &[0]),
        ];
        let made = plan(&from, &to).expect("complete");
        assert_eq!(made.gathers[&0].parts.len(), 3);
        assert_eq!(made.gathers[&0].sources[0].1.len(), 2);
        let gap = plan(&from, &[place(0, 0, &[2], &[2])]).expect_err("not all there");
        assert_eq!(gap.code, 3);
    }
}
