//! The bucket: opening a location, its layout, and how long what it holds is kept.
