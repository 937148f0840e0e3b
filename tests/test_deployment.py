"""Flower's real processes on loopback: same bits with and without TLS and keys, strangers refused, kill -9 survived."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from federations import command, log, script
from metabayfl.methods import METHODS

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from metabayfl.engine.flower.carrier import Waits
from metabayfl.engine.flower.deployment import MARK, Deployment, free_ports
from metabayfl.engine.flower.keys import make_node_key
from metabayfl.engine.flower.operate import bring_up, online_nodes, submit
from metabayfl.engine.flower.processes import Process, end, marked, send, start, started_at

MINUTES = 60.0
OVER_LOOPBACK = [name for name in ("fedavg", "meta-bayfl", "ditto", "fedbe", "fedmask") if name in METHODS]
MODES = {"plain": OVER_LOOPBACK[0::3], "tls": OVER_LOOPBACK[1::3], "keys": OVER_LOOPBACK[2::3] or ["fedavg"]}
CONFIG = """
rounds = {rounds}
[method]
name = "{method}"
epochs = 1
[data]
clients = 3
fraction = 0.2
unlabelled = 20
[model]
hidden = [8]
[eval]
every = 3
samples = 2
"""
"""Of the second method in a mode two rounds are enough: the third has nothing new."""


def wait_for(what: Callable[[], object], seconds: float = 5 * MINUTES) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)


class TestProcesses:
    def test_a_process_is_known_by_its_start_time_too(self, tmp_path: Path) -> None:
        ours = start(["sleep", "60"], {"PATH": os.environ["PATH"]}, tmp_path / "log")
        recycled = Process(ours.pid, ours.start - 1)
        send(recycled, signal.SIGKILL)
        end([recycled])
        assert ours.alive
        assert not recycled.alive
        end([ours])
        assert not ours.alive

    def test_one_that_does_not_listen_is_ended_by_force(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("metabayfl.engine.flower.processes.PATIENCE_SECONDS", 0.3)
        deaf = start(
            ["sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"],
            {"PATH": os.environ["PATH"]},
            tmp_path / "log",
        )
        wait_for(lambda: "ready" in (tmp_path / "log").read_text())
        end([deaf])
        assert not deaf.alive

    def test_children_are_found_by_their_mark(self, tmp_path: Path) -> None:
        parent = start(
            ["sh", "-c", "sleep 60 & sleep 61 & wait"], {"MARK": "abc", "PATH": os.environ["PATH"]}, tmp_path / "log"
        )
        wait_for(lambda: len(marked("MARK=abc")) == 3)
        end(marked("MARK=abc"))
        assert not marked("MARK=abc")
        assert not parent.alive
        assert started_at(parent.pid) is None


class TestCommands:
    def test_without_a_deployment_it_says_so(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for action in (["status"], ["logs"], ["down"]):
            assert command(["flower", *action, "--dir", str(tmp_path)]) == 2
            assert "holds no deployment: `metabayfl flower up` makes one" in capsys.readouterr().err

    def test_without_flower_it_names_the_extra(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in [name for name in sys.modules if name.startswith(("flwr", "metabayfl.engine.flower"))]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.delitem(sys.modules, "metabayfl.commands.flower", raising=False)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert command(["flower", "up", "--dir", str(tmp_path)]) == 2
        assert capsys.readouterr().err == "metabayfl: this needs Flower: pip install 'metabayfl[flower]'\n"

    def test_an_address_needs_a_port(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert command(["flower", "attach", "server.example", "--dir", str(tmp_path)]) == 2
        assert "'server.example' is not an address: HOST:PORT is accepted" in capsys.readouterr().err

    def test_what_others_run_is_not_started(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        place = ["--dir", str(tmp_path / "far")]
        assert command(["flower", "attach", "server.example:8000", *place]) == 0
        assert command(["flower", "up", *place]) == 2
        assert "is attached to server.example:8000, whose processes others run" in capsys.readouterr().err
        assert command(["flower", "down", *place]) == 0

    def test_ports_are_free_and_different(self) -> None:
        assert len(set(free_ports(5))) == 5


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_same_bits_over_loopback(mode: str, tmp_path: Path) -> None:
    place = ["--dir", str(tmp_path / "deployment")]
    secure = {"plain": [], "tls": ["--tls"], "keys": ["--keys"]}[mode]
    assert command(["flower", "up", "--nodes", "3", *secure, *place]) == 0
    deployment = Deployment.open(tmp_path / "deployment")
    try:
        assert command(["flower", "status", *place]) == 0
        assert command(["flower", "logs", "node1", *place]) == 0
        for rounds, method in zip((3, 2), MODES[mode], strict=False):
            text = tmp_path / f"{method}.toml"
            text.write_text(CONFIG.format(method=method, rounds=rounds))
            assert command(["flower", "run", str(text), "--out", str(tmp_path / method), *place]) == 0
            assert command(["run", str(text), "--workers", "1", "--out", str(tmp_path / f"{method}-local")]) == 0
            models = [tmp_path / name / "model.safetensors" for name in (method, f"{method}-local")]
            assert models[0].read_bytes() == models[1].read_bytes()
        if deployment.tls:
            assert is_refused(deployment, "--insecure")
        if deployment.keys:
            make_node_key(tmp_path / "stranger")
            trust = ["--root-certificates", f"{deployment.path}/keys/ca.pem"]
            assert is_refused(deployment, *trust, "--auth-supernode-private-key", str(tmp_path / "stranger"))
            assert is_refused(deployment, *trust)
    finally:
        assert command(["flower", "down", *place]) == 0
    assert not marked(f"{MARK}={deployment.token}")


def is_refused(deployment: Deployment, *trust: str) -> bool:
    """Whether a node that somebody else starts gives up, and nobody has joined."""
    before = online_nodes(deployment)
    (port,) = free_ports(1)
    place = ["--superlink", deployment.address, "--port", str(port), "--max-retries", "1", "--max-wait-time", "10"]
    words = [deployment.command("node0")[0], *trust, *place, "--node-config", 'client-id=0 state="/nowhere"']
    intruder = start(words, deployment.environment, deployment.path / "logs" / f"stranger{port}.log")
    wait_for(lambda: not intruder.alive)
    return sorted(online_nodes(deployment)) == sorted(before)


@pytest.mark.slow
def test_a_killed_node_is_missed_in_one_round_and_comes_back_with_its_state(tmp_path: Path) -> None:
    """Round 2 completes with the others. Then the server app is killed too; resumed, round 3 has everybody again."""
    kills = script("benchmarks", "kills")
    plan, out = kills.config(rounds=3), tmp_path / "run"
    deployment = Deployment.create(tmp_path / "deployment", 3, tls=False, keys=False)
    try:
        bring_up(deployment)
        submit(deployment, plan, out, own=None, resume=False, waits=Waits(rejoin_seconds=1))
        wait_for(lambda: kills.rounds_done(out) >= 1)
        send(deployment.processes["node1"], signal.SIGKILL)
        wait_for(lambda: kills.rounds_done(out) >= 2)
        send(kills.find(deployment, "flwr-serverapp"), signal.SIGKILL)
        bring_up(deployment)
        kills.carry_out(deployment, plan, out)
    finally:
        deployment.end()
    events = log(out)
    assert [event["updates"] for event in events if event["event"] == "round"] == [3, 2, 3]
    faults = {(e["round"], e["client"]): e["fault"] for e in events if e["event"] == "client" and e["fault"]}
    assert faults == {(2, 1): "its node was lost; it is not connected"}


@pytest.mark.slow
def test_nothing_is_lost_by_random_kills(tmp_path: Path) -> None:
    outcome = script("benchmarks", "kills").torture(tmp_path, kills=3, seed=3, rounds=2)
    assert len(outcome.kills) == 3
    for run in outcome.runs:
        assert run["same_bits"]
        assert set(run["updates"]) == {3}
