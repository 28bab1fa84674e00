//! RemapArrays: new arrays of the shards of old ones. References only, nothing moves.

use std::sync::Arc;

use waystation_proto::xla::ifrt::{
    RemapPlanProto,
    proto::ArrayCopySemantics,
    proxy::{RemapArraysRequest, RemapArraysResponse, ifrt_response::Response},
    remap_plan_proto::MappingProto,
};

use super::{Handled, Outcome, Session, UserContext, arrays::result_handles};
use crate::{
    array::{Array, Shard},
    convert,
    status::{self, Status},
};

/// Shards of a result, filled one by one.
type Slots = Vec<Option<Arc<Shard>>>;

impl Session {
    pub(super) fn remap(&mut self, context: &UserContext, request: RemapArraysRequest) -> Handled {
        let plan = request.plan.clone().unwrap_or_default();
        let handles = result_handles(
            &request.result_handles,
            plan.output_specs.len(),
            "RemapArrays",
        )?;
        let inputs = request
            .array_handles
            .iter()
            .map(|&handle| self.array(context, handle).cloned())
            .collect::<Result<Vec<_>, _>>()?;
        let outputs = remap(&plan, &inputs)?;
        let mut array_handles = Vec::with_capacity(outputs.len());
        for (array, handle) in outputs.into_iter().zip(handles) {
            array_handles.push(self.insert(handle, Ok(array))?);
        }
        if request.copy_semantics() == ArrayCopySemantics::DonateInput {
            self.donate(&request.array_handles);
        }
        Ok(Outcome::Now(Response::RemapArraysResponse(
            RemapArraysResponse { array_handles },
        )))
    }
}

/// Serialization versions before 6 send intervals of shard positions (and from 3 on both forms); 6 sends only the devices
/// whose shards go from an input to an output.
fn remap(plan: &RemapPlanProto, inputs: &[Array]) -> Result<Vec<Array>, Status> {
    let shardings = plan
        .output_specs
        .iter()
        .map(|spec| convert::sharding(spec.sharding.as_ref()))
        .collect::<Result<Vec<_>, _>>()?;
    let mut outputs: Vec<Slots> = shardings
        .iter()
        .map(|s| vec![None; s.devices.len()])
        .collect();
    if plan.input_devices_for_output.is_empty() {
        for mapping in &plan.mappings {
            map_intervals(mapping, inputs, &mut outputs)?;
        }
    } else {
        for output in &plan.input_devices_for_output {
            let out = index(output.out_array, outputs.len(), "output")?;
            for from in &output.input_devices {
                let input = &inputs[index(from.in_array, inputs.len(), "input")?];
                for device in &from.device_list.clone().unwrap_or_default().device_ids {
                    let shard = input.shards.iter().find(|shard| shard.device == *device).ok_or_else(|| {
                        status::invalid_argument(format!("the remap plan takes a shard of device {device}, where its input has none"))
                    })?;
                    let position = shardings[out].devices.iter().position(|d| d == device).ok_or_else(|| {
                        status::invalid_argument(format!("the remap plan gives device {device} to an output that is not on it"))
                    })?;
                    place(&mut outputs[out], position, shard)?;
                }
            }
        }
    }
    let mut arrays = Vec::with_capacity(outputs.len());
    for ((slots, sharding), spec) in outputs.into_iter().zip(shardings).zip(&plan.output_specs) {
        let shards = slots
            .into_iter()
            .zip(&sharding.devices)
            .map(|(slot, device)| match slot {
                Some(shard) if shard.device == *device => Ok(shard),
                Some(shard) => Err(status::invalid_argument(format!(
                    "the remap plan puts a shard of device {} where device {device} belongs",
                    shard.device
                ))),
                None => Err(status::invalid_argument(format!(
                    "the remap plan leaves device {device} without a shard"
                ))),
            })
            .collect::<Result<_, _>>()?;
        let dtype = convert::element_type(spec.dtype.as_ref())?;
        arrays.push(Array::new(
            dtype,
            convert::dims(spec.shape.as_ref())?,
            sharding,
            shards,
        ));
    }
    Ok(arrays)
}

fn map_intervals(
    mapping: &MappingProto,
    inputs: &[Array],
    outputs: &mut [Slots],
) -> Result<(), Status> {
    let input = &inputs[index(mapping.in_array, inputs.len(), "input")?];
    let out = index(mapping.out_array, outputs.len(), "output")?;
    let from = positions(
        &mapping.from_start,
        &mapping.from_end,
        &mapping.from_step,
        input.shards.len(),
    )?;
    let to = positions(
        &mapping.to_start,
        &mapping.to_end,
        &mapping.to_step,
        outputs[out].len(),
    )?;
    if from.len() != to.len() {
        return Err(status::invalid_argument(
            "the remap plan's intervals differ in length",
        ));
    }
    for (from, to) in from.into_iter().zip(to) {
        place(&mut outputs[out], to, &input.shards[from])?;
    }
    Ok(())
}

/// The positions of half-open, stepped intervals, all below `len`.
fn positions(start: &[i64], end: &[i64], step: &[i64], len: usize) -> Result<Vec<usize>, Status> {
    let bad = || {
        status::invalid_argument(format!(
            "the remap plan has an interval outside an array of {len} shards"
        ))
    };
    if start.len() != end.len() || start.len() != step.len() {
        return Err(bad());
    }
    let mut positions = Vec::new();
    for ((&start, &end), &step) in start.iter().zip(end).zip(step) {
        let (Ok(start), Ok(end), Ok(step)) = (
            usize::try_from(start),
            usize::try_from(end),
            usize::try_from(step),
        ) else {
            return Err(bad());
        };
        if step == 0 || end > len || positions.len() > len {
            return Err(bad());
        }
        positions.extend((start..end).step_by(step));
    }
    Ok(positions)
}

fn index(index: i32, len: usize, what: &str) -> Result<usize, Status> {
    usize::try_from(index)
        .ok()
        .filter(|&i| i < len)
        .ok_or_else(|| {
            status::invalid_argument(format!("the remap plan names {what} {index} of {len}"))
        })
}

fn place(slots: &mut Slots, position: usize, shard: &Arc<Shard>) -> Result<(), Status> {
    if slots[position].replace(Arc::clone(shard)).is_some() {
        return Err(status::invalid_argument(format!(
            "the remap plan fills shard {position} twice"
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::positions;

    proptest! {
        #[test]
        fn positions_stay_within_the_array(
            intervals in prop::collection::vec(
                prop_oneof![
                    (0..9i64, 0..9i64, 0..4i64),
                    (any::<i64>(), any::<i64>(), any::<i64>()),
                ],
                0..9,
            ),
            len in 0..9usize,
        ) {
            let (mut start, mut end, mut step) = (Vec::new(), Vec::new(), Vec::new());
            for (from, to, by) in intervals {
                start.push(from);
                end.push(to);
                step.push(by);
            }
            if let Ok(positions) = positions(&start, &end, &step, len) {
                prop_assert!(positions.iter().all(|&position| position < len));
                prop_assert!(positions.len() <= 2 * len);
            }
        }
    }

    #[test]
    fn intervals_are_half_open_stepped_and_bounded() {
        assert_eq!(
            positions(&[0, 5], &[4, 6], &[2, 1], 8).expect("fits"),
            vec![0, 2, 5]
        );
        assert!(positions(&[0], &[9], &[1], 8).is_err());
        assert!(positions(&[0], &[8], &[0], 8).is_err());
        assert!(positions(&[-1], &[8], &[1], 8).is_err());
        assert!(positions(&[0, 1], &[8], &[1], 8).is_err());
    }
}
