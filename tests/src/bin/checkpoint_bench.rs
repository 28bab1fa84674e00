//! What the machine gives a checkpoint at best, for the bench: zstd at level 1 on all cores, and files that are written and
//! synced. Works on the chunks of a checkpoint that is not compressed, and answers with one JSON line.

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use clap::Parser;
use serde_json::json;

/// What is written by one call.
const WRITE_BYTES: usize = 256 << 10;

#[derive(Debug, Parser)]
struct Args {
    /// A checkpoint of zarr v2 that is not compressed.
    #[arg(long)]
    checkpoint: PathBuf,
    /// A folder to write to; what is written is removed again.
    #[arg(long)]
    folder: PathBuf,
}

/// The elements of every chunk.
fn chunks(folder: &Path) -> io::Result<Vec<Vec<u8>>> {
    let mut found = Vec::new();
    for array in fs::read_dir(folder)? {
        let array = array?.path();
        if !array.join(".zarray").is_file() {
            continue;
        }
        for file in fs::read_dir(&array)? {
            let file = file?;
            let name = file.file_name().into_string().unwrap_or_default();
            if name.starts_with(|first: char| first.is_ascii_digit()) {
                found.push(fs::read(file.path())?);
            }
        }
    }
    Ok(found)
}

/// The CPU time of this process so far.
fn cpu_time() -> Duration {
    let usage = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(
        u64::try_from(usage.tv_sec).unwrap_or(0),
        u32::try_from(usage.tv_nsec).unwrap_or(0),
    )
}

/// What each of the items becomes, on all cores; the time and the CPU time that it took.
fn on_all_cores<T: Sync, R: Send>(
    items: &[T],
    work: impl Fn(usize, &T) -> io::Result<R> + Sync,
) -> io::Result<(Vec<R>, f64, f64)> {
    let next = AtomicUsize::new(0);
    let (begun, before) = (Instant::now(), cpu_time());
    let mut results = thread::scope(|scope| {
        let threads: Vec<_> = (0..thread::available_parallelism().map_or(1, usize::from))
            .map(|_| {
                scope.spawn(|| {
                    let mut done = Vec::new();
                    loop {
                        let number = next.fetch_add(1, Relaxed);
                        let Some(item) = items.get(number) else {
                            return Ok::<_, io::Error>(done);
                        };
                        done.push((number, work(number, item)?));
                    }
                })
            })
            .collect();
        let mut all = Vec::new();
        for thread in threads {
            let done = thread.join();
            all.extend(done.map_err(|_| io::Error::other("a thread has died"))??);
        }
        Ok::<_, io::Error>(all)
    })?;
    let (seconds, cpu) = (begun.elapsed(), cpu_time().saturating_sub(before));
    results.sort_by_key(|(number, _)| *number);
    let results = results.into_iter().map(|(_, result)| result).collect();
    Ok((results, seconds.as_secs_f64(), cpu.as_secs_f64()))
}

fn main() -> io::Result<()> {
    let args = Args::parse();
    let chunks = chunks(&args.checkpoint)?;
    let bytes: usize = chunks.iter().map(Vec::len).sum();
    if bytes == 0 {
        return Err(io::Error::other("no chunks there"));
    }
    let (frames, compress, compress_cpu) =
        on_all_cores(&chunks, |_, chunk| zstd::bulk::compress(chunk, 1))?;
    let stored: usize = frames.iter().map(Vec::len).sum();
    let (sizes, decompress, decompress_cpu) = on_all_cores(&frames, |number, frame| {
        let elements = zstd::bulk::decompress(frame, chunks[number].len())?;
        Ok(elements.len())
    })?;
    if sizes.into_iter().sum::<usize>() != bytes {
        return Err(io::Error::other("zstd gave other bytes back"));
    }
    let folder = tempfile::tempdir_in(&args.folder)?;
    let (_, write, write_cpu) = on_all_cores(&chunks, |number, chunk| {
        let mut file = File::create(folder.path().join(number.to_string()))?;
        // Of what is written at once the system makes as large pages as it can, which takes longer here.
        for part in chunk.chunks(WRITE_BYTES) {
            file.write_all(part)?;
        }
        file.sync_all()
    })?;
    let begun = Instant::now();
    File::open(folder.path())?.sync_all()?;
    let write = write + begun.elapsed().as_secs_f64();
    let (_, read, read_cpu) = on_all_cores(&chunks, |number, _| {
        fs::read(folder.path().join(number.to_string()))
    })?;
    let line = json!({
        "bytes": bytes, "stored_bytes": stored,
        "compress_seconds": compress, "compress_cpu_seconds": compress_cpu,
        "decompress_seconds": decompress, "decompress_cpu_seconds": decompress_cpu,
        "write_seconds": write, "write_cpu_seconds": write_cpu,
        "read_seconds": read, "read_cpu_seconds": read_cpu,
    });
    writeln!(io::stdout(), "{line}")
}
