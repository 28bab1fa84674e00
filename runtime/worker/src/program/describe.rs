//! What a compiled program looks like from outside: the [`ExecutableInfo`] that the proxy answers with and a cache hit needs.
//!
//! Global shapes come from the program's own `main`; the compiled module knows only each device's shapes, which times the
//! pieces of a sharding is wrong where a dimension does not divide. Shardings, layouts and donation come from the compiled
//! module, memory kinds and sizes from the plugin.

use std::collections::{BTreeMap, BTreeSet};

use prost::Message as _;
use tracing::warn;
use waystation_proto::{
    waystation::{ExecutableInfo, executable_info::Value},
    xla::{
        CompiledMemoryStatsProto, HloModuleProto, HloModuleProtoWithConfig, OpSharding,
        PrimitiveType, ProgramShapeProto, ShapeProto,
    },
};
use waystation_stablehlo::signature::{self, ElementType, Signature, ValueType};

use super::{
    Error, cost,
    sharding::{flatten, over_replicas, tiles},
};

/// What only the plugin knows of an executable.
#[derive(Debug, Clone, Default)]
pub struct PluginFacts {
    /// The executable's name; empty: the module's.
    pub name: String,
    /// The plugin's fingerprint, empty when it gives none.
    pub fingerprint: Vec<u8>,
    /// Whole copies of the program.
    pub num_replicas: u32,
    /// Partitions of each copy.
    pub num_partitions: u32,
    /// The kind of the devices' default memory.
    pub default_memory_kind: String,
    /// Memory kinds of the results, in order; empty when the plugin does not say: then the default.
    pub result_memory_kinds: Vec<String>,
    /// Sizes as the plugin counts them.
    pub memory_stats: Option<CompiledMemoryStatsProto>,
    /// Size of the machine code in bytes, -1 when unknown.
    pub generated_code_bytes: i64,
}

/// XLA's number for the host's memory in a layout, and the kind JAX gives it.
const HOST_MEMORY_SPACE: i64 = 5;
const HOST_MEMORY_KIND: &str = "pinned_host";

/// Describes a compiled program. The cache key is left empty.
///
/// `program` is the StableHLO artifact, `optimized` the plugin's optimized program in its format `hlo_with_config`, an
/// `xla.HloModuleProtoWithConfig`. Where the artifact cannot be read, or does not agree with the compiled module, shapes are
/// each device's times the pieces of the sharding, and a warning says so.
///
/// # Errors
/// When the optimized program cannot be read or lacks its shapes.
pub fn describe(
    program: &[u8],
    optimized: &[u8],
    facts: &PluginFacts,
) -> Result<ExecutableInfo, Error> {
    let module = HloModuleProtoWithConfig::decode(optimized)?.hlo_module;
    let module = module.ok_or(Error::Incomplete { what: "its module" })?;
    describe_module(program, &module, facts)
}

/// As [`describe`], of a module as the plugin had it before it was scheduled: an `xla.HloModuleProto`.
///
/// # Errors
/// As [`describe`].
pub fn describe_unscheduled(
    program: &[u8],
    module: &[u8],
    facts: &PluginFacts,
) -> Result<ExecutableInfo, Error> {
    describe_module(program, &HloModuleProto::decode(module)?, facts)
}

fn describe_module(
    program: &[u8],
    module: &HloModuleProto,
    facts: &PluginFacts,
) -> Result<ExecutableInfo, Error> {
    let shape = module.host_program_shape.clone().ok_or(Error::Incomplete {
        what: "its program shape",
    })?;
    let shapes = Shapes::of(shape)?;
    let signature = signature_of(program, &shapes, &module.name);
    let (parameter_values, result_values) = match &signature {
        Some(signature) => (
            signature.parameters.as_slice(),
            signature.results.as_slice(),
        ),
        None => (&[][..], &[][..]),
    };
    let parameter_shardings = shardings(
        &module.spmd_parameters_shardings,
        shapes.parameters.len(),
        facts,
        "parameters",
    )?;
    let output = module.spmd_output_sharding.as_slice();
    let result_shardings = shardings(output, shapes.results.len(), facts, "results")?;

    let parameters = shapes
        .parameters
        .iter()
        .zip(parameter_shardings)
        .enumerate()
        .map(|(index, (shape, sharding))| {
            let declared = parameter_values.get(index);
            let kind = memory_kind(declared, shape, facts, None);
            value(declared, shape, sharding, kind)
        });
    let results = shapes.results.iter().zip(result_shardings).enumerate().map(
        |(index, (shape, sharding))| {
            let declared = result_values.get(index);
            let kind = memory_kind(declared, shape, facts, facts.result_memory_kinds.get(index));
            value(declared, shape, sharding, kind)
        },
    );
    let mut info = ExecutableInfo {
        name: if facts.name.is_empty() {
            module.name.clone()
        } else {
            facts.name.clone()
        },
        num_replicas: facts.num_replicas,
        num_partitions: facts.num_partitions,
        parameters: parameters.collect(),
        results: results.collect(),
        donated_parameters: donated(module, shapes.tupled_parameters),
        memory_stats: facts.memory_stats.clone(),
        fingerprint: facts.fingerprint.clone(),
        generated_code_bytes: facts.generated_code_bytes,
        key: String::new(),
        cost: cost::of(module).unwrap_or_else(|error| {
            warn!(module = module.name, %error, "cost of a compiled program not counted");
            BTreeMap::new()
        }),
    };
    let count = info.parameters.len();
    info.donated_parameters
        .retain(|parameter| usize::try_from(*parameter).is_ok_and(|index| index < count));
    Ok(info)
}

