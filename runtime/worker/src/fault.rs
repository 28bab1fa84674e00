//! Fault points: places where a test has the worker end as if it had been killed. Builds for users have none; those with debug
//! assertions or the feature `fault-points` do.

use std::{path::PathBuf, sync::OnceLock};

use waystation_pjrt::ffi::{AsyncTarget, Call};

use crate::collective;

/// Whether this build has them.
pub const BUILT: bool = cfg!(any(debug_assertions, feature = "fault-points"));

static POINT: OnceLock<Point> = OnceLock::new();

struct Point {
    place: Place,
    /// Nothing happens until the test makes it.
    file: PathBuf,
}

/// Where the worker can end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Inside a collective between workers: a partition of this one has come to it.
    Collective,
}

/// Has the worker end at a place as soon as a file is there: `collective:FILE`.
///
/// # Errors
/// When no such place is known, or this build has none.
pub fn arm(point: &str) -> Result<(), String> {
    if !BUILT {
        return Err("this build has no fault points".to_owned());
    }
    let point =
        parse(point).ok_or_else(|| format!("{point:?} is no fault point: collective:FILE"))?;
    // The first one stays.
    let _ = POINT.set(point);
    Ok(())
}

fn parse(point: &str) -> Option<Point> {
    let file = point.strip_prefix("collective:")?;
    (!file.is_empty()).then(|| Point {
        place: Place::Collective,
        file: file.into(),
    })
}

/// The target of all collectives, with a fault point behind the start of each.
pub(crate) struct Collective;

impl AsyncTarget for Collective {
    fn call(call: Call) {
        collective::Collective::call(call);
        at(Place::Collective);
    }
}

/// The worker is at that place.
fn at(place: Place) {
    if BUILT
        && let Some(point) = POINT.get()
        && point.place == place
        && point.file.exists()
    {
        // As `kill -9`: nothing is said to anybody, and no core is left.
        let _ =
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
        std::process::abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_names_a_place_and_a_file() {
        let point = parse("collective:/tmp/a:b").expect("known");
        assert_eq!(point.place, Place::Collective);
        assert_eq!(point.file, PathBuf::from("/tmp/a:b"));
        assert!(parse("collective:").is_none() && parse("put:/tmp/a").is_none());
        assert!(arm("elsewhere:/tmp/a").is_err());
    }
}
