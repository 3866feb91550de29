"""Partita's losses in the call forms of other libraries; those libraries stay optional and are not imported.

sentence_transformers   a loss of a model and columns of features
open_clip               losses of two towers' features and a logit scale
metric_learning         a loss of embeddings and labels, as pytorch-metric-learning calls it
trl                     what its trainers take log-probabilities, entropy and divergences from
cut_cross_entropy       linear_cross_entropy(e, c, targets)
liger                   LigerFusedLinearCrossEntropyLoss and its function
lm_eval                 a model of lm-evaluation-harness that scores without logits
verl                    log-probabilities and entropy of tokens, as its trainers call for them
"""

from __future__ import annotations

from typing import Any

from partita._later import load


def __getattr__(name: str) -> Any:
    return load(__name__, name, {})
