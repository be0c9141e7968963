"""Every key of the config changes what it names: one table of pairs of values.

That options of parts, losses and optimizers act as their formulas say, with both engines, is for
``tests/models`` and ``tests/training/test_exact.py``.  A new key fails the first test until the
table has it: give two values, what must differ (a property of ``Effects``), and the other keys that
it takes to see it.
"""

from __future__ import annotations

import io
import re
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from training_runs import quiet, random_triples, restored, tiny_store

from kge_torchrec import api
from kge_torchrec.config import Config, all_keys
from kge_torchrec.config.parser import config_from_dict, key_with
from kge_torchrec.data.prepare import extend_store, prepare
from kge_torchrec.distributed import dense
from kge_torchrec.distributed.processes import Processes, processes
from kge_torchrec.embeddings import torchrec
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
    vectors = [*np.random.default_rng(0).normal(size=(20, 8))]
    table = pa.table({"label": [f"e{i}" for i in range(20)], "vector": vectors})
    pq.write_table(table, folder / "vectors.parquet")
    lines = ["\t".join(triple) + "\n" for triple in random_triples(20, 2, 60)]
    (folder / "single.tsv").write_text("".join(lines))
    weighted = [(*triple, i % 7 + 0.5) for i, triple in enumerate(random_triples(37, 3, 70))]
    prepare({"train": weighted}, folder / "weighted")
    triples = np.concatenate([store.valid, store.test])
    columns = dict(zip(("head", "relation", "tail"), triples.T, strict=True))
    for name, count in (("lists", 12), ("short_lists", 3)):
        lists = np.tile(np.arange(count), (len(triples), 1))
        np.savez(folder / f"{name}.npz", head_neg=lists, tail_neg=lists, **columns)
    (folder / "literals.nt").write_text('<a> <r> <b> .\n<b> <r> <c> .\n<a> <name> "A" .\n')
    (folder / "quoted.csv").write_text('a,r,"b"\nb,r,c\n')
    prefixed = [f"v:{i}\tr\tu:{i * i % 11}\n" for i in range(20)]
    (folder / "prefixed.tsv").write_text("".join(prefixed))
    return folder


