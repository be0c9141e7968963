"""Typed negatives: samplers of entities of the right kind for a triple.

``SeenSampler`` takes entities that the triple's relation has on that side in train (the local
closed-world assumption of Krompass et al. 2015), ``TypeSampler`` entities that share a type with
the triple's own entity.

The triples of a chunk share their candidates.  Each candidate is sampled for one triple of the
chunk, chosen at random, and counts for every triple whose kind it is of.

Shapes: C chunks, b triples per chunk, K candidates per chunk, B triples, M random numbers,
N entities, R relations.
"""

from __future__ import annotations

import numpy as np

from kge_torchrec.config.data import NegativesConfig
from kge_torchrec.data import OTHER, RELATION, SIDES, answer_column
from kge_torchrec.data.negatives import Chunks, NegativeSampler
from kge_torchrec.data.sort import pointers
from kge_torchrec.data.store import TripleStore
from kge_torchrec.data.store.entity_types import EntityTypes
from kge_torchrec.data.store.filter_index import anchors_of, relations_of
from kge_torchrec.data.store.search import mark_members
from kge_torchrec.kernels.jit import kernel


def typed_sampler(
    others: NegativeSampler, config: NegativesConfig, store: TripleStore
) -> NegativeSampler:
    """Return the sampler that negatives.among names, over one that samples among all entities.

    Raises:
        DataError: An unusable file, or a store without types.
    """
    options = config.restriction
    if config.among == "seen":
        return SeenSampler(others, options.share, store)
    return TypeSampler(others, options.share, EntityTypes.find(options.types, store))


