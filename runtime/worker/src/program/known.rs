//! The options of `xla.DebugOptions` by name: their numbers and types, as jaxlib 0.8.3 to 0.12 have them. Options are never
//! renumbered; newer ones that are not in the table are taken all the same, only not brought to a normal form.

use std::{collections::HashMap, sync::LazyLock};

/// Lines of number, type and name. The type is `other` for what is not compared by value: enums, lists, maps, reals.
const TABLE: &str = include_str!("debug_options.txt");

/// How many similar names a message offers.
const SIMILAR: usize = 3;

/// What a value of an option is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Bool,
    Int,
    Text,
    Other,
}

/// An option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) number: u32,
    pub(super) kind: Kind,
}

static OPTIONS: LazyLock<HashMap<&'static str, Known>> = LazyLock::new(|| {
    let row = |line: &'static str| {
        let mut words = line.split(' ');
        let number = words.next()?.parse().ok()?;
        let kind = match words.next()? {
            "bool" => Kind::Bool,
            "int" => Kind::Int,
            "string" => Kind::Text,
            _ => Kind::Other,
        };
        Some((words.next()?, Known { number, kind }))
    };
    TABLE.lines().filter_map(row).collect()
});

/// The option of a name.
pub(super) fn find(name: &str) -> Option<Known> {
    OPTIONS.get(name).copied()
}

/// Names that somebody who wrote `name` may have meant, the nearest first. None where nothing is near.
pub(crate) fn similar(name: &str) -> Vec<&'static str> {
    // A third of the name may be wrong.
    let most = name.len() / 3;
    let mut near: Vec<(usize, &str)> = OPTIONS
        .keys()
        .map(|known| (distance(name, known), *known))
        .filter(|(distance, _)| *distance <= most)
        .collect();
    near.sort_unstable();
    near.into_iter()
        .take(SIMILAR)
        .map(|(_, known)| known)
        .collect()
}

/// Letters to put in, take out or change (Levenshtein's distance).
fn distance(a: &str, b: &str) -> usize {
    let b = b.as_bytes();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let changed = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_found_with_number_and_kind() {
        assert_eq!(OPTIONS.len(), TABLE.lines().count(), "every line is read");
        let of = |name| find(name).map(|known| (known.number, known.kind));
        assert_eq!(of("xla_backend_optimization_level"), Some((31, Kind::Int)));
        assert_eq!(of("xla_cpu_enable_fast_math"), Some((99, Kind::Bool)));
        assert_eq!(of("xla_dump_to"), Some((109, Kind::Text)));
        assert_eq!(of("xla_disable_hlo_passes"), Some((30, Kind::Other)));
        assert_eq!(of("xla_foo"), None);
    }

    #[test]
    fn the_nearest_names_are_offered() {
        assert_eq!(
            similar("xla_backend_optimisation_level")[0],
            "xla_backend_optimization_level"
        );
        assert_eq!(
            similar("xla_cpu_enabel_fast_math")[0],
            "xla_cpu_enable_fast_math"
        );
        assert!(similar("xla_q").is_empty());
        assert!(similar("").is_empty());
        assert_eq!(distance("kitten", "sitting"), 3);
    }
}
