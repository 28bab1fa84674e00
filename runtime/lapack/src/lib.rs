//! The FFI targets of JAX's linear algebra on CPU, for CPU plugins that come without them.
//!
//! JAX lowers `jnp.linalg` on CPU to calls of targets such as `lapack_sgesdd_ffi`, which jaxlib has and bare PJRT
//! plugins have not. [`register`] gives a plugin all of them, with the operands, results and attributes that jaxlib's
//! have (jax-ml/jax, `jaxlib/cpu/lapack_kernels.h`), on a LAPACK library that is loaded at run time.
//!
//! Beside the `lapack_*_ffi` targets there are `tridiagonal_solve_perturbed_ffi` and `cpu_csr_sparse_dense_ffi`, which
//! need no LAPACK.
//!
//! # Matrices
//!
//! Operands have any number of leading batch dimensions; a matrix is the last two, column by column (JAX asks XLA for
//! that layout). Matrices of a batch are worked on one after the other. Where LAPACK gives an `info`, it is the result
//! `info` of the target, one for each matrix, and JAX turns values other than 0 into NaN; it fails no program.
//!
//! # Threads
//!
//! XLA calls targets from a pool of its own. The library therefore gets one thread for itself, unless
//! `OPENBLAS_NUM_THREADS` says otherwise.

#![allow(
    unsafe_code,
    reason = "calls into LAPACK; each is preceded by checks of every size it relies on"
)]

mod batch;
mod eigen;
mod library;
mod linear;
mod qr;
mod reduce;
mod scalar;
mod schur;
mod sparse;
mod svd;
mod targets;
mod tridiagonal;
mod workspace;

pub use library::Error;

use std::path::Path;
use waystation_pjrt::{Code, Plugin};

/// What a plugin has been given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registered {
    /// Names of the targets.
    pub targets: Vec<&'static str>,
    /// The library's own words about itself: name, version, build.
    pub library: String,
}

/// Changes when a target's behaviour changes; part of what compiled programs depend on.
pub const VERSION: u32 = 1;

/// Loads the LAPACK library `path` and registers every target with a CPU plugin. Targets that the plugin has itself
/// stay the plugin's. A process has one library: a second call has to name the same.
///
/// # Errors
///
/// [`Error`] if the library cannot be loaded, lacks a routine, or is not the one in use, or if the plugin takes no
/// targets.
pub fn register(plugin: &Plugin, path: &Path) -> Result<Registered, Error> {
    let library = library::load(path)?;
    let mut targets = Vec::new();
    for (name, register) in targets::all() {
        match register(plugin, name, "Host") {
            Ok(()) => targets.push(name),
            Err(error) if error.code() == Code::AlreadyExists => {
                tracing::debug!(name, "the plugin has this FFI target itself");
            }
            Err(source) => {
                return Err(Error::Register {
                    name: name.to_owned(),
                    source,
                });
            }
        }
    }
    Ok(Registered {
        targets,
        library: library.version.clone(),
    })
}
