//! Where the devices of a recorded program lie: in one worker, or in several.

use std::collections::HashMap;

use waystation_proto::waystation::recording::Recording;

/// The ordinals of a program's devices among those of the one worker that has them all, by global id; `None` where several
/// workers have them.
///
/// `workers` is as of [`super::WarmerConfig::workers`], and `each` the devices of one worker. Global ids count the devices
/// worker by worker.
///
/// # Errors
/// Why no such cluster can run the program.
pub(super) fn ordinals(
    recording: &Recording,
    workers: Option<u32>,
    each: usize,
) -> Result<Option<HashMap<i32, u32>>, String> {
    let ids = &recording.device_ids;
    let as_recorded = (&recording.device_ordinals, &recording.workers);
    let placed;
    let (ordinals, owners) = match workers {
        None => as_recorded,
        Some(workers) => {
            placed = spread(ids, workers, each)?;
            (&placed.0, &placed.1)
        }
    };
    if let Some(&missing) = ordinals
        .iter()
        .find(|&&ordinal| usize::try_from(ordinal).is_ok_and(|at| at >= each))
    {
        return Err(format!(
            "it is for device {missing} of a worker, and here are {each}: give --devices as many as a worker has"
        ));
    }
    let one = owners.iter().all(|owner| Some(owner) == owners.first());
    if ids.len() != ordinals.len() || !(owners.is_empty() || owners.len() == ids.len()) {
        return Err("the recording contradicts itself about its devices".to_owned());
    }
    Ok(one.then(|| ids.iter().copied().zip(ordinals.iter().copied()).collect()))
}

/// Ordinals and workers of the devices, in a cluster of so many workers with so many devices each.
fn spread(ids: &[i32], workers: u32, each: usize) -> Result<(Vec<u32>, Vec<u32>), String> {
    let each = u32::try_from(each).unwrap_or(u32::MAX).max(1);
    let all = u64::from(workers) * u64::from(each);
    let place = |&id: &i32| {
        let id = u32::try_from(id).ok().filter(|&id| u64::from(id) < all);
        id.map(|id| (id % each, id / each))
    };
    let placed: Option<_> = ids.iter().map(place).collect();
    placed.ok_or_else(|| {
        let last = ids.iter().max().copied().unwrap_or_default();
        format!("it is for device {last}, and {workers} workers of {each} devices have {all}: give more --workers")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recording(ids: &[i32], ordinals: &[u32], workers: &[u32]) -> Recording {
        Recording {
            device_ids: ids.to_vec(),
            device_ordinals: ordinals.to_vec(),
            workers: workers.to_vec(),
            ..Recording::default()
        }
    }

    #[test]
    fn a_program_is_spread_as_it_was_recorded() {
        let one = ordinals(&recording(&[9, 8], &[1, 0], &[]), None, 2);
        assert_eq!(one, Ok(Some(HashMap::from([(9, 1), (8, 0)]))));
        let two = ordinals(&recording(&[1, 2], &[1, 0], &[0, 1]), None, 2);
        assert_eq!(two, Ok(None));
        for wrong in [
            recording(&[1, 2], &[1], &[]),
            recording(&[1, 2], &[1, 0], &[0]),
        ] {
            let error = ordinals(&wrong, None, 2).unwrap_err();
            assert!(error.contains("contradicts itself"), "{error}");
        }
        let error = ordinals(&recording(&[1, 2], &[1, 2], &[]), None, 2).unwrap_err();
        assert!(error.contains("--devices"), "{error}");
    }

    #[test]
    fn a_cluster_of_another_size_spreads_it_otherwise() {
        let alone = recording(&[0, 1, 2, 3], &[0, 1, 2, 3], &[]);
        assert_eq!(ordinals(&alone, Some(2), 2), Ok(None));
        let four = ordinals(&alone, Some(1), 4).unwrap().unwrap();
        assert_eq!(four[&3], 3);
        let spread = recording(&[6, 7], &[2, 0], &[0, 1]);
        let second = ordinals(&spread, Some(2), 4).unwrap();
        assert_eq!(second, Some(HashMap::from([(6, 2), (7, 3)])));
        let error = ordinals(&spread, Some(3), 2).unwrap_err();
        assert!(
            error.contains("device 7") && error.contains("--workers"),
            "{error}"
        );
    }
}
