"""What `flwr run` starts: an app for the server and one for each node; both only unpack, call and pack."""

from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from metabayfl.config import read
from metabayfl.engine.flower.carrier import GridCarrier, Waits, pack, unpack
from metabayfl.options import Options
from metabayfl.remote.node import NodeOptions, answer
from metabayfl.remote.server import carry_out
from metabayfl.tensorfile import write_bytes

server = ServerApp()
client = ClientApp()


class ServerOptions(Options):
    """What the server's app is told by `flwr run`."""

    config: str
    """TOML file of the run."""
    out: str
    """Run directory."""
    own: str = ""
    """The server's npz file: test_x and test_y, unlabelled."""
    report: str = ""
    """File for the reason, should the run fail."""
    resume: bool = False
    waits: Waits = Waits()


def options_from(values: dict[str, Any]) -> dict[str, Any]:
    """Return Flower's flat keys, which have dashes, as our names."""
    return {key.replace("-", "_"): value for key, value in values.items()}


@server.main()
def serve(grid: Grid, context: Context) -> None:
    """Carry out a run."""
    flat = options_from(dict(context.run_config))
    waits = Waits(**{name: flat.pop(name) for name in Waits.model_fields if name in flat})
    options = ServerOptions(**flat, waits=waits)
    try:
        carry_out(
            read(Path(options.config)),
            Path(options.out),
            lambda hello: GridCarrier(grid, hello, options.waits),
            own=Path(options.own) if options.own else None,
            resume=options.resume,
        )
    except Exception as error:
        if options.report:
            write_bytes(Path(options.report), f"{type(error).__name__}\n{error}".encode())
        raise


@client.query("describe")
def introduce(message: Message, context: Context) -> Message:
    """Say who this is and how many samples it has."""
    return respond(message, context)


@client.train("take_part")
def respond(message: Message, context: Context) -> Message:
    """Do what is asked; data and state stay where they are."""
    options = NodeOptions(**options_from(dict(context.node_config)))
    return Message(pack(answer(unpack(message.content), options)), reply_to=message)
