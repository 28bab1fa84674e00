"""Slices that are lost, hang, are cut off and come back: what clients see of it, and pathwaysutils' elastic training."""

import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import psutil
import pytest
from conftest import CLIENT_ENVIRONMENT, ROOT, client_status, wait_for
from parts import parts

LEASE = 4
# A build that can have a worker end inside a collective, as `cargo test` leaves one behind; None where there is none.
FAULTY = pathlib.Path(os.environ.get("WAYSTATION_FAULTY_BINARY", ROOT / "target/debug/waystation"))
FAULTY = FAULTY if FAULTY.is_file() and b"WAYSTATION_FAULT" in FAULTY.read_bytes() else None
# Reads a line, does what it says, and tells how it went; the client's end is the end of stdin.
CLIENT = """
import sys, time, jax, jax.numpy as jnp, pathwaysutils
pathwaysutils.initialize()
from pathwaysutils.elastic import elastic
by_slice = elastic.get_slice_to_devices(jax.devices())
double = jax.jit(lambda x: x * 2 + 1)
def put(slice):
    return jax.device_put(jnp.arange(4.0), by_slice[slice][0])
def alive():
    return sorted(elastic.get_active_slice_indices(by_slice))
def wait(count):
    return sorted(elastic.wait_for_slices(count, 0.2, 60, by_slice))
def slow(x):
    # About a second.
    return jax.lax.fori_loop(0, 40, lambda _, m: m @ m / jnp.linalg.norm(m), jnp.ones((900, 900)) + x.sum())[0, :4] * 0 + x
slow = jax.jit(slow)
def over_both():
    # Thousands of sums over both slices in one program.
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    mesh = Mesh([by_slice[slice][0] for slice in sorted(by_slice)], "x")
    step = jax.shard_map(lambda x: jax.lax.psum(x, "x") / 2, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    many = jax.jit(lambda x: jax.lax.fori_loop(0, 20000, lambda _, x: step(x), x))
    return many(jax.device_put(jnp.ones(4), NamedSharding(mesh, P("x"))))
names = globals()
for line in sys.stdin:
    try:
        answer = str(eval(line, names))
        print("@@", answer, flush=True)
    except jax.errors.JaxRuntimeError as error:
        print("@@", str(error).splitlines()[0], flush=True)
"""


class Client:
    def __init__(self, made, proxy):
        environment = {
            **made.environment, **CLIENT_ENVIRONMENT, "JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": f"grpc://{proxy}",
            "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true",
        }  # fmt: skip
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT], env=environment, text=True, cwd=made.folder,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
        )  # fmt: skip

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def ask(self, line):
        self.tell(line)
        return self.answer()

    def answer(self):
        for answer in self.process.stdout:
            if answer.startswith("@@ "):
                return answer[3:].strip()
        raise AssertionError(f"the client has ended with {self.process.wait()}")

    def end(self):
        self.process.stdin.close()
        status = self.process.wait(60)
        self.errors.seek(0)
        errors = self.errors.read()
        assert client_status(status, errors) == 0, errors[-3000:]


class Slices:
    """A resource manager, and slices of one worker each."""

    def __init__(self, made, slices, *manager_flags):
        self.made = made
        made.start("manager", "resource-manager", f"--slices={slices}", f"--lease_seconds={LEASE}", *manager_flags)
        self.manager = made.addresses("manager")[0]

    def worker(self, slice, *flags, **how):
        manager = f"--resource_manager_address={self.manager}"
        return self.made.start(
            f"worker-{slice}", "worker", manager, f"--slice={slice}", "--devices_per_worker=2", *flags, **how
        )

    def mortal(self, slice):
        """A worker that can be killed inside a collective, see [`kill`]."""
        order = self._order(slice)
        order.unlink(missing_ok=True)
        how = {"binary": FAULTY, "environment": {"WAYSTATION_FAULT": f"collective:{order}"}} if FAULTY else {}
        return self.worker(slice, **how)

    def kill(self, slice, number):
        """Kills a mortal worker: in every third round inside the next collective that it comes to, else at once. Tells how."""
        worker, inside = self.made.running[f"worker-{slice}"], FAULTY and number % 3 == 1
        if inside:
            self._order(slice).touch()
        else:
            worker.kill()
        assert worker.wait(60) == -signal.SIGKILL
        return "inside a collective" if inside else "at a random moment"

    def _order(self, slice):
        return self.made.folder / f"end-{slice}"

    def proxy(self, *flags, name="proxy"):
        self.made.start(name, "proxy", f"--resource_manager_address={self.manager}", *flags)
        return self.made.addresses(name)[0]


