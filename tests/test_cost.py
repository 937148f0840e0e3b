"""Costs whose answer is known: bytes by the file format, operations by 2·m·n·k, seconds by the link."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from metabayfl import Federation, methods, models
from metabayfl.api import federate
from metabayfl.cli import main
from metabayfl.config import Plan
from metabayfl.cost import Device, Link, MethodCost, estimate_job, parse_link, read_device
from metabayfl.engine.plan import Job, make_job
from metabayfl.ledger import summarise_costs as summarise
from metabayfl.methods import BayFL, FedAvg, Method
from metabayfl.options import InputError
from metabayfl.probe import LiveBytes, Probe, countable
from metabayfl.types import Context, Fit, Params, TrainData, Update

INPUTS, HIDDEN, CLASSES = 6, 16, 3
SIZES = (25, 50, 100)  # 20, 40 and 80 to train on
PARAMETERS = INPUTS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
FORWARD = 2 * (INPUTS * HIDDEN + HIDDEN * CLASSES)
BACKWARD = FORWARD + 2 * HIDDEN * CLASSES  # gradients of all weights; of the inputs only in the second layer
DEVICE = Device(name="Test", sustained_gflops_per_second=2.0, memory_gb=1.0, note="made up")
LINK = Link(bits_per_second=1e6, latency_seconds=0.5)
Command = Callable[..., int]
Output = pytest.CaptureFixture[str]
CONFIG = """
rounds = 3
[data]
clients = 3
[model]
name = "mlp"
hidden = [8]
"""


def network() -> nn.Module:
    return models.build("mlp", classes=CLASSES, input_shape=(INPUTS,), hidden=[HIDDEN])


def federation(batch_size: int = 8) -> Federation:
    rng = torch.Generator().manual_seed(0)
    clients = [(torch.randn(size, INPUTS, generator=rng), torch.arange(size) % CLASSES) for size in SIZES]
    return Federation.from_arrays(clients, batch_size=batch_size)


def job(method: Method, batch_size: int = 8, **plan: Any) -> Job:
    fed = federation(batch_size)
    return make_job(method, network(), fed, Plan(**plan))


def cost(method: Method, batch_size: int = 8, **plan: Any) -> MethodCost:
    return estimate_job(job(method, batch_size, **plan), network(), DEVICE, LINK)


def file_size(*names: str) -> int:
    tensors = {name: torch.zeros(PARAMETERS) for name in names}
    return len(safetensors.torch.save(tensors, metadata={"metabayfl": "{}"}))


class TestBytes:
    def test_fedavg_receives_its_parameters_as_float32(self) -> None:
        assert cost(FedAvg()).bytes_down == file_size("mu")

    def test_a_posterior_over_everything_is_twice_as_much(self) -> None:
        both = cost(BayFL(bayesian="all")).bytes_down
        assert both == file_size("mu", "rho")
        assert abs(both - 2 * cost(FedAvg()).bytes_down) < 200

    @pytest.mark.parametrize("method", [FedAvg(epochs=1), BayFL(epochs=1)], ids=["fedavg", "bayfl"])
    def test_a_real_run_sends_what_was_estimated(self, method: Method) -> None:
        estimated = cost(method, rounds=2)
        real = summarise(federate(network(), federation(8), method, rounds=2).events)
        assert real["per_client"]["bytes_down"] == estimated.bytes_down
        assert real["per_client"]["bytes_up"] == pytest.approx(estimated.bytes_up, abs=32)
        assert real["total"]["bytes_up"] + real["total"]["bytes_down"] == pytest.approx(
            estimated.run_megabytes * 1e6, abs=32 * 2 * len(SIZES)
        )


class FixedSteps(FedAvg):
    """Looks at the first batch three times, however many samples there are, and once at d_n."""

    name: ClassVar[str] = "fixed-steps"

    def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        ctx.task.load(down)
        for _ in range(3):
            ctx.task.backward(data.x[: data.batch_size], data.y[: data.batch_size])
        ctx.task.outputs(data.select_x)
        return Fit(Update(down, 1.0, {}), {}, down)


class TestOperations:
    @pytest.mark.parametrize("method", [FedAvg(epochs=3), BayFL(epochs=3)], ids=["fedavg", "bayfl"])
    @pytest.mark.parametrize("batch_size", [1, 8, 500])
    def test_each_sample_goes_forward_and_backward_once_per_epoch(self, method: Method, batch_size: int) -> None:
        found = Probe(job(method, batch_size)).flops()
        assert found == pytest.approx([3 * samples * (FORWARD + BACKWARD) for samples in (20, 40, 80)], rel=1e-12)

    def test_the_mean_over_clients_is_what_is_shown(self) -> None:
        found = cost(FedAvg(epochs=3))
        assert found.flops == round(3 * (20 + 40 + 80) / 3 * (FORWARD + BACKWARD))
        assert found.compute_seconds == pytest.approx(found.flops / 2e9)

    def test_a_method_of_fixed_steps_does_not_grow_with_the_samples(self) -> None:
        expected = [3 * 8 * (FORWARD + BACKWARD) + select * FORWARD for select in (4, 8, 16)]
        assert Probe(job(FixedSteps())).flops() == pytest.approx(expected, rel=1e-12)

    @pytest.mark.parametrize("training", [True, False])
    def test_fused_layers_are_counted(self, training: bool) -> None:
        batch, steps, inputs, width = 4, 5, 6, 8
        lstm = nn.LSTM(inputs, width, batch_first=True).train(training)
        with countable(lstm), FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
            lstm(torch.randn(batch, steps, inputs))
        assert counter.get_total_flops() == 2 * batch * steps * (inputs + width) * 4 * width
        layer = nn.TransformerEncoderLayer(width, 2, 12, batch_first=True).train(training)
        with countable(layer), FlopCounterMode(display=False) as counter, torch.set_grad_enabled(training):
            layer(torch.randn(batch, steps, width))
        dense = 2 * batch * steps * (4 * width * width + 2 * 12 * width)
        attention = 2 * 2 * batch * steps * steps * width
        assert counter.get_total_flops() == dense + attention


class TestMemory:
    def test_what_is_freed_does_not_count(self) -> None:
        with LiveBytes() as live:
            first = torch.zeros(1000)
            view = first[:10].add_(1.0)
            del first
            assert sum(live.alive.values()) == 4000
            del view
            second = torch.zeros(500) + 1.0
        assert live.peak == 4000
        assert sum(live.alive.values()) == second.nbytes == 2000

    def test_memory_grows_by_the_activations_of_a_batch(self) -> None:
        found = {size: cost(FedAvg(), size).peak_memory_bytes for size in (40, 80)}
        least = 40 * 4 * (HIDDEN + CLASSES)
        assert least <= found[80] - found[40] <= 10 * least

    def test_a_posterior_needs_more_and_a_small_device_refuses_neither(self) -> None:
        assert cost(BayFL()).peak_memory_bytes > cost(FedAvg()).peak_memory_bytes > 6 * 4 * PARAMETERS
        tiny = DEVICE.model_copy(update={"memory_gb": 1e-6})
        assert not estimate_job(job(FedAvg()), network(), tiny, LINK).fits_in_memory
        assert cost(FedAvg()).fits_in_memory


class TestSeconds:
    def test_a_round_lasts_until_the_slowest_client_is_done(self) -> None:
        found = cost(FedAvg(epochs=1), rounds=4)
        network_seconds = 2 * 0.5 + 8 * (found.bytes_up + found.bytes_down) / 1e6
        assert found.communication_seconds == pytest.approx(network_seconds)
        assert found.round_seconds == pytest.approx(80 * (FORWARD + BACKWARD) / 2e9 + network_seconds)
        assert found.run_hours == pytest.approx(4 * found.round_seconds / 3600)

    def test_only_those_who_are_invited_send(self) -> None:
        found = cost(FedAvg(epochs=1), rounds=4, clients_per_round=2)
        assert found.run_megabytes == pytest.approx(4 * 2 * (found.bytes_up + found.bytes_down) / 1e6)


class TestLinkAndDevice:
    @pytest.mark.parametrize(
        ("text", "bits", "seconds"),
        [("10Mbit/50ms", 1e7, 0.05), ("250kbit/1.5s", 2.5e5, 1.5), ("1Gbit/0ms", 1e9, 0.0), ("0.5Mbit/2s", 5e5, 2.0)],
    )
    def test_links(self, text: str, bits: float, seconds: float) -> None:
        assert parse_link(text) == Link(bits_per_second=bits, latency_seconds=seconds)

    @pytest.mark.parametrize(
        "text",
        ["", "10Mbit", "10MB/50ms", "10mbit/50ms", "0Mbit/5ms", "-1Mbit/5ms", "1Mbit/5", "1 Mbit/5ms", "١Mbit/5ms"],
    )
    def test_bad_links_are_one_line_with_what_is_accepted(self, text: str) -> None:
        with pytest.raises(InputError, match=r"--link .*kbit, Mbit or Gbit .* ms or s, such as 10Mbit/50ms$"):
            parse_link(text)

    @pytest.mark.parametrize("name", ["raspberry-pi-4", "phone"])
    def test_our_profiles_say_that_they_are_estimates(self, name: str) -> None:
        assert read_device(name).note.startswith("ESTIMATE")

    def test_a_profile_of_your_own(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.toml"
        path.write_text('name = "Mine"\nsustained_gflops_per_second = 3\nmemory_gb = 2\nnote = "timed"\n')
        assert read_device(str(path)).sustained_gflops_per_second == 3.0

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            (None, "No such file"),
            ("name = ", "Invalid value"),
            ('name = "x"', "sustained_gflops_per_second"),
            ('name = "x"\nsustained_gflops_per_second = 0\nmemory_gb = 1\nnote = ""', "greater than 0"),
            (
                'name = "x"\nsustained_gflops_per_second = 1\nmemory_gb = 1\nnote = ""\nwatts = 3',
                "watts.*unknown key|unknown key watts",
            ),
        ],
    )
    def test_a_bad_profile_is_one_line(self, tmp_path: Path, content: str | None, complaint: str) -> None:
        path = tmp_path / "mine.toml"
        if content is not None:
            path.write_text(content)
        with pytest.raises(InputError, match=complaint) as error:
            read_device(str(path))
        assert "\n" not in str(error.value)


class NeedsPool(FedAvg):
    """Cannot start without unlabelled samples."""

    name: ClassVar[str] = "needs-pool"

    def init_server(self, ctx: Context) -> Params:
        if ctx.unlabelled is None:
            raise InputError("needs-pool: set data.unlabelled")
        return super().init_server(ctx)


class Broken(FedAvg):
    """Has a bug."""

    name: ClassVar[str] = "broken"

    def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        raise KeyError("a bug")


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run the cost command on a small config, with three methods registered."""
    monkeypatch.setattr(methods, "METHODS", {m.name: m for m in (FedAvg, BayFL, NeedsPool)})
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)

    def run(*arguments: str, device: str = "phone", link: str = "10Mbit/50ms") -> int:
        return main(["cost", str(path), "--device", device, "--link", link, *arguments])

    return run


