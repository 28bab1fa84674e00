//! `server`: Pathways' image entry point. It is rewritten to one of two other commands before clap reads the flags.

/// Resource manager or worker, chosen by --node_type: the entry point that stands in for Pathways' server image
///
/// With --node_type=resource_manager the flags are those of `waystation resource-manager`, without it those of
/// `waystation worker`. Flags that launchers of Pathways add and that have no meaning here are taken with a warning.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// resource_manager, or nothing for a worker
    #[arg(long = "node_type", value_name = "ROLE")]
    node_type: Option<String>,
}
