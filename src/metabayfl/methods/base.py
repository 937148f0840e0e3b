"""The hooks of a method. Their defaults are FedAvg; a method overrides the one or two that differ."""

from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from metabayfl import aggregate
from metabayfl.inputs import Scaling
from metabayfl.inspection import Bayesian
from metabayfl.likelihood import Likelihood
from metabayfl.methods.needs import Need
from metabayfl.optim import Objective, Optimiser, OptimiserName, PointLoss, Rate, descend, make_optimiser, rate_at
from metabayfl.options import Options
from metabayfl.placed import PARTS, BatchNormPolicy
from metabayfl.task import Task
from metabayfl.types import Context, Fit, Params, Received, TrainData, Update

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class Method(Options):
    """A federated method: its fields are its hyper-parameters, its hooks are pure functions of their arguments."""

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    """Where the method comes from."""
    is_personal: ClassVar[bool] = False
    """Whether the client's own model is the method's headline."""
    selects: ClassVar[bool] = False
    """Whether fitting needs d_n."""
    exchanges: ClassVar[bool] = True
    """Whether a round is an exchange of messages; without one there are no bytes to count."""
    pools: ClassVar[bool] = False
    """Whether all training data are put into one place first; tests remain with the clients."""
    floats_up: ClassVar[float | None] = 1.0
    """Numbers that a client sends in a round, as a multiple of the network's, at the default options; None where it is
    the size of U that decides."""
    floats_down: ClassVar[float | None] = 1.0
    """Numbers that a client receives."""
    passes: ClassVar[float | None] = 1.0
    """Gradients that a client computes in a round, as a multiple of FedAvg's, at the default options."""

    rate: Rate = 1e-3
    """Learning rate: a number, or a schedule over rounds k of K: 'a/sqrt(K)', 'a/k', 'a/sqrt(k)'."""
    epochs: Count = 5
    """Local epochs per round."""
    optimiser: OptimiserName = "adam"
    """Local optimiser, fresh in every round."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of sgd."""
    weight_decay: NotNegative = 0.0
    """L2 penalty on the trained values, added to the gradient."""
    weighting: Literal["samples", "uniform"] = "samples"
    """How much a client counts in the average."""
    batchnorm: BatchNormPolicy = "average"
    """BatchNorm scale, shift and statistics: averaged like everything else, or local (never sent)."""

    @property
    def holds_out(self) -> bool:
        """Whether d_n is left out of training unless the plan says otherwise."""
        return self.selects

    @property
    def leaks(self) -> bool:
        """Whether fitting sees test data; such a run is marked, and no comparison takes it for a result."""
        return False

    @property
    def bayesian_layers(self) -> Bayesian:
        """Which layers have a posterior."""
        return "none"

    @property
    def deterministic_names(self) -> Sequence[str]:
        """Patterns of parameters that stay deterministic."""
        return ()

    @property
    def needs(self) -> frozenset[Need]:
        """What it cannot do without, beyond a model and training data."""
        return frozenset()

    def init_server(self, ctx: Context) -> Params:
        """Return the state of the server before the first round."""
        return ctx.task.split(self.init_model(ctx))[0]

    def init_model(self, ctx: Context) -> Params:
        """Return the model before the first round."""
        return ctx.task.initial()

    def init_client(self, ctx: Context) -> Params:
        """Return the private state of a client before its first round; it never leaves the client."""
        return {}

    def broadcast(self, server: Params, ctx: Context) -> Params:
        """Return what a client receives."""
        return server

    def fit(self, down: Params, state: Params, data: TrainData, ctx: Context) -> Fit:
        """Take part in a round."""
        model, metrics = self.train(ctx.task.join(down, state), data, ctx)
        return self.leave(model, metrics, data, ctx)

    def leave(self, model: Params, metrics: dict[str, float], data: TrainData, ctx: Context) -> Fit:
        """Return what a client leaves: what of its model is sent, what stays with it, and the model."""
        shared, private = ctx.task.split(model)
        return Fit(Update(shared, self.weight_of(data), metrics), private, model)

    def weight_of(self, data: TrainData) -> float:
        """Return how much a client counts in the average."""
        return float(len(data)) if self.weighting == "samples" else 1.0

    def train(self, model: Params, data: TrainData, ctx: Context) -> tuple[Params, dict[str, float]]:
        """Train a model on the client's data; the metrics go to the server with the update."""
        return self.minimise(self.objective(model, data, ctx), data, ctx)

    def minimise(self, objective: Objective, data: TrainData, ctx: Context) -> tuple[Params, dict[str, float]]:
        """Train on an objective; returns the model where it ends, and metrics."""
        metrics = self.descend(objective, data, ctx)
        return objective.model(), metrics | objective.metrics()

    def objective(self, model: Params, data: TrainData, ctx: Context) -> Objective:
        """Return the loss that is trained, starting at a model."""
        return PointLoss(ctx.task, model, self.offset(data, ctx))

    def offset(self, data: TrainData, ctx: Context) -> Tensor | None:
        """Return what a client adds to the network's outputs; None is nothing."""
        return None

    def descend(self, objective: Objective, data: TrainData, ctx: Context) -> dict[str, float]:
        """Run the local epochs on an objective; the NLL reported is the mean of the last epoch."""
        rate = rate_at(self.rate, ctx.round, ctx.rounds)
        trace = descend(objective, self.make_optimiser(objective), self.batches(data, ctx), rate)
        return {"nll": trace.last(data.steps_per_epoch()), "rate": rate, "steps": len(trace.nll)}

    def batches(self, data: TrainData, ctx: Context) -> Iterable[tuple[Tensor, Tensor]]:
        """Return the mini-batches of a round, one for each step."""
        return data.batches(self.epochs, ctx.rng("batches"))

    def make_optimiser(self, objective: Objective) -> Optimiser:
        """Return a fresh optimiser of an objective."""
        return make_optimiser(self.optimiser, objective.groups, self.weight_decay, self.momentum)

    def payload_like(self, server: Params, ctx: Context) -> Params:
        """Return tensors of the names, shapes and types that a payload must have."""
        return server

    def aggregate(self, server: Params, updates: Sequence[Received], ctx: Context) -> Params:
        """Return the next state of the server; updates come in the order of the client ids."""
        return aggregate.mean(updates)

    def global_model(self, server: Params, ctx: Context) -> Params | None:
        """Return the model to judge on everybody's data; None where the method has none."""
        return None if ctx.task.has_private_part else model_of(server)

    def received_model(self, down: Params, state: Params, ctx: Context) -> Params | None:
        """Return the global model as a client has it; None where the method has none."""
        return ctx.task.join(down, state)

    def personalise(
        self, down: Params, state: Params, personal: Params | None, data: TrainData, ctx: Context
    ) -> Params:
        """Return the client's own model: what its last fit left, or what it receives if it never took part."""
        return ctx.task.join(down, state) if personal is None else personal

    def predict(self, model: Params, x: Tensor, samples: int, ctx: Context) -> Tensor:
        """Outputs [samples, batch, outputs]; a plain network has one sample."""
        ctx.task.load(model)
        return ctx.task.outputs(x).unsqueeze(0)


def model_of(state: Params) -> Params:
    """Return the model in a state that may hold more."""
    return {name: state[name] for name in PARTS if name in state}


def put(model: Params, name: str) -> Params:
    """Return a model under names of its own, so that a state can hold several."""
    return {f"{name}.{part}": tensor for part, tensor in model.items()}


def get(state: Params, name: str) -> Params:
    """Undo `put`; empty if there is no such model."""
    start = f"{name}."
    return {key.removeprefix(start): tensor for key, tensor in state.items() if key.startswith(start)}


def make_task(
    method: Method,
    module: nn.Module,
    likelihood: Likelihood,
    channels_last: bool | None = None,
    scaling: Scaling | None = None,
) -> Task:
    """Lay a module out as a method needs it."""
    return Task(
        module,
        likelihood,
        bayesian=method.bayesian_layers,
        deterministic=method.deterministic_names,
        batchnorm=method.batchnorm,
        channels_last=channels_last,
        scaling=scaling,
    )
