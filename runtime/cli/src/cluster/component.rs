//! One child process.

use std::{
    env,
    ffi::OsString,
    fs::{File, OpenOptions},
    io::{self, Read as _, Seek as _, SeekFrom},
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::{Duration, Instant},
};

use tokio::process::{Child, ChildStdin, Command};
use tracing::warn;

use super::pauses::Pauses;
use crate::error::{Failure, USAGE};

/// How much of a log is shown when its process has died.
const LAST_LINES: usize = 20;
/// How far back from its end a log is read for that.
const LAST_BYTES: u64 = 16 << 10;

/// Where the children's logs go.
#[derive(Clone, Debug)]
pub(super) enum Output {
    /// One file a child.
    Folder(PathBuf),
    /// With ours.
    Stderr,
}

/// A child and its lifeline.
#[derive(Debug)]
pub(super) struct Component {
    name: String,
    process: Child,
    /// The child ends when this closes.
    lifeline: Option<ChildStdin>,
    log: Option<PathBuf>,
    arguments: Vec<OsString>,
    ended: Option<ExitStatus>,
    told: bool,
    /// When it was started, or tried to be.
    since: Instant,
    pauses: Pauses,
    /// When it is to be started again.
    due: Option<Instant>,
}

impl Component {
    /// Starts this program anew with other arguments. Must be called within a tokio runtime.
    pub(super) fn spawn(
        name: String,
        arguments: &[OsString],
        output: &Output,
    ) -> Result<Component, Failure> {
        let failed =
            |error: io::Error| Failure::because(&format!("{name} cannot be started"), &error);
        let program = env::current_exe().map_err(failed)?;
        let (log, stdout, stderr) = match output {
            Output::Folder(folder) => {
                let path = folder.join(format!("{name}.log"));
                // A child that is started again goes on in its log.
                let opened = OpenOptions::new().create(true).append(true).open(&path);
                let file = opened.map_err(|error| {
                    Failure::usage(format!("log {} cannot be written: {error}", path.display()))
                })?;
                let stderr = file.try_clone().map_err(failed)?;
                (Some(path), Stdio::from(file), Stdio::from(stderr))
            }
            // Plugins print to stdout at times; ours belongs to the user's command.
            Output::Stderr => {
                let stderr = io::stderr().as_fd().try_clone_to_owned().map_err(failed)?;
                (None, Stdio::from(stderr), Stdio::inherit())
            }
        };
        let mut command = Command::new(program);
        command
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(stdout)
            .stderr(stderr);
        // What our own variables say is in the arguments already.
        for (variable, _) in env::vars_os() {
            let text = variable.to_string_lossy();
            if text.starts_with("WAYSTATION_") && text != "WAYSTATION_LOG" {
                command.env_remove(&variable);
            }
        }
        let mut process = command
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(failed)?;
        Ok(Component {
            lifeline: process.stdin.take(),
            name,
            process,
            log,
            arguments: arguments.to_vec(),
            ended: None,
            told: false,
            since: Instant::now(),
            pauses: Pauses::default(),
            due: None,
        })
    }

    /// What the child is started with from the next time on.
    pub(super) fn start_again_with(&mut self, arguments: Vec<OsString>) {
        self.arguments = arguments;
    }

    /// Has the child, which has ended, started again after a pause, which is returned.
    pub(super) fn plan_restart(&mut self) -> Duration {
        let pause = self.pauses.after(self.since.elapsed());
        self.due = Some(Instant::now() + pause);
        pause
    }

    /// When the child is to be started again.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Starts the child anew. When that fails, it is tried again later.
    pub(super) fn restart(&mut self, output: &Output) -> Result<(), Failure> {
        self.due = None;
        match Component::spawn(self.name.clone(), &self.arguments, output) {
            Ok(anew) => {
                let pauses = std::mem::take(&mut self.pauses);
                *self = Component { pauses, ..anew };
                Ok(())
            }
            Err(failure) => {
                self.since = Instant::now();
                self.plan_restart();
                Err(failure)
            }
        }
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn is_running(&self) -> bool {
        self.ended.is_none()
    }

    /// Waits for the child's end. Cancel-safe.
    pub(super) async fn ended(&mut self) {
        // There is one reason for waiting to fail: the child has been waited for already.
        self.ended = Some(self.process.wait().await.unwrap_or_default());
    }

    /// The child, once, when it has ended.
    pub(super) fn take_news(&mut self) -> Option<&mut Component> {
        if self.ended.is_none() {
            self.ended = self.process.try_wait().unwrap_or_default();
        }
        let news = self.ended.is_some() && !self.told;
        self.told |= news;
        news.then_some(self)
    }

    /// Whether the child was refused its command line.
    pub(super) fn failed_on_usage(&self) -> bool {
        self.ended.and_then(|status| status.code()) == Some(i32::from(USAGE))
    }

    /// "worker-0-0 has ended (signal: 9 (SIGKILL)); its last lines: ...".
    pub(super) fn epitaph(&self) -> String {
        let status = self.ended.unwrap_or_default();
        format!(
            "{} has ended ({status}); its last lines:\n{}",
            self.name,
            self.last_lines()
        )
    }

    /// What the child's early end leads to.
    pub(super) fn failure(&self) -> Failure {
        super::early_end(
            &self.name,
            self.ended.unwrap_or_default(),
            &self.last_lines(),
        )
    }

    /// Closes the lifeline and waits; kills what has not ended by `limit`.
    pub(super) async fn stop(mut self, limit: Duration) {
        drop(self.lifeline.take());
        if self.ended.is_some() {
            return;
        }
        if tokio::time::timeout(limit, self.process.wait())
            .await
            .is_err()
        {
            warn!(name = self.name, "does not end, killed");
            // Fails only when the process is gone.
            let _ = self.process.kill().await;
        }
    }

    fn last_lines(&self) -> String {
        let Some(path) = &self.log else {
            return "(see above)".to_owned();
        };
        tail(path).unwrap_or_else(|error| format!("({} cannot be read: {error})", path.display()))
    }
}

fn tail(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(length.saturating_sub(LAST_BYTES)))?;
    let mut bytes = Vec::new();
    file.take(LAST_BYTES).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<_> = text.lines().collect();
    Ok(lines[lines.len().saturating_sub(LAST_LINES)..].join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_of_a_log_is_its_last_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let lines: Vec<_> = (0..10_000).map(|number| format!("line {number}")).collect();
        std::fs::write(&path, lines.join("\n")).unwrap();
        let tail = tail(&path).unwrap();
        assert_eq!(tail.lines().count(), LAST_LINES);
        assert!(
            tail.starts_with("line 9980\n") && tail.ends_with("line 9999"),
            "{tail}"
        );
        std::fs::write(&path, "one").unwrap();
        assert_eq!(super::tail(&path).unwrap(), "one");
        std::fs::write(&path, "").unwrap();
        assert_eq!(super::tail(&path).unwrap(), "");
    }
}
