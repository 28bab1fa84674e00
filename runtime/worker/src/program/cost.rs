//! What one execution of a compiled program costs on each device, counted from the optimized module: for plugins that do not
//! say it themselves (PJRT's cost analysis is optional).
//!
//! The numbers mean what XLA's own analysis (`HloCostAnalysis`) means by them, and equal its numbers on programs of dots,
//! convolutions, elementwise ops and reductions. A loop's body and condition count once, whatever the number of rounds;
//! of a conditional's branches each number's largest counts; a fusion moves only what goes in and out of it. Ops that are
//! not known here move their operands and results and compute nothing.
//!
//! Ours differ on purpose or for simplicity where
//! - custom calls count their bytes and no flops: XLA counts -1 of each, for "unknown", which makes the sums wrong;
//! - sums are doubles, where XLA adds up floats;
//! - a windowed reduction that only spreads a whole reduction out again counts every window's;
//! - a value that a fusion inside a fusion reads counts as that fusion reads it, whoever uses the result; a gather or
//!   scatter in a custom fusion counts as in any other;
//! - ragged dots count no flops. CPU programs have none left when they are compiled.

mod convolution;
mod fusion;
mod shape;

use std::collections::{BTreeMap, HashMap};

use waystation_proto::xla::{HloComputationProto, HloInstructionProto, HloModuleProto, ShapeProto};

use fusion::Boundary;
use shape::{
    all_elements, count, elements, elements_of_first, operand_bytes, product, result_bytes,
    table_bytes,
};

/// Why a module's cost cannot be counted.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    /// What an instruction needs is not there, or comes after it.
    #[error("the module lacks {0}")]
    Incomplete(&'static str),
    /// A shape has a negative size, or a count does not fit.
    #[error("the module has sizes that cannot be counted")]
    Size,
}

/// The costs of a module's execution, by XLA's names. Names of what it has none of are left out, as XLA does.
///
/// # Errors
/// When the module is damaged or its sizes do not make sense.
pub(super) fn of(module: &HloModuleProto) -> Result<BTreeMap<String, f64>, Error> {
    let mut known = HashMap::with_capacity(module.computations.len());
    // Modules list computations after those that they call: one pass does, without recursion.
    for computation in &module.computations {
        let counted = Counted::of(computation, &known)?;
        known.insert(computation.id, counted);
    }
    let entry = known
        .get(&module.entry_computation_id)
        .ok_or(Error::Incomplete("its entry computation"))?
        .cost;
    let costs = [
        ("flops", entry.flops),
        ("transcendentals", entry.transcendentals),
        ("bytes accessed", entry.bytes),
    ];
    if costs.iter().any(|(_, number)| !number.is_finite()) {
        return Err(Error::Size);
    }
    let some = costs.into_iter().filter(|(_, number)| *number != 0.0);
    Ok(some
        .map(|(name, number)| (name.to_owned(), number))
        .collect())
}

/// What an instruction or a computation costs.
#[derive(Debug, Clone, Copy, Default)]
struct Cost {
    flops: f64,
    transcendentals: f64,
    bytes: f64,
}

impl Cost {
    fn plus(self, other: Cost) -> Cost {
        Cost {
            flops: self.flops + other.flops,
            transcendentals: self.transcendentals + other.transcendentals,
            bytes: self.bytes + other.bytes,
        }
    }

    fn max(self, other: Cost) -> Cost {
        Cost {
            flops: self.flops.max(other.flops),
            transcendentals: self.transcendentals.max(other.transcendentals),
            bytes: self.bytes.max(other.bytes),
        }
    }

    /// `body` applied so many times to values that are at hand: it moves nothing itself.
    fn apply(self, body: Cost, times: f64) -> Cost {
        Cost {
            flops: self.flops + body.flops * times,
            transcendentals: self.transcendentals + body.transcendentals * times,
            bytes: self.bytes,
        }
    }
}

/// A computation, counted.
#[derive(Debug)]
struct Counted {
    cost: Cost,
    /// What it moves when it is a fusion's.
    boundary: Boundary,
}

