"""Starts an HTTP server for the folder of a run or an export."""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from kge_torchrec.answers.output import names_by_label
from kge_torchrec.config import ConfigError
from kge_torchrec.config.checks import at_least
from kge_torchrec.errors import KGEError
from kge_torchrec.export.description import is_export
from kge_torchrec.export.plain_model import load_model
from kge_torchrec.trained_model import TrainedModel
from kge_torchrec.trained_run import open_run

if TYPE_CHECKING:  # needs the packages of the extra
    from kge_torchrec.serving.batching import Answerer

LOCAL = ("localhost", "127.0.0.1", "::1")
ALL_ADDRESSES = ("0.0.0.0", "::", "")


def opened_model(path: str | Path) -> TrainedModel:
    """Open the model of an export, or of a run (its best checkpoint and its data), to answer."""
    if is_export(Path(path)):
        return load_model(path)
    with closing(open_run(path)) as run:  # one process answers without a process group
        model = run.model
        model.candidates("seen")  # the default of recommendations
        return model


def reload(answerer: Answerer, path: str | Path, tell: Callable[[str], object]) -> None:
    """Replace the served model by what the folder holds now; keep it if that cannot be opened."""
    try:
        answerer.replace(opened_model(path))
        tell(f"reloaded {path}")
    except Exception as error:
        answerer.problem = f"{path} was not reloaded: {error}"
        tell(f"{answerer.problem}; the model before is still served")


def serve(
    path: str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    max_k: int = 1000,
    tell: Callable[[str], object] = print,
    allow_hosts: Sequence[str] = (),
    names: str | Path | None = None,
) -> None:
    """Answer queries with a run or an export over HTTP until interrupted.

    The server has no authentication: every client that can connect can send queries. SIGHUP opens
    the folder again and serves what it holds then; no request is dropped meanwhile.

    Args:
        path: The folder of a run or an export.
        host: The address to listen on; 0.0.0.0 is every address of this machine.
        port: The port; 0 chooses a free one.
        max_k: The most answers per request.
        tell: Called with the address of the server once it accepts connections.
        allow_hosts: More names that a request's Host header may contain, in addition to ``host``,
            localhost, 127.0.0.1 and ::1. "*" allows all.
        names: A file of labels and readable names, which replies have beside the labels.

    Raises:
        KGEError: The folder, an option or a file is not usable, or a package is not installed.
        OSError: The server cannot listen on the address.
    """
    try:
        import uvicorn

        from kge_torchrec.serving.app import create_app
        from kge_torchrec.serving.slow_clients import TimedProtocol
    except ModuleNotFoundError as error:
        raise KGEError(
            f"the server needs FastAPI, uvicorn and a client of Prometheus ({error}); install them "
            "by `pip install -e '.[serve]'`"
        ) from error
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("serve runs as one process; start it without torchrun")
    at_least("max_k", max_k, 1)
    hosts = [host, *LOCAL, *allow_hosts]
    named = {} if names is None else names_by_label(names)
    with listening(host, port) as listener:
        app = create_app(opened_model(path), Path(path).absolute().name, max_k, hosts, named)
        settings = uvicorn.Config(
            app, http=TimedProtocol, ws="none", timeout_graceful_shutdown=20,
            log_level="warning", access_log=False,
        )  # fmt: skip
        if host in ALL_ADDRESSES and not allow_hosts:
            tell(
                f"the server accepts requests for {', '.join(LOCAL)} only; --allow-host adds names"
            )
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # often 1,024 at first
        work = partial(reload, app.state.answerer, path, tell)
        signal.signal(signal.SIGHUP, lambda *_: Thread(target=work).start())
        at = f"[{host}]" if ":" in host else host
        tell(f"serving {path} at http://{at}:{listener.getsockname()[1]} (Ctrl-C ends it)")
        try:
            uvicorn.Server(settings).run(sockets=[listener])
        except KeyboardInterrupt:  # uvicorn re-raises the signal after its shutdown
            return


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Open a listening socket, before the model is loaded."""
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"port must lie in [0, 65535], got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=256)
    except OSError as error:
        raise OSError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from error
    with listener:
        # asyncio sets TCP_NODELAY only on sockets that it creates. Without it, a reply can wait
        # 40 ms for the client to acknowledge its first part.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener
