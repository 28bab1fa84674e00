//! Which workers run a program.

use std::sync::Arc;

use crate::{
    cluster::Cluster,
    link::Link,
    status::{self, Status},
};

/// A program's devices and the workers that own them.
#[derive(Clone, Debug)]
pub(super) struct Placement {
    /// Global ids in logical order.
    pub(super) devices: Vec<i32>,
    /// At least one. The first owns the first device and compiles the program.
    parts: Vec<Part>,
    /// By position among the devices, an index into the parts.
    owners: Vec<usize>,
}

/// What one worker does of a program.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) link: Arc<Link>,
    /// Its own among the devices, ascending.
    pub(super) positions: Vec<usize>,
}

impl Placement {
    /// # Errors
    /// INVALID_ARGUMENT for unknown devices or none.
    pub(super) fn new(cluster: &Cluster, devices: Vec<i32>) -> Result<Self, Status> {
        let mut parts: Vec<Part> = Vec::new();
        let mut owners = Vec::with_capacity(devices.len());
        for (position, &id) in devices.iter().enumerate() {
            let device = cluster.device(id).ok_or_else(|| {
                status::invalid_argument(format!("the program is compiled for unknown device {id}"))
            })?;
            let link = cluster.link(device);
            // Neighbours nearly always share a worker.
            let last = owners
                .last()
                .copied()
                .filter(|&last: &usize| Arc::ptr_eq(&parts[last].link, link));
            let owner =
                last.or_else(|| parts.iter().position(|part| Arc::ptr_eq(&part.link, link)));
            let owner = owner.unwrap_or_else(|| {
                parts.push(Part {
                    link: Arc::clone(link),
                    positions: Vec::new(),
                });
                parts.len() - 1
            });
            parts[owner].positions.push(position);
            owners.push(owner);
        }
        if parts.is_empty() {
            return Err(status::invalid_argument(
                "the program is compiled for no device",
            ));
        }
        Ok(Self {
            devices,
            parts,
            owners,
        })
    }

    /// Whether the workers can run a program together, where there are several.
    ///
    /// # Errors
    /// UNIMPLEMENTED, naming them.
    pub(super) fn check(&self) -> Result<(), Status> {
        if !self.spans() {
            return Ok(());
        }
        for part in &self.parts {
            if let Some(why) = part.link.cannot_span() {
                let names: Vec<&str> = self.links().map(|link| &*link.name).collect();
                return Err(status::unimplemented(format!(
                    "the program spans {} workers ({}), and worker {} takes no part in such programs: {why}; put its mesh on \
                     one worker's devices",
                    names.len(),
                    names.join(", "),
                    part.link.name
                )));
            }
        }
        Ok(())
    }

    /// Whether there are several workers.
    pub(super) fn spans(&self) -> bool {
        self.parts.len() > 1
    }

    /// Who compiles.
    pub(super) fn first(&self) -> &Arc<Link> {
        &self.parts[0].link
    }

    pub(super) fn parts(&self) -> &[Part] {
        &self.parts
    }

    pub(super) fn links(&self) -> impl Iterator<Item = &Arc<Link>> {
        self.parts.iter().map(|part| &part.link)
    }

    /// The workers' places among the parts, by position.
    pub(super) fn owners(&self) -> &[usize] {
        &self.owners
    }

    /// The worker of each position.
    pub(super) fn owning_links(&self) -> impl Iterator<Item = &Arc<Link>> {
        self.owners.iter().map(|&owner| &self.parts[owner].link)
    }

    /// The number of each position's worker; none where one worker has all.
    pub(super) fn processes(&self) -> Vec<u32> {
        match self.spans() {
            true => self.owning_links().map(|link| link.process()).collect(),
            false => Vec::new(),
        }
    }

    /// Why one of the workers is gone, if one is.
    pub(super) fn lost(&self) -> Option<Status> {
        self.links().find_map(|link| link.lost())
    }
}
