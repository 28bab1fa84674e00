//! Linear algebra for CPU plugins, which come without the FFI targets that JAX lowers it to.

use std::path::Path;

use waystation_pjrt::{Client, Plugin};

/// Names and values that compiled programs depend on.
pub(crate) type Facts = Vec<(String, String)>;

/// Gives a CPU plugin the targets, and what compiled programs then depend on. Without a library, or with one that cannot
/// be used, programs with linear algebra fail, with the plugin's own words, and all others run.
pub(crate) fn register(plugin: &Plugin, client: &Client, lapack: Option<&Path>) -> Facts {
    if client.platform_name() != "cpu" {
        return Vec::new();
    }
    let Some(lapack) = lapack else {
        tracing::warn!(
            "no LAPACK: programs with linear algebra fail on this worker; `pip install scipy-openblas32`, or name a \
             library with --lapack=/path/libopenblas.so"
        );
        return Vec::new();
    };
    match waystation_lapack::register(plugin, lapack) {
        Ok(registered) => {
            tracing::info!(
                library = registered.library,
                targets = registered.targets.len(),
                "linear algebra is there"
            );
            let version = waystation_lapack::VERSION;
            let targets = registered.targets.join(" ");
            vec![
                ("ffi_targets".to_owned(), format!("{version} {targets}")),
                ("lapack".to_owned(), registered.library),
            ]
        }
        Err(error) => {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "programs with linear algebra fail on this worker"
            );
            Vec::new()
        }
    }
}
