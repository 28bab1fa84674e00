//! The binary as processes, as far as no plugin is needed: ends, exit statuses, messages. The Python end-to-end tests
//! bring up whole clusters.

#![allow(
    clippy::unwrap_used,
    reason = "clippy does not see that the helpers belong to tests"
)]

use std::{
    fs,
    io::Read as _,
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};

const PATIENCE: Duration = Duration::from_secs(60);

fn waystation(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_waystation"));
    command.args(arguments);
    command
}

fn output(arguments: &[&str]) -> Output {
    waystation(arguments).output().unwrap()
}

/// Polls until there is something.
fn until<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let since = Instant::now();
    loop {
        if let Some(found) = probe() {
            return found;
        }
        assert!(since.elapsed() < PATIENCE, "{what} did not come");
        thread::sleep(Duration::from_millis(10));
    }
}

/// A resource manager that is killed when a test fails.
struct Manager {
    process: Child,
    ready_file: PathBuf,
}

impl Manager {
    fn start(folder: &Path, more: &[&str]) -> Manager {
        let ready_file = folder.join("ready");
        let mut command = waystation(&[
            "resource-manager",
            "--server_port=0",
            "--bind_address=127.0.0.1",
        ]);
        command
            .arg(format!("--ready_file={}", ready_file.display()))
            .args(more);
        let process = command
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Manager {
            process,
            ready_file,
        }
    }

    fn address(&self) -> String {
        let text = until("the ready file", || {
            fs::read_to_string(&self.ready_file).ok()
        });
        text.lines().next().unwrap().to_owned()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    fn status(&mut self) -> Option<i32> {
        until("the end of the process", || {
            self.process.try_wait().unwrap()
        })
        .code()
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn a_role_says_where_it_listens_and_ends_on_sigterm() {
    let folder = tempfile::tempdir().unwrap();
    let mut manager = Manager::start(folder.path(), &[]);
    TcpStream::connect(manager.address()).unwrap();
    manager.signal(Signal::TERM);
    assert_eq!(manager.status(), Some(0));
    let mut log = String::new();
    manager
        .process
        .stderr
        .take()
        .unwrap()
        .read_to_string(&mut log)
        .unwrap();
    assert!(log.contains("resource manager ready"), "{log}");
}

#[test]
fn a_role_ends_with_its_parents_end_of_the_pipe_and_only_when_asked_to() {
    let folder = tempfile::tempdir().unwrap();
    let mut tied = Manager::start(folder.path(), &["--parent-stdin"]);
    tied.address();
    drop(tied.process.stdin.take());
    assert_eq!(tied.status(), Some(0));

    let folder = tempfile::tempdir().unwrap();
    let mut free = Manager::start(folder.path(), &[]);
    free.address();
    drop(free.process.stdin.take());
    thread::sleep(Duration::from_millis(300));
    assert!(free.process.try_wait().unwrap().is_none());
    free.signal(Signal::INT);
    assert_eq!(free.status(), Some(0));
}

#[test]
fn a_port_in_use_is_one_line_and_64() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let ended = output(&[
        "resource-manager",
        "--bind_address=127.0.0.1",
        "--server_port",
        &port,
    ]);
    assert_eq!(ended.status.code(), Some(64));
    let text = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(
        text.starts_with("waystation: port ") && text.contains(&port),
        "{text}"
    );
}

#[test]
fn a_variable_stands_in_for_a_flag_and_the_flag_wins() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let mut command = waystation(&["resource-manager", "--bind_address=127.0.0.1"]);
    assert_eq!(
        command
            .env("WAYSTATION_SERVER_PORT", &port)
            .output()
            .unwrap()
            .status
            .code(),
        Some(64)
    );
    let mut command = waystation(&["resource-manager", "--bind_address=127.0.0.1", "--slices=0"]);
    let ended = command.env("WAYSTATION_SLICES", "1").output().unwrap();
    let text = String::from_utf8(ended.stderr).unwrap();
    assert!(text.contains("'0'"), "{text}");
}

/// What a worker is started with is seen by a Python interpreter that says it instead of finding the plugin.
#[test]
fn a_file_of_flags_is_read_once() {
    let folder = tempfile::tempdir().unwrap();
    let flags = folder.path().join("flags");
    let python = folder.path().join("python");
    let seen = folder.path().join("seen");
    fs::write(&flags, "--xla_one=1\n").unwrap();
    let script = format!(
        "#!/bin/sh\necho \"$XLA_FLAGS|$TF_XLA_FLAGS\" >{}\n",
        seen.display()
    );
    fs::write(&python, script).unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&python, executable).unwrap();
    for command in ["worker", "cache"] {
        let python = format!("--python={}", python.display());
        let arguments: &[&str] = match command {
            "worker" => &["worker", "--resource_manager_address=127.0.0.1:1", &python],
            _ => &["cache", "warm", "file:///nowhere", &python],
        };
        let _ = fs::remove_file(&seen);
        let ended = waystation(arguments)
            .env("XLA_FLAGS", &flags)
            .env("TF_XLA_FLAGS", folder.path().join("absent"))
            .output()
            .unwrap();
        let seen = fs::read_to_string(&seen).unwrap_or_default();
        assert_eq!(seen, "--xla_one=1|\n", "{command} {ended:?}");
    }
}

