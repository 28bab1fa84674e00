//! The texts that go with an executable: as one string in its cache entry.

use waystation_cache::Text;

/// Before the length of each text. No text of XLA's begins a line so.
const MARK: &str = "//// waystation hlo ";

/// Texts by what their files' names have behind the module's. They stay as the entry has them until somebody asks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kept(Text);

impl Kept {
    /// Takes suffixes and texts; `None` where there are none. Takes time in proportion to them, as reading them does.
    pub(super) fn new(texts: &[(String, String)]) -> Option<Kept> {
        if texts.is_empty() {
            return None;
        }
        let mut all = String::new();
        for (suffix, text) in texts {
            all += &format!("{MARK}{} {suffix}\n", text.len());
            all += text;
        }
        Text::new(&all).map(Kept)
    }

    /// What an entry has.
    pub(crate) fn of(text: Text) -> Kept {
        Kept(text)
    }

    /// For the entry.
    pub(crate) fn into_text(self) -> Text {
        self.0
    }

    /// Suffixes and texts; none where an entry has something else in their place.
    pub(super) fn texts(&self) -> Vec<(String, String)> {
        self.0
            .read()
            .and_then(|all| split(&all))
            .unwrap_or_default()
    }

    /// The program after all passes.
    pub(crate) fn optimized(&self) -> Option<String> {
        let mut texts = self.texts().into_iter();
        let after = texts.find(|(suffix, _)| suffix.ends_with(super::AFTER));
        after.map(|(_, text)| text)
    }
}

/// Suffixes and texts in what [`Kept::new`] has joined; `None` for anything else.
fn split(all: &str) -> Option<Vec<(String, String)>> {
    let mut rest = all;
    let mut texts = Vec::new();
    while !rest.is_empty() {
        let (head, behind) = rest.strip_prefix(MARK)?.split_once('\n')?;
        let (length, suffix) = head.split_once(' ')?;
        let (text, next) = behind.split_at_checked(length.parse().ok()?)?;
        // It becomes part of a file's name.
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if !suffix.chars().all(is_name) || suffix.len() > 100 || suffix.contains("..") {
            return None;
        }
        texts.push((suffix.to_owned(), text.to_owned()));
        rest = next;
    }
    Some(texts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_read_as_written() {
        let texts = vec![
            (
                "before_optimizations.txt".to_owned(),
                "HloModule f\n".to_owned(),
            ),
            (
                "cpu_after_optimizations.txt".to_owned(),
                format!("{MARK}3 x\n\u{e4}"),
            ),
        ];
        let kept = Kept::new(&texts).expect("texts");
        assert_eq!(kept.texts(), texts);
        assert_eq!(kept.optimized().as_ref(), Some(&texts[1].1));
        assert_eq!(Kept::of(kept.clone().into_text()), kept);
        assert_eq!(Kept::new(&[]), None);
    }

    #[test]
    fn what_is_something_else_is_no_texts() {
        for text in [
            "",
            "HloModule f",
            "//// waystation hlo 9 a\nshort",
            "//// waystation hlo x a\n",
            "//// waystation hlo 1 ../a\nx",
            "//// waystation hlo 1 a/b\nx",
            "//// waystation hlo 1 a..b\nx",
            "//// waystation hlo 1 a\n\u{e4}",
        ] {
            let kept = Kept::of(Text::new(text).expect("packed"));
            assert!(kept.texts().is_empty(), "{text}");
            assert_eq!(kept.optimized(), None, "{text}");
        }
    }
}
