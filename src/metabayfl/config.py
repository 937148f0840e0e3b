"""The config of a run: TOML in, checked options out. No torch here, so that help and errors come at once."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from metabayfl.options import InputError, Options

Share = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]


Level = Annotated[float, Field(ge=0)]
Chance = Annotated[float, Field(ge=0, le=1)]


class DataOptions(Options):
    """Which data, and how they are split over the clients."""

    name: str = "digits"
    """Dataset: digits, cifar10, cifar100, tiny-imagenet, mnist, fashion-mnist; of your own: npz, images, table;
    nodes: each has its own (docs/deployment.md)."""
    path: str | None = None
    """Of npz, images, table: the file or folder, absolute or in the data folder (--data-dir or METABAYFL_DATA)."""
    label: str | None = None
    """Of table, nodes: the label column; text or whole numbers mean classes, real numbers regression."""
    client_column: str | None = None
    """Of table: the column that says whose a row is (partition by-column)."""
    columns: tuple[str, ...] | None = None
    """Of table, nodes: the columns that are inputs; by default all others."""
    classes: tuple[str, ...] | None = None
    """Of nodes: the names of the classes, in the order of their numbers; tables and folders of images need them."""
    regression: bool = False
    """Of table, nodes: whether whole numbers in the label column are quantities, not classes."""
    noise_std: Annotated[float, Field(gt=0)] = 1.0
    """Of regression: standard deviation of the observations around the model's mean."""
    standardise: bool = True
    """Of table: whether each input column gets mean 0 and standard deviation 1 over the training rows."""
    common_test: Share = 0.2
    """Of npz, images, table: share of the samples that is the common test set, where the data bring none."""
    resize: Count | None = None
    """Of tiny-imagenet, images, nodes: height and width to which images are scaled."""
    grey: bool = False
    """Of images, nodes: whether one channel is enough."""
    labels: Literal["clean", "aggre", "rand1", "rand2", "rand3", "worse"] = "clean"
    """Of cifar10: training labels, as published or as people gave them again (CIFAR-10N); test labels stay clean."""
    verify: bool = False
    """Whether the files must have the official checksums."""
    partition: Literal["iid", "dirichlet", "dirichlet-hsu", "shards", "step", "by-column"] = "dirichlet"
    """How samples are split over the clients; by-column takes the clients that the data name."""
    partition_file: str | None = None
    """A partition that `metabayfl data export` wrote, instead of a new one: who holds which training samples."""
    alpha: Annotated[float, Field(gt=0)] = 0.5
    """Concentration of the Dirichlet partitions: small is heterogeneous."""
    clients: Count = 5
    """Number of clients."""
    min_size: Count = 10
    """Fewest samples of a client."""
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of each client's training samples that is kept, per class."""
    batch_size: Count | tuple[Count, ...] = 32
    """Mini-batch size, for all clients or one number each."""
    test_fraction: Share = 0.2
    """Share of a client's samples that is its local test part."""
    unlabelled: Annotated[int, Field(ge=0)] = 0
    """Samples set aside as the unlabelled pool U."""
    unlabelled_from: str | None = None
    """Dataset that U comes from; by default the same one."""
    dev: Annotated[int, Field(ge=0)] = 0
    """Samples that no client holds, set aside for `eval.on = "dev"`."""
    augment: bool = False
    """Crop and flip training images at random (images of at least 16 x 16)."""


class CorruptOptions(Options):
    """How uncertain the clients' training data are; local test parts stay clean unless `test` is set."""

    noise_variance: Level | tuple[Level, ...] = 0.0
    """Variance of Gaussian noise on inputs, which lie in [0, 1]; for all clients or one number each."""
    noise_std: Level | tuple[Level, ...] = 0.0
    """The same as a standard deviation; one of the two is given."""
    label_flips: Chance | tuple[Chance, ...] = 0.0
    """Probability that a training label is replaced by another class; for all clients or one number each."""
    missing_features: Share | tuple[Share, ...] = 0.0
    """Share of the inputs' entries that a client does not measure, in its test part neither: they are 0."""
    test: bool = False
    """Put the noise on the local test parts too."""


class DriftOptions(Options):
    """Training data that change from round to round; d_n and the test parts stay as they are."""

    kind: Literal["none", "samples", "classes", "labels", "noise"] = "none"
    """New samples, a class mix of its own, labels that go out of date, or fresh input noise in each round."""
    amount: Annotated[float, Field(gt=0)] = 0.5
    """Share of a client's samples in a round (samples, classes), probability of a wrong label in the last round
    (labels), or variance (noise)."""


class ModelOptions(Options):
    """The network: a built-in name or `module:callable`; other keys are its options."""

    model_config = ConfigDict(extra="allow")

    name: str = "mlp"
    """linear, mlp, convnet, resnet20, resnet32, resnet44, resnet56, or module:callable."""


class SelectOptions(Options):
    """d_n, the samples of a client on which choices are made."""

    fraction: Share = 0.2
    """Share of a client's training samples."""
    held_out: bool | None = None
    """Whether d_n is left out of training; by default only for methods that choose by it."""


