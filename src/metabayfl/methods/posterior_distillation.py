"""Meta-BayFL's optional step on U (ours, after FedBE): the server distils posteriors into one. docs/methods.md 3.7."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pydantic import ValidationInfo, field_validator
from torch import Tensor

from metabayfl.distillation import mean_probabilities, sharpen
from metabayfl.gaussian import Elbo, as_prior
from metabayfl.methods.base import Count
from metabayfl.methods.bayfl import BayFL
from metabayfl.methods.pool_distillation import PoolDistillation, unlabelled
from metabayfl.types import Context, Params, Received


class PosteriorDistillation(PoolDistillation, BayFL):
    """A Bayesian method whose server may distil the predictions of all posteriors on U into the averaged one."""

    server_distill: bool = False
    """Distil on U after averaging; everything named distil_..., and teacher_draws, temperature, averaged, is for it."""
    teacher_draws: Count = 2
    """Weight samples of each posterior, the averaged one and the clients', that answer."""

    @field_validator("server_distill")
    @classmethod
    def _whole_models(cls, server_distill: bool, others: ValidationInfo) -> bool:
        """Refuse to predict with a part of a model."""
        if server_distill and others.data.get("batchnorm") == "local":
            raise ValueError("the server needs whole models: batchnorm = 'average' is accepted")
        return server_distill

    @property
    def distils(self) -> bool:
        """Whether the server does."""
        return self.server_distill

    def aggregate(self, server: Params, updates: Sequence[Received], ctx: Context) -> Params:
        """Average; then minimise E_q CE(answer, theta) + c KL(q || average) on U, c = kl_weight / samples of U."""
        mean = super().aggregate(server, updates, ctx)
        if not self.server_distill:
            return mean
        x = unlabelled(self.name, ctx)
        answer = sharpen(mean_probabilities(self.predictions(mean, updates, x, ctx)), self.temperature)
        noise, scale = ctx.rng("distil noise"), self.kl_weight / len(x)
        return self.distil(Elbo(ctx.task, mean, as_prior(mean), scale, noise, self.rho_factor(scale)), x, answer, ctx)

    def predictions(self, mean: Params, updates: Sequence[Received], x: Tensor, ctx: Context) -> Iterator[Tensor]:
        """Return the outputs of weight samples of the average and of each client's posterior."""
        yield from self.predict(mean, x, self.teacher_draws, ctx)
        for number, update in enumerate(updates, 1):
            yield from self.predict(update.payload, x, self.teacher_draws, replace(ctx, part=number))
