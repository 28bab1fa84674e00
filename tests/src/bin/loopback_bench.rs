//! What this machine gives two processes at best, for the bench: a ring all-reduce between them over one connection, and bytes one
//! way over one or several, a share of them each, by TCP over loopback or by Unix sockets. Each repetition is answered with a line
//! of JSON when a line comes in on stdin, so that the bench can take others in between.

use std::{
    env,
    io::{self, BufRead as _, Read, Write},
    net::{TcpListener, TcpStream},
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixListener, UnixStream},
    },
    process::{Child, Command},
    thread,
    time::Instant,
};

use clap::{Parser, ValueEnum};
use serde_json::json;
use socket2::SockRef;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// The sum of both processes' 32-bit floats, in both.
    Ring,
    /// From this process into memory of the other.
    OneWay,
}

#[derive(Debug, Parser)]
struct Args {
    #[arg(long)]
    what: What,
    /// Of each process's memory.
    #[arg(long)]
    bytes: usize,
    /// Bytes that are written and read at a time.
    #[arg(long)]
    buffer: usize,
    /// Of bytes one way.
    #[arg(long, default_value_t = 1)]
    connections: usize,
    /// By Unix sockets.
    #[arg(long)]
    unix: bool,
    /// The other process, started by the first: its port, or name.
    #[arg(long, hide = true)]
    connect: Option<String>,
}

/// A connection between the two.
enum Other {
    Tcp(TcpStream),
    Unix(UnixStream),
}

/// Of a Unix socket, as the collectives have it.
const SEND_BUFFER: usize = 1 << 20;

impl From<TcpStream> for Other {
    fn from(stream: TcpStream) -> Other {
        Other::Tcp(stream)
    }
}

impl From<UnixStream> for Other {
    fn from(stream: UnixStream) -> Other {
        Other::Unix(stream)
    }
}

impl Other {
    fn prepared(self) -> io::Result<Self> {
        match &self {
            Other::Tcp(stream) => stream.set_nodelay(true)?,
            Other::Unix(stream) => {
                SockRef::from(stream).set_send_buffer_size(SEND_BUFFER)?;
            }
        }
        Ok(self)
    }
}

impl Read for &Other {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Other::Tcp(stream) => (&mut &*stream).read(into),
            Other::Unix(stream) => (&mut &*stream).read(into),
        }
    }
}

impl Write for &Other {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Other::Tcp(stream) => (&mut &*stream).write(bytes),
            Other::Unix(stream) => (&mut &*stream).write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Kills the other process when this one ends, however it does.
struct Peer(Child);

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn main() -> io::Result<()> {
    let args = Args::parse();
    let mut memory = Memory::new(&args);
    let count = args.connections.max(1);
    if let Some(address) = &args.connect {
        let connect = || match args.unix {
            false => TcpStream::connect(address).map(Other::from),
            true => {
                UnixStream::connect_addr(&SocketAddr::from_abstract_name(address)?).map(Other::from)
            }
        };
        let others = (0..count).map(|_| connect()?.prepared());
        let others = others.collect::<io::Result<Vec<_>>>()?;
        while wait_for(&others[0]).is_ok() {
            memory.run(&args, &others, false)?;
        }
        return Ok(());
    }
    let name = format!("waystation-loopback-bench-{}", std::process::id());
    let unix = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name)?)?;
    let tcp = TcpListener::bind("127.0.0.1:0")?;
    let address = if args.unix {
        name
    } else {
        tcp.local_addr()?.to_string()
    };
    let peer = Command::new(env::current_exe()?)
        .args(env::args_os().skip(1))
        .args(["--connect", &address])
        .spawn()?;
    let _peer = Peer(peer);
    let accept = || match args.unix {
        false => tcp.accept().map(|(stream, _)| Other::from(stream)),
        true => unix.accept().map(|(stream, _)| Other::from(stream)),
    };
    let others = (0..count).map(|_| accept()?.prepared());
    let others = others.collect::<io::Result<Vec<_>>>()?;
    for line in io::stdin().lock().lines() {
        line?;
        let begun = Instant::now();
        (&others[0]).write_all(&[1])?;
        memory.run(&args, &others, true)?;
        let seconds = begun.elapsed().as_secs_f64();
        writeln!(io::stdout(), "{}", json!({ "seconds": seconds }))?;
    }
    Ok(())
}

