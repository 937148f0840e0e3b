"""What strangers may send: an answer is read whole and right, or refused in one line."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from federations import one_line
from metabayfl import tensorfile
from metabayfl.remote import wire
from metabayfl.remote.wire import Introduction, Reply, Request, decode_introduction, decode_reply, encode_reply, key_of
from metabayfl.remote.workers import read_reply
from metabayfl.types import Update
from metabayfl.validate import Limits

LIKE = {"mu": torch.zeros(4)}
GOOD = Reply(1, 2, Update({"mu": torch.arange(4.0)}, 7.0, {"nll": 0.5}), {"P/L": {"nll": 2.0}}, {"seconds": 1.0})
ABOUT = {"client": 0, "train": 5, "select": 1, "test": 2, "batch_size": 8, "input_shape": [3], "whole_inputs": False}
ABOUT |= {"classes": 2, "label_shape": []}


def forged(**changes: Any) -> bytes:
    """A reply with a right checksum and wrong content."""
    tensors, meta = tensorfile.decode(bytearray(encode_reply(GOOD)))
    return tensorfile.encode_checked(tensors, meta | changes)


def test_a_reply_comes_back_as_it_was() -> None:
    again = decode_reply(encode_reply(GOOD))
    assert again.update is not None
    assert torch.equal(again.update.payload["mu"], torch.arange(4.0))
    assert replace(again, update=GOOD.update, size=0) == GOOD


@given(st.data())
def test_a_damaged_reply_is_refused(data: st.DataObject) -> None:
    content = bytearray(encode_reply(GOOD))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    assert isinstance(read_reply(1, 2, bytes(content), Limits(LIKE)), str)


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_refused_in_one_line(content: bytes) -> None:
    fault = read_reply(1, 2, content, Limits(LIKE))
    assert isinstance(fault, str)
    one_line(fault)
    with pytest.raises(ValueError, match=r"."):
        decode_introduction(content)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"client": 0}, "its answer is of client 0, round 2: it was not asked for that"),
        ({"round": "x" * 999}, "it was not asked for that"),
        ({"metrics": {"nll": math.nan}}, "metric 'nll' is nan, not a finite number"),
        ({"metrics": {"seconds": 1.0}}, "has the name of something else in the log"),
        ({"weight": -1.0}, "weight -1.0 is not in"),
        ({"cost": {"seconds": math.inf}}, "its costs are not finite numbers"),
        ({"cost": {"salary": 1.0}}, "its costs are not finite numbers"),
        ({"cost": 5}, "its costs are not finite numbers"),
        ({"scores": {"P/L": {"nll": "low"}}}, "metric 'nll' is 'low', not a finite number"),
        ({"scores": [1]}, "a reply in the wrong form"),
        ({"failures": "no"}, "a reply in the wrong form"),
    ],
)
def test_a_forged_reply_is_refused(changes: dict[str, Any], reason: str) -> None:
    fault = read_reply(1, 2, forged(**changes), Limits(LIKE))
    assert isinstance(fault, str)
    assert reason in one_line(fault)


def test_texts_of_a_stranger_become_one_short_line() -> None:
    reply = decode_reply(forged(fitted=False, failures={"fit": "a\x1b[2J\nb" + "c" * 10**5, "else": "x"}))
    assert list(reply.failures) == ["fit"]
    assert reply.failures["fit"].startswith("a [2J b")
    assert len(reply.failures["fit"]) <= wire.LONGEST_TEXT


def test_the_size_is_looked_at_first() -> None:
    assert "above" in str(read_reply(1, 2, b"\0" * (1 << 20), Limits(LIKE)))


@pytest.mark.parametrize("change", [{"train": -1}, {"client": 1.5}, {"more": 1}, {"input_shape": "x"}])
def test_a_wrong_introduction_is_refused(change: dict[str, Any]) -> None:
    assert decode_introduction(json.dumps(ABOUT).encode()) == Introduction(**ABOUT)
    with pytest.raises(ValueError, match=next(iter(change))):
        decode_introduction(json.dumps(ABOUT | change).encode())


def test_the_key_is_of_what_a_fit_depends_on_and_of_nothing_else() -> None:
    request, down = Request(experiment="0" * 16, config="", do=("fit",)), {"mu": torch.zeros(3)}
    same = request.model_copy(update={"do": ("score", "fit"), "oldest": 3})
    assert key_of(same, down) == key_of(request, down)
    for change in ({"round": 1}, {"latest": "a"}, {"config": "seed = 1"}, {"sizes": (1,)}):
        assert key_of(request.model_copy(update=change), down) != key_of(request, down)
    assert key_of(request, {"mu": torch.ones(3)}) != key_of(request, down)
