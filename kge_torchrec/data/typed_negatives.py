"""Negatives of some kinds: entities that a relation has on a side, or that share a type.

Shapes: C chunks, b triples per chunk, B = C b triples, K candidates per chunk, M members.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from kge_torchrec.config.data import NegativesConfig
from kge_torchrec.data import OTHER, RELATION, SIDES, Side, answer_column
from kge_torchrec.data.negatives import Chunks, NegativeSampler, places_among
from kge_torchrec.data.store.filter_index import anchors_of, keys_of, relations_of
from kge_torchrec.data.store.search import mark_members
from kge_torchrec.data.types import types_of
from kge_torchrec.kernels.library import arrays
from kge_torchrec.kernels.operators import IMPLEMENTATION, distinct

if TYPE_CHECKING:
    from kge_torchrec.data.store import TripleStore


class TypedSampler(NegativeSampler):
    """Base of samplers that take the first candidates of a chunk from entities of some kinds.

    A kind is a type, or the entities that a relation has on a side.  Each of these candidates is
    sampled for one triple of the chunk, chosen at random, and counts for every triple that it has a
    kind in common with.  An entity that has several kinds in common is sampled as much more often.

    Args:
        others: Sampler of all other candidates, and of those for triples without such entities.
        share: Share of a chunk's sampled candidates that are of the kinds.
        members: (M,) ascending `filter_index.keys_of` a kind and each of its entities.
        owners: (O + 1,) where the kinds of each owner start; a triple has one owner of kinds.
        kinds: (P,) the kinds of all owners.
    """

    def __init__(
        self,
        others: NegativeSampler,
        share: float,
        members: np.ndarray,
        owners: np.ndarray,
        kinds: np.ndarray,
    ):
        self.others, self.share = others, share
        self.kinds = torch.tensor(kinds)
        bounds = np.arange(int(kinds.max(initial=-1)) + 2) << 32
        self.starts = torch.from_numpy(np.searchsorted(members, bounds))
        self.members = torch.from_numpy(relations_of(members).astype(np.int32))  # half the cache
        self.before = self.starts.new_zeros(len(kinds) + 1)  # members of the kinds before
        torch.cumsum(self.starts.diff()[self.kinds], 0, out=self.before[1:])
        first, count = torch.tensor(owners[:-1]), torch.tensor(np.diff(owners))
        # As many members as kinds are only the true entity itself, which is no negative.
        total = self.before[torch.tensor(owners)].diff()
        self.of_owner = torch.stack([first, count, total], 1)
        self._most = int(count.max())  # kinds of an owner

    def owner(self, side: Side, triples: Tensor) -> Tensor:
        """Return the owner of the kinds of each triple: (B,)."""
        raise NotImplementedError

    def fits(self, owner: Tensor, candidates: Tensor, chunk: Tensor) -> Tensor:
        """Return whether the candidates (C, K) of chunks (B,) are of a kind of owners (B,).

        Returns:
            (B, K) bool.
        """
        first, count, total = self.of_owner.index_select(0, owner).unbind(1)
        kind = self.kinds.index_select(0, first.clamp(max=len(self.kinds) - 1))
        fits = self._are_members(kind, candidates, chunk)
        for place in range(1, self._most):
            rows = (count > place).nonzero()[:, 0]
            kind = self.kinds.index_select(0, first[rows] + place)
            fits[rows] |= self._are_members(kind, candidates, chunk[rows])
        return fits.logical_or_((total <= count)[:, None])  # any if none is

    def _are_members(self, kind: Tensor, candidates: Tensor, chunk: Tensor) -> Tensor:
        """Return which candidates (C, K) of chunks (B,) are of one kind each (B,): (B, K) bool."""
        if IMPLEMENTATION["ids"](candidates) == "numba":
            found = torch.zeros(len(kind), candidates.shape[1], dtype=torch.bool)
            ends = self.starts[kind], self.starts[kind + 1]
            mark_members(*arrays(self.members, *ends, candidates, chunk, found))
            return found
        return places_among(self._keys, (kind[:, None] << 32) | candidates[chunk])[1]

    @cached_property
    def _keys(self) -> Tensor:
        """(M,) ascending, a kind << 32 | entity for each member."""
        kinds = torch.arange(len(self.starts) - 1, device=self.starts.device)
        return (kinds.repeat_interleave(self.starts.diff()) << 32) | self.members

    def _typed(self, chunks: Chunks) -> int:
        """Return how many of the sampled candidates of a chunk are of the kinds."""
        return max(1, round(self.share * chunks.numbers.shape[1]))

    def sample(self, chunks: Chunks) -> Tensor:
        """Return the candidates of the other sampler, the first ones replaced."""
        ids, triples, typed = self.others.sample(chunks), chunks.triples, self._typed(chunks)
        if not len(triples):
            return ids
        # The whole part of a number times b, which is below b, chooses a triple; the rest chooses
        # an entity for it.
        rest = chunks.numbers[:, :typed] * triples.shape[1]
        place = rest.long()
        rest -= place
        chunk = torch.arange(len(triples), device=place.device)[:, None]
        owner = self.owner(chunks.side, triples[chunk, place].flatten(0, 1))
        first, count, total = self.of_owner.index_select(0, owner).unbind(1)
        place, pair = (rest.view(-1) * total).long(), first
        if self._most > 1:
            place += self.before.index_select(0, first)
            pair = torch.searchsorted(self.before, place, right=True).sub_(1)
            place -= self.before.index_select(0, pair)
        kind = self.kinds.index_select(0, pair.clamp(max=len(self.kinds) - 1))
        place += self.starts.index_select(0, kind)
        chosen = self.members.index_select(0, place.clamp_(max=len(self.members) - 1)).long()
        some = (total > count).view(rest.shape)
        ids[:, :typed] = torch.where(some, chosen.view(rest.shape), ids[:, :typed])
        return ids

    def excluded(self, chunks: Chunks, triples: Tensor, candidates: Tensor) -> Tensor | None:
        """Return which candidates are of no kind of a triple.

        Answers of the batch, which follow the sampled candidates, have to be of a kind where all
        sampled candidates have to be.
        """
        typed = candidates if self.share == 1 else candidates[:, : self._typed(chunks)].contiguous()
        owner = self.owner(chunks.side, triples)
        chunk = torch.arange(len(candidates), device=owner.device)
        chunk = chunk.repeat_interleave(len(triples) // len(candidates))
        # Compare once for all triples of a chunk that have the same kinds.
        first, count, _ = self.of_owner.index_select(0, owner).unbind(1)
        kind = self.kinds[first.clamp(max=len(self.kinds) - 1)]
        kinds = torch.where(count == 1, kind, owner + len(self.starts))
        unique, place = distinct(chunk * (len(self.starts) + len(self.of_owner)) + kinds)
        some = torch.empty_like(unique)
        some.scatter_(0, place, torch.arange(len(place), device=place.device))
        excluded = self.fits(owner[some], typed, chunk[some]).logical_not_()
        excluded = pad(excluded, (0, candidates.shape[1] - typed.shape[1])).index_select(0, place)
        others = self.others.excluded(chunks, triples, candidates)
        return excluded if others is None else excluded | others


class SeenSampler(TypedSampler):
    """Takes entities that the triple's relation has on that side in train.

    This is the local closed-world assumption of Krompass et al. 2015.
    """

    def __init__(self, others: NegativeSampler, share: float, store: TripleStore):
        members, kinds = [], 2 * store.num_relations
        for number, side in enumerate(SIDES):
            # Tails are the anchors of the index for heads, and the other way round.
            queries = store.side_index("train", OTHER[side]).queries
            kind = relations_of(queries) + number * store.num_relations
            members.append(np.sort(keys_of(kind, anchors_of(queries))))
        owners = np.arange(kinds + 1)
        super().__init__(others, share, np.concatenate(members), owners, owners[:-1])
        self._relations = store.num_relations

    def owner(self, side: Side, triples: Tensor) -> Tensor:
        return triples[:, RELATION] + SIDES.index(side) * self._relations


class TypeSampler(TypedSampler):
    """Takes entities that share a type with the triple's own entity."""

    def __init__(self, others: NegativeSampler, share: float, store: TripleStore):
        types = types_of(store)
        members = np.sort(keys_of(types.ids, types.entities))
        super().__init__(others, share, members, types.indptr, types.ids)

    def owner(self, side: Side, triples: Tensor) -> Tensor:
        return triples[:, answer_column(side)]


def typed_sampler(
    others: NegativeSampler, config: NegativesConfig, store: TripleStore
) -> NegativeSampler:
    """Return the sampler that negatives.among names, over one that samples among all entities.

    Raises:
        DataError: The store has no types.
    """
    kind = SeenSampler if config.among == "seen" else TypeSampler
    return kind(others, config.among_share, store)
