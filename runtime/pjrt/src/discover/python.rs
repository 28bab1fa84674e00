//! Asking a Python interpreter where it imports from.

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long an interpreter may take; a cold one on a slow disk takes seconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// Directories in the order of import, those that packages are installed to first.
const PROGRAM: &str = "import sys, sysconfig\n\
    for d in dict.fromkeys([sysconfig.get_path('platlib'), sysconfig.get_path('purelib'), *sys.path]): print(d)";

/// Interpreters to ask if none is named: that of the active environment, then those on the path.
pub(super) fn candidates(virtual_env: Option<OsString>, path: Option<OsString>) -> Vec<PathBuf> {
    let mut found = Vec::new();
    if let Some(environment) = virtual_env.filter(|environment| !environment.is_empty()) {
        found.push(PathBuf::from(environment).join("bin/python"));
    }
    let path = path.unwrap_or_default();
    for name in ["python3", "python"] {
        let on_path = std::env::split_paths(&path)
            .map(|dir| dir.join(name))
            .find(|file| file.is_file());
        if let Some(python) = on_path
            && !found.contains(&python)
        {
            found.push(python);
        }
    }
    found
}

/// Directories that `python` imports from, or why it does not say.
pub(super) fn directories(python: &Path) -> Result<Vec<PathBuf>, String> {
    let mut child = Command::new(python)
        .args(["-c", PROGRAM])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("it cannot be run: {error}"))?;
    // Read elsewhere, so that an interpreter that says too much, or never ends, blocks nothing here.
    let stdout = child.stdout.take().map(drain);
    let stderr = child.stderr.take().map(drain);
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
            Ok(None) => {
                // Whether it was alive or not, it is gone after this.
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("it did not answer within {} s", PATIENCE.as_secs()));
            }
            Err(error) => return Err(format!("it cannot be waited for: {error}")),
        }
    };
    let said = |pipe: Option<std::sync::mpsc::Receiver<Vec<u8>>>| {
        // A grandchild may hold the pipe open; then what was said stays unknown. On a busy machine the reading thread may
        // be late: it has until the deadline.
        let left = deadline.saturating_duration_since(Instant::now());
        pipe.and_then(|pipe| pipe.recv_timeout(left.max(Duration::from_secs(1))).ok())
    };
    if !status.success() {
        let complaint = String::from_utf8_lossy(&said(stderr).unwrap_or_default())
            .trim()
            .to_owned();
        let last = complaint
            .lines()
            .last()
            .unwrap_or("without a word")
            .to_owned();
        return Err(format!("it failed ({status}): {last}"));
    }
    let Some(said) = said(stdout) else {
        return Err(format!(
            "its answer did not come within {} s",
            PATIENCE.as_secs()
        ));
    };
    let directories = String::from_utf8_lossy(&said)
        .lines()
        .map(PathBuf::from)
        .filter(|directory| directory.is_absolute())
        .collect();
    Ok(directories)
}

/// The first 64 KiB of a pipe, read by a thread of its own.
fn drain(pipe: impl Read + Send + 'static) -> std::sync::mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = std::sync::mpsc::sync_channel(1);
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // What was read before an error is still worth having.
        let _ = pipe.take(64 << 10).read_to_end(&mut bytes);
        let _ = sender.send(bytes);
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_active_environment_comes_first() {
        let root = tempfile::tempdir().expect("a directory");
        std::fs::write(root.path().join("python3"), b"").expect("a file");
        let path = Some(root.path().as_os_str().to_owned());
        assert_eq!(
            candidates(Some("/env".into()), path.clone()),
            [
                PathBuf::from("/env/bin/python"),
                root.path().join("python3")
            ]
        );
        assert_eq!(
            candidates(Some("".into()), path),
            [root.path().join("python3")]
        );
        assert!(candidates(None, None).is_empty());
    }
}
