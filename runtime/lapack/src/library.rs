//! The LAPACK library: loading, and the signatures of its routines.
//!
//! Signatures are those of the reference LAPACK (netlib.org) as a Fortran compiler exports them: all arguments by
//! pointer, and the lengths of the texts, here always 1, as `size_t` behind the last argument.

use crate::scalar::Scalar;
use libloading::os::unix::{Library as Shared, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::transmute;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Why there is no linear algebra.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be loaded.
    #[error("the LAPACK library {path} cannot be loaded")]
    Load {
        /// The file.
        path: PathBuf,
        /// Why.
        source: libloading::Error,
    },
    /// The library lacks a routine.
    #[error(
        "the LAPACK library {path} lacks the routine {routine}; use OpenBLAS with 32-bit integers, such as the package \
         scipy-openblas32 brings it"
    )]
    Routine {
        /// The file.
        path: PathBuf,
        /// The routine.
        routine: &'static str,
    },
    /// Another library is in use.
    #[error("this process uses the LAPACK library {used} already, and one process uses one")]
    Other {
        /// The library in use.
        used: PathBuf,
    },
    /// The plugin refuses a target.
    #[error("the plugin does not take the FFI target {name}")]
    Register {
        /// The target.
        name: String,
        /// What it says.
        source: waystation_pjrt::Error,
    },
}

/// A routine's address.
#[derive(Clone, Copy, Debug)]
struct Symbol(*const c_void);

// SAFETY: code of a library that is never unloaded; LAPACK's routines may be called from any thread.
unsafe impl Send for Symbol {}
// SAFETY: as above.
unsafe impl Sync for Symbol {}

static LIBRARY: OnceLock<Library> = OnceLock::new();

/// The library in use. Targets run only after [`load`]: `register` calls it first.
pub(crate) fn library() -> Result<&'static Library, waystation_pjrt::ffi::Failure> {
    LIBRARY.get().ok_or_else(|| {
        waystation_pjrt::ffi::Failure::new(
            waystation_pjrt::Code::FailedPrecondition,
            "no LAPACK library is loaded",
        )
    })
}

/// Loads the library, unless it is in use already.
pub(crate) fn load(path: &Path) -> Result<&'static Library, Error> {
    let path = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    if LIBRARY.get().is_none() {
        let library = Library::open(&path)?;
        // Another thread may have been faster; then its library is the one in use.
        let _ = LIBRARY.set(library);
    }
    match LIBRARY.get() {
        Some(library) if library.path == path => Ok(library),
        other => Err(Error::Other {
            used: other
                .map(|library| library.path.clone())
                .unwrap_or_default(),
        }),
    }
}

/// Settles how many threads OpenBLAS uses, and asks what it is.
fn settle(shared: &Shared, path: &Path) -> String {
    let find = |names: [&CStr; 2]| {
        names.into_iter().find_map(|name| {
            // SAFETY: only the address is taken here.
            unsafe { shared.get::<*const c_void>(name.to_bytes_with_nul()) }
                .ok()
                .map(|symbol| *symbol)
                .filter(|address| !address.is_null())
        })
    };
    if std::env::var_os("OPENBLAS_NUM_THREADS").is_none()
        && let Some(set) = find([
            c"scipy_openblas_set_num_threads",
            c"openblas_set_num_threads",
        ])
    {
        // SAFETY: OpenBLAS's function of this name takes an int and returns nothing.
        unsafe { transmute::<*const c_void, unsafe extern "C" fn(c_int)>(set)(1) };
    }
    let Some(config) = find([c"scipy_openblas_get_config", c"openblas_get_config"]) else {
        return format!("LAPACK {}", path.display());
    };
    // SAFETY: OpenBLAS's function of this name takes nothing and returns a text that lives as long as the library.
    unsafe {
        let text = transmute::<*const c_void, unsafe extern "C" fn() -> *const c_char>(config)();
        if text.is_null() {
            return "OpenBLAS".to_owned();
        }
        CStr::from_ptr(text).to_string_lossy().trim().to_owned()
    }
}

