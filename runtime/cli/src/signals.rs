//! The two signals that ask a process to end.

use tokio::signal::unix::{self, SignalKind};

use crate::error::Failure;

/// Asked to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Signal {
    /// Ctrl-C.
    Interrupt,
    /// A supervisor's polite way.
    Terminate,
}

impl Signal {
    /// The exit status that shells give a process that the signal ended.
    pub(crate) fn exit_status(self) -> u8 {
        match self {
            Signal::Interrupt => 128 + 2,
            Signal::Terminate => 128 + 15,
        }
    }

    /// As the system's calls want it.
    pub(crate) fn number(self) -> rustix::process::Signal {
        match self {
            Signal::Interrupt => rustix::process::Signal::INT,
            Signal::Terminate => rustix::process::Signal::TERM,
        }
    }
}

/// Catches both from its creation on.
#[derive(Debug)]
pub(crate) struct Signals {
    interrupt: unix::Signal,
    terminate: unix::Signal,
}

impl Signals {
    /// Must be called within a tokio runtime.
    ///
    /// # Errors
    /// When handlers cannot be installed.
    pub(crate) fn new() -> Result<Signals, Failure> {
        let catch = |kind| {
            unix::signal(kind).map_err(|error| Failure::because("signals cannot be caught", &error))
        };
        Ok(Signals {
            interrupt: catch(SignalKind::interrupt())?,
            terminate: catch(SignalKind::terminate())?,
        })
    }

    /// The next signal. Cancel-safe.
    pub(crate) async fn recv(&mut self) -> Signal {
        tokio::select! {
            Some(()) = self.interrupt.recv() => Signal::Interrupt,
            Some(()) = self.terminate.recv() => Signal::Terminate,
            else => std::future::pending().await,
        }
    }
}
