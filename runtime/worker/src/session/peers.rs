//! The other workers that programs may span, and this one's connections to them.
//!
//! Of each pair of workers the one with the smaller number connects, and goes on trying as long as the proxy names the
//! other. A launch waits until all its workers are connected. One that cannot be reached for long fails what needs it; one that
//! the proxy names no more is lost.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use tokio::task::AbortHandle;
use waystation_collectives::{Code, Failure, Process};
use waystation_proto::waystation::worker::{self, peers};

use super::Session;
use crate::spanning::Epoch;

/// How long launches wait for a connection between two workers that both live.
const PATIENCE: Duration = Duration::from_secs(30);

/// The shortest and the longest time between two tries to connect.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LAST_PAUSE: Duration = Duration::from_secs(2);

/// What a session has for programs over several workers.
pub(super) struct Lease {
    /// Or why there are none.
    pub(super) epoch: Result<Epoch, String>,
    peers: HashMap<Process, Peer>,
    /// Numbers waits for connections.
    waits: u64,
}

struct Peer {
    address: String,
    data_address: String,
    life: u64,
    name: String,
    reach: Reach,
    connecting: Option<Connecting>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Reach {
    Connected,
    /// Not yet, or not any more. With the number of the wait.
    Waiting(u64),
    /// Not for so long that nothing waits for it.
    Never,
}

/// Tries to connect, until it is dropped.
struct Connecting(AbortHandle);

impl Drop for Connecting {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Lease {
    pub(super) fn new(epoch: Result<Epoch, String>) -> Lease {
        Lease {
            epoch,
            peers: HashMap::new(),
            waits: 0,
        }
    }

    /// The other workers, living as far as the proxy knows.
    pub(super) fn others(&self) -> impl Iterator<Item = Process> + '_ {
        self.peers.keys().copied()
    }

    /// Whether all processes of a launch are connected.
    ///
    /// # Errors
    /// That one of them is lost, or cannot be reached.
    pub(super) fn reach(&self, placement: &[Process]) -> Result<bool, Failure> {
        let Ok(epoch) = &self.epoch else {
            return Ok(false);
        };
        let mut connected = true;
        for process in placement {
            if *process == epoch.engine.process() {
                continue;
            }
            match self.peers.get(process) {
                None => return Err(epoch.tcp.gone(*process, "it has ended")),
                Some(peer) => match peer.reach {
                    Reach::Connected => {}
                    Reach::Waiting(_) => connected = false,
                    Reach::Never => return Err(unreachable(&peer.name)),
                },
            }
        }
        Ok(connected)
    }
}

fn unreachable(name: &str) -> Failure {
    Failure::new(
        Code::Unavailable,
        format!(
            "worker {name} could not be reached by another worker of the program within {} s",
            PATIENCE.as_secs()
        ),
    )
}

impl Session {
    pub(super) fn peers(&mut self, op: worker::Peers) {
        let Ok(epoch) = &self.lease.epoch else {
            return;
        };
        let me = epoch.engine.process();
        let (tcp, engine) = (epoch.tcp.clone(), epoch.engine.clone());
        let named: HashMap<Process, peers::Peer> = op
            .peers
            .into_iter()
            .map(|peer| (Process(peer.process), peer))
            .filter(|(process, _)| *process != me)
            .collect();
        let known = self.lease.peers.iter();
        let lost: Vec<Process> = known
            .filter(|(process, known)| {
                let named = named.get(process);
                named.is_none_or(|named| named.life != known.life)
            })
            .map(|(process, _)| *process)
            .collect();
        for process in lost {
            if let Some(peer) = self.lease.peers.remove(&process) {
                self.core.peers.lose(&peer.data_address, &peer.name);
            }
            tcp.disconnect(process);
            engine.lost(process, &tcp.gone(process, "it has ended"));
        }
        tcp.name(me, Some(self.core.place.clone()));
        let mut added = Vec::new();
        for (process, peer) in named {
            if self.lease.peers.contains_key(&process) {
                continue;
            }
            tcp.name(process, Some(peer.name.clone()));
            // Launches with it wait for a connection from now on.
            engine.found(process);
            added.push(process);
            self.lease.peers.insert(
                process,
                Peer {
                    address: peer.address,
                    data_address: peer.data_address,
                    life: peer.life,
                    name: peer.name,
                    // It may have connected before this was said.
                    reach: if tcp.is_connected(process) {
                        Reach::Connected
                    } else {
                        Reach::Waiting(0)
                    },
                    connecting: None,
                },
            );
        }
        for process in added {
            self.connect(process);
        }
        self.launches.unsaid = true;
    }

    /// A connection has come or gone.
    pub(crate) fn connection(&mut self, process: Process, connected: bool) {
        let there = (self.lease.epoch.as_ref()).is_ok_and(|epoch| epoch.tcp.is_connected(process));
        let Some(peer) = self.lease.peers.get_mut(&process) else {
            return;
        };
        if connected && !there {
            // It has been ended meanwhile, as one of the process's earlier life; that it is gone is told next.
            return;
        }
        if connected {
            peer.reach = Reach::Connected;
            peer.connecting = None;
            self.launches.unsaid = true;
        } else {
            tracing::warn!(
                worker = peer.name,
                "the connection for collectives has ended"
            );
            peer.reach = Reach::Waiting(0);
            self.connect(process);
        }
    }

    /// Waits for a connection that is not there, and makes it if that is this worker's part.
    fn connect(&mut self, process: Process) {
        let Ok(epoch) = &self.lease.epoch else {
            return;
        };
        let Some(peer) = self.lease.peers.get_mut(&process) else {
            return;
        };
        if peer.reach == Reach::Connected {
            return;
        }
        self.lease.waits += 1;
        let wait = self.lease.waits;
        peer.reach = Reach::Waiting(wait);
        if epoch.engine.process() < process {
            let (tcp, engine) = (epoch.tcp.clone(), epoch.engine.clone());
            let (address, name) = (peer.address.clone(), peer.name.clone());
            let task = self.core.spanning.spawn(async move {
                let since = Instant::now();
                let mut pause = FIRST_PAUSE;
                while let Err(error) = tcp.connect(process, &address, engine.clone()).await {
                    tracing::warn!(%error, address, worker = name, since = ?since.elapsed(), "no connection for collectives");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LAST_PAUSE);
                }
            });
            peer.connecting = task.map(Connecting);
        }
        let (core, serial) = (std::sync::Arc::clone(&self.core), self.serial);
        self.core.runtime.spawn(async move {
            tokio::time::sleep(PATIENCE).await;
            core.post(serial, move |session| session.unreached(process, wait));
        });
    }

    fn unreached(&mut self, process: Process, wait: u64) {
        if let Some(peer) = self.lease.peers.get_mut(&process)
            && peer.reach == Reach::Waiting(wait)
        {
            tracing::warn!(worker = peer.name, "another worker cannot be reached");
            peer.reach = Reach::Never;
            self.launches.unsaid = true;
        }
    }
}
