"""Faults in answers to questions."""

from faults import Fault

ANSWERS = "answers/"

FAULTS = [
    # answers
    Fault("known relations are predicted", ANSWERS + "predictions.py",
          "row[exclude.relations_between(head, tail)] = True", "pass",
          "tests/answers/test_predictions.py -k is_known"),
    Fault("known answers above a score are listed", ANSWERS + "predictions.py",
          "erase(scores, first, left_out, torch.nan)", "pass",
          "tests/answers/test_choice.py -k above_a_score"),
    Fault("a new link must beat the best so far", ANSWERS + "links.py",
          "float(self.triples.scores[-1])", "float(self.triples.scores[0])",
          "tests/answers/test_choice.py -k brute_force"),
    Fault("new links of this rank alone", ANSWERS + "links.py",
          "model.processes.gather(best.triples)", "[best.triples]", "tests/answers/test_ranks.py"),
    Fault("an export asks other ranks", "embeddings/backend.py",
          "1 if self.alone else world_size()", "world_size()", "tests/answers/test_ranks.py"),
    Fault("biases make neighbours", ANSWERS + "nearest.py",
          "rows[..., : rows.shape[-1] - self.scorer.bias_columns]", "rows",
          "tests/answers/test_nearest.py -k by_hand"),
    Fault("a calibration of other parameters counts", ANSWERS + "calibration.py",
          "return (self.step, self.data) == (step, data)", "return True",
          "tests/answers/test_calibration.py -k other_steps"),
    Fault("true triples count as corruptions", ANSWERS + "corruptions.py",
          "left = left[known]", "left = left[:0]",
          "tests/answers/test_calibration.py -k corruptions_are_false"),
    Fault("one threshold for all relations", ANSWERS + "classification.py",
          "thresholds[relation] = best_threshold(", "best_threshold(",
          "tests/answers/test_classification.py -k each_relation"),
    Fault("not is forgotten", ANSWERS + "fuzzy_answers.py",
          "1 - self.members(other).degrees", "self.members(other).degrees",
          "tests/answers/test_ask.py -k dense"),
    Fault("softmax over this rank's entities", ANSWERS + "fuzzy_answers.py",
          "total = torch.stack(parts).logsumexp(0)", "pass", "tests/answers/test_ranks.py"),
]  # fmt: skip
