//! A cluster of real processes, held open by `waystation run`, and what the system knows of them.

use std::{
    collections::BTreeMap,
    fs,
    io::{self, Read as _, Write as _},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// How long a cluster may take to come up or to go down.
const PATIENCE: Duration = Duration::from_secs(120);

/// A running cluster; it ends when dropped.
#[derive(Debug)]
pub struct Processes {
    /// Where clients dial, `host:port`.
    pub proxy: String,
    status: String,
    folder: PathBuf,
    run: Child,
}

/// One process, as the system sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// Resident memory, in KiB.
    pub resident_kib: u64,
    /// Open files and sockets.
    pub files: usize,
}

impl Processes {
    /// Starts `BINARY run` with `flags` and a command that waits. Logs and the like lie in `folder`.
    ///
    /// # Panics
    /// When the cluster does not come up.
    pub fn start(binary: &Path, python: &Path, folder: &Path, flags: &[&str]) -> Self {
        let told = folder.join("told");
        let logs = folder.join("logs");
        let mut run = Command::new(binary)
            .arg("run")
            .args(flags)
            .arg("--log_dir")
            .arg(&logs)
            .args(["--", "sh", "-c"])
            .arg("echo \"$JAX_BACKEND_TARGET $WAYSTATION_STATUS_URL\" > \"$0.new\"; mv \"$0.new\" \"$0\"; cat")
            .arg(&told)
            .env("WAYSTATION_PYTHON", python)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("the binary starts");
        let since = Instant::now();
        let text = loop {
            if let Ok(text) = fs::read_to_string(&told) {
                break text;
            }
            let ended = run.try_wait().expect("our child");
            assert!(ended.is_none(), "`run` ended: {ended:?}");
            assert!(since.elapsed() < PATIENCE, "the cluster did not come up");
            thread::sleep(Duration::from_millis(20));
        };
        let mut words = text.split_whitespace();
        let mut word = |prefix: &str| {
            let word = words.next().and_then(|word| word.strip_prefix(prefix));
            word.expect("the command's environment names the cluster")
                .to_owned()
        };
        Self {
            proxy: word("grpc://"),
            status: word("http://"),
            folder: logs,
            run,
        }
    }

    /// The parts by name ("proxy", "worker", "resource-manager"; numbered from the second on).
    ///
    /// # Panics
    /// Where there is no /proc.
    pub fn parts(&self) -> BTreeMap<String, Process> {
        let mut parts = BTreeMap::new();
        for pid in children(self.run.id()) {
            let Ok(words) = fs::read(format!("/proc/{pid}/cmdline")) else {
                continue;
            };
            let role = words.split(|&byte| byte == 0).nth(1).unwrap_or_default();
            let role = String::from_utf8_lossy(role).into_owned();
            if !["proxy", "worker", "resource-manager"].contains(&role.as_str()) {
                continue;
            }
            let name = (1..)
                .map(|n| {
                    if n == 1 {
                        role.clone()
                    } else {
                        format!("{role} {n}")
                    }
                })
                .find(|name| !parts.contains_key(name))
                .unwrap_or(role);
            if let Some(process) = look(pid) {
                parts.insert(name, process);
            }
        }
        parts
    }

    /// The status page.
    ///
    /// # Panics
    /// When it does not answer.
    pub fn status(&self) -> serde_json::Value {
        let (host, path) = self.status.split_once('/').expect("a URL with a path");
        let ask = || -> io::Result<String> {
            let mut stream = TcpStream::connect(host)?;
            write!(stream, "GET /{path} HTTP/1.0\r\nhost: {host}\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        };
        let text = ask().expect("the status page answers");
        let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
        serde_json::from_str(body).expect("the status page is JSON")
    }

    /// Waits until the status page shows nothing of the clients: no session but `sessions`, no array, no host buffer.
    ///
    /// # Panics
    /// When it still does after a while.
    pub fn wait_until_empty(&self, sessions: u64) {
        self.wait_until("the clients' arrays, buffers and sessions are gone", || {
            let status = self.status();
            let held = [
                &status["sessions"],
                &status["host_buffer_memory_bytes"],
                &status["totals"]["array_bytes"],
                &status["totals"]["shards"],
            ];
            held.map(serde_json::Value::as_u64) == [Some(sessions), Some(0), Some(0), Some(0)]
        });
    }

    /// Waits until something holds.
    ///
    /// # Panics
    /// When it still does not after a while.
    pub fn wait_until(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let since = Instant::now();
        while !holds() {
            assert!(
                since.elapsed() < PATIENCE,
                "not true in time: {what}; status {}",
                self.status()
            );
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// The lines of the parts' logs that speak of a panic.
    pub fn panics(&self) -> Vec<String> {
        let logs = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        logs.filter_map(|entry| fs::read(entry.path()).ok())
            .flat_map(|log| {
                String::from_utf8_lossy(&log)
                    .lines()
                    .filter(|line| line.contains("panicked"))
                    .map(str::to_owned)
                    .collect::<Vec<_>>()
            })
            .collect()
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        // The command ends with its input, `run` with the command, and the parts with `run`.
        drop(self.run.stdin.take());
        let since = Instant::now();
        while matches!(self.run.try_wait(), Ok(None)) && since.elapsed() < PATIENCE {
            thread::sleep(Duration::from_millis(20));
        }
        let _ = self.run.kill();
        let _ = self.run.wait();
    }
}

fn children(of: u32) -> Vec<u32> {
    let Ok(tasks) = fs::read_dir(format!("/proc/{of}/task")) else {
        return Vec::new();
    };
    tasks
        .flatten()
        .filter_map(|task| fs::read_to_string(task.path().join("children")).ok())
        .flat_map(|list| {
            list.split_whitespace()
                .filter_map(|pid| pid.parse().ok())
                .collect::<Vec<_>>()
        })
        .collect()
}

fn look(pid: u32) -> Option<Process> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let resident = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(Process {
        pid,
        resident_kib: resident.trim().trim_end_matches(" kB").parse().ok()?,
        files: fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count(),
    })
}
