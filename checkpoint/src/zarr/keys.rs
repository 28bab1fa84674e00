//! The names of chunks.

/// How the files of an array's chunks are named, below the array's folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keys {
    /// Whether the names begin with `c`, as zarr v3's do by default.
    pub prefixed: bool,
    /// What stands between the parts of a name: `.` or `/`.
    pub separator: char,
}

impl Keys {
    /// What Orbax writes in zarr v2: `0.1`, and `0` for an array of rank 0.
    pub const V2: Keys = Keys {
        prefixed: false,
        separator: '.',
    };
    /// What Orbax writes in zarr v3: `c/0/1`, and `c` for an array of rank 0.
    pub const V3: Keys = Keys {
        prefixed: true,
        separator: '/',
    };

    /// The name of the chunk at a place of the grid.
    #[must_use]
    pub fn key(self, index: &[i64]) -> String {
        use std::fmt::Write as _;
        let mut key = String::new();
        if self.prefixed {
            key.push('c');
        } else if index.is_empty() {
            key.push('0');
        }
        for i in index {
            if !key.is_empty() {
                key.push(self.separator);
            }
            // Writing to a string does not fail.
            let _ = write!(key, "{i}");
        }
        key
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_both_versions() {
        for (prefixed, separator, index, key) in [
            (false, '.', &[][..], "0"),
            (false, '.', &[1, 20], "1.20"),
            (false, '/', &[1, 20], "1/20"),
            (true, '/', &[], "c"),
            (true, '/', &[0], "c/0"),
            (true, '.', &[1, 20], "c.1.20"),
        ] {
            let keys = Keys {
                prefixed,
                separator,
            };
            assert_eq!(keys.key(index), key);
        }
    }
}
