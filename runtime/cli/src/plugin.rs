//! The PJRT plugin and its options, as the flags name them.

use std::path::{Path, PathBuf};

use waystation_pjrt::{OptionValue, discover};

use crate::{
    argv::parse_bool,
    error::{Failure, one_line},
    library,
};

/// Whether the plugin joins the workers of a slice to one client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum PluginCollectives {
    /// Where it is known to be made for that.
    #[default]
    Auto,
    /// Whatever it is.
    Yes,
    /// Never.
    No,
}

impl PluginCollectives {
    /// Reads the flag's value.
    ///
    /// # Errors
    /// A text for the user.
    pub(crate) fn parse(text: &str) -> Result<PluginCollectives, String> {
        if text.eq_ignore_ascii_case("auto") {
            return Ok(PluginCollectives::Auto);
        }
        match parse_bool(text) {
            Ok(true) => Ok(PluginCollectives::Yes),
            Ok(false) => Ok(PluginCollectives::No),
            Err(_) => Err(format!("{text:?} is neither auto nor true nor false")),
        }
    }

    /// As the flag has it.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            PluginCollectives::Auto => "auto",
            PluginCollectives::Yes => "true",
            PluginCollectives::No => "false",
        }
    }

    /// With the plugin that `spec` names.
    pub(crate) fn with(self, spec: &str) -> bool {
        match self {
            PluginCollectives::Auto => spec == "cuda",
            PluginCollectives::Yes => true,
            PluginCollectives::No => false,
        }
    }
}

/// Finds the plugin's library. `python`: the interpreter whose packages may hold it.
///
/// # Errors
/// [`Failure::usage`] when there is none.
pub(crate) fn find(spec: &str, python: Option<&Path>) -> Result<PathBuf, Failure> {
    let path = discover::resolve(spec, python)
        .map_err(|error| Failure::usage(format!("--pjrt_plugin: {}", one_line(error.message()))))?;
    is_library("--pjrt_plugin", &path, "GetPjrtApi")?;
    Ok(path)
}

fn is_library(flag: &str, path: &Path, symbol: &str) -> Result<(), Failure> {
    library::check(path, symbol)
        .map_err(|error| Failure::usage(format!("{flag}: {} {error}", path.display())))
}

/// Finds the LAPACK library for a CPU plugin: `path` if one was named, else that of a Python package, if it is there.
/// Accelerators bring linear algebra of their own.
///
/// # Errors
/// [`Failure::usage`] when the file that was named is no such library.
pub(crate) fn lapack(
    path: Option<PathBuf>,
    spec: &str,
    python: Option<&Path>,
) -> Result<Option<PathBuf>, Failure> {
    match path {
        Some(path) => {
            is_library("--lapack", &path, "dgetrf")?;
            Ok(Some(path))
        }
        None if matches!(spec, "cuda" | "tpu") => Ok(None),
        None => Ok(discover::lapack(python)
            .inspect_err(|error| tracing::debug!("{}", one_line(error.message())))
            .ok()),
    }
}

/// Options of the plugin's client. Only CPU plugins make as many devices as one asks for.
///
/// # Errors
/// [`Failure::usage`] when the plugin finds its devices itself.
pub(crate) fn options(
    spec: &str,
    devices: Option<u32>,
) -> Result<Vec<(String, OptionValue)>, Failure> {
    match devices {
        None => Ok(Vec::new()),
        Some(_) if matches!(spec, "cuda" | "tpu") => Err(Failure::usage(format!(
            "--devices_per_worker is for CPU plugins, {spec} shows the devices of the machine: leave it out"
        ))),
        Some(count) => Ok(vec![(
            "cpu_device_count".to_owned(),
            OptionValue::Int64(i64::from(count)),
        )]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::USAGE;

    #[test]
    fn a_missing_plugin_is_the_users_to_mend() {
        let failure = find("/no/such/plugin.so", None).unwrap_err();
        assert_eq!(failure.status, USAGE);
        assert!(failure.message.contains("/no/such/plugin.so"), "{failure}");
        assert!(!failure.message.contains('\n'), "{failure}");
        let failure = find("/etc/passwd", None).unwrap_err();
        assert_eq!(failure.status, USAGE);
        assert!(failure.message.contains("no shared library"), "{failure}");
        let library = library::pretend("dgetrf");
        let failure = find(&library.path().display().to_string(), None).unwrap_err();
        assert!(failure.message.contains("without GetPjrtApi"), "{failure}");
    }

    #[test]
    fn lapack_is_looked_for_unless_named() {
        let failure = lapack(Some("/no/such/lapack.so".into()), "cpu", None).unwrap_err();
        assert_eq!(failure.status, USAGE);
        assert!(failure.message.contains("/no/such/lapack.so"), "{failure}");
        let failure = lapack(Some("/etc/passwd".into()), "cpu", None).unwrap_err();
        assert_eq!(failure.status, USAGE);
        assert!(failure.message.contains("no shared library"), "{failure}");
        let file = library::pretend("scipy_dgetrf_");
        let named = lapack(Some(file.path().to_owned()), "tpu", None).unwrap();
        assert_eq!(named.as_deref(), Some(file.path()));
        assert_eq!(lapack(None, "tpu", None).unwrap(), None);
        let nobody = Some(Path::new("/no/such/python"));
        assert_eq!(lapack(None, "cpu", nobody).unwrap(), None);
    }

    #[test]
    fn plugins_for_gpus_join_workers() {
        let with = |text: &str, spec| PluginCollectives::parse(text).unwrap().with(spec);
        assert!(with("auto", "cuda") && !with("auto", "cpu") && !with("auto", "tpu"));
        assert!(!with("false", "cuda") && with("true", "/p.so"));
        assert!(PluginCollectives::parse("perhaps").is_err());
        for text in ["auto", "true", "false"] {
            assert_eq!(PluginCollectives::parse(text).unwrap().as_str(), text);
        }
    }

    #[test]
    fn device_counts_are_for_cpus() {
        let options = options("cpu", Some(8)).unwrap();
        assert!(
            matches!(&options[..], [(name, OptionValue::Int64(8))] if name == "cpu_device_count")
        );
        assert!(super::options("/x/plugin.so", None).unwrap().is_empty());
        assert_eq!(super::options("tpu", Some(4)).unwrap_err().status, USAGE);
    }
}
