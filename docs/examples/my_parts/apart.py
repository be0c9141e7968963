"""A regularizer of whole triples: the distance of their entities."""

from kge_torchrec import TripleRegularizer


class Apart(TripleRegularizer):
    """Squared distance of the triple's two entities."""

    def penalty_of_triples(self, scorer, anchor, relation, answer, side):
        difference = scorer.vectors(anchor) - scorer.vectors(answer)
        return difference.square().sum(-1)
