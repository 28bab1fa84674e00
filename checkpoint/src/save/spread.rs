//! Who writes what of shards that several workers hold.

use std::collections::{BTreeMap, HashMap};

use waystation_proto::xla::PrimitiveType;

use super::SaveArray;
use crate::Result;
use crate::sharding::Sharding;
use crate::zarr::DType;

/// What a holder writes of a shard: of its cuts ([`SaveArray::cut`]), each whose number leaves `part` when divided by
/// `parts`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Share {
    /// See above.
    pub part: u32,
    /// How many share it; 0: this holder writes nothing.
    pub parts: u32,
}

/// Spreads the shards of a save over the workers that hold them, by bytes: of equal shards each chunk is written once. A
/// shard of several chunks is shared, any other goes to the holder with the least to write so far.
#[derive(Debug, Clone, Default)]
pub struct Spread {
    /// Bytes by worker.
    loads: BTreeMap<usize, u64>,
}

impl Spread {
    /// One share for each position of an array. `workers`: who holds the positions, by whatever number.
    ///
    /// # Errors
    /// Dimensions that do not fit the sharding.
    pub fn shares(
        &mut self,
        dtype: PrimitiveType,
        dims: &[i64],
        sharding: &Sharding,
        workers: &[usize],
    ) -> Result<Vec<Share>> {
        let array = SaveArray::sharded("", "", dtype, dims, sharding)?;
        let domains = sharding.domains(dims)?;
        // For each piece the first position of each worker that holds it.
        let mut order = Vec::new();
        let mut holders: HashMap<usize, Vec<usize>> = HashMap::new();
        for (position, piece) in sharding.pieces().into_iter().enumerate() {
            let holders = holders.entry(piece).or_insert_with(|| {
                order.push(piece);
                Vec::new()
            });
            let is_new = |&held: &usize| workers.get(held) != workers.get(position);
            if holders.iter().all(is_new) {
                holders.push(position);
            }
        }
        let item_bytes = DType::of(dtype).map_or(1, |dtype| dtype.item_bytes()) as u64;
        let mut shares = vec![Share::default(); sharding.num_devices()];
        for piece in order {
            let mut holders = holders.remove(&piece).unwrap_or_default();
            let Some(domain) = holders.first().and_then(|&first| domains.get(first)) else {
                continue;
            };
            let cuts = array.cut(domain).map_or(1, |cuts| cuts.len().max(1));
            let load = |position: usize| {
                let worker = workers.get(position).copied().unwrap_or_default();
                self.loads.get(&worker).copied().unwrap_or_default()
            };
            holders.sort_by_key(|&position| load(position));
            holders.truncate(cuts);
            let elements = domain.num_elements().unwrap_or(0) as u64;
            let parts = u32::try_from(holders.len()).unwrap_or(u32::MAX);
            let bytes = elements.saturating_mul(item_bytes) / u64::from(parts.max(1));
            for (part, position) in (0u32..).zip(holders) {
                shares[position] = Share { part, parts };
                let worker = workers.get(position).copied().unwrap_or_default();
                *self.loads.entry(worker).or_default() += bytes;
            }
        }
        Ok(shares)
    }
}

#[cfg(test)]
mod tests {
    use waystation_proto::xla::{OpSharding, op_sharding::Type};

    use super::*;

    /// Cut in `tiles` along the first of two dimensions, with `copies` of each on neighbours.
    fn sharding(tiles: i64, copies: i64) -> Sharding {
        let proto = OpSharding {
            r#type: Type::Other as i32,
            tile_assignment_dimensions: vec![tiles, 1, copies],
            iota_reshape_dims: vec![tiles * copies],
            iota_transpose_perm: vec![0],
            replicate_on_last_tile_dim: true,
            ..OpSharding::default()
        };
        Sharding::new(&proto, (tiles * copies) as usize).unwrap()
    }

    fn written(shares: &[Share]) -> Vec<usize> {
        let all = shares.iter().enumerate();
        all.filter(|(_, share)| share.parts > 0)
            .map(|(position, _)| position)
            .collect()
    }

    #[test]
    fn copies_take_turns_by_bytes() {
        // Eight positions on four workers; each pair of neighbours in a half has the same.
        let workers = [0, 0, 1, 1, 2, 2, 3, 3];
        let (mut spread, halves) = (Spread::default(), sharding(2, 4));
        let mut of = |rows| {
            let shares = spread.shares(PrimitiveType::F32, &[rows, 4], &halves, &workers);
            written(&shares.unwrap())
        };
        assert_eq!(of(8), [0, 4]);
        // The others have nothing to write yet; then all have the same.
        assert_eq!(of(8), [2, 6]);
        assert_eq!(of(80), [0, 4]);
        for _ in 0..10 {
            assert_eq!(of(8), [2, 6]);
        }
    }

    #[test]
    fn a_large_shard_is_shared() {
        let whole = Sharding::replicated(4).unwrap();
        let mut spread = Spread::default();
        let dims = [200 << 20];
        let shares = spread.shares(PrimitiveType::U8, &dims, &whole, &[7, 7, 3, 5]);
        let share = |part| Share { part, parts: 3 };
        assert_eq!(
            shares.unwrap(),
            [share(0), Share::default(), share(1), share(2)]
        );
    }

    #[test]
    fn what_nobody_else_holds_is_written_by_its_holder() {
        let mut spread = Spread::default();
        let shares = spread.shares(PrimitiveType::F32, &[8, 1], &sharding(4, 1), &[0, 0, 0, 1]);
        assert_eq!(written(&shares.unwrap()), [0, 1, 2, 3]);
        let shares = spread.shares(PrimitiveType::F32, &[0, 1], &sharding(4, 1), &[0; 4]);
        assert!(shares.is_ok());
        assert!(
            spread
                .shares(PrimitiveType::F32, &[8], &sharding(4, 1), &[0; 4])
                .is_err()
        );
    }
}