class Effects:
    """The effects of a config; each is computed at the first access and cached.

    All values compare with ==, and equal configs have equal values.
    """

    def __init__(self, config: Config, folder: Path, ranks: Processes):
        self.config, self.folder, self.ranks = config, folder, ranks
        self.log: list[tuple[str, Any]] = []

    @cached_property
    def triples(self) -> Any:
        """Triples of every split by label."""
        store = open_store(self.config, self.folder / "prepared")
        return {
            split: [
                (*store.entities.labels([head]), relation, *store.entities.labels([tail]))
                for head, relation, tail in store.split(split).tolist()
            ]
            for split in ("train", "valid", "test")
        }

    @cached_property
    def session(self) -> Session:
        """The session before training; ``options`` has how torch was called to make it."""
        self.options: list[Any] = []

        def compile(function, **how):
            self.options.append(how)
            return function

        def fully_shard(module, *, mesh, reshard_after_forward, offload_policy):
            self.options.append((reshard_after_forward, type(offload_policy).__name__))

        sharding = patch.object(dense, "fully_shard", fully_shard)
        with patch.object(torch, "compile", compile), sharding:
            session = Session(self.config, RunFolder(self.folder), self.ranks)
        self.start = {
            "start_of_table": plain(session.backend.shard().rows),
            "start_of_scorer": plain(dict(session.scorer.named_parameters())),
        }
        self.options += [torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32]
        return session

    @cached_property
    def loop(self) -> Trainer:
        """The loop; ``log`` has the lines of metrics.jsonl without speeds."""

        def note(kind: str, values: dict[str, Any]) -> None:
            if kind != "checkpoint":
                self.log.append((kind, {x: values[x] for x in values if "second" not in x}))

        names = self.session.checkpoints.names()
        progress = self.session.restore() if names else begin(self.session)
        return Trainer(self.session, progress, None, [note])

    @cached_property
    def made(self) -> list[Any]:
        """What a run is made of: classes, options of torch, layout, formats on the way."""
        backend, batches = self.session.backend, self.loop.batches
        config, device = self.config, self.session.processes.device
        codecs = torchrec.exchange_codecs(config.entities.exchange.dtype, 8, device)
        travels = None if codecs is None else next(iter(codecs.values())).forward._dtype
        if config.entities.engine == "handrolled":
            travels = backend.lookup.exchange_dtype
        return [
            type(backend), backend.dense.name, {type(x) for x in self.session.scorer.parameters()},
            type(self.loop.pipeline), type(batches), getattr(batches, "resident", None) is None,
            self.options, plain(self.session._layout), travels,
        ]  # fmt: skip

    @cached_property
    def trained(self) -> dict[str, Any]:
        """Table and scorer after training, without checkpoints."""
        with patch.object(self.session.checkpoints, "save", return_value=None):
            progress = self.loop.run()
        with self.session.trained_model() as model:
            averaged = plain(model.shard.rows.clone())
        return {
            "averaged": averaged,  # the table that is validated and ranked
            "table": plain(self.session.backend.shard().rows),
            "scorer": plain(dict(self.session.scorer.named_parameters())),
            "best": progress.best_metric,
            "log": self.log,
        }

    @cached_property
    def batches(self) -> Any:
        """Training batches of one epoch, step by step."""
        return plain(list(self.loop.batches.epoch(0)))

    @cached_property
    def validated(self) -> Any:
        """The triples that a validation ranks."""
        return plain(validation_triples(self.session.config, self.session.store))

    @cached_property
    def ranked_batches(self) -> int:
        """Times that a batch of queries is scored in a validation."""
        with patch.object(self.session.scorer, "encode", wraps=self.session.scorer.encode) as calls:
            self.session.validate()
        return calls.call_count

    @cached_property
    def checkpoints(self) -> list[Any]:
        """Names of those that training leaves, and whether one took memory for a copy of rows."""
        copies: list[Any] = []
        self.loop.callbacks.append(
            lambda kind, values: copies.append(values.get("extra_memory_bytes"))
        )
        with patch.object(checkpoints, "SMALL", 0):
            self.loop.run()
        names = sorted(path.name for path in (self.folder / "checkpoints").iterdir())
        return [any(copies), *names]

    @cached_property
    def joined(self) -> Any:
        """How a run joins its ranks."""
        joining = patch.object(runs, "processes", side_effect=KeyboardInterrupt)
        with joining as joined, suppress(KeyboardInterrupt):
            api.train(self.config)
        return joined.call_args.args

    @cached_property
    def run(self) -> dict[str, Any]:
        """The folder of a whole run, and what is shown, or why there is none."""
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

    @property
    def plan_of_table(self) -> dict[str, Any]:
        """The options of TorchRec's planner, of which only a GPU trains all."""
        return torchrec.plan_options(self.config)

    @property
    def decided_by(self) -> str | None:
        return self.config.decided_by

    def __getitem__(self, what: str) -> Any:
        """Return one effect by its name."""
        if what in ("table", "scorer", "averaged", "best", "log"):
            return self.trained[what]
        if what.startswith("start_of"):
            return self.session and self.start[what]
        return getattr(self, what)


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


BASE = {"data.path": "{graphs}/store", "run.dir": "{here}/whole", "train.epochs": 1,
        "train.log_every": 1, "checkpoint.every.epochs": 0,
        "entities.engine": "handrolled"}  # fmt: skip  # which is there sooner


@dataclass(frozen=True)
class Case:
    """Two values of a key, and the parts of ``Effects`` that they must make differ."""

    key: str
    one: Any
    other: Any
    what: tuple[str, ...]
    settings: dict[str, Any]

    def __str__(self) -> str:
        settings = "".join(f", {key} {value}" for key, value in self.settings.items())
        return f"{self.key} {self.one} or {self.other}{settings}"


