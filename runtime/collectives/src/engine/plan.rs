//! What one partition sends and takes in one collective. No data, no memory.

use super::reduce;
use super::step::{Reduce, Step, View};
use crate::call::{Code, Failure};
use crate::op::{Kind, Op};

/// Operands of an all-reduce of at most so many bytes are sent whole to all members, which reduce them each for itself:
/// one way instead of two.
pub(super) const SMALL: u64 = 32 << 10;

/// Sizes of the memory of a call.
pub(super) struct Sizes<'a> {
    pub(super) inputs: &'a [usize],
    pub(super) outputs: &'a [usize],
}

fn wrong(op: &Op, what: &str) -> Failure {
    Failure::new(
        Code::InvalidArgument,
        format!("{} {}: {what}", op.kind.name(), op.number),
    )
}

/// The steps of `op` for `partition`.
///
/// # Errors
///
/// [`Code::InvalidArgument`] if the memory is not what the operation says, or the operation not sound;
/// [`Code::Unimplemented`] for reductions that are not built.
pub(super) fn plan(op: &Op, partition: u32, sizes: &Sizes<'_>) -> Result<Vec<Step>, Failure> {
    let equal = |told: &mut dyn Iterator<Item = u64>, are: &[usize]| {
        told.map(usize::try_from)
            .eq(are.iter().map(|size| Ok(*size)))
    };
    if !equal(&mut op.operands.iter().map(|each| each.bytes), sizes.inputs)
        || !equal(&mut op.results.iter().copied(), sizes.outputs)
    {
        return Err(wrong(
            op,
            &format!(
                "operands of {:?} and results of {:?} bytes are not what the program was compiled for",
                sizes.inputs, sizes.outputs
            ),
        ));
    }
    if op.kind.communicates()
        && (sizes.inputs.is_empty() || sizes.inputs.len() != sizes.outputs.len())
    {
        return Err(wrong(op, "not one result for each operand"));
    }
    let group = op.groups.iter().find(|group| group.contains(&partition));
    let steps = match op.kind {
        Kind::PartitionId | Kind::ReplicaId => match sizes.outputs {
            [4] => vec![Step::Number {
                output: 0,
                value: number(op, partition)
                    .ok_or_else(|| wrong(op, "the partition is in no replica"))?,
            }],
            _ => return Err(wrong(op, "one result of four bytes is wanted")),
        },
        Kind::Permute => permute(op, partition, sizes)?,
        Kind::Broadcast => broadcast(op, partition, sizes, group),
        _ => {
            let group = group.ok_or_else(|| wrong(op, "the partition is in no group"))?;
            grouped(op, partition, sizes, group)?
        }
    };
    check(op, &steps, sizes)?;
    Ok(steps)
}

/// What a partition is told that asks for its own number, or for that of its replica.
fn number(op: &Op, partition: u32) -> Option<u32> {
    let of_replica = op.kind == Kind::ReplicaId;
    if op.groups.is_empty() {
        return Some(if of_replica { 0 } else { partition });
    }
    let place = |group: &Vec<u32>| group.iter().position(|each| *each == partition);
    let mut places = op.groups.iter().map(place).enumerate();
    let (replica, place) = places.find_map(|(replica, place)| Some((replica, place?)))?;
    u32::try_from(if of_replica { replica } else { place }).ok()
}

/// Every step lies within its memory. The sizes come from a program, which may be anybody's.
fn check(op: &Op, steps: &[Step], sizes: &Sizes<'_>) -> Result<(), Failure> {
    let input = |index: usize, view: &View| {
        sizes
            .inputs
            .get(index)
            .is_some_and(|bytes| view.fits(*bytes))
    };
    let output = |index: usize, view: &View| {
        sizes
            .outputs
            .get(index)
            .is_some_and(|bytes| view.fits(*bytes))
    };
    let sound = steps.iter().all(|step| match step {
        Step::Copy {
            input: index,
            from,
            output: to_index,
            to,
        } => input(*index, from) && output(*to_index, to) && from.len == to.len,
        Step::Zero { output } | Step::Number { output, .. } => *output < sizes.outputs.len(),
        Step::Send {
            input: index, from, ..
        } => input(*index, from),
        Step::Receive {
            output: index, to, ..
        } => output(*index, to),
        Step::Reduce(reduce) => {
            input(reduce.input, &reduce.from)
                && output(reduce.output, &View::whole(reduce.at, reduce.len))
                && reduce.from.len == reduce.len
        }
    });
    if sound {
        Ok(())
    } else {
        Err(wrong(op, "its sizes do not fit each other"))
    }
}

