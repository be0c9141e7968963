"""From the folder of a run or an export to a server that listens."""

from __future__ import annotations

import copy
import logging
import math
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from kge_torchrec.answers.model import AnsweringModel
from kge_torchrec.config import ConfigError
from kge_torchrec.errors import KGEError
from kge_torchrec.export.description import is_export
from kge_torchrec.export.plain_model import load_model
from kge_torchrec.trained_run import open_run

LOCAL = ("localhost", "127.0.0.1", "::1")
ANY_ADDRESS = ("0.0.0.0", "::", "")
RECORDS = 20  # of the log, per minute
LONGEST = 4000  # characters of a record


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
    allow_hosts: Sequence[str] = (),
    max_connections: int | None = None,
    timeout: float = 20.0,
    access_log: bool = False,
) -> None:
    """Answers questions about a run or an export over HTTP until it is interrupted.

    host: the address to listen at; 0.0.0.0 is every one of this machine, for whoever reaches it.
    port: 0 takes a free one.  max_k: answers of one request; max_body: bytes of its body.
    tell: gets the address once it can be asked.
    allow_hosts: further names for this machine that a request's Host header may hold, besides
    ``host`` and those of the machine itself; "*" allows every one.
    max_connections: open ones (default: 1,000, or half the open files that the process may have).
    timeout: seconds in which a request must have arrived, and in which a reply must be read.
    access_log: whether every request gets a line on standard output.

    Whoever reaches it may ask: it checks no names and passwords.  Raises ConfigError,
    CheckpointError or ExportError, KGEError where FastAPI and uvicorn are not installed, and
    OSError if it cannot listen there.
    """
    try:
        import uvicorn

        from kge_torchrec.serving.app import Limits, create_app
        from kge_torchrec.serving.connections import Connections
    except ModuleNotFoundError as error:
        raise KGEError(
            f"the server needs FastAPI and uvicorn ({error}); install them by "
            "`pip install 'kge-torchrec[serve]'`"
        ) from error
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("serve is one process; start it without torchrun")
    limits = Limits(k=max_k, body=max_body)
    connections = Connections(max_connections, timeout)
    hosts = [host, *LOCAL, *allow_hosts]
    with listening(host, port) as listener, opened_model(path) as model:
        app = create_app(model, Path(path).resolve().name, limits, hosts, connections)
        settings = uvicorn.Config(
            app,
            http=connections.protocol(),
            ws="none",
            backlog=connections.backlog,
            timeout_graceful_shutdown=math.ceil(timeout),
            log_config=log_config(),
            access_log=access_log,
        )
        if host in ANY_ADDRESS and not allow_hosts:
            tell(f"it answers for the hosts {', '.join(LOCAL)} alone; --allow-host adds names")
        at = f"[{host}]" if ":" in host else host
        tell(f"serving {path} at http://{at}:{listener.getsockname()[1]} (Ctrl-C ends it)")
        try:
            uvicorn.Server(settings).run(sockets=[listener])
        except KeyboardInterrupt:  # uvicorn has ended, and passes the signal on
            return


def log_config() -> dict[str, Any]:
    """Return uvicorn's own settings of the log, with warnings and errors capped."""
    from uvicorn.config import LOGGING_CONFIG

    config = copy.deepcopy(LOGGING_CONFIG)
    config["filters"] = {"capped": {"()": CappedLog}}
    for name in ("uvicorn.error", "asyncio", "kge_torchrec.serving.batching"):
        config["loggers"][name] = {"level": "WARNING", "filters": ["capped"]}
    return config


class CappedLog(logging.Filter):
    """Drops records after the first few of each minute, so that no client can fill a disk.

    The records that pass hold no control characters, which a terminal might obey.
    """

    def __init__(self) -> None:
        super().__init__()
        self._began, self._records = time.monotonic(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        from kge_torchrec.serving.middleware import printable

        now = time.monotonic()
        if now - self._began >= 60:
            self._began, self._records = now, 0
        self._records += 1
        if self._records > RECORDS:
            return False
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + "".join(traceback.format_exception(*record.exc_info))
        if len(text) > LONGEST:  # the end of a traceback says what happened
            text = f"{text[:200]} ... {text[-LONGEST:]}"
        if self._records == RECORDS:
            text += "\n(the log leaves out what follows in this minute)"
        record.msg, record.args, record.exc_info = printable(text), (), None
        record.__dict__.pop("color_message", None)
        return True


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens, before anything is loaded.

    Raises ConfigError for a port that there is not, OSError if the address is taken or not ours.
    """
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"port must lie in [0, 65535], got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        raise OSError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from error
    with listener:
        # asyncio sets it only where it made the socket; without it an answer waits 40 ms for the
        # client to confirm the part before it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener
