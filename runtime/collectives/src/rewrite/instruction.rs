//! One instruction: what it says, and the custom call that takes its place.

use super::Refusal;
use super::groups::{Grid, Mode, Written, distinct};
use super::shape::{Array, arrays};
use super::wire::{fields, put_bytes, put_int};
use crate::op::{Kind, MOST_BUFFERS, Op, Operand, Reduction, TARGET};
use std::collections::HashMap;

/// Fields that mean something for a collective only, or that the custom call has otherwise.
const DROPPED: &[u64] = &[
    2,  // opcode
    14, // dimensions
    26, // channel_id
    28, // custom_call_target
    38, // called_computation_ids: the reducer
    43, // backend_config
    45, // all_reduce_id
    49, // replica_groups
    52, // source_target_pairs
    56, // constrain_layout, which a custom call has with shapes of operands only
    57, // operand_shapes_with_layout
    65, // custom_call_has_side_effect
    71, // use_global_device_ids
    74, // output_operand_aliasing
    76, // custom_call_schedule
    77, // custom_call_api_version
    87, // collective_device_list
    92, // iota_collective_device_list
    93, // mesh_axes_replica_group_list
    99, // backend_config_payload
];

/// `xla.CustomCallApiVersion.API_VERSION_TYPED_FFI`.
const TYPED_FFI: u64 = 4;

/// What is looked at of every instruction.
pub(super) struct Instruction<'a> {
    message: &'a [u8],
    pub(super) id: i64,
    pub(super) opcode: &'a str,
    pub(super) shape: &'a [u8],
    operands: Vec<i64>,
    pub(super) called: Vec<i64>,
    parameter: i64,
}

impl<'a> Instruction<'a> {
    pub(super) fn new(message: &'a [u8]) -> Result<Self, Refusal> {
        let mut instruction = Self {
            message,
            id: 0,
            opcode: "",
            shape: &[],
            operands: Vec::new(),
            called: Vec::new(),
            parameter: 0,
        };
        for field in fields(message) {
            let field = field?;
            match field.number {
                2 => instruction.opcode = field.text()?,
                3 => instruction.shape = field.bytes()?,
                9 => instruction.parameter = field.int()?,
                35 => instruction.id = field.int()?,
                36 => field.ints(&mut instruction.operands)?,
                38 => field.ints(&mut instruction.called)?,
                _ => {}
            }
        }
        Ok(instruction)
    }

    pub(super) fn kind(&self) -> Option<Kind> {
        Kind::of_opcode(self.opcode)
    }
}

/// What is looked at of a collective besides.
pub(super) struct Parts<'a> {
    instruction: &'a Instruction<'a>,
    kind: Kind,
    dims: Vec<i64>,
    channel: bool,
    global: bool,
    groups: Written<'a>,
    pairs: Vec<Vec<u32>>,
}

impl<'a> Parts<'a> {
    pub(super) fn new(instruction: &'a Instruction<'a>, kind: Kind) -> Result<Self, Refusal> {
        let mut parts = Self {
            instruction,
            kind,
            dims: Vec::new(),
            channel: false,
            global: false,
            groups: Written::default(),
            pairs: Vec::new(),
        };
        for field in fields(instruction.message) {
            let field = field?;
            match field.number {
                14 => field.ints(&mut parts.dims)?,
                26 => parts.channel = field.int()? > 0,
                71 => parts.global = field.int()? != 0,
                52 => parts.pairs.push(pair(field.bytes()?)?),
                100 if field.int()? != 0 => {
                    return Err(Refusal::Opcode(format!(
                        "{} from a member that the program computes",
                        instruction.opcode
                    )));
                }
                _ => parts.groups.take(&field)?,
            }
        }
        Ok(parts)
    }

    fn name(&self) -> String {
        self.instruction.opcode.to_owned()
    }

    fn misfit(&self) -> Refusal {
        Refusal::Operands(self.name())
    }

    /// What the instruction's groups, or its pairs, are numbers of.
    fn mode(&self) -> Result<Mode, Refusal> {
        let says = matches!(
            self.kind,
            Kind::AllReduce | Kind::AllGather | Kind::ReduceScatter
        );
        match (self.channel, self.global) {
            (false, false) => Ok(Mode::Replicas),
            (false, true) => Err(Refusal::Groups("of which it is not said what they number")),
            (true, true) => Ok(Mode::Flat),
            (true, false) if says => Ok(Mode::Whole),
            (true, false) => Ok(Mode::Partitions),
        }
    }

    /// The partitions that act together. Of what does not communicate, those of each replica.
    fn members(&self, grid: Grid) -> Result<Vec<Vec<u32>>, Refusal> {
        if !self.kind.communicates() {
            return Ok(grid.by_replica());
        }
        let mode = self.mode()?;
        let limit = grid.limit(mode);
        if self.kind == Kind::Permute {
            distinct(self.pairs.iter().map(|pair| pair[0]), limit)?;
            distinct(self.pairs.iter().map(|pair| pair[1]), limit)?;
            return Ok(grid.expand(self.pairs.clone(), mode));
        }
        let mut groups = self.groups.groups(limit)?;
        if groups.is_empty() {
            groups = vec![(0..limit).collect()];
        } else if self.kind != Kind::Broadcast
            && groups.iter().map(Vec::len).sum::<usize>() != limit as usize
        {
            return Err(Refusal::Groups("that leave partitions out"));
        }
        Ok(grid.expand(groups, mode))
    }

