//! The texts that go with an executable: as one string in its cache entry, compressed in memory.

use bytes::Bytes;

/// Before the length of each text. No text of XLA's begins a line so.
const MARK: &str = "//// waystation hlo ";

/// zstd level: texts shrink to a tenth with the fastest.
const LEVEL: i32 = 1;

/// Texts by what their files' names have behind the module's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kept {
    texts: Vec<Packed>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Packed {
    suffix: String,
    zstd: Bytes,
    bytes: usize,
}

impl Kept {
    /// Takes suffixes and texts. Takes time in proportion to them.
    pub(super) fn new(texts: Vec<(String, String)>) -> Kept {
        let pack = |(suffix, text): (String, String)| {
            let zstd = zstd::bulk::compress(text.as_bytes(), LEVEL).ok()?.into();
            Some(Packed {
                suffix,
                zstd,
                bytes: text.len(),
            })
        };
        Kept {
            texts: texts.into_iter().filter_map(pack).collect(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.texts.is_empty()
    }

    /// Suffixes and texts.
    pub(super) fn texts(&self) -> Vec<(String, String)> {
        let unpack = |packed: &Packed| Some((packed.suffix.clone(), packed.text()?));
        self.texts.iter().filter_map(unpack).collect()
    }

    /// The program after all passes.
    pub(crate) fn optimized(&self) -> Option<String> {
        let after = self.texts.iter();
        after
            .filter(|packed| packed.suffix.ends_with(super::AFTER))
            .find_map(Packed::text)
    }

    /// For the cache entry, which compresses it by itself.
    pub(crate) fn write(&self) -> String {
        let mut all = String::new();
        for (suffix, text) in self.texts() {
            all += &format!("{MARK}{} {suffix}\n{text}", text.len());
        }
        all
    }

    /// Reads what [`Kept::write`] wrote; `None` for anything else.
    pub(crate) fn read(all: &str) -> Option<Kept> {
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
        Some(Kept::new(texts)).filter(|kept| !kept.is_empty())
    }
}

impl Packed {
    fn text(&self) -> Option<String> {
        let bytes = zstd::bulk::decompress(&self.zstd, self.bytes).ok()?;
        String::from_utf8(bytes).ok()
    }
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
        let kept = Kept::new(texts.clone());
        let read = Kept::read(&kept.write()).expect("readable");
        assert_eq!(read.texts(), texts);
        assert_eq!(read, kept);
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
            assert_eq!(Kept::read(text), None, "{text}");
        }
    }
}