/// One device's shapes of a module, tuples taken apart.
struct Shapes {
    parameters: Vec<ShapeProto>,
    results: Vec<ShapeProto>,
    /// True when the module takes its parameters as one tuple.
    tupled_parameters: bool,
}

impl Shapes {
    fn of(shape: ProgramShapeProto) -> Result<Self, Error> {
        let tuple = |shape: &ShapeProto| shape.element_type() == PrimitiveType::Tuple;
        let tupled_parameters = matches!(shape.parameters.as_slice(), [one] if tuple(one));
        let mut parameters = shape.parameters;
        if tupled_parameters {
            parameters = parameters
                .into_iter()
                .flat_map(|tuple| tuple.tuple_shapes)
                .collect();
        }
        let result = shape.result.ok_or(Error::Incomplete {
            what: "the shape of its results",
        })?;
        let results = if tuple(&result) {
            result.tuple_shapes
        } else {
            vec![result]
        };
        Ok(Self {
            parameters,
            results,
            tupled_parameters,
        })
    }
}

/// The signature, when it can be read and has the module's values.
fn signature_of(program: &[u8], shapes: &Shapes, module: &str) -> Option<Signature> {
    let signature = match waystation_stablehlo::main_signature(program) {
        Ok(signature) => signature,
        Err(error) => {
            warn!(module, %error, "program not read, global shapes come from its shardings");
            return None;
        }
    };
    let (parameters, results) = (signature.parameters.len(), signature.results.len());
    if (parameters, results) != (shapes.parameters.len(), shapes.results.len()) {
        let (compiled_parameters, compiled_results) =
            (shapes.parameters.len(), shapes.results.len());
        warn!(
            module,
            parameters,
            results,
            compiled_parameters,
            compiled_results,
            "program and compiled module have other values, global shapes come from shardings"
        );
        return None;
    }
    Some(signature)
}

/// One sharding a value, over the devices of all replicas. Unpartitioned programs have none, and neither have values that a module says nothing of: the empty
/// sharding, which is replication.
fn shardings(
    given: &[OpSharding],
    count: usize,
    facts: &PluginFacts,
    what: &'static str,
) -> Result<Vec<OpSharding>, Error> {
    let (replicas, partitions) = (facts.num_replicas, facts.num_partitions);
    let replicated = || vec![OpSharding::default(); count];
    if partitions <= 1 {
        return Ok(replicated());
    }
    let flat = flatten(given).and_then(|flat| {
        let all = flat.into_iter();
        all.map(|sharding| over_replicas(sharding, replicas, partitions))
            .collect::<Option<Vec<_>>>()
    });
    let flat = flat.ok_or(Error::Incomplete {
        what: "a sharding that makes sense",
    })?;
    Ok(match flat.len() {
        found if found == count => flat,
        // One sharding for all of a tuple's parts.
        1 => vec![flat[0].clone(); count],
        found => {
            if found != 0 {
                warn!(
                    what,
                    found,
                    count,
                    "compiled module has another number of shardings, taken as replicated"
                );
            }
            replicated()
        }
    })
}

fn value(
    declared: Option<&signature::Value>,
    shape: &ShapeProto,
    sharding: OpSharding,
    memory_kind: String,
) -> Value {
    let (dtype, dims) = declared
        .and_then(declared_type)
        .unwrap_or_else(|| (shape.element_type(), scaled(shape, &sharding)));
    Value {
        dtype: dtype.into(),
        dims,
        sharding: Some(sharding),
        layout: shape.layout.as_deref().cloned(),
        memory_kind,
    }
}

