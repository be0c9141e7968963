"""Ranking by the definition: the full score matrix, sets for the filter, sorting for the ranks."""

import torch


def oracle_ranks(scorer, table, triples, known=(), side="tail"):
    """(optimistic, pessimistic) lists of the true answers' ranks.

    table: (N, D); triples: (T, 3); known: iterable of (head, relation, tail) to filter out.
    NaN candidates come first, a NaN true score last of all N.
    """
    anchor_at, target_at = (0, 2) if side == "tail" else (2, 0)
    answers = {}
    for triple in map(tuple, known):
        query = triple[anchor_at], triple[1]
        answers.setdefault(query, set()).add(triple[target_at])
    optimistic, pessimistic = [], []
    for triple, row in zip(triples.tolist(), dense_scores(scorer, table, triples, side),
                           strict=True):  # fmt: skip
        anchor, relation, target = triple[anchor_at], triple[1], triple[target_at]
        removed = answers.get((anchor, relation), set()) - {target}
        first, last = _rank(row.tolist(), target, removed)
        optimistic.append(first)
        pessimistic.append(last)
    return optimistic, pessimistic


def oracle_top_k(scorer, table, anchors, relations, side, k, exclude=()):
    """Per query the ids of its best k entities, by score and then by smaller id."""
    pairs = set(exclude)
    queries = torch.stack([anchors, relations, anchors], 1)
    results = []
    for query, row in enumerate(dense_scores(scorer, table, queries, side)):
        row = torch.where(row.isnan(), -torch.inf, row).tolist()
        order = sorted(range(len(row)), key=lambda entity: (-row[entity], entity))
        results.append([entity for entity in order if (query, entity) not in pairs][:k])
    return results


@torch.no_grad()
def dense_scores(scorer, table, triples, side):
    """(T, N) scores, with rows added to both sides so that every score has the same bits."""
    anchor = table[triples[:, 0 if side == "tail" else 2]]
    count = len(triples)
    anchor = torch.cat([anchor, anchor.new_zeros(64, anchor.shape[1])])
    relation = torch.cat([triples[:, 1], triples.new_zeros(64)])
    rows = torch.cat([table, table.new_zeros(64, table.shape[1])])
    query = scorer.encode(anchor[None], relation[None], side)
    return scorer.matrix(query, rows[None])[0, :count, : len(table)]


def _rank(row, target, removed):
    true = row[target]
    if true != true:
        return len(row), len(row)
    rest = [s for entity, s in enumerate(row) if entity != target and entity not in removed]
    # sorted() needs a total order: NaN candidates are taken as better than anything.
    ordered = sorted([float("inf") if s != s else s for s in rest], reverse=True)
    better = sum(s > true for s in ordered) + sum(s != s and true == float("inf") for s in rest)
    ties = sum(s == true for s in rest)
    return 1 + better, 1 + better + ties