type Known = HashMap<i64, Counted>;

impl Counted {
    fn of(computation: &HloComputationProto, known: &Known) -> Result<Counted, Error> {
        let view = View::of(computation, known);
        let mut cost = Cost::default();
        for instruction in &computation.instructions {
            cost = cost.plus(view.cost(instruction)?);
        }
        Ok(Counted {
            cost,
            boundary: Boundary::of(&view)?,
        })
    }
}

/// A computation whose instructions can be found.
struct View<'a> {
    computation: &'a HloComputationProto,
    instructions: HashMap<i64, &'a HloInstructionProto>,
    known: &'a Known,
}

impl<'a> View<'a> {
    fn of(computation: &'a HloComputationProto, known: &'a Known) -> View<'a> {
        let by_id = |instruction: &'a HloInstructionProto| (instruction.id, instruction);
        View {
            computation,
            instructions: computation.instructions.iter().map(by_id).collect(),
            known,
        }
    }

    fn instruction(&self, id: i64) -> Result<&'a HloInstructionProto, Error> {
        self.instructions
            .get(&id)
            .copied()
            .ok_or(Error::Incomplete("an instruction's operand"))
    }

    fn operand(
        &self,
        instruction: &HloInstructionProto,
        index: usize,
    ) -> Result<&'a HloInstructionProto, Error> {
        let id = instruction.operand_ids.get(index);
        self.instruction(*id.ok_or(Error::Incomplete("an instruction's operand"))?)
    }

    fn operand_shape(
        &self,
        instruction: &HloInstructionProto,
        index: usize,
    ) -> Result<&'a ShapeProto, Error> {
        shape_of(self.operand(instruction, index)?)
    }

    fn called(
        &self,
        instruction: &HloInstructionProto,
        index: usize,
    ) -> Result<&'a Counted, Error> {
        instruction
            .called_computation_ids
            .get(index)
            .and_then(|id| self.known.get(id))
            .ok_or(Error::Incomplete("a computation that is called"))
    }

    /// The costs of all computations that an instruction calls.
    fn all_called(&self, instruction: &HloInstructionProto) -> Result<Vec<Cost>, Error> {
        (0..instruction.called_computation_ids.len())
            .map(|index| Ok(self.called(instruction, index)?.cost))
            .collect()
    }

    /// Operands and results, each once: what most instructions move.
    fn moved(&self, instruction: &HloInstructionProto) -> Result<f64, Error> {
        let operands = (0..instruction.operand_ids.len())
            .map(|index| operand_bytes(self.operand_shape(instruction, index)?));
        Ok(result_bytes(shape_of(instruction)?)? + operands.sum::<Result<f64, Error>>()?)
    }

    fn cost(&self, instruction: &HloInstructionProto) -> Result<Cost, Error> {
        let opcode = instruction.opcode.as_str();
        let shape = shape_of(instruction)?;
        let result = || result_bytes(shape);
        let operand = |index| self.operand_shape(instruction, index);
        // Ops whose costs are those of others, or that move less than their operands and results.
        let moves = |bytes| Cost {
            bytes,
            ..Cost::default()
        };
        let cost = match opcode {
            "parameter" | "constant" | "get-tuple-element" | "bitcast" | "after-all"
            | "add-dependency" | "domain" => return Ok(Cost::default()),
            "transpose" if self.is_bitcast(instruction)? => return Ok(Cost::default()),
            "tuple" => return Ok(moves(table_bytes(shape.tuple_shapes.len())?)),
            "call" | "async-start" => return Ok(self.called(instruction, 0)?.cost),
            "while" => {
                let parts = self.all_called(instruction)?;
                return Ok(parts.into_iter().fold(Cost::default(), Cost::plus));
            }
            "conditional" => {
                let branches = self.all_called(instruction)?;
                return Ok(branches.into_iter().fold(Cost::default(), Cost::max));
            }
            "fusion" => {
                let fused = self.called(instruction, 0)?;
                return Ok(Cost {
                    bytes: fused.boundary.bytes(),
                    ..fused.cost
                });
            }
            "slice" => return Ok(moves(2.0 * result()?)),
            "dynamic-slice" | "gather" => {
                return Ok(moves(2.0 * result()? + operand_bytes(operand(1)?)?));
            }
            "dynamic-update-slice" => {
                let update = operand_bytes(operand(1)?)?;
                return Ok(moves(2.0 * update + operand_bytes(operand(2)?)?));
            }
            "scatter" => return self.scatter(instruction),
            _ => moves(self.moved(instruction)?),
        };
        let flops = |flops| Ok(Cost { flops, ..cost });
        let transcendentals = |transcendentals| {
            Ok(Cost {
                transcendentals,
                ..cost
            })
        };
        match opcode {
            _ if is_transcendental(opcode) => transcendentals(count(elements(shape)?)),
            _ if is_elementwise(opcode) => flops(count(elements(shape)?)),
            "rng" | "rng-bit-generator" => transcendentals(all_elements(shape)?),
            "all-reduce" | "all-reduce-start" => flops(all_elements(shape)?),
            "dot" => flops(2.0 * count(elements(shape)?) * contracted(instruction, operand(0)?)?),
            "convolution" => {
                let products = convolution::products(instruction, operand(0)?, operand(1)?, shape)?;
                flops(2.0 * products)
            }
            "map" => Ok(cost.apply(self.called(instruction, 0)?.cost, count(elements(shape)?))),
            "reduce" => {
                let taken = elements(operand(0)?)?.saturating_sub(elements_of_first(shape)?);
                Ok(cost.apply(self.called(instruction, 0)?.cost, count(taken)))
            }
            "reduce-window" => {
                let taken = count(elements_of_first(shape)?) * (window_size(instruction)? - 1.0);
                Ok(cost.apply(self.called(instruction, 0)?.cost, taken))
            }
            "select-and-scatter" => {
                let source = count(elements(operand(1)?)?);
                let selected = source * (window_size(instruction)? - 1.0);
                let (select, scatter) =
                    (self.called(instruction, 0)?, self.called(instruction, 1)?);
                Ok(cost
                    .apply(select.cost, selected)
                    .apply(scatter.cost, source))
            }
            "sort" => {
                let elements = elements(operand(0)?)?;
                // The logarithm, rounded up.
                let rounds = u64::BITS - elements.saturating_sub(1).leading_zeros();
                flops(count(elements) * f64::from(rounds))
            }
            "fft" => {
                let lengths = instruction.fft_length.iter();
                let rounds = lengths.map(|length| f64::from(length.checked_ilog2().unwrap_or(0)));
                let rounds: f64 = rounds.product();
                flops(8.0 * rounds * count(elements(operand(0)?)?))
            }
            "triangular-solve" => {
                let (matrix, sides) = (operand(0)?, operand(1)?);
                let order = product(matrix.dimensions.last().map_or(&[], std::slice::from_ref))?;
                Ok(Cost {
                    // Half of the matrix is read.
                    bytes: cost.bytes - operand_bytes(matrix)? / 2.0,
                    flops: 2.0 * count(order) * count(elements(sides)?),
                    ..cost
                })
            }
            "cholesky" => {
                let matrix = operand(0)?;
                let order = product(matrix.dimensions.last().map_or(&[], std::slice::from_ref))?;
                Ok(Cost {
                    // Half of the matrix is read, and half written.
                    bytes: operand_bytes(matrix)?,
                    flops: (count(order) * count(elements(matrix)?) / 3.0).floor(),
                    ..cost
                })
            }
            _ => Ok(cost),
        }
    }

    /// Reads and writes what it updates, reads the updates and where they go.
    fn scatter(&self, instruction: &HloInstructionProto) -> Result<Cost, Error> {
        // Operands, indices, updates: as many of these as of the first.
        let arrays = instruction.operand_ids.len() / 2;
        let mut bytes = operand_bytes(self.operand_shape(instruction, arrays)?)?;
        for index in 0..arrays {
            bytes += 3.0 * operand_bytes(self.operand_shape(instruction, arrays + 1 + index)?)?;
        }
        let updates = elements(self.operand_shape(instruction, arrays + 1)?)?;
        let cost = Cost {
            bytes,
            ..Cost::default()
        };
        Ok(cost.apply(self.called(instruction, 0)?.cost, count(updates)))
    }

    /// Whether a transposition only renames dimensions: the elements stay where they are.
    fn is_bitcast(&self, transpose: &HloInstructionProto) -> Result<bool, Error> {
        let (from, to) = (
            self.operand_shape(transpose, 0)?.layout.as_ref(),
            shape_of(transpose)?.layout.as_ref(),
        );
        let (Some(from), Some(to)) = (from, to) else {
            return Ok(false);
        };
        let source = |&dimension: &i64| {
            let dimension = usize::try_from(dimension).ok()?;
            transpose.dimensions.get(dimension)
        };
        Ok(to
            .minor_to_major
            .iter()
            .map(source)
            .eq(from.minor_to_major.iter().map(Some)))
    }
}

