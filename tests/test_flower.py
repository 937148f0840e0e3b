"""The same methods over Flower's messages: same bits, nothing but updates on the wire, faults named."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from federations import contents, log, models, one_line
from grids import QUICK, InProcessGrid, node_configs, over_grid
from metabayfl.api import run_job
from metabayfl.config import RunConfig
from metabayfl.data.federation import Federation
from metabayfl.engine.local import TooFewUpdates
from metabayfl.experiment import Experiment, build_model, resume
from metabayfl.methods import METHODS, create
from metabayfl.options import InputError
from metabayfl.remote.wire import (
    COSTS,
    decode_introduction,
    decode_reply,
    decode_request,
    encode_introduction,
    encode_reply,
)
from metabayfl.tensorfile import decode

pytest.importorskip("flwr", reason="the extra `flower` is not installed")

from flwr.app import Error, Message, RecordDict

from metabayfl.engine.flower.carrier import pack, unpack

BYTES = {"bytes_up", "bytes_down"}
HURRIED = QUICK.model_copy(update={"join_seconds": 1.0})


class Normed(nn.Sequential):
    """A network with BatchNorm."""

    def __init__(self, classes: int, input_shape: tuple[int, ...]) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(math.prod(input_shape), 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, classes)
        )


def samples() -> list[tuple[np.ndarray, np.ndarray]]:
    """Three clients with five inputs and three classes."""
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(20 + 5 * client, 5)).astype(np.float32) for client in range(3)]
    return [(x, x[:, :3].argmax(1)) for x in inputs]


TABLES = {"label": "y", "columns": list("abcde"), "classes": ["red", "green", "blue"]}


def write_samples(path: Path, x: np.ndarray, y: np.ndarray) -> None:
    """Write what a node has: an npz file, or a table with names for the classes."""
    if path.suffix == ".npz":
        np.savez(path, x=x, y=y)
        return
    lines = [[TABLES["classes"][label], *map(repr, row)] for row, label in zip(x.tolist(), y, strict=True)]
    path.write_text("\n".join(map(",".join, [["y", *TABLES["columns"]], *lines])))


def model_of(path: Path) -> bytes:
    return (path / "model.safetensors").read_bytes()


def config(method: str = "fedavg", options: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    """A small federation of digits."""
    values: dict[str, Any] = {
        "rounds": 3,
        "method": {"name": method, "epochs": 1, **(options or {})},
        "data": {"clients": 3, "fraction": 0.1, "unlabelled": 20},
        "model": {"hidden": [4], "dropout": 0.1} if "dropout" in method else {"hidden": [4]},
        "eval": {"every": 2, "samples": 2},
    }
    return RunConfig(**(values | changes))


def without_bytes(path: Path) -> list[dict[str, Any]]:
    """The log without the sizes of messages, which have more in them than a simulated one counts.

    And without the view P/G: the common test set of clients that work alone is not on the nodes.
    """
    events = [{key: value for key, value in event.items() if key not in BYTES} for event in log(path)]
    for event in events:
        event.get("metrics", {}).pop("P/G", None)
    return events


class TestSameBits:
    @pytest.mark.parametrize("method", sorted(METHODS.keys() - {"central"}))
    def test_as_the_local_engine(self, method: str, tmp_path: Path) -> None:
        plan = config(method)
        Experiment.of(plan).run(tmp_path / "local", 1)
        over_grid(plan, tmp_path / "run", InProcessGrid(node_configs(tmp_path)))
        assert model_of(tmp_path / "run") == model_of(tmp_path / "local")
        assert without_bytes(tmp_path / "run") == without_bytes(tmp_path / "local")

    @pytest.mark.parametrize("kind", ["npz", "csv"])
    def test_from_files_of_the_nodes(self, kind: str, tmp_path: Path) -> None:
        """Each node reads its own file; the result is that of the same arrays in one place."""
        nodes, arrays = node_configs(tmp_path), samples()
        for node in nodes.values():
            node["data"] = str(tmp_path / f"own{node['client-id']}.{kind}")
            write_samples(Path(node["data"]), *arrays[node["client-id"]])
        np.savez(tmp_path / "server.npz", test_x=arrays[0][0], test_y=arrays[0][1])
        plan = config("bayfl", data={"name": "nodes", "clients": 3, **({} if kind == "npz" else TABLES)})
        over_grid(plan, tmp_path / "run", InProcessGrid(nodes), own=tmp_path / "server.npz")
        federation = Federation.from_arrays(arrays, test=arrays[0], seed=plan.seed)
        model = build_model(plan, federation.likelihood, (5,))
        run_job(model, federation, create(plan.method), plan.plan(), out=tmp_path / "local")
        assert model_of(tmp_path / "run") == model_of(tmp_path / "local")
        assert without_bytes(tmp_path / "run") == without_bytes(tmp_path / "local")

    def test_of_the_models_that_stay_on_the_nodes(self, tmp_path: Path) -> None:
        plan = config("bayfl")
        Experiment.of(plan).run(tmp_path / "local", 1)
        over_grid(plan, tmp_path / "run", InProcessGrid(node_configs(tmp_path)))
        own = sorted(tmp_path.glob("node*/*/personal/*.safetensors"))
        assert [path.read_bytes() for path in own] == [p.read_bytes() for p in models(tmp_path / "local")]
        assert not (tmp_path / "run" / "personal").exists()

    def test_with_some_clients_per_round(self, tmp_path: Path) -> None:
        plan = config("bayfl", clients_per_round=2, rounds=4)
        Experiment.of(plan).run(tmp_path / "local", 1)
        over_grid(plan, tmp_path / "run", InProcessGrid(node_configs(tmp_path)))
        assert model_of(tmp_path / "run") == model_of(tmp_path / "local")
        assert without_bytes(tmp_path / "run") == without_bytes(tmp_path / "local")

    def test_with_local_batchnorm_the_state_comes_from_the_node(self, tmp_path: Path) -> None:
        """Scale and shift of BatchNorm never leave the client; the next round finds them on its disk."""
        plan = config(options={"batchnorm": "local"}, model={"name": "test_flower:Normed"})
        Experiment.of(plan).run(tmp_path / "local", 1)
        grid = InProcessGrid(node_configs(tmp_path))
        over_grid(plan, tmp_path / "run", grid)
        assert model_of(tmp_path / "run") == model_of(tmp_path / "local")
        assert without_bytes(tmp_path / "run") == without_bytes(tmp_path / "local")


class TestPayload:
    def test_nothing_but_updates_and_numbers_leaves_a_node(self, tmp_path: Path) -> None:
        grid = InProcessGrid(node_configs(tmp_path))
        result = over_grid(config("bayfl"), tmp_path / "run", grid)
        server = result.directory.checkpoint()
        assert server is not None
        for kind, _, _, reply in grid.log:
            assert set(reply.content) == {"metabayfl"}
            content = unpack(reply.content)
            if kind == "query.describe":
                about = decode_introduction(content)
                assert content == encode_introduction(about)
                continue
            tensors, meta = decode(bytearray(content))
            assert encode_reply(decode_reply(content)) == content
            assert {n: (t.shape, t.dtype) for n, t in tensors.items()} in (
                {},
                {n: (t.shape, t.dtype) for n, t in server.server.items()},
            )
            assert set(meta) == {"client", "round", "weight", "metrics", "cost", "fitted", "scores", "failures"}
            assert set(meta["metrics"]) <= {
                *("nll", "kl", "kl_scale", "noisy_weights", "sigma", "prior_sigma", "rate", "steps")
            }
            assert set(meta["cost"]) <= COSTS
        assert len(grid.log) == 3 + 4 * 3, "one message for each client to begin, for each round, and at the end"

    def test_no_sample_is_in_any_message(self, tmp_path: Path) -> None:
        nodes = node_configs(tmp_path)
        rng = np.random.default_rng(0)
        secret = rng.normal(size=(3, 12, 5)).astype(np.float32)
        for node in nodes.values():
            node["data"] = str(tmp_path / f"own{node['client-id']}.npz")
            np.savez(node["data"], x=secret[node["client-id"]], y=np.arange(12) % 3)
        grid = InProcessGrid(nodes)
        over_grid(config(data={"name": "nodes", "clients": 3}), tmp_path / "run", grid)
        sent = b"".join(unpack(m.content) for _, _, message, reply in grid.log for m in (message, reply))
        assert not any(secret[client, row].tobytes() in sent for client in range(3) for row in range(12))

    def test_the_bytes_that_are_counted_are_those_that_are_sent(self, tmp_path: Path) -> None:
        grid = InProcessGrid(node_configs(tmp_path))
        over_grid(config(eval={"every": 3}), tmp_path / "run", grid)
        fits = [(m, r) for kind, _, m, r in grid.log if kind == "train.take_part"][:9]
        events = [e for e in log(tmp_path / "run") if e["event"] == "client"]
        for part, name in ((0, "bytes_down"), (1, "bytes_up")):
            sizes = sorted(len(unpack(pair[part].content)) for pair in fits)
            assert sizes == sorted(event[name] for event in events)


def spoiled(change: Any, node: int = 99, rounds: tuple[int, ...] = (0,)) -> Any:
    """Change the answers of one node (that of client 1) in some rounds."""

    def tamper(message: Message, reply: Message) -> Message:
        asked = message.metadata.message_type == "train.take_part" and message.metadata.dst_node_id == node
        if not asked or decode_request(unpack(message.content))[0].round not in rounds:
            return reply
        return change(message, reply)

    return tamper


def resent(message: Message, content: bytes) -> Message:
    return Message(pack(content), reply_to=message)


def with_payload(change: Any) -> Any:
    """Change the tensors of an update."""

    def tamper(message: Message, reply: Message) -> Message:
        answer = decode_reply(unpack(reply.content))
        assert answer.update is not None
        update = answer.update._replace(payload=change(answer.update.payload))
        return resent(message, encode_reply(replace(answer, update=update)))

    return tamper


BAD = {
    "nan": (with_payload(lambda p: p | {"mu": p["mu"] * math.nan}), "mu has values that are NaN or infinite"),
    "shape": (with_payload(lambda p: p | {"mu": p["mu"][:-1]}), "mu has shape"),
    "name": (with_payload(lambda p: {"nu": p["mu"]}), "tensors missing: 'mu'; not expected: 'nu'"),
    "huge": (with_payload(lambda p: p | {"more": torch.zeros(1 << 20)}), "an update of"),
    "garbage": (lambda m, r: resent(m, b"\x07" * 1000), "its answer cannot be used"),
    "empty": (lambda m, r: resent(m, b""), "its answer cannot be used"),
    "other records": (lambda m, r: Message(RecordDict(), reply_to=m), "other records than ours"),
    "another client": (
        lambda m, r: resent(m, encode_reply(replace(decode_reply(unpack(r.content)), client=0))),
        "its answer is of client 0, round 0",
    ),
    "an old round": (
        lambda m, r: resent(m, encode_reply(replace(decode_reply(unpack(r.content)), round=7))),
        "its answer is of client 1, round 7",
    ),
    "raising": (lambda m, r: Message(Error(2, "tired\nand \x1b[31mred"), reply_to=m), "it failed: tired and [31mred"),
    "lost for good": (lambda m, r: Message(Error(5, "gone"), reply_to=m), "its node was lost: gone"),
}


class TestFaults:
    @pytest.mark.parametrize("fault", BAD)
    def test_is_named_and_the_round_goes_on(self, fault: str, tmp_path: Path) -> None:
        change, reason = BAD[fault]
        grid = InProcessGrid(node_configs(tmp_path), spoiled(change))
        over_grid(config(eval={"every": 3}), tmp_path / "run", grid)
        events = log(tmp_path / "run")
        found = {(e["round"], e["client"]): e["fault"] for e in events if e["event"] == "client" and e["fault"]}
        assert list(found) == [(1, 1)]
        assert reason in one_line(found[1, 1])
        assert [e["updates"] for e in events if e["event"] == "round"] == [2, 3, 3]

    def test_a_client_whose_update_does_not_count_keeps_its_state(self, tmp_path: Path) -> None:
        """As in the local engine: what was not averaged has not happened."""
        plan = config(options={"batchnorm": "local"}, model={"name": "test_flower:Normed"}, eval={"every": 3})
        grid = InProcessGrid(node_configs(tmp_path), spoiled(BAD["nan"][0], rounds=(1,)))
        over_grid(plan, tmp_path / "run", grid)
        keys = [decode_request(unpack(m.content))[0].latest for kind, node, m, _ in grid.log[3:] if node == 99]
        assert keys[0] == ""
        assert keys[1] == keys[2] != keys[3]

    def test_two_nodes_of_one_client_are_both_refused(self, tmp_path: Path) -> None:
        nodes = node_configs(tmp_path) | {55: {"client-id": 1, "state": str(tmp_path / "thief")}}
        with pytest.raises(InputError, match="client 1 is claimed by 2 nodes: 55, 99"):
            over_grid(config(), tmp_path / "run", InProcessGrid(nodes), HURRIED)

    def test_a_second_node_in_mid_run_is_named_and_the_round_completes(self, tmp_path: Path) -> None:
        nodes = node_configs(tmp_path)

        def intrude(message: Message, reply: Message) -> Message:
            nodes[55] = {"client-id": 1, "state": str(tmp_path / "thief")}
            return reply

        over_grid(config(eval={"every": 3}), tmp_path / "run", InProcessGrid(nodes, spoiled(intrude, node=100)))
        faults = {(e["round"], e["client"]): e["fault"] for e in log(tmp_path / "run") if e.get("fault")}
        assert faults[3, 1] == "is claimed by 2 nodes: 55, 99"
        assert {client for _, client in faults} == {1}

    def test_a_node_that_comes_back_under_another_id_is_asked_again(self, tmp_path: Path) -> None:
        """Same bits, since nothing is lost: the state lies on its disk."""
        nodes = node_configs(tmp_path)

        def restart(message: Message, reply: Message) -> Message:
            nodes[7] = nodes.pop(99)
            return Message(Error(5, "gone"), reply_to=message)

        plan = config("bayfl", eval={"every": 3})
        over_grid(plan, tmp_path / "run", InProcessGrid(nodes, spoiled(restart, rounds=(1,))))
        Experiment.of(plan).run(tmp_path / "local", 1)
        assert model_of(tmp_path / "run") == model_of(tmp_path / "local")

    def test_too_few_updates_end_the_run_without_a_model(self, tmp_path: Path) -> None:
        everybody = [spoiled(BAD["garbage"][0], node=node) for node in (98, 99, 100)]

        def tamper(message: Message, reply: Message) -> Message:
            for spoil in everybody:
                reply = spoil(message, reply)
            return reply

        with pytest.raises(TooFewUpdates, match="round 1 has 0 good updates, 1 are needed"):
            over_grid(config(), tmp_path / "run", InProcessGrid(node_configs(tmp_path), tamper))
        assert not (tmp_path / "run" / "model.safetensors").exists()

    def test_scores_that_are_missing_are_left_out_not_counted_as_zero(self, tmp_path: Path) -> None:
        plan = config(rounds=1)
        grid = InProcessGrid(node_configs(tmp_path), spoiled(BAD["garbage"][0], rounds=(1,)))
        result = over_grid(plan, tmp_path / "run", grid)
        assert result.metrics["G/L"]["nll"]["worst"] > result.metrics["G/L"]["nll"]["mean"] > 1
        (event,) = [e for e in result.events if e["event"] == "worker"]
        assert event["client"] == 1
        assert event["fault"].startswith("no scores of its models")

    def test_clients_that_never_come_are_named(self, tmp_path: Path) -> None:
        nodes = node_configs(tmp_path, clients=2)
        with pytest.raises(InputError, match="not all 3 clients are there: client 2 is not connected"):
            over_grid(config(), tmp_path / "run", InProcessGrid(nodes), HURRIED)

    def test_a_node_with_an_unknown_class_says_why(self, tmp_path: Path) -> None:
        nodes = node_configs(tmp_path)
        for node in nodes.values():
            node["data"] = str(tmp_path / f"own{node['client-id']}.csv")
            write_samples(Path(node["data"]), *samples()[node["client-id"]])
        data = {"name": "nodes", "clients": 3, **TABLES, "classes": ["red", "green"]}
        with pytest.raises(InputError, match=r"own1\.csv, column 'y': row \d+ is 'blue'; the classes are red, green"):
            over_grid(config(data=data), tmp_path / "run", InProcessGrid(nodes), HURRIED)

    def test_a_node_with_a_wrong_config_says_why(self, tmp_path: Path) -> None:
        nodes = node_configs(tmp_path)
        nodes[99] |= {"colour": "red"}
        with pytest.raises(InputError, match="node 99: colour = 'red': unknown key"):
            over_grid(config(), tmp_path / "run", InProcessGrid(nodes), HURRIED)


class Stopped(BaseException):
    """The server's process is killed here."""


