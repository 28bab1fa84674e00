//! Safe bindings to the PJRT C API, loaded from a plugin at run time.
//!
//! PJRT is the interface between a framework and an XLA backend. A backend is a shared library, the *plugin*,
//! that exports `GetPjrtApi`; it returns a table of functions. This crate loads such a library, asks the table
//! how long it is before it uses any slot, and offers what Waystation needs as ordinary Rust types. It is the
//! only crate of Waystation that contains `unsafe` code, beside the FFI targets of `waystation-lapack`; none of its public
//! functions needs any.
//!
//! - [`discover`] finds a plugin by name (`cpu`, `cuda`, `tpu`) in a Python environment, or takes a path;
//! - [`Plugin`] is a loaded library, [`Client`] a runtime with its [`Device`]s and [`Memory`]s;
//! - [`Buffer`] is an array on one device, [`LoadedExecutable`] a program ready to run;
//! - [`Event`] is a promise of the plugin, as a future or with a callback;
//! - [`Client::create_shared`] makes this process one of several that a plugin joins to one client, by a [`KeyValueStore`];
//! - [`ffi`] registers functions of ours that programs call by name, and that may end their calls later;
//! - [`Client::compile_transformed`] changes a program when it is optimized and no code is made yet, [`ExecuteContext`] hands
//!   something of ours to the targets of one execution, and [`Plugin::check_spanning`] tries whether a plugin has both.
//!
//! # Versions
//!
//! Plugins of C API 0.57 and later are taken. A function that a plugin lacks gives an [`Error`] with
//! [`Code::Unimplemented`] that names it, when it is called and not before.
//!
//! # Ownership and threads
//!
//! Each handle owns one object of the plugin, keeps its parents alive (buffer and executable their client, the
//! client its plugin), and destroys the object once, when its last clone is dropped. A plugin is never
//! unloaded. All handles may be used from any thread at once, as PJRT requires of plugins.
//! Callbacks run on threads of the plugin and must be short; one that panics is reported and goes no further.

#![allow(unsafe_code, reason = "this crate is the border to a C interface")]

mod api;
mod buffer;
mod client;
mod completion;
mod context;
mod device;
pub mod discover;
mod element;
mod error;
mod event;
mod executable;
mod execute;
#[cfg(test)]
mod fake;
pub mod ffi;
mod heap;
mod host;
mod key_value;
#[cfg(feature = "mock")]
pub mod mock;
mod plugin;
mod spanning;
mod sys;
mod transfer;
mod transform;
mod value;
mod view;

pub use buffer::Buffer;
pub use client::Client;
pub use context::ExecuteContext;
pub use device::{Device, GlobalDevice, Memory};
pub use element::ElementType;
pub use error::{Code, Error};
pub use event::Event;
pub use executable::{LoadedExecutable, MemoryStats};
pub use execute::{ExecuteOptions, Execution, OneExecution};
pub use heap::release_free_heap;
pub use host::{AlignedBytes, HostBytes};
pub use key_value::KeyValueStore;
pub use plugin::Plugin;
pub use transfer::to_host::ToHost;
pub use value::OptionValue;
pub use view::HostView;