LOST = r"DATA_LOSS: worker slice {} task 0 at 127\.0\.0\.1:\d+ is gone \((.*)\); the arrays it held are lost"
RESULT = "[1. 3. 5. 7.]"


def lost(slice, answer):
    """Why a slice is lost, as an error says."""
    found = re.match(LOST.format(slice), answer)
    assert found, answer
    return found[1]


def test_a_slice_is_lost_in_every_way_and_comes_back_for_an_open_client(tmp_path):
    with parts(tmp_path) as made:
        cluster = Slices(made, 2)
        workers = [cluster.worker(0), cluster.worker(1)]
        client = Client(made, cluster.proxy())
        assert client.ask("(x := put(0), y := put(1)) and alive()") == "[0, 1]"
        assert (client.ask("double(x)"), client.ask("double(y)")) == (RESULT, RESULT)

        def back():
            assert client.ask("wait(2)") == "[0, 1]"
            assert client.ask("double(y)").startswith("DATA_LOSS"), "what lay there is lost for good"
            assert client.ask("(y := put(1)) is None or double(y)") == RESULT, "the program is there again"
            assert client.ask("double(x)") == RESULT

        workers[1].kill()
        workers[1].wait(20)
        assert client.ask("alive()") == "[0]"
        lost(1, client.ask("double(y)"))
        assert client.ask("double(x)") == RESULT
        cluster.worker(1)
        back()

        # It hangs: its connections stay.
        hung = made.running["worker-1"]
        since = time.monotonic()
        hung.send_signal(signal.SIGSTOP)
        try:
            lost(1, client.ask("double(y)"))
            assert time.monotonic() - since < LEASE + 5
            assert (client.ask("alive()"), client.ask("double(x)")) == ("[0]", RESULT)
        finally:
            hung.send_signal(signal.SIGCONT)
        back()

        # It is told to end, and says so before it has.
        made.running["worker-1"].terminate()
        wait_for(lambda: "told to end" in made.log("manager"), 20, "the resource manager knows")
        assert "told to end" in lost(1, client.ask("double(y)"))
        assert client.ask("alive()") == "[0]"
        assert made.running["worker-1"].wait(20) == 0
        cluster.worker(1)
        back()

        # The resource manager goes: nobody needs it. Another one on its port learns what there is.
        made.running["manager"].kill()
        made.running["manager"].wait(20)
        assert client.ask("double(x) + double(jax.device_put(y, by_slice[0][0]))") == "[ 2.  6. 10. 14.]"
        made.start("manager", "resource-manager", "--slices=2", f"--lease_seconds={LEASE}", port=cluster.manager.split(":")[1])
        made.addresses("manager")
        wait_for(lambda: "2 of 2 slices" in made.log("manager"), 30, "workers have registered again")
        assert client.ask("double(x)") == RESULT
        workers[0].kill()
        workers[0].wait(20)
        cluster.worker(0)
        assert client.ask("wait(2)") == "[0, 1]"
        assert client.ask("double(y)") == RESULT
        client.end()


def test_a_slice_of_two_workers_lives_and_dies_as_one(tmp_path):
    with parts(tmp_path) as made:
        cluster = Slices(made, 2)

        def start(slice):
            for task in (0, 1):
                flags = (f"--slice={slice}", f"--task={task}", "--slice_tasks=2", "--devices_per_worker=1")
                manager = f"--resource_manager_address={cluster.manager}"
                made.start(f"worker-{slice}-{task}", "worker", manager, *flags)

        def kill(slice, task):
            worker = made.running[f"worker-{slice}-{task}"]
            worker.kill()
            worker.wait(20)

        start(0), start(1)
        client = Client(made, cluster.proxy())
        assert client.ask("alive()") == "[0, 1]"
        kill(1, 0)
        assert client.ask("alive()") == "[0]"
        kill(1, 1)
        assert client.ask("alive()") == "[0]"
        assert client.ask("double(put(0))") == RESULT
        # Nobody is left who could compile: what waits for slices finds none, and goes on waiting.
        kill(0, 0), kill(0, 1)
        assert client.ask("alive()") == "[]"
        start(1)
        assert client.ask("wait(1)") == "[1]"
        start(0)
        assert client.ask("wait(2)") == "[0, 1]"
        assert client.ask("over_both()") == "[1. 1. 1. 1.]"
        client.end()