class TestResume:
    @pytest.mark.parametrize(("message", "every"), [(3, 1), (7, 1), (8, 1), (11, 1), (14, 1), (5, 3), (10, 3)])
    def test_after_a_crash_of_the_server_at_any_message(self, message: int, every: int, tmp_path: Path) -> None:
        plan = config("bayfl", eval={"every": every, "samples": 2})
        nodes = node_configs(tmp_path)

        class Crashing(InProcessGrid):
            def _deliver(self, item: Message) -> str:
                if len(self.log) == message:
                    raise Stopped
                return super()._deliver(item)

        with pytest.raises(Stopped):
            over_grid(plan, tmp_path / "run", Crashing(nodes))
        second = InProcessGrid(nodes)
        over_grid(plan, tmp_path / "run", second, resume=True)
        Experiment.of(plan).run(tmp_path / "local", 1)
        assert model_of(tmp_path / "run") == model_of(tmp_path / "local")
        assert without_bytes(tmp_path / "run") == without_bytes(tmp_path / "local")

    def test_a_request_asked_twice_is_answered_from_the_disk(self, tmp_path: Path) -> None:
        grid = InProcessGrid(node_configs(tmp_path))
        over_grid(config(eval={"every": 3}), tmp_path / "run", grid)
        _, node, message, reply = grid.log[-4]
        before = contents(tmp_path / "node0")
        again = grid._answer(message, node)
        first, second = (decode_reply(unpack(item.content)) for item in (reply, again))
        assert second.update is not None
        assert first.update is not None
        assert torch.equal(second.update.payload["mu"], first.update.payload["mu"])
        assert second.cost["seconds"] == first.cost["seconds"], "the seconds of the first time: nothing is trained"
        assert contents(tmp_path / "node0") == before

    def test_old_records_are_removed(self, tmp_path: Path) -> None:
        over_grid(config(rounds=6), tmp_path / "run", InProcessGrid(node_configs(tmp_path)))
        assert all(len(list(path.iterdir())) <= 3 for path in tmp_path.glob("node*/*/clients"))

    def test_other_data_are_refused(self, tmp_path: Path) -> None:
        nodes = node_configs(tmp_path)
        plan = config(rounds=2)
        over_grid(plan, tmp_path / "run", InProcessGrid(nodes))
        ((state,),) = ([path] for path in (tmp_path / "node1").iterdir())
        about = json.loads((state / "node.json").read_text())
        (state / "node.json").write_text(json.dumps(about | {"data_hash": "another"}))
        (tmp_path / "run" / "model.safetensors").unlink()
        (tmp_path / "run" / "checkpoint.safetensors").unlink()
        (tmp_path / "run" / "events.jsonl").unlink()
        over_grid(plan, tmp_path / "run", InProcessGrid(nodes), resume=True)
        faults = [e["fault"] for e in log(tmp_path / "run") if e["event"] == "client" and e["client"] == 1]
        assert "belongs to another client or to other data" in faults[0]

    def test_the_local_engine_leaves_it_to_flower(self, tmp_path: Path) -> None:
        (tmp_path / "remote.json").write_text("{}")
        with pytest.raises(InputError, match="metabayfl flower resume"):
            resume(tmp_path, 1)