class TestCommand:
    def test_json(self, command: Command, capsys: Output) -> None:
        assert command("--json", "--set", "method.epochs=2", "--set", "method.kl_weight=0.5") == 0
        found = json.loads(capsys.readouterr().out)
        rows = {row["method"]: row for row in found["methods"]}
        assert rows.keys() == {"fedavg", "bayfl"}
        assert found["refused"] == {"needs-pool": "needs-pool: set data.unlabelled"}
        assert found["device"]["note"].startswith("ESTIMATE")
        assert found["link"] == {"bits_per_second": 1e7, "latency_seconds": 0.05}
        assert (found["rounds"], found["clients"], found["clients_per_round"]) == (3, 3, 3)
        assert rows["fedavg"]["flops"] == rows["bayfl"]["flops"] > 0
        assert rows["fedavg"].keys() == MethodCost.model_fields.keys()

    def test_fields_of_the_config_reach_every_method_that_has_them(self, command: Command, capsys: Output) -> None:
        flops = []
        for epochs in (1, 3):
            command("--json", "--set", f"method.epochs={epochs}")
            flops.append(json.loads(capsys.readouterr().out)["methods"][1]["flops"])
        assert flops[1] == pytest.approx(3 * flops[0], abs=3)

    def test_the_table_says_that_it_is_an_estimate_and_why_a_method_is_missing(
        self, command: Command, capsys: Output
    ) -> None:
        assert command() == 0
        shown = capsys.readouterr().out
        for text in ("ESTIMATE", "Phone at a stated 5 GFLOP/s", "see below", "needs-pool: set data.unlabelled"):
            assert text in shown

    @pytest.mark.parametrize(
        "bad", [{"device": "toaster"}, {"device": "none.toml"}, {"link": "fast"}], ids=["device", "file", "link"]
    )
    def test_bad_input_is_one_line_and_exit_code_2(self, command: Command, capsys: Output, bad: dict[str, str]) -> None:
        assert command(**bad) == 2
        assert capsys.readouterr().err.count("\n") == 1

    def test_a_config_that_suits_no_method_is_an_error(self, command: Command, capsys: Output) -> None:
        assert command("--set", "clients_per_round=9") == 2
        assert "there are 3 clients" in capsys.readouterr().err

    def test_a_bug_of_a_method_is_not_hidden(self, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(methods.METHODS, "broken", Broken)
        with pytest.raises(KeyError):
            command()

    def test_a_method_that_diverges_is_named(self, command: Command, capsys: Output) -> None:
        assert command("--set", "method.rate=1e30") == 1
        assert "bayfl: " in capsys.readouterr().err


class TestSummary:
    def test_totals_and_means_tolerate_clients_without_numbers(self) -> None:
        client = {"event": "client", "round": 1, "fault": ""}
        events = [
            client | {"client": 0, "bytes_up": 100, "bytes_down": 40, "seconds": 1.0},
            client | {"client": 1, "bytes_up": 300, "bytes_down": 40, "seconds": 3.0, "selection_seconds": 0.5},
            client | {"client": 2, "fault": "ValueError", "bytes_down": 40, "seconds": 2.0},
            client | {"client": 4, "fault": "ValueError", "forward_passes": 90, "backward_passes": 60},
            client | {"client": 3, "fault": "missed the deadline"},
            {"event": "round", "round": 1, "train_seconds": 4.0, "eval_seconds": 1.0},
            {"event": "round", "round": 2, "train_seconds": 2.0},
        ]
        found = summarise(iter(events))
        sums = {"bytes_up": 400, "bytes_down": 120, "client_seconds": 6.0, "train_seconds": 6.0, "eval_seconds": 1.0}
        sums |= {"selection_seconds": 0.5, "comm_seconds": 0, "forward_passes": 90, "backward_passes": 60}
        assert found["rounds"] == 2
        assert found["total"] == sums
        assert found["per_round"] == {name: value / 2 for name, value in sums.items()}
        assert found["per_client"] == {
            "bytes_up": 200.0, "bytes_down": 40.0, "client_seconds": 2.0, "selection_seconds": 0.5, "comm_seconds": 0.0,
            "forward_passes": 90.0, "backward_passes": 60.0,
        }  # fmt: skip
        assert set(summarise([])["total"].values()) == {0}


def test_an_estimate_leaves_random_numbers_and_threads_alone() -> None:
    numbers, threads = torch.get_rng_state(), torch.get_num_threads()
    here, module = job(FedAvg()), network()
    torch.set_rng_state(numbers)
    torch.set_num_threads(2)
    try:
        estimate_job(here, module, DEVICE, LINK)
        assert torch.equal(torch.get_rng_state(), numbers)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
