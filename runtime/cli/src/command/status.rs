//! `status`.

use crate::{error::Failure, http, output};

/// Print the counters of a proxy and its workers as JSON
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where the proxy shows its status
    #[arg(
        long = "status_url",
        value_name = "URL",
        default_value = "http://127.0.0.1:29002/status"
    )]
    pub(crate) status_url: String,
}

/// Asks and prints.
pub(crate) async fn run(args: Args) -> Result<(), Failure> {
    let text = http::get(&args.status_url).await?;
    let status: serde_json::Value = serde_json::from_str(&text).map_err(|error| {
        Failure::because(
            &format!("{} did not answer with JSON", args.status_url),
            &error,
        )
    })?;
    output::print(&format!("{status:#}"))
}
