"""A config is TOML in, checked options out; what is wrong is one line with the value and what is accepted."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from metabayfl.config import EvalOptions, Plan, RunConfig, apply, as_toml, read, read_comparison
from metabayfl.methods import BayFL, FedAvg, create
from metabayfl.options import InputError

DEMO = Path(__file__).parents[1] / "configs" / "demo.toml"


def refused(call: Any, *parts: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message


class TestRead:
    def test_the_demo(self) -> None:
        config = read(DEMO)
        assert (config.rounds, config.seed, config.data.clients, config.data.unlabelled) == (20, 0, 5, 200)
        assert config.method == {"name": "bayfl"}
        assert (config.model.name, config.model.model_extra) == ("mlp", {"hidden": [64]})

    def test_changes_are_applied_in_order(self) -> None:
        config = read(DEMO, ["rounds=3", "data.alpha=0.1", "eval.every=2", "rounds=4"])
        assert (config.rounds, config.data.alpha, config.eval.every) == (4, 0.1, 2)

    def test_nothing_is_needed(self, tmp_path: Path) -> None:
        (tmp_path / "empty.toml").write_text("")
        assert read(tmp_path / "empty.toml") == RunConfig()

    def test_missing_file(self, tmp_path: Path) -> None:
        refused(lambda: read(tmp_path / "no.toml"), "cannot read config", "no.toml", "No such file")
        refused(lambda: read(tmp_path), "cannot read config", "Is a directory")

    @pytest.mark.parametrize("content", [b"rounds = = 3", b"[data", b"rounds = 1\nrounds = 2", b"\xff\xfe"])
    def test_bad_toml(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "bad.toml").write_bytes(content)
        refused(lambda: read(tmp_path / "bad.toml"), "bad.toml is not valid TOML")


def write(folder: Path, **files: str) -> Path:
    """Write configs, and return the last one's path."""
    for name, content in files.items():
        (folder / f"{name}.toml").write_text(content)
    return folder / f"{list(files)[-1]}.toml"


class TestExtends:
    BASE = "rounds = 9\n[data]\nclients = 3\nalpha = 0.1\n[methods.fedavg]\nrate = 0.1\nepochs = 2\n[methods.bayfl]\n"

    def test_values_come_on_top_key_by_key(self, tmp_path: Path) -> None:
        config = read(write(tmp_path, base=self.BASE, top='extends = "base.toml"\nseed = 4\n[data]\nclients = 7\n'))
        assert (config.rounds, config.seed, config.data.clients, config.data.alpha) == (9, 4, 7, 0.1)

    def test_equals_the_file_written_out(self, tmp_path: Path) -> None:
        middle = 'extends = "base.toml"\n[data]\nalpha = 0.2\n'
        top = write(tmp_path, base=self.BASE, middle=middle, top='extends = "middle.toml"\nrounds = 2\n')
        whole = self.BASE.replace("0.1\n[m", "0.2\n[m").replace("9", "2")
        assert read_comparison(top) == read_comparison(write(tmp_path, whole=whole))

    def test_sections_of_methods_say_which_there_are(self, tmp_path: Path) -> None:
        """Their values are those of the same label below, unless given anew."""
        top = 'extends = "base.toml"\n[methods.fedavg]\nrate = 1.0\n[methods.ditto]\n'
        config = read_comparison(write(tmp_path, base=self.BASE, top=top))
        assert config.methods == {"fedavg": {"rate": 1.0, "epochs": 2}, "ditto": {}}
        config = read_comparison(write(tmp_path, base=self.BASE, top='extends = "base.toml"\n'))
        assert list(config.methods) == ["fedavg", "bayfl"]

    def test_a_value_replaces_a_section_and_is_refused_as_such(self, tmp_path: Path) -> None:
        top = write(tmp_path, base=self.BASE, top='extends = "base.toml"\ndata = 3\n')
        refused(lambda: read(top), "data = 3", "section")

    def test_changes_come_last(self, tmp_path: Path) -> None:
        top = write(tmp_path, base=self.BASE, top='extends = "base.toml"\nrounds = 8\n')
        assert read(top, ["rounds=7"]).rounds == 7

    def test_refusals(self, tmp_path: Path) -> None:
        top = write(tmp_path, top='extends = "no.toml"\n')
        refused(lambda: read(top), "no.toml, which top.toml extends", "No such file")
        refused(lambda: read(write(tmp_path, top="extends = 3\n")), "extends = 3", "a TOML file beside top.toml")
        loop = write(tmp_path, one='extends = "two.toml"\n', two='extends = "one.toml"\n')
        refused(lambda: read(loop), "two.toml extends itself")