def case(key: str, one: Any, other: Any, *what: str, **settings: Any) -> Case:
    """``settings``: other keys, with __ for the dot."""
    return Case(key, one, other, what, {k.replace("__", "."): v for k, v in settings.items()})


ADAM = {"train__optimizer": "adam"}
TORCHREC = {"entities__engine": "torchrec"}
# Table and scorer feel each other from the second step on.  So what each has of its own is seen
# after one step, or, where it takes several, while the other stands still.
ONE_STEP = {"train__batch_size": 128}
VALIDATED = {"evaluation__every": 1, "train__epochs": 4}
NO_PROGRESS = {**VALIDATED, "train__lr": 1e-30}  # so that no validation is better than the first

CASES = [
    # data
    case("data.path", "{graphs}/store", "{graphs}/single.tsv", "triples"),
    case("data.literals", "drop", "keep", "triples", data__path="{graphs}/literals.nt",
         data__split__ratio=(1, 0, 0)),
    case("data.quotes", None, False, "triples", data__path="{graphs}/quoted.csv",
         data__split__ratio=(1, 0, 0)),
    case("data.weights", "ignore", "loss", "table", data__path="{graphs}/weighted"),
    # model
    case("model.scorer", "complex", "distmult", "table", "scorer"),
    case("model.dim", 8, 12, "start_of_table", "start_of_scorer"),
    case("model.reciprocal", False, True, "start_of_scorer", "table"),
    case("model.init", "normal", "uniform", "start_of_table", "start_of_scorer"),
    case("model.init_scale", 0.5, 0.1, "start_of_table", "start_of_scorer"),
    case("model.normalization", "none", "unit", "table"),
    case("model.biases", False, True, "start_of_table", "start_of_scorer", "table"),
    *(case(f"model.dropout.{key}", 0.0, 0.5, "table", "scorer") for key in ("entity", "relation")),
    case("model.init_from", "{graphs}/vectors.parquet", None, "table"),
    case("model.init_options.frozen", False, True, "table",
         model__init_from="{graphs}/vectors.parquet"),
    case("model.dropout.input", 0.0, 0.5, "table", "scorer"),
    case("model.dropout.hidden", 0.0, 0.5, "table", "scorer"),
    case("model.options.p", 0, 1, "table", model__scorer="keci", model__dim=12),
    *(case("model.options.feature_dropout", 0.0, 0.5, "table", model__scorer=scorer, model__dim=dim)
      for scorer, dim in (("tucker", 4), ("conex", 8))),
    # loss
    case("loss.name", "softmax", "bce", "table"),
    case("loss.options.label_smoothing", 0.0, 0.3, "table"),
    case("loss.n3", 0.0, 0.1, "table", "scorer", **ONE_STEP),
    case("loss.regularizers", {}, {"dura": 0.1}, "table", "scorer", **ONE_STEP),
    case("loss.relation_weight", 0.0, 1.0, "table", "scorer"),
    # negatives
    case("negatives.regime", "sampled", "kvssample", "table"),
    case("negatives.regime", "1vsall", "kvsall", "table"),
    case("negatives.regime", "kvsall", "allvsall", "table", loss__name="bce"),
    case("negatives.count", 6, 7, "table"),
    case("negatives.head_count", None, 7, "table"),
    case("negatives.in_batch", False, True, "table"),
    case("negatives.in_batch", True, "same_relation", "table"),
    case("negatives.log_q", False, True, "table", negatives__sampling="degree"),
    case("negatives.chunk_size", 0, 8, "table"),
    case("negatives.sides", "both", "tail", "table", model__reciprocal=False),
    case("negatives.sampling", "uniform", "degree", "table"),
    case("negatives.options.degree_power", 0.5, 3.0, "table",
         negatives__sampling="degree"),
    case("negatives.filtered", False, True, "table"),
    case("negatives.among", "all", "seen", "table"),
    case("negatives.among_share", 1.0, 0.5, "table", negatives__among="seen"),
    case("negatives.max_answers", 0, 1, "table",
         negatives__regime="kvssample"),
    # entities
    case("entities.engine", "torchrec", "handrolled", "made"),
    case("entities.preset", "fbgemm", "dgl", "table", **ADAM),
    case("entities.tables", None, {"u": {"lr": 0.3}}, "table", data__path="{graphs}/prefixed.tsv",
         data__types="prefix", data__split__ratio=(1, 0, 0)),
    # dense
    case("dense.wrapper", "none", "ddp", "made"),
    case("dense.wrapper", "none", "fsdp", "made"),
    case("dense.options.sharding", "full", "grad_op", "made", dense__wrapper="fsdp"),
    case("dense.options.cpu_offload", False, True, "made", dense__wrapper="fsdp"),
    case("dense.compile", False, True, "made"),
    # train
    case("train.epochs", 1, 2, "log", "table"),
    case("train.batch_size", 32, 16, "table"),
    case("train.batch_size", 32, None, "table"),
    case("train.optimizer", "adagrad", "adam", "table", "scorer", **ONE_STEP),
    case("train.lr", 0.05, 0.1, "log", "table", "scorer", **ONE_STEP),
    case("train.relation_lr", 0.05, 0.1, "scorer", **ONE_STEP),
    case("train.optimizer_options.eps", 1e-4, 1e-2, "table", "scorer", **ONE_STEP),
    case("train.schedule", "constant", "linear", "log", "table", "scorer", train__epochs=2),
    case("train.warmup_steps", 0, 3, "log", "table", "scorer", **ONE_STEP),
    case("train.schedule_options.threshold", 0.0, 1e6, "log", train__schedule="plateau",
         train__schedule_options__patience=0, seed=3, **VALIDATED),
    case("train.averaging", "none", "ema", "averaged", **VALIDATED),
    case("train.averaging_options.decay", 0.0, 0.1, "averaged", train__averaging="ema",
         train__epochs=2),
    case("train.averaging_options.every_steps", 0, 2, "averaged", train__averaging="ema",
         train__epochs=2),
    case("train.precision", "fp32", "bf16", "table", "scorer"),
    case("train.precision", "fp32", "tf32", "made"),
    case("train.accumulation", 1, 2, "batches"),
    case("train.clip.norm", None, 1e-3, "table", "scorer", **ONE_STEP),
    case("train.clip.value", None, 1e-4, "table", "scorer", **ONE_STEP),
    case("train.pipeline", "sparse_dist", "loop", "made", **TORCHREC),
    case("train.batches", "cpu", "device", "made"),
    case("train.log_every", 1, 2, "log"),
    case("train.extension.freeze", "none", "old", "table", "scorer",
         data__path="{graphs}/extended"),
    # evaluation
    case("evaluation.every", 1, 2, "log", train__epochs=2),
    case("evaluation.metric", "mrr", "mr", "best", **VALIDATED),
    case("evaluation.metric", "recall@20", "ndcg@20", "best", **VALIDATED),
    case("evaluation.patience", 0, 1, "log", **NO_PROGRESS),
    case("evaluation.patience", 0, 0.5, "log", **{**NO_PROGRESS, "train__epochs": 6}),
    case("evaluation.max_triples", 0, 5, "validated"),
    case("evaluation.batch_size", 512, 3, "ranked_batches"),
    case("evaluation.candidates", "all", "seen", "best", **VALIDATED),
    case("evaluation.candidates", "all", "fixed", "best",
         evaluation__candidate_file="{graphs}/lists.npz", **VALIDATED),
    case("evaluation.candidate_file", "{graphs}/lists.npz", "{graphs}/short_lists.npz",
         "best", evaluation__candidates="fixed", **VALIDATED),
    # checkpoint
    case("checkpoint.every.epochs", 1, 2, "checkpoints", train__epochs=3, checkpoint__keep=9),
    case("checkpoint.every.steps", 0, 2, "checkpoints", checkpoint__keep=9),
    case("checkpoint.options.background", False, True, "checkpoints",
         checkpoint__every__steps=2),
    case("checkpoint.keep", 1, 2, "checkpoints", checkpoint__every__steps=2),
    # run
    case("run.dir", "{here}/one", "{here}/other", "run"),
    case("run.resume", "never", "require", "run"),
    case("run.progress", False, True, "run"),
    case("run.trackers.tensorboard", False, True, "run"),
    case("run.trackers.wandb", None, "a-project", "run"),
    # the rest
    case("size", "small", "base", "start_of_table", "start_of_scorer", model__dim=None),
    case("default", "race", "rules", "decided_by"),
    case("seed", 0, 1, "start_of_table", "start_of_scorer", "batches"),
    case("seed", 0, 1, "triples", data__path="{graphs}/single.tsv"),
    case("seed", 0, 1, "validated", evaluation__max_triples=5),
    case("device", "cpu", "auto", "joined"),
    case("threads", 1, 2, "made"),
    case("entities.exchange.dtype", "fp32", "int8", "made"),
    case("entities.placement", "memory", "disk", "made"),
    case("entities.placement_options.parts", 5, 6, "made", entities__placement="disk"),
    case("entities.placement_options.buffer", 2, 3, "made", entities__placement="disk"),
    case("entities.placement_options.passes", 2, 3, "made", entities__placement="disk"),
    case("entities.placement_options.cache_ratio", 0.1, 0.2, "plan_of_table",
         entities__placement="managed_caching", **TORCHREC),
    case("timeout", 1800, 5, "joined"),
]  # fmt: skip


