//! One connection for each pair of processes: by a Unix socket on one machine ([`local`]), else by TCP.
//!
//! Who dials says hello first: a magic, the number of the protocol, both processes, and a secret that all processes of the
//! cluster have; the other answers alike. Then both send frames, in an order of which [`queue`](super::queue) tells. One task
//! sends while another one takes what comes.
//!
//! Data is written from the memory of the operands. What is queued is pieces that the other side has asked for, so the queue
//! holds no memory of its own, and is as long as the calls under way ask for.
//!
//! The engine hears of a connection that breaks ([`Engine::broke`]), and then of one made anew ([`Engine::connected`]).

use super::frame::{Head, text};
use super::hello::{Secret, greeted, hello, refused, timed_out};
use super::queue::Queue;
use super::read::read;
use super::strangers::{Stranger, Strangers};
use super::stream::{Listener, Stream};
use super::{Message, Process, Transport, local};
use crate::call::{Code, Failure};
use crate::engine::Engine;
use bytes::{Buf, Bytes};
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream, ToSocketAddrs, lookup_host};
use tokio::sync::Notify;
use tokio::task::JoinSet;

/// Bounds of the transport.
#[derive(Clone, Debug)]
pub struct Config {
    /// How long a connection may take to say hello.
    pub hello: Duration,
    /// Connections that have not said hello, at a time; more take the place of the oldest.
    pub strangers: usize,
    /// The same from one address.
    pub strangers_of_address: usize,
    /// Messages of no data that may wait for one process. Those are a few for each call under way.
    pub waiting: usize,
    /// How long the system of the other process's machine may leave probes of a quiet connection unanswered.
    pub silence: Duration,
    /// Whether processes of one machine and user go by a Unix socket.
    pub local: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            hello: Duration::from_secs(5),
            strangers: 64,
            strangers_of_address: 32,
            waiting: 1 << 20,
            silence: Duration::from_secs(10),
            local: true,
        }
    }
}

#[derive(Default)]
struct Peer {
    queue: Mutex<Queue>,
    more: Notify,
    /// Told once, when the connection is to end: a write to one who reads nothing does not end by itself.
    ended: Notify,
}

impl Peer {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn close(&self) {
        let waiting = {
            let mut queue = self.queue();
            queue.closed = true;
            (
                std::mem::take(&mut queue.short),
                std::mem::take(&mut queue.data),
            )
        };
        // Operands are let go of outside of the lock.
        drop(waiting);
        self.ended.notify_one();
    }
}

/// The connections of one process. Clones share them. They end with [`Tcp::shutdown`] or the runtime, and not with the last clone:
/// the engine they serve has one itself.
#[derive(Clone)]
pub struct Tcp(Arc<Shared>);

struct Shared {
    me: Process,
    secret: Secret,
    config: Config,
    peers: Mutex<HashMap<Process, Arc<Peer>>>,
    /// Held while a connection comes or goes, so that a process that has come back is not lost by the end of its old connection.
    /// Taken before any other lock.
    turn: Mutex<()>,
    tasks: Mutex<JoinSet<()>>,
    /// Whether no more connections are taken.
    closed: AtomicBool,
    /// What processes are called.
    names: Mutex<HashMap<Process, String>>,
    /// Told of every connection that comes or goes.
    told: OnceLock<Told>,
    stopped: Notify,
}

/// Who is told that a process is connected (`true`), or is not any more.
type Told = Box<dyn Fn(Process, bool) + Send + Sync>;

impl std::fmt::Debug for Tcp {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Tcp")
            .field("process", &self.0.me.0)
            .field("peers", &self.peers().len())
            .finish_non_exhaustive()
    }
}

impl Transport for Tcp {
    fn send(&self, to: Process, message: Message) -> Result<(), Failure> {
        let peer = self.peers().get(&to).cloned();
        let Some(peer) = peer else {
            return Err(self.broken(to, "there is none now"));
        };
        {
            let mut queue = peer.queue();
            if queue.closed {
                return Err(self.broken(to, "it has ended"));
            }
            match message {
                Message::Data(transfer) => queue.data.push(transfer),
                _ if queue.short.len() >= self.0.config.waiting => {
                    return Err(Failure::new(
                        Code::ResourceExhausted,
                        format!("{} messages wait for process {}", queue.short.len(), to.0),
                    ));
                }
                short => queue.short.push_back(short),
            }
        }
        peer.more.notify_one();
        Ok(())
    }
}

impl Tcp {
    /// The connections of the process `me`; none yet.
    #[must_use]
    pub fn new(me: Process, secret: Secret, config: Config) -> Self {
        Self(Arc::new(Shared {
            me,
            secret,
            config,
            peers: Mutex::default(),
            turn: Mutex::default(),
            tasks: Mutex::default(),
            closed: AtomicBool::new(false),
            names: Mutex::default(),
            told: OnceLock::new(),
            stopped: Notify::new(),
        }))
    }

