"""Effects of a config, in parts that are cheap to compare, for the test of every key."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from dataclasses import fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from training_runs import random_triples, tiny_store

from kge_torchrec import api
from kge_torchrec.config import Config
from kge_torchrec.data.prepare import extend_store, prepare
from kge_torchrec.distributed import dense
from kge_torchrec.distributed.processes import Processes
from kge_torchrec.embeddings import torchrec
from kge_torchrec.embeddings.handrolled import HandrolledBackend
from kge_torchrec.errors import KGEError
from kge_torchrec.training import checkpoints, runs
from kge_torchrec.training.run_data import open_store
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import Session, validation_triples
from kge_torchrec.training.start import begin
from kge_torchrec.training.trainer import Trainer


def make_graphs(folder: Path) -> Path:
    """Input of every kind: a store, a file to split, and files with a relation in test only."""
    store = tiny_store(folder / "store", train=70)  # three steps of 32
    extend_store(
        store, {"train": [("new", "r0", "e1"), ("e2", "other", "new")]}, folder / "extended"
    )
    np.save(folder / "vectors.npy", np.random.default_rng(0).normal(size=(20, 8)))
    (folder / "vectors.txt").write_text("".join(f"e{i}\n" for i in range(20)))
    lines = ["\t".join(triple) + "\n" for triple in random_triples(20, 2, 60)]
    (folder / "single.tsv").write_text("".join(lines))
    timed = ["\t".join(triple) for triple in random_triples(20, 2, 60)]
    rows = [f"{row}\t{i * 7 % 60}\t{i * 11 % 60}\n" for i, row in enumerate(timed)]
    (folder / "timed.tsv").write_text("head\trelation\ttail\ttime\tlater\n" + "".join(rows))
    (folder / "literals.nt").write_text('<a> <r> <b> .\n<b> <r> <c> .\n<a> <name> "A" .\n')
    (folder / "w.words").write_text("a r b\nb r c\na s c\n")
    (folder / "named.tsv").write_text("b\ta\tc\tr\na\tb\tc\tr\nb\tc\ta\tr\n")
    for name, text in (
        ("bars", "a|r,s|b\nb|r,s|c\n"), ("pairs", "a\tb\nb\tc\n"), ("ids", "0\t1\t1\n1\t0\t0\n"),
        ("marked", '#a\tr\t"b"\nb\tr\tc\nb\tr\t#a\nc\tr\n'),
        ("names", "0\tann\tred\n1\tbob\tblue\n"), ("numbers", "0\t10\n1\t11\n"),
    ):  # fmt: skip
        (folder / f"{name}.tsv").write_text(text)
    weighted = [(*triple, i % 7 + 0.5) for i, triple in enumerate(random_triples(37, 3, 70))]
    prepare({"train": weighted}, folder / "weighted")
    triples = np.concatenate([store.valid, store.test])
    columns = dict(zip(("head", "relation", "tail"), triples.T, strict=True))
    for name, count in (("lists", 12), ("short_lists", 3)):
        lists = np.tile(np.arange(count), (len(triples), 1))
        np.savez(folder / f"{name}.npz", head_neg=lists, tail_neg=lists, **columns)
    (folder / "types.tsv").write_text("e1\tone\ne2\tother\n")
    prefixed = [f"v:{i}\tr\tu:{i * i % 11}\n" for i in range(20)]
    (folder / "prefixed.tsv").write_text("".join(prefixed))
    (folder / "features.tsv").write_text("".join(f"e{i}\t{i % 3}\n" for i in range(20)))
    (folder / "halves.tsv").write_text("".join(f"e{i}\t{i % 2}\n" for i in range(37)))
    (folder / "all_alike.tsv").write_text("".join(f"e{i}\tone\n" for i in range(37)))
    (folder / "unseen").mkdir()
    (folder / "unseen" / "train.tsv").write_text("a\tr\tb\nb\tr\tc\n")
    (folder / "unseen" / "test.tsv").write_text("a\tnew\tc\n")
    return folder


def changed(config: Any, changes: dict[str, Any]) -> Any:
    """A config, or a group of it, with other values of dotted keys; checked all together."""
    if isinstance(config, dict):
        return {**config, **changes}
    own = {key: value for key, value in changes.items() if "." not in key}
    nested: dict[str, dict] = {}
    for key, value in changes.items():
        group, _, name = key.partition(".")
        if name:
            nested.setdefault(group, {})[name] = value
    groups = {name: changed(getattr(config, name), values) for name, values in nested.items()}
    return replace(config, **own, **groups)


class Effects:
    """The effects of a config; each is computed at the first access and cached.

    All values compare with ==, and equal configs have equal values.
    """

    def __init__(self, config: Config, folder: Path, ranks: Processes):
        self.config, self.folder, self.ranks = config, folder, ranks

    # Data

    @cached_property
    def triples(self) -> Any:
        """Triples of every split by label, or the error that reading them raises."""
        where = self.folder / "prepared"
        try:
            store = open_store(self.config, where)
        except KGEError as error:
            return type(error).__name__, str(error).replace(str(self.folder), "")
        return {
            split: [
                (*store.entities.labels([head]), relation, *store.entities.labels([tail]))
                for head, relation, tail in store.split(split).tolist()
            ]
            for split in ("train", "valid", "test")
        }

    @property
    def batches(self) -> Any:
        """Training batches of one epoch, step by step."""
        return plain(list(self.loop.batches.epoch(0)))

    @property
    def order(self) -> list:
        """Relations in the order in which one epoch of triples comes."""
        return [batch.relation.tolist() for batch in self.loop.batches.epoch(0)]

    @property
    def negatives(self) -> list[int]:
        """Entities that one epoch of triples looks up, whatever the order of the triples."""
        epoch = self.loop.batches.epoch(0)
        ids = ((b.ids if torch.is_tensor(b.ids) else b.ids.values(), b.entities) for b in epoch)
        return sorted(torch.cat([looked_up[places] for looked_up, places in ids]).tolist())

    @property
    def validated(self) -> Any:
        """The triples that a validation ranks."""
        return plain(validation_triples(self.session.config, self.session.store))

    # The model before training

    @cached_property
    def session(self) -> Session:
        session = Session(self.config, RunFolder(self.folder), self.ranks)
        self._start = {
            "table": plain(session.backend.shard().rows),
            "scorer": plain(dict(session.scorer.named_parameters())),
            "threads": torch.get_num_threads(),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }
        return session

    def _at_start(self, name: str) -> Any:
        _ = self.session
        return self._start[name]

    @property
    def start_of_table(self) -> Any:
        return self._at_start("table")

    @property
    def start_of_scorer(self) -> Any:
        return self._at_start("scorer")

    @property
    def threads(self) -> int:
        return self._at_start("threads")

    @property
    def decided_by(self) -> str | None:
        return self.config.decided_by

    @property
    def exchange_dtype(self) -> str:
        """The format of rows on their way, by TorchRec's sharder or by the hand-rolled table."""
        backend = self.session.backend
        if isinstance(backend, HandrolledBackend):
            return backend.lookup.exchange_dtype
        codecs = torchrec.exchange_codecs(
            self.config.entities.exchange.dtype, 8, self.session.processes.device
        )
        return "fp32" if codecs is None else next(iter(codecs.values())).forward._dtype

    @property
    def parts(self) -> list[int]:
        """How a table on disk is cut."""
        return self.session._layout

    @property
    def plan_of_table(self) -> dict[str, Any]:
        """The options of TorchRec's planner, of which only a GPU trains all."""
        return torchrec.plan_options(self.config)

    @property
    def timeout(self) -> float:
        joining = patch.object(runs, "processes", side_effect=KeyboardInterrupt)
        with joining as joined, suppress(KeyboardInterrupt):
            api.train(self.config)
        return joined.call_args.args[1]

    @property
    def tf32(self) -> bool:
        return self._at_start("tf32")

    @property
    def engine(self) -> str:
        return type(self.session.backend).__name__

    @property
    def dense_wrapper(self) -> tuple[str, set[str]]:
        """Its name, and the classes of the parameters."""
        kinds = {type(parameter).__name__ for parameter in self.session.scorer.parameters()}
        return self.session.backend.dense.name, kinds

    @cached_property
    def fully_shard(self) -> list:
        """Arguments of the calls of FSDP."""
        arguments = []

        def record(module, *, mesh, reshard_after_forward, offload_policy):
            arguments.append((reshard_after_forward, type(offload_policy).__name__))

        with patch.object(dense, "fully_shard", record):
            _ = self.session
        return arguments

    @cached_property
    def mesh(self) -> list:
        """The groups of four ranks on two hosts."""
        arguments = []

        def record(kind, sizes, mesh_dim_names):
            arguments.append(sizes)
            return SimpleNamespace(ndim=len(sizes), shape=sizes, device_type=kind)

        with patch.object(dense, "init_device_mesh", record):
            dense.dense_wrapper(self.config.dense, replace(self.ranks, world_size=4))
        return arguments

    @cached_property
    def compiled(self) -> list[dict]:
        """Arguments of each call of torch.compile."""
        compile_options = []
        with patch.object(
            torch, "compile", lambda function, **how: compile_options.append(how) or function
        ):
            _ = self.session
        return compile_options

    # Training

    @cached_property
    def loop(self) -> Trainer:
        self.lines: list[tuple[str, Any]] = []
        names = self.session.checkpoints.names()
        progress = self.session.restore() if names else begin(self.session)
        return Trainer(self.session, progress, None, [lambda *line: self.lines.append(line)])

    @property
    def pipeline(self) -> str:
        return type(self.loop.pipeline).__name__

    @property
    def maker(self) -> tuple[str, bool]:
        """Who makes batches, and whether its device holds the triples."""
        made = self.loop.batches
        return type(made).__name__, getattr(made, "resident", None) is not None

    @cached_property
    def trained(self) -> dict[str, Any]:
        """The table and the scorer, and what was said on the way; no checkpoints."""
        with patch.object(self.session.checkpoints, "save", return_value=None):
            progress = self.loop.run()
        with self.session.trained_model() as model:
            averaged = plain(model.shard.rows.clone())
        return {
            "averaged": averaged,
            "table": plain(self.session.backend.shard().rows),
            "scorer": plain(dict(self.session.scorer.named_parameters())),
            "best": progress.best_metric,
        }

    @property
    def table(self) -> Any:
        return self.trained["table"]

    @property
    def averaged(self) -> Any:
        """The table that is validated and ranked."""
        return self.trained["averaged"]

    @property
    def scorer(self) -> Any:
        return self.trained["scorer"]

    @property
    def best(self) -> float | None:
        """The value that selects the best checkpoint."""
        return self.trained["best"]

    @cached_property
    def copies_of_rows(self) -> bool:
        """Whether a checkpoint takes memory for a copy of the rows."""
        copies = []
        self.loop.callbacks.append(
            lambda kind, values: (
                copies.append(values["extra_memory_bytes"]) if kind == "checkpoint" else None
            )
        )
        with patch.object(checkpoints, "SMALL", 0):
            self.loop.run()
        return any(copies)

    @property
    def copies(self) -> str:
        """Where the run is copied to."""
        folder = RunFolder(self.folder / "copied")
        with ExitStack() as held:
            runs._begin_copy(folder, self.config, held)
        return "" if folder.copier is None else folder.copier.remote.url

    @property
    def kinds(self) -> list[str]:
        """Kinds of the lines of metrics.jsonl."""
        _ = self.trained
        return [kind for kind, _ in self.lines]

    @property
    def rates(self) -> list[float]:
        """Learning rates as they are logged."""
        _ = self.trained
        return [values["lr"] for kind, values in self.lines if kind == "step"]

    @cached_property
    def checkpoints(self) -> list[str]:
        """Names of those that training leaves."""
        self.loop.run()
        return sorted(path.name for path in (self.folder / "checkpoints").iterdir())

    @cached_property
    def ranked_batches(self) -> int:
        """Times that a batch of queries is scored in a validation."""
        scorer, calls = self.session.scorer, []
        encode = scorer.encode
        scorer.encode = lambda *args: calls.append(args) or encode(*args)
        self.session.validate()
        del scorer.encode
        return len(calls)

    # A whole run

    @cached_property
    def run(self) -> dict[str, Any]:
        """Its folder, and what is shown, or why there is none."""
        shown = io.StringIO()
        shown.isatty = lambda: True  # bars show on terminals
        with redirect_stderr(shown):
            try:
                path = api.train(self.config).path
            except (KGEError, OSError) as error:
                return {"error": type(error).__name__, "shows": False}
        files = sorted(file.name for file in path.iterdir())
        # without run.dir the folder is named by the time
        name = path.name if self.folder in path.parents else "of its own"
        return {"name": name, "files": files, "shows": "epoch 1/" in shown.getvalue()}

    @cached_property
    def device(self) -> str:
        """Device on which a run starts on a host with a GPU."""
        with ExitStack() as stack:
            for name, value in (("is_available", True), ("device_count", 1), ("set_device", None)):
                stack.enter_context(patch.object(torch.cuda, name, lambda *_, v=value: v))
            session = stack.enter_context(patch.object(runs, "Session", side_effect=StopIteration))
            try:
                api.train(changed(self.config, {"run.dir": str(self.folder / "elsewhere")}))
            except StopIteration:
                return str(session.call_args.args[2].device)


@contextmanager
def restored() -> Iterator[None]:
    """Restore the settings of the process that a session changes."""
    threads = torch.get_num_threads()
    products = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = convolutions


def plain(value: Any) -> Any:
    """Arrays and what holds them, to be compared with ==."""
    if isinstance(value, KeyedJaggedTensor):
        value = value.values()
    if isinstance(value, Tensor):
        value = (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().numpy()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if is_dataclass(value):
        value = {item.name: getattr(value, item.name) for item in fields(value)}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
