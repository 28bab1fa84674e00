//! Workers in this process, driven over loopback gRPC as a proxy drives them, on the real CPU plugin.
//!
//! Needs a Python with JAX and the plugin's package: `WAYSTATION_TEST_PYTHON`, or `.venv/bin/python` of this checkout.

mod arrays;
mod bucket;
mod checkpoints;
mod flow;
mod leases;
mod local;
mod memory;
mod moves;
mod programs;
mod spanning;
mod support;
mod transfers;