fn wait_for(mut other: &Other) -> io::Result<()> {
    other.read_exact(&mut [0])
}

/// What is sent, and where what comes goes. Written once, so that no repetition pays for the system's pages.
struct Memory {
    own: Vec<u8>,
    result: Vec<u8>,
    buffer: Vec<u8>,
}

impl Memory {
    fn new(args: &Args) -> Self {
        // Whole floats in both halves.
        let bytes = args.bytes / 8 * 8;
        let own = std::iter::repeat_n(1f32.to_ne_bytes(), bytes / 4)
            .flatten()
            .collect();
        Self {
            own,
            result: vec![1; bytes],
            buffer: vec![0; args.buffer.max(4) / 4 * 4],
        }
    }

    fn run(&mut self, args: &Args, others: &[Other], first: bool) -> io::Result<()> {
        match args.what {
            What::OneWay => self.one_way(others, first),
            What::Ring => self.ring(&others[0], first),
        }
    }

    /// Each connection has a thread on both sides.
    fn one_way(&mut self, others: &[Other], first: bool) -> io::Result<()> {
        let chunk = self.buffer.len();
        let share = self.own.len().div_ceil(others.len()).max(1);
        let own = self.own.chunks(share);
        let shares = others.iter().zip(own.zip(self.result.chunks_mut(share)));
        thread::scope(|scope| {
            let threads: Vec<_> = shares
                .map(|(mut other, (own, result))| {
                    scope.spawn(move || {
                        if first {
                            send(other, own, chunk)?;
                            return other.read_exact(&mut [0]);
                        }
                        for part in result.chunks_mut(chunk) {
                            other.read_exact(part)?;
                        }
                        other.write_all(&[1])
                    })
                })
                .collect();
            threads.into_iter().try_for_each(joined)
        })
    }

    /// Each reduces one half and then gives it to the other.
    fn ring(&mut self, mut other: &Other, first: bool) -> io::Result<()> {
        let half = self.own.len() / 2;
        let (mine, theirs) = if first { (0, half) } else { (half, 0) };
        let chunk = self.buffer.len();
        let Self {
            own,
            result,
            buffer,
        } = self;
        let own = &*own;
        thread::scope(|scope| {
            let sends = scope.spawn(|| send(other, &own[theirs..theirs + half], chunk));
            let reduced = &mut result[mine..mine + half];
            for (sum, part) in reduced
                .chunks_mut(chunk)
                .zip(own[mine..mine + half].chunks(chunk))
            {
                let buffer = &mut buffer[..part.len()];
                other.read_exact(buffer)?;
                add(sum, part, buffer);
            }
            joined(sends)
        })?;
        let (low, high) = result.split_at_mut(half);
        let (done, wanted) = if first { (&*low, high) } else { (&*high, low) };
        thread::scope(|scope| {
            let sends = scope.spawn(|| send(other, done, chunk));
            for part in wanted.chunks_mut(chunk) {
                other.read_exact(part)?;
            }
            joined(sends)
        })
    }
}

fn joined(thread: thread::ScopedJoinHandle<'_, io::Result<()>>) -> io::Result<()> {
    thread
        .join()
        .unwrap_or_else(|_| Err(io::Error::other("the thread that sends has ended")))
}

fn send(mut to: &Other, bytes: &[u8], chunk: usize) -> io::Result<()> {
    bytes.chunks(chunk).try_for_each(|part| to.write_all(part))
}

fn add(sum: &mut [u8], one: &[u8], other: &[u8]) {
    let parts = one.as_chunks::<4>().0.iter().zip(other.as_chunks::<4>().0);
    for (sum, (&one, &other)) in sum.as_chunks_mut::<4>().0.iter_mut().zip(parts) {
        *sum = (f32::from_ne_bytes(one) + f32::from_ne_bytes(other)).to_ne_bytes();
    }
}