fn lane(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(u32::MAX)
}

fn copy(index: usize, len: usize) -> Step {
    Step::Copy {
        input: index,
        from: View::whole(0, len),
        output: index,
        to: View::whole(0, len),
    }
}

fn permute(op: &Op, partition: u32, sizes: &Sizes<'_>) -> Result<Vec<Step>, Failure> {
    let mut steps = Vec::new();
    for (index, len) in sizes.inputs.iter().copied().enumerate() {
        let view = View::whole(0, len);
        if sizes.outputs.get(index) != Some(&len) {
            return Err(wrong(op, "a result is not as large as its operand"));
        }
        let mut source = None;
        for pair in &op.groups {
            let [from, to] = pair.as_slice() else {
                return Err(wrong(op, "a pair that is none"));
            };
            if *to == partition {
                source = Some(*from);
            }
            if *from == partition && *to != partition {
                steps.push(Step::Send {
                    lane: lane(index),
                    target: *to,
                    input: index,
                    from: view,
                });
            }
        }
        steps.push(match source {
            None => Step::Zero { output: index },
            Some(source) if source == partition => copy(index, len),
            Some(source) => Step::Receive {
                lane: lane(index),
                source,
                output: index,
                to: view,
            },
        });
    }
    Ok(steps)
}

fn broadcast(op: &Op, partition: u32, sizes: &Sizes<'_>, group: Option<&Vec<u32>>) -> Vec<Step> {
    let mut steps = Vec::new();
    for (index, len) in sizes.inputs.iter().copied().enumerate() {
        let view = View::whole(0, len);
        match group.map(|group| (group, group[0])) {
            None => steps.push(Step::Zero { output: index }),
            Some((group, first)) if first == partition => {
                steps.push(copy(index, len));
                steps.extend(group[1..].iter().map(|target| Step::Send {
                    lane: lane(index),
                    target: *target,
                    input: index,
                    from: view,
                }));
            }
            Some((_, first)) => steps.push(Step::Receive {
                lane: lane(index),
                source: first,
                output: index,
                to: view,
            }),
        }
    }
    debug_assert!(op.kind == Kind::Broadcast, "no other is planned here");
    steps
}

