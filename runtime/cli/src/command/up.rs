//! `up`.

use crate::{
    cluster::{
        Cluster, environment,
        plan::{ClusterArgs, Plan},
    },
    error::Failure,
    output,
    signals::Signals,
};

/// Bring up a cluster on this machine, print the client's environment, and keep it up until Ctrl-C
///
/// Flags named --xla_... go to the compiler.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) cluster: ClusterArgs,
}

/// Returns the exit status.
pub(crate) async fn run(args: Args, xla_flags: Vec<String>) -> Result<u8, Failure> {
    let mut signals = Signals::new()?;
    let plan = Plan::check(&args.cluster, xla_flags, None).await?;
    let mut cluster = Cluster::new(args.cluster.log_dir.as_deref(), args.cluster.verbose)?;
    let ended = stay(&mut cluster, &plan, &mut signals).await;
    cluster.take_down().await;
    ended
}

async fn stay(cluster: &mut Cluster, plan: &Plan, signals: &mut Signals) -> Result<u8, Failure> {
    let addresses = tokio::select! {
        started = cluster.start(plan) => started?,
        signal = signals.recv() => return Ok(signal.exit_status()),
    };
    output::print(&environment::exports(&addresses))?;
    tokio::select! {
        // Asked to end is how this command ends.
        _ = signals.recv() => Ok(0),
        name = cluster.lost() => Err(Failure::internal(format!("the cluster has lost its {name}"))),
    }
}