def test_a_worker_that_is_told_to_end_finishes_what_it_was_asked(tmp_path):
    with parts(tmp_path) as made:
        cluster = Slices(made, 2)
        cluster.worker(0)
        worker = cluster.worker(1)
        client = Client(made, cluster.proxy())
        assert client.ask("slow(put(1))") == "[0. 1. 2. 3.]"
        since = time.monotonic()
        assert client.ask("slow(put(1))") == "[0. 1. 2. 3.]"
        took = time.monotonic() - since
        client.tell("jax.block_until_ready(slow(put(1))).shape")
        time.sleep(took / 2)
        worker.terminate()
        assert client.answer() == "(4,)", f"what is waited for; it takes {took:.2f} s"
        assert worker.wait(20) == 0
        lost(1, client.ask("put(1)"))
        client.end()


def killed_inside_collectives(tmp_path, rounds):
    """A program that does nothing but add up over both slices, for seconds; one is killed meanwhile."""
    with parts(tmp_path) as made:
        cluster = Slices(made, 2)
        cluster.mortal(0), cluster.mortal(1)
        client = Client(made, cluster.proxy())
        assert client.ask("(x := put(0)) is None or over_both()") == "[1. 1. 1. 1.]"
        for number in range(rounds):
            client.tell("over_both()")
            time.sleep(0.2 + number % 7 / 10)
            since = time.monotonic()
            slice = number % 2
            how = cluster.kill(slice, number)
            answer = client.answer()
            assert re.match(rf"DATA_LOSS: worker slice {slice} task 0 at [\d.:]+ is gone", answer), answer
            noticed = time.monotonic() - since
            assert client.ask("alive()") == f"[{1 - slice}]", "the other one is not stuck"
            cluster.mortal(slice)
            assert client.ask("wait(2)") == "[0, 1]"
            assert client.ask("over_both()") == "[1. 1. 1. 1.]"
            print(f"round {number}: slice {slice} killed {how}; told after {noticed:.2f} s")
        client.end()


def test_a_worker_killed_inside_a_collective_fails_it_and_the_other_goes_on(tmp_path):
    killed_inside_collectives(tmp_path, 2)


@pytest.mark.slow
def test_twenty_workers_killed_inside_collectives(tmp_path):
    killed_inside_collectives(tmp_path, 20)


def test_the_only_slice_is_waited_for(tmp_path):
    with parts(tmp_path) as made:
        cluster = Slices(made, 1)
        worker = cluster.worker(0)
        client = Client(made, cluster.proxy())
        assert client.ask("double(put(0))") == RESULT
        worker.kill()
        worker.wait(20)
        client.tell("wait(1)")
        time.sleep(0.5)
        cluster.worker(0)
        assert client.answer() == "[0]"
        assert client.ask("double(put(0))") == RESULT
        client.end()


def test_a_slice_may_be_missing_from_the_start(tmp_path):
    with parts(tmp_path) as made:
        cluster = Slices(made, 2)
        cluster.worker(1)
        client = Client(made, cluster.proxy("--num_elastic_slices=1"))
        assert client.ask("{int(s): [d.id for d in of] for s, of in by_slice.items()}") == "{0: [0, 1], 1: [2, 3]}"
        assert client.ask("alive()") == "[1]"
        assert client.ask("put(0)").startswith("DATA_LOSS: worker slice 0 task 0 is gone (it has not come yet)")
        cluster.worker(0)
        assert client.ask("wait(2)") == "[0, 1]"
        assert client.ask("double(put(0)) + double(put(0))") == "[ 2.  6. 10. 14.]"
        client.end()


