"""A sampler: some negatives by degree, the others uniformly."""

from dataclasses import dataclass, replace

import torch

from kge_torchrec import NegativeSampler
from kge_torchrec.data.negatives import DegreeSampler, UniformSampler


class MixedSampler(NegativeSampler):
    """Samples some negatives by degree, the others uniformly."""

    @dataclass(frozen=True)
    class Options:
        """The mixture."""

        share: float = 0.5
        """Share of the negatives that are sampled in proportion to their degree."""

    def __init__(self, store, options):
        self.share = options.share
        self.by_degree = DegreeSampler(store.degrees(), 1.0)
        self.uniform = UniformSampler(store.num_entities)

    def sample(self, chunks):
        numbers = chunks.numbers
        low, high = numbers / self.share, (numbers - self.share) / (1 - self.share)
        by_degree = self.by_degree.sample(replace(chunks, numbers=low))
        uniform = self.uniform.sample(replace(chunks, numbers=high))
        return torch.where(numbers < self.share, by_degree, uniform)
