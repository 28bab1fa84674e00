//! The worker's side of one child process: its start, the jobs in it, and its end.

use std::{
    collections::HashMap,
    fmt,
    os::{fd::OwnedFd, unix::process::ExitStatusExt as _},
    process::{ExitStatus, Stdio},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, pipe},
    },
    process::Command,
    sync::{mpsc, oneshot},
    task::JoinHandle,
};
use tokio_util::sync::{CancellationToken, DropGuard};
use waystation_proto::waystation::compile::{
    Done, FromChild, Job, Ready, Setup, ToChild, from_child, to_child,
};

use super::{
    frame,
    words::{LINE_BYTES, Words},
};
use crate::{
    config::CompileChild,
    counters::{self, Counters},
};

/// How long a plugin may take to open.
const START_LIMIT: Duration = Duration::from_secs(120);

/// How long the last lines may take to come after the process has ended; what it has started may hold its stderr open.
const LAST_LINES_LIMIT: Duration = Duration::from_secs(1);

/// Lines of a child that go to the worker's log each minute.
const LINES_A_MINUTE: u32 = 1000;

/// How a child ended.
#[derive(Debug, Clone)]
pub(super) struct Death {
    status: Option<ExitStatus>,
    /// Why, in the process's own words; may be empty.
    words: String,
}

impl Death {
    /// Killed from outside, or by the system for want of memory: a program does not do this.
    pub(super) fn is_kill(&self) -> bool {
        let signal = self.status.and_then(|status| status.signal());
        matches!(signal, Some(9 | 15))
    }
}

impl fmt::Display for Death {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.status {
            Some(status) => match (status.signal().and_then(signal_name), status.signal()) {
                (Some(name), _) => f.write_str(name),
                (None, Some(signal)) => write!(f, "signal {signal}"),
                (None, None) => write!(f, "{status}"),
            },
            None => f.write_str("no exit status"),
        }
    }
}

impl Death {
    pub(super) fn words(&self) -> &str {
        if self.words.is_empty() {
            "it printed nothing"
        } else {
            &self.words
        }
    }
}

/// The signals that end a compiler.
fn signal_name(signal: i32) -> Option<&'static str> {
    Some(match signal {
        4 => "SIGILL",
        5 => "SIGTRAP",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        15 => "SIGTERM",
        31 => "SIGSYS",
        _ => return None,
    })
}

/// Why there is no child.
#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    #[error("the process cannot be started")]
    Spawn(#[source] std::io::Error),
    #[error("it ended with {death} before it was ready: {}", death.words())]
    Died { death: Death },
    #[error("its plugin was not ready after {START_LIMIT:?}")]
    Slow,
    #[error("it cannot open the plugin: {what}")]
    Plugin { what: String },
    #[error("it compiles otherwise than this worker: {theirs:?} against {ours:?}")]
    Unlike {
        ours: Vec<String>,
        theirs: Vec<String>,
    },
}

/// A child that is ready. Dropped, it is killed.
#[derive(Debug)]
pub(super) struct Process {
    pid: u32,
    frames: mpsc::UnboundedSender<Bytes>,
    jobs: Arc<Jobs>,
    next: AtomicU64,
    counters: Arc<Counters>,
    _kill: DropGuard,
}

/// The jobs in a child.
#[derive(Debug, Default)]
struct Jobs(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    waiting: HashMap<u64, oneshot::Sender<Done>>,
    death: Option<Death>,
}

impl Jobs {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn death(&self) -> Death {
        self.state().death.clone().unwrap_or(Death {
            status: None,
            words: String::new(),
        })
    }
}

/// Takes a job back that its asker has given up.
struct Asked<'a> {
    process: &'a Process,
    id: u64,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        self.process.jobs.state().waiting.remove(&self.id);
        counters::sub(&self.process.counters.compiling_in_child, 1);
    }
}