def test_proxies_share_a_resource_manager_and_no_devices(tmp_path):
    with parts(tmp_path) as made:
        cluster = Slices(made, 2, "--instance_type=cpu:2")
        cluster.worker(0)
        cluster.worker(1)
        wait_for(lambda: "2 of 2 slices" in made.log("manager"), 30, "both have registered")
        devices = "[(d.id, d.slice_index) for d in jax.devices()]"
        first = Client(made, cluster.proxy("--virtual_slices=cpu:2", name="first"))
        assert first.ask(devices) == "[(0, 0), (1, 0)]"
        second = Client(made, cluster.proxy("--virtual_slices=cpu:2", name="second"))
        assert second.ask(devices) == "[(2, 0), (3, 0)]"
        assert (first.ask("double(put(0))"), second.ask("double(put(0))")) == (RESULT, RESULT)
        third = cluster.proxy("--virtual_slices=cpu:2", name="third")
        wait_for(lambda: "waiting for 1 slice of cpu:2" in made.log("third"), 20, "the third waits")
        late = Client(made, third)
        # What the second had is freed when it goes, and only that.
        second.end()
        made.running["second"].terminate()
        assert made.running["second"].wait(20) == 0
        assert late.ask(devices) == "[(2, 0), (3, 0)]"
        assert (late.ask("double(put(0))"), first.ask("double(put(0))")) == (RESULT, RESULT)
        late.end()
        first.end()


def test_a_resource_manager_that_hangs_takes_nothing_away_and_a_proxy_that_dies_gives_its_slices(tmp_path):
    with parts(tmp_path) as made:
        cluster = Slices(made, 1)
        cluster.worker(0)
        first = Client(made, cluster.proxy(name="first"))
        assert first.ask("(x := put(0)) is None or double(x)") == RESULT
        second = cluster.proxy(name="second")
        wait_for(lambda: "waiting for the only slice" in made.log("second"), 20, "the second waits")
        made.running["manager"].send_signal(signal.SIGSTOP)
        try:
            # Both proxies and the worker give it up, and dial again.
            for name in ("first", "second", "worker-0"):
                wait_for(lambda: "again" in made.log(name), 60, f"{name} notices:\n{made.log(name)}")
            assert first.ask("double(x)") == RESULT
        finally:
            made.running["manager"].send_signal(signal.SIGCONT)
        wait_for(lambda: "worker joined" in made.log("manager").split("worker not heard of")[-1], 60, "the worker is back")
        assert first.ask("double(x)") == RESULT
        late = Client(made, second)
        made.running.pop("first").kill()
        assert late.ask("double(put(0))") == RESULT
        late.end()
        first.process.kill()
        first.process.wait()


def test_workers_that_do_not_fit_are_refused_by_name(tmp_path):
    with parts(tmp_path) as made:
        cluster = Slices(made, 2, "--instance_type=cpu:2")
        cluster.worker(0)
        wait_for(lambda: "1 of 2 slices" in made.log("manager"), 30, "the first has registered")
        made.start(
            "large", "worker", f"--resource_manager_address={cluster.manager}", "--slice=1", "--devices_per_worker=4"
        )
        wait_for(lambda: "wrong topology" in made.log("large"), 30, "it is told")
        assert "expects slices of cpu:2" in made.log("large") and "with 4 device(s)" in made.log("large")
        # Another build of the same plugin: bytes behind the end of the file change nothing but its digest.
        [library] = {line.split()[-1] for line in open(f"/proc/{cluster.made.running['worker-0'].pid}/maps") if "pjrt" in line}
        other = tmp_path / "other.so"
        shutil.copy(library, other)
        with open(other, "ab") as file:
            file.write(b"another build")
        cluster.worker(1, f"--pjrt_plugin={other}")
        wait_for(lambda: "wrong plugin build" in made.log("worker-1"), 60, "it is told")