    /// Has `told` called with every connection that comes (`true`) or goes, in this order for each process. Only the first one
    /// given is. It must not block.
    pub fn on_change(&self, told: impl Fn(Process, bool) + Send + Sync + 'static) {
        let _ = self.0.told.set(Box::new(told));
    }

    /// Whether there is a connection to a process.
    #[must_use]
    pub fn is_connected(&self, process: Process) -> bool {
        self.peers().contains_key(&process)
    }

    /// What a process is called in failures, such as "slice 0 task 1". To be forgotten by `None`.
    pub fn name(&self, process: Process, name: Option<String>) {
        let mut names = self.0.names.lock().unwrap_or_else(PoisonError::into_inner);
        match name {
            Some(name) => names.insert(process, name),
            None => names.remove(&process),
        };
    }

    /// The failure of what needs a process that is gone.
    #[must_use]
    pub fn gone(&self, process: Process, why: &str) -> Failure {
        Failure::new(
            Code::DataLoss,
            format!("{} is gone: {why}", self.named(process)),
        )
    }

    /// The failure of what needed the connection to a process. Whether that is gone is not known yet, and all the same to who
    /// lost what the launch had taken over.
    fn broken(&self, process: Process, why: &str) -> Failure {
        let (other, me) = (self.named(process), self.named(self.0.me));
        let message =
            format!("{other} is gone, or the connection between it and {me} has broken: {why}");
        Failure::new(Code::DataLoss, message)
    }

    fn named(&self, process: Process) -> String {
        let names = self.0.names.lock().unwrap_or_else(PoisonError::into_inner);
        match names.get(&process) {
            Some(name) => format!("worker {name}"),
            None => format!("the worker process {}", process.0),
        }
    }

    fn tell(&self, process: Process, connected: bool) {
        if let Some(told) = self.0.told.get() {
            told(process, connected);
        }
    }