fn shape_of(instruction: &HloInstructionProto) -> Result<&ShapeProto, Error> {
    instruction
        .shape
        .as_ref()
        .ok_or(Error::Incomplete("an instruction's shape"))
}

/// Products that each element of a dot's result sums.
fn contracted(dot: &HloInstructionProto, left: &ShapeProto) -> Result<f64, Error> {
    let dimensions = dot
        .dot_dimension_numbers
        .as_ref()
        .map_or(&[][..], |numbers| &numbers.lhs_contracting_dimensions);
    let sizes = dimensions.iter().map(|&dimension| {
        let dimension = usize::try_from(dimension).ok()?;
        left.dimensions.get(dimension).copied()
    });
    let sizes: Option<Vec<i64>> = sizes.collect();
    let sizes = sizes.ok_or(Error::Incomplete("a dot's dimensions"))?;
    Ok(count(product(&sizes)?))
}

/// Elements of a window.
fn window_size(instruction: &HloInstructionProto) -> Result<f64, Error> {
    let window = instruction.window.iter();
    let sizes: Vec<i64> = window
        .flat_map(|window| &window.dimensions)
        .map(|dimension| dimension.size)
        .collect();
    Ok(count(product(&sizes)?))
}

/// Ops of one result element each that XLA does not count among the flops.
fn is_transcendental(opcode: &str) -> bool {
    matches!(
        opcode,
        "acos"
            | "acosh"
            | "asin"
            | "asinh"
            | "atan2"
            | "atanh"
            | "cbrt"
            | "cosh"
            | "cosine"
            | "erf"
            | "exponential"
            | "exponential-minus-one"
            | "log"
            | "log-plus-one"
            | "logistic"
            | "power"
            | "rsqrt"
            | "sine"
            | "sinh"
            | "sqrt"
            | "tan"
            | "tanh"
    )
}

/// Ops that count a flop for each result element, whatever its type: XLA counts integers' too.
fn is_elementwise(opcode: &str) -> bool {
    matches!(
        opcode,
        "abs"
            | "add"
            | "and"
            | "bitcast-convert"
            | "ceil"
            | "clamp"
            | "compare"
            | "complex"
            | "convert"
            | "count-leading-zeros"
            | "divide"
            | "floor"
            | "imag"
            | "is-finite"
            | "maximum"
            | "minimum"
            | "multiply"
            | "negate"
            | "not"
            | "or"
            | "popcnt"
            | "real"
            | "reduce-precision"
            | "remainder"
            | "round-nearest-afz"
            | "round-nearest-even"
            | "select"
            | "shift-left"
            | "shift-right-arithmetic"
            | "shift-right-logical"
            | "sign"
            | "stochastic-convert"
            | "subtract"
            | "xor"
    )
}

#[cfg(test)]
mod tests;