class Network:
    """A network of its own for a worker, on a cable that can be pulled out."""

    def __init__(self, name, number):
        # Of its own, since both Pythons' tests run side by side.
        subnet = f"10.{200 + number // 256 % 50}.{number % 256}"
        self.name, self.host, self.peer = name, f"{subnet}.1", f"{subnet}.2"
        self.cable = f"{name}h"
        ip("netns", "add", name)
        ip("link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("addr", "add", f"{self.host}/30", "dev", self.cable)
        ip("link", "set", self.cable, "up")
        ip("-n", name, "addr", "add", f"{self.peer}/30", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")

    def cut(self):
        ip("-n", self.name, "link", "set", "eth0", "down")

    def heal(self):
        ip("-n", self.name, "link", "set", "eth0", "up")

    def remove(self):
        ip("netns", "del", self.name)


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


def may_make_networks():
    if os.geteuid() != 0 or not shutil.which("ip"):
        return False
    made = subprocess.run(["ip", "netns", "add", "waystation-try"], capture_output=True)
    if made.returncode == 0:
        ip("netns", "del", "waystation-try")
    return made.returncode == 0


@pytest.mark.skipif(not may_make_networks(), reason="needs root and network namespaces")
def test_a_cut_link_is_noticed_and_healed(tmp_path):
    network = Network(f"ws{os.getpid() % 100000}", os.getpid())
    try:
        with parts(tmp_path) as made:
            manager_flags = ("--slices=2", f"--lease_seconds={LEASE}")
            made.start("manager", "resource-manager", *manager_flags, bind="0.0.0.0")
            port = made.addresses("manager")[0].split(":")[1]
            made.start(
                "worker-0", "worker", f"--resource_manager_address=127.0.0.1:{port}", "--slice=0", "--devices_per_worker=2",
                bind=network.host,
            )  # fmt: skip
            made.start(
                "worker-1", "worker", f"--resource_manager_address={network.host}:{port}", "--slice=1", "--devices_per_worker=2",
                bind=network.peer, within=["ip", "netns", "exec", network.name],
            )  # fmt: skip
            made.start("proxy", "proxy", f"--resource_manager_address=127.0.0.1:{port}")
            client = Client(made, made.addresses("proxy")[0])
            assert client.ask("(x := put(0), y := put(1)) and alive()") == "[0, 1]"
            since = time.monotonic()
            network.cut()
            answer = client.ask("double(y)")
            assert answer.startswith("DATA_LOSS: worker slice 1 task 0 at"), answer
            assert time.monotonic() - since < LEASE + 5
            assert (client.ask("alive()"), client.ask("str(double(x))")) == ("[0]", RESULT)
            network.heal()
            assert client.ask("wait(2)") == "[0, 1]"
            assert client.ask("double(put(1))") == RESULT
            client.end()
    finally:
        network.remove()


def train(made, proxy, folder, steps):
    environment = {
        **made.environment, **CLIENT_ENVIRONMENT, "JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": f"grpc://{proxy}",
        "IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS": "true", "ENABLE_PATHWAYS_PERSISTENCE": "1",
    }  # fmt: skip
    with open(folder / "train.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, ROOT / "examples/elastic.py", f"--steps={steps}", f"--checkpoints={folder / 'saved'}", "--poll=0.5",
             "--pause=0.05"],
            env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip


def lose_and_take_back(tmp_path, rounds):
    """Each round: kill one of two workers at a random moment, see training go on with the other, bring it back, and see
    training go on with both."""
    draw = random.Random(rounds)
    with parts(tmp_path) as made:
        cluster = Slices(made, 2)
        cluster.mortal(0), cluster.mortal(1)
        training = train(made, cluster.proxy(), tmp_path, steps=100_000)
        lines, gone_on = [], []
        told = threading.Condition()

        def read():
            for line in training.stdout:
                with told:
                    lines.append(line)
                    if "going on after" in line:
                        gone_on.append(line.strip())
                    told.notify_all()

        reader = threading.Thread(target=read, daemon=True)
        reader.start()

        def steps_with(slices):
            """Waits for steps on so many slices, told from now on."""
            with told:
                seen = len(lines)
                new = lambda: any(line.endswith(f"slices {slices}\n") for line in lines[seen:])  # noqa: E731
                happened = told.wait_for(lambda: new() or training.poll() is not None, 120)
            text = "".join(lines[-15:]) + (tmp_path / "train.log").read_text()[-3000:]
            assert happened and training.poll() is None, text

        try:
            steps_with(2)
            before = len(psutil.Process().children(recursive=True))
            for number in range(rounds):
                slice = draw.randrange(2)
                time.sleep(draw.uniform(0, 0.5))
                since = time.monotonic()
                how = cluster.kill(slice, number)
                steps_with(1)
                down = time.monotonic() - since
                since = time.monotonic()
                cluster.mortal(slice)
                steps_with(2)
                print(f"round {number}: slice {slice} killed {how}; {down:.2f} s to go on without, {time.monotonic() - since:.2f} s with it")
            wait_for(lambda: len(psutil.Process().children(recursive=True)) <= before, 20, "no process is left behind")
        finally:
            training.kill()
            training.wait(20)
        assert len(gone_on) >= 2 * rounds, gone_on


def test_elastic_training_loses_a_slice_and_takes_it_back(tmp_path):
    lose_and_take_back(tmp_path, 1)


@pytest.mark.slow
def test_elastic_training_loses_slices_twenty_times(tmp_path):
    lose_and_take_back(tmp_path, 20)
