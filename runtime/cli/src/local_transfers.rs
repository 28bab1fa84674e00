//! `--local_transfers` of proxy and worker.

/// Whether arrays' bytes go between proxy and worker through memory that both see, where they are on one machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LocalTransfers {
    /// Where it is possible.
    Auto,
    /// Never: they are sent.
    Off,
}

impl LocalTransfers {
    /// As the flag has it.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            LocalTransfers::Auto => "auto",
            LocalTransfers::Off => "off",
        }
    }
}