WRONG: list[tuple[str, list[str]]] = [
    ("round=3", ["round = 3: unknown key", "accepted here: rounds, seed", "data, corrupt, drift, model"]),
    ("metod.rate=1", ["metod = {'rate': 1}: unknown key", "method"]),
    ("data.alhpa=1", ["data.alhpa = 1: unknown key", "accepted here: name, path"]),
    ("eval.evry=1", ["eval.evry = 1: unknown key", "accepted here: on, every, samples, subset, local_subset"]),
    ("select.part=1", ["select.part = 1: unknown key", "fraction, held_out"]),
    ("deadline.minutes=1", ["deadline.minutes = 1: unknown key", "seconds, step_seconds, spread"]),
    ("rounds=many", ["rounds = 'many'", "valid integer"]),
    ("rounds=2.5", ["rounds = 2.5", "valid integer"]),
    ("rounds=true", ["rounds = True", "true and false are not accepted"]),
    ("data.alpha=false", ["data.alpha = False", "true and false are not accepted"]),
    ("rounds=[3]", ["rounds = [3]", "valid integer"]),
    ("keep_personal=3", ["keep_personal = 3", "boolean"]),
    ("data.name=3", ["data.name = 3", "string"]),
    ("data.partition=random", ["data.partition = 'random'", "'iid', 'dirichlet'", "'step'"]),
    ("data=digits", ["data = 'digits'", "section"]),
    ("method=bayfl", ["method = 'bayfl'", "section"]),
    ("rounds=0", ["rounds = 0", "greater than or equal to 1"]),
    ("seed=-1", ["seed = -1", "greater than or equal to 0"]),
    ("data.alpha=0", ["data.alpha = 0", "greater than 0"]),
    ("data.alpha=inf", ["data.alpha = inf", "finite"]),
    ("corrupt.noise_variance=nan", ["corrupt.noise_variance = nan", "finite"]),
    ("data.test_fraction=1", ["data.test_fraction = 1", "less than 1"]),
    ("data.fraction=1.5", ["data.fraction = 1.5", "less than or equal to 1"]),
    ("data.batch_size=0", ["data.batch_size = 0", "greater than or equal to 1", "or a list is accepted"]),
    ("data.batch_size=[8, 0]", ["data.batch_size.1 = 0", "greater than or equal to 1"]),
    ("eval.every=0", ["eval.every = 0", "greater than or equal to 1"]),
    ("deadline.seconds=-1", ["deadline.seconds = -1", "greater than 0"]),
]


@pytest.mark.parametrize(("change", "parts"), WRONG, ids=[change for change, _ in WRONG])
def test_a_wrong_key_or_value_is_one_line(change: str, parts: list[str]) -> None:
    refused(lambda: read(DEMO, [change]), *parts)


def test_a_wrong_value_shows_itself_and_not_its_neighbours() -> None:
    with pytest.raises(InputError) as caught:
        read(DEMO, ["data.alpha=-1"])
    assert str(caught.value) == "data.alpha = -1: input should be greater than 0"


def test_several_errors_share_the_line() -> None:
    refused(lambda: RunConfig(rounds=0, seed=-1), "rounds = 0: ", "; seed = -1: ")
    refused(lambda: Plan(eval={"every": 0, "sample": 3}), "eval.every = 0: ", "; eval.sample = 3: unknown key")


class TestMethods:
    """The fields of a method are options like any other."""

    def test_created_by_name(self) -> None:
        assert create({"name": "bayfl", "rate": "0.1/sqrt(k)", "deterministic": ["a.*"]}) == BayFL(
            rate="0.1/sqrt(k)", deterministic=("a.*",)
        )
        assert create({"name": "fedavg"}) == FedAvg()

    def test_wrong_options(self) -> None:
        refused(lambda: create({"name": "fedavg", "kl_weight": 1}), "method.kl_weight = 1: unknown key", "rate, epochs")
        refused(lambda: create({"name": "fedagv"}), "unknown method 'fedagv'", "bayfl, central")
        refused(lambda: BayFL(rate=-1), "rate = -1", "positive number", "'a/sqrt(K)'")
        refused(lambda: BayFL(rate=[1]), "rate = [1]: ", "valid number, or ", "valid string")
        refused(lambda: BayFL(deterministic="a.*"), "deterministic = 'a.*': a list is accepted")


