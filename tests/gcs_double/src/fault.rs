//! Faults that a test orders.

use serde::Deserialize;

/// One order. It strikes every request that it fits, `times` times, or until the faults are cleared.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fault {
    /// What happens.
    pub kind: Kind,
    /// HTTP method; none: any.
    #[serde(default)]
    pub method: Option<String>,
    /// What the path and query contain, as sent; none: anything.
    #[serde(default)]
    pub path: Option<String>,
    /// How often; none: until cleared.
    #[serde(default)]
    pub times: Option<u64>,
    /// So many requests that it fits are let through first.
    #[serde(default)]
    pub after: u64,
}

/// What a fault does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// This status, and the deed is not done. 404 says that the bucket is not there, 401 that the token is no good.
    Status(u16),
    /// No answer ever, and the deed is not done.
    Silence,
    /// The deed is done, and the connection breaks in the middle of the answer's body.
    CutBody,
    /// The deed is done, and the connection breaks before the answer.
    LoseAnswer,
    /// The deed is done, and the answer comes so many milliseconds late.
    Slow(u64),
}

impl Fault {
    /// That strikes everything until cleared.
    pub fn of(kind: Kind) -> Fault {
        Fault {
            kind,
            method: None,
            path: None,
            times: None,
            after: 0,
        }
    }

    /// Only for a method.
    pub fn on(self, method: &str) -> Fault {
        Fault {
            method: Some(method.to_owned()),
            ..self
        }
    }

    /// Only where path and query contain this.
    pub fn at(self, path: &str) -> Fault {
        Fault {
            path: Some(path.to_owned()),
            ..self
        }
    }

    /// Only so often.
    pub fn times(self, times: u64) -> Fault {
        Fault {
            times: Some(times),
            ..self
        }
    }

    /// Only once so many have been let through.
    pub fn after(self, after: u64) -> Fault {
        Fault { after, ..self }
    }

    fn fits(&self, method: &str, target: &str) -> bool {
        self.times != Some(0)
            && self.method.as_deref().is_none_or(|wanted| wanted == method)
            && self
                .path
                .as_deref()
                .is_none_or(|wanted| target.contains(wanted))
    }
}

/// All orders, first come first served.
#[derive(Debug, Default)]
pub(crate) struct Faults(Vec<Fault>);

impl Faults {
    pub(crate) fn order(&mut self, fault: Fault) {
        self.0.push(fault);
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// The fault that strikes this request.
    pub(crate) fn strike(&mut self, method: &str, target: &str) -> Option<Kind> {
        for fault in self.0.iter_mut().filter(|one| one.fits(method, target)) {
            if fault.after > 0 {
                fault.after -= 1;
                continue;
            }
            if let Some(times) = &mut fault.times {
                *times -= 1;
            }
            return Some(fault.kind);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_lets_some_through_and_strikes_so_often() {
        let mut faults = Faults::default();
        faults.order(Fault::of(Kind::Status(500)).on("PUT").after(1).times(2));
        faults.order(Fault::of(Kind::Slow(5)).at("/late"));
        let struck: Vec<_> = (0..4).map(|_| faults.strike("PUT", "/b/a")).collect();
        let status = Some(Kind::Status(500));
        assert_eq!(struck, [None, status, status, None]);
        assert_eq!(faults.strike("GET", "/b/a"), None);
        assert_eq!(faults.strike("PUT", "/b/late"), Some(Kind::Slow(5)));
    }
}