class EvalOptions(Options):
    """When, on what and how models are judged."""

    on: Literal["test", "dev"] = "test"
    """Test data, or the dev pool of `data.dev` for decisions: no test sample is touched then."""

    every: Count | None = None
    """Rounds between evaluations; by default ten evenly spaced rounds. The last round is always evaluated."""
    samples: Count = 10
    """Weight samples of a Bayesian prediction."""
    subset: Count | None = None
    """Use only so many samples of the common test set (always the same ones)."""
    local_subset: Count | None = None
    """Use only so many samples of each client's test part (always the same ones)."""
    on_dn: bool = False
    """Judge on d_n too, where it is held out: for tuning, for stopping in time, and to scale predictions by the
    temperature that is best there."""

    def rounds_to_evaluate(self, rounds: int) -> set[int]:
        """Rounds, counted from 1, after which models are judged."""
        if self.every is not None:
            return {*range(self.every, rounds + 1, self.every), rounds}
        return {-(-rounds * step // 10) for step in range(1, 11)}


class DeadlineOptions(Options):
    """A simulated deadline: slow clients miss a round. Simulated time, so that results do not depend on the machine."""

    seconds: Annotated[float, Field(gt=0)] | None = None
    """Simulated seconds a client has for a round; none by default."""
    step_seconds: Annotated[float, Field(gt=0)] = 0.01
    """Simulated seconds of one gradient step on a typical client."""
    spread: Annotated[float, Field(ge=0)] = 0.5
    """How much clients differ in speed: standard deviation of its logarithm."""


class Plan(Options):
    """How a run is carried out, whatever the method, the model and the data."""

    rounds: Count = 20
    """Communication rounds."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Everything random depends on it."""
    clients_per_round: Count | None = None
    """Clients invited to each round; all by default."""
    min_updates: Count = 1
    """Fewest good updates that make a round; with fewer the run stops."""
    average: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of each round in an average of the global model over rounds, which is judged and written beside the last
    one (A/G, averaged.safetensors); 0 is none."""
    keep_personal: bool = True
    """Whether each client's own model is kept for evaluation and prediction."""
    select: SelectOptions = SelectOptions()
    eval: EvalOptions = EvalOptions()
    deadline: DeadlineOptions = DeadlineOptions()


class RunConfig(Plan):
    """One method, one seed."""

    method: dict[str, Any] = Field(default_factory=lambda: {"name": "bayfl"})
    """`name` and the fields of the method; `metabayfl methods NAME` lists them."""
    data: DataOptions = DataOptions()
    corrupt: CorruptOptions = CorruptOptions()
    drift: DriftOptions = DriftOptions()
    model: ModelOptions = ModelOptions()

    def plan(self) -> Plan:
        """Return the part that does not depend on method, model and data."""
        return Plan(**{name: getattr(self, name) for name in Plan.model_fields})


class CompareConfig(RunConfig):
    """Several methods on the same data, model and plan."""

    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """A section for each label: its method's `name` (by default the label), fields, and `model` options."""

    def with_method(self, method: Mapping[str, Any], model: Mapping[str, Any], seed: int) -> RunConfig:
        """Return the config of one run."""
        shared = {name: getattr(self, name) for name in RunConfig.model_fields}
        own = {"method": dict(method), "model": self.model.model_dump() | dict(model), "seed": seed}
        return RunConfig(**(shared | own))


def read(path: Path, changes: Iterable[str] = ()) -> RunConfig:
    """Read the config of one run; [methods] sections, which are for comparisons, are left out."""
    values = read_values(path, changes)
    values.pop("methods", None)
    return RunConfig(**values)


def read_comparison(path: Path, changes: Iterable[str] = ()) -> CompareConfig:
    """Read the config of a comparison."""
    return CompareConfig(**read_values(path, changes))


def read_values(path: Path, changes: Iterable[str] = ()) -> dict[str, Any]:
    """Read a TOML file, on top of those that it extends, and apply `key=value` changes."""
    values = _read_on_top(path, ())
    for change in changes:
        apply(values, change)
    return values


def _read_on_top(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    """Read a file and the one that it extends; its own [methods] sections say which of them there are."""
    if path.resolve() in above:
        raise InputError(f"{path} extends itself, over {len(above)} files: a chain with an end is accepted")
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        whose = f", which {above[-1].name} extends" if above else ""
        raise InputError(f"cannot read config {path}{whose}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from None
    below = values.pop("extends", None)
    if below is None:
        return values
    if not isinstance(below, str):
        raise InputError(f"extends = {below!r}: the name of a TOML file beside {path.name} is accepted")
    merged = _merge(_read_on_top(path.parent / below, (*above, path.resolve())), values)
    if isinstance(own := values.get("methods"), dict):
        merged["methods"] = {label: merged["methods"][label] for label in own}
    return merged


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Put values over others; sections that both have are merged."""
    merged = dict(below)
    for key, value in above.items():
        are_sections = isinstance(value, dict) and isinstance(below.get(key), dict)
        merged[key] = _merge(below[key], value) if are_sections else value
    return merged


def apply(values: dict[str, Any], change: str) -> None:
    """Set one `section.key=value`; the value is read as TOML, or as a plain string."""
    key, equals, text = change.partition("=")
    *sections, last = (part.strip() for part in key.split("."))
    if not equals or not all((*sections, last)):
        raise InputError(f"--set {change!r}: key=value is accepted, such as method.rate=0.01")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise InputError(f"--set {change!r}: {section} is a value, not a section")
    values[last] = parse_value(text.strip())


def parse_value(text: str) -> Any:
    """Read a value as TOML, or as a plain string."""
    try:
        values = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return values["value"] if len(values) == 1 else text


def as_toml(config: RunConfig) -> dict[str, Any]:
    """Return plain values that TOML can hold; what is not set is left out."""
    return _plain(config.model_dump())


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _plain(value) if isinstance(value, Mapping) else list(value) if isinstance(value, tuple) else value
        for key, value in values.items()
        if value is not None
    }
