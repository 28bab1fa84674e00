//! What this machine's loopback gives at best, for the bench: a ring all-reduce between two processes over one TCP connection,
//! and bytes one way over one or several, a share of them each. Each repetition is answered with a line of JSON when a line comes in on stdin, so that the bench can
//! take others in between.

use std::{
    env,
    io::{self, BufRead as _, Read as _, Write as _},
    net::{TcpListener, TcpStream},
    process::{Child, Command},
    thread,
    time::Instant,
};

use clap::{Parser, ValueEnum};
use serde_json::json;

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
    /// The other process, started by the first.
    #[arg(long, hide = true)]
    connect: Option<String>,
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
    if let Some(address) = &args.connect {
        let mut others = Vec::new();
        for _ in 0..args.connections.max(1) {
            others.push(TcpStream::connect(address)?);
        }
        others
            .iter()
            .try_for_each(|other| other.set_nodelay(true))?;
        while wait_for(&mut others[0]).is_ok() {
            memory.run(&args, &others, false)?;
        }
        return Ok(());
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let peer = Command::new(env::current_exe()?)
        .args(env::args_os().skip(1))
        .args(["--connect", &listener.local_addr()?.to_string()])
        .spawn()?;
    let _peer = Peer(peer);
    let mut others = Vec::new();
    for _ in 0..args.connections.max(1) {
        others.push(listener.accept()?.0);
    }
    others
        .iter()
        .try_for_each(|other| other.set_nodelay(true))?;
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

fn wait_for(other: &mut TcpStream) -> io::Result<()> {
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

    fn run(&mut self, args: &Args, others: &[TcpStream], first: bool) -> io::Result<()> {
        match args.what {
            What::OneWay => self.one_way(others, first),
            What::Ring => self.ring(&others[0], first),
        }
    }

    /// Each connection has a thread on both sides.
    fn one_way(&mut self, others: &[TcpStream], first: bool) -> io::Result<()> {
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
    fn ring(&mut self, mut other: &TcpStream, first: bool) -> io::Result<()> {
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

fn send(mut to: &TcpStream, bytes: &[u8], chunk: usize) -> io::Result<()> {
    bytes.chunks(chunk).try_for_each(|part| to.write_all(part))
}

fn add(sum: &mut [u8], one: &[u8], other: &[u8]) {
    let parts = one.as_chunks::<4>().0.iter().zip(other.as_chunks::<4>().0);
    for (sum, (&one, &other)) in sum.as_chunks_mut::<4>().0.iter_mut().zip(parts) {
        *sum = (f32::from_ne_bytes(one) + f32::from_ne_bytes(other)).to_ne_bytes();
    }
}
