"""Small real fits that are counted: operations, bytes of an update, memory."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from metabayfl.engine.client import keyed
from metabayfl.engine.plan import Job
from metabayfl.methods.base import make_task
from metabayfl.tensorfile import encoded_size
from metabayfl.types import Fit, Params, TrainData

SMALL_BATCH = 4


class Probe:
    """Runs a method's real hooks of the first round on a few samples of the largest client."""

    def __init__(self, job: Job) -> None:
        self.job, self.client = job, max(job.train_sizes, key=job.train_sizes.__getitem__)
        self.batch = min(int(job.federation.batch_sizes[self.client]), job.train_sizes[self.client])
        self.small = min(self.batch, SMALL_BATCH)
        with keyed(job.context(0), "init_server"):
            self.server = job.method.init_server(job.context(0))

    def received(self, client: int) -> Params:
        """Return what a client receives."""
        ctx = self.job.context(0, client)
        with keyed(ctx, "broadcast"):
            return self.job.method.broadcast(self.server, ctx)

    def fit(self, job: Job, data: TrainData) -> Fit:
        """Let the client take part in the first round."""
        ctx = job.context(0, self.client)
        down = {name: tensor.clone() for name, tensor in self.received(self.client).items()}
        with keyed(ctx, "init_client"):
            state = job.method.init_client(ctx)
        with keyed(ctx, "fit"):
            return job.method.fit(down, state, data, ctx)

    def data(self, batch: int, batches: int = 1, select_batches: int = 1) -> TrainData:
        """Return so many batches of the client's data and of its d_n; rows are repeated if there are too few."""
        whole = self.job.train_data(self.client, 0)
        rows = torch.arange(batches * batch) % len(whole)
        select = torch.arange(select_batches * batch if len(whole.select_x) else 0) % max(1, len(whole.select_x))
        return TrainData(whole.x[rows], whole.y[rows], whole.select_x[select], whole.select_y[select], batch)

    def bytes_down(self, client: int) -> int:
        """Size of what a client receives."""
        return encoded_size(self.received(client)) if self.job.method.exchanges else 0

    def bytes_up(self) -> int:
        """Size of a real update; the digits of its metrics may make a few bytes of difference."""
        if not self.job.method.exchanges:
            return 0
        payload, weight, metrics = self.fit(self.job, self.data(self.small)).update
        return encoded_size(payload, {"weight": weight, "metrics": metrics})

    def flops(self) -> list[float]:
        """Operations of each client: a constant, a part for each training sample, a part for each sample of d_n."""
        one, longer, selecting = self.count(1, 1), self.count(2, 1), self.count(1, 2)
        selects = self.job.federation.select_sizes.tolist()
        sizes = [(samples, selects[client]) for client, samples in self.job.train_sizes.items()]
        more = [(samples / self.batch - 1, select / self.batch - 1) for samples, select in sizes]
        return [max(0.0, one + train * (longer - one) + select * (selecting - one)) for train, select in more]

    def count(self, batches: int, select_batches: int) -> float:
        """Count the operations of a fit with so many batches, on small ones, and scale them up."""
        with countable(self.job.task.module), FlopCounterMode(display=False) as counter:
            self.fit(self.job, self.data(self.small, batches, select_batches))
        return float(counter.get_total_flops()) * self.batch / self.small

    def peak_memory_bytes(self, model: nn.Module) -> int:
        """Most bytes alive while a client lays the model out, receives it and fits real batches, and all its data."""
        data, whole = self.data(self.batch), self.job.federation.client(self.client)
        with LiveBytes(ignored=(data.x, data.y, data.select_x, data.select_y)) as live:
            here = self.job.task
            task = make_task(self.job.method, model, here.likelihood, here.channels_last, here.scaling)
            self.fit(replace(self.job, task=task), data)
        return int(live.peak + whole.x.nbytes + whole.y.nbytes)


@contextmanager
def countable(module: nn.Module) -> Iterator[None]:
    """Keep PyTorch from fused kernels that FlopCounterMode does not know: attention, encoder layers, LSTM."""
    fast, has_lstm = torch.backends.mha.get_fastpath_enabled(), any(isinstance(m, nn.LSTM) for m in module.modules())
    same = {"deterministic": None, "allow_tf32": None, "fp32_precision": None}
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=not has_lstm, **same):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows the memory of what operations return; what a kernel needs inside and lets go is not seen."""

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self.alive = {tensor.untyped_storage().data_ptr(): 0 for tensor in ignored}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry out an operation and take note of what it returns, by address, until it is freed."""
        result = func(*args, **(kwargs or {}))
        for storage in (leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
            if (address := storage.data_ptr()) not in self.alive:
                self.alive[address] = storage.nbytes()
                self.peak = max(self.peak, sum(self.alive.values()))
                weakref.finalize(storage, self.alive.pop, address)
        return result
