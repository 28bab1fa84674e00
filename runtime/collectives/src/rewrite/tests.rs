//! Modules made by hand: what is replaced, what is copied, what is refused.

use super::wire::{Value, put_int};
use super::*;
use crate::op::tests::parsed;
use crate::op::{Op, Operand, Reduction, TARGET};
use proptest::prelude::*;

/// A message in the making.
#[derive(Clone, Default)]
struct Message(Vec<u8>);

impl Message {
    fn int(mut self, number: u64, value: u64) -> Self {
        put_int(&mut self.0, number, value);
        self
    }

    fn put(mut self, number: u64, bytes: impl AsRef<[u8]>) -> Self {
        put_bytes(&mut self.0, number, bytes.as_ref());
        self
    }

    fn ints(mut self, number: u64, values: &[u64]) -> Self {
        for value in values {
            put_int(&mut self.0, number, *value);
        }
        self
    }
}

impl AsRef<[u8]> for Message {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

fn shape(element: u64, dims: &[u64], order: &[u64]) -> Message {
    let layout = Message::default().ints(1, order);
    Message::default()
        .int(2, element)
        .ints(3, dims)
        .put(5, layout)
}

fn tuple(parts: &[Message]) -> Message {
    parts
        .iter()
        .fold(Message::default().int(2, 13), |tuple, part| {
            tuple.put(4, part)
        })
}

fn instruction(id: u64, opcode: &str, shape: &Message, operands: &[u64]) -> Message {
    Message::default()
        .put(1, format!("i{id}"))
        .put(2, opcode)
        .put(3, shape)
        .int(35, id)
        .ints(36, operands)
}

fn computation_of(id: u64, root: u64, instructions: &[Message]) -> Message {
    instructions
        .iter()
        .fold(Message::default().put(1, "c"), |all, each| all.put(2, each))
        .int(5, id)
        .int(6, root)
}

/// A reducer with this root.
fn reducer(opcode: &str) -> Message {
    let scalar = shape(11, &[], &[]);
    computation_of(
        100,
        12,
        &[
            instruction(10, "parameter", &scalar, &[]),
            instruction(11, "parameter", &scalar, &[]).int(9, 1),
            instruction(12, opcode, &scalar, &[11, 10]),
        ],
    )
}

fn module_of(computations: &[Message]) -> Vec<u8> {
    computations
        .iter()
        .fold(Message::default().put(1, "m"), |all, each| all.put(3, each))
        .int(6, 1)
        .put(4, "what is not looked at")
        .0
}

/// A module with one collective on one operand.
fn module(operand: &Message, collective: &Message) -> Vec<u8> {
    module_of(&[
        reducer("add"),
        computation_of(
            1,
            2,
            &[
                instruction(1, "parameter", operand, &[]),
                collective.clone(),
            ],
        ),
    ])
}

/// The fields of the custom call in a rewritten module.
fn custom_call(module: &[u8]) -> Vec<(u64, Vec<u8>)> {
    let mut found = Vec::new();
    for field in fields(module) {
        let field = field.expect("a module");
        if field.number != 3 {
            continue;
        }
        for field in fields(field.bytes().expect("a computation")) {
            let field = field.expect("a computation");
            if field.number != 2 {
                continue;
            }
            let instruction = field.bytes().expect("an instruction");
            let all: Vec<_> = fields(instruction)
                .map(|field| field.expect("an instruction"))
                .collect();
            if all
                .iter()
                .any(|field| field.number == 2 && field.value == Value::Bytes(b"custom-call"))
            {
                found.push(
                    all.iter()
                        .map(|field| {
                            let value = match field.value {
                                Value::Bytes(bytes) => bytes.to_vec(),
                                Value::Varint(value) => value.to_le_bytes().to_vec(),
                                Value::Other => vec![],
                            };
                            (field.number, value)
                        })
                        .collect(),
                );
            }
        }
    }
    assert_eq!(found.len(), 1);
    found.remove(0)
}

fn op_of(module: &[u8]) -> Op {
    let fields = custom_call(module);
    let config = fields
        .iter()
        .find(|(number, _)| *number == 43)
        .expect("attributes");
    let read = parsed(std::str::from_utf8(&config.1).expect("text"));
    Op::read(|name| read.get(name).map(Vec::as_slice)).expect("an operation")
}

fn rewritten(module: &[u8]) -> Rewritten {
    rewrite(module, 1, 4)
        .expect("it is taken")
        .expect("it has a collective")
}

fn all_reduce(shape: &Message) -> Message {
    let groups = Message::default().int(1, 2).int(2, 2);
    instruction(2, "all-reduce", shape, &[1])
        .int(26, 1)
        .int(38, 100)
        .int(71, 1)
        .put(92, groups)
        .int(56, 1)
}

#[test]
fn a_collective_becomes_a_custom_call_and_all_else_stays() {
    let array = shape(11, &[3, 5], &[1, 0]);
    let collective = all_reduce(&array)
        .put(7, "metadata")
        .put(43, "an old configuration")
        .int(37, 1)
        .put(12_345, "a field of next year");
    let before = module(&array, &collective);
    let after = rewritten(&before);
    assert_eq!(after.kinds, [Kind::AllReduce]);
    let call = custom_call(&after.module);
    let numbers: Vec<u64> = call.iter().map(|(number, _)| *number).collect();
    assert_eq!(numbers, [1, 3, 35, 36, 7, 37, 12_345, 2, 28, 43, 65, 77]);
    let text = |number: u64| &call.iter().find(|each| each.0 == number).expect("it").1;
    assert_eq!(text(28), TARGET.as_bytes());
    assert_eq!(text(77), &4_u64.to_le_bytes());
    assert_eq!(text(3), array.as_ref());
    assert_eq!(
        op_of(&after.module),
        Op {
            number: 0,
            kind: Kind::AllReduce,
            groups: vec![vec![0, 1], vec![2, 3]],
            reduction: Some(Reduction::Add),
            operands: vec![Operand {
                bytes: 60,
                run: 0,
                element: 11
            }],
            results: vec![60],
        }
    );
    // All around it is byte for byte what it was.
    let outside = |module: &[u8]| -> Vec<Vec<u8>> {
        fields(module)
            .map(|field| field.expect("a module"))
            .enumerate()
            .filter(|(index, _)| *index != 2)
            .map(|(_, field)| field.raw.to_vec())
            .collect()
    };
    assert_eq!(outside(&before), outside(&after.module));
    // Nothing is left to do.
    assert_eq!(rewrite(&after.module, 1, 4), Ok(None));
}

#[test]
fn parts_are_told_in_the_order_of_the_device() {
    let gather = |order: &[u64], dim: u64| {
        let operand = shape(5, &[2, 3], order);
        let dims = if dim == 0 { [8, 3] } else { [2, 12] };
        let collective = instruction(2, "all-gather", &shape(5, &dims, order), &[1])
            .int(14, dim)
            .int(26, 1)
            .int(71, 1);
        op_of(&rewritten(&module(&operand, &collective)).module).operands[0]
    };
    assert_eq!((gather(&[1, 0], 0).bytes, gather(&[1, 0], 0).run), (48, 48));
    assert_eq!(gather(&[1, 0], 1).run, 24);
    assert_eq!(gather(&[0, 1], 0).run, 16);
    assert_eq!(gather(&[0, 1], 1).run, 48);
    let array = shape(5, &[8, 3], &[0, 1]);
    let scatter = instruction(2, "reduce-scatter", &shape(5, &[2, 3], &[0, 1]), &[1])
        .ints(14, &[0])
        .int(26, 1)
        .int(38, 100)
        .int(71, 1);
    assert_eq!(
        op_of(&rewritten(&module(&array, &scatter)).module).operands[0].run,
        16
    );
    let exchange = instruction(2, "all-to-all", &array, &[1])
        .ints(14, &[0])
        .int(26, 1);
    let op = op_of(&rewritten(&module(&array, &exchange)).module);
    assert_eq!((op.kind, op.operands[0].run), (Kind::AllToAllArray, 16));
    assert_eq!(op.groups, [[0, 1, 2, 3]]);
}

#[test]
fn packed_elements_count_as_they_lie() {
    let packed = |count: u64| {
        let layout = Message::default().int(1, 0).int(7, 4);
        Message::default().int(2, 21).int(3, count).put(5, layout)
    };
    let broadcast = |array: &Message| {
        let collective = instruction(2, "collective-broadcast", array, &[1])
            .int(26, 1)
            .put(49, Message::default().ints(1, &[2, 0]));
        rewrite(&module(array, &collective), 1, 4)
    };
    let op = op_of(&broadcast(&packed(7)).expect("taken").expect("one").module);
    assert_eq!(op.operands[0].bytes, 4);
    assert_eq!(op.groups, [[2, 0]]);
    let gather = instruction(2, "all-gather", &packed(28), &[1])
        .int(14, 0)
        .int(26, 1)
        .int(71, 1);
    assert!(matches!(
        rewrite(&module(&packed(7), &gather), 1, 4),
        Err(Refusal::Shape(_))
    ));
    assert!(matches!(
        rewrite(&module(&packed(8), &all_reduce(&packed(8))), 1, 4),
        Err(Refusal::Shape(_))
    ));
}

#[test]
fn pairs_tuples_and_numbers() {
    let array = shape(16, &[6], &[0]);
    let pair = |from: u64, to: u64| Message::default().int(1, from).int(2, to);
    let permute = instruction(2, "collective-permute", &array, &[1])
        .int(26, 3)
        .put(52, pair(0, 3))
        .put(52, pair(2, 0));
    let op = op_of(&rewritten(&module(&array, &permute)).module);
    assert_eq!(op.groups, [[0, 3], [2, 0]]);
    let two = tuple(&[array.clone(), array.clone()]);
    let groups = Message::default()
        .int(1, 2)
        .int(2, 2)
        .ints(3, &[2, 2])
        .ints(4, &[1, 0]);
    let exchange = instruction(2, "all-to-all", &two, &[1, 1])
        .int(26, 1)
        .put(92, groups);
    let op = op_of(&rewritten(&module(&array, &exchange)).module);
    assert_eq!(
        (op.kind, op.results.as_slice()),
        (Kind::AllToAll, &[12, 12][..])
    );
    assert_eq!(op.groups, [[0, 2], [1, 3]]);
    let number = instruction(2, "partition-id", &shape(8, &[], &[]), &[]);
    let after = rewritten(&module(&array, &number));
    assert_eq!(op_of(&after.module).kind, Kind::PartitionId);
    assert!(
        custom_call(&after.module)
            .iter()
            .all(|(number, _)| *number != 65)
    );
}

/// Two replicas of three partitions, in each of XLA's ways to say who acts together.
#[test]
fn replicas_and_partitions_are_told_apart() {
    let array = shape(11, &[4], &[0]);
    let op = |collective: &Message| {
        let after = rewrite(&module(&array, collective), 2, 3).expect("it is taken");
        op_of(&after.expect("it has a collective").module)
    };
    let reduce = || instruction(2, "all-reduce", &array, &[1]).int(38, 100);
    let group = |ids: &[u64]| Message::default().ints(1, ids);
    // Without a channel: of replicas.
    assert_eq!(op(&reduce()).groups, [[0, 3], [1, 4], [2, 5]]);
    let alone = reduce().put(49, group(&[1])).put(49, group(&[0]));
    assert_eq!(op(&alone).groups, [[3], [4], [5], [0], [1], [2]]);
    // With one: of replicas with all their partitions, unless it says that the numbers are flat.
    let whole = reduce().int(26, 1);
    assert_eq!(op(&whole).groups, [[0, 1, 2, 3, 4, 5]]);
    let whole = whole.put(49, group(&[1])).put(49, group(&[0]));
    assert_eq!(op(&whole).groups, [[3, 4, 5], [0, 1, 2]]);
    let flat = reduce().int(26, 1).int(71, 1);
    let flat = flat.put(49, group(&[5, 0])).put(49, group(&[1, 2, 3, 4]));
    assert_eq!(op(&flat).groups, [vec![5, 0], vec![1, 2, 3, 4]]);
    // What cannot say so is among partitions.
    let pair = Message::default().int(1, 2).int(2, 0);
    let permute = |channel: u64| {
        let permute = instruction(2, "collective-permute", &array, &[1]);
        permute.int(26, channel).put(52, &pair)
    };
    assert_eq!(op(&permute(1)).groups, [[2, 0], [5, 3]]);
    // There is no replica 2.
    rewrite(&module(&array, &permute(0)), 2, 3).expect_err("refused");
    let of_partitions = rewrite(&module(&array, &permute(0)), 3, 2);
    let of_partitions = op_of(&of_partitions.expect("it is taken").expect("one").module);
    assert_eq!(of_partitions.groups, [[4, 0], [5, 1]]);
    let broadcast = instruction(2, "collective-broadcast", &array, &[1]).int(26, 1);
    let broadcast = broadcast.put(49, group(&[1, 2]));
    assert_eq!(op(&broadcast).groups, [[1, 2], [4, 5]]);
    for opcode in ["partition-id", "replica-id"] {
        let number = instruction(2, opcode, &shape(8, &[], &[]), &[]);
        assert_eq!(op(&number).groups, [[0, 1, 2], [3, 4, 5]]);
    }
}

#[test]
fn what_cannot_be_replaced_is_refused_by_name() {
    let array = shape(11, &[4], &[0]);
    let refused =
        |collective: &Message| rewrite(&module(&array, collective), 1, 4).expect_err("no");
    let plain = |opcode: &str| instruction(2, opcode, &array, &[1]);
    assert!(matches!(
        refused(&plain("all-reduce-start").int(26, 1)),
        Refusal::Asynchronous(_)
    ));
    assert!(matches!(
        refused(&plain("collective-permute-done")),
        Refusal::Asynchronous(_)
    ));
    for opcode in ["ragged-all-to-all", "send", "recv-done"] {
        assert!(matches!(refused(&plain(opcode)), Refusal::Opcode(_)));
    }
    let dynamic = plain("collective-broadcast").int(26, 1).int(100, 1);
    assert!(matches!(refused(&dynamic), Refusal::Opcode(_)));
    let of_replicas = plain("all-reduce")
        .int(26, 1)
        .int(38, 100)
        .put(49, Message::default().ints(1, &[0, 1]));
    assert!(matches!(refused(&of_replicas), Refusal::Groups(_)));
    // Flat numbers without a channel are nothing that XLA knows.
    let of_nothing = plain("all-reduce").int(38, 100).int(71, 1);
    assert!(matches!(refused(&of_nothing), Refusal::Groups(_)));
    let with_reducer = |reducer: Message| {
        let entry = computation_of(
            1,
            2,
            &[instruction(1, "parameter", &array, &[]), all_reduce(&array)],
        );
        rewrite(&module_of(&[reducer, entry]), 1, 4)
    };
    assert!(matches!(
        with_reducer(reducer("subtract")),
        Err(Refusal::Reducer(_))
    ));
    let strange = computation_of(
        100,
        12,
        &[
            instruction(10, "parameter", &array, &[]),
            instruction(11, "constant", &array, &[]),
            instruction(12, "add", &array, &[10, 11]),
        ],
    );
    assert!(matches!(with_reducer(strange), Err(Refusal::Reducer(_))));
    assert!(with_reducer(reducer("maximum")).is_ok());
    let misfit = instruction(2, "all-gather", &array, &[1])
        .int(14, 0)
        .int(26, 1)
        .int(71, 1);
    assert!(matches!(refused(&misfit), Refusal::Operands(_)));
    let elsewhere = instruction(2, "all-reduce", &array, &[99])
        .int(26, 1)
        .int(38, 100)
        .int(71, 1);
    assert!(matches!(refused(&elsewhere), Refusal::Operands(_)));
    // In a fusion.
    let inside = module_of(&[
        reducer("add"),
        computation_of(
            7,
            2,
            &[instruction(1, "parameter", &array, &[]), all_reduce(&array)],
        ),
        computation_of(1, 3, &[instruction(3, "fusion", &array, &[]).int(38, 7)]),
    ]);
    assert!(matches!(
        rewrite(&inside, 1, 4),
        Err(Refusal::Inside(_, "a fusion"))
    ));
    for partitions in [0, MOST_PARTITIONS + 1] {
        assert_eq!(
            rewrite(&inside, 1, partitions),
            Err(Refusal::Partitions(partitions))
        );
    }
    assert_eq!(
        rewrite(&inside, 1 << 9, 1 << 8),
        Err(Refusal::Partitions(1 << 17))
    );
    assert_eq!(rewrite(&[], 1, 4), Ok(None));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Bytes that make no module, and modules with some bytes changed, cut or doubled: refused or taken, never a panic, and
    /// never much larger.
    #[test]
    fn hostile_bytes_do_no_harm(
        noise in prop::collection::vec(any::<u8>(), 0..200),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
        twice in any::<bool>(),
    ) {
        let _ = rewrite(&noise, 2, 2);
        let array = shape(11, &[3, 5], &[1, 0]);
        let mut bytes = module(&array, &all_reduce(&array));
        for (index, value) in changes {
            let index = index.index(bytes.len());
            bytes[index] = value;
        }
        if twice {
            let all = bytes.clone();
            bytes.extend(all);
        } else {
            let len = cut.index(bytes.len()) + 1;
            if len % 3 == 0 {
                bytes.truncate(len);
            }
        }
        for replicas in [1, 4] {
            if let Ok(Some(after)) = rewrite(&bytes, replicas, 4 / replicas) {
                prop_assert!(after.module.len() < bytes.len() + 4096);
            }
        }
    }
}
