"""A trained run, opened from its folder: evaluate, answer, export."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kge_torchrec.answers.answering import Answering
from kge_torchrec.answers.calibration import Calibration
from kge_torchrec.answers.corruptions import Among
from kge_torchrec.answers.links import Link, new_links
from kge_torchrec.answers.model import AnsweringModel
from kge_torchrec.answers.questions import read_triples
from kge_torchrec.config import Config, ConfigError, EvaluationConfig
from kge_torchrec.data.readers.tables import InMemory
from kge_torchrec.data.store import SPLITS, TripleStore, Vocabulary
from kge_torchrec.distributed.processes import Processes, on_first_rank, processes
from kge_torchrec.export.description import ExportFolder
from kge_torchrec.ranking.groups import GROUPINGS, check_names, grouped
from kge_torchrec.ranking.metrics import Ranks, metrics
from kge_torchrec.training.checkpoints import BEST
from kge_torchrec.training.run_folder import RunFolder
from kge_torchrec.training.session import FILTERS, Session
from kge_torchrec.training.state import TrainState

log = logging.getLogger(__name__)


class Run(Answering):
    """A trained run, opened from its folder.  Under torchrun every method is collective.

    Keeps the model loaded between calls; ``close`` (or a ``with`` block) lets it go.
    """

    def __init__(self, path: str | Path, config: Config | None = None):
        """config: what the folder has, if it was read already."""
        self.folder = RunFolder(path)
        self.config = config or self.folder.load_config()
        self._open = ExitStack()
        self._ranks: Processes | None = None
        self._session: Session | None = None
        self._answering: AnsweringModel | None = None
        self._loaded: str | None = None  # the checkpoint asked for
        self._progress: TrainState | None = None  # of the checkpoint in the session

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.folder.path

    @property
    def results(self) -> dict[str, Any]:
        """What results.json holds."""
        return self.folder.load_results()

    @property
    def history(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl, {"kind": "step" | "epoch" | "valid" | "test", "step", ...}.

        ``pandas.json_normalize(run.history)`` makes a table of them.
        """
        return self.folder.load_metrics()

    @property
    def entity_labels(self) -> Vocabulary:
        """Labels and ids of the entities, read from the store; no model is loaded."""
        return self._store.entities

    @property
    def relation_labels(self) -> Vocabulary:
        """Labels and ids of the relations, read from the store; no model is loaded."""
        return self._store.relations

    @property
    def entities(self) -> np.ndarray:
        """(N, D) float32, the rows of all entities in order of id, by the best checkpoint.

        A copy of the whole table in memory, on every rank.  ``export`` needs a chunk at a time.
        """
        shard = self.session.backend.shard()
        return shard.fetch(torch.arange(self.session.store.num_entities)).float().cpu().numpy()

    @cached_property
    def _store(self) -> TripleStore:
        return TripleStore.open(self.folder.store_of(self.config.data.path))

    def __repr__(self) -> str:
        model = f"{self.config.model.scorer}, dim {self.config.model.dim}"
        try:
            test = self.results["test"]
        except ConfigError:
            return f"<Run {self.path}: {model}, no results yet>"
        mrr = f", test MRR {test['both']['realistic']['mrr']:.4f}" if test else ""
        return f"<Run {self.path}: {model}{mrr}>"

    def evaluate(
        self,
        split: str = "test",
        by: Sequence[str] = (),
        candidates: str | None = None,
        types: str | Path | None = None,
        triples: InMemory | str | Path | None = None,
    ) -> dict[str, Any]:
        """Exact filtered ranking of a split with the best checkpoint (the last without one).

        by: group the ranks as well: "relation", "category" (1-1, 1-N, N-1, N-N after Bordes et al.
            2013) or "frequency" (of the answer in train), any of them.  The groups are written into
            the run folder, as evaluation-SPLIT-by-NAME.json and .png.
        candidates: "all", "seen" or "types", with a file of types; in place of the run's
            evaluation.candidates.
        triples: rank these instead of a split: triples of labels, as ``prepare`` takes them in
            memory, or a file of them, as ``score_file`` does.  Answers that they or any split hold
            are filtered.

        Returns {"head" | "tail" | "both": {"optimistic" | "realistic" | "pessimistic":
        {"mrr", "mr", "hits@1", "hits@3", "hits@10"}}}; with ``by`` also {"by": {name: {"about",
        "total", "groups"}}}; where candidates were restricted "candidates", which says so; with
        ``triples`` also {"triples": {"count", "train", "valid", "test"}}: how many there are, and
        how many of them are in each split.  Raises DataError for triples that cannot be ranked; the
        message names the line, or the position in memory.
        """
        if not isinstance(split, str) or split not in FILTERS:
            raise ConfigError(
                f"split must be one of {', '.join(FILTERS)}, got {split!r:.80}; triples of your "
                "own are evaluate(triples=...)"
            )
        check_names(by)
        evaluation = self._evaluation(candidates, types)
        store = self.session.store
        given = None if triples is None else read_triples(triples, self.answering_model())
        ids = store.split(split) if given is None else given
        if not len(ids):
            raise ConfigError(f"{store.path} has no {split} triples")
        ranks = self.session.ranks_of(ids, split if given is None else None, evaluation)
        found = metrics(ranks)
        if given is not None:
            split, found["triples"] = "triples", _where_known(store, given)
        if by:
            # The ranks are the same on every rank, so one groups them for all.
            found["by"] = on_first_rank(
                self._processes, lambda: self._grouped(ranks, split, ids, by, evaluation.candidates)
            )
        return found

    def _evaluation(self, candidates: str | None, types: str | Path | None) -> EvaluationConfig:
        own = self.config.evaluation
        if candidates is None and types is None:
            return own
        kind = candidates or "types"
        if types is not None and kind != "types":
            raise ConfigError(f"types has no effect with candidates {kind}: leave it out")
        kept = own.types if kind == "types" else None
        return replace(own, candidates=kind, types=kept if types is None else str(types))

    def _grouped(
        self, ranks: Ranks, split: str, ids: np.ndarray, by: Sequence[str], candidates: str
    ) -> dict[str, Any]:
        from kge_torchrec.ranking.group_tables import write  # loads matplotlib

        store = self.session.store
        triples = np.asarray(ids, np.int64)
        found = {name: grouped(ranks, GROUPINGS[name](store, triples)) for name in by}
        try:
            write(self.path, split, candidates, found)
        except OSError as error:  # such as a folder of somebody else's
            log.warning("the groups are not written: %s", error)
        return found

    def export(
        self,
        path: str | Path,
        format: str = "npy",
        checkpoint: str | None = None,
        overwrite: bool = False,
        card: bool = False,
        license: str | None = None,
        data_license: str | None = None,
        changed_since: str | Path | None = None,
    ) -> Path:
        """Writes files that ``load_model`` or other programs read, whole or not at all.

        path: the folder to make; one that exists is refused, or with ``overwrite`` replaced if it
            is an export.
        format: npy, safetensors, word2vec (text) or parquet, of the entity table; huggingface
            (safetensors, config.json and a model card, as a repository of Hugging Face); or what
            another program loads and scores alike: pykeen, libkge, dglke, or torch (a program of
            torch.export).
        checkpoint: "best" (None, the newest without one), "newest", or a checkpoint's name.
        card: write a model card, README.md, also where the format does not come with one.
        license, data_license: of the model and of the data, for the card; unknown if not given.
        changed_since: an earlier run, such as the one that this one was extended from: only
            entities whose rows differ from those of its best checkpoint are written, with their
            ids in ids.npy.  ``load_model`` does not read that.

        Takes the memory of the loaded model and one chunk of rows; for other programs the table as
        well, two or three times.  Returns the path.  Raises ConfigError, CheckpointError or
        ExportError, such as for a model that a format cannot hold.
        """
        from kge_torchrec.export.card import UNKNOWN, Licences
        from kge_torchrec.export.changes import Earlier
        from kge_torchrec.export.write import Export, check_format

        check_format(format, self.config.model, changed_since is not None)
        folder = ExportFolder(path, overwrite)
        on_first_rank(self._processes, folder.check)  # before the model is loaded
        wanted = checkpoint or BEST
        session = self._load(wanted)
        assert self._progress is not None  # _load has read it
        licences = Licences(license or UNKNOWN, data_license or UNKNOWN)
        asked = licences if card or license or data_license else None
        if asked and changed_since is not None:
            raise ConfigError("card, license: a model card is of a whole model, not of its changes")
        earlier = None
        if changed_since is not None:
            earlier = Earlier.open(changed_since, session.store.entities, self._processes)
        Export(session, folder, format, self._progress, wanted == BEST, asked, earlier).write()
        return folder.path

    def new_links(
        self,
        relation: str,
        k: int | None = None,
        candidates: str = "all",
        above: float | None = None,
        loops: bool = False,
    ) -> list[Link]:
        """The k best triples of a relation that the data does not hold, best first.

        k: None stands for 10, or for all triples where ``above`` is given.
        candidates: heads and tails are all entities, or those "seen" with the relation on their
            side in train, which is what makes large graphs feasible: every pair is scored.
        above: only those with at least this score.
        loops: with links of an entity to itself.

        Scored as the tail's query.  Raises as ``predict`` does.
        """
        return new_links(self.answering_model(), relation, k, candidates, above, loops)

    def calibrate(self, **options: Any) -> Calibration:
        """Fits probabilities to the scores, on valid, and keeps them in calibration.json.

        options: those of ``CalibrationOptions``: method, among, top, corruptions, positive_share,
            limit, seed.

        From then on predictions have a probability: the share of true ones among the answers that
        ``predict`` lists with such a score.  Returns the calibration, whose ``about`` has the
        expected calibration error over the listed answers to the queries of test, before and after.
        Raises KGEError without scikit-learn, ConfigError for bad options, DataError without valid
        triples.
        """
        from kge_torchrec.answers.probabilities import CalibrationOptions, calibrate

        chosen = CalibrationOptions(**options)
        made = calibrate(self.answering_model(), self._step, chosen)
        on_first_rank(self._processes, lambda: made.write(self.path))
        self._answering = None
        return made

    def classify(
        self, among: Among = "seen", seed: int = 0, limit: int = 100_000
    ) -> dict[str, Any]:
        """Triple classification: a threshold for each relation from valid, accuracy on test.

        Beside every triple stand a corruption of its head and one of its tail; ``among``: drawn
        from the entities "seen" with the relation on that side in train, or from "all".
        limit: triples of either split that are used at most.  Returns what
        ``answers.classification.classify`` says.  Raises DataError for a split without triples.
        """
        from kge_torchrec.answers.classification import classify

        return classify(self.answering_model(), among, seed, limit)

    def answering_model(self) -> AnsweringModel:
        """What questions are answered from: the best checkpoint, the data, the calibration."""
        session = self.session
        if self._answering is None:
            store = session.store
            self._answering = AnsweringModel(
                session.scorer,
                session.backend.shard(),
                lambda: store.entities,
                lambda: store.relations,
                store,
                self._processes,
                on_first_rank(self._processes, self._read_calibration),
            )
        return self._answering

    def _read_calibration(self) -> Calibration | None:
        found = Calibration.read(self.path)
        if found is None or found.is_of(self._step, self.session.store.fingerprint):
            return found
        log.warning(
            "%s was calibrated after %s steps, and is now at %s: no probabilities until "
            "`kge-torchrec calibrate` is run again", self.path, found.step, self._step
        )  # fmt: skip
        return None

    @property
    def _step(self) -> int:
        """Steps that the loaded parameters were trained for."""
        assert self._progress is not None  # _load has read it
        return self._progress.global_step

    @property
    def session(self) -> Session:
        """The loaded model, of the best checkpoint."""
        return self._load(BEST)

    @property
    def _processes(self) -> Processes:
        if self._ranks is None:
            joined = processes(self.config.device, self.config.timeout)
            self._ranks = self._open.enter_context(joined)
        return self._ranks

    def _load(self, checkpoint: str) -> Session:
        """The session with the parameters of "best", "newest" or a checkpoint's name."""
        if self._session is None:
            self._session = Session(self.config, self.folder, self._processes, trains=False)
        if self._loaded != checkpoint:
            self._loaded = self._answering = None  # unless all parameters arrive
            self._progress = self._session.restore_parameters(checkpoint)
            self._loaded = checkpoint
        return self._session

    def close(self) -> None:
        """Frees the model and the process group."""
        self._session = self._loaded = self._ranks = self._answering = None
        self._open.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_run(path: str | Path) -> Run:
    """A run from its folder.  Raises ConfigError if it holds none."""
    return Run(path)


def evaluate(
    path: str | Path,
    split: str = "test",
    by: Sequence[str] = (),
    candidates: str | None = None,
    types: str | Path | None = None,
    triples: InMemory | str | Path | None = None,
) -> dict[str, Any]:
    """``Run.evaluate`` of the run in a folder, which is let go afterwards."""
    with open_run(path) as run:
        return run.evaluate(split, by, candidates, types, triples)


def _where_known(store: TripleStore, triples: np.ndarray) -> dict[str, int]:
    """How many triples (T, 3) there are, and how many of them each split holds."""
    heads, relations, tails = triples.T
    known = {
        name: store.filter_index((name,)).contains("tail", heads, relations, tails[:, None])
        for name in SPLITS
    }
    return {"count": len(triples)} | {name: int(found.sum()) for name, found in known.items()}
