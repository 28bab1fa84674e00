//! Any Orbax checkpoint looked at, verified, compared, converted, exported and copied: without devices, and without Python.
//!
//! | module | holds |
//! | --- | --- |
//! | [`tree`] | what lies at a location: steps, items |
//! | [`item`] | an open item: its arrays in whichever layout, and what is said of them |
//! | [`verify`] | every chunk read, every file held against the others |
//! | [`diff`] | two items compared |
//! | [`convert`] | other layouts, chunks, element types, compression; in place, what does not fit together mended |
//! | [`export`] | safetensors and `.npy` |
//! | [`copy`] | a whole checkpoint as it is, elsewhere |
//!
//! Formats are those of `waystation-checkpoint` and `waystation-ocdbt`. An array is read here otherwise than a worker restores it:
//! there may be several of one name, in different layouts, of which none must be passed over; what is stored is to be had as
//! it is; and all objects are listed, for one too many is a fault.
//!
//! Everything reads and writes through one [`Memory`], the bound on what is held of arrays, and tells a [`Progress`] how far
//! it is. Long work that was interrupted goes on where it was when it is begun again.

mod blocks;
pub mod convert;
pub mod copy;
pub mod diff;
mod error;
pub mod export;
mod info;
pub mod item;
mod memory;
mod objects;
mod pattern;
mod place;
mod progress;
mod sink;
mod target;
pub mod tree;
mod values;
pub mod verify;

pub use error::{Error, Result};
pub use info::{ArrayMetadata, Leaf, TreeMetadata, sharding_words};
pub use item::{Array, Item};
pub use memory::Memory;
pub use pattern::Pattern;
pub use place::Place;
pub use progress::{Done, Progress};
pub use tree::Checkpoint;
pub use waystation_checkpoint::Layout;
