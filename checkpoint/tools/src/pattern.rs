//! Which arrays are meant.

use std::str::FromStr;

/// A name in which `*` stands for any characters and `?` for one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern(Vec<char>);

impl Pattern {
    /// Whether a name is meant.
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        let name: Vec<char> = name.chars().collect();
        let (mut p, mut n) = (0, 0);
        // Where to go on when the last `*` has to take one more.
        let mut back = None;
        while n < name.len() {
            match self.0.get(p) {
                Some('*') => {
                    back = Some((p + 1, n));
                    p += 1;
                }
                Some(&c) if c == '?' || c == name[n] => {
                    p += 1;
                    n += 1;
                }
                _ => {
                    let Some((after, taken)) = back else {
                        return false;
                    };
                    back = Some((after, taken + 1));
                    (p, n) = (after, taken + 1);
                }
            }
        }
        self.0[p..].iter().all(|&c| c == '*')
    }

    /// As it was written.
    #[must_use]
    pub fn text(&self) -> String {
        self.0.iter().collect()
    }
}

impl FromStr for Pattern {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Pattern, Self::Err> {
        Ok(Pattern(text.chars().collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_and_question_marks() {
        for (pattern, name, matches) in [
            ("*", "", true),
            ("*", "a.b", true),
            ("layers.*.w", "layers.0.w", true),
            ("layers.*.w", "layers.0.b", false),
            ("layers.?.w", "layers.10.w", false),
            ("*.w", "a.w.b.w", true),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("a", "a", true),
            ("a", "ab", false),
            ("", "", true),
        ] {
            let pattern: Pattern = pattern.parse().unwrap();
            assert_eq!(pattern.matches(name), matches, "{pattern:?} {name}");
        }
    }
}
