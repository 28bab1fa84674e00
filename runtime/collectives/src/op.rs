//! One collective, as the rewritten program tells it to the target that runs it.
//!
//! The rewrite writes an [`Op`] into the custom call as attributes, and the target reads it back from what XLA passes.
//! All attributes are arrays of integers, so that there is one way to write and one to read them.

use std::fmt::Write;

/// The name of the FFI target that every rewritten collective calls.
pub const TARGET: &str = "waystation_collective";

/// The number of this form of custom calls and of the rewrite that makes them. It is part of the cache key of rewritten programs,
/// so another one is due with every change of what either means.
pub const VERSION: u32 = 2;

/// The most partitions that a program may have here, those of all its replicas.
pub const MOST_PARTITIONS: u32 = 1 << 16;

/// The most operands or results of one collective.
pub(crate) const MOST_BUFFERS: usize = 1024;

macro_rules! numbered {
    ($(#[$doc:meta])* $name:ident { $($(#[$each:meta])* $variant:ident = $number:literal, $text:literal;)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$each])* $variant = $number,)*
        }

        impl $name {
            /// Every one.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            fn from_number(number: i64) -> Option<Self> {
                match number {
                    $($number => Some(Self::$variant),)*
                    _ => None,
                }
            }

            /// XLA's opcode.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $text,)*
                }
            }
        }
    };
}

numbered! {
    /// What a collective does.
    Kind {
        /// Every member gets the reduction of all operands.
        AllReduce = 0, "all-reduce";
        /// Every member gets all operands, one behind the other along a dimension.
        AllGather = 1, "all-gather";
        /// Every member gets its part of the reduction of all operands.
        ReduceScatter = 2, "reduce-scatter";
        /// Operand `j` goes to member `j`; result `j` comes from it.
        AllToAll = 3, "all-to-all";
        /// As before, with the operands being parts of one array along a dimension.
        AllToAllArray = 4, "all-to-all of one array";
        /// From one partition to another, by pairs; zeros where none sends.
        Permute = 5, "collective-permute";
        /// From a group's first member to all of it; zeros outside of the groups.
        Broadcast = 6, "collective-broadcast";
        /// The partition's own number in its replica.
        PartitionId = 7, "partition-id";
        /// The number of the partition's replica.
        ReplicaId = 8, "replica-id";
    }
}

numbered! {
    /// What two elements become.
    Reduction {
        /// Their sum; for booleans, either.
        Add = 0, "add";
        /// Their product; for booleans, both.
        Multiply = 1, "multiply";
        /// The smaller; not a number if one is not.
        Minimum = 2, "minimum";
        /// The larger; not a number if one is not.
        Maximum = 3, "maximum";
        /// Bits set in both.
        And = 4, "and";
        /// Bits set in either.
        Or = 5, "or";
        /// Bits set in one.
        Xor = 6, "xor";
    }
}

impl Kind {
    pub(crate) fn of_opcode(opcode: &str) -> Option<Self> {
        // The form of an all-to-all is not in its opcode.
        Self::ALL
            .iter()
            .copied()
            .find(|kind| *kind != Self::AllToAllArray && kind.name() == opcode)
    }

    /// Whether partitions speak with each other in it.
    #[must_use]
    pub fn communicates(self) -> bool {
        !matches!(self, Self::PartitionId | Self::ReplicaId)
    }

    /// Whether it reduces.
    #[must_use]
    pub fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter)
    }
}

impl Reduction {
    pub(crate) fn of_opcode(opcode: &str) -> Option<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|reduction| reduction.name() == opcode)
    }
}

/// An operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Its size in memory.
    pub bytes: u64,
    /// Where members have parts of an array along a dimension: how many bytes of one member's part lie together, in the
    /// order in which the device lays the array out. Zero where there is no such dimension.
    pub run: u64,
    /// Type of its elements, numbered as `xla::PrimitiveType`.
    pub element: i32,
}

