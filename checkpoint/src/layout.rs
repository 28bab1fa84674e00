//! The four layouts of a checkpoint's arrays.

use std::fmt;
use std::str::FromStr;

use crate::zarr::Format;

/// How arrays are laid out in a checkpoint: the version of zarr, and whether its files are objects or keys of OCDBT databases.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Layout {
    /// zarr v2, an object a file, as Orbax' handlers for Pathways expect it (`use_ocdbt=False`).
    #[default]
    Zarr2,
    /// zarr v3, an object a file (`use_ocdbt=False, use_zarr3=True`).
    Zarr3,
    /// zarr v2 in OCDBT, Orbax' default.
    OcdbtZarr2,
    /// zarr v3 in OCDBT (`use_zarr3=True`).
    OcdbtZarr3,
}

impl Layout {
    /// All four.
    pub const ALL: [Layout; 4] = [
        Layout::Zarr2,
        Layout::Zarr3,
        Layout::OcdbtZarr2,
        Layout::OcdbtZarr3,
    ];

    /// The layout of arrays of a version of zarr, in OCDBT or not.
    #[must_use]
    pub fn new(format: Format, is_ocdbt: bool) -> Self {
        match (format, is_ocdbt) {
            (Format::Zarr2, false) => Self::Zarr2,
            (Format::Zarr3, false) => Self::Zarr3,
            (Format::Zarr2, true) => Self::OcdbtZarr2,
            (Format::Zarr3, true) => Self::OcdbtZarr3,
        }
    }

    /// The version of zarr.
    #[must_use]
    pub fn format(self) -> Format {
        match self {
            Self::Zarr2 | Self::OcdbtZarr2 => Format::Zarr2,
            Self::Zarr3 | Self::OcdbtZarr3 => Format::Zarr3,
        }
    }

    /// Whether the files are keys of OCDBT databases.
    #[must_use]
    pub fn is_ocdbt(self) -> bool {
        matches!(self, Self::OcdbtZarr2 | Self::OcdbtZarr3)
    }

    /// The name on command lines.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Zarr2 => "zarr2",
            Self::Zarr3 => "zarr3",
            Self::OcdbtZarr2 => "ocdbt",
            Self::OcdbtZarr3 => "ocdbt_zarr3",
        }
    }
}

impl From<Format> for Layout {
    fn from(format: Format) -> Self {
        Self::new(format, false)
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Layout {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let mut all = Self::ALL.into_iter();
        all.find(|layout| layout.name() == name)
            .ok_or_else(|| "one of zarr2, zarr3, ocdbt, ocdbt_zarr3 is wanted".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for layout in Layout::ALL {
            assert_eq!(layout.to_string().parse(), Ok(layout));
            assert_eq!(Layout::new(layout.format(), layout.is_ocdbt()), layout);
        }
        assert!("OCDBT".parse::<Layout>().is_err());
    }
}
