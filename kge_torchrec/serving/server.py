"""From the folder of a run or an export to a server that listens."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from kge_torchrec.answers.model import AnsweringModel
from kge_torchrec.config import ConfigError
from kge_torchrec.errors import KGEError
from kge_torchrec.export.description import is_export
from kge_torchrec.export.plain_model import load_model
from kge_torchrec.trained_run import open_run


@contextmanager
def opened_model(path: str | Path) -> Iterator[AnsweringModel]:
    """What a run (its best checkpoint, with its data) or an export answers from.

    Raises ConfigError, CheckpointError or ExportError.
    """
    if is_export(Path(path)):
        yield load_model(path).answering_model()
        return
    with closing(open_run(path)) as run:
        yield run.answering_model()


def serve(
    path: str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    max_k: int = 1000,
    max_body: int = 1 << 20,
    tell: Callable[[str], object] = print,
) -> None:
    """Answers questions about a run or an export over HTTP until it is interrupted.

    host: the address to listen at; 0.0.0.0 is every one of this machine, for whoever reaches it.
    port: 0 takes a free one.  max_k: answers of one request; max_body: bytes of its body.
    tell: gets the address once it can be asked.

    Whoever reaches it may ask: it checks no names and passwords.  Raises ConfigError,
    CheckpointError or ExportError, KGEError where FastAPI and uvicorn are not installed, and
    OSError if it cannot listen there.
    """
    try:
        import uvicorn

        from kge_torchrec.serving.app import Limits, create_app
    except ModuleNotFoundError as error:
        raise KGEError(
            f"the server needs FastAPI and uvicorn ({error}); install them by "
            "`pip install 'kge-torchrec[serve]'`"
        ) from error
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("serve is one process; start it without torchrun")
    limits = Limits(k=max_k, body=max_body)
    with listening(host, port) as listener, opened_model(path) as model:
        app = create_app(model, Path(path).resolve().name, limits)
        settings = uvicorn.Config(app, log_level="warning", access_log=False)
        at = f"[{host}]" if ":" in host else host
        tell(f"serving {path} at http://{at}:{listener.getsockname()[1]} (Ctrl-C ends it)")
        try:
            uvicorn.Server(settings).run(sockets=[listener])
        except KeyboardInterrupt:  # uvicorn has ended, and passes the signal on
            return


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens, before anything is loaded.

    Raises ConfigError for a port that there is not, OSError if the address is taken or not ours.
    """
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"port must lie in [0, 65535], got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise OSError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from error
    with listener:
        # asyncio sets it only where it made the socket; without it an answer waits 40 ms for the
        # client to confirm the part before it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener
