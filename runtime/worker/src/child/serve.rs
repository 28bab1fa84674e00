//! The child's side: opens the plugin, then compiles whatever comes, each program on a thread of its own.

use std::{
    fs::File,
    io::{self, Write as _},
    os::{fd::AsFd as _, unix::net::UnixStream},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use waystation_pjrt::Client;
use waystation_proto::{
    tensorflow::StatusProto,
    waystation::compile::{Done, FromChild, Job, Ready, Setup, ToChild, from_child, to_child},
};

use super::{frame, setup};
use crate::{
    error::{Error, chain},
    make, plugin, status,
    wide::Wide,
};

/// Stack of a thread that compiles: XLA and MLIR recurse over programs. Memory is taken only as far as it is used.
const STACK_BYTES: usize = 64 << 20;

/// Runs this process as the compile child of the worker that has started it, on the socket that it has as its stdin. Ends
/// the process, as soon as the worker has closed its end or is gone, whatever is under way.
///
/// # Errors
/// When stdin is no socket, as for a process that somebody else has started.
pub fn compile_child() -> Result<std::convert::Infallible, Error> {
    let link = take_stdin().map_err(Error::Link)?;
    let mut reader = link.try_clone().map_err(Error::Link)?;
    let child = Arc::new(Child {
        link: Mutex::new(link),
        client: OnceLock::new(),
        wide: OnceLock::new(),
    });
    // This thread does nothing but read, so that the end of the worker is seen at once.
    loop {
        match frame::read_blocking::<ToChild>(&mut reader) {
            Ok(Some(ToChild { message })) => match message {
                Some(to_child::Message::Setup(setup)) => {
                    child.begin("setup", move |child| child.set_up(setup))
                }
                Some(to_child::Message::Job(job)) => {
                    child.begin("compile", move |child| child.perform(&job))
                }
                None => {
                    tracing::error!("a message that this build does not know; run the same build")
                }
            },
            Ok(None) => break,
            Err(error) => {
                tracing::error!(%error, "the worker cannot be understood");
                break;
            }
        }
    }
    end()
}

/// The socket, whose place the null device takes: nothing that the plugin does or starts may touch it.
fn take_stdin() -> io::Result<UnixStream> {
    let link = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    // Fails for what is no socket.
    link.peer_addr()?;
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    Ok(link)
}

/// At once and without exit handlers: the plugin's threads may be anywhere.
fn end() -> ! {
    use rustix::process::{Signal, getpid, kill_process};
    // A process may always kill itself.
    let _ = kill_process(getpid(), Signal::KILL);
    std::process::abort()
}

struct Child {
    /// For writing.
    link: Mutex<UnixStream>,
    client: OnceLock<Client>,
    wide: OnceLock<Wide>,
}

impl Child {
    fn begin(self: &Arc<Self>, name: &str, work: impl FnOnce(&Child) + Send + 'static) {
        let child = Arc::clone(self);
        let work = move || {
            // A panic is a crash as any other; without an answer the worker would wait for ever.
            if catch_unwind(AssertUnwindSafe(|| work(&child))).is_err() {
                std::process::abort();
            }
        };
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .stack_size(STACK_BYTES);
        if let Err(error) = thread.spawn(work) {
            tracing::error!(%error, "no thread can be started");
            end();
        }
    }

    fn set_up(&self, setup: Setup) {
        let spec = setup::decode(setup);
        let ready = match plugin::open(&spec) {
            Ok(opened) => {
                let likeness = opened.likeness();
                // There is one setup.
                let plugin = Arc::clone(opened.client.plugin());
                let _ = self.wide.set(Wide::new(plugin, &spec.options));
                let _ = self.client.set(opened.client);
                Ready {
                    status: None,
                    likeness,
                }
            }
            Err(error) => Ready {
                status: Some(status::invalid(chain(&error))),
                likeness: Vec::new(),
            },
        };
        self.send(from_child::Message::Ready(ready));
    }

    fn perform(&self, job: &Job) {
        let done = self.compile(job).unwrap_or_else(|status| Done {
            status: Some(status),
            ..Done::default()
        });
        self.send(from_child::Message::Done(Done { id: job.id, ..done }));
    }

    fn compile(&self, job: &Job) -> Result<Done, StatusProto> {
        let (Some(client), Some(wide)) = (self.client.get(), self.wide.get()) else {
            return Err(status::invalid(
                "a program came before the plugin was there",
            ));
        };
        let shape = (job.num_replicas, job.num_partitions);
        if job.discard && job.spanning {
            let client = wide.client(shape)?;
            make::compile_spanning(&client, &job.program, &job.options, shape, |_| ())?;
            return Ok(Done::default());
        }
        if job.discard {
            make::compile(client, &job.program, &job.options)?;
            return Ok(Done::default());
        }
        if job.probe {
            return Ok(Done {
                debug_options: make::probe(client, &job.program, &job.options)?.into(),
                ..Done::default()
            });
        }
        let made = if job.spanning {
            make::make_spanning(wide, &job.program, &job.options, shape)?
        } else {
            make::make(client, &job.program, &job.options, shape)?
        };
        let (executable, not_serialized) = match made.serialized {
            Ok(bytes) => (bytes, None),
            Err(status) => (Vec::new(), Some(status)),
        };
        Ok(Done {
            info: Some(made.info),
            executable: executable.into(),
            not_serialized,
            compile_nanos: u64::try_from(made.took.as_nanos()).unwrap_or(u64::MAX),
            ..Done::default()
        })
    }

    fn send(&self, message: from_child::Message) {
        let frame = frame::encode(&FromChild {
            message: Some(message),
        });
        let mut link = self.link.lock().unwrap_or_else(PoisonError::into_inner);
        // Fails only when the worker is gone, which the reader sees too.
        let _ = link.write_all(&frame);
    }
}
