"""A sampler that looks at triples: Bernoulli sampling (Wang et al. 2014)."""

import numpy as np
import torch

from kge_torchrec import NegativeSampler
from kge_torchrec.data.negatives import UniformSampler


class BernoulliSampler(NegativeSampler):
    """Corrupts heads with probability tph / (tph + hpt) (Wang et al. 2014)."""

    def __init__(self, store, options):
        self.uniform = UniformSampler(store.num_entities)
        head, relation, tail = np.asarray(store.train, np.int64).T
        count = np.bincount(relation, minlength=store.num_relations)
        heads, tails = (
            np.bincount(np.unique(np.stack([relation, end]), axis=1)[0], minlength=len(count))
            for end in (head, tail)
        )
        # Tails per head are count / heads, and heads per tail are count / tails.
        self.head_share = torch.from_numpy(tails / np.maximum(heads + tails, 1))

    def sample(self, chunks):
        return self.uniform.sample(chunks)

    def excluded(self, chunks, triples, candidates):
        share = self.head_share[triples[:, 1]]
        if chunks.side == "tail":
            share = 1 - share
        count = (share * candidates.shape[1]).round().clamp(min=1)
        return torch.arange(candidates.shape[1], device=count.device) >= count[:, None]
