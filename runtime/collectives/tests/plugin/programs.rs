//! The programs that `programs.py` writes.

use crate::compile::python;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use waystation_pjrt::ElementType;

/// What one partition has of an array.
#[derive(Clone, Debug, PartialEq, Deserialize, Serialize)]
pub(crate) struct Array {
    #[serde(rename = "type")]
    pub(crate) ty: String,
    pub(crate) dims: Vec<i64>,
    #[serde(rename = "hex", deserialize_with = "bytes", serialize_with = "hex")]
    pub(crate) bytes: Vec<u8>,
}

#[derive(Deserialize, Serialize)]
pub(crate) struct Program {
    pub(crate) name: String,
    /// Whether results are the same bits as JAX's.
    pub(crate) exact: bool,
    #[serde(skip)]
    pub(crate) text: String,
    /// By partition.
    pub(crate) inputs: Vec<Vec<Array>>,
    pub(crate) outputs: Vec<Vec<Array>>,
}

fn bytes<'a, D: serde::Deserializer<'a>>(from: D) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(from)?;
    (0..text.len() / 2)
        .map(|at| {
            u8::from_str_radix(&text[2 * at..2 * at + 2], 16).map_err(serde::de::Error::custom)
        })
        .collect()
}

fn hex<S: serde::Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
    use std::fmt::Write;
    let mut text = String::with_capacity(2 * bytes.len());
    for byte in bytes {
        write!(text, "{byte:02x}").map_err(serde::ser::Error::custom)?;
    }
    to.serialize_str(&text)
}

impl Array {
    pub(crate) fn element(&self) -> ElementType {
        match self.ty.as_str() {
            "bool" => ElementType::Pred,
            "int4" => ElementType::S4,
            "int8" => ElementType::S8,
            "int16" => ElementType::S16,
            "int32" => ElementType::S32,
            "int64" => ElementType::S64,
            "uint8" => ElementType::U8,
            "uint32" => ElementType::U32,
            "float16" => ElementType::F16,
            "bfloat16" => ElementType::BF16,
            "float32" => ElementType::F32,
            "float64" => ElementType::F64,
            "complex64" => ElementType::C64,
            "complex128" => ElementType::C128,
            other => panic!("elements of {other}"),
        }
    }

    pub(crate) fn as_floats(&self) -> Vec<f32> {
        assert_eq!(self.ty, "float32");
        self.bytes
            .chunks_exact(4)
            .map(|four| f32::from_le_bytes(four.try_into().expect("four")))
            .collect()
    }
}

/// All programs, made once.
pub(crate) fn programs() -> &'static [Program] {
    static PROGRAMS: OnceLock<Vec<Program>> = OnceLock::new();
    PROGRAMS.get_or_init(|| {
        let folder = tempfile::tempdir().expect("a folder");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/plugin/programs.py");
        let made = Command::new(python())
            .arg(script)
            .arg(folder.path())
            .output()
            .expect("Python runs");
        assert!(
            made.status.success(),
            "{}",
            String::from_utf8_lossy(&made.stderr)
        );
        let json = std::fs::read(folder.path().join("programs.json")).expect("it was written");
        let mut programs: Vec<Program> = serde_json::from_slice(&json).expect("programs");
        for program in &mut programs {
            let text = folder.path().join(format!("{}.mlir", program.name));
            program.text = std::fs::read_to_string(text).expect("it was written");
        }
        programs
    })
}

pub(crate) fn program(name: &str) -> &'static Program {
    let found = programs().iter().find(|each| each.name == name);
    found.unwrap_or_else(|| panic!("no program {name}"))
}