/// The routines that are used: a name, and its symbols for S, D, C and Z.
macro_rules! symbols {
    ($($name:ident: $s:literal $d:literal $c:literal $z:literal;)*) => {
        /// A loaded library.
        #[derive(Debug)]
        pub(crate) struct Library {
            path: PathBuf,
            /// What it says about itself.
            pub(crate) version: String,
            $($name: [Symbol; 4],)*
        }

        impl Library {
            fn open(path: &Path) -> Result<Self, Error> {
                // Local symbols: a Python with a BLAS of its own may be in the same process.
                // SAFETY: loading runs the library's initialisers; the user chose this file.
                let shared = unsafe { Shared::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
                    .map_err(|source| Error::Load { path: path.to_owned(), source })?;
                let symbol = |routine: &'static str| {
                    // As scipy-openblas32 names its symbols, or as any other LAPACK does.
                    [format!("scipy_{routine}_\0"), format!("{routine}_\0")]
                        .iter()
                        .find_map(|name| {
                            // SAFETY: only the address is taken here.
                            unsafe { shared.get::<*const c_void>(name.as_bytes()) }.ok()
                        })
                        .map(|symbol| Symbol(*symbol))
                        .filter(|symbol| !symbol.0.is_null())
                        .ok_or_else(|| Error::Routine { path: path.to_owned(), routine })
                };
                let library = Self {
                    path: path.to_owned(),
                    version: settle(&shared, path),
                    $($name: [symbol($s)?, symbol($d)?, symbol($c)?, symbol($z)?],)*
                };
                // Never unloaded: the plugin keeps the targets that call it.
                std::mem::forget(shared);
                Ok(library)
            }
        }
    };
}

symbols! {
    gees: "sgees" "dgees" "cgees" "zgees";
    geev: "sgeev" "dgeev" "cgeev" "zgeev";
    gehrd: "sgehrd" "dgehrd" "cgehrd" "zgehrd";
    geqp3: "sgeqp3" "dgeqp3" "cgeqp3" "zgeqp3";
    geqrf: "sgeqrf" "dgeqrf" "cgeqrf" "zgeqrf";
    gesdd: "sgesdd" "dgesdd" "cgesdd" "zgesdd";
    gesvd: "sgesvd" "dgesvd" "cgesvd" "zgesvd";
    getrf: "sgetrf" "dgetrf" "cgetrf" "zgetrf";
    gtsv: "sgtsv" "dgtsv" "cgtsv" "zgtsv";
    orgqr: "sorgqr" "dorgqr" "cungqr" "zungqr";
    ormqr: "sormqr" "dormqr" "cunmqr" "zunmqr";
    potrf: "spotrf" "dpotrf" "cpotrf" "zpotrf";
    syevd: "ssyevd" "dsyevd" "cheevd" "zheevd";
    sytrd: "ssytrd" "dsytrd" "chetrd" "zhetrd";
    trsm: "strsm" "dtrsm" "ctrsm" "ztrsm";
}

/// The type of a text's length.
macro_rules! length {
    ($length:literal) => {
        usize
    };
}

/// Typed doors to the routines. `texts` has a length for each argument that is a text.
macro_rules! routines {
    ($($method:ident = $name:ident($($arg:ident: $ty:ty),* $(,)?) texts($($length:literal)*);)*) => {
        impl Library {
            $(
                /// # Safety
                ///
                /// Arguments as LAPACK's documentation of the routine asks.
                #[allow(clippy::too_many_arguments, reason = "LAPACK's own lists of arguments, most of them long")]
                pub(crate) unsafe fn $method<T: Scalar>(&self, $($arg: $ty),*) {
                    // SAFETY: the symbol of this name has this signature for this `T`.
                    let routine = unsafe {
                        transmute::<*const c_void, unsafe extern "C" fn($($ty,)* $(length!($length)),*)>(
                            self.$name[T::INDEX].0,
                        )
                    };
                    // SAFETY: passed on from this function's contract.
                    unsafe { routine($($arg,)* $($length),*) }
                }
            )*
        }
    };
}

