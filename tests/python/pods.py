"""As much of Kubernetes and of its JobSets as it takes to start one on this machine.

Each pod has a network of its own (a namespace with an address on a common switch) and its own /etc/hosts; a container is a
process, started with the arguments and the environment that its pod says, `$(VARIABLES)` expanded. What an image starts, and
what it has in its environment, its file in deploy/ says.
"""

import contextlib
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

from conftest import BINARY, ROOT

DEPLOY = ROOT / "deploy"
NETWORK = "10.77.0"

# Makes a name known to one process: nothing of the machine's own file is changed.
WITH_HOSTS = 'mount --make-rprivate / && mount --bind "$0" /etc/hosts && exec "$@"'


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"


class Image:
    """What starts in a container, by its Containerfile."""

    def __init__(self, name):
        text = (DEPLOY / f"{name}.Containerfile").read_text()
        last = text[text.rindex("\nFROM ") :]
        copied = {there: str(ROOT / here) for here, there in re.findall(r"^COPY ([^-\s]\S*) (\S+)$", last, re.MULTILINE)}
        entry = json.loads(re.search(r"^ENTRYPOINT (\[.*\])$", last, re.MULTILINE)[1])
        self.entry = [copied.get(word, word) for word in entry]
        self.environment = dict(line.split("=", 1) for line in re.findall(r"^ENV (\S+)$", last, re.MULTILINE))
        # The image's interpreter, which has the plugins, is this one here.
        if "WAYSTATION_PYTHON" in self.environment:
            self.environment["WAYSTATION_PYTHON"] = sys.executable


def jobs_of(jobset):
    """The pods of a JobSet, in the order of their start, as its controller and that of indexed jobs make them."""
    name, spec = jobset["metadata"]["name"], jobset["spec"]
    assert spec["startupPolicy"]["startupPolicyOrder"] == "InOrder"
    coordinator = f"{name}-{spec['coordinator']['replicatedJob']}-0-0.{name}"
    for replicated in spec["replicatedJobs"]:
        for job in range(replicated["replicas"]):
            template = replicated["template"]["spec"]
            assert template["completionMode"] == "Indexed"
            for index in range(template["completions"]):
                facts = {
                    "jobset.sigs.k8s.io/jobset-name": name,
                    "jobset.sigs.k8s.io/replicatedjob-name": replicated["name"],
                    "jobset.sigs.k8s.io/replicatedjob-replicas": str(replicated["replicas"]),
                    "jobset.sigs.k8s.io/job-index": str(job),
                    "jobset.sigs.k8s.io/coordinator": coordinator,
                    "batch.kubernetes.io/job-completion-index": str(index),
                }
                pod = template["template"]
                metadata = pod.get("metadata", {})
                yield {
                    "host": f"{name}-{replicated['name']}-{job}-{index}",
                    "domain": name,
                    "labels": {**metadata.get("labels", {}), **facts},
                    "annotations": {**metadata.get("annotations", {}), **facts},
                    "index": index,
                    "spec": pod["spec"],
                }


def expanded(text, variables):
    """As Kubernetes does it: an unknown $(NAME) stays, and so does $(NAME) of $$(NAME)."""

    def one(match):
        if match[0].startswith("$$"):
            return match[0][1:]
        return variables.get(match[1], match[0])

    return re.sub(r"\$?\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)", one, text)


def field(pod, path):
    kind, key = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path).groups()
    return pod[kind][key]


def environment_of(container, pod):
    variables = {"JOB_COMPLETION_INDEX": str(pod["index"])}
    for variable in container.get("env", []):
        if "valueFrom" in variable:
            value = field(pod, variable["valueFrom"]["fieldRef"]["fieldPath"])
        else:
            value = expanded(variable.get("value") or "", variables)
        variables[variable["name"]] = value
    return variables


class Cluster:
    """The machines: a switch, and what runs on it."""

    def __init__(self, folder, images, added):
        self.folder, self.images, self.added = pathlib.Path(folder), images, added
        self.name = f"ws{os.getpid()}"
        self.namespaces, self.addresses, self.running = [], {}, {}

    def network(self):
        """Makes the switch; its own address is the one of what is outside of all pods."""
        self._namespace("net")
        switch = f"{self.name}-net"
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "addr", "add", f"{NETWORK}.1/24", "dev", "switch")
        ip("-n", switch, "link", "set", "switch", "up")
        return f"{NETWORK}.1"

    def outside(self, command, name="outside", **options):
        """Starts a process outside of all pods."""
        self.running[name] = subprocess.Popen(self._within("net", None) + command, **options)
        return self.running[name]

    def pod(self, pod):
        """Gives a pod its network."""
        number = len(self.addresses) + 2
        host = pod["host"]
        name = self._namespace(str(number))
        switch = f"{self.name}-net"
        ip("-n", switch, "link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("-n", switch, "link", "set", f"port{number}", "master", "switch", "up")
        ip("-n", name, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        self.addresses[host] = (number, f"{NETWORK}.{number}", f"{host}.{pod['domain']}")

    def start(self, pod):
        """Starts a pod's containers: those that go on beside the others first."""
        spec = pod["spec"]
        for container in spec.get("initContainers", []):
            assert container["restartPolicy"] == "Always", "an init container that ends is not played here"
        for container in spec.get("initContainers", []) + spec["containers"]:
            self._container(container, pod)

    def log(self, name):
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def stop(self, seconds=30):
        """Ends all, politely and after the grace period otherwise; gives how each ended."""
        ended = {}
        for process in self.running.values():
            process.terminate()
        for name, process in self.running.items():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            if process.poll() is None:
                process.kill()
                process.wait(seconds)
            ended[name] = process.returncode
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "del", namespace], check=False)
        self.running, self.namespaces = {}, []
        return ended

    def _namespace(self, name):
        name = f"{self.name}-{name}"
        ip("netns", "add", name)
        self.namespaces.append(name)
        ip("-n", name, "link", "set", "lo", "up")
        return name

    def _within(self, name, hosts):
        command = ["nsenter", f"--net=/run/netns/{self.name}-{name}"]
        return command if hosts is None else [*command, "unshare", "--mount", "sh", "-c", WITH_HOSTS, hosts]

    def _container(self, container, pod):
        name = f"{pod['host']}.{container['name']}"
        home = self.folder / name
        home.mkdir()
        hosts = home / "hosts"
        lines = ["127.0.0.1 localhost"] + [f"{address} {full} {host}" for host, (_, address, full) in self.addresses.items()]
        hosts.write_text("\n".join(lines) + "\n")
        variables = environment_of(container, pod)
        image = self.images.get(container["image"])
        command = container.get("command") or image.entry
        command = [expanded(word, variables) for word in [*command, *container.get("args", [])]]
        path = f"{BINARY.parent}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {
            "PATH": path, "HOME": str(home), "TMPDIR": str(home), **(image.environment if image else {}), **variables,
            **self.added,
        }  # fmt: skip
        number = self.addresses[pod["host"]][0]
        with open(self.folder / f"{name}.log", "wb") as log:
            log.write(f"$ {shlex.join(command)}\n".encode())
            log.flush()
            self.running[name] = subprocess.Popen(
                self._within(number, str(hosts)) + command, env=environment, cwd=home, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log,
            )  # fmt: skip
