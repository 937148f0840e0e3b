"""A node: it holds one client's data, state and own model, and answers requests; asked twice, it repeats."""

import fcntl
import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field

from metabayfl import tensorfile
from metabayfl._version import __version__
from metabayfl.config import RunConfig
from metabayfl.data.federation import ClientData
from metabayfl.engine.client import Desk, Receipt, describe
from metabayfl.engine.plan import Job
from metabayfl.engine.process import keep_heap, one_thread
from metabayfl.environment import data_hash
from metabayfl.experiment import build_model
from metabayfl.methods import create
from metabayfl.methods.base import make_task
from metabayfl.options import InputError, Options
from metabayfl.records import ClientRecord
from metabayfl.remote.data import Traits, alone, introduce, own_data
from metabayfl.remote.wire import (
    COSTS,
    Reply,
    Request,
    Views,
    decode_request,
    encode_introduction,
    encode_reply,
    key_of,
)
from metabayfl.result import likelihood_from
from metabayfl.spool import Address
from metabayfl.store import RunDirectory
from metabayfl.types import Context, Params, Update


class NodeOptions(Options):
    """What a node is told where it stands; it never comes over the network."""

    client_id: Annotated[int, Field(ge=0)]
    """Which client this is, from 0; the same after a restart."""
    state: str
    """Directory for private states and the client's own models."""
    data: str = ""
    """The client's samples, for runs with data.name = "nodes": an npz, csv or parquet file, or a folder of images."""


def answer(content: bytes, options: NodeOptions) -> bytes:
    """Carry out a request; a request that was carried out before is answered from the disk."""
    request, down = decode_request(content)
    if request.version != __version__:
        raise InputError(f"this node has metabayfl {__version__}, the server {request.version}: install the same")
    config = RunConfig(**tomllib.loads(request.config))
    data, traits = own_data(config, options.client_id, Path(options.data) if options.data else None)
    if "describe" in request.do:
        return encode_introduction(introduce(options.client_id, data))
    directory = RunDirectory(Path(options.state, request.experiment))
    directory.spool.path.mkdir(parents=True, exist_ok=True)
    keep_heap()
    with one_thread(), _alone_in(directory.path):
        desk = NodeDesk(make_node_job(request, config, options.client_id, data, traits), directory, down, request)
        return encode_reply(desk.carry_out(options.client_id))


def make_node_job(request: Request, config: RunConfig, client: int, data: ClientData, traits: Traits) -> Job:
    """Build the method and the model of a run around one client's data."""
    method, likelihood = create(config.method), likelihood_from(request.likelihood)
    model = build_model(config, likelihood, request.input_shape)
    task = make_task(method, model, likelihood, request.channels_last, traits["scaling"])
    if tensorfile.checksum(task.constants()) != request.constants:
        raise InputError("the frozen parameters that this node builds are not the server's: same model, same files?")
    sizes = dict(enumerate(request.sizes))
    return Job(method, task, alone(client, data, len(sizes), likelihood, traits), config.plan(), sizes)


class NodeDesk(Desk):
    """A desk for one client whose broadcast came by message and whose records lie on the node."""

    def __init__(self, job: Job, directory: RunDirectory, down: Params, request: Request) -> None:
        super().__init__(job, directory)
        self.down, self.request = down, request
        self.origin = {"request": key_of(request, down)}

    def carry_out(self, client: int) -> Reply:
        """Do what is asked, in order; what fails is told, and the rest is done."""
        self._check_data(client)
        scores, update, cost = None, None, {}
        failures: dict[str, str] = {}
        if "score" in self.request.do or "export" in self.request.do:
            try:
                scores = self._judge(client)
            except Exception as error:  # as in `fit`: a stranger's model may raise anything
                failures["score"] = describe(error)
        if "fit" in self.request.do:
            receipt = self._fit_once(client)
            failures |= {"fit": receipt.failure} if receipt.failure else {}
            if receipt.address is not None:
                record = self.directory.read_client(receipt.address)
                update = Update(record.payload, record.weight, record.metrics)
                cost = {name: value for name, value in (record.cost | receipt.cost).items() if name in COSTS}
        return Reply(client, self.request.round, update, scores, cost, failures)

    def _judge(self, client: int) -> Views | None:
        if "export" in self.request.do:
            self.export_personal(client, self.request.round)
        if "score" not in self.request.do:
            return None
        return self.score_client(client, self.request.round).views

    def _fit_once(self, client: int) -> Receipt:
        """Take part in a round, unless the very same request has been carried out: then its record is there."""
        done = self._find(self.origin["request"])
        if done is not None:
            return Receipt(client, {}, address=done)
        receipt = self.fit(client, self.request.round)
        os.sync()
        self._forget()
        return receipt

    def averaged(self, round_: int) -> Params:
        """Return nothing: the server keeps that model and judges it on the common test set."""
        return {}

    def _receive(self, ctx: Context) -> tuple[Params, ClientRecord | None]:
        """Return what came with the request, as copies, and the record that the server says was the last to count."""
        down = {name: tensor.clone() for name, tensor in self.down.items()}
        if not self.request.latest:
            return down, None
        found = self._find(self.request.latest)
        if found is None:
            raise InputError(f"client {ctx.client} has lost its state: no whole record of it in {self.directory.path}")
        return down, self.directory.read_client(found)

    def _find(self, key: str) -> Address | None:
        """Return where the whole record of a request lies."""
        for round_ in self.directory.spool.rounds():
            for address, _ in self.directory.spool.scan(round_):
                with suppress(InputError):  # a damaged record is as good as none
                    if self.directory.read_client(address).meta.get("request") == key:
                        return address
        return None

    def _forget(self) -> None:
        """Remove records that the server will never ask for again."""
        needed = [round_ for round_ in self.directory.spool.rounds() if round_ >= self.request.oldest]
        kept = [address.segment for round_ in needed for address, _ in self.directory.spool.scan(round_)]
        self.directory.spool.forget_all_but(kept)

    def _check_data(self, client: int) -> None:
        """Refuse to go on with other data than those the run began with."""
        about = {"client": client, "data_hash": data_hash(self.job.federation)}
        if not (self.directory.path / "node.json").exists():
            self.directory.write_json("node.json", about)
        if self.directory.read_json("node.json") != about:
            raise InputError(f"{self.directory.path} belongs to another client or to other data")


@contextmanager
def _alone_in(path: Path) -> Iterator[None]:
    """Let one process at a time work on a client's state; another waits, and then finds the work done."""
    handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