/// Type and global dimensions as `main` has them; `None` for what they do not determine.
fn declared_type(value: &signature::Value) -> Option<(PrimitiveType, Vec<i64>)> {
    match &value.ty {
        ValueType::Token => Some((PrimitiveType::Token, Vec::new())),
        ValueType::Tensor(tensor) => {
            let dims = tensor.dims.iter().map(|dim| i64::try_from((*dim)?).ok());
            Some((primitive(tensor.element)?, dims.collect::<Option<_>>()?))
        }
        _ => None,
    }
}

/// One device's dimensions times the pieces.
fn scaled(shape: &ShapeProto, sharding: &OpSharding) -> Vec<i64> {
    let pieces =
        tiles(sharding, shape.dimensions.len()).unwrap_or_else(|| vec![1; shape.dimensions.len()]);
    shape
        .dimensions
        .iter()
        .zip(pieces)
        .map(|(dim, pieces)| dim.saturating_mul(pieces))
        .collect()
}

/// A value's memory: what the plugin says, what the program asks for, what the layout says, the default.
fn memory_kind(
    declared: Option<&signature::Value>,
    shape: &ShapeProto,
    facts: &PluginFacts,
    given: Option<&String>,
) -> String {
    let asked = declared.and_then(|value| value.text("mhlo.memory_kind"));
    let in_host = shape
        .layout
        .as_ref()
        .is_some_and(|layout| layout.memory_space == HOST_MEMORY_SPACE);
    given
        .map(String::as_str)
        .or(asked)
        .or(in_host.then_some(HOST_MEMORY_KIND))
        .unwrap_or(&facts.default_memory_kind)
        .to_owned()
}

/// The parameters that an execution may take over, ascending: aliased with a result, or given up for any.
fn donated(module: &HloModuleProto, tupled: bool) -> Vec<u32> {
    let aliases = module
        .input_output_alias
        .iter()
        .flat_map(|alias| &alias.entries);
    let aliases = aliases.map(|entry| (entry.parameter_number, &entry.parameter_shape_index));
    let donors = module.buffer_donor.iter().flat_map(|donor| &donor.entries);
    let donors = donors.map(|entry| (entry.parameter_number, &entry.parameter_shape_index));
    let numbers = aliases.chain(donors).filter_map(|(number, index)| {
        let number = if tupled { *index.first()? } else { number };
        u32::try_from(number).ok()
    });
    numbers.collect::<BTreeSet<_>>().into_iter().collect()
}

/// XLA's type for an element of `main`.
fn primitive(element: ElementType) -> Option<PrimitiveType> {
    Some(match element {
        ElementType::Bool => PrimitiveType::Pred,
        ElementType::Si2 => PrimitiveType::S2,
        ElementType::Si4 => PrimitiveType::S4,
        ElementType::Si8 => PrimitiveType::S8,
        ElementType::Si16 => PrimitiveType::S16,
        ElementType::Si32 => PrimitiveType::S32,
        ElementType::Si64 => PrimitiveType::S64,
        ElementType::Ui2 => PrimitiveType::U2,
        ElementType::Ui4 => PrimitiveType::U4,
        ElementType::Ui8 => PrimitiveType::U8,
        ElementType::Ui16 => PrimitiveType::U16,
        ElementType::Ui32 => PrimitiveType::U32,
        ElementType::Ui64 => PrimitiveType::U64,
        ElementType::F4E2M1FN => PrimitiveType::F4e2m1fn,
        ElementType::F6E2M3FN => PrimitiveType::F6e2m3fn,
        ElementType::F6E3M2FN => PrimitiveType::F6e3m2fn,
        ElementType::F8E3M4 => PrimitiveType::F8e3m4,
        ElementType::F8E4M3 => PrimitiveType::F8e4m3,
        ElementType::F8E4M3FN => PrimitiveType::F8e4m3fn,
        ElementType::F8E4M3FNUZ => PrimitiveType::F8e4m3fnuz,
        ElementType::F8E4M3B11FNUZ => PrimitiveType::F8e4m3b11fnuz,
        ElementType::F8E5M2 => PrimitiveType::F8e5m2,
        ElementType::F8E5M2FNUZ => PrimitiveType::F8e5m2fnuz,
        ElementType::F8E8M0FNU => PrimitiveType::F8e8m0fnu,
        ElementType::BF16 => PrimitiveType::Bf16,
        ElementType::F16 => PrimitiveType::F16,
        ElementType::F32 => PrimitiveType::F32,
        ElementType::F64 => PrimitiveType::F64,
        ElementType::ComplexF32 => PrimitiveType::C64,
        ElementType::ComplexF64 => PrimitiveType::C128,
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