fn grouped(
    op: &Op,
    partition: u32,
    sizes: &Sizes<'_>,
    group: &[u32],
) -> Result<Vec<Step>, Failure> {
    let members = group.len();
    let mine = group
        .iter()
        .position(|id| *id == partition)
        .unwrap_or_default();
    let mut steps = Vec::new();
    // Members take turns being the first to be sent to, so that not all send to the same one at once.
    let others = || (1..members).map(|step| (mine + step) % members);
    for (index, operand) in op.operands.iter().enumerate() {
        let len = sizes.inputs[index];
        let run = usize::try_from(operand.run).unwrap_or(usize::MAX);
        // Part `member` of an array that is taken apart along a dimension.
        let part = |member: usize, total: usize| -> Result<View, Failure> {
            if run == 0 || total == 0 {
                return Ok(View::whole(0, 0));
            }
            let stride = run.checked_mul(members);
            let start = run.checked_mul(member);
            match (stride, start) {
                (Some(stride), Some(start)) if total.is_multiple_of(members) => Ok(View {
                    start,
                    run,
                    stride,
                    len: total / members,
                }),
                _ => Err(wrong(op, "an array that does not split evenly")),
            }
        };
        match op.kind {
            Kind::AllGather => {
                let total = len.checked_mul(members);
                let total = total.ok_or_else(|| wrong(op, "a result larger than memory"))?;
                if sizes.outputs.get(index) != Some(&total) {
                    return Err(wrong(op, "a result that does not hold all operands"));
                }
                let from = View::whole(0, len);
                steps.push(Step::Copy {
                    input: index,
                    from,
                    output: index,
                    to: part(mine, total)?,
                });
                for member in others() {
                    steps.push(Step::Send {
                        lane: lane(index),
                        target: group[member],
                        input: index,
                        from,
                    });
                    steps.push(Step::Receive {
                        lane: lane(index),
                        source: group[member],
                        output: index,
                        to: part(member, total)?,
                    });
                }
            }
            Kind::AllToAllArray => {
                steps.push(Step::Copy {
                    input: index,
                    from: part(mine, len)?,
                    output: index,
                    to: part(mine, len)?,
                });
                for member in others() {
                    steps.push(Step::Send {
                        lane: lane(index),
                        target: group[member],
                        input: index,
                        from: part(member, len)?,
                    });
                    steps.push(Step::Receive {
                        lane: lane(index),
                        source: group[member],
                        output: index,
                        to: part(member, len)?,
                    });
                }
            }
            Kind::AllToAll => {
                if op.operands.len() != members {
                    return Err(wrong(op, "not one operand for each member"));
                }
                if index == mine {
                    steps.push(copy(index, len));
                    continue;
                }
                steps.push(Step::Send {
                    lane: 0,
                    target: group[index],
                    input: index,
                    from: View::whole(0, len),
                });
                steps.push(Step::Receive {
                    lane: 0,
                    source: group[index],
                    output: index,
                    to: View::whole(0, len),
                });
            }
            Kind::ReduceScatter => {
                for member in others() {
                    steps.push(Step::Send {
                        lane: lane(index),
                        target: group[member],
                        input: index,
                        from: part(member, len)?,
                    });
                }
                let from = part(mine, len)?;
                if sizes.outputs.get(index) != Some(&from.len) {
                    return Err(wrong(op, "a result that is not its part of the operand"));
                }
                reduce(
                    op,
                    &mut steps,
                    Reduce {
                        lane: lane(index),
                        input: index,
                        from,
                        output: index,
                        at: 0,
                        len: from.len,
                        element: operand.element,
                        members: group.to_vec(),
                        publish: None,
                    },
                )?;
            }
            _ => {
                if sizes.outputs.get(index) != Some(&len) {
                    return Err(wrong(op, "a result is not as large as its operand"));
                }
                all_reduce(op, &mut steps, index, mine, len, group)?;
            }
        }
    }
    Ok(steps)
}

fn reduce(op: &Op, steps: &mut Vec<Step>, step: Reduce) -> Result<(), Failure> {
    let reduction = op
        .reduction
        .ok_or_else(|| wrong(op, "how to reduce is not said"))?;
    reduce::fold(reduction, step.element)?;
    let width = reduce::width(step.element).unwrap_or(1);
    if !step.len.is_multiple_of(width) {
        return Err(wrong(op, "a part of an element"));
    }
    if step.len == 0 {
        return Ok(());
    }
    steps.push(if step.members.len() == 1 {
        Step::Copy {
            input: step.input,
            from: step.from,
            output: step.output,
            to: View::whole(step.at, step.len),
        }
    } else {
        Step::Reduce(step)
    });
    Ok(())
}

fn all_reduce(
    op: &Op,
    steps: &mut Vec<Step>,
    index: usize,
    mine: usize,
    len: usize,
    group: &[u32],
) -> Result<(), Failure> {
    let members = group.len();
    let element = op.operands[index].element;
    let others = || (1..members).map(|step| (mine + step) % members);
    let (scatter, gather) = (lane(2 * index), lane(2 * index + 1));
    let mut one = Reduce {
        lane: scatter,
        input: index,
        from: View::whole(0, len),
        output: index,
        at: 0,
        len,
        element,
        members: group.to_vec(),
        publish: None,
    };
    if len as u64 <= SMALL || members == 1 {
        steps.extend(others().map(|member| Step::Send {
            lane: scatter,
            target: group[member],
            input: index,
            from: View::whole(0, len),
        }));
        return reduce(op, steps, one);
    }
    let width = reduce::width(element).unwrap_or(1);
    let count = (len / width) as u128;
    let bound = |member: usize| -> usize {
        // Less than `len`.
        usize::try_from(count * member as u128 / members as u128).unwrap_or_default() * width
    };
    let segment = |member: usize| View::whole(bound(member), bound(member + 1) - bound(member));
    for member in others() {
        steps.push(Step::Send {
            lane: scatter,
            target: group[member],
            input: index,
            from: segment(member),
        });
        steps.push(Step::Receive {
            lane: gather,
            source: group[member],
            output: index,
            to: segment(member),
        });
    }
    one.from = segment(mine);
    one.at = one.from.start;
    one.len = one.from.len;
    one.publish = Some(gather);
    reduce(op, steps, one)
}