class TypedSampler(NegativeSampler):
    """Base of samplers that take the first candidates of a chunk from entities of a kind.

    Args:
        others: Sampler of all other candidates, and of those for triples without such entities.
        share: Share of a chunk's sampled candidates that are of the kind.
    """

    def __init__(self, others: NegativeSampler, share: float):
        self.others, self.share = others, share

    def choose(self, side: str, triples: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return one entity for each triple (M, 3) and number (M,): (M,) int64, -1 for none."""
        raise NotImplementedError

    def fits(self, side: str, triples: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Return whether candidates (B, K) are of the kind for triples (B, 3): (B, K) bool."""
        raise NotImplementedError

    def kinds(self, side: str, triples: np.ndarray) -> np.ndarray:
        """Return a number (B,) int64 from 0 that is equal for triples of the same kind."""
        raise NotImplementedError

    def sample(self, chunks: Chunks) -> np.ndarray:
        """Return the candidates of the other sampler, the first ones replaced."""
        ids, side, triples = self.others.sample(chunks), chunks.side, chunks.triples
        if not len(triples):
            return ids
        count = self.typed(chunks.numbers.shape[1])
        places = chunks.numbers[:, :count] * triples.shape[1]
        place = np.minimum(places.astype(np.int64), triples.shape[1] - 1)
        chosen = np.take_along_axis(triples, place[..., None], 1).reshape(-1, 3)
        rest = np.clip(places - place, 0, np.nextafter(1.0, 0.0))
        typed = self.choose(side, chosen, rest.ravel()).reshape(place.shape)
        ids[:, :count] = np.where(typed >= 0, typed, ids[:, :count])
        return ids

    def excluded(
        self, chunks: Chunks, triples: np.ndarray, candidates: np.ndarray
    ) -> np.ndarray | None:
        """Return which candidates are of the wrong kind for a triple.

        Answers of the batch, which follow the sampled candidates, have to be of the kind where all
        sampled candidates have to be.
        """
        excluded = np.zeros((len(triples), candidates.shape[1]), bool)
        typed = candidates
        if self.share != 1:
            typed = candidates[:, : self.typed(chunks.numbers.shape[1])]
        # Once for all triples of a chunk that are of one kind.
        kinds = self.kinds(chunks.side, triples)
        chunk = np.arange(len(triples)) // (len(triples) // len(candidates))
        pairs = chunk * (int(kinds.max()) + 1) + kinds
        _, first, of = np.unique(pairs, return_index=True, return_inverse=True)
        rows = np.ascontiguousarray(typed[chunk[first]])
        fits = self.fits(chunks.side, triples[first], rows)
        np.logical_not(fits[of], out=excluded[:, : typed.shape[1]])
        others = self.others.excluded(chunks, triples, candidates)
        return excluded if others is None else excluded | others

    def typed(self, count: int) -> int:
        """Return how many of the sampled candidates of a chunk are of the kind."""
        return max(1, round(self.share * count))


class SeenSampler(TypedSampler):
    """Takes entities that the triple's relation has on that side in train.

    The distinct entities of each relation and side take 4 bytes each, on every rank.
    """

    def __init__(self, others: NegativeSampler, share: float, store: TripleStore):
        super().__init__(others, share)
        dtype = store.train.dtype
        self.seen: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for side in SIDES:
            # Tails are the anchors of the index for heads, and the other way round.
            queries = store.side_index("train", OTHER[side]).queries
            relations = relations_of(queries)
            order = np.argsort(relations, kind="stable")  # entities ascend within a relation
            entities = anchors_of(queries).astype(dtype)
            self.seen[side] = pointers(relations, store.num_relations), entities[order]

    def choose(self, side: str, triples: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return one of the entities seen there; -1 where the true one is the only one."""
        entities, start, stop = self._ranges(side, triples)
        chosen = entities[start + (numbers * (stop - start)).astype(np.int64)].astype(np.int64)
        return np.where(stop - start > 1, chosen, -1)

    def fits(self, side: str, triples: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Return whether candidates were seen there; all where only the true one was."""
        entities, start, stop = self._ranges(side, triples)
        fits = np.zeros(candidates.shape, bool)
        mark_members(entities, start, stop, candidates, fits)
        fits[stop - start <= 1] = True
        return fits

    def kinds(self, side: str, triples: np.ndarray) -> np.ndarray:
        """Return the relation."""
        return triples[:, RELATION]

    def _ranges(self, side: str, triples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return all entities, and where those of each triple's relation start and stop."""
        indptr, entities = self.seen[side]
        return entities, indptr[triples[:, RELATION]], indptr[triples[:, RELATION] + 1]


class TypeSampler(TypedSampler):
    """Takes entities that share a type with the triple's own entity.

    An entity that shares several types is sampled as much more often.
    """

    def __init__(self, others: NegativeSampler, share: float, types: EntityTypes):
        super().__init__(others, share)
        self.types = types
        entities = types.pairs()[:, 0]
        sizes = np.bincount(types.types, minlength=len(types))
        self.members = entities[np.argsort(types.types, kind="stable")]
        self.starts = np.cumsum(sizes) - sizes
        # Over all pairs of an entity and a type: the number of members of the types before.
        self._before = np.concatenate([[0], np.cumsum(sizes[types.types])])

    def choose(self, side: str, triples: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return an entity that shares a type with the true one; -1 where none does."""
        answers = triples[:, answer_column(side)]
        first, last = (self.types.indptr[answers + i] for i in (0, 1))
        low, total = self._before[first], self._before[last] - self._before[first]
        target = low + (numbers * total).astype(np.int64)
        pair = np.searchsorted(self._before, target, "right") - 1
        some = total > last - first  # more than the entity itself in each of its types
        chosen = np.full(len(answers), -1)
        pair, target = pair[some], target[some]
        place = self.starts[self.types.types[pair]] + target - self._before[pair]
        chosen[some] = self.members[place]
        return chosen

    def fits(self, side: str, triples: np.ndarray, candidates: np.ndarray) -> np.ndarray:
        """Return whether candidates share a type with the true entity; all where none does."""
        answers, own = triples[:, answer_column(side)], self.types
        fits = np.zeros(candidates.shape, bool)
        _mark_sharing(own.indptr, own.types, np.full(len(own), -1), answers, candidates, fits)
        first, last = (own.indptr[answers + i] for i in (0, 1))
        fits[self._before[last] - self._before[first] <= last - first] = True
        return fits

    def kinds(self, side: str, triples: np.ndarray) -> np.ndarray:
        """Return the true entity."""
        return triples[:, answer_column(side)]


@kernel
def _mark_sharing(
    indptr: np.ndarray,
    types: np.ndarray,
    seen_by: np.ndarray,
    answers: np.ndarray,
    candidates: np.ndarray,
    fits: np.ndarray,
) -> None:
    """Set ``fits[b, k]`` where ``candidates[b, k]`` shares a type with ``answers[b]``."""
    for b in range(len(answers)):
        for place in range(indptr[answers[b]], indptr[answers[b] + 1]):
            seen_by[types[place]] = b
        for k in range(candidates.shape[1]):
            entity = candidates[b, k]
            for place in range(indptr[entity], indptr[entity + 1]):
                if seen_by[types[place]] == b:
                    fits[b, k] = True
                    break
