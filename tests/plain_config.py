"""Values of the keys whose default depends on the graph: the base config of the tests."""

PLAIN = {
    "model.dim": 128,
    "model.init": "normal",
    "model.init_scale": 1e-3,
    "loss.n3": 0.0,
    "loss.relation_weight": 0.0,
    "negatives.count": 512,
    "train.epochs": 50,
    "train.batch_size": 1024,
    "train.lr": 0.1,
    "evaluation.every": 5,
    "evaluation.patience": 0,
    "evaluation.max_triples": 0,
}
