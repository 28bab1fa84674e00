//! The memory table that goes with an out-of-memory status: what lies on the device, by the Python stacks that made it.
//! jaxlib's client finds the stacks by their user contexts and writes the table out below the error's text.
//!
//! A client sees its own arrays alone: user contexts are the client's own numbers, and what other clients hold is one sum.

use std::{
    collections::{BTreeMap, HashMap},
    time::{SystemTime, UNIX_EPOCH},
};

use waystation_proto::ifrt_proxy_contrib_pathways::{
    ObjectStoreDumpProto,
    object_store_dump_proto::{
        Dump, PerErrorContext, ResultStatusor, per_error_context::PerCreator,
    },
};

/// The status payload's key.
pub(crate) const KEY: &str = "type.googleapis.com/ifrt_proxy_contrib_pathways.ObjectStoreDumpProto";

/// Rows with a stack of their own; the smaller ones are summed up. The client shows 20 stacks, and several contexts may be
/// of one stack. Each failed array carries the table, so it is kept to a few kilobytes.
const ROWS: usize = 64;
/// Longest name shown of a program, in bytes.
const NAME_BYTES: usize = 80;
/// The context of no request.
const UNKNOWN: u64 = 0;

/// A table that is being filled.
#[derive(Debug, Default)]
pub(crate) struct Table<'a> {
    own: HashMap<(u64, &'a str), Sum>,
    others: Sum,
}

#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    ready: (u64, u64),
    coming: (u64, u64),
}

impl Sum {
    fn add(&mut self, other: Sum) {
        self.ready.0 += other.ready.0;
        self.ready.1 += other.ready.1;
        self.coming.0 += other.coming.0;
        self.coming.1 += other.coming.1;
    }

    fn bytes(self) -> u64 {
        self.ready.1 + self.coming.1
    }
}

impl<'a> Table<'a> {
    /// One shard of the client's: the context and the name of what made it, and whether its content is there.
    pub(crate) fn own(&mut self, user_context: u64, maker: &'a str, bytes: u64, ready: bool) {
        let sum = self.own.entry((user_context, maker)).or_default();
        sum.add(one(bytes, ready));
    }

    /// One shard of another client's.
    pub(crate) fn other(&mut self, bytes: u64, ready: bool) {
        self.others.add(one(bytes, ready));
    }

    /// The table as the client takes it.
    pub(crate) fn finish(self, device: String) -> ObjectStoreDumpProto {
        let mut rows: Vec<_> = self.own.into_iter().collect();
        rows.sort_unstable_by_key(|&(key, sum)| (std::cmp::Reverse(sum.bytes()), key));
        let mut rest = Sum::default();
        let left_out = rows.split_off(rows.len().min(ROWS));
        let count = left_out.len();
        for (_, sum) in left_out {
            rest.add(sum);
        }
        // By context, the largest first.
        let mut contexts: Vec<PerErrorContext> = Vec::new();
        let mut places: BTreeMap<u64, usize> = BTreeMap::new();
        let mut put = |context: u64, maker: String, sum: Sum| {
            let place = *places.entry(context).or_insert(contexts.len());
            if place == contexts.len() {
                contexts.push(PerErrorContext {
                    error_context_id: Some(context),
                    per_creator: Vec::new(),
                });
            }
            if let Some(entry) = contexts.get_mut(place) {
                entry.per_creator.push(row(maker, sum));
            }
        };
        for ((context, maker), sum) in rows {
            put(context, shortened(maker), sum);
        }
        if count > 0 {
            put(UNKNOWN, format!("{count} smaller entries"), rest);
        }
        if self.others.ready.0 + self.others.coming.0 > 0 {
            put(UNKNOWN, "other clients".to_owned(), self.others);
        }
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let nanos = now.map(|since| u64::try_from(since.as_nanos()).unwrap_or(u64::MAX));
        ObjectStoreDumpProto {
            device: Some(device),
            dump_timestamp_ns: nanos.ok(),
            result_statusor: Some(ResultStatusor::Dump(Dump {
                per_error_context: contexts,
                warning: None,
            })),
        }
    }
}

fn one(bytes: u64, ready: bool) -> Sum {
    let (some, none) = ((1, bytes), (0, 0));
    Sum {
        ready: if ready { some } else { none },
        coming: if ready { none } else { some },
    }
}

fn row(creator: String, sum: Sum) -> PerCreator {
    PerCreator {
        creator: Some(creator),
        ready_obj_count: Some(sum.ready.0),
        ready_total_size: Some(sum.ready.1),
        not_ready_obj_count: Some(sum.coming.0),
        not_ready_total_size: Some(sum.coming.1),
    }
}

fn shortened(name: &str) -> String {
    if name.len() <= NAME_BYTES {
        return name.to_owned();
    }
    let end = (0..=NAME_BYTES)
        .rev()
        .find(|&end| name.is_char_boundary(end));
    format!("{}...", &name[..end.unwrap_or(0)])
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;

    fn rows(dump: &ObjectStoreDumpProto) -> Vec<(u64, String, u64, u64, u64, u64)> {
        let Some(ResultStatusor::Dump(dump)) = &dump.result_statusor else {
            panic!("no dump");
        };
        let of = |context: &PerErrorContext| {
            let id = context.error_context_id();
            let rows = context.per_creator.iter().map(move |row| {
                (
                    id,
                    row.creator().to_owned(),
                    row.ready_obj_count(),
                    row.ready_total_size(),
                    row.not_ready_obj_count(),
                    row.not_ready_total_size(),
                )
            });
            rows.collect::<Vec<_>>()
        };
        dump.per_error_context.iter().flat_map(of).collect()
    }

    #[test]
    fn rows_are_sums_by_stack_and_maker_the_largest_first() {
        let mut table = Table::default();
        table.own(7, "device_put", 10, true);
        table.own(7, "device_put", 5, true);
        table.own(7, "jit_f", 1, false);
        table.own(9, "jit_f", 100, true);
        table.other(1000, true);
        table.other(1, false);
        let dump = table.finish("3 (cpu)".to_owned());
        assert_eq!(dump.device(), "3 (cpu)");
        assert!(dump.dump_timestamp_ns() > 0);
        assert_eq!(
            rows(&dump),
            [
                (9, "jit_f".to_owned(), 1, 100, 0, 0),
                (7, "device_put".to_owned(), 2, 15, 0, 0),
                (7, "jit_f".to_owned(), 0, 0, 1, 1),
                (0, "other clients".to_owned(), 1, 1000, 1, 1),
            ]
        );
    }

    #[test]
    fn a_table_stays_small_and_its_sums_whole() {
        let name = "n\u{e4}".repeat(1000);
        let mut table = Table::default();
        for context in 1..=10_000 {
            table.own(context, &name, context, true);
        }
        let dump = table.finish("d".to_owned());
        assert!(dump.encoded_len() < 10_000, "{} bytes", dump.encoded_len());
        let rows = rows(&dump);
        assert_eq!(rows.len(), ROWS + 1);
        assert_eq!(rows[0].0, 10_000);
        let last = rows.last().expect("a row");
        assert_eq!((last.0, last.1.as_str()), (0, "9936 smaller entries"));
        assert_eq!(
            rows.iter().map(|row| row.3).sum::<u64>(),
            10_000 * 10_001 / 2
        );
    }
}
