//! How programs run over several workers.

use std::sync::Arc;

use crate::group::Group;

/// Chosen when the worker starts.
#[derive(Debug, Clone)]
pub(crate) enum Collectives {
    /// By collectives of our own, which a hook of the plugin's compiler puts in the place of XLA's. One executable for all
    /// partitions, which runs on any device.
    Hooked,
    /// By the plugin's own, which joins the workers of a slice to one client: its executables are for all devices of a program,
    /// and each worker runs its part.
    Native(Arc<Group>),
    /// They do not. Why.
    None(String),
}

impl Collectives {
    /// Why there are none, if so.
    pub(crate) fn cannot(&self) -> Option<&str> {
        match self {
            Collectives::None(why) => Some(why),
            Collectives::Hooked | Collectives::Native(_) => None,
        }
    }

    /// The group of the plugin's own collectives.
    pub(crate) fn group(&self) -> Option<&Arc<Group>> {
        match self {
            Collectives::Native(group) => Some(group),
            Collectives::Hooked | Collectives::None(_) => None,
        }
    }
}