impl Process {
    /// Starts a child and waits until it has opened the plugin. `likeness` is the worker's own.
    pub(super) async fn start(
        spec: &CompileChild,
        setup: &Setup,
        likeness: &[String],
        counters: &Arc<Counters>,
    ) -> Result<Process, StartError> {
        let kill = CancellationToken::new();
        let (ready, is_ready) = oneshot::channel();
        let (frames, outgoing) = mpsc::unbounded_channel();
        let jobs = Arc::new(Jobs::default());
        let spawned = spawn(spec).map_err(StartError::Spawn)?;
        let pid = spawned.process.id().unwrap_or_default();
        tokio::spawn(spawned.drive(outgoing, ready, Arc::clone(&jobs), kill.clone()));
        let process = Process {
            pid,
            frames,
            jobs,
            next: AtomicU64::new(0),
            counters: Arc::clone(counters),
            _kill: kill.drop_guard(),
        };
        process.send(to_child::Message::Setup(setup.clone()));
        let ready = match tokio::time::timeout(START_LIMIT, is_ready).await {
            Ok(Ok(ready)) => ready,
            Ok(Err(_)) => {
                let death = process.jobs.death();
                return Err(StartError::Died { death });
            }
            Err(_) => return Err(StartError::Slow),
        };
        if let Some(status) = ready.status {
            return Err(StartError::Plugin {
                what: status.message,
            });
        }
        if ready.likeness != likeness {
            return Err(StartError::Unlike {
                ours: likeness.to_vec(),
                theirs: ready.likeness,
            });
        }
        Ok(process)
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    pub(super) fn is_alive(&self) -> bool {
        self.jobs.state().death.is_none()
    }

    /// Has a job done. Cancel-safe, but what is given up goes on in the child.
    pub(super) async fn ask(&self, job: Job) -> Result<Done, Death> {
        let id = self.next.fetch_add(1, Relaxed);
        let (answer, answered) = oneshot::channel();
        {
            let mut state = self.jobs.state();
            if let Some(death) = &state.death {
                return Err(death.clone());
            }
            state.waiting.insert(id, answer);
        }
        counters::add(&self.counters.compiling_in_child, 1);
        let _asked = Asked { process: self, id };
        self.send(to_child::Message::Job(Job { id, ..job }));
        answered.await.map_err(|_| self.jobs.death())
    }

    fn send(&self, message: to_child::Message) {
        let frame = frame::encode(&ToChild {
            message: Some(message),
        });
        // Fails only when the child is gone, which whoever waits for an answer is told.
        let _ = self.frames.send(frame);
    }
}

/// A process that has just been started.
struct Spawned {
    process: tokio::process::Child,
    link: UnixStream,
    output: JoinHandle<Words>,
}

fn spawn(spec: &CompileChild) -> std::io::Result<Spawned> {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
    let (reader, writer) = std::io::pipe()?;
    let mut command = Command::new(&spec.program);
    command
        .args(&spec.arguments)
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        // Plugins print to both.
        .stdout(Stdio::from(writer.try_clone()?))
        .stderr(Stdio::from(writer))
        // A terminal's Ctrl-C is for the worker, which ends the child itself.
        .process_group(0)
        .kill_on_drop(true);
    if let Some(name) = &spec.name {
        command.arg0(name);
    }
    let process = command.spawn()?;
    // Closes our copies of the child's ends: the pipe and the socket must end when the child does.
    drop(command);
    ours.set_nonblocking(true)?;
    let reader = pipe::Receiver::from_owned_fd(OwnedFd::from(reader))?;
    Ok(Spawned {
        output: tokio::spawn(listen(reader, process.id().unwrap_or_default())),
        link: UnixStream::from_std(ours)?,
        process,
    })
}

impl Spawned {
    /// Lives as long as the child does.
    async fn drive(
        mut self,
        mut outgoing: mpsc::UnboundedReceiver<Bytes>,
        ready: oneshot::Sender<Ready>,
        jobs: Arc<Jobs>,
        kill: CancellationToken,
    ) {
        let (reader, mut writer) = self.link.into_split();
        let writing = tokio::spawn(async move {
            while let Some(frame) = outgoing.recv().await {
                // The reader sees the end of the child too.
                if writer.write_all(&frame).await.is_err() {
                    return;
                }
            }
        });
        tokio::select! {
            () = receive(reader, ready, &jobs) => {}
            () = kill.cancelled() => {}
        }
        // Fails only when it is gone.
        let _ = self.process.start_kill();
        let status = self.process.wait().await.ok();
        writing.abort();
        let words = tokio::time::timeout(LAST_LINES_LIMIT, &mut self.output).await;
        let words = words.ok().and_then(Result::ok).map(|words| words.last());
        self.output.abort();
        let mut state = jobs.state();
        state.death = Some(Death {
            status,
            words: words.unwrap_or_default(),
        });
        // Whoever waits for one learns of the death.
        state.waiting.clear();
    }
}

/// Hands the answers out until the child's end of the socket is closed.
async fn receive(mut link: OwnedReadHalf, ready: oneshot::Sender<Ready>, jobs: &Jobs) {
    let mut ready = Some(ready);
    loop {
        match frame::read::<FromChild>(&mut link).await {
            Ok(Some(FromChild { message })) => match message {
                Some(from_child::Message::Ready(message)) => {
                    if let Some(ready) = ready.take() {
                        // Given up meanwhile.
                        let _ = ready.send(message);
                    }
                }
                Some(from_child::Message::Done(done)) => {
                    if let Some(answer) = jobs.state().waiting.remove(&done.id) {
                        // As above.
                        let _ = answer.send(done);
                    }
                }
                None => tracing::warn!("the compile child says what this build does not know"),
            },
            Ok(None) => return,
            Err(error) => {
                tracing::debug!(%error, "the compile child's socket has broken");
                return;
            }
        }
    }
}

/// Passes what the child prints to the log, and remembers the end of it.
async fn listen(output: pipe::Receiver, pid: u32) -> Words {
    let mut output = BufReader::new(output);
    let mut words = Words::default();
    let (mut minute, mut lines) = (tokio::time::Instant::now(), 0);
    while let Some(line) = next_line(&mut output).await {
        if minute.elapsed() > Duration::from_secs(60) {
            (minute, lines) = (tokio::time::Instant::now(), 0);
        }
        lines += 1;
        if lines <= LINES_A_MINUTE {
            tracing::info!(target: "waystation_worker::compile_child", pid, "{line}");
        } else if lines == LINES_A_MINUTE + 1 {
            tracing::warn!(
                pid,
                "the compile child prints too much; the rest of this minute is left out"
            );
        }
        words.push(line);
    }
    words
}

/// The next line, without what is beyond [`LINE_BYTES`].
async fn next_line(output: &mut BufReader<pipe::Receiver>) -> Option<String> {
    let mut line = Vec::new();
    let limit = LINE_BYTES as u64;
    let read = (&mut *output)
        .take(limit)
        .read_until(b'\n', &mut line)
        .await;
    if read.ok()? == 0 {
        return None;
    }
    if !line.ends_with(b"\n") {
        skip_line(output).await;
    }
    Some(String::from_utf8_lossy(&line).trim_end().to_owned())
}

/// Reads to the end of the line without keeping it.
async fn skip_line(output: &mut BufReader<pipe::Receiver>) {
    while let Ok(bytes) = output.fill_buf().await {
        if bytes.is_empty() {
            return;
        }
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let skipped = end.map_or(bytes.len(), |end| end + 1);
        output.consume(skipped);
        if end.is_some() {
            return;
        }
    }
}