/// One collective of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Op {
    /// Its number, which no other of the program has. XLA's channel ids are not so.
    pub number: u32,
    /// What it does.
    pub kind: Kind,
    /// Partitions that act together, in order. They are numbered through all replicas, replica by replica. Of a permute: pairs
    /// of source and target. Of what asks for a number: the partitions of each replica, and nothing where there is one.
    pub groups: Vec<Vec<u32>>,
    /// How it reduces, if it does.
    pub reduction: Option<Reduction>,
    /// Its operands.
    pub operands: Vec<Operand>,
    /// Sizes of its results in memory.
    pub results: Vec<u64>,
}

/// Attributes that make no collective.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the attribute {name} of a collective is {what}")]
pub struct WrongAttribute {
    name: &'static str,
    what: &'static str,
}

impl Op {
    /// The attributes as XLA wants them in the `backend_config` of a typed custom call.
    #[must_use]
    pub fn attributes(&self) -> String {
        let mut text = String::from("{");
        let mut put = |name: &str, values: &mut dyn Iterator<Item = i64>| {
            let mut values = values.peekable();
            // An attribute that is not there is empty.
            if values.peek().is_none() {
                return;
            }
            if text.len() > 1 {
                text.push_str(", ");
            }
            let _ = write!(text, "{name} = array<i64");
            for (index, value) in values.enumerate() {
                let _ = write!(text, "{} {value}", if index == 0 { ":" } else { "," });
            }
            text.push('>');
        };
        let signed = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        put(
            "elements",
            &mut self.operands.iter().map(|each| i64::from(each.element)),
        );
        put(
            "groups",
            &mut self.groups.iter().flatten().map(|id| i64::from(*id)),
        );
        put("kind", &mut std::iter::once(self.kind as i64));
        put("op", &mut std::iter::once(i64::from(self.number)));
        put(
            "operands",
            &mut self.operands.iter().map(|each| signed(each.bytes)),
        );
        put(
            "reduction",
            &mut self.reduction.iter().map(|each| *each as i64),
        );
        put(
            "results",
            &mut self.results.iter().map(|each| signed(*each)),
        );
        put(
            "runs",
            &mut self.operands.iter().map(|each| signed(each.run)),
        );
        put(
            "sizes",
            &mut self
                .groups
                .iter()
                .map(|group| i64::try_from(group.len()).unwrap_or(i64::MAX)),
        );
        text.push('}');
        text
    }