#[test]
fn pathways_flags_are_taken_with_a_warning() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = format!("--server_port={}", taken.local_addr().unwrap().port());
    // It ends at the taken port, after the flags were understood.
    let line = [
        "server",
        "--node_type=resource_manager",
        "--instance_count=2",
        "--instance_type=tpuv6e:2x2",
        "--bind_address=127.0.0.1",
    ];
    let ended = waystation(&line)
        .args(["--enforce_kernel_ipv6_support=false", &port])
        .output()
        .unwrap();
    let text = String::from_utf8(ended.stderr).unwrap();
    let without_effect = |flag: &str| text.contains(&format!("--{flag} has no effect"));
    assert!(without_effect("enforce_kernel_ipv6_support"), "{text}");
    assert!(!without_effect("instance_type"), "{text}");
    assert!(text.lines().last().unwrap().contains("is in use"), "{text}");
}

#[test]
fn run_shows_what_a_part_says_that_dies_at_its_start_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let plugin = folder.path().join("plugin.so");
    // What is seen of it before the start is in order.
    let mut library = fs::read(env!("CARGO_BIN_EXE_waystation")).unwrap();
    library.truncate(20);
    library[16] = 3;
    library.extend(b"GetPjrtApi");
    fs::write(&plugin, library).unwrap();
    let ran = folder.path().join("ran");
    let logs = folder.path().join("logs");
    let mut command = waystation(&["run", "--workers=2"]);
    command
        .arg(format!("--log_dir={}", logs.display()))
        .arg(format!("--pjrt_plugin={}", plugin.display()));
    let ended = command.arg("--").arg("touch").arg(&ran).output().unwrap();
    assert!(!ended.status.success());
    let text = String::from_utf8(ended.stderr).unwrap();
    assert!(text.contains(&plugin.display().to_string()), "{text}");
    assert!(!ran.exists(), "the command ran all the same");
    assert!(logs.join("worker-0-1.log").is_file());
    assert_eq!(left_over(folder.path()), Vec::<String>::new());
}

#[test]
fn a_command_is_tied_to_its_parent() {
    let folder = tempfile::tempdir().unwrap();
    let pid_file = folder.path().join("pid");
    // A shell that starts a tied command and is then killed.
    let script =
        "\"$0\" tied --parent=$$ -- sh -c 'echo $$ > \"$0\"; exec sleep 600' \"$1\" & wait";
    let mut shell = Command::new("sh");
    shell
        .args(["-c", script, env!("CARGO_BIN_EXE_waystation")])
        .arg(&pid_file);
    let mut shell = shell.spawn().unwrap();
    let pid = until("the command's pid", || {
        fs::read_to_string(&pid_file).ok()?.trim().parse().ok()
    });
    let pid = Pid::from_raw(pid).unwrap();
    test_kill_process(pid).unwrap();
    shell.kill().unwrap();
    shell.wait().unwrap();
    until("the end of the command", || is_gone(pid).then_some(()));
}

#[test]
fn a_command_that_cannot_be_tied_any_more_does_not_run() {
    let ended = output(&["tied", "--parent=1", "--", "true"]);
    let parent_is_init = std::process::id() == 1;
    assert!(
        parent_is_init || ended.status.code() == Some(1),
        "{ended:?}"
    );
}

/// Gone, or waiting for a parent that does not look.
fn is_gone(pid: Pid) -> bool {
    let status =
        fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).unwrap_or_default();
    status.is_empty()
        || status
            .rsplit(')')
            .next()
            .is_some_and(|rest| rest.trim_start().starts_with('Z'))
}

/// Command lines of running processes that name the folder.
fn left_over(folder: &Path) -> Vec<String> {
    let folder = folder.display().to_string();
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let line = fs::read_to_string(entry.path().join("cmdline"))
            .unwrap_or_default()
            .replace('\0', " ");
        if line.contains(&folder) {
            found.push(line);
        }
    }
    found
}