    fn peers(&self) -> MutexGuard<'_, HashMap<Process, Arc<Peer>>> {
        self.0.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.0.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        // What has ended is forgotten.
        while tasks.try_join_next().is_some() {}
        tasks.spawn(task);
    }

    /// Takes connections from now on, for `engine`. To be called within a runtime.
    pub fn listen(&self, listener: TcpListener, engine: Engine) {
        let config = &self.0.config;
        let strangers = Strangers::new(config.strangers, config.strangers_of_address);
        if config.local {
            let port = listener.local_addr().map(|address| address.port());
            match port.and_then(|port| local::listen(&self.0.secret, self.0.me, port)) {
                Ok(local) => {
                    let accepting = (self.clone()).accept(local, engine.clone(), strangers.clone());
                    self.spawn(accepting);
                }
                Err(error) => tracing::debug!(%error, "workers of this machine go by TCP"),
            }
        }
        self.spawn(self.clone().accept(listener, engine, strangers));
    }

    async fn accept(self, listener: impl Listener, engine: Engine, strangers: Strangers) {
        loop {
            let accepted = tokio::select! {
                accepted = listener.next() => accepted,
                () = self.stopped() => return,
            };
            match accepted {
                Ok((stream, address)) => {
                    let stranger = strangers.admit(address);
                    self.spawn(self.clone().greet(stream, engine.clone(), stranger));
                    // So that it is heard before it may have to make room for others.
                    tokio::task::yield_now().await;
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection of another worker was not taken");
                    // Such as too many open files: not again at once.
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }

    /// Takes a connection that was made by another process, if it is one that may.
    async fn greet(self, mut stream: impl Stream, engine: Engine, stranger: Stranger) {
        let greeted = tokio::select! {
            // Who has said hello by now is welcome all the same.
            biased;
            greeted = greeted(&mut stream, self.0.me, &self.0.secret) => greeted,
            () = tokio::time::sleep(self.0.config.hello) => Err(timed_out()),
            () = stranger.displaced() => Err(refused("it said nothing, and others came")),
        };
        drop(stranger);
        match greeted {
            Ok(from) => {
                // The answer comes first, and comes when this process has taken the connection.
                let answer = hello(self.0.me, from, &self.0.secret);
                self.join(from, stream, engine, Bytes::copy_from_slice(&answer));
            }
            Err(error) => tracing::warn!(%error, "a stranger was turned away"),
        }
    }

    /// Waits until no more connections are taken.
    async fn stopped(&self) {
        let stopped = self.0.stopped.notified();
        if !self.0.closed.load(Relaxed) {
            stopped.await;
        }
    }

    /// Connects to `to`, for `engine`. Of each pair of processes one calls this.
    ///
    /// # Errors
    ///
    /// What the network says; that the other is not `to`, speaks another protocol or does not know the secret.
    pub async fn connect(
        &self,
        to: Process,
        address: impl ToSocketAddrs,
        engine: Engine,
    ) -> io::Result<()> {
        let connect = async {
            let addresses: Vec<_> = lookup_host(address).await?.collect();
            if self.0.config.local
                && let Some(port) = addresses.first().map(SocketAddr::port)
                && let Ok(stream) = local::connect(&self.0.secret, to, port).await
            {
                return self.introduce(to, stream, engine).await;
            }
            let stream = TcpStream::connect(&addresses[..]).await?;
            self.introduce(to, stream, engine).await
        };
        tokio::time::timeout(self.0.config.hello, connect)
            .await
            .unwrap_or_else(|_| Err(timed_out()))
    }

    /// Says hello to `to` over a connection made to it.
    async fn introduce(
        &self,
        to: Process,
        mut stream: impl Stream,
        engine: Engine,
    ) -> io::Result<()> {
        stream
            .write_all(&hello(self.0.me, to, &self.0.secret))
            .await?;
        let from = greeted(&mut stream, self.0.me, &self.0.secret).await?;
        if from != to {
            return Err(refused(format!("this is process {}, not {}", from.0, to.0)));
        }
        self.join(to, stream, engine, Bytes::new());
        Ok(())
    }

    /// Ends the connection to a process, such as one whose lease is over.
    pub fn disconnect(&self, process: Process) {
        let peer = self.peers().remove(&process);
        if let Some(peer) = peer {
            peer.close();
        }
    }

    /// A connection has ended.
    fn leave(&self, process: Process, peer: &Arc<Peer>, engine: &Engine, error: &io::Error) {
        let _turn = self.0.turn.lock().unwrap_or_else(PoisonError::into_inner);
        peer.close();
        let replaced = {
            let mut peers = self.peers();
            let current = peers.get(&process);
            let mine = current.is_some_and(|current| Arc::ptr_eq(current, peer));
            if mine {
                peers.remove(&process);
            }
            !mine && peers.contains_key(&process)
        };
        if !replaced {
            engine.broke(process, &self.broken(process, &error.to_string()));
            self.tell(process, false);
        }
    }

    /// Ends all connections, of which their engines are told, and takes no more.
    pub fn shutdown(&self) {
        // Under the same lock as `join` looks at it.
        let peers = {
            let mut peers = self.peers();
            self.0.closed.store(true, Relaxed);
            std::mem::take(&mut *peers)
        };
        self.0.stopped.notify_waiters();
        for peer in peers.into_values() {
            peer.close();
        }
    }

    fn join(&self, process: Process, stream: impl Stream, engine: Engine, first: Bytes) {
        stream.prepare(self.0.config.silence);
        let peer = Arc::new(Peer::default());
        let turn = self.0.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let before = {
            let mut peers = self.peers();
            if self.0.closed.load(Relaxed) {
                return;
            }
            peers.insert(process, Arc::clone(&peer))
        };
        if let Some(before) = before {
            // What was on its way over that one is gone.
            before.close();
            engine.broke(process, &self.broken(process, "it has connected again"));
        }
        engine.connected(process);
        self.tell(process, true);
        drop(turn);
        let tcp = self.clone();
        self.spawn(async move {
            let (reader, writer) = stream.halves();
            // A task of its own: while one thread reduces what has come, another one sends.
            let mut writing = JoinSet::new();
            let queue = Arc::clone(&peer);
            writing.spawn(async move { write(writer, &queue, first).await });
            let error = tokio::select! {
                error = read(&reader, process, &engine) => error,
                error = writing.join_next() => match error {
                    Some(Ok(error)) => error,
                    _ => io::Error::other("the task that sends has ended"),
                },
                () = peer.ended.notified() => io::Error::other("the connection was ended"),
            };
            // What is being written is let go of: it is an operand, and its execution ends only then.
            writing.abort_all();
            tcp.leave(process, &peer, &engine, &error);
        });
    }
}

/// Sends `first` and what is queued, until the connection breaks or is ended.
async fn write(
    mut stream: impl tokio::io::AsyncWrite + Unpin,
    peer: &Peer,
    first: Bytes,
) -> io::Error {
    if let Err(error) = stream.write_all(&first).await {
        return error;
    }
    loop {
        let next = {
            let mut queue = peer.queue();
            let short = queue.short.pop_front();
            short.or_else(|| queue.data.next_chunk().map(Message::Data))
        };
        let written = match next {
            None => {
                peer.more.notified().await;
                continue;
            }
            Some(Message::Ready(key)) => stream.write_all(&Head::Ready(key).write()).await,
            Some(Message::Here(launch)) => stream.write_all(&Head::Here(launch).write()).await,
            Some(Message::Fail(launch, failure)) => {
                let text = Bytes::copy_from_slice(text(&failure));
                let head = Head::Fail(launch, failure.code(), text.len());
                frame(&mut stream, head, text).await
            }
            Some(Message::Data(chunk)) => {
                let head = Head::Data(chunk.key, chunk.offset, chunk.bytes.len());
                frame(&mut stream, head, chunk.bytes).await
            }
        };
        if let Err(error) = written {
            return error;
        }
    }
}

async fn frame(
    stream: &mut (impl tokio::io::AsyncWrite + Unpin),
    head: Head,
    body: Bytes,
) -> io::Result<()> {
    let head = head.write();
    let mut both = Bytes::copy_from_slice(&head).chain(body);
    stream.write_all_buf(&mut both).await
}
