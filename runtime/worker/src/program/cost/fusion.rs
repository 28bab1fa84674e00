//! What goes in and out of a fusion. Inside, values do not touch memory.

use std::collections::HashMap;

use waystation_proto::xla::{HloInstructionProto, PrimitiveType, ShapeProto};

use super::{
    Error, View,
    shape::{elements, operand_bytes, result_bytes},
    shape_of,
};

/// Constants of more elements are read from memory, others are part of the code.
const IMMEDIATE_ELEMENTS: u64 = 1;

/// The bytes that a computation moves when it is a fusion's.
#[derive(Debug)]
pub(super) struct Boundary {
    /// Of each parameter, by its number.
    read: HashMap<i64, f64>,
    constants: f64,
    written: f64,
}

impl Boundary {
    pub(super) fn of(view: &View<'_>) -> Result<Boundary, Error> {
        let mut constants = 0.0;
        for instruction in &view.computation.instructions {
            let shape = shape_of(instruction)?;
            if instruction.opcode == "constant" && elements(shape)? > IMMEDIATE_ELEMENTS {
                constants += result_bytes(shape)?;
            }
        }
        Ok(Boundary {
            read: read(view)?,
            constants,
            written: written(view)?,
        })
    }

    pub(super) fn bytes(&self) -> f64 {
        let read: f64 = self.read.values().sum();
        self.written + self.constants + read
    }
}

/// The results; of one that is updated in place only what is updated.
fn written(view: &View<'_>) -> Result<f64, Error> {
    let of_one = |instruction: &HloInstructionProto| match instruction.opcode.as_str() {
        "dynamic-update-slice" => operand_bytes(view.operand_shape(instruction, 1)?),
        _ => result_bytes(shape_of(instruction)?),
    };
    let root = view
        .instructions
        .get(&view.computation.root_id)
        .ok_or(Error::Incomplete("a computation's root"))?;
    if root.opcode == "tuple" {
        let parts = root.operand_ids.iter();
        return parts.map(|&id| of_one(view.instruction(id)?)).sum();
    }
    of_one(root)
}

/// An array that comes from outside: a parameter, or a part of one.
struct Outside<'a> {
    parameter: i64,
    shape: &'a ShapeProto,
    /// Whether a use was counted that reads all of it: others share the read.
    whole: bool,
    /// The instruction that used it last.
    user: Option<i64>,
}

/// What is read of each parameter, by all that use it.
fn read(view: &View<'_>) -> Result<HashMap<i64, f64>, Error> {
    let mut outside = HashMap::new();
    let mut read: HashMap<i64, f64> = HashMap::new();
    // Instructions come after their operands.
    for instruction in &view.computation.instructions {
        let from = |parameter| {
            let shape = shape_of(instruction)?;
            Ok(Outside {
                parameter,
                shape,
                whole: false,
                user: None,
            })
        };
        if instruction.opcode == "parameter" {
            outside.insert(instruction.id, from(instruction.parameter_number)?);
            continue;
        }
        for (index, id) in instruction.operand_ids.iter().enumerate() {
            let Some(value) = outside.get_mut(id) else {
                continue;
            };
            let parameter = value.parameter;
            let first_use = value.user.replace(instruction.id) != Some(instruction.id);
            if value.shape.element_type() == PrimitiveType::Tuple {
                if instruction.opcode == "get-tuple-element" {
                    outside.insert(instruction.id, from(parameter)?);
                }
                continue;
            }
            let bytes = match instruction.opcode.as_str() {
                // Each place it is given to reads for itself.
                "fusion" => {
                    let place = i64::try_from(index).map_err(|_| Error::Size)?;
                    let fused = &view.called(instruction, 0)?.boundary;
                    fused.read.get(&place).copied().unwrap_or(0.0)
                }
                _ if !first_use => 0.0,
                "slice" => result_bytes(shape_of(instruction)?)?,
                "dynamic-slice" if index == 0 => result_bytes(shape_of(instruction)?)?,
                // Updated in place.
                "dynamic-update-slice" if index == 0 => 0.0,
                "broadcast" | "reshape" => result_bytes(value.shape)?,
                _ if value.whole => 0.0,
                _ => {
                    value.whole = true;
                    result_bytes(value.shape)?
                }
            };
            *read.entry(parameter).or_default() += bytes;
        }
    }
    Ok(read)
}