class TestApply:
    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            ("a=3", {"a": 3}),
            ("a=-0.5e-3", {"a": -0.5e-3}),
            ("a=true", {"a": True}),
            ("a=bayfl", {"a": "bayfl"}),
            ('a="3"', {"a": "3"}),
            ("a='x y'", {"a": "x y"}),
            ("a=0.1/sqrt(k)", {"a": "0.1/sqrt(k)"}),
            ("a=[64, 32]", {"a": [64, 32]}),
            ('a=["encoder.*", "norm"]', {"a": ["encoder.*", "norm"]}),
            ("a={b = 1}", {"a": {"b": 1}}),
            ("a=", {"a": ""}),
            ("a=b=c", {"a": "b=c"}),
            ("a=1\nb=2", {"a": "1\nb=2"}),
            (" a . b = 3 ", {"a": {"b": 3}}),
            ("a.b.c=x", {"a": {"b": {"c": "x"}}}),
        ],
    )
    def test_values(self, change: str, expected: dict[str, Any]) -> None:
        values: dict[str, Any] = {}
        apply(values, change)
        assert values == expected

    def test_neighbours_stay(self) -> None:
        values: dict[str, Any] = {"a": {"b": 1, "c": 2}, "d": 3}
        apply(values, "a.b=5")
        assert values == {"a": {"b": 5, "c": 2}, "d": 3}

    @pytest.mark.parametrize("change", ["rounds", "=3", " =3", ".=3", "a.=3", ".a=3", "a..b=3", ""])
    def test_no_key(self, change: str) -> None:
        refused(lambda: apply({}, change), f"--set {change!r}", "key=value is accepted", "method.rate=0.01")

    def test_below_a_value(self) -> None:
        refused(lambda: apply({"rounds": 3}, "rounds.x=1"), "--set 'rounds.x=1'", "rounds is a value, not a section")


class TestAsToml:
    def test_round_trip_of_the_demo(self) -> None:
        config = read(DEMO, ["data.batch_size=[8, 8, 8, 8, 9]", "method.rate=0.1/k", "eval.subset=7", "seed=3"])
        text = tomli_w.dumps(as_toml(config))
        assert RunConfig(**tomllib.loads(text)) == config

    @settings(max_examples=40, deadline=None)
    @given(
        st.integers(1, 99), st.none() | st.integers(1, 9), st.integers(1, 64) | st.lists(st.integers(1, 9), min_size=1),
        st.sampled_from(["", "0.1/sqrt(K)", 'quo"te', "ü"]), st.booleans() | st.none(), st.floats(0, 0.99),
    )  # fmt: skip
    def test_round_trip(
        self, rounds: int, every: int | None, batch: Any, rate: str, held_out: bool | None, share: float
    ) -> None:
        config = RunConfig(
            rounds=rounds,
            eval={"every": every},
            data={"batch_size": batch, "test_fraction": share},
            method={"name": "bayfl", "rate": rate},
            select={"held_out": held_out},
        )
        assert RunConfig(**tomllib.loads(tomli_w.dumps(as_toml(config)))) == config

    def test_what_is_not_set_is_left_out(self) -> None:
        values = as_toml(RunConfig())
        assert "clients_per_round" not in values
        assert "every" not in values["eval"]
        assert values["data"]["clients"] == 5


class TestRoundsToEvaluate:
    @pytest.mark.parametrize(
        ("every", "rounds", "expected"),
        [
            (None, 20, {2, 4, 6, 8, 10, 12, 14, 16, 18, 20}),
            (None, 100, set(range(10, 101, 10))),
            (None, 25, {3, 5, 8, 10, 13, 15, 18, 20, 23, 25}),
            (None, 10, set(range(1, 11))),
            (None, 3, {1, 2, 3}),
            (None, 1, {1}),
            (7, 20, {7, 14, 20}),
            (7, 21, {7, 14, 21}),
            (7, 3, {3}),
            (1, 3, {1, 2, 3}),
        ],
    )
    def test_known_answers(self, every: int | None, rounds: int, expected: set[int]) -> None:
        assert EvalOptions(every=every).rounds_to_evaluate(rounds) == expected

    @settings(deadline=None)
    @given(st.none() | st.integers(1, 60), st.integers(1, 500))
    def test_always_the_last_and_never_outside(self, every: int | None, rounds: int) -> None:
        found = EvalOptions(every=every).rounds_to_evaluate(rounds)
        assert max(found) == rounds
        assert min(found) >= 1
        assert every is not None or len(found) == min(rounds, 10)


def test_the_plan_of_a_config() -> None:
    config = RunConfig(rounds=3, seed=5, min_updates=2, eval={"samples": 4})
    assert config.plan() == Plan(rounds=3, seed=5, min_updates=2, eval=EvalOptions(samples=4))
