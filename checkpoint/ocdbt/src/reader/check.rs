//! Everything about the nodes of a version that can be found without its values.

use super::visit::Visit;
use super::{Database, Source};
use crate::error::{Error, Result, at_most};
use crate::reference::{NodeRef, Statistics};

/// What a sound tree has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Report {
    /// Nodes, one that is met twice counted twice.
    pub nodes: u64,
    /// Keys and bytes, which are those that the version says.
    pub statistics: Statistics,
}

impl<S: Source> Database<S> {
    /// Reads every node and holds it against what its parent says, statistics included, which no reader needs. Of hostile
    /// trees, in which the same nodes can be met again and again, it reads `limit` nodes at most.
    ///
    /// # Errors
    /// The first node that cannot be read or is not what its parent says; more nodes than the limit.
    pub async fn check(&self, limit: u64) -> Result<Report> {
        let (Some(reference), Some(root)) = (&self.version.root, self.root().await?) else {
            return Ok(Report::default());
        };
        tally(&root, reference)?;
        let mut report = Report {
            nodes: 1,
            statistics: reference.statistics,
        };
        let mut path = vec![(root, 0)];
        while let Some((visit, at)) = path.last_mut() {
            let index = *at;
            *at += 1;
            let Some(reference) = visit.children().get(index).map(|entry| entry.node.clone())
            else {
                path.pop();
                continue;
            };
            report.nodes = at_most("number of nodes", report.nodes + 1, limit)?;
            let child = self.child(visit, index).await?;
            tally(&child, &reference)?;
            path.push((child, 0));
            at_most(
                "memory of the nodes on the way",
                path.iter().map(|(visit, _)| visit.bytes() as u64).sum(),
                self.limits.list_bytes as u64,
            )?;
        }
        report.nodes = at_most("number of nodes", report.nodes, limit)?;
        Ok(report)
    }
}

/// That what a node has and says of its children adds up to what its reference says.
fn tally(visit: &Visit, reference: &NodeRef) -> Result<()> {
    let location = &reference.location;
    if visit.node().statistics(location.length()) == reference.statistics {
        return Ok(());
    }
    Err(location.blame(Error::Misplaced {
        what: "number of keys or bytes",
    }))
}
