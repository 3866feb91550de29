"""Face 2: contrast reads log Z - score of the positive.

infonce   a positive among in-batch, shared or own negatives, with rules, weights and a queue, or of several banks
clip      two towers: softmax both ways (CLIP), or a sigmoid per pair (SigLIP)
views     anchors among themselves: two views (SimCLR), labels (SupCon)
candidates  banks of keys, and negatives that are none
queue     negatives from earlier batches
sphere    alignment and uniformity
"""

from __future__ import annotations

from partita.contrastive.candidates import AbovePositive, Exclusion, Guide, OtherLabel, sort_by_label
from partita.contrastive.clip import clip_loss, siglip_loss
from partita.contrastive.infonce import info_nce_loss, joint_loss
from partita.contrastive.queue import Queue
from partita.contrastive.readout import ContrastStats, LabelStats
from partita.contrastive.sphere import alignment, uniformity
from partita.contrastive.views import nt_xent_loss, supcon_loss

__all__ = [
    "AbovePositive",
    "ContrastStats",
    "Exclusion",
    "Guide",
    "LabelStats",
    "OtherLabel",
    "Queue",
    "alignment",
    "clip_loss",
    "info_nce_loss",
    "joint_loss",
    "nt_xent_loss",
    "siglip_loss",
    "sort_by_label",
    "supcon_loss",
    "uniformity",
]