routines! {
    potrf = potrf(uplo: *const u8, n: *const i32, a: *mut T, lda: *const i32, info: *mut i32) texts(1);
    getrf = getrf(
        m: *const i32, n: *const i32, a: *mut T, lda: *const i32, ipiv: *mut i32, info: *mut i32
    ) texts();
    trsm = trsm(
        side: *const u8, uplo: *const u8, trans: *const u8, diag: *const u8, m: *const i32, n: *const i32,
        alpha: *const T, a: *const T, lda: *const i32, b: *mut T, ldb: *const i32
    ) texts(1 1 1 1);
    geqrf = geqrf(
        m: *const i32, n: *const i32, a: *mut T, lda: *const i32, tau: *mut T, work: *mut T, lwork: *const i32,
        info: *mut i32
    ) texts();
    geqp3_real = geqp3(
        m: *const i32, n: *const i32, a: *mut T, lda: *const i32, jpvt: *mut i32, tau: *mut T, work: *mut T,
        lwork: *const i32, info: *mut i32
    ) texts();
    geqp3_complex = geqp3(
        m: *const i32, n: *const i32, a: *mut T, lda: *const i32, jpvt: *mut i32, tau: *mut T, work: *mut T,
        lwork: *const i32, rwork: *mut T::Real, info: *mut i32
    ) texts();
    orgqr = orgqr(
        m: *const i32, n: *const i32, k: *const i32, a: *mut T, lda: *const i32, tau: *const T, work: *mut T,
        lwork: *const i32, info: *mut i32
    ) texts();
    ormqr = ormqr(
        side: *const u8, trans: *const u8, m: *const i32, n: *const i32, k: *const i32, a: *mut T, lda: *const i32,
        tau: *const T, c: *mut T, ldc: *const i32, work: *mut T, lwork: *const i32, info: *mut i32
    ) texts(1 1);
    gesdd_real = gesdd(
        jobz: *const u8, m: *const i32, n: *const i32, a: *mut T, lda: *const i32, s: *mut T::Real, u: *mut T,
        ldu: *const i32, vt: *mut T, ldvt: *const i32, work: *mut T, lwork: *const i32, iwork: *mut i32,
        info: *mut i32
    ) texts(1);
    gesdd_complex = gesdd(
        jobz: *const u8, m: *const i32, n: *const i32, a: *mut T, lda: *const i32, s: *mut T::Real, u: *mut T,
        ldu: *const i32, vt: *mut T, ldvt: *const i32, work: *mut T, lwork: *const i32, rwork: *mut T::Real,
        iwork: *mut i32, info: *mut i32
    ) texts(1);
    gesvd_real = gesvd(
        jobu: *const u8, jobvt: *const u8, m: *const i32, n: *const i32, a: *mut T, lda: *const i32,
        s: *mut T::Real, u: *mut T, ldu: *const i32, vt: *mut T, ldvt: *const i32, work: *mut T,
        lwork: *const i32, info: *mut i32
    ) texts(1 1);
    gesvd_complex = gesvd(
        jobu: *const u8, jobvt: *const u8, m: *const i32, n: *const i32, a: *mut T, lda: *const i32,
        s: *mut T::Real, u: *mut T, ldu: *const i32, vt: *mut T, ldvt: *const i32, work: *mut T,
        lwork: *const i32, rwork: *mut T::Real, info: *mut i32
    ) texts(1 1);
    syevd = syevd(
        jobz: *const u8, uplo: *const u8, n: *const i32, a: *mut T, lda: *const i32, w: *mut T::Real,
        work: *mut T, lwork: *const i32, iwork: *mut i32, liwork: *const i32, info: *mut i32
    ) texts(1 1);
    heevd = syevd(
        jobz: *const u8, uplo: *const u8, n: *const i32, a: *mut T, lda: *const i32, w: *mut T::Real,
        work: *mut T, lwork: *const i32, rwork: *mut T::Real, lrwork: *const i32, iwork: *mut i32,
        liwork: *const i32, info: *mut i32
    ) texts(1 1);
    geev_real = geev(
        jobvl: *const u8, jobvr: *const u8, n: *const i32, a: *mut T, lda: *const i32, wr: *mut T::Real,
        wi: *mut T::Real, vl: *mut T, ldvl: *const i32, vr: *mut T, ldvr: *const i32, work: *mut T,
        lwork: *const i32, info: *mut i32
    ) texts(1 1);
    geev_complex = geev(
        jobvl: *const u8, jobvr: *const u8, n: *const i32, a: *mut T, lda: *const i32, w: *mut T, vl: *mut T,
        ldvl: *const i32, vr: *mut T, ldvr: *const i32, work: *mut T, lwork: *const i32, rwork: *mut T::Real,
        info: *mut i32
    ) texts(1 1);
    gees_real = gees(
        jobvs: *const u8, sort: *const u8, select: *const c_void, n: *const i32, a: *mut T, lda: *const i32,
        sdim: *mut i32, wr: *mut T::Real, wi: *mut T::Real, vs: *mut T, ldvs: *const i32, work: *mut T,
        lwork: *const i32, bwork: *mut i32, info: *mut i32
    ) texts(1 1);
    gees_complex = gees(
        jobvs: *const u8, sort: *const u8, select: *const c_void, n: *const i32, a: *mut T, lda: *const i32,
        sdim: *mut i32, w: *mut T, vs: *mut T, ldvs: *const i32, work: *mut T, lwork: *const i32,
        rwork: *mut T::Real, bwork: *mut i32, info: *mut i32
    ) texts(1 1);
    gehrd = gehrd(
        n: *const i32, ilo: *const i32, ihi: *const i32, a: *mut T, lda: *const i32, tau: *mut T, work: *mut T,
        lwork: *const i32, info: *mut i32
    ) texts();
    sytrd = sytrd(
        uplo: *const u8, n: *const i32, a: *mut T, lda: *const i32, d: *mut T::Real, e: *mut T::Real, tau: *mut T,
        work: *mut T, lwork: *const i32, info: *mut i32
    ) texts(1);
    gtsv = gtsv(
        n: *const i32, nrhs: *const i32, dl: *mut T, d: *mut T, du: *mut T, b: *mut T, ldb: *const i32,
        info: *mut i32
    ) texts();
}