    /// Reads what [`Op::attributes`] wrote; `attribute` gives the integers of a name.
    ///
    /// # Errors
    ///
    /// [`WrongAttribute`] for anything that [`Op::attributes`] does not write.
    pub fn read<'a>(attribute: impl Fn(&str) -> Option<&'a [i64]>) -> Result<Self, WrongAttribute> {
        let all = |name: &'static str| attribute(name).unwrap_or_default();
        let one = |name: &'static str| match all(name) {
            [value] => Ok(*value),
            _ => Err(WrongAttribute {
                name,
                what: "not one number",
            }),
        };
        let wrong = |name: &'static str, what: &'static str| WrongAttribute { name, what };
        let number = |name: &'static str, value: i64| {
            u64::try_from(value).map_err(|_| wrong(name, "negative"))
        };
        let kind = Kind::from_number(one("kind")?).ok_or(wrong("kind", "not known"))?;
        let reduction = match all("reduction") {
            [] => None,
            _ => Some(
                Reduction::from_number(one("reduction")?).ok_or(wrong("reduction", "not known"))?,
            ),
        };
        let (bytes, runs, elements) = (all("operands"), all("runs"), all("elements"));
        if bytes.len() > MOST_BUFFERS || all("results").len() > MOST_BUFFERS {
            return Err(wrong("operands", "too long"));
        }
        if runs.len() != bytes.len() || elements.len() != bytes.len() {
            return Err(wrong("operands", "not as long as the others"));
        }
        let operands = bytes
            .iter()
            .zip(runs)
            .zip(elements)
            .map(|((bytes, run), element)| {
                Ok(Operand {
                    bytes: number("operands", *bytes)?,
                    run: number("runs", *run)?,
                    element: i32::try_from(*element)
                        .map_err(|_| wrong("elements", "out of range"))?,
                })
            })
            .collect::<Result<_, _>>()?;
        let results = all("results")
            .iter()
            .map(|bytes| number("results", *bytes))
            .collect::<Result<_, _>>()?;
        let mut ids = all("groups");
        if ids.len() > 2 * MOST_PARTITIONS as usize {
            return Err(wrong("groups", "too long"));
        }
        let mut groups = Vec::new();
        for size in all("sizes") {
            let (group, rest) = usize::try_from(*size)
                .ok()
                .filter(|size| *size > 0)
                .and_then(|size| ids.split_at_checked(size))
                .ok_or(wrong("sizes", "not those of the groups"))?;
            ids = rest;
            groups.push(
                group
                    .iter()
                    .map(|id| u32::try_from(*id).map_err(|_| wrong("groups", "out of range")))
                    .collect::<Result<Vec<_>, _>>()?,
            );
        }
        if !ids.is_empty() {
            return Err(wrong("sizes", "not those of the groups"));
        }
        Ok(Self {
            number: u32::try_from(one("op")?).map_err(|_| wrong("op", "out of range"))?,
            kind,
            groups,
            reduction,
            operands,
            results,
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::collections::HashMap;

    /// The attributes of such a text, as XLA would read them.
    pub(crate) fn parsed(text: &str) -> HashMap<String, Vec<i64>> {
        let inside = text
            .strip_prefix('{')
            .and_then(|text| text.strip_suffix('}'))
            .expect("a dictionary");
        inside
            .split(">, ")
            .map(|each| {
                let (name, values) = each
                    .trim_end_matches('>')
                    .split_once(" = array<i64: ")
                    .expect("an array");
                let values = values
                    .split(", ")
                    .map(|value| value.parse().expect("a number"))
                    .collect();
                (name.to_owned(), values)
            })
            .collect()
    }

    fn op() -> Op {
        Op {
            number: 7,
            kind: Kind::AllReduce,
            groups: vec![vec![0, 2], vec![1, 3, 4]],
            reduction: Some(Reduction::Maximum),
            operands: vec![
                Operand {
                    bytes: 12,
                    run: 0,
                    element: 11,
                },
                Operand {
                    bytes: 8,
                    run: 4,
                    element: 5,
                },
            ],
            results: vec![12, 8],
        }
    }

    #[test]
    fn attributes_are_read_as_written() {
        let op = op();
        let text = op.attributes();
        assert_eq!(
            text,
            "{elements = array<i64: 11, 5>, groups = array<i64: 0, 2, 1, 3, 4>, kind = array<i64: 0>, \
             op = array<i64: 7>, operands = array<i64: 12, 8>, reduction = array<i64: 3>, \
             results = array<i64: 12, 8>, runs = array<i64: 0, 4>, sizes = array<i64: 2, 3>}"
        );
        let read = parsed(&text);
        assert_eq!(Op::read(|name| read.get(name).map(Vec::as_slice)), Ok(op));
    }

    #[test]
    fn wrong_attributes_are_refused() {
        let good = parsed(&op().attributes());
        let refused = |name: &str, values: &[i64]| {
            let mut bad = good.clone();
            bad.insert(name.to_owned(), values.to_vec());
            Op::read(|name| bad.get(name).map(Vec::as_slice)).expect_err("wrong")
        };
        assert_eq!(refused("kind", &[99]).name, "kind");
        assert_eq!(refused("kind", &[]).name, "kind");
        assert_eq!(refused("op", &[-1]).name, "op");
        assert_eq!(refused("op", &[1, 2]).name, "op");
        assert_eq!(refused("reduction", &[7]).name, "reduction");
        assert_eq!(refused("sizes", &[2, 4]).name, "sizes");
        assert_eq!(refused("sizes", &[2]).name, "sizes");
        assert_eq!(refused("sizes", &[5, 0]).name, "sizes");
        assert_eq!(refused("sizes", &[i64::MIN]).name, "sizes");
        assert_eq!(refused("groups", &[0, 2, 1, 3, -4]).name, "groups");
        assert_eq!(refused("runs", &[1]).name, "operands");
        assert_eq!(refused("operands", &[-5, 2]).name, "operands");
        assert_eq!(refused("elements", &[1 << 40, 2]).name, "elements");
    }
}
