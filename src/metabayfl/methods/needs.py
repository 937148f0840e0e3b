"""What a method may need beyond a model and training data, and the one line that refuses it where that is missing."""

from collections.abc import Collection
from enum import StrEnum

from metabayfl.options import InputError


class Need(StrEnum):
    """Something that not every engine or federation has."""

    UNLABELLED = "an unlabelled pool"
    STATE = "client state"
    INDIVIDUAL = "individual updates"
    MODELS = "a model per client at the server"


REMEDIES = {
    Need.UNLABELLED: "set data.unlabelled, or pass unlabelled=x to Federation.from_arrays",
    Need.STATE: "use an engine whose clients keep something from round to round",
    Need.INDIVIDUAL: "use an engine whose server sees the updates one by one, not only their sum",
    Need.MODELS: "use an engine whose server keeps and sends a model for each client",
}


def refuse_unmet(name: str, needs: Collection[Need], offers: Collection[Need]) -> None:
    """Refuse a method that needs something it would not get."""
    for need in Need:
        if need in needs and need not in offers:
            raise InputError(f"{name} needs {need}: {REMEDIES[need]}")