    /// The collective, with `shapes` being those of the instructions around it.
    pub(super) fn op(
        &self,
        number: u32,
        shapes: &HashMap<i64, &[u8]>,
        reducer: Option<(i64, &[Instruction<'_>])>,
        grid: Grid,
    ) -> Result<Op, Refusal> {
        let groups = self.members(grid)?;
        if self.instruction.operands.len() > MOST_BUFFERS {
            return Err(self.misfit());
        }
        let operands = self
            .instruction
            .operands
            .iter()
            .map(|id| {
                let shape = shapes.get(id).ok_or_else(|| self.misfit())?;
                match arrays(shape)?.as_slice() {
                    [array] => Ok(array.clone()),
                    _ => Err(Refusal::Shape("that is no array")),
                }
            })
            .collect::<Result<Vec<Array>, Refusal>>()?;
        let results = arrays(self.instruction.shape)?;
        let size = groups.first().map_or(1, Vec::len);
        let even = groups.iter().all(|group| group.len() == size);
        let mut kind = self.kind;
        if kind == Kind::AllToAll && operands.len() == 1 && results.len() == 1 && size != 1 {
            kind = Kind::AllToAllArray;
        }
        if !matches!(kind, Kind::AllReduce | Kind::Broadcast) && !even {
            return Err(Refusal::Groups("of different sizes"));
        }
        let reduction = if kind.reduces() {
            let found = reducer.and_then(|(root, instructions)| reduction(root, instructions));
            Some(found.ok_or_else(|| Refusal::Reducer(self.name()))?)
        } else {
            None
        };
        let runs = self.runs(kind, &operands, &results, size)?;
        Ok(Op {
            number,
            kind,
            groups,
            reduction,
            operands: operands
                .iter()
                .zip(runs)
                .map(|(array, run)| {
                    if kind.reduces() && array.is_packed() {
                        return Err(Refusal::Shape("of packed elements to be reduced"));
                    }
                    Ok(Operand {
                        bytes: array.bytes()?,
                        run,
                        element: array.element,
                    })
                })
                .collect::<Result<_, _>>()?,
            results: results.iter().map(Array::bytes).collect::<Result<_, _>>()?,
        })
    }

    /// What of each operand lies together for a member; checks that operands and results fit.
    fn runs(
        &self,
        kind: Kind,
        operands: &[Array],
        results: &[Array],
        size: usize,
    ) -> Result<Vec<u64>, Refusal> {
        let misfit = || self.misfit();
        let members = u64::try_from(size).map_err(|_| misfit())?;
        if !kind.communicates() {
            let fits = operands.is_empty() && matches!(results, [one] if one.bytes() == Ok(4));
            return fits.then(Vec::new).ok_or_else(misfit);
        }
        if operands.is_empty() || operands.len() != results.len() {
            return Err(misfit());
        }
        let dim = || match self.dims.as_slice() {
            [dim] => usize::try_from(*dim).map_err(|_| misfit()),
            _ => Err(misfit()),
        };
        let pairs = operands.iter().zip(results);
        match kind {
            Kind::AllGather => {
                let dim = dim()?;
                pairs
                    .map(|(operand, result)| {
                        if !result.is_times(operand, dim, members) {
                            return Err(misfit());
                        }
                        operand.run(dim, 1)
                    })
                    .collect()
            }
            Kind::ReduceScatter => {
                let dim = dim()?;
                pairs
                    .map(|(operand, result)| {
                        if !operand.is_times(result, dim, members) {
                            return Err(misfit());
                        }
                        result.run(dim, 1)
                    })
                    .collect()
            }
            Kind::AllToAllArray => {
                let dim = dim()?;
                pairs
                    .map(|(operand, result)| {
                        if operand != result {
                            return Err(misfit());
                        }
                        operand.run(dim, members)
                    })
                    .collect()
            }
            _ => {
                let fits = pairs.clone().all(|(operand, result)| operand == result)
                    && (kind != Kind::AllToAll
                        || operands.len() == size
                            && operands.windows(2).all(|pair| pair[0] == pair[1]));
                fits.then(|| vec![0; operands.len()]).ok_or_else(misfit)
            }
        }
    }

    /// The instruction that takes its place.
    pub(super) fn custom_call(&self, op: &Op) -> Result<Vec<u8>, Refusal> {
        let mut out = Vec::with_capacity(self.instruction.message.len());
        for field in fields(self.instruction.message) {
            let field = field?;
            if !DROPPED.contains(&field.number) {
                out.extend_from_slice(field.raw);
            }
        }
        put_bytes(&mut out, 2, b"custom-call");
        put_bytes(&mut out, 28, TARGET.as_bytes());
        put_bytes(&mut out, 43, op.attributes().as_bytes());
        if op.kind.communicates() {
            put_int(&mut out, 65, 1);
        }
        put_int(&mut out, 77, TYPED_FFI);
        Ok(out)
    }
}

fn pair(message: &[u8]) -> Result<Vec<u32>, Refusal> {
    let mut pair = [0, 0];
    for field in fields(message) {
        let field = field?;
        match field.number {
            1 => pair[0] = field.int()?,
            2 => pair[1] = field.int()?,
            _ => {}
        }
    }
    pair.iter()
        .map(|id| {
            u32::try_from(*id)
                .map_err(|_| Refusal::Groups("of partitions that the program has not"))
        })
        .collect()
}

/// What a reducer does, if it is one operation on its two parameters.
fn reduction(root: i64, instructions: &[Instruction<'_>]) -> Option<Reduction> {
    let find = |id: i64| instructions.iter().find(|each| each.id == id);
    let root = find(root)?;
    let reduction = Reduction::of_opcode(root.opcode)?;
    let [first, second] = root.operands.as_slice() else {
        return None;
    };
    let (first, second) = (find(*first)?, find(*second)?);
    let parameters = first.opcode == "parameter"
        && second.opcode == "parameter"
        && first.parameter.checked_add(second.parameter) == Some(1)
        && first.parameter != second.parameter
        && (0..2).contains(&first.parameter);
    parameters.then_some(reduction)
}
