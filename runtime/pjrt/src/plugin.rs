//! A loaded plugin.

use crate::api::Api;
use crate::context::Empty;
use crate::error::{Code, Error};
use crate::sys;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Plugins of this process by canonical path. They stay here for good: XLA starts threads and registers
/// destructors that outlive any moment at which unloading the library could be safe.
static LOADED: Mutex<Option<HashMap<PathBuf, Arc<Plugin>>>> = Mutex::new(None);

/// A PJRT plugin: a shared library that was loaded, asked for its functions, and initialised once.
pub struct Plugin {
    path: PathBuf,
    api: Api,
    /// Names of the FFI targets of ours that it knows.
    ffi_targets: Mutex<BTreeSet<String>>,
    /// XLA's number of the type of user data, once it is registered.
    user_data: Mutex<Option<i64>>,
    /// For executions without data, once there are targets that look for it.
    no_data: OnceLock<Empty>,
    /// Whether programs that are compiled pass by us.
    transforming: Mutex<bool>,
}

impl std::fmt::Debug for Plugin {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Plugin")
            .field("path", &self.path)
            .field("api", &self.api)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Api {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (major, minor) = self.api_version();
        write!(out, "Api({major}.{minor})")
    }
}

impl Plugin {
    /// Loads the plugin at `path` and initialises it; the same plugin again gives the same handle.
    ///
    /// # Errors
    ///
    /// [`Code::FailedPrecondition`] if the file cannot be loaded, is no PJRT plugin, or speaks a version of the
    /// C API before 0.57; what the plugin reports if it fails to initialise.
    pub fn load(path: &Path) -> Result<Arc<Self>, Error> {
        const FUNCTION: &str = "GetPjrtApi";
        let path = path.canonicalize().map_err(|error| {
            Error::own(
                Code::FailedPrecondition,
                FUNCTION,
                format!("cannot open the PJRT plugin {}: {error}", path.display()),
            )
        })?;
        // Held while loading, so that two threads initialise a plugin once.
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded = loaded.get_or_insert_default();
        if let Some(plugin) = loaded.get(&path) {
            return Ok(Arc::clone(plugin));
        }
        let refuse = |error: libloading::Error| {
            Error::own(
                Code::FailedPrecondition,
                FUNCTION,
                format!(
                    "{} cannot be loaded as a PJRT plugin: {error}",
                    path.display()
                ),
            )
        };
        // Local symbols, so that several plugins, each with its own XLA, can live in one process.
        // SAFETY: loading runs the library's initialisers; the user chose this file as the plugin to run.
        let library =
            unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) }.map_err(refuse)?;
        // SAFETY: a PJRT plugin exports `GetPjrtApi` with this signature.
        let get = unsafe {
            library.get::<unsafe extern "C" fn() -> *const sys::PJRT_Api>(b"GetPjrtApi\0")
        }
        .map_err(refuse)?;
        // SAFETY: as above.
        let table = unsafe { get() };
        // The library stays loaded, see `LOADED`; also if the rest fails, since its code has run.
        std::mem::forget(library);
        // SAFETY: the table comes from `GetPjrtApi` of a library that stays loaded.
        let plugin = unsafe { Self::from_table(path.clone(), table) }?;
        loaded.insert(path, Arc::clone(&plugin));
        Ok(plugin)
    }

    /// Takes a table of functions and initialises the plugin behind it.
    ///
    /// # Safety
    ///
    /// As [`Api::new`].
    pub(crate) unsafe fn from_table(
        path: PathBuf,
        table: *const sys::PJRT_Api,
    ) -> Result<Arc<Self>, Error> {
        // SAFETY: passed on from this function's contract.
        let api = unsafe { Api::new(table) }?;
        // SAFETY: the arguments hold no pointers.
        unsafe { api.call(&mut sys::PJRT_Plugin_Initialize_Args::new()) }?;
        let (major, minor) = api.api_version();
        tracing::debug!(path = %path.display(), major, minor, "loaded a PJRT plugin");
        Ok(Arc::new(Self {
            path,
            api,
            ffi_targets: Mutex::default(),
            user_data: Mutex::default(),
            no_data: OnceLock::new(),
            transforming: Mutex::default(),
        }))
    }

    /// The library's canonical path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Major and minor version of the PJRT C API that the plugin was built with.
    #[must_use]
    pub fn api_version(&self) -> (i32, i32) {
        self.api.api_version()
    }

    /// Facts that the plugin tells about itself before a client exists, such as `stablehlo_current_version`.
    ///
    /// # Errors
    ///
    /// What the plugin reports.
    pub fn attributes(&self) -> Result<Vec<(String, crate::OptionValue)>, Error> {
        let mut args = sys::PJRT_Plugin_Attributes_Args::new();
        // SAFETY: the arguments hold no input pointers; the attributes live as long as the process.
        unsafe {
            self.api.call(&mut args)?;
            Ok(crate::value::from_raw(args.attributes, args.num_attributes))
        }
    }

    /// Names of the FFI targets of ours that the plugin knows.
    pub(crate) fn ffi_targets(&self) -> &Mutex<BTreeSet<String>> {
        &self.ffi_targets
    }

    /// XLA's number of the type of user data, once it is registered.
    pub(crate) fn user_data(&self) -> &Mutex<Option<i64>> {
        &self.user_data
    }

    /// For executions without data, once there are targets that look for it.
    pub(crate) fn no_data(&self) -> &OnceLock<Empty> {
        &self.no_data
    }

    /// Whether programs that are compiled pass by us.
    pub(crate) fn transforming(&self) -> &Mutex<bool> {
        &self.transforming
    }

    /// The door to the plugin's functions.
    pub(crate) fn api(&self) -> &Api {
        &self.api
    }
}
