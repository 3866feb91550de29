"""Partita's losses in the call forms of other libraries; those libraries stay optional and are not imported.

sentence_transformers   a loss of a model and columns of features
open_clip               losses of two towers' features and a logit scale
metric_learning         a loss of embeddings and labels, as pytorch-metric-learning calls it
"""

from __future__ import annotations