ELSEWHERE = {
    "checkpoint.options.copy_to": "training/test_copies",
    "dense.options.replicas": "training/test_exact",
}


@pytest.fixture(scope="module")
def effects(tmp_path_factory):
    """A function from changes of the base config to their ``Effects``, cached by default."""
    graphs = make_graphs(tmp_path_factory.mktemp("graphs"))
    kept: dict[str, Effects] = {}

    def placed(value: Any, here: Path) -> Any:
        return value.format(graphs=graphs, here=here) if isinstance(value, str) else value

    def make(changes: dict[str, Any], anew: bool = False) -> Effects:
        keys = {**quiet(changes), **BASE, **changes}
        name = str(sorted(keys.items()))
        if anew or name not in kept:
            here = tmp_path_factory.mktemp("run") / "run"
            config = config_from_dict({key: placed(value, here) for key, value in keys.items()})
            kept[name] = Effects(config, here, ranks)
        return kept[name]

    with restored(), processes("cpu") as ranks:
        yield make


def test_table_has_every_key():
    """If a key is missing here, see the head of this file; those of reading have tests/data."""
    there = {key_with(case.key) for case in CASES}
    tests = {file: file.read_text() for file in Path(__file__).parent.rglob("test_*.py")}
    for key in set(all_keys()) - there:
        assert key.startswith("data.") or key in ELSEWHERE, f"CASES has no entry for {key}"
        places = [ELSEWHERE[key]] if key in ELSEWHERE else ["data/test_", "extend/test_parts"]
        name = re.compile(rf"\b({key.rpartition('.')[2]}\b|\w+__{key.rpartition('.')[2]})")
        assert any(
            name.search(text) for file, text in tests.items() if any(x in str(file) for x in places)
        ), f"no test names {key}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_key_changes_its_effects_and_no_others(effects, case):
    values = [effects({**case.settings, case.key: value}) for value in (case.one, case.other)]
    for what in case.what:
        one, other = (value[what] for value in values)
        assert one != other, f"{case.key} {case.one} and {case.other} make the same {what}"


LOOKED_AT = {what: case for case in CASES[::-1] for what in case.what}


@pytest.mark.parametrize("what", LOOKED_AT)
def test_effects_depend_only_on_the_config(effects, what):
    """Otherwise it would differ between any two configs, and the test above could not fail."""
    case = LOOKED_AT[what]
    changes = {**case.settings, case.key: case.one}
    assert effects(changes, anew=True)[what] == effects(changes, anew=True)[what]
