//! One file a command: its flags (whose comments are the help text) and what it does.

pub(crate) mod cache;
pub(crate) mod checkpoint;
pub(crate) mod compile_child;
pub(crate) mod doctor;
pub(crate) mod proxy;
pub(crate) mod resource_manager;
pub(crate) mod run;
pub(crate) mod server;
pub(crate) mod status;
pub(crate) mod tied;
pub(crate) mod up;
pub(crate) mod worker;
