//! Safe bindings to the PJRT C API, loaded from a plugin at run time.
