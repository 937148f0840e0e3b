"""The README's promise, executed."""

import re
import types
from pathlib import Path

import pytest
import torch

import metabayfl as mb

README = Path(__file__).parents[1] / "README.md"


def test_the_python_block_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    block = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    assert block is not None
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(120, 4, generator=rng)
    y = (x[:, 0] > 0).long()
    names = {"x0": x[:60], "y0": y[:60], "x1": x[60:], "y1": y[60:], "x": x}
    names["model"] = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    exec(block.group(1), names)  # noqa: S102
    p, again = names["p"], names["again"]
    assert p.probs.shape == (120, 2)
    assert (p.probs.argmax(1) == y).double().mean() > 0.8
    assert (p.entropy >= p.mutual_information - 1e-9).all()
    assert torch.equal(again.predict(x).probs, p.probs)
    assert not torch.equal(again.predict(x, client=1).probs, p.probs)


def test_a_built_in_model_is_rebuilt_on_load(tmp_path: Path) -> None:
    x, y = torch.randn(40, 6), torch.arange(40) % 3
    fed = mb.Federation.from_arrays([(x[:20], y[:20]), (x[20:], y[20:])])
    model = mb.models.build("mlp", classes=3, input_shape=(6,))
    result = mb.federate(model, fed, rounds=1, out=tmp_path / "run")
    assert torch.equal(mb.load(tmp_path / "run").predict(x).probs, result.predict(x).probs)


def test_public_names_are_what_they_say_whatever_was_imported_before() -> None:
    """A function must not share its name with a module of the package, which would take its place once imported."""
    import metabayfl.api
    import metabayfl.inspection  # noqa: F401

    for name in mb.__all__:
        value = getattr(mb, name)
        assert isinstance(value, types.ModuleType) == (name == "models"), name
    report = mb.check(torch.nn.Linear(2, 3))
    assert report.ok
    assert mb.check(torch.nn.Identity()).problems
